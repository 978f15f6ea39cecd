"""Figures 18a and 19: what paging costs the attention kernel, and whether swapping or recomputation is cheaper."""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np
import torch
from chatcache_kernels.types import AttentionBatch, KVPages
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from chatcache.bench.device import Work, synchronize, time_work
from chatcache.bench.drivers import SHAPES, EngineDriver, Shape
from chatcache.model.runner import SwapExecutor
from chatcache.model.streams import make_streams
from chatcache.scheduler.preemption import RECOMPUTE, SWAP
from chatcache.types.request import SamplingParams
from loadtest.studies import published
from loadtest.studies.machine import RealModel, RequestLoop, chip_name, open_model, repeat
from loadtest.studies.results import REAL, Context, Panel, Row, Series, StudyResult
from loadtest.studies.simulate import Arrival, Outcome

PAGE = 16
Order = Literal["one run", "in turns", "shuffled"]
ORDERS: dict[Order, str] = {
    "shuffled": "pages shuffled",
    "in turns": "pages as a batch allocates them",
    "one run": "contiguous: one run of pages",
}
SDPA = "torch SDPA, contiguous, no pages"
KERNEL_BUDGET_S = 0.15  # of one measurement


def choose_kernels(device: str) -> ModuleType:
    """Return the attention kernels for this device."""
    return importlib.import_module(f"chatcache_kernels.{'triton' if device.startswith('cuda') else 'cpu'}")


def page_tables(lengths: Sequence[int], page_size: int, order: Order) -> NDArray[np.int32]:
    """Return the page tables of rows of these lengths; entries after a row's last page are 0.

    `one run`: the pages of each row follow each other. `in turns`: rows that grow together take pages in turns, as in a
    batch that decodes. `shuffled`: a random order of all pages, as after hours of use.
    """
    counts = [-(-length // page_size) for length in lengths]
    places = [(row, index) for row, count in enumerate(counts) for index in range(count)]
    if order == "in turns":
        places.sort(key=lambda place: (place[1], place[0]))
    elif order == "shuffled":
        np.random.default_rng(0).shuffle(places)
    tables = np.zeros((len(counts), max(counts)), np.int32)
    for page, (row, index) in enumerate(places, start=1):
        tables[row, index] = page
    return tables


def paged_decode(shape: Shape, lengths: Sequence[int], order: Order, device: str, page_size: int = PAGE) -> Work:
    """Return the decode attention of one layer over pages: one new token for each row."""
    kernels = choose_kernels(device)
    tables, contexts = page_tables(lengths, page_size, order), np.array(lengths, np.int32)
    one = np.ones_like(contexts)
    with torch.device(device):
        pages: KVPages = kernels.allocate_pages(
            shape.num_layers, int(tables.max()) + 1, page_size, shape.num_kv_heads, shape.head_dim, torch.bfloat16
        )
        q = torch.randn(len(lengths), shape.num_heads, shape.head_dim).to(torch.bfloat16)
    for store in (pages.k, pages.v):
        store.copy_(torch.randn(store.shape[2:]))  # the same numbers in each page
    batch = AttentionBatch.build(
        torch.from_numpy(tables), torch.from_numpy(contexts - one), torch.from_numpy(one), page_size
    )
    work = kernels.prepare(tables, contexts - one, one, page_size, shape.num_heads // shape.num_kv_heads)
    batch = replace(batch, work=work).to(device)
    scale = shape.head_dim**-0.5
    return lambda layer: kernels.paged_attention(q, pages, layer, batch, scale)


def contiguous_decode(shape: Shape, num_rows: int, length: int, device: str) -> Work:
    """Return the decode attention of one layer by torch over contiguous keys and values [R, Hkv, S, D].

    The query heads of a group are rows of one query [R, Hkv, H / Hkv, D], which is faster than `enable_gqa`.
    """
    size = (shape.num_layers, num_rows, shape.num_kv_heads, length, shape.head_dim)
    k, v = (torch.empty(size, device=device, dtype=torch.bfloat16).copy_(torch.randn(size[2:])) for _ in "kv")
    group = shape.num_heads // shape.num_kv_heads
    q = torch.randn(num_rows, shape.num_kv_heads, group, shape.head_dim, device=device).to(torch.bfloat16)

    def attend(layer: int) -> Tensor:
        return functional.scaled_dot_product_attention(q, k[layer], v[layer])

    return attend


def time_in_turns(works: dict[str, Work], num_layers: int, device: str, num_rounds: int) -> dict[str, float]:
    """Return the microseconds of each work: the median over rounds, which measure each once, of their lowest times."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(num_rounds):
        for name, work in works.items():
            timing = time_work(work, num_layers, device, repeats=7, budget_s=KERNEL_BUDGET_S)
            times[name].append(1e6 * timing.low_s)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_paging(shape: Shape, num_rows: int, length: int, device: str, num_rounds: int) -> dict[str, float]:
    """Return the microseconds of one layer's decode attention, by arrangement of the keys and values."""
    works = {label: paged_decode(shape, [length] * num_rows, order, device) for order, label in ORDERS.items()}
    works[SDPA] = contiguous_decode(shape, num_rows, length, device)
    return time_in_turns(works, shape.num_layers, device, num_rounds)


def measure_mixed_lengths(shape: Shape, device: str, num_rounds: int) -> dict[str, float]:
    """Return the microseconds of a batch of 8 rows of 1,024 tokens, and of one as large with mixed lengths."""
    cases = {"8 x 1,024 tokens": [1024] * 8, "64 to 4,096 tokens": [64, 64, 128, 256, 512, 1024, 2048, 4096]}
    works = {name: paged_decode(shape, lengths, "shuffled", device) for name, lengths in cases.items()}
    return time_in_turns(works, shape.num_layers, device, num_rounds)


def run_fig18a(context: Context) -> StudyResult:
    """Time decode attention over pages, contiguous pages and contiguous tensors."""
    shape, device = SHAPES[context.shape_name], context.device
    lengths, batches = context.pick((128, 256, 512, 1024, 2048), (256, 2048)), context.pick((1, 8), (8,))
    num_rounds = context.pick(5, 2)
    rows: list[Row] = []
    panels: list[Panel] = []
    taxes: list[float] = []
    over_sdpa: list[float] = []
    for num_rows in batches:
        found = {}
        for length in lengths:
            found[length] = measure_paging(shape, num_rows, length, device, num_rounds)
            context.advance(0.9 / (len(lengths) * len(batches)))
        shuffled, contiguous = ORDERS["shuffled"], ORDERS["one run"]
        for length, us in found.items():
            taxes.append(us[shuffled] / us[contiguous])
            over_sdpa.append(us[shuffled] / us[SDPA])
            what = f"decode attention, batch {num_rows}, {length:,} tokens"
            rows += [
                Row("18a", f"{what}, shuffled / contiguous pages", taxes[-1], published.FIG18A, "x", REAL),
                Row("18a", f"{what}, shuffled pages / torch SDPA", over_sdpa[-1], None, "x", REAL),
            ]
        panels.append(
            Panel(
                title=f"batch {num_rows}, one layer", x_label="context (tokens)", y_label="attention latency (us)",
                series=tuple(Series(label, lengths, tuple(us[label] for us in found.values())) for label in us),
                log_x=True, log_y=True,
            )
        )  # fmt: skip
    paper = " to ".join(f"{100 * value - 100:.0f}" for value in published.FIG18A)
    bars = (*(f"{length:,}" for length in lengths), "paper\nlow", "paper\nhigh")
    panels.append(
        Panel(
            title=f"batch {batches[-1]}: shuffled pages over contiguous", x_label="context (tokens)",
            y_label="latency over contiguous (x)", kind="bars", limit=(1.0, "no cost"),
            series=(
                Series("ours, over one run of pages", bars[: len(lengths)], tuple(taxes[-len(lengths) :])),
                Series("ours, over torch SDPA", bars[: len(lengths)], tuple(over_sdpa[-len(lengths) :])),
                Series("paper, over FasterTransformer", bars[len(lengths) :], published.FIG18A, is_published=True),
            ),
        )
    )  # fmt: skip
    tax, sdpa = statistics.median(taxes), statistics.median(over_sdpa)
    mixed_us = measure_mixed_lengths(shape, device, num_rounds)
    context.advance(0.1)
    even, mixed = mixed_us.values()
    rows.append(Row("18a", "decode attention of 8 rows: mixed / equal lengths", mixed / even, None, "x", REAL))
    return StudyResult(
        name="fig18a",
        title=f"Figure 18a: decode attention over pages of {PAGE} ({context.shape_name} shape, {chip_name(device)})",
        question="What does paging cost the attention kernel?",
        answer=f"The paper's kernel is {paper} % slower than one over contiguous memory. Ours takes {tax:.2f} times "
        f"as long over shuffled pages as over one run of pages (median of all batches and contexts; {min(taxes):.2f} "
        f"to {max(taxes):.2f}), and {sdpa:.2f} times as long as torch over contiguous tensors ({min(over_sdpa):.2f} "
        f"to {max(over_sdpa):.2f}).\n\n**Do mixed lengths cost the kernel time?** 8 rows of 64 to 4,096 tokens take "
        f"{mixed / even:.2f} times as long as 8 rows of 1,024 tokens, which are as many tokens in all.",
        rows=tuple(rows),
        panels=tuple(panels),
    )


# -- swap or recompute --------------------------------------------------------------------------------------------

I32 = NDArray[np.int32]
ENGINE_PAGE_SIZES = (8, 16, 32, 64)


class SwapTimes(NamedTuple):
    """Milliseconds to copy the pages of some tokens to host memory, and back."""

    out_ms: float
    in_ms: float


def measure_swap(shape: Shape, num_tokens: int, page_size: int, device: str, num_rounds: int) -> SwapTimes:
    """Time the copies of the pages of `num_tokens` tokens, which lie scattered in the page store."""
    kernels, count = choose_kernels(device), -(-num_tokens // page_size)
    with torch.device(device):
        pages: KVPages = kernels.allocate_pages(
            shape.num_layers, 2 * count + 1, page_size, shape.num_kv_heads, shape.head_dim, torch.bfloat16
        )
    for store in (pages.k, pages.v):
        store.zero_()
    streams = make_streams(pages.k.device)
    executor = SwapExecutor(kernels, (pages,), count, streams)
    scattered = 1 + np.random.default_rng(0).permutation(2 * count)[:count].astype(np.int32)
    host_pages, none = np.arange(count, dtype=np.int32), np.zeros((0, 2), np.int32)

    def timed_ms(swaps_out: I32, swaps_in: I32) -> float:
        synchronize(device)
        start = time.perf_counter()
        executor.apply(swaps_out, swaps_in)
        streams.side.record_event().wait()
        return 1e3 * (time.perf_counter() - start)

    out, back = np.stack((scattered, host_pages), 1), np.stack((host_pages, scattered), 1)
    times = [(timed_ms(out, none), timed_ms(none, back)) for _ in range(num_rounds + 1)][1:]  # the first one compiles
    executor.close()
    return SwapTimes(*(statistics.median(each) for each in zip(*times, strict=True)))


def measure_recompute(model: RealModel, num_tokens: int, num_rounds: int) -> float:
    """Return the median milliseconds in which the engine computes a prompt of so many tokens."""
    driver, params = EngineDriver(model.engine()), SamplingParams(max_tokens=1, ignore_eos=True)
    driver.run([driver.prompt(num_tokens)], params)
    return 1e3 * statistics.median(driver.run([driver.prompt(num_tokens)], params).prefill_s for _ in range(num_rounds))


def run_preempted(model: RealModel, mode: str, num_requests: int) -> Outcome:
    """Run a queue in a memory that holds about half of what its requests need, so that some are preempted."""
    rng = random.Random(0)
    arrivals = [Arrival(0.0, model.prompt(rng, 64), 96) for _ in range(num_requests)]
    engine = model.engine(num_requests * 80, preemption_mode=mode)
    return RequestLoop(engine).run(arrivals)


def run_fig19(context: Context) -> StudyResult:
    """Compare the time to swap the pages of a request with the time to compute them again, by page size."""
    shape, device, num_tokens = SHAPES[context.shape_name], context.device, context.pick(1024, 512)
    sizes, num_rounds = context.pick((1, 4, 8, 16, 32, 64, 128, 256), (1, 16, 256)), context.pick(7, 3)
    swaps = {}
    for size in sizes:
        swaps[size] = measure_swap(shape, num_tokens, size, device, num_rounds)
        context.advance(0.2 / len(sizes))
    engine_sizes = [size for size in sizes if size in ENGINE_PAGE_SIZES]
    models = {size: open_model(context, size) for size in engine_sizes}
    recompute_ms = {size: measure_recompute(model, num_tokens, context.pick(3, 1)) for size, model in models.items()}
    context.advance(0.2)
    cases = {
        (mode, size): partial(run_preempted, model, mode, context.pick(12, 5))
        for size, model in models.items()
        for mode in (SWAP, RECOMPUTE)
    }
    runs = repeat(context, cases, context.pick(3, 1), 0.6)
    seconds = {case: statistics.median(run.seconds for run in found) for case, found in runs.items()}
    preempted = {case: statistics.median(run.num_preemptions for run in found) for case, found in runs.items()}
    both_ms = {size: times.out_ms + times.in_ms for size, times in swaps.items()}
    again_ms = statistics.median(recompute_ms.values())
    rows = [
        Row("19", f"swap {num_tokens:,} tokens out and in, pages of {size}", ms, None, "ms", REAL)
        for size, ms in both_ms.items()
    ]
    rows += [
        Row("19", f"recompute {num_tokens:,} tokens, pages of {size}", ms, None, "ms", REAL)
        for size, ms in recompute_ms.items()
    ]
    rows += [
        Row("19", f"queue with preemptions: swap / recompute, pages of {size}",
            seconds[SWAP, size] / seconds[RECOMPUTE, size], None, "x", REAL)
        for size in engine_sizes
    ]  # fmt: skip
    ratio = again_ms / both_ms[16]
    cheaper, factor = ("swapping", ratio) if ratio > 1 else ("recomputation", 1 / ratio)
    queue = [seconds[SWAP, size] / seconds[RECOMPUTE, size] for size in engine_sizes]
    return StudyResult(
        name="fig19",
        title=f"Figure 19: swap or recompute ({models[16].label})",
        question="Swap a preempted request, or compute it again?",
        answer=f"On this machine {cheaper} is cheaper: {num_tokens:,} tokens in pages of 16 are swapped out and in "
        f"within {both_ms[16]:.1f} ms and computed again in {again_ms:.0f} ms, a factor of {factor:.1f}. Pages of "
        f"{sizes[0]} take {both_ms[sizes[0]] / both_ms[16]:.1f} times and pages of {sizes[-1]} "
        f"{both_ms[sizes[-1]] / both_ms[16]:.1f} times as long to swap as pages of 16; recomputation does not depend "
        f"on the page size. A whole queue with {preempted[RECOMPUTE, 16]:.0f} preemptions takes {min(queue):.2f} to "
        f"{max(queue):.2f} times as long with swaps as with recomputation. By default the engine chooses by these "
        "two costs, which it measures.",
        rows=tuple(rows),
        panels=(
            Panel(
                title=f"{num_tokens:,} tokens of one request", x_label="page size (tokens)", y_label="ms", log_x=True,
                log_y=True,
                series=(
                    Series("recompute", tuple(recompute_ms), tuple(recompute_ms.values())),
                    Series("swap out and in", sizes, tuple(both_ms.values())),
                    Series("swap out", sizes, tuple(times.out_ms for times in swaps.values())),
                    Series("swap in", sizes, tuple(times.in_ms for times in swaps.values())),
                ),
            ),
            Panel(
                title="a queue with preemptions", x_label="page size (tokens)", y_label="seconds", kind="bars",
                series=tuple(
                    Series(mode, tuple(map(str, engine_sizes)), tuple(seconds[mode, size] for size in engine_sizes))
                    for mode in (RECOMPUTE, SWAP)
                ),
            ),
        ),
    )  # fmt: skip
