"""An event loop whose clock jumps to the next thing that is due: waits cost nothing, and nothing is ever late."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jumping(selectors.DefaultSelector):
    """Skips what would be slept."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.skipped_s += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.skipped_s


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that waits for nothing but other tasks and the clock."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
