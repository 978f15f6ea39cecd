"""Servers over each kind of store, for tests of what people rely on whatever keeps their conversations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from chatcache.config import ServerConfig
from tests.gateway.serving import Server
from tests.support.redis_servers import RedisServer, redis_server

KINDS = ("sqlite", "redis")


@contextlib.contextmanager
def keeping(kind: str, folder: Path) -> Iterator[RedisServer | str]:
    """A store of that kind, which outlives gateways: a running Redis server, or the name of a file."""
    if kind == "sqlite":
        yield str(folder / "chat.db")
        return
    with redis_server(folder / "redis") as server:
        yield server


def server_on(store: RedisServer | str, *, api_keys: tuple[str, ...] = ()) -> Server:
    """A gateway over a Redis server, or the file of that name."""
    place = {"redis": store.url} if isinstance(store, RedisServer) else {"db": store}
    return Server(ServerConfig(sse_keep_alive_interval_s=0, api_keys=api_keys, **place))  # type: ignore[arg-type]
