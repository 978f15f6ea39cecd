"""An event loop with a virtual clock that jumps to the next timer: sleeping takes no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _SkippingSelector(selectors.DefaultSelector):
    """Selector that adds a timeout to `skipped_s` instead of waiting for it."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout:
            self.skipped_s += timeout
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.skipped_s


def run_in_virtual_time(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that waits only for other tasks and for timers."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
