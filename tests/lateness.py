"""How late this process itself is: what a busy machine takes is not what the code takes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

_BEAT_S = 0.01


class Lateness:
    """`total_s`: by how much all beats of the event loop came late, together."""

    total_s = 0.0

    def spared(self, took_s: float) -> float:
        """What something took at least, however often the loop stood still under it."""
        return took_s - self.total_s


@contextlib.asynccontextmanager
async def measured() -> AsyncIterator[Lateness]:
    """Measure it while the block runs."""
    lateness = Lateness()

    async def beat() -> None:
        while True:
            due_s = time.monotonic() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            lateness.total_s += max(0.0, time.monotonic() - due_s)

    beating = asyncio.create_task(beat())
    try:
        yield lateness
    finally:
        beating.cancel()
