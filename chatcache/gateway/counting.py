"""Texts that are only counted, or explained: nobody pays for that, so long ones wait for one another.

The engine has no part in it, and no limit of a key counts it. Minutes of it, sent within a second, would hold up every
thread, and so whatever of everybody's needs one: bodies to be read, prompts to be made, conversations to be shown.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from chatcache.errors import RateLimited

SHORT_BYTES = 16_384
MAX_AT_ONCE = 2
MAX_WAITING_BYTES = 32 << 20  # of an owner, the one whose turn it is included


class Counting:
    """One at a time for each owner, `MAX_AT_ONCE` for all."""

    def __init__(self) -> None:
        self._lines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_bytes: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, owner: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait for it, with a text of so many bytes; a short one need not.

        Raises: RateLimited when too much of the owner waits already.
        """
        if num_bytes <= SHORT_BYTES:
            yield
            return
        if self._num_bytes[owner] + num_bytes > MAX_WAITING_BYTES and self._num_bytes[owner]:
            raise RateLimited(f"{self._num_bytes[owner]} bytes of text are being counted already; try again later")
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = asyncio.Lock()
        self._num_bytes[owner] += num_bytes
        try:
            async with line, self._places:
                yield
        finally:
            self._num_bytes[owner] -= num_bytes
            if not self._num_bytes[owner]:
                del self._num_bytes[owner]
