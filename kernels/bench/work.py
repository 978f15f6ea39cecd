"""Host time to cut one step's attention into pieces: python kernels/bench/work.py

Process time on one core, the least of many. `shared` cases: a system prompt for all, then what the name says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from chatcache_kernels import cpu
from chatcache_kernels.types import I32
from chatcache_kernels.work_list import Share, plan_host, plan_work

PAGE_SIZE, GROUP = 16, 4
SHARES: tuple[Share, ...] = ("never", "auto", "always")
CASES = (
    ("256 x 1k", 256, 1024, ()),
    ("64 x 32k", 64, 32768, ()),
    ("4096 x 1k", 4096, 1024, ()),
    ("8 x 4k, n-best", 8, 4096, ((250, 8),)),
    ("256 x 1k, shared", 256, 1024, ((16, 256),)),
    ("256 x 1k, shared, 32 of 8", 256, 1024, ((16, 256), (16, 8))),
    ("64 x 32k, shared, 8 of 8", 64, 32768, ((64, 64), (1900, 8))),
)
"""Name, rows, tokens a row, and stretches of (pages, rows that have them in common)."""


def tables_of(num_rows: int, num_pages: int, stretches: tuple[tuple[int, int], ...]) -> I32:
    """Return page tables whose rows have the stretches in common, one after the other."""
    tables = np.arange(1, num_rows * num_pages + 1, dtype=np.int32).reshape(num_rows, num_pages)
    first = 0
    for pages, rows in stretches:
        leader = np.arange(num_rows) // rows * rows
        tables[:, first : first + pages] = tables[leader, first : first + pages]
        first += pages
    return tables


def best_us(work: Callable[[], object], seconds: float = 0.4) -> float:
    """Return the least process time of many runs."""
    best, end = 2**62, time.perf_counter() + seconds
    while time.perf_counter() < end:
        before = time.process_time_ns()
        work()
        best = min(best, time.process_time_ns() - before)
    return best / 1000


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'us a step':28}{'never':>9}{'auto':>9}{'always':>9}{'cpu':>9}   items: never, auto")
    for name, num_rows, context, stretches in CASES:
        tables = tables_of(num_rows, context // PAGE_SIZE, stretches)
        step = tables, np.full(num_rows, context - 1, np.int32), np.ones(num_rows, np.int32), PAGE_SIZE, GROUP
        times = [best_us(partial(plan_work, *step, share=share)) for share in SHARES]
        times.append(best_us(partial(cpu.prepare, *step)))
        items = [sum(len(one.items) for one in plan_host(*step, share=share).lists) for share in SHARES]
        print(f"{name:28}" + "".join(f"{us:9.1f}" for us in times) + f"   {items[0]}, {items[1]}")


if __name__ == "__main__":
    main()
