"""Stages "decode kernels" and "prefill kernels": paged attention next to measured limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from chatcache_kernels.work_list import SharingMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.check.context import StageContext
from bench.check.limits import stage_limits
from bench.check.workload import PAGE, Heads, build, choose_kernels, equal_rows, make_batch, tree_rows, unshared
from chatcache.bench.device import Limits, Timing, Work, time_work
from chatcache.bench.report import Figure, compare
from chatcache.model.attention import FP8_CAPABILITY

MIB = 2**20
MAX_PRIVATE_BYTES = 8 * 2**30
SHARES: tuple[SharingMode, ...] = ("auto", "never", "always")
HEADS = (Heads(32, 8, 128), Heads(16, 8, 128))
CPU_HEADS = (Heads(9, 3, 64), Heads(32, 8, 128), Heads(8, 8, 64))
SMALL_HEADS = (Heads(4, 2, 32),)
CPU_ROWS = ((1, 2048), (8, 2048), (32, 2048))
GAINS: dict[tuple[tuple[int, int], ...], str] = {((1, 4096), (8, 256)): ">= 1.80", ((1, 32768), (32, 256)): ">= 6.00"}
FP8_SIZES = ((8, 8192), (64, 4096))
Levels = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """Workloads of the decode stage.

    `grid`: (rows, tokens of context); `compared`: those that are also compared with torch SDPA; `trees`: levels of
    shared prefixes, as in `workload.tree_rows`.
    """

    heads: Sequence[Heads]
    grid: Sequence[tuple[int, int]]
    compared: Sequence[tuple[int, int]]
    trees: Sequence[Levels]


DECODE_SIZES = {
    "full": DecodeSizes(
        HEADS,
        [
            *((1, context) for context in (512, 2048, 8192, 16384)),
            *((8, context) for context in (512, 2048, 8192, 16384)),
            *((64, context) for context in (512, 1024, 4096, 16384)),
            *((256, context) for context in (512, 1024, 4096)),
        ],
        [(1, 16384), (8, 8192), (64, 1024), (64, 4096), (256, 1024), (256, 4096)],
        [
            [(1, 4096), (8, 256)],
            [(1, 1024), (8, 256)],
            [(1, 16384), (8, 256)],
            [(1, 4096), (32, 256)],
            [(1, 32768), (32, 256)],
            [(1, 4096), (2, 256)],
            [(1, 2048), (256, 512)],
            [(1, 2048), (16, 1024), (8, 256)],
            [(16, 2048), (4, 256)],
        ],
    ),
    "cpu": DecodeSizes(CPU_HEADS, CPU_ROWS, [(8, 2048)], [[(1, tokens), (8, 20)] for tokens in (1024, 2048, 4096)]),
    "tiny": DecodeSizes(SMALL_HEADS, [(1, 48), (3, 33)], [(3, 33)], [[(1, 64), (3, 17)], [(1, 32), (2, 32), (2, 9)]]),
}


def run_decode(context: StageContext) -> None:
    """Measure decode attention: the cost of paging, rows without sharing, and shared prefixes."""
    limits, sizes = stage_limits(context), DECODE_SIZES[context.size]
    for heads in sizes.heads:
        _measure_trees(context, limits, heads, sizes.trees[:1])
        for rows, length in sizes.compared:
            what = f"paging {heads.name}, {rows} x {length}"
            context.measure(what, partial(_measure_paging, context, limits, heads, rows, length), needs_s=4)
    for heads in sizes.heads:
        for rows, length in sizes.grid:
            if (rows, length) not in sizes.compared:
                what = f"decode {heads.name}, {rows} x {length}"
                context.measure(what, partial(_measure_decode, context, limits, heads, rows, length), needs_s=3)
        has_fp8 = context.on_gpu and torch.cuda.get_device_capability() >= FP8_CAPABILITY
        for rows, length in FP8_SIZES if has_fp8 else ():
            what = f"decode {heads.name}, {rows} x {length}, FP8 pages"
            context.measure(what, partial(_measure_fp8_pages, context, heads, rows, length), needs_s=4)
        _measure_trees(context, limits, heads, sizes.trees[1:])


def _measure_fp8_pages(context: StageContext, heads: Heads, num_rows: int, length: int) -> None:
    """Measure decode over FP8 pages, next to the same over pages in bfloat16."""
    rows, kernels = equal_rows(num_rows, length, 1), choose_kernels(context.device)
    us = {}
    for is_fp8 in (False, True):
        work = build(kernels, heads, rows, context.device, context.size, fp8_pages=is_fp8)
        us[is_fp8] = time_work(work.attend, work.num_layers, context.device).median_s * 1e6
        del work
    name = f"decode {heads.name}, {num_rows} x {length}, FP8 pages"
    context.add(compare(name, us[True], "us", us[False], "bfloat16 pages", "<= 0.70"))


def _measure_decode(context: StageContext, limits: Limits, heads: Heads, num_rows: int, length: int) -> None:
    work = build(choose_kernels(context.device), heads, equal_rows(num_rows, length, 1), context.device, context.size)
    timing = time_work(work.attend, work.num_layers, context.device)
    context.add(
        *_decode_figures(f"decode {heads.name}, {num_rows} x {length}", heads, num_rows * length, timing, limits)
    )


def _decode_figures(name: str, heads: Heads, num_tokens: int, timing: Timing, limits: Limits) -> list[Figure]:
    """Return the bandwidth of a decode launch; for a small one also its time over a time limit."""
    num_bytes = num_tokens * heads.token_bytes
    spread = (num_bytes / timing.high_s / 1e9, num_bytes / timing.low_s / 1e9)
    figure = compare(name, num_bytes / timing.median_s / 1e9, "GB/s", limits.read_bytes_per_s / 1e9, "read")
    if num_bytes >= 64 * MIB:
        return [replace(figure, spread=spread, goal=">= 0.90" if num_bytes >= 256 * MIB else ">= 0.80")]
    max_us = (1.25 * num_bytes / limits.read_bytes_per_s) * 1e6 + 6
    time_figure = compare(f"{name}, time", timing.median_s * 1e6, "us", max_us, "1.25 x read + 6 us", "<= 1.00")
    return [replace(figure, spread=spread), time_figure]


def _measure_paging(context: StageContext, limits: Limits, heads: Heads, num_rows: int, length: int) -> None:
    """Measure decode over shuffled pages, next to contiguous pages and torch SDPA without pages."""
    rows, name = equal_rows(num_rows, length, 1), f"decode {heads.name}, {num_rows} x {length}"
    work = build(choose_kernels(context.device), heads, rows, context.device, context.size)
    in_order = equal_rows(num_rows, length, 1, shuffled=False)
    plain = replace(work, batch=make_batch(work.kernels, heads, in_order, context.device))
    timings = [[time_work(each.attend, work.num_layers, context.device) for each in (work, plain)] for _ in range(3)]
    shuffled, ordered = (sorted((pair[i] for pair in timings), key=lambda one: one.median_s)[1] for i in (0, 1))
    context.add(*_decode_figures(name, heads, num_rows * length, shuffled, limits))
    us = shuffled.median_s * 1e6
    context.add(compare(f"{name}, over contiguous", us, "us", ordered.median_s * 1e6, "contiguous pages", "<= 1.03"))
    num_layers = work.num_layers
    del work, plain
    other = _time_sdpa(context, heads, num_rows, length, num_layers)
    context.add(compare(f"{name}, over torch SDPA", us, "us", other.median_s * 1e6, "torch SDPA", "<= 1.00"))


def _time_sdpa(context: StageContext, heads: Heads, num_rows: int, length: int, num_layers: int) -> Timing:
    """Time torch's best backend over contiguous keys and values [R, Hkv, S, D]."""
    device = context.device
    q = torch.randn(num_rows, heads.num_heads, 1, heads.head_dim, device=device).to(torch.bfloat16)
    shape = (num_rows, heads.num_kv_heads, length, heads.head_dim)
    stores = [
        [torch.empty(shape, device=device, dtype=torch.bfloat16).normal_() for _ in "kv"] for _ in range(num_layers)
    ]
    return time_best_sdpa(
        context,
        lambda i: functional.scaled_dot_product_attention(q, stores[i][0], stores[i][1], enable_gqa=True),
        num_layers,
    )


def time_best_sdpa(context: StageContext, attend: Work, num_inputs: int) -> Timing:
    """Time `attend` on each of torch's backends that supports it, and return the best."""
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    found = [time_work(attend, num_inputs, context.device)]  # the backend that torch chooses
    for backend in backends if context.on_gpu else []:
        try:
            with sdpa_kernel(backend):
                found.append(time_work(attend, num_inputs, context.device))
        except RuntimeError as error:
            context.note(f"SDPA {backend.name}", str(error).splitlines()[0])
    return min(found, key=lambda timing: timing.median_s)


def _measure_trees(context: StageContext, limits: Limits, heads: Heads, trees: Sequence[Levels]) -> None:
    for levels in trees:
        name = f"tree {heads.name}, " + " > ".join(f"{count} x {tokens}" for count, tokens in levels)
        context.measure(name, partial(_measure_tree, context, limits, heads, levels, name), needs_s=3)


def _measure_tree(context: StageContext, limits: Limits, heads: Heads, levels: Levels, name: str) -> None:
    """Measure decode with shared prefixes, next to reading them for each row and to own copies."""
    kernels, rows = choose_kernels(context.device), tree_rows(levels)
    work = build(kernels, heads, rows, context.device, context.size)
    timings: dict[SharingMode, Timing] = {}
    for share in SHARES:
        planned = replace(work, batch=make_batch(kernels, heads, rows, context.device, share))
        timings[share] = time_work(planned.attend, work.num_layers, context.device)
    us = {share: timing.median_s * 1e6 for share, timing in timings.items()}
    num_bytes = rows.num_unique * heads.token_bytes
    goal = "<= 1.25" if num_bytes >= 128 * MIB else ""
    gain = GAINS.get(tuple(levels), ">= 0.95")
    context.add(
        compare(f"{name}: over reading it once", us["auto"], "us", limits.floor_s(num_bytes) * 1e6, "floor", goal),
        compare(f"{name}: gain over ungrouped", us["never"], "us", us["auto"], "grouped", gain),
        compare(f"{name}: choice over the better", us["auto"], "us", min(us["always"], us["never"]), "best", "<= 1.05"),
    )
    context.note(f"{name}: us", us)
    private = unshared(rows)
    if private.num_pages * PAGE * heads.token_bytes > MAX_PRIVATE_BYTES:
        return
    del work, planned
    alone = build(kernels, heads, private, context.device, context.size)
    own_us = time_work(alone.attend, alone.num_layers, context.device).median_s * 1e6
    context.add(compare(f"{name}: gain over own pages", own_us, "us", us["auto"], "grouped"))


# -- prefill ------------------------------------------------------------------------------------------------------

PREFILL_HEADS = {"full": (Heads(32, 8, 128), Heads(16, 8, 128)), "cpu": (Heads(9, 3, 64),), "tiny": (Heads(4, 2, 32),)}
# rows, cached tokens, new tokens
PREFILL_SIZES: dict[str, Sequence[tuple[int, int, int]]] = {
    "full": [(1, 0, 8192), (1, 0, 2048), (4, 0, 512), (1, 6144, 2048), (1, 16384, 512), (16, 0, 512)],
    "cpu": [(1, 0, 512), (1, 0, 2048), (1, 2048, 512), (1, 2048, 64)],
    "tiny": [(2, 0, 19), (1, 32, 7)],
}


def run_prefill(context: StageContext) -> None:
    """Measure prefill attention: whole prompts, and chunks after a cached prefix."""
    limits = stage_limits(context)
    for heads in PREFILL_HEADS[context.size]:
        for rows, cached, new in PREFILL_SIZES[context.size]:
            what = f"prefill {heads.name}, {rows} x {new} after {cached}"
            context.measure(what, partial(_measure_prefill, context, limits, heads, rows, cached, new), needs_s=4)


def _measure_prefill(context: StageContext, limits: Limits, heads: Heads, num_rows: int, cached: int, new: int) -> None:
    rows, name = equal_rows(num_rows, cached + new, new), f"prefill {heads.name}, {num_rows} x {new} after {cached}"
    work = build(choose_kernels(context.device), heads, rows, context.device, context.size)
    timing = time_work(work.attend, 4, context.device, repeats=7)
    seen = num_rows * sum(range(cached + 1, cached + new + 1))
    flops = 4 * heads.num_heads * heads.head_dim * seen
    context.add(compare(name, flops / timing.median_s / 1e12, "TFLOP/s", limits.matmul_flops_per_s / 1e12, "matmul"))
    del work
    if cached:
        return  # torch's causal mask starts at the first key, so SDPA has no fast path for a chunk after a prefix
    shapes = [(num_rows, heads.num_heads, new, heads.head_dim)]
    shapes += [(num_rows, heads.num_kv_heads, new, heads.head_dim)] * 2
    q, k, v = (torch.randn(shape, device=context.device).to(torch.bfloat16) for shape in shapes)
    other = time_best_sdpa(
        context,
        lambda _: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        4,
    )
    us = timing.median_s * 1e6
    context.add(compare(f"{name}: torch SDPA over ours", other.median_s * 1e6, "us", us, "ours", ">= 0.75"))
