"""Stores checkpoints of all running responses about once a second."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from chatcache.conversations.checkpoints import ReplyCheckpoint
from chatcache.conversations.store import ConversationStore, StoreUnavailableError
from chatcache.gateway.responses.registry import ResponseRegistry, Run

log = logging.getLogger(__name__)

CHECKPOINT_INTERVAL_S = 0.75  # with the time to write them, output is stored within a second
_MAX_BATCH = 64  # responses whose checkpoints are written at once


class Checkpointer:
    """Collects new output of running responses and stores it in batches; tokens themselves cost nothing more."""

    def __init__(self, responses: ResponseRegistry, store: ConversationStore) -> None:
        self._responses = responses
        self._store = store

    async def loop(self) -> None:
        """Store checkpoints until cancelled. While the store is unavailable, the output waits for the next round."""
        while True:
            await asyncio.sleep(CHECKPOINT_INTERVAL_S)
            try:
                with contextlib.suppress(StoreUnavailableError):
                    await self.save()
            except Exception:
                log.exception("checkpoints of running responses could not be stored")

    async def save(self) -> None:
        """Store the new output of all running responses. Raises: StoreUnavailableError."""
        batch: list[tuple[Run, ReplyCheckpoint]] = []
        for run in self._responses.running():
            checkpoint = run.checkpoint()
            if checkpoint is not None:
                batch.append((run, checkpoint))
                await asyncio.sleep(0)  # streams go on meanwhile
            if len(batch) == _MAX_BATCH:
                await self._write(batch)
                batch = []
        await self._write(batch)

    async def _write(self, batch: list[tuple[Run, ReplyCheckpoint]]) -> None:
        if batch:
            await self._store.checkpoint([checkpoint for _, checkpoint in batch])
            for run, _ in batch:
                run.confirm_checkpoint()
