"""Matrix product whose rows have the same bits for any number of rows.

    out [T, N] = x [T, K] weight [N, K]^T + bias [N]

                     weight, COLUMNS outputs at a time
                    +------+------+------+
    x, ROWS rows    |      |      |      |     program = one tile of outputs: a loop over all of K, DEPTH numbers at a
    at a time       +------+------+------+     time, in one float32 accumulator; K is never divided among programs
                    |      |      |      |
                    +------+------+------+     rows after the last are read as zeros and not stored

An output depends on its row of x, its row of the weight, and the order of additions over K. The order is that of the
matrix instruction and of the loop, so it does not depend on other rows, on the position of a row in its tile, or on the
number of tiles. `tiles_for` lists the shapes for a dtype: few rows need many programs of few outputs each, many rows
need square tiles. All tiles of a dtype use the same kind of instruction (on compute capability 9.0 `wgmma`, of at least
64 rows) and the same order over K, so their bits should be equal; the caller must verify that on its device before it
uses a tile other than the first.

Compiler report (Triton 3.9, sm_90, bfloat16): 64 to 116 registers, no spills, and 96 KiB of shared memory, so that two
programs fit a multiprocessor. Nothing here was timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import dot
from .launch import round_to
from .variants import Variant, trace_variants


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch configuration of one tile shape: rows of x, outputs, and numbers of K at a time."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def num_programs(self, num_rows: int, num_outputs: int) -> int:
        """Return the number of programs of a product."""
        return -(-num_rows // self.rows) * -(-num_outputs // self.columns)


HALF_TILES: Final = (
    Tile(64, 32, 128, num_warps=4, num_stages=4),
    Tile(64, 64, 128, num_warps=4, num_stages=3),
    Tile(128, 128, 64, num_warps=8, num_stages=3),
)
FLOAT32_TILES: Final = (Tile(16, 64, 32, num_warps=4, num_stages=2),)
"""float32 is multiplied exactly, without matrix units: for comparison, not for speed."""

ROW_TILES = 16
"""Tiles of rows that take the same outputs one after the other, so that the cache holds what they read."""


def tiles_for(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the tiles for a dtype, smallest first."""
    return FLOAT32_TILES if dtype == torch.float32 else HALF_TILES


def choose_tile(tiles: Sequence[Tile], num_rows: int, num_outputs: int, multiprocessors: int) -> Tile:
    """Return the largest of `tiles` that the rows fill and that occupies every multiprocessor, else the first."""
    chosen = first = tiles[0]
    for tile in tiles[1:]:
        if num_rows > tile.rows - first.rows and tile.num_programs(num_rows, num_outputs) >= multiprocessors:
            chosen = tile
    return chosen


@triton.jit(do_not_specialize=["num_rows"])
def multiply_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROW_TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Compute one tile of outputs. Grid: tiles of rows x tiles of outputs.

    Shapes: x [T, K], weight [N, K], bias [N], out [T, N], contiguous and of one dtype.
    """
    column_tiles = tl.cdiv(num_outputs, COLUMNS)
    first_tile = tl.program_id(0) // (ROW_TILES * column_tiles) * ROW_TILES
    height = tl.minimum(tl.cdiv(num_rows, ROWS) - first_tile, ROW_TILES)
    within = tl.program_id(0) % (ROW_TILES * column_tiles)
    row = (first_tile + within % height) * ROWS + tl.arange(0, ROWS)
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)
    taken = row < num_rows
    depth = tl.arange(0, DEPTH)
    left = x + row.to(tl.int64)[:, None] * num_inputs + depth[None, :]
    last = tl.minimum(column, num_outputs - 1)  # outputs after the last are computed again and not stored
    right = weight + last.to(tl.int64)[None, :] * num_inputs + depth[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, num_inputs, DEPTH):
        inside = depth < num_inputs - start
        a = tl.load(left + start, mask=taken[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + start, mask=inside[:, None], other=0.0)
        acc = dot(a, b, acc)
    if HAS_BIAS:
        acc += tl.load(bias + last).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * num_outputs + column[None, :]
    tl.store(out + at, round_to(acc, out.dtype.element_ty), mask=taken[:, None] & (column < num_outputs)[None, :])


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """Return x weight^T + bias, computed in tiles of one shape.

    Shapes: x [num_rows, num_inputs], weight [num_outputs, num_inputs], bias [num_outputs] -> [num_rows, num_outputs].
    """
    x = x.contiguous()
    num_rows, (num_outputs, num_inputs) = len(x), weight.shape
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if num_rows:
        multiply_kernel[(tile.num_programs(num_rows, num_outputs),)](
            x, weight, bias, out, num_rows, num_outputs, num_inputs,
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, ROW_TILES=ROW_TILES, HAS_BIAS=bias is not None,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out


def variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of all tiles, with and without a bias, and of an odd vocabulary."""
    for dtype in (torch.bfloat16, torch.float32):
        empty = partial(torch.empty, device="meta", dtype=dtype)
        for num_outputs in (4096, 50_257):
            x, weight, bias = empty(7, 4096), empty(num_outputs, 4096), empty(num_outputs)
            for tile in tiles_for(dtype):
                for added in (None, bias):
                    yield from trace_variants(partial(multiply, x, weight, added, tile))
