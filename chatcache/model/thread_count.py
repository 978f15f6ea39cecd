"""Compute with fewer threads while other programs use the cores.

Work that torch divides in equal parts takes as long as its slowest thread. If a thread has to share its core, all wait
for it, and one thread less is faster. `ThreadCount` measures two values over a window of steps: the cores that the
process got (CPU time over wall time), and the threads that were ready but had no core (the run delay that Linux counts
per thread). When threads wait for a core, it tries fewer; when it runs fewer, it tries more from time to time. A trial
is one window; fewer threads are kept if they get almost as many cores.

Where the system does not count run delays (macOS, some sandboxes), the number of threads stays as it is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

WINDOW_S = 0.25  # seconds in steps that one measurement covers
MIN_WAITING = 0.4  # threads without a core, on average, that count as contention
MIN_GAIN = 1.1  # cores that more threads must get, relative to fewer
MIN_HOLD_S, MAX_HOLD_S = 2.0, 15.0  # between trials; doubled after each that fails

log = logging.getLogger(__name__)


def read_run_delay_s(tasks: Path = Path("/proc/self/task")) -> float:
    """Return the seconds that this process's threads were ready but not running; 0 if the system does not count them.

    Leaves out threads of a lower priority than the calling one, such as `PagePrefaulter`: that these wait for a core
    says nothing of other programs. Source: Linux, Documentation/scheduler/sched-stats.rst.
    """
    total_ns = 0
    try:
        niceness = _niceness(0)
        for task in os.listdir(tasks):
            try:
                if _niceness(int(task)) > niceness:
                    continue
                with open(f"{tasks}/{task}/schedstat", "rb") as file:
                    total_ns += int(file.read().split()[1])
            except (OSError, IndexError, ValueError):  # the thread has ended, or nothing is counted
                continue
    except OSError:
        return 0.0
    return total_ns / 1e9


def _niceness(thread_id: int) -> int:
    """Return the niceness of a thread, on Linux, where each has its own; 0: of the calling one."""
    try:
        return os.getpriority(os.PRIO_PROCESS, thread_id)
    except OSError:  # it has ended
        return 0


@dataclass(frozen=True, slots=True)
class _Trial:
    """The number of threads before a trial, and the cores they got."""

    count: int
    cores: float


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
    ) -> None:
        self.count = counts[-1]
        self._counts = counts
        self._get_threads, self._set_threads = get_threads, set_threads
        self._clock, self._cpu_clock, self._run_delay = clock, cpu_clock, run_delay
        self._wall_s = self._cpu_s = 0.0  # of the steps in this window
        self._delay_s: float | None = None  # at the start of this window
        self._trial: _Trial | None = None
        self._hold_s, self._next_trial_s = MIN_HOLD_S, 0.0
        self._has_logged = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step, and change the number of threads after it."""
        if len(self._counts) == 1:
            yield
            return
        if self._delay_s is None:
            self._delay_s = self._run_delay()
        wall_s, cpu_s = self._clock(), self._cpu_clock()
        try:
            yield
        finally:
            now_s = self._clock()
            self._wall_s += now_s - wall_s
            self._cpu_s += self._cpu_clock() - cpu_s
            if self._wall_s >= WINDOW_S:
                delay_s = self._run_delay()
                waiting = (delay_s - self._delay_s) / self._wall_s
                self._evaluate(now_s, self._cpu_s / self._wall_s, waiting)
                self._wall_s, self._cpu_s, self._delay_s = 0.0, 0.0, delay_s

    def _evaluate(self, now_s: float, cores: float, waiting: float) -> None:
        """End a trial, or begin one: `cores` were used and `waiting` threads had none, on average."""
        if self._get_threads() != self.count:
            return  # the application has chosen a number
        trial, self._trial = self._trial, None
        if trial is not None:
            is_kept = self._is_kept(trial, cores, waiting)
            self._hold_s = MIN_HOLD_S if is_kept else min(2 * self._hold_s, MAX_HOLD_S)
            self._next_trial_s = now_s + self._hold_s
            if not is_kept:
                self._use(trial.count)
            elif self.count < trial.count and not self._has_logged:
                self._has_logged = True
                log.info("other programs use the CPU: computing with %d of %d threads", self.count, self._counts[-1])
        elif now_s >= self._next_trial_s:
            count = self._other_count(waiting)
            if count != self.count:
                self._trial = _Trial(self.count, cores)
                self._use(count)

    def _is_kept(self, trial: _Trial, cores: float, waiting: float) -> bool:
        if self.count < trial.count:
            return cores * MIN_GAIN >= trial.cores
        return waiting < MIN_WAITING or cores >= trial.cores * MIN_GAIN

    def _other_count(self, waiting: float) -> int:
        """Return the number of threads to try: without those that wait, else up to twice as many."""
        if waiting >= MIN_WAITING:
            fewer = self.count - max(1, round(waiting))
            return max((count for count in self._counts if count <= fewer), default=self._counts[0])
        return next((count for count in self._counts if count >= 2 * self.count), self._counts[-1])

    def _use(self, count: int) -> None:
        self.count = count
        self._set_threads(count)
