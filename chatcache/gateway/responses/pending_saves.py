"""Responses that ended while the store was unavailable: kept in memory and saved later."""

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
class _PendingSave:
    names: frozenset[str]
    save: Save


class PendingSaves:
    """Retries failed saves. Belongs to one event loop.

    Beyond `MAX_PENDING_SAVES` the oldest are discarded.
    """

    def __init__(self) -> None:
        self._pending: dict[str, _PendingSave] = {}
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def add(self, response_id: str, names: Sequence[str], save: Save) -> None:
        """Save a response as soon as the store accepts it.

        `names`: ids by which a request may continue the response.
        """
        self._pending[response_id] = _PendingSave(frozenset((response_id, *names)), save)
        log.warning("%s could not be saved yet; %d responses wait for the store", response_id, len(self._pending))
        if len(self._pending) > MAX_PENDING_SAVES:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            log.error("%s is lost: too many responses wait for the store", oldest)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._retry())

    async def flush(self, *names: str | None) -> None:
        """Save everything that can be saved now.

        Raises: StoreUnavailableError if a response with one of these names is still not saved.
        """
        if not self._pending:
            return
        try:
            await self._save_all()
        except StoreUnavailableError:
            if any(name in pending.names for pending in self._pending.values() for name in names):
                raise

    async def close(self) -> None:
        """Try to save once more, and log what is lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self.flush()
        finally:
            for response_id in self._pending:
                log.error("%s is lost: the store did not become available in time", response_id)

    async def _retry(self) -> None:
        while self._pending:
            await asyncio.sleep(_RETRY_S)
            await self.flush()

    async def _save_all(self) -> None:
        """Save all in order. Raises: StoreUnavailableError at the first that fails."""
        async with self._lock:
            for response_id, pending in list(self._pending.items()):
                try:
                    await pending.save()
                except StoreUnavailableError:
                    raise
                except NotFoundError:
                    log.info("%s: its conversation was deleted before it could be saved", response_id)
                except Exception:
                    log.exception("%s could not be saved", response_id)
                self._pending.pop(response_id, None)
