"""Scheduling delay of the test process, subtracted from measured times on a busy machine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

_INTERVAL_S = 0.01


class LoopDelay:
    """Total delay of the event loop while it was measured, in seconds (`total_s`)."""

    total_s = 0.0
    due_s = float("inf")  # of the wake-up that has not come yet

    def subtract_from(self, elapsed_s: float) -> float:
        """Return a lower bound of what an operation took without the delays of the event loop."""
        return elapsed_s - self.total_s - max(0.0, time.monotonic() - self.due_s)


@contextlib.asynccontextmanager
async def measure_loop_delay() -> AsyncIterator[LoopDelay]:
    """Measure the delay of periodic wake-ups while the block runs."""
    delay = LoopDelay()

    async def wake_up() -> None:
        while True:
            delay.due_s = time.monotonic() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            delay.total_s += max(0.0, time.monotonic() - delay.due_s)

    task = asyncio.create_task(wake_up())
    try:
        yield delay
    finally:
        task.cancel()
        delay.due_s = float("inf")
