"""How long a response goes on that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from chatcache.gateway.response_log import ResponseLog

_FIRST_READER_S = 2.0  # whoever asked for a response needs a moment to begin reading it


class Lifetime:
    """Ends a response `ttl_s` after the last reader of its log left; None lets it run. Belongs to one event loop."""

    def __init__(self, log: ResponseLog, ttl_s: float | None, end: Callable[[], Awaitable[object]]) -> None:
        self._log = log
        self._ttl_s = ttl_s
        self._end = end
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Watch the readers from now on; there need not be one yet."""
        self._log.on_readers = self._readers
        if self._ttl_s is not None:
            self._arm(max(self._ttl_s, _FIRST_READER_S))

    def shorten(self) -> None:
        """End it with its last reader: now, if there is none."""
        self._ttl_s = 0.0
        if self._log.on_readers is not None:
            self._readers(self._log.num_readers)

    def stop(self) -> None:
        """The response is over."""
        self._log.on_readers = None
        self._disarm()

    def _readers(self, num_readers: int) -> None:
        self._disarm()
        if num_readers == 0 and self._ttl_s is not None:
            self._arm(self._ttl_s)

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        async def end() -> None:
            await self._end()

        self._ending = asyncio.create_task(end())
