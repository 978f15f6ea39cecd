"""Storage of conversations and API keys on SQLite or Redis.

The contracts are `conversations.store.ConversationStore` and `auth.KeyStore`.

Reading order: open, sqlite, sqlite_schema, sqlite_threads; then redis_layout, redis, redis_reads, redis_client.
"""
