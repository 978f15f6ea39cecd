"""The gated activation of the feed-forward layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import EXACT
from .rounding import rounded
from .variants import Variant, traced

BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up. Shapes: gate_up [T, 2 * I], gate first -> [T, I]."""
    gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows and width:
        grid = (num_rows, triton.cdiv(width, BLOCK))
        silu_rows[grid](gate_up, out, WIDTH=width, BLOCK=BLOCK, num_warps=4, **EXACT)
    return out


def variants(arch: int) -> Iterator[Variant]:
    """Yield the activations of models with 1536 to 14336 inner dimensions."""
    for width, dtype in ((1536, torch.bfloat16), (3072, torch.float16), (14336, torch.bfloat16), (1536, torch.float32)):
        gate_up = torch.empty(7, 2 * width, dtype=dtype, device="meta")
        yield from traced(partial(silu_mul, gate_up), wide=True)


@triton.jit
def silu_rows(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute one block of one row.

    Shapes: gate_up [T, 2 * WIDTH], out [T, WIDTH], dense. Grid: (T, WIDTH / BLOCK). Eight elements a thread.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    tl.store(out + row * WIDTH + column, rounded(value, out.dtype.element_ty), mask=inside)
