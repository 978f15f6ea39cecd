"""Servers over each kind of store, for tests of what people rely on whatever keeps their conversations."""

from __future__ import annotations

from chatcache.config import ServerConfig
from tests.chat.redis_servers import RedisServer
from tests.gateway.serving import Server


def server_on(store: RedisServer | str, *, api_keys: tuple[str, ...] = ()) -> Server:
    """A gateway over a Redis server, or the file of that name."""
    place = {"redis": store.url} if isinstance(store, RedisServer) else {"db": store}
    return Server(ServerConfig(sse_keep_alive_interval_s=0, api_keys=api_keys, **place))  # type: ignore[arg-type]
