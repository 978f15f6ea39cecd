"""Stage "studies": the real studies of `loadtest.studies`, so that their figures exist for GPUs, too.

Each part runs once and is skipped if the time of the stage does not suffice; the most informative ones come first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.check.context import StageContext
from chatcache.bench.drivers import SHAPES
from chatcache.bench.report import Figure, compare
from loadtest.studies import batching, kernels
from loadtest.studies.batching import ITERATION, STATIC, Scaled
from loadtest.studies.local_user import Day, measure_days
from loadtest.studies.machine import open_model
from loadtest.studies.published import NAMES
from loadtest.studies.results import Context


@dataclass(frozen=True, slots=True)
class Sizes:
    """Workloads. `decode`: (rows, tokens of context). `chunked`: (requests, tokens of each prompt)."""

    decode: Sequence[tuple[int, int]]
    swap_tokens: int
    swap_pages: Sequence[int]
    queue: Scaled
    page_sizes: Sequence[int]
    budgets: Sequence[int]
    chunked: tuple[int, int]
    day: Day


SIZES = {
    "full": Sizes(
        [(1, 512), (1, 2048), (8, 2048), (32, 2048)], 1024, (16, 32, 64, 256), Scaled(64, 4), (16, 32, 64),
        (256, 1024, 2560), (32, 1024), Day(20, 40),
    ),
    "cpu": Sizes([(1, 2048), (8, 2048)], 256, (16, 64), Scaled(12, 16), (16,), (256,), (4, 300), Day(4, 8)),
    "tiny": Sizes([(2, 64)], 64, (16,), Scaled(4, 16), (16,), (64,), (2, 100), Day(4, 4)),
}  # fmt: skip


def run(context: StageContext, name: str) -> None:
    """Measure what paging, page sizes, scheduling, chunk budgets and prefix reuse do on this device."""
    sizes, studies = SIZES[context.size], Context(device=context.device, shape=name)
    with studies.resources():
        context.measure("kernel cost of paging", lambda: _measure_paging(context, name, sizes))
        context.measure("swap or recompute", lambda: _measure_swaps(context, studies, sizes), needs_s=8)
        context.measure("one local user", lambda: _measure_user(context, studies, sizes), needs_s=6)
        context.measure("paging or scheduling", lambda: _measure_scheduling(context, studies, sizes), needs_s=10)
        context.measure("chunk budgets", lambda: _measure_chunks(context, studies, sizes), needs_s=8)
        context.measure("page sizes", lambda: _measure_page_sizes(context, studies, sizes), needs_s=15)


def _measure_paging(context: StageContext, name: str, sizes: Sizes) -> None:
    for num_rows, length in sizes.decode:
        us = kernels.measure_paging(SHAPES[name], num_rows, length, context.device, num_rounds=3)
        what, shuffled = f"studies: decode attention, {num_rows} x {length}", us[kernels.ORDERS["shuffled"]]
        contiguous = us[kernels.ORDERS["one run"]]
        context.add(
            compare(f"{what}, shuffled pages", shuffled, "us", contiguous, "one run of pages (paper: 1.20 to 1.26)"),
            compare(f"{what}, over torch SDPA", shuffled, "us", us[kernels.SDPA], "torch SDPA, contiguous"),
        )
    mixed, even = reversed(kernels.measure_mixed_lengths(SHAPES[name], context.device, num_rounds=3).values())
    context.add(compare("studies: decode attention of mixed lengths", mixed, "us", even, "equal lengths"))


def _measure_swaps(context: StageContext, studies: Context, sizes: Sizes) -> None:
    again_ms = kernels.measure_recompute(open_model(studies), sizes.swap_tokens, num_rounds=3)
    for page_size in sizes.swap_pages:
        times = kernels.measure_swap(SHAPES[studies.shape_name], sizes.swap_tokens, page_size, context.device, 3)
        what = f"studies: swap {sizes.swap_tokens} tokens out and in, pages of {page_size}"
        context.add(compare(what, times.out_ms + times.in_ms, "ms", again_ms, "recompute"))


def _measure_user(context: StageContext, studies: Context, sizes: Sizes) -> None:
    days = measure_days(studies, sizes.day)
    on, off = (statistics.fmean(turn.first_token_ms for turn in turns) for turns in days)
    context.add(compare("studies: one local user, time to first token", on, "ms", off, "without cache"))


def _measure_scheduling(context: StageContext, studies: Context, sizes: Sizes) -> None:
    found = batching.measure_scheduling(studies, sizes.queue, num_rounds=1, share=1.0)
    base = found[STATIC, "max"][0]
    for (how, memory), (tokens_per_s, _) in found.items():
        what = f"studies: {how}, {NAMES[memory]}"
        context.add(compare(what, tokens_per_s, "tokens/s", base, "static batches, Orca (Max)"))
    batches = {f"{how}, {memory}": size for (how, memory), (_, size) in found.items()}
    context.note("studies: requests in the batch", batches)
    gain = found[ITERATION, "pages"][0] / found[ITERATION, "max"][0]
    context.add(Figure("studies: gain by pages, iteration level", gain, "x"))


def _measure_chunks(context: StageContext, studies: Context, sizes: Sizes) -> None:
    found = batching.measure_chunks(studies, sizes.budgets, *sizes.chunked, num_rounds=1, share=1.0)
    for budget, times in found.items():
        what = f"studies: {batching.NUM_USERS} users, {budget or 'default'} tokens per step"
        context.add(
            Figure(f"{what}, inter-token latency p99", times.p99_ms, "ms"),
            Figure(f"{what}, output", times.tokens_per_s, "tokens/s"),
        )


def _measure_page_sizes(context: StageContext, studies: Context, sizes: Sizes) -> None:
    found = batching.measure_page_sizes(studies, sizes.page_sizes, sizes.queue, num_rounds=1, share=1.0)
    for size, times in found.items():
        context.add(
            Figure(f"studies: pages of {size}, output", times.tokens_per_s, "tokens/s"),
            Figure(f"studies: pages of {size}, held slots without a token", times.waste, "%"),
        )
