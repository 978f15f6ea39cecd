"""How many tokens each key has used today (UTC): as the store knows it, and what it has yet to be told.

A store that does not answer keeps nobody out: what is used meanwhile is kept here and stored later. Several gateways
over one store hear of each other's usage at every flush.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from chatcache.chat.store import StoreUnavailable

log = logging.getLogger(__name__)

DAY_S = 86_400


class UsageStore(Protocol):
    """The part of a key store that is needed here. `day` is "2026-11-21"."""

    async def add_usage(self, key_id: str, day: str, tokens: int) -> None: ...

    async def usage(self, key_id: str, day: str) -> int: ...


class DayUsage:
    """One gateway's books. Without a store, kept until the process ends."""

    def __init__(self, store: UsageStore | None = None, *, wall_s: Callable[[], float] = time.time) -> None:
        self.store = store
        self._wall_s = wall_s
        self._stored: dict[tuple[str, str], int] = {}
        self._unstored: Counter[tuple[str, str]] = Counter()
        self._turn = asyncio.Lock()

    def used(self, key_id: str) -> int:
        """Tokens used today, as far as known."""
        key = key_id, self._day()
        return self._stored.get(key, 0) + self._unstored[key]

    def day_ends_in_s(self) -> int:
        """Seconds to the next day, rounded up."""
        return DAY_S - int(self._wall_s()) % DAY_S

    def add(self, key_id: str, num_tokens: int) -> None:
        if num_tokens:
            self._unstored[key_id, self._day()] += num_tokens

    async def look(self, key_id: str) -> None:
        """Learn what the key used before this gateway heard of it today."""
        key = key_id, self._day()
        if self.store is None or key in self._stored:
            return
        async with self._turn:
            if key in self._stored:
                return
            try:
                self._stored[key] = await self.store.usage(*key)
            except StoreUnavailable:
                log.warning("the store does not tell what keys have used today")

    async def flush(self) -> None:
        """Store what it has not been told, and read what others added. What cannot be stored now stays."""
        today = self._day()
        if self.store is None:
            self._unstored = Counter({key: count for key, count in self._unstored.items() if key[1] == today})
            return
        async with self._turn:
            try:
                for key in list(self._unstored):
                    num_tokens = self._unstored[key]
                    await self.store.add_usage(*key, num_tokens)
                    self._stored[key] = self._stored.get(key, 0) + num_tokens
                    self._unstored[key] -= num_tokens
                    if not self._unstored[key]:
                        del self._unstored[key]
                self._stored = {key: count for key, count in self._stored.items() if key[1] == today}
                for key in list(self._stored):
                    self._stored[key] = await self.store.usage(*key)
            except StoreUnavailable:
                log.warning("the store takes no usage just now; it is kept")

    def _day(self) -> str:
        return time.strftime("%Y-%m-%d", time.gmtime(self._wall_s()))
