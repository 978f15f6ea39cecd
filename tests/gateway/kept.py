"""Servers on each kind of conversation store."""

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
    """Yield a store that outlives gateways: a Redis server, or the name of a SQLite file."""
    if kind == "sqlite":
        yield str(folder / "chat.db")
        return
    with redis_server(folder / "redis") as server:
        yield server


def server_on(store: RedisServer | str, *, api_keys: tuple[str, ...] = ()) -> Server:
    """Start a gateway on this store."""
    place = {"redis": store.url} if isinstance(store, RedisServer) else {"db": store}
    return Server(ServerConfig(sse_keep_alive_interval_s=0, api_keys=api_keys, **place))  # type: ignore[arg-type]
