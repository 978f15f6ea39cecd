"""One token for each draw: a pass over the vocabulary in chunks, and a merge.

Symbols: N draws, V vocabulary, C = ceil(V / CHUNK) chunks. Each logit is read once, whatever is asked.

Estimate, not a measurement (H200: 4.8 TB/s, 132 multiprocessors x 128 lanes x 1.75 GHz; about 80 instructions a token,
most of them noise): V = 151,936 in bf16, one draw: 75 programs at once, 0.3 MB, about 5 us with both launches; 256
draws: 39 M tokens x 80 instructions are 105 us, reading 78 MB takes 16 us: the noise is the limit. Greedy draws skip
it: about 20 us for 256. One program for a whole row would take some 60 us for one draw, hence the chunks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_noise import gumbel
from .sampling_rows import (
    CUT,
    KEY_HIGH,
    KEY_LOW,
    MASK,
    MINUS_INFINITY,
    RAW_ROW,
    ROW,
    SLOT,
    TARGET,
    TEMPERATURE,
    draws_of,
    first_where,
    is_any,
    keep,
    largest,
    no_higher,
    number,
    real,
    scale,
    total,
    visible,
)


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


@triton.jit
def survives(scaled, ids, cuts_ptr, draw, num_draws):  # type: ignore[no-untyped-def]
    """Tell which tokens a draw's cut leaves: all above the least, and of its equals those up to the last."""
    least = tl.load(cuts_ptr + num_draws + draw)[:, None]
    last = tl.load(cuts_ptr + 2 * num_draws + draw).to(tl.int32, bitcast=True)[:, None]
    return (scaled > least) | ((scaled == least) & (ids <= last))


@triton.jit
def log_total(sums_ptr, at, valid, plane):  # type: ignore[no-untyped-def]
    """Merge chunks' parts of log-sum-exps; inf or -inf where logits are not finite. Shapes: [R, C] -> [R, 1]."""
    most = tl.load(sums_ptr + at, mask=valid, other=MINUS_INFINITY)
    part = tl.load(sums_ptr + plane + at, mask=valid, other=0.0)
    top = no_higher(largest(most))
    part = total(part * tl.exp(most - top))
    return tl.where(part > 0, top + tl.log(tl.maximum(part, 1e-38)), MINUS_INFINITY)


@triton.jit
def is_finite(x):  # type: ignore[no-untyped-def]
    return (x > MINUS_INFINITY) & (x < float("inf"))


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
