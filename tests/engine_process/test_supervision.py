"""Who is hung: a child that neither says nor computes anything, not one that computes."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable

import pytest

from chatcache.engine_process.process import RestartPolicy, process_cpu_s, wait_until_hung

SOON = RestartPolicy(hung_after_s=0.01, lost_after_s=1e9)
TIMEOUT_S = 60.0


def still() -> float | None:
    return 3.0


def unknown() -> float | None:
    return None


class Busy:
    """Computes all the time; `num_looks` at it."""

    def __init__(self) -> None:
        self.num_looks = 0

    def __call__(self) -> float | None:
        self.num_looks += 1
        return float(self.num_looks)


@pytest.mark.parametrize("cpu", [still, unknown])
async def test_a_child_that_stands_still_is_hung(cpu: Callable[[], float | None]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await wait_until_hung(lambda: True, lambda: 0, cpu, SOON)


async def test_a_child_that_computes_has_time_but_not_for_ever() -> None:
    busy = Busy()
    watch = asyncio.create_task(wait_until_hung(lambda: True, lambda: 0, busy, SOON))
    async with asyncio.timeout(TIMEOUT_S):
        while busy.num_looks < 100:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not watch.done()
    watch.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await wait_until_hung(lambda: True, lambda: 0, busy, RestartPolicy(hung_after_s=0.01, lost_after_s=0.05))


async def test_a_child_that_loads_may_stand_still_for_longer() -> None:
    watch = asyncio.create_task(wait_until_hung(lambda: False, lambda: 0, still, SOON, lambda: True))
    lost = RestartPolicy(hung_after_s=0.01, lost_after_s=0.05)
    async with asyncio.timeout(TIMEOUT_S):
        await wait_until_hung(lambda: False, lambda: 0, still, lost, lambda: True)
    assert not watch.done()
    watch.cancel()


async def test_who_speaks_or_owes_nothing_is_not_hung() -> None:
    heard, looks = itertools.count(), Busy()
    watches = [
        asyncio.create_task(wait_until_hung(lambda: True, lambda: next(heard), still, SOON)),
        asyncio.create_task(wait_until_hung(lambda: looks() == 0, lambda: 0, still, SOON)),
    ]
    async with asyncio.timeout(TIMEOUT_S):
        while looks.num_looks < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not any(watch.done() for watch in watches)
    for watch in watches:
        watch.cancel()


@pytest.mark.linux  # /proc is Linux's
def test_what_a_process_computed_is_read() -> None:
    before = process_cpu_s(os.getpid())
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    after = process_cpu_s(os.getpid())
    assert before is not None and after is not None and after >= before + 0.03
    assert process_cpu_s(2**22 + 1) is None


def test_delays_double_to_a_limit_however_many_there_were() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=30.0)
    assert [policy.delay_s(number) for number in (1, 2, 3, 7, 5000)] == [0.5, 1.0, 2.0, 30.0, 30.0]
