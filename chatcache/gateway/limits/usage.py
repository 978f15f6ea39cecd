"""Tokens that each API key has used today (UTC): stored counts plus counts not yet stored.

Usage is kept in memory and stored later while the store does not answer, so that an outage does not reject requests.
Several gateways on one store see each other's usage after each flush. A gateway that is killed loses unstored counts.
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
    """The methods of a key store that daily usage needs."""

    async def add_usage(self, day: int, tokens: Mapping[str, int], *, writer: str, number: int) -> None: ...

    async def usage(self, day: int) -> Mapping[str, int]: ...


class DailyUsage:
    """Daily token counts of one gateway. Without a `store` they last until the process ends.

    Counts are sent with a writer id and a number, so that the store can ignore a batch that it already has.
    """

    def __init__(self, *, wall_s: Callable[[], float] = time.time) -> None:
        self.store: UsageStore | None = None
        self.wall_s = wall_s
        self._stored: Mapping[str, int] = {}
        self._stored_day = -1
        self._unstored: dict[int, Counter[str]] = {}
        self._writer = secrets.token_hex(8)
        self._last_number = 0
        self._unconfirmed: dict[int, tuple[int, Counter[str]]] = {}  # sent, with no reply yet: day -> number, counts
        self._lock = asyncio.Lock()

    @property
    def today(self) -> int:
        return utc_day(self.wall_s())

    def used(self, key_id: str) -> int:
        """Tokens used today, by all gateways as of the last read plus unstored ones."""
        stored = self._stored.get(key_id, 0) if self._stored_day == self.today else 0
        return stored + self._unstored.get(self.today, Counter())[key_id]

    def day_ends_in_s(self) -> int:
        """Seconds until the next day (UTC), rounded up."""
        return DAY_S - int(self.wall_s()) % DAY_S

    def add(self, key_id: str, num_tokens: int) -> None:
        if num_tokens:
            self._unstored.setdefault(self.today, Counter())[key_id] += num_tokens

    async def load(self) -> None:
        """Read today's stored usage, unless it was read already."""
        if self.store is None or self._stored_day == self.today:
            return
        async with self._lock:
            if self._stored_day == self.today:
                return
            try:
                await self._read(self.store)
            except StoreUnavailableError:
                log.warning("could not read today's token usage from the store")

    async def flush(self) -> None:
        """Store the unstored counts and read those of other gateways. Keep what cannot be stored."""
        if self.store is None:
            self._unstored = {day: tokens for day, tokens in self._unstored.items() if day == self.today}
            return
        if not self._unstored and self._stored_day < 0:
            return  # no key has a daily limit
        async with self._lock:
            try:
                for day in list(self._unstored):
                    if day in self._unconfirmed:
                        await self._send(self.store, day)
                    if day in self._unstored:
                        await self._send(self.store, day)
                await self._read(self.store)
            except StoreUnavailableError:
                log.warning("could not store token usage; keeping it in memory")

    async def _send(self, store: UsageStore, day: int) -> None:
        """Store the counts of a day.

        A batch that may have been stored already is sent again unchanged, under its old number.
        """
        if day not in self._unconfirmed:
            self._last_number += 1
            self._unconfirmed[day] = self._last_number, Counter(self._unstored[day])
        number, tokens = self._unconfirmed[day]
        await store.add_usage(day, tokens, writer=self._writer, number=number)
        del self._unconfirmed[day]
        self._unstored[day] -= tokens  # more may have been added since
        if not self._unstored[day]:
            del self._unstored[day]
        if day == self._stored_day:
            self._stored = Counter(self._stored) + tokens

    async def _read(self, store: UsageStore) -> None:
        day = self.today
        self._stored, self._stored_day = await store.usage(day), day
