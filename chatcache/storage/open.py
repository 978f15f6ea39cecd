"""Selection of the store that the server configuration names."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from chatcache.auth import KeyStore
from chatcache.config import ServerConfig
from chatcache.conversations.store import ConversationStore, StoreUnusableError
from chatcache.storage.sqlite import SqliteStore
from chatcache.storage.sqlite_schema import migrate, open_error
from chatcache.storage.sqlite_tenants import SqliteKeys
from chatcache.storage.sqlite_threads import SqliteWriter

if sys.platform != "win32":
    import fcntl


def lock_store(config: ServerConfig) -> AbstractContextManager[object]:
    """Lock the SQLite file of a server until the returned context or the process ends; Redis needs no lock.

    A second server would end the responses that the first one is running. The lock is on a file of its own, because
    SQLite loses its locks when another descriptor of its file is closed. Raises: StoreUnusableError.
    """
    if config.redis or config.db == ":memory:" or sys.platform == "win32":
        return nullcontext()
    try:
        file = os.fdopen(os.open(f"{os.path.realpath(config.db)}-lock", os.O_CREAT | os.O_RDWR, 0o600), "rb")
    except OSError:  # SQLite will report what is wrong with the folder
        return nullcontext()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StoreUnusableError(
            f"{config.db}: another chatcache server uses this file; give each server its own, for example --db other.db"
        ) from None
    except OSError:  # a file system without locks
        pass
    return file


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
