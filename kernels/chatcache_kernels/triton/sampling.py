"""Sample tokens on the device: one pass over the vocabulary in chunks, then a merge.

Every function only launches kernels and never waits for the device, so all of them can be captured in a CUDA graph.
`topk_topp` finds the cut-offs of filters in up to three more launches, `ranks` returns several tokens per draw,
`sampling_ops` holds the table of draws and the operations that all kernels use.

Symbols: N draws, V vocabulary, C = ceil(V / CHUNK) chunks. Each logit is read once.

Estimate, not a measurement (H200: 4.8 TB/s, 132 multiprocessors x 128 lanes x 1.75 GHz; about 80 instructions per
token, most of them noise): V = 151,936 in bf16, one draw: 75 programs at once, 0.3 MB, about 5 us with both launches;
256 draws: 39 M tokens x 80 instructions are 105 us, reading 78 MB takes 16 us, so the noise is the limit. Greedy draws
skip it: about 20 us for 256. One program per row would take about 60 us for one draw, hence the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import EXACT, next_power_of_2
from .ranks import logprob_kernel, rank_kernel, select_kernel
from .sampling_ops import (
    FILTERED,
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
    any_row,
    apply_temperature,
    finite_or_zero,
    first_index_where,
    gumbel,
    is_finite,
    is_kept,
    load_float,
    load_int,
    load_logits,
    merge_log_sum_exp,
    program_draws,
    row_max,
    row_sum,
    store_rows,
)
from .topk_topp import GROUPS, collect_kernel, cutoff_kernel, group_max_kernel
from .variants import Variant, trace_variants


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Launch parameters of the sampling kernels; not measured.

    chunk: tokens per program of a draw. filter_chunk: tokens per program that looks for candidates. block: tokens at a
    time of a program that searches the cut-off of a row. filter_warps: of both. max_found: candidates that the list of
    a row holds. rows: draws per program.
    """

    chunk: int = 2048
    warps: int = 4
    filter_chunk: int = 8192
    block: int = 1024
    filter_warps: int = 8
    max_found: int = 8192
    rows: int = 64 if triton.knobs.runtime.interpret else 1  # the interpreter takes as long for one row as for many


@dataclass(frozen=True, slots=True)
class DrawBatch:
    """The draws (one sampling decision each) of a launch.

    `has_filters`: whether any draw has FILTERED set in the table; `has_limits`: whether any has top_k or top_p.
    Shapes: x [U, vocab_size] to draw from, raw [U', vocab_size] to report from (x itself if nothing was edited), rows
    contiguous; base [vocab_size] int32, the hashed token ids; table [NUM_FIELDS, num_draws] int32 (see `sampling_ops`);
    words [M, vocab_size / 32] int32 or None: mask words, one bit per allowed token.
    """

    x: Tensor
    raw: Tensor
    base: Tensor
    table: Tensor
    words: Tensor | None
    has_filters: bool
    has_limits: bool
    launches: LaunchConfig = LaunchConfig()

    @property
    def num_draws(self) -> int:
        """Return the number of draws, N."""
        return self.table.shape[1]

    @property
    def chunk(self) -> int:
        """Return how many tokens of the vocabulary a program reads (a chunk)."""
        return min(self.launches.chunk, next_power_of_2(self.x.shape[1]))

    @property
    def masked(self) -> bool:
        """Return whether the launch has mask words."""
        return self.words is not None

    @property
    def warps(self) -> int:
        """Return the warps per program; masks take registers, so more warps share a chunk."""
        return self.launches.warps * (2 if self.masked else 1)

    @property
    def block(self) -> int:
        """Return how many tokens the cut-off search reads at a time."""
        return min(self.launches.block, next_power_of_2(self.x.shape[1]))

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks of the vocabulary, C."""
        return -(-self.x.shape[1] // self.chunk)

    @property
    def num_programs(self) -> int:
        """Return how many programs share the draws, for each chunk."""
        return -(-self.num_draws // self.launches.rows)

    @property
    def mask_words(self) -> Tensor:
        """Return the mask words, or any int32 tensor if there are none."""
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
    """Find each chunk's best token and its part of the log-sum-exp.

    Shapes: x [U, V] (rows x_stride apart), base int32 [V], table [F, N], cuts [3, N], words int32 [M, W] -> sums
    float32 [4, N, C] (maximum, sum of exp(x - maximum), allowed maximum, best score), ids int32 [N, C]. SUMS_ONLY: only
    the first two, of the raw rows. Grid (ceil(N / ROWS) * C): one program per chunk of ROWS draws. Score: x for greedy
    draws; otherwise (x - top) / temperature + noise, where top is the maximum of the row if the draw is FILTERED, else
    of the chunk; tokens after the cut-off have none.
    """
    draw, live = program_draws(tl.program_id(0) // num_chunks, num_draws, ROWS)
    chunk = tl.program_id(0) % num_chunks
    row = load_int(table_ptr, RAW_ROW if SUMS_ONLY else ROW, draw, num_draws).to(tl.int64)
    mask = load_int(table_ptr, MASK, draw, num_draws)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    words = words_ptr + mask.to(tl.int64) * num_words
    x, allowed = load_logits(x_ptr + row * x_stride, words, ids, num_tokens, mask, MASKED)
    most = row_max(x)
    at, plane = draw * num_chunks + chunk, num_draws * num_chunks
    store_rows(sums_ptr, at, most, live)
    store_rows(sums_ptr + plane, at, row_sum(tl.exp(x - finite_or_zero(most))), live)
    if not SUMS_ONLY:
        top = row_max(allowed) if MASKED else most
        score = allowed
        temperature = load_float(table_ptr, TEMPERATURE, draw, num_draws)
        if any_row(temperature > 0):
            cut = load_int(table_ptr, FILTERED, draw, num_draws) != 0
            scaled = apply_temperature(allowed, tl.where(cut, tl.load(cuts_ptr + draw)[:, None], top), temperature)
            low, high = load_int(table_ptr, KEY_LOW, draw, num_draws), load_int(table_ptr, KEY_HIGH, draw, num_draws)
            noisy = scaled + gumbel(tl.load(base_ptr + ids, mask=ids < num_tokens, other=0), low, high)
            if any_row(cut):
                noisy = tl.where(is_kept(scaled, ids, cuts_ptr, draw, num_draws) | ~cut, noisy, MINUS_INFINITY)
            score = tl.where(temperature > 0, noisy, score)
        best = row_max(score)
        store_rows(sums_ptr + 2 * plane, at, top, live)
        store_rows(sums_ptr + 3 * plane, at, best, live)
        store_rows(ids_ptr, at, first_index_where(score == best, ids, num_tokens - 1), live)


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
    """Choose among the chunks' best tokens and report the token, its logprob and faults.

    Shapes: as `draw_kernel`; raw [U', V]; raw_sums [2 or 4, N, C] of the raw rows; last [slots] -> tokens, logprobs (of
    the raw log-softmax), faults [N] (NO_TOKEN_LEFT, NOT_FINITE or 0); tokens and last of any integer type. CHUNKS >= C,
    a power of two. Grid (ceil(N / ROWS)). Scores are recomputed with the maximum of the whole row, as for an undivided
    row; at equal scores the lower id wins.
    """
    draw, live = program_draws(tl.program_id(0), num_draws, ROWS)
    offsets = tl.arange(0, CHUNKS)[None, :]
    valid = offsets < num_chunks
    at, plane = draw[:, None] * num_chunks + offsets, num_draws * num_chunks
    score = tl.load(sums_ptr + 3 * plane + at, mask=valid, other=MINUS_INFINITY)
    ids = tl.load(ids_ptr + at, mask=valid, other=num_tokens - 1)
    x_ptr += load_int(table_ptr, ROW, draw, num_draws).to(tl.int64) * x_stride
    temperature = load_float(table_ptr, TEMPERATURE, draw, num_draws)
    if any_row(temperature > 0):
        top = row_max(tl.load(sums_ptr + 2 * plane + at, mask=valid, other=MINUS_INFINITY))
        low, high = load_int(table_ptr, KEY_LOW, draw, num_draws), load_int(table_ptr, KEY_HIGH, draw, num_draws)
        noise = gumbel(tl.load(base_ptr + ids), low, high)
        again = apply_temperature(tl.load(x_ptr + ids).to(tl.float32), top, temperature) + noise
        score = tl.where((temperature > 0) & (score > MINUS_INFINITY), again, score)
    best = row_max(score)
    token = first_index_where(score == best, ids, num_tokens - 1)
    alive = (best > MINUS_INFINITY) & is_finite(tl.load(x_ptr + token).to(tl.float32))
    target = load_int(table_ptr, TARGET, draw, num_draws)
    token = tl.where(target >= 0, target, token)
    raw_ptr += load_int(table_ptr, RAW_ROW, draw, num_draws).to(tl.int64) * raw_stride
    sum_of_all = merge_log_sum_exp(raw_sums_ptr, at, valid, plane)
    healthy = is_finite(sum_of_all)
    logprob = tl.load(raw_ptr + token).to(tl.float32) - tl.where(healthy, sum_of_all, 0.0)
    store_rows(tokens_ptr, draw, token, live)
    store_rows(logprobs_ptr, draw, logprob, live)
    fault = tl.where(healthy, tl.where(alive, 0, 1), 2)
    store_rows(faults_ptr, draw, fault, live)
    slot = load_int(table_ptr, SLOT, draw, num_draws)
    tl.store(last_ptr + slot, token, mask=live[:, None] & (slot >= 0))


@triton.jit(do_not_specialize=["num_edits"])
def edit_kernel(x_ptr, rows_ptr, ids_ptr, scale_ptr, add_ptr, x_stride, num_edits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Change logits in place: x / scale if x > 0 else x * scale, plus add.

    Shapes: x float32 [E, V]; rows, ids int32, scale, add float32 [K]; every cell at most once. Grid (ceil(K / BLOCK)).
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < num_edits
    cells = x_ptr + tl.load(rows_ptr + at, mask=known, other=0).to(tl.int64) * x_stride
    cells += tl.load(ids_ptr + at, mask=known, other=0)
    x, by = tl.load(cells, mask=known, other=0.0), tl.load(scale_ptr + at, mask=known, other=1.0)
    x = tl.where(x > 0, tl.div_rn(x, by), x * by) + tl.load(add_ptr + at, mask=known, other=0.0)
    tl.store(cells, x, mask=known)


NO_TOKEN_LEFT, NOT_FINITE = 1, 2
MAX_SELECTED = 64
"""Up to this many tokens are taken one by one by a program; for more, torch sorts the keys."""
MAX_SORT_KEYS = 8192
"""Keys that fit one program."""


def variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of draws with and without masks and edits, and of ranked tokens."""
    for vocab_size, dtype in ((151_936, torch.bfloat16), (50_257, torch.float16), (49_152, torch.float32)):
        empty = partial(torch.empty, device="meta")
        raw, edited = empty(3, vocab_size, dtype=dtype), empty(3, vocab_size)
        base, table = (empty(*shape, dtype=torch.int32) for shape in ((vocab_size,), (NUM_FIELDS, 7)))
        last, tokens, faults = empty(9, dtype=torch.int64), empty(7, dtype=torch.int64), empty(7, dtype=torch.int32)
        yield from trace_variants(
            partial(draw, DrawBatch(raw, raw, base, table, None, True, True), last, tokens, empty(7), faults)
        )
        words = empty(1, -(-vocab_size // 32), dtype=torch.int32)
        for x in (raw, edited):
            draws = DrawBatch(x, raw, base, table, words, True, True)
            yield from trace_variants(partial(draw, draws, last, faults, empty(7), faults))
            for size in (5, 20, 100) if dtype == torch.bfloat16 else (5,):
                found = empty(7, size, dtype=torch.int32), *(empty(7, size) for _ in range(3)), faults
                yield from trace_variants(partial(rank_tokens, draws, RankedTokens(*found)))
        yield from trace_variants(partial(apply_edits, edited, tokens.int(), faults, empty(7), empty(7)))


def draw(draws: DrawBatch, last: Tensor, tokens: Tensor, logprobs: Tensor, faults: Tensor) -> None:
    """Sample one token for each entry of `draws`.

    Shapes: last [slots], where the token of an entry with a slot is also stored; tokens [num_draws]; logprobs
    [num_draws] float32, of the raw log-softmax; faults [num_draws] int32 (0, NO_TOKEN_LEFT, or NOT_FINITE for the raw
    logits). tokens and last may have any integer type.
    """
    if not draws.num_draws:
        return
    num_chunks = draws.num_chunks
    ids = torch.empty(draws.num_draws, num_chunks, dtype=torch.int32, device=tokens.device)
    cuts = find_cutoffs(draws)
    sums = _launch_draw_pass(draws, ids, cuts, SUMS_ONLY=False)
    raw_sums = sums if draws.raw is draws.x else _launch_draw_pass(draws, ids, cuts, SUMS_ONLY=True)
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
        num_chunks,
        ROWS=draws.launches.rows,
        CHUNKS=next_power_of_2(num_chunks),
        **EXACT,
    )


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """Output of `rank_tokens`: the best tokens of each draw, best first; -1 and -inf as padding.

    Shapes: tokens int32, logprobs, perturbed, raw_logprobs float32 [num_draws, size]; faults int32 [num_draws].
    """

    tokens: Tensor
    logprobs: Tensor
    perturbed: Tensor
    raw_logprobs: Tensor
    faults: Tensor


def rank_tokens(draws: DrawBatch, out: RankedTokens) -> None:
    """Find the `size` best tokens of each draw, without replacement where it has a temperature.

    Draws with a temperature must be FILTERED. logprobs: at temperature 0 of x before masks, otherwise of the tokens
    that masks and filters keep; perturbed: the same plus Gumbel noise.
    """
    size = out.tokens.shape[1]
    if not draws.num_draws or not size:
        return
    device, num_chunks = out.tokens.device, draws.num_chunks
    taken = min(size, draws.chunk) if size <= MAX_SELECTED else draws.chunk
    keys = torch.empty(draws.num_draws, num_chunks * taken, dtype=torch.int64, device=device)
    sums = torch.empty(3, draws.num_draws, num_chunks, dtype=torch.float32, device=device)
    cuts = find_cutoffs(draws)
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
        ALL=size > MAX_SELECTED,
        ROWS=draws.launches.rows,
        CHUNK=draws.chunk,
        num_warps=draws.warps,
        **EXACT,
    )
    logprob_kernel[(draws.num_programs,)](
        draws.x,
        draws.raw,
        draws.table,
        cuts,
        sums if draws.raw is draws.x else _launch_draw_pass(draws, draws.table, cuts, SUMS_ONLY=True),
        sums,
        _select_best_keys(draws, keys, size),
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
        SIZE=next_power_of_2(max(size, MAX_SELECTED)),
        **EXACT,
    )


def apply_edits(x: Tensor, rows: Tensor, ids: Tensor, scale: Tensor, add: Tensor) -> None:
    """Change logits in place: x / scale if x > 0 else x * scale, plus add.

    Penalties, biases and bans. Shapes: x [num_rows, vocab_size] float32; rows, ids int32, scale, add float32
    [num_edits]; every cell at most once.
    """
    if len(ids):
        grid = (triton.cdiv(len(ids), 256),)
        edit_kernel[grid](x, rows, ids, scale, add, x.stride(0), len(ids), BLOCK=256, **EXACT)


def _launch_draw_pass(draws: DrawBatch, ids: Tensor, cuts: Tensor, *, SUMS_ONLY: bool) -> Tensor:
    """Launch the pass over the vocabulary; `SUMS_ONLY`: only the log-sum-exp of the raw rows."""
    num_chunks = draws.num_chunks
    sums = torch.empty(2 if SUMS_ONLY else 4, draws.num_draws, num_chunks, dtype=torch.float32, device=cuts.device)
    x = draws.raw if SUMS_ONLY else draws.x
    draw_kernel[(draws.num_programs * num_chunks,)](
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
        num_chunks,
        MASKED=draws.masked and not SUMS_ONLY,
        SUMS_ONLY=SUMS_ONLY,
        ROWS=draws.launches.rows,
        CHUNK=draws.chunk,
        num_warps=draws.warps,
        **EXACT,
    )
    return sums


def find_cutoffs(draws: DrawBatch) -> Tensor:
    """Find the cut-offs of filtered draws: float32 [3, N] as in `cutoff_kernel`.

    Other cells are unset.
    """
    num_draws, vocab_size, device = draws.num_draws, draws.x.shape[1], draws.table.device
    cuts = torch.empty(3, num_draws, dtype=torch.float32, device=device)
    if not draws.has_filters:
        return cuts
    chunk = max(min(draws.launches.filter_chunk, next_power_of_2(vocab_size)), int(GROUPS.value))
    num_chunks = -(-vocab_size // chunk)
    max_found = draws.launches.max_found if draws.has_limits else 0
    groups = torch.empty(num_draws, num_chunks * int(GROUPS.value), dtype=torch.float32, device=device)
    found = torch.empty(num_draws, 1 + num_chunks + max_found, dtype=torch.int64, device=device)
    sizes = (draws.x.stride(0), num_draws, vocab_size, draws.mask_words.shape[-1], num_chunks)
    inputs = (draws.x, draws.table, draws.mask_words, groups, found)
    same: dict[str, Any] = {"MASKED": draws.masked, "ROWS": draws.launches.rows, "MAX_FOUND": max_found, **EXACT}
    same["num_warps"] = draws.launches.filter_warps
    all_groups = next_power_of_2(groups.shape[1])
    grid = (draws.num_programs * num_chunks,)
    group_max_kernel[grid](*inputs, *sizes, CHUNK=chunk, **same)
    if draws.has_limits:
        block = min(chunk, 2 * draws.block)
        collect_kernel[grid](*inputs, *sizes, CHUNK=chunk, BLOCK=block, ALL_GROUPS=all_groups, **same)
    cutoff_kernel[(draws.num_programs,)](*inputs, cuts, *sizes, BLOCK=draws.block, ALL_GROUPS=all_groups, **same)
    return cuts


def _select_best_keys(draws: DrawBatch, keys: Tensor, size: int) -> Tensor:
    """Return the best keys of each draw, descending. Shapes: keys [N, K] -> [N, size]."""
    tile = next_power_of_2(draws.num_chunks * MAX_SELECTED)  # independent of `size`, so that nothing compiles anew
    if size > MAX_SELECTED or tile > MAX_SORT_KEYS:
        return keys.topk(size).values.contiguous()  # keys are distinct, so their order is unique
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
