"""Handlers of the HTTP API, one module per group of routes, and the code that they share.

Reading order: chat_completions, completions, generation, messages, params, logprobs, sse; conversations, files, tokens,
pagination, idempotency; models, sessions, cache.
"""
