"""Rank several tokens per draw: beams, draws without replacement, top logprobs.

Value and id become one int64 key that orders as (value, -id), so equal values have a defined order. A program takes the
best keys of its chunk one by one; a second kernel takes the best of all chunks.

Symbols: N draws, C chunks, S = `size` tokens per draw. Estimate, not a measurement: about 120 clocks per token taken
from a chunk of 2,048; 75 chunks (V = 151,936), S = 16: 2 us per program, thus 6 us for one draw and 25 us for 256.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_ops import (
    KEY_HIGH,
    KEY_LOW,
    MASK,
    MINUS_INFINITY,
    RAW_ROW,
    ROW,
    TEMPERATURE,
    any_row,
    apply_temperature,
    finite_or_zero,
    gumbel,
    is_finite,
    is_kept,
    load_float,
    load_int,
    load_logits,
    merge_log_sum_exp,
    pack_key,
    program_draws,
    row_max,
    row_sum,
    store_rows,
    unpack_key,
)

NO_KEY = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["num_draws", "size"])
def rank_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    base_ptr,
    table_ptr,
    cuts_ptr,
    words_ptr,
    sums_ptr,
    keys_ptr,
    x_stride,
    num_draws,
    num_tokens,
    num_words,
    num_chunks,
    size,
    MASKED: tl.constexpr,
    ALL: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Find the best tokens of each chunk, its log-sum-exp and the mass of the kept tokens.

    Shapes: x, base, table, cuts, words as in `draw_kernel` -> keys int64 [N, C, S], sums float32 [3, N, C] (maximum,
    sum of exp(x - maximum), sum of exp(scaled) of kept tokens). ALL: S = CHUNK, unordered. Grid (ceil(N / ROWS) * C).
    Draws with a temperature must be FILTERED.
    """
    draw, live = program_draws(tl.program_id(0) // num_chunks, num_draws, ROWS)
    chunk = tl.program_id(0) % num_chunks
    row = load_int(table_ptr, ROW, draw, num_draws).to(tl.int64)
    mask = load_int(table_ptr, MASK, draw, num_draws)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    words = words_ptr + mask.to(tl.int64) * num_words
    x, value = load_logits(x_ptr + row * x_stride, words, ids, num_tokens, mask, MASKED)
    most = row_max(x)
    at, plane = draw * num_chunks + chunk, num_draws * num_chunks
    store_rows(sums_ptr, at, most, live)
    store_rows(sums_ptr + plane, at, row_sum(tl.exp(x - finite_or_zero(most))), live)
    temperature = load_float(table_ptr, TEMPERATURE, draw, num_draws)
    if any_row(temperature > 0):
        scaled = apply_temperature(value, tl.load(cuts_ptr + draw)[:, None], temperature)
        scaled = tl.where(is_kept(scaled, ids, cuts_ptr, draw, num_draws), scaled, MINUS_INFINITY)
        store_rows(sums_ptr + 2 * plane, at, row_sum(tl.exp(scaled)), live)
        low, high = load_int(table_ptr, KEY_LOW, draw, num_draws), load_int(table_ptr, KEY_HIGH, draw, num_draws)
        noise = gumbel(tl.load(base_ptr + ids, mask=ids < num_tokens, other=0), low, high)
        value = tl.where(temperature > 0, scaled + noise, value)
    keys = tl.where(ids < num_tokens, pack_key(value, ids), NO_KEY)
    place = at.to(tl.int64) * size
    if ALL:
        tl.store(keys_ptr + place[:, None] + tl.arange(0, CHUNK)[None, :], keys, mask=live[:, None])
    else:
        for rank in range(size):
            best = tl.max(keys, 1)
            tl.store(keys_ptr + place + rank, best, mask=live)
            keys = tl.where(keys == best[:, None], NO_KEY, keys)


@triton.jit(do_not_specialize=["num_draws", "size", "num_keys"])
def select_kernel(  # type: ignore[no-untyped-def]
    keys_ptr, best_ptr, num_draws, num_keys, size, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """Take the best keys of each draw. Grid (ceil(N / ROWS)).

    Shapes: keys [N, K] -> best [N, S], descending. KEYS >= K, a power of two.
    """
    draw, live = program_draws(tl.program_id(0), num_draws, ROWS)
    offsets = tl.arange(0, KEYS)[None, :]
    keys = tl.load(keys_ptr + draw[:, None].to(tl.int64) * num_keys + offsets, mask=offsets < num_keys, other=NO_KEY)
    for rank in range(size):
        best = tl.max(keys, 1)
        tl.store(best_ptr + draw * size + rank, best, mask=live)
        keys = tl.where(keys == best[:, None], NO_KEY, keys)


@triton.jit(
    do_not_specialize=["num_draws", "size"],
    do_not_specialize_on_alignment=[
        "tokens_ptr",
        "logprobs_ptr",
        "perturbed_ptr",
        "raw_logprobs_ptr",
        "faults_ptr",
    ],
)
def logprob_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    raw_ptr,
    table_ptr,
    cuts_ptr,
    raw_sums_ptr,
    sums_ptr,
    best_ptr,
    tokens_ptr,
    logprobs_ptr,
    perturbed_ptr,
    raw_logprobs_ptr,
    faults_ptr,
    x_stride,
    raw_stride,
    num_draws,
    num_chunks,
    size,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Turn keys into tokens and their log-probabilities. Grid (ceil(N / ROWS)).

    Shapes: best [N, S] -> tokens int32, logprobs, perturbed, raw_logprobs float32 [N, S] (-1, -inf as padding); faults
    [N] as in `finish_kernel`. logprobs: at temperature 0 of x before masks, otherwise of the kept tokens; perturbed:
    the same plus noise; raw_logprobs: of the raw rows. SIZE >= S and CHUNKS >= C, powers of two.
    """
    draw, live = program_draws(tl.program_id(0), num_draws, ROWS)
    chunks = tl.arange(0, CHUNKS)[None, :]
    valid = chunks < num_chunks
    at, plane = draw[:, None] * num_chunks + chunks, num_draws * num_chunks
    temperature = load_float(table_ptr, TEMPERATURE, draw, num_draws)
    warm = temperature > 0
    raw_total = merge_log_sum_exp(raw_sums_ptr, at, valid, plane)
    whole = merge_log_sum_exp(sums_ptr, at, valid, plane)
    kept_mass = row_sum(tl.load(sums_ptr + 2 * plane + at, mask=valid & warm, other=0.0))
    whole = tl.where(warm, tl.log(tl.maximum(tl.where(warm, kept_mass, 1.0), 1e-38)), whole)
    ranks = tl.arange(0, SIZE)[None, :]
    cells = draw[:, None] * size + ranks
    key = tl.load(best_ptr + cells, mask=ranks < size, other=NO_KEY)
    value, ids = unpack_key(key)
    present = (key != NO_KEY) & is_finite(value)
    x_ptr += load_int(table_ptr, ROW, draw, num_draws).to(tl.int64) * x_stride
    raw_ptr += load_int(table_ptr, RAW_ROW, draw, num_draws).to(tl.int64) * raw_stride
    x = tl.load(x_ptr + ids, mask=present, other=0.0).to(tl.float32)
    raw = tl.load(raw_ptr + ids, mask=present, other=0.0).to(tl.float32)
    top = tl.load(cuts_ptr + draw)[:, None]
    clean = tl.where(warm, apply_temperature(x, tl.where(warm, top, 0.0), temperature), value)
    healthy = is_finite(raw_total)
    raw_total = tl.where(healthy, raw_total, 0.0)
    present = present & is_finite(whole)
    whole = tl.where(is_finite(whole), whole, 0.0)
    cells_live = live[:, None] & (ranks < size)
    tl.store(tokens_ptr + cells, tl.where(present, ids, -1), mask=cells_live)
    tl.store(logprobs_ptr + cells, tl.where(present, clean - whole, MINUS_INFINITY), mask=cells_live)
    tl.store(perturbed_ptr + cells, tl.where(present & warm, value - whole, MINUS_INFINITY), mask=cells_live)
    tl.store(raw_logprobs_ptr + cells, tl.where(present, raw - raw_total, MINUS_INFINITY), mask=cells_live)
    some = tl.max(present.to(tl.int32), 1)[:, None] > 0
    store_rows(faults_ptr, draw, tl.where(healthy, tl.where(some, 0, 1), 2), live)
