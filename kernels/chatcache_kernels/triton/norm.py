"""RMSNorm, alone or after an addition, in one pass: each row is read once and stays in registers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .launch import EXACT, next_power_of_2, tile_warps
from .rounding import rounded
from .variants import Variant, traced

TILE = 1024
"""Elements of a program that norms several short rows."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by `weight`. Shapes: x [..., C], weight [C]."""
    if weight.dtype != x.dtype:
        return reference.rms_norm(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, x, weight, out, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual). Shapes: x, residual [T, C], weight [C]."""
    if not weight.dtype == x.dtype == residual.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps, add=True)
    return out, total


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, add: bool) -> None:
    width = x.shape[-1]
    num_rows = x.numel() // width
    if not num_rows:
        return
    block = next_power_of_2(width)
    rows = max(1, TILE // block)
    norm_rows[(triton.cdiv(num_rows, rows),)](
        x, residual, weight.contiguous(), out, total, num_rows, eps,
        ADD=add, WIDTH=width, BLOCK=block, ROWS=rows, num_warps=tile_warps(rows * block, 8, most=16), **EXACT,
    )  # fmt: skip


def variants(arch: int) -> Iterator[Variant]:
    """Yield the norms of models 576 to 5120 wide, and of heads."""
    for width, dtype in (
        (64, torch.float16), (128, torch.bfloat16), (576, torch.bfloat16), (576, torch.float32), (1024, torch.bfloat16),
        (4096, torch.bfloat16), (4096, torch.float16), (5120, torch.bfloat16), (16384, torch.bfloat16),
    ):  # fmt: skip
        x, weight = (torch.empty(*shape, width, dtype=dtype, device="meta") for shape in ((7,), ()))
        yield from traced(partial(rms_norm, x, weight, 1e-6), wide=True)
        yield from traced(partial(add_rms_norm, x, x, weight, 1e-6), wide=True)


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    total,
    num_rows,
    eps,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Norm `ROWS` rows of `WIDTH` elements; with `ADD`, those of x + residual, which are stored in `total`.

    Shapes: x, residual, out, total [num_rows, WIDTH], all of one dtype and dense; weight [WIDTH].
    Grid: num_rows / ROWS. Eight elements a thread up to 4096 wide: one 16-byte access of 16-bit numbers for each of x,
    residual and weight, all in flight before the sum is formed.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at, inside = row * WIDTH + column, column < WIDTH
    if ROWS > 1:
        inside = inside & (row < num_rows)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        summed = rounded(value + added, total.dtype.element_ty)
        tl.store(total + at, summed, mask=inside)
        value = summed.to(tl.float32)  # rounded, as the next layer sees it
    mean = tl.sum(value * value, axis=1, keep_dims=True) / WIDTH
    normed = rounded(value * tl.rsqrt(mean + eps), out.dtype.element_ty)
    tl.store(out + at, rounded(scale * normed.to(tl.float32), out.dtype.element_ty), mask=inside)
