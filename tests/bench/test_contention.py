"""Busy processes of `bench contention`: they run while a speed is measured, on the CPUs given, and end after it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chatcache.bench.contention import busy_processes, speeds_by_busy_processes


def children_cpu_s() -> float:
    """Return the CPU seconds of the child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def live_children() -> set[int]:
    """Return the child processes of the threads of this process; those of other tests come and go."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


def state_of(pid: int) -> str:
    """Return the state of a process: R if it waits for nothing, Z or "" if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("fails", [False, True])
def test_busy_processes_run_and_end(fails: bool) -> None:
    before, cpu_s = live_children(), children_cpu_s()
    cpu = min(os.sched_getaffinity(0))
    try:
        with busy_processes(2, [cpu]):
            mine = live_children() - before
            assert len(mine) == 2
            assert all(os.sched_getaffinity(pid) == {cpu} for pid in mine)
            time.sleep(0.2)
            if fails:
                raise InterruptedError
    except InterruptedError:
        assert fails
    assert not mine & live_children()
    assert children_cpu_s() > cpu_s


KILLED = """
import time
from chatcache.bench.contention import busy_processes
with busy_processes(1):
    print(flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_busy_processes_end_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (busy,) = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        parent.kill()
    deadline_s = time.monotonic() + 60
    while state_of(int(busy)) not in ("", "Z"):
        assert time.monotonic() < deadline_s, "it still runs"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_speeds_are_medians_of_rounds_with_each_number_of_processes() -> None:
    seen: list[int] = []
    before = live_children()
    values = iter((9.0, 5.0, 1.0, 5.0, 5.0, 7.0))

    def measure() -> float:
        seen.append([state_of(pid) for pid in live_children() - before].count("R"))
        return next(values)

    assert speeds_by_busy_processes(measure, (0, 2), 3) == {0: 5.0, 2: 5.0}
    assert seen == [0, 2, 0, 2, 0, 2]
