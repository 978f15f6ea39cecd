"""Tokens and candidates drawn on the device. What is computed is said in `sampling_draws`, `_cuts`, `_ranks`.

Every function launches and returns; nothing waits for the device, so that all can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from .launch import EXACT, next_power_of_2
from .sampling_cuts import cut_kernel
from .sampling_draws import draw_kernel, finish_kernel
from .sampling_edits import edit_kernel
from .sampling_ranks import describe_kernel, rank_kernel, select_kernel
from .sampling_rows import NUM_FIELDS
from .sampling_task import Draws, Launches
from .variants import Variant, traced

__all__ = ["NOTHING_LEFT", "NOT_FINITE", "Draws", "Launches", "Ranked", "draw", "edit", "rank", "variants"]

NOTHING_LEFT, NOT_FINITE = 1, 2
MOST_SELECTED = 64
"""Tokens that a program takes one by one; of more, torch sorts the keys."""
MOST_KEYS = 8192
"""Keys that fit a program."""


def variants(arch: int) -> Iterator[Variant]:
    """Yield the launches of plain draws, and of draws with masks, from edited copies, several at once."""
    for vocab_size, dtype in ((151_936, torch.bfloat16), (50_257, torch.float16), (49_152, torch.float32)):
        empty = partial(torch.empty, device="meta")
        raw, edited = empty(3, vocab_size, dtype=dtype), empty(3, vocab_size)
        base, table = (empty(*shape, dtype=torch.int32) for shape in ((vocab_size,), (NUM_FIELDS, 7)))
        last, tokens, faults = empty(9, dtype=torch.int64), empty(7, dtype=torch.int64), empty(7, dtype=torch.int32)
        yield from traced(partial(draw, Draws(raw, raw, base, table, None, True), last, tokens, empty(7), faults))
        words = empty(1, -(-vocab_size // 32), dtype=torch.int32)
        for x in (raw, edited):
            draws = Draws(x, raw, base, table, words, True)
            yield from traced(partial(draw, draws, last, faults, empty(7), faults))
            for size in (5, 20, 100) if dtype == torch.bfloat16 else (5,):
                found = empty(7, size, dtype=torch.int32), *(empty(7, size) for _ in range(3)), faults
                yield from traced(partial(rank, draws, Ranked(*found)))
        yield from traced(partial(edit, edited, tokens.int(), faults, empty(7), empty(7)))


def draw(draws: Draws, last: Tensor, tokens: Tensor, logprobs: Tensor, faults: Tensor) -> None:
    """Draw one token each.

    Shapes: last [slots], where draws that have a slot leave their token; tokens [N], logprobs float32 [N] of the raw
    log-softmax, faults int32 [N] (0; NOTHING_LEFT to draw; NOT_FINITE: the raw logits). tokens, last: any integer type.
    """
    if not draws.num_draws:
        return
    ids = torch.empty(draws.num_draws, draws.num_chunks, dtype=torch.int32, device=tokens.device)
    cuts = _cut(draws)
    sums = _sums(draws, ids, cuts, SUMS_ONLY=False)
    raw_sums = sums if draws.raw is draws.x else _sums(draws, ids, cuts, SUMS_ONLY=True)
    finish_kernel[(draws.num_programs,)](
        draws.x,
        draws.raw,
        draws.base,
        draws.table,
        raw_sums,
        sums,
        ids,
        last,
        tokens,
        logprobs,
        faults,
        draws.x.stride(0),
        draws.raw.stride(0),
        draws.num_draws,
        draws.x.shape[1],
        draws.num_chunks,
        ROWS=draws.launches.rows,
        CHUNKS=next_power_of_2(draws.num_chunks),
        **EXACT,
    )


@dataclass(frozen=True, slots=True)
class Ranked:
    """Where `rank` writes: S tokens of each draw, best first; -1, -inf where nothing is left.

    Shapes: tokens int32, logprobs, perturbed, raw_logprobs float32 [N, S]; faults int32 [N].
    """

    tokens: Tensor
    logprobs: Tensor
    perturbed: Tensor
    raw_logprobs: Tensor
    faults: Tensor


def rank(draws: Draws, out: Ranked) -> None:
    """Take the S best tokens of each draw, without replacement where it has a temperature; such draws must have a CUT.

    logprobs: at temperature 0 of x before masks, else of what survives masks and filters; perturbed: those with the
    noise.
    """
    size = out.tokens.shape[1]
    if not draws.num_draws or not size:
        return
    device, num_chunks = out.tokens.device, draws.num_chunks
    taken = min(size, draws.chunk) if size <= MOST_SELECTED else draws.chunk
    keys = torch.empty(draws.num_draws, num_chunks * taken, dtype=torch.int64, device=device)
    sums = torch.empty(3, draws.num_draws, num_chunks, dtype=torch.float32, device=device)
    cuts = _cut(draws)
    rank_kernel[(draws.num_programs * num_chunks,)](
        draws.x,
        draws.base,
        draws.table,
        cuts,
        draws.mask_words,
        sums,
        keys,
        draws.x.stride(0),
        draws.num_draws,
        draws.x.shape[1],
        draws.mask_words.shape[-1],
        num_chunks,
        taken,
        MASKED=draws.masked,
        ALL=size > MOST_SELECTED,
        ROWS=draws.launches.rows,
        CHUNK=draws.chunk,
        num_warps=draws.warps,
        **EXACT,
    )
    describe_kernel[(draws.num_programs,)](
        draws.x,
        draws.raw,
        draws.table,
        cuts,
        sums if draws.raw is draws.x else _sums(draws, draws.table, cuts, SUMS_ONLY=True),
        sums,
        _best(draws, keys, size),
        out.tokens,
        out.logprobs,
        out.perturbed,
        out.raw_logprobs,
        out.faults,
        draws.x.stride(0),
        draws.raw.stride(0),
        draws.num_draws,
        num_chunks,
        size,
        ROWS=draws.launches.rows,
        CHUNKS=next_power_of_2(num_chunks),
        SIZE=next_power_of_2(max(size, MOST_SELECTED)),
        **EXACT,
    )


def edit(x: Tensor, rows: Tensor, ids: Tensor, scale: Tensor, add: Tensor) -> None:
    """Change single logits in place: x / scale if x > 0 else x * scale, plus add.

    Shapes: x float32 [E, V]; rows, ids int32, scale, add float32 [K]; no cell named twice.
    """
    if len(ids):
        grid = (triton.cdiv(len(ids), 256),)
        edit_kernel[grid](x, rows, ids, scale, add, x.stride(0), len(ids), BLOCK=256, **EXACT)


def _sums(draws: Draws, ids: Tensor, cuts: Tensor, *, SUMS_ONLY: bool) -> Tensor:
    """Run a draw's pass over the vocabulary: of what is drawn from, or only the log-sum-exp of the raw rows."""
    sums = torch.empty(
        2 if SUMS_ONLY else 4, draws.num_draws, draws.num_chunks, dtype=torch.float32, device=cuts.device
    )
    x = draws.raw if SUMS_ONLY else draws.x
    draw_kernel[(draws.num_programs * draws.num_chunks,)](
        x,
        draws.base,
        draws.table,
        cuts,
        draws.mask_words,
        sums,
        ids,
        x.stride(0),
        draws.num_draws,
        x.shape[1],
        draws.mask_words.shape[-1],
        draws.num_chunks,
        MASKED=draws.masked and not SUMS_ONLY,
        SUMS_ONLY=SUMS_ONLY,
        ROWS=draws.launches.rows,
        CHUNK=draws.chunk,
        num_warps=draws.warps,
        **EXACT,
    )
    return sums


def _cut(draws: Draws) -> Tensor:
    """Find where filtered draws' survivors end. Returns float32 [3, N] as `cut_kernel`; other cells stay unset."""
    cuts = torch.empty(3, draws.num_draws, dtype=torch.float32, device=draws.table.device)
    if draws.cuts:
        cut_kernel[(draws.num_programs,)](
            draws.x,
            draws.table,
            draws.mask_words,
            cuts,
            draws.x.stride(0),
            draws.num_draws,
            draws.x.shape[1],
            draws.mask_words.shape[-1],
            MASKED=draws.masked,
            ROWS=draws.launches.rows,
            BLOCK=draws.block,
            num_warps=draws.cut_warps,
            **EXACT,
        )
    return cuts


def _best(draws: Draws, keys: Tensor, size: int) -> Tensor:
    """Return the best keys of each draw, descending. Shapes: [N, K] -> [N, S]."""
    tile = next_power_of_2(draws.num_chunks * MOST_SELECTED)  # whatever is asked for, so that nothing compiles anew
    if size > MOST_SELECTED or tile > MOST_KEYS:
        return keys.topk(size).values.contiguous()  # no two are equal, so their order is the only one
    best = torch.empty(draws.num_draws, size, dtype=torch.int64, device=keys.device)
    select_kernel[(draws.num_programs,)](
        keys,
        best,
        draws.num_draws,
        keys.shape[1],
        size,
        ROWS=draws.launches.rows,
        KEYS=tile,
        num_warps=8 if tile > 2048 else 4,
        **EXACT,
    )
    return best
