"""Stage "planning": host time to build the work list of attention for one step."""

from __future__ import annotations

from functools import partial

import numpy as np
from chatcache_kernels import cpu
from chatcache_kernels.types import I32
from chatcache_kernels.work_list import SharingMode, plan_work, plan_work_arrays

from bench.check.context import StageContext
from chatcache.bench.device import time_work
from chatcache.bench.report import Figure

PAGE_SIZE, GROUP = 16, 4
TINY_CASES = (("3 x 64", 3, 64, ()), ("4 x 96, shared", 4, 96, ((2, 4),)))
SHARES: tuple[SharingMode, ...] = ("never", "auto", "always")
CASES = (
    ("256 x 1k", 256, 1024, ()),
    ("64 x 32k", 64, 32768, ()),
    ("4096 x 1k", 4096, 1024, ()),
    ("8 x 4k, n-best", 8, 4096, ((250, 8),)),
    ("256 x 1k, shared", 256, 1024, ((16, 256),)),
    ("256 x 1k, shared, 32 of 8", 256, 1024, ((16, 256), (16, 8))),
    ("64 x 32k, shared, 8 of 8", 64, 32768, ((64, 64), (1900, 8))),
)
"""Name, rows, tokens per row, and prefixes of (pages, number of rows that share them)."""


def tables_of(num_rows: int, num_pages: int, prefixes: tuple[tuple[int, int], ...]) -> I32:
    """Return page tables in which groups of rows share prefixes.

    `prefixes`: (pages, number of rows that share them), one after the other.
    """
    tables = np.arange(1, num_rows * num_pages + 1, dtype=np.int32).reshape(num_rows, num_pages)
    first = 0
    for pages, rows in prefixes:
        leader = np.arange(num_rows) // rows * rows
        tables[:, first : first + pages] = tables[leader, first : first + pages]
        first += pages
    return tables


def run(context: StageContext) -> None:
    """Measure the time to build the work lists of the triton and the cpu backend."""
    for name, num_rows, num_tokens, prefixes in CASES if context.size != "tiny" else TINY_CASES:
        context.measure(f"plan {name}", partial(_measure_case, context, name, num_rows, num_tokens, prefixes))


def _measure_case(
    context: StageContext, name: str, num_rows: int, num_tokens: int, prefixes: tuple[tuple[int, int], ...]
) -> None:
    tables = tables_of(num_rows, num_tokens // PAGE_SIZE, prefixes)
    step = tables, np.full(num_rows, num_tokens - 1, np.int32), np.ones(num_rows, np.int32), PAGE_SIZE, GROUP
    plans = {f"triton, share {share}": partial(plan_work, *step, share=share) for share in SHARES}
    for label, plan in {**plans, "cpu": partial(cpu.prepare, *step)}.items():
        seconds = time_work(lambda _, plan=plan: plan(), 1, "cpu", repeats=1000).low_s  # type: ignore[misc]
        context.add(Figure(f"plan {name}: {label}", seconds * 1e6, "us"))
    counts = {share: sum(len(one.items) for one in plan_work_arrays(*step, share=share).lists) for share in SHARES}
    context.note(f"plan {name}: items", counts)
