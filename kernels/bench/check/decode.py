"""(c) Paged decode attention: bytes of keys and values over bandwidth, what paging costs, what sharing saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from chatcache_kernels.work_list import Share
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.check.ceilings import Ceilings, quick
from bench.check.context import Context
from bench.check.figures import Figure, compared, rate
from bench.check.timing import Timing, Work, measure
from bench.check.workload import PAGE, Heads, build, choose_kernels, equal_rows, make_batch, tree_rows, unshared

MIB = 2**20
MOST_PRIVATE_BYTES = 8 * 2**30
SHARES: tuple[Share, ...] = ("auto", "never", "always")
HEADS = (Heads(32, 8, 128), Heads(16, 8, 128))
SMALL_HEADS = (Heads(4, 2, 32),)
GAINS: dict[tuple[tuple[int, int], ...], str] = {((1, 4096), (8, 256)): ">= 1.80", ((1, 32768), (32, 256)): ">= 6.00"}
Levels = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to measure: rows x context, those beside a contiguous table and beside SDPA, and trees."""

    heads: Sequence[Heads]
    grid: Sequence[tuple[int, int]]
    taxed: Sequence[tuple[int, int]]
    trees: Sequence[Levels]


SIZES = {
    "full": Sizes(
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
    "cpu": Sizes([Heads(9, 3, 64)], [(1, 2048), (8, 2048)], [(8, 2048)], [[(1, 2048), (8, 128)]]),
    "tiny": Sizes(SMALL_HEADS, [(1, 48), (3, 33)], [(3, 33)], [[(1, 64), (3, 17)], [(1, 32), (2, 32), (2, 9)]]),
}


def run(context: Context) -> None:
    """Measure the grid, then the tax, then the trees: what the goals are about comes first."""
    limits, sizes = quick(context), SIZES[context.size]
    for heads in sizes.heads:
        _trees(context, limits, heads, sizes.trees[:1])
        for rows, length in sizes.taxed:
            what = f"paging {heads.name}, {rows} x {length}"
            context.measure(what, partial(_paging, context, limits, heads, rows, length), needs_s=4)
    for heads in sizes.heads:
        for rows, length in sizes.grid:
            if (rows, length) not in sizes.taxed:
                what = f"decode {heads.name}, {rows} x {length}"
                context.measure(what, partial(_decode, context, limits, heads, rows, length), needs_s=3)
        _trees(context, limits, heads, sizes.trees[1:])


def _decode(context: Context, limits: Ceilings, heads: Heads, num_rows: int, length: int) -> None:
    work = build(choose_kernels(context.device), heads, equal_rows(num_rows, length, 1), context.device, context.size)
    timing = measure(work.attend, work.num_layers, context.device)
    context.add(
        *_decode_figures(f"decode {heads.name}, {num_rows} x {length}", heads, num_rows * length, timing, limits)
    )


def _decode_figures(name: str, heads: Heads, num_tokens: int, timing: Timing, limits: Ceilings) -> list[Figure]:
    """Bandwidth for launches that a bandwidth can be told of, time over a fixed cost for the rest."""
    num_bytes = num_tokens * heads.token_bytes
    spread = (num_bytes / timing.high_s / 1e9, num_bytes / timing.low_s / 1e9)
    share = rate(name, num_bytes / timing.median_s / 1e9, "GB/s", limits.read_bytes_per_s / 1e9)
    if num_bytes >= 64 * MIB:
        return [replace(share, spread=spread, goal=">= 0.90" if num_bytes >= 256 * MIB else ">= 0.80")]
    most_us = (1.25 * num_bytes / limits.read_bytes_per_s) * 1e6 + 6
    return [replace(share, spread=spread), compared(f"{name}, time", timing.median_s * 1e6, "us", most_us, "<= 1.00")]


def _paging(context: Context, limits: Ceilings, heads: Heads, num_rows: int, length: int) -> None:
    """The same kernel over shuffled and over contiguous pages, and torch SDPA over plain tensors, interleaved."""
    rows, name = equal_rows(num_rows, length, 1), f"decode {heads.name}, {num_rows} x {length}"
    work = build(choose_kernels(context.device), heads, rows, context.device, context.size)
    in_order = equal_rows(num_rows, length, 1, shuffled=False)
    plain = replace(work, batch=make_batch(work.kernels, heads, in_order, context.device))
    timings = [[measure(each.attend, work.num_layers, context.device) for each in (work, plain)] for _ in range(3)]
    shuffled, ordered = (sorted((pair[i] for pair in timings), key=lambda one: one.median_s)[1] for i in (0, 1))
    context.add(*_decode_figures(name, heads, num_rows * length, shuffled, limits))
    us = shuffled.median_s * 1e6
    context.add(compared(f"{name}, over contiguous", us, "us", ordered.median_s * 1e6, "<= 1.03"))
    num_layers = work.num_layers
    del work, plain
    other = _sdpa(context, heads, num_rows, length, num_layers)
    context.add(compared(f"{name}, over torch SDPA", us, "us", other.median_s * 1e6, "<= 1.00"))


def _sdpa(context: Context, heads: Heads, num_rows: int, length: int, num_layers: int) -> Timing:
    """Torch's best backend over contiguous keys and values [R, Hkv, S, D]."""
    device = context.device
    q = torch.randn(num_rows, heads.num_heads, 1, heads.head_dim, device=device).to(torch.bfloat16)
    shape = (num_rows, heads.num_kv_heads, length, heads.head_dim)
    stores = [
        [torch.empty(shape, device=device, dtype=torch.bfloat16).normal_() for _ in "kv"] for _ in range(num_layers)
    ]
    return best_sdpa(
        context,
        lambda i: functional.scaled_dot_product_attention(q, stores[i][0], stores[i][1], enable_gqa=True),
        num_layers,
    )


def best_sdpa(context: Context, attend: Work, num_inputs: int) -> Timing:
    """Time `attend` on each of torch's backends that takes it, and return the best."""
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    found = [measure(attend, num_inputs, context.device)]  # as torch itself chooses
    for backend in backends if context.on_gpu else []:
        try:
            with sdpa_kernel(backend):
                found.append(measure(attend, num_inputs, context.device))
        except RuntimeError as error:
            context.note(f"SDPA {backend.name}", str(error).splitlines()[0])
    return min(found, key=lambda timing: timing.median_s)


def _trees(context: Context, limits: Ceilings, heads: Heads, trees: Sequence[Levels]) -> None:
    for levels in trees:
        name = f"tree {heads.name}, " + " > ".join(f"{count} x {tokens}" for count, tokens in levels)
        context.measure(name, partial(_tree, context, limits, heads, levels, name), needs_s=3)


def _tree(context: Context, limits: Ceilings, heads: Heads, levels: Levels, name: str) -> None:
    """Shared pages read once, beside the same pages read by each row, beside pages of each row's own."""
    kernels, rows = choose_kernels(context.device), tree_rows(levels)
    work = build(kernels, heads, rows, context.device, context.size)
    timings: dict[Share, Timing] = {}
    for share in SHARES:
        planned = replace(work, batch=make_batch(kernels, heads, rows, context.device, share))
        timings[share] = measure(planned.attend, work.num_layers, context.device)
    us = {share: timing.median_s * 1e6 for share, timing in timings.items()}
    num_bytes = rows.num_unique * heads.token_bytes
    goal = "<= 1.25" if num_bytes >= 128 * MIB else ""
    gain = GAINS.get(tuple(levels), ">= 0.95")
    context.add(
        compared(f"{name}: over reading it once", us["auto"], "us", limits.floor_s(num_bytes) * 1e6, goal),
        Figure(f"{name}: gain over ungrouped", us["never"], "us", us["auto"], us["never"] / us["auto"], gain),
        compared(f"{name}: choice over the better", us["auto"], "us", min(us["always"], us["never"]), "<= 1.05"),
    )
    context.note(f"{name}: us", us)
    private = unshared(rows)
    if private.num_pages * PAGE * heads.token_bytes > MOST_PRIVATE_BYTES:
        return
    del work, planned
    alone = build(kernels, heads, private, context.device, context.size)
    own_us = measure(alone.attend, alone.num_layers, context.device).median_s * 1e6
    context.add(Figure(f"{name}: gain over own pages", own_us, "us", us["auto"], own_us / us["auto"]))
