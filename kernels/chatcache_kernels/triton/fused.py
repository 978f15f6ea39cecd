"""RMSNorm (alone or after an addition) and the gated activations, in one pass each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .launch import EXACT, choose_num_warps, next_power_of_2, round_to
from .variants import Variant, trace_variants

ACTIVATION_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up.

    Shapes: gate_up [num_tokens, 2 * intermediate], gate first -> [num_tokens, intermediate].
    """
    return _activate(gate_up, "silu")


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, with the approximation of GELU by a hyperbolic tangent. Shapes: as `silu_mul`."""
    return _activate(gate_up, "gelu")


def clamped_silu_mul(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """Return gate * sigmoid(slope * gate) * (up + 1), gate at most `limit`, up from -`limit` to `limit` (gpt-oss).

    Shapes: as `silu_mul`.
    """
    return _activate(gate_up, "clamped_silu", slope, limit)


def _activate(gate_up: Tensor, activation: str, slope: float = 1.0, limit: float = 0.0) -> Tensor:
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows and width:
        grid = (num_rows, triton.cdiv(width, ACTIVATION_BLOCK))
        activation_kernel[grid](
            gate_up, out, slope, limit, ACTIVATION=activation, WIDTH=width, BLOCK=ACTIVATION_BLOCK, num_warps=4,
            **EXACT,
        )  # fmt: skip
    return out


def _activation_variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of the activations for models with 1536 to 14336 inner dimensions."""
    for width, dtype in ((1536, torch.bfloat16), (3072, torch.float16), (14336, torch.bfloat16), (1536, torch.float32)):
        gate_up = torch.empty(7, 2 * width, dtype=dtype, device="meta")
        yield from trace_variants(partial(silu_mul, gate_up), wide=True)
    for width, dtype in ((2048, torch.bfloat16), (6912, torch.bfloat16), (2048, torch.float32)):
        gate_up = torch.empty(7, 2 * width, dtype=dtype, device="meta")
        yield from trace_variants(partial(gelu_mul, gate_up), wide=True)
    for dtype in (torch.bfloat16, torch.float32):
        gate_up = torch.empty(28, 2 * 2880, dtype=dtype, device="meta")
        yield from trace_variants(partial(clamped_silu_mul, gate_up, 1.702, 7.0), wide=True)


@triton.jit
def activation_kernel(  # type: ignore[no-untyped-def]
    gate_up, out, slope, limit, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one block of one row. Grid: (T, WIDTH / BLOCK). Eight elements per thread.

    ACTIVATION: silu | gelu | clamped_silu, of which `slope` and `limit` are.
    Shapes: gate_up [T, 2 * WIDTH], out [T, WIDTH], contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    steep = gate
    if ACTIVATION == "gelu":  # gelu(x), approximated by a hyperbolic tangent, is x * sigmoid(steep)
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    if ACTIVATION == "clamped_silu":
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        steep = slope * gate
    value = gate * (1.0 / (1.0 + tl.exp(-steep))) * up
    tl.store(out + row * WIDTH + column, round_to(value, out.dtype.element_ty), mask=inside)


NORM_TILE = 1024
"""Elements of a program that normalises several short rows."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm over the last dimension. Shapes: x [..., hidden], weight [hidden] of x's type or float32."""
    if weight.dtype not in (x.dtype, torch.float32):
        return reference.rms_norm(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_norm(x, x, weight, out, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual).

    Shapes: x, residual [num_tokens, hidden], weight [hidden] of x's type or float32.
    """
    if x.dtype != residual.dtype or weight.dtype not in (x.dtype, torch.float32):
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, residual, weight, out, total, eps, add=True)
    return out, total


def _launch_norm(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, add: bool
) -> None:
    """Launch the norm kernel over the rows of x."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    if not num_rows:
        return
    block = next_power_of_2(width)
    rows = max(1, NORM_TILE // block)
    rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x, residual, weight.contiguous(), out, total, num_rows, eps,
        ADD=add, WIDTH=width, BLOCK=block, ROWS=rows, num_warps=choose_num_warps(rows * block, 8, most=16), **EXACT,
    )  # fmt: skip


def variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of the activations, and of norms 64 to 16384 wide."""
    yield from _activation_variants(arch)
    for width, dtype in (
        (64, torch.float16), (128, torch.bfloat16), (576, torch.bfloat16), (576, torch.float32), (1024, torch.bfloat16),
        (4096, torch.bfloat16), (4096, torch.float16), (5120, torch.bfloat16), (16384, torch.bfloat16),
    ):  # fmt: skip
        x, weight = (torch.empty(*shape, width, dtype=dtype, device="meta") for shape in ((7,), ()))
        yield from trace_variants(partial(rms_norm, x, weight, 1e-6), wide=True)
        yield from trace_variants(partial(add_rms_norm, x, x, weight, 1e-6), wide=True)
    for width in (256, 640, 1152, 2560):  # Gemma, whose weights are 1 plus those of the checkpoint
        x, weight = torch.empty(7, width, dtype=torch.bfloat16, device="meta"), torch.empty(width, device="meta")
        yield from trace_variants(partial(rms_norm, x, weight, 1e-6), wide=True)
        yield from trace_variants(partial(add_rms_norm, x, x, weight, 1e-6), wide=True)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(  # type: ignore[no-untyped-def]
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
    """Normalise ROWS rows of WIDTH elements.

    With ADD, the rows of x + residual, stored in `total`. Shapes: x, residual, out, total [num_rows, WIDTH], all of one
    dtype and contiguous; weight [WIDTH], of that dtype or float32. Grid: num_rows / ROWS. Eight elements per thread up
    to 4096 wide: one 16-byte access of 16-bit numbers for each of x, residual and weight, all in flight before the sum
    is formed.
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
        summed = round_to(value + added, total.dtype.element_ty)
        tl.store(total + at, summed, mask=inside)
        value = summed.to(tl.float32)  # rounded, as the next layer reads it
    mean = tl.sum(value * value, axis=1, keep_dims=True) / WIDTH
    normed = round_to(value * tl.rsqrt(mean + eps), out.dtype.element_ty)
    tl.store(out + at, round_to(scale * normed.to(tl.float32), out.dtype.element_ty), mask=inside)
