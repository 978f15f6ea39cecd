"""Compute with fewer threads while other programs use the cores.

Work that torch divides in equal parts takes as long as its slowest thread. If a thread has to share its core, all wait
for it, and one thread less is faster. `ThreadCount` measures over a window of steps how long steps of each size took,
the cores that the process got (CPU time over wall time), and the threads that were ready but had no core (the run delay
that Linux counts per thread). When threads wait for a core, it tries fewer; when it runs fewer and a core is idle, it
tries more. A trial is one window; fewer threads are kept if they are almost as fast. Speeds are compared over steps of
the same size, as those of a running batch are; if the two windows have none in common, the cores are compared instead,
of which some are used to wait for threads without a core.

Where the system does not count run delays (macOS, some sandboxes), the number of threads stays as it is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

WINDOW_S = 0.25  # seconds in steps that one measurement covers
MIN_WAITING = 0.3  # threads without a core, on average, that count as contention
MIN_IDLE = 0.4  # idle cores, on average, that justify a trial of more threads
MIN_GAIN = 1.1  # speed of more threads, relative to fewer, that is worth them
MIN_HOLD_S, MAX_HOLD_S = 0.5, 15.0  # between trials; doubled after each that fails

log = logging.getLogger(__name__)


def read_run_delay_s(tasks: Path = Path("/proc/self/task")) -> float:
    """Return the seconds that this process's threads were ready but not running; 0 if the system does not count them.

    Source: Linux, Documentation/scheduler/sched-stats.rst.
    """
    total_ns = 0
    try:
        for task in os.listdir(tasks):
            try:
                with open(f"{tasks}/{task}/schedstat", "rb") as file:
                    total_ns += int(file.read().split()[1])
            except (OSError, IndexError, ValueError):  # the thread has ended, or nothing is counted
                continue
    except OSError:
        return 0.0
    return total_ns / 1e9


def read_idle_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Return the seconds for which the CPUs of this process were idle, summed; None if the system does not count them.

    They include those of programs of low priority. Source: Linux, Documentation/filesystems/proc.rst, section 1.7.
    """
    try:
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [line.split() for line in stat.read_text().splitlines()]
        ticks = sum(int(row[2]) + int(row[4]) + int(row[5]) for row in rows if row and row[0] in names)
        return ticks / os.sysconf("SC_CLK_TCK") or None
    except (AttributeError, OSError, IndexError, ValueError):  # not Linux, or nothing is counted
        return None


@dataclass(slots=True)
class _Window:
    """Steps of one measurement.

    `steps`: the number of steps of each size and their seconds. `start_s`, `delay_s`, `idle_s`: the clock, the run
    delay and the idle seconds before the first one.
    """

    start_s: float
    delay_s: float
    idle_s: float | None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    steps: dict[Hashable, tuple[int, float]] = field(default_factory=dict)

    def idle_cores(self, following: _Window) -> float | None:
        """Return how many cores had no thread, on average until the next window began; None if unknown."""
        if self.idle_s is None or following.idle_s is None:
            return None
        return (following.idle_s - self.idle_s) / (following.start_s - self.start_s)

    def speed_relative_to(self, before: _Window) -> float:
        """Return how many times as fast these steps were as those of the same sizes in another window."""
        common = self.steps.keys() & before.steps.keys()
        if not common:
            return self.cpu_s * before.wall_s / (self.wall_s * before.cpu_s) if before.cpu_s else 1.0
        seconds = sum(self.steps[size][1] for size in common)
        return sum(before.steps[size][1] / before.steps[size][0] * self.steps[size][0] for size in common) / seconds


@dataclass(frozen=True, slots=True)
class _Trial:
    """The number of threads before a trial, and the steps that they computed last."""

    count: int
    window: _Window


class ThreadCount:
    """Number of threads of the steps. Not thread-safe: called by the thread that runs the steps.

    `counts`: the numbers allowed, ascending; the last is the normal one.
    """

    def __init__(
        self,
        counts: Sequence[int],
        get_threads: Callable[[], int] = torch.get_num_threads,
        set_threads: Callable[[int], None] = torch.set_num_threads,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
        run_delay: Callable[[], float] = read_run_delay_s,
        idle: Callable[[], float | None] = read_idle_s,
    ) -> None:
        self.count = counts[-1]
        self._counts = counts
        self._get_threads, self._set_threads = get_threads, set_threads
        self._clock, self._cpu_clock = clock, cpu_clock
        self._run_delay, self._idle = run_delay, idle
        self._window: _Window | None = None
        self._trial: _Trial | None = None
        self._hold_s, self._next_trial_s = MIN_HOLD_S, 0.0
        self._has_logged = False

    @contextmanager
    def step(self, size: Hashable) -> Iterator[None]:
        """Measure one step, and change the number of threads after it. Steps of equal `size` have about equal work."""
        if len(self._counts) == 1:
            yield
            return
        window = self._window = self._window or self._begin()
        wall_s, cpu_s = self._clock(), self._cpu_clock()
        try:
            yield
        finally:
            now_s = self._clock()
            window.wall_s += now_s - wall_s
            window.cpu_s += self._cpu_clock() - cpu_s
            count, seconds = window.steps.get(size, (0, 0.0))
            window.steps[size] = count + 1, seconds + now_s - wall_s
            if window.wall_s >= WINDOW_S:
                self._window = self._begin()
                self._evaluate(window, self._window)

    def _begin(self) -> _Window:
        return _Window(self._clock(), self._run_delay(), self._idle())

    def _evaluate(self, window: _Window, following: _Window) -> None:
        """End a trial, or begin one, after the steps of `window`; `following` begins where they end."""
        if self._get_threads() != self.count:
            return  # the application has chosen a number
        now_s = following.start_s
        waiting = (following.delay_s - window.delay_s) / window.wall_s
        trial, self._trial = self._trial, None
        if trial is not None:
            is_kept = self._is_kept(trial, window, waiting)
            self._hold_s = MIN_HOLD_S if is_kept else min(2 * self._hold_s, MAX_HOLD_S)
            self._next_trial_s = now_s + self._hold_s
            if not is_kept:
                self._use(trial.count)
            elif self.count < trial.count and not self._has_logged:
                self._has_logged = True
                log.info("other programs use the CPU: computing with %d of %d threads", self.count, self._counts[-1])
        elif now_s >= self._next_trial_s:
            count = self._other_count(waiting, window.idle_cores(following))
            if count != self.count:
                self._trial = _Trial(self.count, window)
                self._use(count)

    def _is_kept(self, trial: _Trial, window: _Window, waiting: float) -> bool:
        speed = window.speed_relative_to(trial.window)
        if self.count < trial.count:
            return speed * MIN_GAIN >= 1
        return waiting < MIN_WAITING or speed >= MIN_GAIN

    def _other_count(self, waiting: float, idle: float | None) -> int:
        """Return the number of threads to try: without those that wait, or up to twice as many if a core is idle."""
        if waiting >= MIN_WAITING:
            fewer = self.count - max(1, round(waiting))
            return max((count for count in self._counts if count <= fewer), default=self._counts[0])
        if idle is not None and idle < MIN_IDLE:
            return self.count
        return next((count for count in self._counts if count >= 2 * self.count), self._counts[-1])

    def _use(self, count: int) -> None:
        self.count = count
        self._set_threads(count)
