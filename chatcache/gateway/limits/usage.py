"""How many tokens each key has used today (UTC): as the store knows it, and what it has yet to be told.

A store that does not answer keeps nobody out: what is used meanwhile is kept here and stored later. Several gateways
over one store hear of each other's usage at every flush. A gateway that dies takes what it had not stored.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from chatcache.auth import DAY_S, utc_day
from chatcache.conversations.store import StoreUnavailableError

log = logging.getLogger(__name__)


class UsageStore(Protocol):
    """The part of a key store that is needed here."""

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None: ...

    async def usage(self, day: int) -> Mapping[str, int]: ...


class DailyUsage:
    """One gateway's books. Without a `store`, kept until the process ends."""

    def __init__(self, *, wall_s: Callable[[], float] = time.time) -> None:
        self.store: UsageStore | None = None
        self.wall_s = wall_s
        self._stored: Mapping[str, int] = {}
        self._stored_day = -1
        self._unstored: dict[int, Counter[str]] = {}
        self._writer = secrets.token_hex(8)
        self._number = 0
        self._doubtful: dict[int, tuple[int, Counter[str]]] = {}  # sent under a number, and not known to be stored
        self._turn = asyncio.Lock()

    @property
    def today(self) -> int:
        return utc_day(self.wall_s())

    def used(self, key_id: str) -> int:
        """Tokens used today, as far as known."""
        stored = self._stored.get(key_id, 0) if self._stored_day == self.today else 0
        return stored + self._unstored.get(self.today, Counter())[key_id]

    def day_ends_in_s(self) -> int:
        """Seconds to the next day, rounded up."""
        return DAY_S - int(self.wall_s()) % DAY_S

    def add(self, key_id: str, num_tokens: int) -> None:
        if num_tokens:
            self._unstored.setdefault(self.today, Counter())[key_id] += num_tokens

    async def load(self) -> None:
        """Learn what was used before this gateway's first request of the day."""
        if self.store is None or self._stored_day == self.today:
            return
        async with self._turn:
            if self._stored_day == self.today:
                return
            try:
                await self._read(self.store)
            except StoreUnavailableError:
                log.warning("the store does not tell what keys have used today")

    async def flush(self) -> None:
        """Store what it has not been told, and read what others added. What cannot be stored now stays."""
        if self.store is None:
            self._unstored = {day: tokens for day, tokens in self._unstored.items() if day == self.today}
            return
        if not self._unstored and self._stored_day < 0:
            return  # nobody's days are counted here
        async with self._turn:
            try:
                for day in list(self._unstored):
                    if day in self._doubtful:
                        await self._send(self.store, day)
                    if day in self._unstored:
                        await self._send(self.store, day)
                await self._read(self.store)
            except StoreUnavailableError:
                log.warning("the store takes no usage of keys just now; it is kept")

    async def _send(self, store: UsageStore, day: int) -> None:
        """Have a day's tokens stored: those that it may have stored already as they were sent then, or else all."""
        if day not in self._doubtful:
            self._number += 1
            self._doubtful[day] = self._number, Counter(self._unstored[day])
        number, tokens = self._doubtful[day]
        await store.add_usage(day, tokens, writer=self._writer, number=number)
        del self._doubtful[day]
        self._unstored[day] -= tokens  # more may have come meanwhile
        if not self._unstored[day]:
            del self._unstored[day]
        if day == self._stored_day:
            self._stored = Counter(self._stored) + tokens

    async def _read(self, store: UsageStore) -> None:
        day = self.today
        self._stored, self._stored_day = await store.usage(day), day
