"""(c) Prefill attention: FLOPs of the causal half over the matmul rate, beside torch's best SDPA backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import functional

from bench.check.ceilings import Ceilings, quick
from bench.check.context import Context
from bench.check.decode import best_sdpa
from bench.check.figures import compared, rate
from bench.check.timing import measure
from bench.check.workload import Heads, build, choose_kernels, equal_rows

HEADS = {"full": (Heads(32, 8, 128), Heads(16, 8, 128)), "cpu": (Heads(9, 3, 64),), "tiny": (Heads(4, 2, 32),)}
# (rows, cached tokens, new tokens)
GRID: dict[str, Sequence[tuple[int, int, int]]] = {
    "full": [(1, 0, 8192), (1, 0, 2048), (4, 0, 512), (1, 6144, 2048), (1, 16384, 512), (16, 0, 512)],
    "cpu": [(1, 0, 512), (1, 512, 128)],
    "tiny": [(2, 0, 19), (1, 32, 7)],
}


def run(context: Context) -> None:
    """Measure whole prompts and chunks after a cached prefix."""
    limits = quick(context)
    for heads in HEADS[context.size]:
        for rows, cached, new in GRID[context.size]:
            what = f"prefill {heads.name}, {rows} x {new} after {cached}"
            context.measure(what, partial(_prefill, context, limits, heads, rows, cached, new), needs_s=4)


def _prefill(context: Context, limits: Ceilings, heads: Heads, num_rows: int, cached: int, new: int) -> None:
    rows, name = equal_rows(num_rows, cached + new, new), f"prefill {heads.name}, {num_rows} x {new} after {cached}"
    work = build(choose_kernels(context.device), heads, rows, context.device, context.size)
    timing = measure(work.attend, 4, context.device, repeats=7)
    seen = num_rows * sum(range(cached + 1, cached + new + 1))
    flops = 4 * heads.num_heads * heads.head_dim * seen
    context.add(rate(name, flops / timing.median_s / 1e12, "TFLOP/s", limits.matmul_flops_per_s / 1e12))
    del work
    if cached:
        return  # torch's causal mask begins at the first key: a chunk after a prefix has no fast path there
    shapes = [(num_rows, heads.num_heads, new, heads.head_dim)]
    shapes += [(num_rows, heads.num_kv_heads, new, heads.head_dim)] * 2
    q, k, v = (torch.randn(shape, device=context.device).to(torch.bfloat16) for shape in shapes)
    other = best_sdpa(
        context,
        lambda _: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        4,
    )
    us = timing.median_s * 1e6
    context.add(compared(f"{name}: torch SDPA over ours", other.median_s * 1e6, "us", us, ">= 0.75"))
