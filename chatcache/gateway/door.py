"""Who is let in: requests are counted before anything is made of their text, so that a flood costs its refusals only.

    request --- door: counted by characters --- tokenised --- engine: counted by tokens, queued

The limits are the engine's own (`max_num_waiting`, `max_waiting_tokens`); the door adds what is on its way there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chatcache.engine.client import EngineClient
from chatcache.errors import Overloaded

CHARS_PER_TOKEN = 4  # of text that nobody has tokenised yet; the engine counts again, exactly


class Door:
    """Counts what has come in and is not the engine's yet."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._num_requests = 0
        self._num_tokens = 0

    @asynccontextmanager
    async def entering(self, num_chars: int) -> AsyncIterator[None]:
        """Make a prompt of so much text and submit it, inside the block. Raises: Overloaded before it is entered."""
        health = await self._engine.health()
        num_requests = health.num_waiting + self._num_requests
        num_tokens = num_chars // CHARS_PER_TOKEN
        num_before = health.num_waiting_tokens + self._num_tokens
        if health.num_waiting and num_requests >= health.max_num_waiting:
            raise Overloaded(f"{num_requests} requests are waiting already; try again later")
        if num_requests and num_before + num_tokens > health.max_waiting_tokens > 0:
            raise Overloaded(
                f"about {num_before} prompt tokens are waiting already, of at most {health.max_waiting_tokens}; "
                "try again later"
            )
        self._num_requests += 1
        self._num_tokens += num_tokens
        try:
            yield
        finally:
            self._num_requests -= 1
            self._num_tokens -= num_tokens
