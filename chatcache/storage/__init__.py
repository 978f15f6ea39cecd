"""Conversation and API key storage on SQLite or Redis. Start at `open`."""
