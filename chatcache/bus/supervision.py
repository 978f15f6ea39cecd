"""When a child is given up, and when another one is started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

_TICKS = 10


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer a child's death: wait `first_delay_s`, doubling to `max_delay_s`; give up at `max_deaths` in a row.

    Any token told, or `healthy_after_s` of life, ends the row. A child that has work and says nothing for
    `hung_after_s` is as good as dead.
    """

    max_deaths: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0
    hung_after_s: float = 120.0

    def delay_s(self, num_deaths: int) -> float:
        return float(min(self.first_delay_s * 2 ** (num_deaths - 1), self.max_delay_s))


async def wait_hung(is_owed: Callable[[], bool], num_heard: Callable[[], int], hung_after_s: float) -> None:
    """Wait until nothing was heard for so long, though something was owed all the time.

    Counted in ticks of this process, not by a clock: while it was stopped, or the machine slept, nobody was late.
    """
    num_silent = 0
    while num_silent < _TICKS:
        before = num_heard()
        await asyncio.sleep(hung_after_s / _TICKS)
        num_silent = num_silent + 1 if is_owed() and num_heard() == before else 0
