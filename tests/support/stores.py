"""Fixtures that run a test once with each implementation of the conversation store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from chatcache.conversations.store import ConversationStore
from chatcache.storage import redis_client, sqlite_schema
from chatcache.storage.redis import RedisStore
from chatcache.storage.sqlite import SqliteStore
from tests.support.redis_servers import RedisServer, redis_server

IMPLEMENTATIONS: dict[str, Callable[[Path], ConversationStore]] = {
    "sqlite": lambda folder: SqliteStore(folder / "chat.db"),
    "sqlite-without-fts5": lambda folder: SqliteStore(folder / "chat.db"),
}


@pytest.fixture(scope="session")
def running_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Start one Redis server, configured as the documentation says, for all tests of the package."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def empty_redis(running_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisServer:
    """A server that never goes down: on a busy machine its answers may take long."""
    monkeypatch.setattr(redis_client, "TIMEOUT_S", redis_client.SLOW_TIMEOUT_S)
    running_redis.admin.flushall()
    return running_redis


@pytest.fixture(params=[*IMPLEMENTATIONS, "redis"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ConversationStore]:
    if request.param == "sqlite-without-fts5":
        monkeypatch.setattr(sqlite_schema, "has_fts5", lambda db: False)
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("empty_redis")
        store: ConversationStore = RedisStore(server.url)
    else:
        store = IMPLEMENTATIONS[request.param](tmp_path)
    yield store
    await store.close()
