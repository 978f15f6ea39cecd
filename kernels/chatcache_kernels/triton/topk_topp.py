"""Where min_p, top_k and top_p end a row: found by search, exactly, without sorting.

In rank order (value descending, id ascending) what survives is a prefix. Its end is a value and, of the tokens equal to
it, the last id. Both top_k and top_p ask for the largest value v such that the tokens at v and above weigh enough: 1
each, or their probability. A pass over the row weighs four values at once and leaves a quarter of the bracket around v,
until one value is left in it.

Estimate, not a measurement: about 45 instructions a token and pass; bf16 logits take some 6 passes for each limit, then
two or three to settle equals. V = 151,936: about 30 us a pass, 200 to 250 us a row and limit; 132 rows at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling_ops import (
    CUT,
    FLOOR,
    MASK,
    MINUS_INFINITY,
    ROW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    draws_of,
    first_where,
    is_any,
    keep,
    largest,
    number,
    real,
    scale,
    total,
    visible,
)

INFINITY = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.0e38)  # what is below is -inf, and counts as no token
WEIGHTLESS = tl.constexpr(-104.0)  # exp of what is below is 0


@triton.jit(do_not_specialize=["num_draws"])
def cut_kernel(  # type: ignore[no-untyped-def]
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
    """Find what survives the filters of each draw that has a CUT.

    Shapes: x [U, V], table [F, N], words int32 [M, W] -> cuts float32 [3, N]: the largest allowed logit, the least
    scaled value that survives, and (as bits) the last id that does among its equals. Grid (ceil(N / ROWS)).
    """
    draw, live = draws_of(tl.program_id(0), num_draws, ROWS)
    wanted = number(table_ptr, CUT, draw, num_draws) != 0
    if is_any(wanted):
        row = x_ptr + number(table_ptr, ROW, draw, num_draws).to(tl.int64) * x_stride
        mask = number(table_ptr, MASK, draw, num_draws)
        words = words_ptr + mask.to(tl.int64) * num_words
        best = tl.full([ROWS, BLOCK], MINUS_INFINITY, tl.float32)
        for start in range(0, num_tokens, BLOCK):
            ids = start + tl.arange(0, BLOCK)[None, :]
            best = tl.maximum(best, visible(row, words, ids, num_tokens, mask, MASKED)[1])
        top = largest(best)
        temperature = real(table_ptr, TEMPERATURE, draw, num_draws)
        floor = real(table_ptr, FLOOR, draw, num_draws)
        top_k = number(table_ptr, TOP_K, draw, num_draws)
        top_p = real(table_ptr, TOP_P, draw, num_draws)
        healthy = wanted & (top > MINUS_INFINITY) & (top < INFINITY)
        bottom = tl.maximum(floor, LOWEST)
        limited, nucleus = healthy & (top_k > 0), healthy & (top_p < 1.0)
        least = floor
        num_at = tl.zeros([ROWS, 1], tl.int32)  # tokens equal to the least, and how many of them survive
        num_kept = num_at
        if is_any(limited | nucleus):
            num_all, mass, low = survey(row, words, num_tokens, mask, top, temperature, bottom, MASKED, ROWS, BLOCK)
            limited = limited & (num_all > top_k)
            if is_any(limited):
                target = top_k.to(tl.float32)
                least = tl.where(
                    limited,
                    search(
                        row, words, num_tokens, mask, top, temperature, low, target, limited, True, MASKED, ROWS, BLOCK
                    ),
                    least,
                )
                above, heavier, at = weigh(row, words, num_tokens, mask, top, temperature, least, MASKED, ROWS, BLOCK)
                num_at = tl.where(limited, at, 0)
                num_kept = tl.where(limited, top_k - above, 0)
                mass = tl.where(limited, heavier + num_kept.to(tl.float32) * tl.exp(least), mass)
            if is_any(nucleus):
                target = tl.maximum(top_p * mass, 1e-30)
                low = tl.maximum(low, WEIGHTLESS)
                value = search(
                    row, words, num_tokens, mask, top, temperature, low, target, nucleus, False, MASKED, ROWS, BLOCK
                )
                _, heavier, at = weigh(row, words, num_tokens, mask, top, temperature, value, MASKED, ROWS, BLOCK)
                share = tl.ceil((target - heavier) / tl.maximum(tl.exp(value), 1e-37))
                share = tl.minimum(tl.maximum(share, 1.0), at.to(tl.float32)).to(tl.int32)
                tighter = nucleus & ((value > least) | ((value == least) & ((share < num_kept) | (num_at == 0))))
                least = tl.where(tighter, value, least)
                num_at = tl.where(tighter, at, num_at)
                num_kept = tl.where(tighter, share, num_kept)
        last = tl.full([ROWS, 1], num_tokens, tl.int32)
        divided = num_kept < num_at
        if is_any(divided):
            found = nth_equal(row, words, num_tokens, mask, top, temperature, least, num_kept, MASKED, ROWS, BLOCK)
            last = tl.where(divided, found, last)
        keep(cuts_ptr, draw, top, live)
        keep(cuts_ptr + num_draws, draw, least, live)
        keep(cuts_ptr + 2 * num_draws, draw, last.to(tl.float32, bitcast=True), live)


@triton.jit
def scaled_at(row, words, start, num_tokens, mask, top, temperature, MASKED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scaled logits [R, B] of a block of tokens."""
    ids = start + tl.arange(0, BLOCK)[None, :]
    return scale(visible(row, words, ids, num_tokens, mask, MASKED)[1], top, temperature)


@triton.jit
def survey(  # type: ignore[no-untyped-def]
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
    """Return how many tokens are at `bottom` or above, their mass, and the lowest of them. Shapes: [R, 1] each."""
    count = tl.zeros([ROWS, BLOCK], tl.int32)
    mass = tl.zeros([ROWS, BLOCK], tl.float32)
    lowest = tl.full([ROWS, BLOCK], INFINITY, tl.float32)
    for start in range(0, num_tokens, BLOCK):
        y = scaled_at(row, words, start, num_tokens, mask, top, temperature, MASKED, BLOCK)
        inside = y >= bottom
        count += inside.to(tl.int32)
        mass += tl.where(inside, tl.exp(y), 0.0)
        lowest = tl.minimum(lowest, tl.where(inside, y, INFINITY))
    return total(count), total(mass), -largest(-lowest)


@triton.jit
def weigh(  # type: ignore[no-untyped-def]
    row, words, num_tokens, mask, top, temperature, value, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return how many tokens are above `value`, their mass, and how many equal it. Shapes: value and each [R, 1]."""
    above = tl.zeros([ROWS, BLOCK], tl.int32)
    mass = tl.zeros([ROWS, BLOCK], tl.float32)
    equal = tl.zeros([ROWS, BLOCK], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        y = scaled_at(row, words, start, num_tokens, mask, top, temperature, MASKED, BLOCK)
        above += (y > value).to(tl.int32)
        mass += tl.where(y > value, tl.exp(y), 0.0)
        equal += (y == value).to(tl.int32)
    return total(above), total(mass), total(equal)


@triton.jit
def search(  # type: ignore[no-untyped-def]
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
    """Return the largest value of a token such that those at it or above weigh `target` or more: by COUNT, or by mass.

    Shapes: low, target, active and the result [R, 1]; all at `low` and above weigh that much. Invariants: what is asked
    for lies in [low, high), and is `most` or less; every pass moves one of the three or is the last.
    """
    low = tl.where(active, low, 0.0)
    most = tl.zeros([ROWS, 1], tl.float32)
    high = tl.full([ROWS, 1], 1.0, tl.float32)
    while is_any(low < most):
        upper = tl.minimum(most, high)
        step = (upper - low) * 0.25
        first, second, third = low + step, low + 2.0 * step, low + 3.0 * step
        w1 = tl.zeros([ROWS, BLOCK], tl.float32)
        w2, w3, w4 = w1, w1, w1
        least = tl.full([ROWS, BLOCK], INFINITY, tl.float32)
        greatest = -least
        for start in range(0, num_tokens, BLOCK):
            y = scaled_at(row, words, start, num_tokens, mask, top, temperature, MASKED, BLOCK)
            weight = tl.where(y >= low, 1.0, 0.0) if COUNT else tl.exp(y)
            w1 += tl.where(y >= first, weight, 0.0)
            w2 += tl.where(y >= second, weight, 0.0)
            w3 += tl.where(y >= third, weight, 0.0)
            w4 += tl.where(y >= upper, weight, 0.0)
            inside = (y >= low) & (y < high)
            least = tl.minimum(least, tl.where(inside, y, INFINITY))
            greatest = tl.maximum(greatest, tl.where(inside, y, MINUS_INFINITY))
        e1, e2, e3, e4 = total(w1) >= target, total(w2) >= target, total(w3) >= target, total(w4) >= target
        lowest = -largest(-least)
        low = tl.where(lowest < high, tl.maximum(low, lowest), low)
        reached = tl.where(e4, upper, tl.where(e3, third, tl.where(e2, second, tl.where(e1, first, low))))
        missed = tl.where(e1, tl.where(e2, tl.where(e3, tl.where(e4, high, upper), third), second), first)
        low, high = tl.maximum(low, reached), tl.minimum(high, missed)
        most = tl.minimum(largest(greatest), high)
    return low


@triton.jit
def nth_equal(  # type: ignore[no-untyped-def]
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
    """Return the id of the n-th token, from the lowest id, that equals `value`. Shapes: value, n, result [R, 1]."""
    left, found = n, tl.zeros([ROWS, 1], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        y = scaled_at(row, words, start, num_tokens, mask, top, temperature, MASKED, BLOCK)
        equal = (y == value).to(tl.int32)
        count = total(equal)
        here = (left > 0) & (count >= left)
        if is_any(here):
            place = first_where(tl.cumsum(equal, 1) == left, start + tl.arange(0, BLOCK)[None, :], num_tokens)
            found = tl.where(here, place, found)
        left -= count
    return found
