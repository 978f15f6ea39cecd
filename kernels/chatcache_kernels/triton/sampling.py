"""What a sampling launch draws from, and in which portions.

One token for each draw: a pass over the vocabulary in chunks, and a merge.

Symbols: N draws, V vocabulary, C = ceil(V / CHUNK) chunks. Each logit is read once, whatever is asked.

Estimate, not a measurement (H200: 4.8 TB/s, 132 multiprocessors x 128 lanes x 1.75 GHz; about 80 instructions a token,
most of them noise): V = 151,936 in bf16, one draw: 75 programs at once, 0.3 MB, about 5 us with both launches; 256
draws: 39 M tokens x 80 instructions are 105 us, reading 78 MB takes 16 us: the noise is the limit. Greedy draws skip
it: about 20 us for 256. One program for a whole row would take some 60 us for one draw, hence the chunks.

Penalties, biases and bans on single tokens' logits.

Tokens and candidates drawn on the device. What is computed is said in `sampling_draws`, `_cuts`, `_ranks`.

Every function launches and returns; nothing waits for the device, so that all can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import EXACT, next_power_of_2
from .ranks import describe_kernel, rank_kernel, select_kernel
from .sampling_ops import (
    CUT,
    KEY_HIGH,
    KEY_LOW,
    MASK,
    MINUS_INFINITY,
    NUM_FIELDS,
    RAW_ROW,
    ROW,
    SLOT,
    TARGET,
    TEMPERATURE,
    draws_of,
    first_where,
    gumbel,
    is_any,
    is_finite,
    keep,
    largest,
    log_total,
    no_higher,
    number,
    real,
    scale,
    survives,
    total,
    visible,
)
from .topk_topp import cut_kernel
from .variants import Variant, traced


@dataclass(frozen=True, slots=True)
class Launches:
    """How the kernels are launched; not measured.

    chunk: tokens that a program of a draw looks at. block: tokens at a time of a program that looks for a cut, and goes
    over its whole row. rows: draws that a program works for.
    """

    chunk: int = 2048
    warps: int = 4
    block: int = 4096
    cut_warps: int = 16
    rows: int = 64 if triton.knobs.runtime.interpret else 1  # the interpreter takes as long for one as for many


@dataclass(frozen=True, slots=True)
class Draws:
    """What a launch draws from. `cuts`: whether any draw has a CUT.

    Shapes: x [U, V] as drawn from, raw [U', V] as reported (x itself, if nothing is edited), both with dense rows; base
    int32 [V], the hashed token ids; table int32 [NUM_FIELDS, N] (`sampling_rows`); words int32 [M, V / 32] or None.
    """

    x: Tensor
    raw: Tensor
    base: Tensor
    table: Tensor
    words: Tensor | None
    cuts: bool
    launches: Launches = Launches()

    @property
    def num_draws(self) -> int:
        return self.table.shape[1]

    @property
    def chunk(self) -> int:
        return min(self.launches.chunk, next_power_of_2(self.x.shape[1]))

    @property
    def masked(self) -> bool:
        return self.words is not None

    @property
    def warps(self) -> int:
        """Return the warps of a draw's programs; masks take registers, so more of them share a chunk."""
        return self.launches.warps * (2 if self.masked else 1)

    @property
    def block(self) -> int:
        return min(self.launches.block // (2 if self.masked else 1), next_power_of_2(self.x.shape[1]))

    @property
    def cut_warps(self) -> int:
        return self.launches.cut_warps // (2 if self.masked else 1)

    @property
    def num_chunks(self) -> int:
        return -(-self.x.shape[1] // self.chunk)

    @property
    def num_programs(self) -> int:
        return -(-self.num_draws // self.launches.rows)

    @property
    def mask_words(self) -> Tensor:
        """Return the words of masks, or anything where there are none."""
        return self.base if self.words is None else self.words


@triton.jit(do_not_specialize=["num_draws"])
def draw_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    base_ptr,
    table_ptr,
    cuts_ptr,
    words_ptr,
    sums_ptr,
    ids_ptr,
    x_stride,
    num_draws,
    num_tokens,
    num_words,
    num_chunks,
    MASKED: tl.constexpr,
    SUMS_ONLY: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Find each chunk's best token, and its part of the log-sum-exp.

    Shapes: x [U, V] (rows x_stride apart), base int32 [V], table [F, N], cuts [3, N], words int32 [M, W] ->
    sums float32 [4, N, C] (largest, sum of exp(x - largest), largest allowed, best score), ids int32 [N, C].
    SUMS_ONLY: the first two, of the raw rows. Grid (ceil(N / ROWS) * C): one program a chunk of ROWS draws.
    Score: x of greedy draws; (x - top) / temperature + noise of others, where top is the row's where it has a cut, else
    the chunk's; tokens behind the cut have none.
    """
    draw, live = draws_of(tl.program_id(0) // num_chunks, num_draws, ROWS)
    chunk = tl.program_id(0) % num_chunks
    row = number(table_ptr, RAW_ROW if SUMS_ONLY else ROW, draw, num_draws).to(tl.int64)
    mask = number(table_ptr, MASK, draw, num_draws)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    words = words_ptr + mask.to(tl.int64) * num_words
    x, allowed = visible(x_ptr + row * x_stride, words, ids, num_tokens, mask, MASKED)
    most = largest(x)
    at, plane = draw * num_chunks + chunk, num_draws * num_chunks
    keep(sums_ptr, at, most, live)
    keep(sums_ptr + plane, at, total(tl.exp(x - no_higher(most))), live)
    if not SUMS_ONLY:
        top = largest(allowed) if MASKED else most
        score = allowed
        temperature = real(table_ptr, TEMPERATURE, draw, num_draws)
        if is_any(temperature > 0):
            cut = number(table_ptr, CUT, draw, num_draws) != 0
            scaled = scale(allowed, tl.where(cut, tl.load(cuts_ptr + draw)[:, None], top), temperature)
            low, high = number(table_ptr, KEY_LOW, draw, num_draws), number(table_ptr, KEY_HIGH, draw, num_draws)
            noisy = scaled + gumbel(tl.load(base_ptr + ids, mask=ids < num_tokens, other=0), low, high)
            if is_any(cut):
                noisy = tl.where(survives(scaled, ids, cuts_ptr, draw, num_draws) | ~cut, noisy, MINUS_INFINITY)
            score = tl.where(temperature > 0, noisy, score)
        best = largest(score)
        keep(sums_ptr + 2 * plane, at, top, live)
        keep(sums_ptr + 3 * plane, at, best, live)
        keep(ids_ptr, at, first_where(score == best, ids, num_tokens - 1), live)


@triton.jit(
    do_not_specialize=["num_draws"], do_not_specialize_on_alignment=["tokens_ptr", "logprobs_ptr", "faults_ptr"]
)
def finish_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    raw_ptr,
    base_ptr,
    table_ptr,
    raw_sums_ptr,
    sums_ptr,
    ids_ptr,
    last_ptr,
    tokens_ptr,
    logprobs_ptr,
    faults_ptr,
    x_stride,
    raw_stride,
    num_draws,
    num_tokens,
    num_chunks,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Choose among the chunks' best tokens and report.

    Shapes: as `draw_kernel`; raw [U', V]; raw_sums [2 or 4, N, C] of the raw rows; last [slots] -> tokens, logprobs (of
    the raw log-softmax), faults [N] (1: nothing left to draw, 2: raw logits not finite); tokens and last of any integer
    type. CHUNKS >= C, a power of two. Grid (ceil(N / ROWS)).
    Scores are computed again with the whole row's largest, as for an undivided row; at equal scores the lower id wins.
    """
    draw, live = draws_of(tl.program_id(0), num_draws, ROWS)
    offsets = tl.arange(0, CHUNKS)[None, :]
    valid = offsets < num_chunks
    at, plane = draw[:, None] * num_chunks + offsets, num_draws * num_chunks
    score = tl.load(sums_ptr + 3 * plane + at, mask=valid, other=MINUS_INFINITY)
    ids = tl.load(ids_ptr + at, mask=valid, other=num_tokens - 1)
    x_ptr += number(table_ptr, ROW, draw, num_draws).to(tl.int64) * x_stride
    temperature = real(table_ptr, TEMPERATURE, draw, num_draws)
    if is_any(temperature > 0):
        top = largest(tl.load(sums_ptr + 2 * plane + at, mask=valid, other=MINUS_INFINITY))
        low, high = number(table_ptr, KEY_LOW, draw, num_draws), number(table_ptr, KEY_HIGH, draw, num_draws)
        noise = gumbel(tl.load(base_ptr + ids), low, high)
        again = scale(tl.load(x_ptr + ids).to(tl.float32), top, temperature) + noise
        score = tl.where((temperature > 0) & (score > MINUS_INFINITY), again, score)
    best = largest(score)
    token = first_where(score == best, ids, num_tokens - 1)
    alive = (best > MINUS_INFINITY) & is_finite(tl.load(x_ptr + token).to(tl.float32))
    target = number(table_ptr, TARGET, draw, num_draws)
    token = tl.where(target >= 0, target, token)
    raw_ptr += number(table_ptr, RAW_ROW, draw, num_draws).to(tl.int64) * raw_stride
    sum_of_all = log_total(raw_sums_ptr, at, valid, plane)
    healthy = is_finite(sum_of_all)
    logprob = tl.load(raw_ptr + token).to(tl.float32) - tl.where(healthy, sum_of_all, 0.0)
    keep(tokens_ptr, draw, token, live)
    keep(logprobs_ptr, draw, logprob, live)
    fault = tl.where(healthy, tl.where(alive, 0, 1), 2)
    keep(faults_ptr, draw, fault, live)
    slot = number(table_ptr, SLOT, draw, num_draws)
    tl.store(last_ptr + slot, token, mask=live[:, None] & (slot >= 0))


@triton.jit(do_not_specialize=["num_edits"])
def edit_kernel(x_ptr, rows_ptr, ids_ptr, scale_ptr, add_ptr, x_stride, num_edits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Change x in place: x / scale if x > 0 else x * scale, plus add.

    Shapes: x float32 [E, V]; rows, ids int32, scale, add float32 [K]; no cell named twice. Grid (ceil(K / BLOCK)).
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < num_edits
    cells = x_ptr + tl.load(rows_ptr + at, mask=known, other=0).to(tl.int64) * x_stride
    cells += tl.load(ids_ptr + at, mask=known, other=0)
    x, by = tl.load(cells, mask=known, other=0.0), tl.load(scale_ptr + at, mask=known, other=1.0)
    x = tl.where(x > 0, tl.div_rn(x, by), x * by) + tl.load(add_ptr + at, mask=known, other=0.0)
    tl.store(cells, x, mask=known)


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
