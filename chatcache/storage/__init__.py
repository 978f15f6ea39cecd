"""Storage of conversations and API keys on SQLite or Redis, behind the contracts of `conversations.store` and `auth`.

Reading order: open, sqlite, sqlite_schema, sqlite_writer; then redis_layout, redis, redis_client.
"""
