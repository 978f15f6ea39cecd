"""When a child counts as hung: without notices and CPU use, not while it computes."""

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


def idle_cpu() -> float | None:
    return 3.0


def unknown() -> float | None:
    return None


class BusyCpu:
    """Returns growing CPU times; `num_reads` counts the calls."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __call__(self) -> float | None:
        self.num_reads += 1
        return float(self.num_reads)


@pytest.mark.parametrize("cpu", [idle_cpu, unknown])
async def test_a_child_without_cpu_use_is_hung(cpu: Callable[[], float | None]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await wait_until_hung(lambda: True, lambda: 0, cpu, SOON)


async def test_a_child_that_computes_is_hung_after_the_longer_limit() -> None:
    busy = BusyCpu()
    watch = asyncio.create_task(wait_until_hung(lambda: True, lambda: 0, busy, SOON))
    async with asyncio.timeout(TIMEOUT_S):
        while busy.num_reads < 100:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not watch.done()
    watch.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await wait_until_hung(lambda: True, lambda: 0, busy, RestartPolicy(hung_after_s=0.01, lost_after_s=0.05))


async def test_a_child_that_loads_is_hung_after_the_longer_limit() -> None:
    watch = asyncio.create_task(wait_until_hung(lambda: False, lambda: 0, idle_cpu, SOON, lambda: True))
    lost = RestartPolicy(hung_after_s=0.01, lost_after_s=0.05)
    async with asyncio.timeout(TIMEOUT_S):
        await wait_until_hung(lambda: False, lambda: 0, idle_cpu, lost, lambda: True)
    assert not watch.done()
    watch.cancel()


async def test_a_child_that_sends_notices_or_has_no_work_is_not_hung() -> None:
    num_notices, looks = itertools.count(), BusyCpu()
    watches = [
        asyncio.create_task(wait_until_hung(lambda: True, lambda: next(num_notices), idle_cpu, SOON)),
        asyncio.create_task(wait_until_hung(lambda: looks() == 0, lambda: 0, idle_cpu, SOON)),
    ]
    async with asyncio.timeout(TIMEOUT_S):
        while looks.num_reads < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not any(watch.done() for watch in watches)
    for watch in watches:
        watch.cancel()


@pytest.mark.linux  # /proc is Linux's
def test_process_cpu_s_returns_the_cpu_time() -> None:
    before = process_cpu_s(os.getpid())
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    after = process_cpu_s(os.getpid())
    assert before is not None and after is not None and after >= before + 0.03
    assert process_cpu_s(2**22 + 1) is None


def test_restart_delay_of_any_count_doubles_to_the_limit() -> None:
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=30.0)
    assert [policy.delay_s(number) for number in (1, 2, 3, 7, 5000)] == [0.5, 1.0, 2.0, 30.0, 30.0]
