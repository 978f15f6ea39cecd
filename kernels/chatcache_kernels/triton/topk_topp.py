"""Find the exact cut-off of min_p, top_k and top_p in each row by search, without sorting.

In rank order (value descending, id ascending) the kept tokens are a prefix. It ends at a value and, among the tokens
equal to it, at a last id. Both limits need the largest value v for which the tokens at v and above reach a total: their
number for top_k, the sum of their probabilities for top_p. The search keeps a range that contains v. Each pass over the
row computes the total for four values in the range and leaves a quarter of it, until one value is left.

Estimate, not a measurement: about 45 instructions per token and pass; bf16 logits take about 6 passes for each limit,
then two or three for equal values. V = 151,936: about 30 us per pass, 200 to 250 us per row and limit; 132 rows at
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_ops import (
    FILTERED,
    LOG_MIN_P,
    MASK,
    MINUS_INFINITY,
    ROW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    any_row,
    apply_temperature,
    first_index_where,
    load_float,
    load_int,
    load_logits,
    program_draws,
    row_max,
    row_sum,
    store_rows,
)

INFINITY = tl.constexpr(float("inf"))
LOWEST_FINITE = tl.constexpr(-3.0e38)  # values below are -inf and do not count as tokens
EXP_UNDERFLOW = tl.constexpr(-104.0)  # exp of values below is 0


@triton.jit(do_not_specialize=["num_draws"])
def cutoff_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    table_ptr,
    words_ptr,
    cuts_ptr,
    x_stride,
    num_draws,
    num_tokens,
    num_words,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the tokens that the filters of each FILTERED draw keep. Grid (ceil(N / ROWS)).

    Shapes: x [U, V], table [F, N], words int32 [M, W] -> cuts float32 [3, N]: the largest allowed logit, the smallest
    scaled value that is kept, and (as bits) the last kept id among its equals.
    """
    draw, live = program_draws(tl.program_id(0), num_draws, ROWS)
    wanted = load_int(table_ptr, FILTERED, draw, num_draws) != 0
    if any_row(wanted):
        row = x_ptr + load_int(table_ptr, ROW, draw, num_draws).to(tl.int64) * x_stride
        mask = load_int(table_ptr, MASK, draw, num_draws)
        words = words_ptr + mask.to(tl.int64) * num_words
        best = tl.full([ROWS, BLOCK], MINUS_INFINITY, tl.float32)
        for start in range(0, num_tokens, BLOCK):
            ids = start + tl.arange(0, BLOCK)[None, :]
            best = tl.maximum(best, load_logits(row, words, ids, num_tokens, mask, MASKED)[1])
        top = row_max(best)
        temperature = load_float(table_ptr, TEMPERATURE, draw, num_draws)
        floor = load_float(table_ptr, LOG_MIN_P, draw, num_draws)
        top_k = load_int(table_ptr, TOP_K, draw, num_draws)
        top_p = load_float(table_ptr, TOP_P, draw, num_draws)
        healthy = wanted & (top > MINUS_INFINITY) & (top < INFINITY)
        bottom = tl.maximum(floor, LOWEST_FINITE)
        limited, nucleus = healthy & (top_k > 0), healthy & (top_p < 1.0)
        least = floor
        num_at = tl.zeros([ROWS, 1], tl.int32)  # tokens equal to the least, and how many of them are kept
        num_kept = num_at
        if any_row(limited | nucleus):
            num_all, mass, low = count_and_sum(
                row, words, num_tokens, mask, top, temperature, bottom, MASKED, ROWS, BLOCK
            )
            limited = limited & (num_all > top_k)
            if any_row(limited):
                target = top_k.to(tl.float32)
                least = tl.where(
                    limited,
                    search_threshold(
                        row, words, num_tokens, mask, top, temperature, low, target, limited, True, MASKED, ROWS, BLOCK
                    ),
                    least,
                )
                above, heavier, at = sum_above(
                    row, words, num_tokens, mask, top, temperature, least, MASKED, ROWS, BLOCK
                )
                num_at = tl.where(limited, at, 0)
                num_kept = tl.where(limited, top_k - above, 0)
                mass = tl.where(limited, heavier + num_kept.to(tl.float32) * tl.exp(least), mass)
            if any_row(nucleus):
                target = tl.maximum(top_p * mass, 1e-30)
                low = tl.maximum(low, EXP_UNDERFLOW)
                value = search_threshold(
                    row, words, num_tokens, mask, top, temperature, low, target, nucleus, False, MASKED, ROWS, BLOCK
                )
                _, heavier, at = sum_above(row, words, num_tokens, mask, top, temperature, value, MASKED, ROWS, BLOCK)
                share = tl.ceil((target - heavier) / tl.maximum(tl.exp(value), 1e-37))
                share = tl.minimum(tl.maximum(share, 1.0), at.to(tl.float32)).to(tl.int32)
                tighter = nucleus & ((value > least) | ((value == least) & ((share < num_kept) | (num_at == 0))))
                least = tl.where(tighter, value, least)
                num_at = tl.where(tighter, at, num_at)
                num_kept = tl.where(tighter, share, num_kept)
        last = tl.full([ROWS, 1], num_tokens, tl.int32)
        divided = num_kept < num_at
        if any_row(divided):
            found = find_nth_equal(row, words, num_tokens, mask, top, temperature, least, num_kept, MASKED, ROWS, BLOCK)
            last = tl.where(divided, found, last)
        store_rows(cuts_ptr, draw, top, live)
        store_rows(cuts_ptr + num_draws, draw, least, live)
        store_rows(cuts_ptr + 2 * num_draws, draw, last.to(tl.float32, bitcast=True), live)


@triton.jit
def load_scaled(row, words, start, num_tokens, mask, top, temperature, MASKED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scaled logits [R, B] of a block of tokens."""
    ids = start + tl.arange(0, BLOCK)[None, :]
    return apply_temperature(load_logits(row, words, ids, num_tokens, mask, MASKED)[1], top, temperature)


@triton.jit
def count_and_sum(  # type: ignore[no-untyped-def]
    row,
    words,
    num_tokens,
    mask,
    top,
    temperature,
    bottom,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the tokens whose scaled logit is at least `bottom`; also sum their exponentials.

    Returns (count, sum, smallest of these logits). Shapes: [R, 1].
    """
    count = tl.zeros([ROWS, BLOCK], tl.int32)
    mass = tl.zeros([ROWS, BLOCK], tl.float32)
    lowest = tl.full([ROWS, BLOCK], INFINITY, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        y = load_scaled(row, words, start, num_tokens, mask, top, temperature, MASKED, BLOCK)
        inside = y >= bottom
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(y), 0.0)
        lowest = tl.minimum(lowest, tl.where(inside, y, INFINITY))
    return row_sum(count), row_sum(mass), -row_max(-lowest)


@triton.jit
def sum_above(  # type: ignore[no-untyped-def]
    row, words, num_tokens, mask, top, temperature, value, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Count the tokens whose scaled logit is above `value`; also sum their exponentials.

    Returns (count, sum, number of tokens with exactly this logit). Shapes: [R, 1].
    """
    above = tl.zeros([ROWS, BLOCK], tl.int32)
    mass = tl.zeros([ROWS, BLOCK], tl.float32)
    equal = tl.zeros([ROWS, BLOCK], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        y = load_scaled(row, words, start, num_tokens, mask, top, temperature, MASKED, BLOCK)
        above += (y > value).to(tl.int32)
        mass += tl.where(y > value, tl.exp(y), 0.0)
        equal += (y == value).to(tl.int32)
    return row_sum(above), row_sum(mass), row_sum(equal)


@triton.jit
def search_threshold(  # type: ignore[no-untyped-def]
    row,
    words,
    num_tokens,
    mask,
    top,
    temperature,
    low,
    target,
    active,
    COUNT: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest scaled logit v such that the tokens >= v weigh at least `target`.

    Weight: 1 per token if COUNT, else probability mass. Shapes: low, target, active and the result [R, 1]; the tokens
    >= `low` must weigh that much. Invariants: the result is in [low, high) and at most `most`; every pass moves one of
    the three or is the last.
    """
    low = tl.where(active, low, 0.0)
    most = tl.zeros([ROWS, 1], tl.float32)
    high = tl.full([ROWS, 1], 1.0, tl.float32)
    while any_row(low < most):
        upper = tl.minimum(most, high)
        step = (upper - low) * 0.25
        first, second, third = low + step, low + 2.0 * step, low + 3.0 * step
        w1 = tl.zeros([ROWS, BLOCK], tl.float32)
        w2, w3, w4 = w1, w1, w1
        least = tl.full([ROWS, BLOCK], INFINITY, tl.float32)
        greatest = -least
        for start in range(0, num_tokens, BLOCK):
            y = load_scaled(row, words, start, num_tokens, mask, top, temperature, MASKED, BLOCK)
            weight = tl.where(y >= low, 1.0, 0.0) if COUNT else tl.exp(y)
            w1 += tl.where(y >= first, weight, 0.0)
            w2 += tl.where(y >= second, weight, 0.0)
            w3 += tl.where(y >= third, weight, 0.0)
            w4 += tl.where(y >= upper, weight, 0.0)
            inside = (y >= low) & (y < high)
            least = tl.minimum(least, tl.where(inside, y, INFINITY))
            greatest = tl.maximum(greatest, tl.where(inside, y, MINUS_INFINITY))
        e1, e2, e3, e4 = row_sum(w1) >= target, row_sum(w2) >= target, row_sum(w3) >= target, row_sum(w4) >= target
        lowest = -row_max(-least)
        low = tl.where(lowest < high, tl.maximum(low, lowest), low)
        reached = tl.where(e4, upper, tl.where(e3, third, tl.where(e2, second, tl.where(e1, first, low))))
        missed = tl.where(e1, tl.where(e2, tl.where(e3, tl.where(e4, high, upper), third), second), first)
        low, high = tl.maximum(low, reached), tl.minimum(high, missed)
        most = tl.minimum(row_max(greatest), high)
    return low


@triton.jit
def find_nth_equal(  # type: ignore[no-untyped-def]
    row,
    words,
    num_tokens,
    mask,
    top,
    temperature,
    value,
    n,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the id of the n-th token, in id order, with the scaled logit `value`, [R, 1]."""
    left, found = n, tl.zeros([ROWS, 1], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        y = load_scaled(row, words, start, num_tokens, mask, top, temperature, MASKED, BLOCK)
        equal = (y == value).to(tl.int32)
        count = row_sum(equal)
        here = (left > 0) & (count >= left)
        if any_row(here):
            place = first_index_where(tl.cumsum(equal, 1) == left, start + tl.arange(0, BLOCK)[None, :], num_tokens)
            found = tl.where(here, place, found)
        left -= count
    return found
