"""Find the exact cut-off of min_p, top_k and top_p in each row, without sorting the vocabulary.

In rank order (value descending, id ascending) the kept tokens are a prefix. It ends at a value and, among the tokens
equal to it, at a last id. Three launches find it:

    group_max_kernel  one program per chunk  the largest logit of every group of tokens
    collect_kernel    one program per chunk  a lower bound of the cut-off; lists the tokens above it (the candidates)
    cutoff_kernel     one program per row    the cut-off, by search in the list

Every group has its own largest token, so the top_k-th largest of the group maxima bounds the top_k-th largest logit.
Without top_k: the sum of the exponentials of the group maxima bounds the mass from below, and tokens that together
have less than the share 1 - top_p of it are not kept. If the list is too short for the candidates of a row,
`cutoff_kernel` searches the whole row; the result is the same, but takes 0.3 to 0.7 ms.

The order of the list is arbitrary. The result does not depend on it: counts and masses are integers, in units of
2^-40 of the probability of the best token.

Estimate, not a measurement (instructions per warp on sm_90, V = 151,936 in bf16, 8 warps, 528 warp instructions per
clock at 1.75 GHz): a chunk of 8,192 tokens takes 500 in `group_max_kernel` and 1,500 to 2,400 in `collect_kernel`. For
one row 3 and 5 us, for 256 rows 25 (the memory) and 60 to 90 us. A pass over 1,024 candidates takes about 0.4 us, and
a row takes 10 to 20 passes: 4 to 8 us.
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
    is_finite,
    load_float,
    load_int,
    load_logits,
    pack_key,
    program_draws,
    row_max,
    row_sum,
    row_sums,
    store_rows,
    unpack_key,
)

INFINITY = tl.constexpr(float("inf"))
LOWEST_FINITE = tl.constexpr(-3.0e38)  # values below are -inf and do not count as tokens
EXP_UNDERFLOW = tl.constexpr(-104.0)  # exp of values below is 0
MASS_UNIT = tl.constexpr(float(2**40))  # of the best token; the sum of a vocabulary fits int64
SMALLEST_BOUND = tl.constexpr(0x3B800000)  # 2^-8 as the bits of a float32; 2^28 above it:
LARGEST_BOUND = tl.constexpr(0x4B800000)  # 2^24
GROUPS = tl.constexpr(16)  # groups per chunk; the bound for top_k needs top_k groups in the vocabulary


@triton.jit(do_not_specialize=["num_draws"])
def group_max_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    table_ptr,
    words_ptr,
    groups_ptr,
    found_ptr,
    x_stride,
    num_draws,
    num_tokens,
    num_words,
    num_chunks,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_FOUND: tl.constexpr,
):
    """Find the largest allowed logit of each group of CHUNK / GROUPS tokens. Grid (ceil(N / ROWS) * C).

    Shapes: x [U, V], table [F, N], words int32 [M, W] -> groups float32 [N, C * GROUPS]. Also sets the number of
    candidates in `found` (see `collect_kernel`) to 0.
    """
    draw, live = program_draws(tl.program_id(0) // num_chunks, num_draws, ROWS)
    chunk = tl.program_id(0) % num_chunks
    if any_row(load_int(table_ptr, FILTERED, draw, num_draws) != 0):
        row = x_ptr + load_int(table_ptr, ROW, draw, num_draws).to(tl.int64) * x_stride
        mask = load_int(table_ptr, MASK, draw, num_draws)
        words = words_ptr + mask.to(tl.int64) * num_words
        ids = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
        allowed = load_logits(row, words, ids, num_tokens, mask, MASKED)[1]
        largest = tl.max(tl.reshape(allowed, [ROWS, GROUPS, CHUNK // GROUPS]), 2)
        at = (draw * num_chunks + chunk)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        tl.store(groups_ptr + at, largest, mask=live[:, None])
        if chunk == 0:
            tl.store(found_of(found_ptr, draw, num_chunks, MAX_FOUND), 0, mask=live[:, None])


@triton.jit(do_not_specialize=["num_draws"])
def collect_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    table_ptr,
    words_ptr,
    groups_ptr,
    found_ptr,
    x_stride,
    num_draws,
    num_tokens,
    num_words,
    num_chunks,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    MAX_FOUND: tl.constexpr,
):
    """List the tokens that may be at or above the cut-off of top_k and top_p. Grid (ceil(N / ROWS) * C).

    Shapes: groups as stored by `group_max_kernel`, ALL_GROUPS >= C * GROUPS -> found int64 [N, 1 + C + MAX_FOUND]:
    the number of candidates, the mass of each chunk (set if only top_p limits), and the keys of the candidates in any
    order. If there are more than MAX_FOUND candidates, their number is right and the list is incomplete.
    """
    draw, live = program_draws(tl.program_id(0) // num_chunks, num_draws, ROWS)
    chunk = tl.program_id(0) % num_chunks
    top_k = load_int(table_ptr, TOP_K, draw, num_draws)
    top_p = load_float(table_ptr, TOP_P, draw, num_draws)
    temperature = load_float(table_ptr, TEMPERATURE, draw, num_draws)
    largest = load_groups(groups_ptr, draw, num_chunks, ALL_GROUPS)
    top = row_max(largest)
    wanted = (load_int(table_ptr, FILTERED, draw, num_draws) != 0) & is_finite(top) & live[:, None]
    wanted = wanted & ((top_k > 0) | (top_p < 1.0))
    if any_row(wanted):
        bottom = tl.maximum(load_float(table_ptr, LOG_MIN_P, draw, num_draws), LOWEST_FINITE)
        largest = tl.where(wanted, apply_temperature(largest, top, temperature), MINUS_INFINITY)
        least_mass = row_sum(tl.where(largest > EXP_UNDERFLOW, tl.exp(largest), 0.0))
        bound = tl.log(tl.maximum((1.0 - top_p) * least_mass, 1e-30) / (2.0 * num_tokens))
        if any_row(top_k > 0):
            bound = tl.where(top_k > 0, bound_nth_largest(largest, top_k), bound)
        bound = tl.maximum(bound, bottom)
        mask = load_int(table_ptr, MASK, draw, num_draws)
        words = words_ptr + mask.to(tl.int64) * num_words
        row = x_ptr + load_int(table_ptr, ROW, draw, num_draws).to(tl.int64) * x_stride
        found = found_of(found_ptr, draw, num_chunks, MAX_FOUND)
        is_alone = wanted & (top_k == 0)  # top_p without top_k needs the mass of the vocabulary
        mass = tl.zeros([ROWS, BLOCK], tl.int64)
        for block in range(CHUNK // BLOCK):
            ids = chunk * CHUNK + block * BLOCK + tl.arange(0, BLOCK)[None, :]
            allowed = load_logits(row, words, ids, num_tokens, mask, MASKED)[1]
            y = tl.where(wanted, apply_temperature(allowed, top, temperature), MINUS_INFINITY)
            if any_row(is_alone):
                mass += tl.where(y >= bottom, to_mass(y), 0)
            inside = y >= bound
            count = row_sum(inside.to(tl.int32))
            if any_row(count > 0):
                start = tl.atomic_add(found, count.to(tl.int64), mask=count > 0, sem="relaxed")
                place = start + tl.cumsum(inside.to(tl.int32), 1) - 1
                keys = found + 1 + num_chunks + place
                tl.store(keys, pack_key(allowed, ids), mask=inside & (place < MAX_FOUND))
        if any_row(is_alone):
            tl.store(found + 1 + chunk, row_sum(mass), mask=is_alone)


@triton.jit(do_not_specialize=["num_draws"])
def cutoff_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    table_ptr,
    words_ptr,
    groups_ptr,
    found_ptr,
    cuts_ptr,
    x_stride,
    num_draws,
    num_tokens,
    num_words,
    num_chunks,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_GROUPS: tl.constexpr,
    MAX_FOUND: tl.constexpr,
):
    """Find the tokens that the filters of each FILTERED draw keep. Grid (ceil(N / ROWS)).

    Shapes: x [U, V], table [F, N], words int32 [M, W], groups and found as in `collect_kernel` -> cuts float32 [3, N]:
    the largest allowed logit, the smallest scaled value that is kept, and (as bits) the last kept id among its equals.
    """
    draw, live = program_draws(tl.program_id(0), num_draws, ROWS)
    wanted = load_int(table_ptr, FILTERED, draw, num_draws) != 0
    if any_row(wanted):
        top = row_max(load_groups(groups_ptr, draw, num_chunks, ALL_GROUPS))
        temperature = load_float(table_ptr, TEMPERATURE, draw, num_draws)
        floor = load_float(table_ptr, LOG_MIN_P, draw, num_draws)
        top_k = load_int(table_ptr, TOP_K, draw, num_draws)
        top_p = load_float(table_ptr, TOP_P, draw, num_draws)
        wanted = wanted & is_finite(top)
        limited, nucleus = wanted & (top_k > 0), wanted & (top_p < 1.0)
        least = floor
        last = tl.full([ROWS, 1], num_tokens, tl.int32)
        if any_row(limited | nucleus):
            found = found_of(found_ptr, draw, num_chunks, MAX_FOUND)
            num_found = tl.load(found, mask=limited | nucleus, other=0).to(tl.int32)
            mask = load_int(table_ptr, MASK, draw, num_draws)
            words = words_ptr + mask.to(tl.int64) * num_words
            row = x_ptr + load_int(table_ptr, ROW, draw, num_draws).to(tl.int64) * x_stride
            listed = num_found <= MAX_FOUND
            keys = found + 1 + num_chunks
            source = (row, words, mask, keys, num_found, num_tokens, listed, top, temperature)
            end = tl.max(tl.max(tl.where(listed, num_found, num_tokens), 1), 0)
            num_all, listed_mass, low = count_and_sum(
                source, end, tl.maximum(floor, LOWEST_FINITE), MASKED, ROWS, BLOCK
            )
            chunks = tl.arange(0, ALL_GROUPS)[None, :]
            parts = tl.load(found + 1 + chunks, mask=(chunks < num_chunks) & nucleus & (top_k == 0), other=0)
            mass = row_sum(parts)
            limited = limited & (num_all >= top_k)
            mass = tl.where(top_k == 0, mass, listed_mass)
            num_at = tl.zeros([ROWS, 1], tl.int32)  # tokens equal to the least, and how many of them are kept
            num_kept = num_at
            if any_row(limited):
                value = search_threshold(source, end, low, top_k, limited, True, MASKED, ROWS, BLOCK)
                above, heavier, at = sum_above(source, end, value, MASKED, ROWS, BLOCK)
                least = tl.where(limited, value, least)
                num_at = tl.where(limited, at, 0)
                num_kept = tl.where(limited, top_k - above, 0)
                mass = tl.where(limited, heavier + num_kept * to_mass(value), mass)
            if any_row(nucleus):
                target = (top_p * mass.to(tl.float32)).to(tl.int64)
                target = tl.maximum(tl.minimum(target, listed_mass), 1)
                low = tl.maximum(low, EXP_UNDERFLOW)
                value = search_threshold(source, end, low, target, nucleus, False, MASKED, ROWS, BLOCK)
                _, heavier, at = sum_above(source, end, value, MASKED, ROWS, BLOCK)
                unit = tl.maximum(to_mass(value), 1)
                share = (target - heavier + unit - 1) // unit
                share = tl.minimum(share, at.to(tl.int64)).to(tl.int32)
                tighter = nucleus & ((value > least) | ((value == least) & ((share < num_kept) | (num_at == 0))))
                least = tl.where(tighter, value, least)
                num_at = tl.where(tighter, at, num_at)
                num_kept = tl.where(tighter, share, num_kept)
            divided = num_kept < num_at
            if any_row(divided):
                nth = find_nth_equal(source, end, least, num_kept, MASKED, ROWS, BLOCK)
                last = tl.where(divided, nth, last)
        store_rows(cuts_ptr, draw, top, live)
        store_rows(cuts_ptr + num_draws, draw, least, live)
        store_rows(cuts_ptr + 2 * num_draws, draw, last.to(tl.float32, bitcast=True), live)


@triton.jit
def found_of(found_ptr, draw, num_chunks, MAX_FOUND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the start of each draw's row of `found`. Shapes: [R] -> [R, 1]."""
    return found_ptr + (draw.to(tl.int64) * (1 + num_chunks + MAX_FOUND))[:, None]


@triton.jit
def load_groups(groups_ptr, draw, num_chunks, ALL_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the group maxima of draws; -inf as padding. Shapes: draw [R] -> [R, ALL_GROUPS]."""
    groups = tl.arange(0, ALL_GROUPS)[None, :]
    at = draw[:, None] * (num_chunks * GROUPS) + groups
    return tl.load(groups_ptr + at, mask=groups < num_chunks * GROUPS, other=MINUS_INFINITY)


@triton.jit
def bound_nth_largest(y, n):  # type: ignore[no-untyped-def]
    """Return a bound that at least n of the values y <= 0 reach, within 2^-8 or 4 % of the n-th largest.

    The lowest finite value if this is below -2^24 or there are fewer than n. Shapes: y [R, B], n [R, 1] -> [R, 1].
    """
    size = tl.abs(y).to(tl.int32, bitcast=True)  # orders as -y; NaN is the largest
    most = n * 0 + SMALLEST_BOUND
    for step in range(10):
        width = 1 << (27 - step)
        count = row_sum((size < most + width).to(tl.int32))
        most = tl.where(count < n, most + width, most)
    most += 1 << 18
    return tl.where(most < LARGEST_BOUND, -most.to(tl.float32, bitcast=True), LOWEST_FINITE)


@triton.jit
def to_mass(y):  # type: ignore[no-untyped-def]
    """Return exp(y) as a whole number of mass units, int64; y <= 0."""
    return (tl.where(y > EXP_UNDERFLOW, tl.exp(y), 0.0) * MASS_UNIT).to(tl.int64)


@triton.jit
def load_candidates(source, start, MASKED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scaled logits and ids of a block of candidates, or of tokens of a row without a list.

    -inf after the last. Shapes: [R, B] each.
    """
    row, words, mask, keys, num_found, num_tokens, listed, top, temperature = source
    at = start + tl.arange(0, BLOCK)[None, :]
    key = tl.load(keys + at, mask=listed & (at < num_found), other=0)
    value, ids = unpack_key(key)
    x = load_logits(row, words, at, tl.where(listed, 0, num_tokens), mask, MASKED)[1]
    x = tl.where(listed & (at < num_found), value, x)
    return apply_temperature(x, top, temperature), tl.where(listed, ids, at)


@triton.jit
def count_and_sum(source, end, bottom, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the candidates whose scaled logit is at least `bottom`; also sum their masses.

    Returns (count, sum, smallest of these logits). Shapes: [R, 1].
    """
    count = tl.zeros([ROWS, BLOCK], tl.int32)
    mass = tl.zeros([ROWS, BLOCK], tl.int64)
    lowest = tl.full([ROWS, BLOCK], INFINITY, tl.float32)
    for start in range(0, end, BLOCK):
        y, _ = load_candidates(source, start, MASKED, BLOCK)
        inside = y >= bottom
        count += inside.to(tl.int32)
        mass += tl.where(inside, to_mass(y), 0)
        lowest = tl.minimum(lowest, tl.where(inside, y, INFINITY))
    return row_sum(count), row_sum(mass), -row_max(-lowest)


@triton.jit
def sum_above(source, end, value, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the candidates whose scaled logit is above `value`; also sum their masses.

    Returns (count, sum, number of candidates with exactly this logit). Shapes: [R, 1].
    """
    above = tl.zeros([ROWS, BLOCK], tl.int32)
    mass = tl.zeros([ROWS, BLOCK], tl.int64)
    equal = tl.zeros([ROWS, BLOCK], tl.int32)
    for start in range(0, end, BLOCK):
        y, _ = load_candidates(source, start, MASKED, BLOCK)
        above += (y > value).to(tl.int32)
        mass += tl.where(y > value, to_mass(y), 0)
        equal += (y == value).to(tl.int32)
    return row_sum(above), row_sum(mass), row_sum(equal)


@triton.jit
def search_threshold(  # type: ignore[no-untyped-def]
    source,
    end,
    low,
    target,
    active,
    COUNT: tl.constexpr,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest scaled logit v such that the candidates >= v weigh at least `target`.

    Weight: 1 per token if COUNT, else mass. Shapes: low, target, active and the result [R, 1]; the candidates >= `low`
    must weigh that much. Each pass computes the weight above four values in a range that contains v, and leaves a
    quarter of the range, until one value is left. Invariants: the result is in [low, high) and at most `most`; every
    pass moves one of the three or is the last.
    """
    low = tl.where(active, low, 0.0)
    most = tl.zeros([ROWS, 1], tl.float32)
    high = tl.full([ROWS, 1], 1.0, tl.float32)
    while any_row(low < most):
        upper = tl.minimum(most, high)
        step = (upper - low) * 0.25
        first, second, third = low + step, low + 2.0 * step, low + 3.0 * step
        w1 = tl.zeros([ROWS, BLOCK], tl.int32 if COUNT else tl.int64)
        w2, w3, w4 = w1, w1, w1
        least = tl.full([ROWS, BLOCK], INFINITY, tl.float32)
        greatest = -least
        for start in range(0, end, BLOCK):
            y, _ = load_candidates(source, start, MASKED, BLOCK)
            weight = (y >= low).to(tl.int32) if COUNT else to_mass(y)
            w1 += tl.where(y >= first, weight, 0)
            w2 += tl.where(y >= second, weight, 0)
            w3 += tl.where(y >= third, weight, 0)
            w4 += tl.where(y >= upper, weight, 0)
            inside = (y >= low) & (y < high)
            least = tl.minimum(least, tl.where(inside, y, INFINITY))
            greatest = tl.maximum(greatest, tl.where(inside, y, MINUS_INFINITY))
        w1, w2, w3, w4 = row_sums(w1, w2, w3, w4)
        e1, e2, e3, e4 = w1 >= target, w2 >= target, w3 >= target, w4 >= target
        least, greatest = tl.split(tl.max(tl.join(-least, greatest), 1))
        lowest = -least[:, None]
        low = tl.where(lowest < high, tl.maximum(low, lowest), low)
        reached = tl.where(e4, upper, tl.where(e3, third, tl.where(e2, second, tl.where(e1, first, low))))
        missed = tl.where(e1, tl.where(e2, tl.where(e3, tl.where(e4, high, upper), third), second), first)
        low, high = tl.maximum(low, reached), tl.minimum(high, missed)
        most = tl.minimum(greatest[:, None], high)
    return low


@triton.jit
def find_nth_equal(source, end, value, n, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the n-th smallest id among the candidates with the scaled logit `value`, [R, 1].

    Each pass counts these ids in four parts of a range that contains the result, and leaves one of them.
    """
    first = n * 0
    width = 1 << 20  # a power of four, and larger than the largest vocabulary
    while width > 1:
        width = width // 4
        c1 = tl.zeros([ROWS, BLOCK], tl.int32)
        c2, c3 = c1, c1
        for start in range(0, end, BLOCK):
            y, ids = load_candidates(source, start, MASKED, BLOCK)
            equal = y == value
            c1 += (equal & (ids < first + width)).to(tl.int32)
            c2 += (equal & (ids < first + 2 * width)).to(tl.int32)
            c3 += (equal & (ids < first + 3 * width)).to(tl.int32)
        parts = (row_sum(c1) < n).to(tl.int32) + (row_sum(c2) < n).to(tl.int32) + (row_sum(c3) < n).to(tl.int32)
        first += parts * width
    return first
