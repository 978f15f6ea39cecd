"""Measure speed next to other busy processes, in rounds that alternate with the idle machine.

Imports nothing but the standard library: `loadtest.peers` uses it for other engines.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, cast

NUM_BUSY = (1, 2)  # busy processes
# Ends with the process that started it, also if that one is killed.
_SPIN = "import os\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent: sum(range(10_000))"


@contextmanager
def busy_processes(count: int, cpus: Collection[int] | None = None) -> Iterator[None]:
    """Run processes that each use one core without pause; on `cpus`, by default on those of this process."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", _SPIN], stdout=subprocess.PIPE))
            stack.callback(process.kill)
            if cpus is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, cpus)
            cast(IO[bytes], process.stdout).readline()  # it runs
        yield


def speeds_by_busy_processes(
    measure: Callable[[], float], counts: Sequence[int], num_rounds: int, cpus: Collection[int] | None = None
) -> dict[int, float]:
    """Measure next to each of these numbers of busy processes; return the medians.

    Each round measures all of them once, so that changes of the machine affect all alike.
    """
    values: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(num_rounds):
        for count in counts:
            with busy_processes(count, cpus):
                values[count].append(measure())
    return {count: statistics.median(each) for count, each in values.items()}
