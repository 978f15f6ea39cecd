"""Which store a server's settings ask for."""

from __future__ import annotations

from chatcache.chat.store import ConversationStore
from chatcache.chat.store_sqlite import SqliteStore
from chatcache.config import ServerConfig


def open_store(config: ServerConfig) -> ConversationStore:
    """The Redis server of `config.redis`, if it names one, else the SQLite file `config.db`.

    Raises: StoreUnusable saying what is wrong with it.
    """
    if not config.redis:
        return SqliteStore(config.db)
    from chatcache.chat.store_redis import RedisStore  # redis-py, which a file does not need

    return RedisStore(config.redis)
