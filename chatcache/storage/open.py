"""Selection of the store that the server configuration names."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from chatcache.auth import KeyStore
from chatcache.config import ServerConfig
from chatcache.conversations.store import ConversationStore
from chatcache.storage.sqlite import SqliteStore
from chatcache.storage.sqlite_schema import migrate, open_error
from chatcache.storage.sqlite_tenants import SqliteKeys
from chatcache.storage.sqlite_threads import SqliteWriter


def open_store(config: ServerConfig) -> ConversationStore:
    """Open the Redis server of `config.redis` if set, else the SQLite file `config.db`.

    Raises: StoreUnusableError with the reason.
    """
    if not config.redis:
        return SqliteStore(config.db)
    from chatcache.storage.redis import RedisStore  # imported here because a SQLite store does not need redis-py

    return RedisStore(config.redis)


@asynccontextmanager
async def open_keys(config: ServerConfig) -> AsyncIterator[KeyStore]:
    """Open only the API keys, while a server may be running on the same store.

    Raises: StoreUnusableError.
    """
    if config.redis:
        from chatcache.storage.redis import RedisKeys, check_layout
        from chatcache.storage.redis_client import SLOW_TIMEOUT_S, RedisConnection

        connection = RedisConnection(config.redis, check_layout, timeout_s=SLOW_TIMEOUT_S)
        try:
            yield RedisKeys(connection)
        finally:
            await connection.close()
        return
    path = Path(config.db)
    try:
        writer = await asyncio.to_thread(SqliteWriter, path, lambda db: migrate(db, path))
    except sqlite3.Error as error:
        raise open_error(path, error) from error
    try:
        yield SqliteKeys(writer)
    finally:
        await asyncio.to_thread(writer.close)
