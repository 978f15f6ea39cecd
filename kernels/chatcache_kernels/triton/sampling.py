"""Tokens and candidates drawn on the device. What is computed is said in `sampling_draws`, `_cuts`, `_ranks`.

Every function launches and returns; nothing waits for the device, so that all can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from .sampling_draws import draw_kernel, finish_kernel

CHUNK = 2048
"""Tokens a program of a draw looks at: with 4 warps 16 a thread. Not measured."""
ROWS = 64 if triton.knobs.runtime.interpret else 1
"""Draws a program works for. The interpreter takes as long for one as for many."""
WARPS = 4
OPTIONS = {"enable_fp_fusion": False, "num_warps": WARPS}
"""A product and a sum are two roundings, as on the CPU."""


@dataclass(frozen=True, slots=True)
class Draws:
    """What a launch draws from. Shapes: x [U, V] as drawn from; raw [U', V] as reported (x, where nothing was edited);
    both with dense rows; base int32 [V], the hashed token ids; table int32 [NUM_FIELDS, N] (`sampling_rows`); words
    int32 [M, ceil(V / 32)] or None; cuts: whether any draw has a filter."""

    x: Tensor
    raw: Tensor
    base: Tensor
    table: Tensor
    words: Tensor | None
    cuts: bool
    chunk: int = CHUNK
    rows: int = ROWS

    @property
    def num_draws(self) -> int:
        return self.table.shape[1]

    @property
    def num_chunks(self) -> int:
        return -(-self.x.shape[1] // self.chunk)


def draw(draws: Draws, last: Tensor, out: Tensor) -> None:
    """Draw one token each.

    Shapes: last int32 [slots], where draws with a slot leave their token; out int32 [3, N]: token, the bits of its raw
    log-probability, fault (1: nothing left to draw, 2: the raw logits are not finite).
    """
    if not draws.num_draws:
        return
    chunks = draws.num_chunks
    ids = torch.empty(draws.num_draws, chunks, dtype=torch.int32, device=out.device)
    cuts = _cut(draws)
    sums = _sums(draws, ids, cuts, 4)
    raw_sums = sums if draws.raw is draws.x else _sums(draws, ids, cuts, 2)
    finish_kernel[(triton.cdiv(draws.num_draws, draws.rows),)](
        draws.x,
        draws.raw,
        draws.base,
        draws.table,
        raw_sums,
        sums,
        ids,
        cuts,
        last,
        out,
        draws.x.stride(0),
        draws.raw.stride(0),
        draws.num_draws,
        draws.x.shape[1],
        chunks,
        ROWS=draws.rows,
        CHUNKS=triton.next_power_of_2(chunks),
        **OPTIONS,
    )


def _sums(draws: Draws, ids: Tensor, cuts: Tensor, planes: int) -> Tensor:
    """Run the pass over the vocabulary: of what is drawn from (4 planes), or of the raw rows (2)."""
    sums = torch.empty(planes, *ids.shape, dtype=torch.float32, device=ids.device)
    x = draws.x if planes == 4 else draws.raw
    masked = draws.words is not None and planes == 4
    words = draws.words if draws.words is not None else draws.base
    draw_kernel[(triton.cdiv(draws.num_draws, draws.rows) * draws.num_chunks,)](
        x,
        draws.base,
        draws.table,
        cuts,
        words,
        sums,
        ids,
        x.stride(0),
        draws.num_draws,
        x.shape[1],
        words.shape[-1],
        draws.num_chunks,
        MASKED=masked,
        SUMS_ONLY=planes == 2,
        ROWS=draws.rows,
        CHUNK=draws.chunk,
        **OPTIONS,
    )
    return sums


def _cut(draws: Draws) -> Tensor:
    """Find where each filtered draw's survivors end. Returns float32 [3, N]: largest, least, last id at the least."""
    return torch.empty(3, draws.num_draws, dtype=torch.float32, device=draws.table.device)
