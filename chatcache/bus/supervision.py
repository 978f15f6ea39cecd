"""When a child is given up, and when another one is started."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

_TICKS = 10
_BUSY_SHARE = 0.05
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer a child's death: wait `first_delay_s`, doubling to `max_delay_s`; give up at `max_deaths` in a row.

    Any token told ends the row, and so does a life of `healthy_after_s`, loading and more. A child that has work and
    neither says nor computes anything for `hung_after_s` is as good as dead, and so is one that computes for
    `lost_after_s` and says nothing. One that loads may wait for a slow disk: it is given up when it neither says nor
    computes anything for `lost_after_s`.
    """

    max_deaths: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0
    hung_after_s: float = 120.0
    lost_after_s: float = 900.0

    def delay_s(self, num_deaths: int) -> float:
        return min(self.first_delay_s * 2.0 ** min(num_deaths - 1, 100), self.max_delay_s)


def is_passing(error: OSError) -> bool:
    """Whether the system only has no room for a process, or its socket, just now."""
    return error.errno in _NO_ROOM


def cpu_s(pid: int) -> float | None:
    """Return what the threads of a process have computed so far; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_hung(
    is_owed: Callable[[], bool],
    num_heard: Callable[[], int],
    cpu_s: Callable[[], float | None],
    policy: RestartPolicy,
    is_loading: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until nothing was heard for too long, though something was owed all the time.

    A step may take minutes: a long prompt on a few cores, kernels that are compiled first. So a child that computes has
    more time. Counted in ticks of this process, not by a clock: while it was stopped itself, nobody was late.
    A child that is loading always owes something.
    """
    tick_s = policy.hung_after_s / _TICKS
    num_silent = num_still = 0

    def is_hung() -> bool:
        if is_loading():
            return num_still * tick_s >= policy.lost_after_s
        return num_still >= _TICKS or num_silent * tick_s >= policy.lost_after_s

    while not is_hung():
        before, before_s = num_heard(), cpu_s()
        await asyncio.sleep(tick_s)
        after_s = cpu_s()
        is_busy = before_s is not None and after_s is not None and after_s - before_s > _BUSY_SHARE * tick_s
        is_silent = (is_loading() or is_owed()) and num_heard() == before
        num_silent = num_silent + 1 if is_silent else 0
        num_still = num_still + 1 if is_silent and not is_busy else 0
