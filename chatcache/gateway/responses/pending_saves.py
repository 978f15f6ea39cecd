"""Responses that ended while the store took nothing: kept here, and saved as soon as it can."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from chatcache.conversations.store import StoreUnavailableError
from chatcache.errors import NotFoundError

log = logging.getLogger(__name__)

MAX_PENDING_SAVES = 1000
_RETRY_S = 0.5

Save = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Kept:
    names: frozenset[str]
    save: Save


class PendingSaves:
    """Belongs to one event loop. Beyond `MAX_PENDING_SAVES` the oldest are given up."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._saving = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def add(self, response_id: str, names: Sequence[str], save: Save) -> None:
        """Save a response when that can be done. `names`: ids by which others may want to continue it."""
        self._kept[response_id] = _Kept(frozenset((response_id, *names)), save)
        log.warning("%s could not be saved yet; %d wait for the store", response_id, len(self._kept))
        if len(self._kept) > MAX_PENDING_SAVES:
            first = next(iter(self._kept))
            del self._kept[first]
            log.error("%s is not saved: too many wait for the store", first)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._retry())

    async def flush(self, *names: str | None) -> None:
        """Save what can be saved now. Raises: StoreUnavailableError if what has one of these names still cannot."""
        if not self._kept:
            return
        try:
            await self._save_all()
        except StoreUnavailableError:
            if any(name in kept.names for kept in self._kept.values() for name in names):
                raise

    async def close(self) -> None:
        """Try once more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self.flush()
        finally:
            for response_id in self._kept:
                log.error("%s is not saved: the store did not come back in time", response_id)

    async def _retry(self) -> None:
        while self._kept:
            await asyncio.sleep(_RETRY_S)
            await self.flush()

    async def _save_all(self) -> None:
        """Raises: StoreUnavailableError at the first that cannot be saved."""
        async with self._saving:
            for response_id, kept in list(self._kept.items()):
                try:
                    await kept.save()
                except StoreUnavailableError:
                    raise
                except NotFoundError:
                    log.info("%s: its conversation was deleted before it could be saved", response_id)
                except Exception:
                    log.exception("%s is not saved", response_id)
                self._kept.pop(response_id, None)
