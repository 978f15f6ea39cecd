"""Operations of the sampling kernels: the table of draws, row reductions, keyed noise.

The table is int32 [NUM_FIELDS, N], one column per draw, with floats stored by their bits; the host fills it and kernels
read it. Noise is defined by integers (see `random_bits`), so a draw is the same on every device; its logarithms are
within two ulps of exact.

Symbols: N draws, R draws of a program, B tokens of a block, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW = tl.constexpr(0)  # row of logits to draw from
RAW_ROW = tl.constexpr(1)  # row whose raw log-softmax is reported; differs if logits were edited
KEY_LOW = tl.constexpr(2)
KEY_HIGH = tl.constexpr(3)
TEMPERATURE = tl.constexpr(4)  # float; 0: no noise
FILTERED = tl.constexpr(5)  # 1: `topk_topp` finds a cut-off for this draw
TOP_K = tl.constexpr(6)  # 0: no limit
TOP_P = tl.constexpr(7)  # float; 1: no limit
LOG_MIN_P = tl.constexpr(8)  # float, log(min_p); -inf: no limit
MASK = tl.constexpr(9)  # row of mask words; -1: none
SLOT = tl.constexpr(10)  # where the token is stored for the next step; -1: nowhere
TARGET = tl.constexpr(11)  # token to report instead of a draw; -1: none
NUM_FIELDS = 12

MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def program_draws(program, num_draws, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the draw numbers of a program, [ROWS], and which of them exist.

    Numbers after the last draw are replaced by it.
    """
    draw = program * ROWS + tl.arange(0, ROWS)
    return tl.minimum(draw, num_draws - 1), draw < num_draws


@triton.jit
def load_int(table_ptr, field: tl.constexpr, draw, num_draws):  # type: ignore[no-untyped-def]
    """Load an int32 field of draws. Shapes: draw [R] -> [R, 1]."""
    return tl.load(table_ptr + field * num_draws + draw)[:, None]


@triton.jit
def load_float(table_ptr, field: tl.constexpr, draw, num_draws):  # type: ignore[no-untyped-def]
    """Load a float field of draws. Shapes: draw [R] -> [R, 1]."""
    return tl.load(table_ptr + field * num_draws + draw).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def load_logits(rows_ptr, words_ptr, ids, num_tokens, mask, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (all, allowed): logits in float32, and those with -inf for masked tokens.

    Shapes: rows_ptr, words_ptr, mask [R, 1]: start of each draw's logits and mask words; mask < 0: no mask; ids [1, B]
    -> [R, B] each. Tokens beyond the vocabulary are -inf.
    """
    known = ids < num_tokens
    x = tl.load(rows_ptr + ids, mask=known, other=MINUS_INFINITY).to(tl.float32)
    allowed = x
    if MASKED:  # noqa: SIM102 - a constant, and the next condition is none
        if any_row(mask >= 0):
            words = tl.load(words_ptr + (ids >> 5), mask=known & (mask >= 0), other=-1)
            allowed = tl.where(((words >> (ids & 31)) & 1) != 0, x, MINUS_INFINITY)
    return x, allowed


@triton.jit
def any_row(flags):  # type: ignore[no-untyped-def]
    """Return whether any of [R, 1] flags is set, as a scalar."""
    return tl.max(tl.max(flags.to(tl.int32), 1), 0) > 0


@triton.jit
def store_rows(out_ptr, at, values, live):  # type: ignore[no-untyped-def]
    """Store one number per row. Shapes: at, live [R], values [R, 1]."""
    tl.store(out_ptr + at, tl.sum(values, 1), mask=live)


@triton.jit
def row_max(x):  # type: ignore[no-untyped-def]
    """Return the maximum of each row. Shapes: [R, B] -> [R, 1]."""
    return tl.max(x, 1)[:, None]


@triton.jit
def row_sum(x):  # type: ignore[no-untyped-def]
    """Return the sum of each row. Shapes: [R, B] -> [R, 1]."""
    return tl.sum(x, 1)[:, None]


@triton.jit
def row_sums(a, b, c, d):  # type: ignore[no-untyped-def]
    """Return the sums of each row of four tensors, in one reduction. Shapes: [R, B] each -> [R, 1] each."""
    ab, cd = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), 1))
    a, b = tl.split(ab)
    c, d = tl.split(cd)
    return a[:, None], b[:, None], c[:, None], d[:, None]


@triton.jit
def first_index_where(flags, ids, otherwise):  # type: ignore[no-untyped-def]
    """Return the smallest flagged id of each row, or `otherwise`. Shapes: [R, B] -> [R, 1]."""
    return tl.min(tl.where(flags, ids, otherwise), 1)[:, None]


@triton.jit
def finite_or_zero(top):  # type: ignore[no-untyped-def]
    """Return the maximum `top` of a row, or 0 where it is infinite, so that x - top is defined."""
    return tl.where((top > MINUS_INFINITY) & (top < float("inf")), top, 0.0)


@triton.jit
def apply_temperature(x, top, temperature):  # type: ignore[no-untyped-def]
    """Return (x - top) / temperature.

    At temperature 0 the maximum is 0 and the rest -inf, not NaN.
    """
    return (x - finite_or_zero(top)) * (1.0 / tl.maximum(temperature, 1e-30))


@triton.jit
def mix32(x):  # type: ignore[no-untyped-def]
    """Hash int32.

    Source: the two-round multiply-xorshift hash of least measured bias (Wellons, hash-prospector).
    """
    x ^= (x >> 16) & 0xFFFF
    x *= 0x21F0AAAD
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


@triton.jit
def random_bits(base, low, high):  # type: ignore[no-untyped-def]
    """Return 31 random bits per token under a draw's key. All int32.

    Base is the hashed token id.
    """
    return mix32((base ^ low) * high) & 0x7FFFFFFF


@triton.jit
def log_normal(x):  # type: ignore[no-untyped-def]
    """Return the natural logarithm of positive normal float32, within 2 ulps, without branches.

    log(m 2^e) = e log 2 + f + f^2 P(f) with m in [sqrt(1/2), sqrt(2)), f = m - 1; P is a minimax fit of degree 7.
    """
    bits = x.to(tl.int32, bitcast=True)
    power = (bits - 0x3F3504F3) >> 23
    f = (bits - (power << 23)).to(tl.float32, bitcast=True) - 1.0
    p = tl.fma(f, 0.08736620843410492, -0.14307603240013123)
    p = tl.fma(p, f, 0.1491735279560089)
    p = tl.fma(p, f, -0.16570469737052917)
    p = tl.fma(p, f, 0.19962133467197418)
    p = tl.fma(p, f, -0.25001758337020874)
    p = tl.fma(p, f, 0.33333948254585266)
    p = tl.fma(p, f, -0.49999991059303284)
    return tl.fma(power.to(tl.float32), 0.6931471805599453, tl.fma(f * f, p, f))


@triton.jit
def gumbel(base, low, high):  # type: ignore[no-untyped-def]
    """Return standard Gumbel noise, -log(-log(1 - v)) of uniform v.

    Exact for tiny v, where 1 - v is rounded.
    """
    v = (random_bits(base, low, high).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    v = tl.minimum(v, 0.9999999403953552)  # 1 - 2^-24
    rest = 1.0 - v
    lost = v + (rest - 1.0)
    return -log_normal(lost - log_normal(rest))


@triton.jit
def pack_key(value, ids):  # type: ignore[no-untyped-def]
    """Return int64 keys that order as (value, -id).

    The largest key is the best value, and of equal values the lowest id.
    """
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def unpack_key(key):  # type: ignore[no-untyped-def]
    """Return the (value, id) of keys."""
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def is_kept(scaled, ids, cuts_ptr, draw, num_draws):  # type: ignore[no-untyped-def]
    """Return which tokens the filters of a draw keep.

    These are the tokens above the cut-off value, and of those equal to it the ones up to the last kept id.
    """
    least = tl.load(cuts_ptr + num_draws + draw)[:, None]
    last = tl.load(cuts_ptr + 2 * num_draws + draw).to(tl.int32, bitcast=True)[:, None]
    return (scaled > least) | ((scaled == least) & (ids <= last))


@triton.jit
def merge_log_sum_exp(sums_ptr, at, valid, plane):  # type: ignore[no-untyped-def]
    """Merge the (maximum, sum) parts of all chunks to a log-sum-exp. Shapes: [R, C] -> [R, 1].

    `plane`: distance from the maxima to the sums in `sums_ptr`. inf or -inf where logits are not finite.
    """
    most = tl.load(sums_ptr + at, mask=valid, other=MINUS_INFINITY)
    part = tl.load(sums_ptr + plane + at, mask=valid, other=0.0)
    top = finite_or_zero(row_max(most))
    part = row_sum(part * tl.exp(most - top))
    return tl.where(part > 0, top + tl.log(tl.maximum(part, 1e-38)), MINUS_INFINITY)


@triton.jit
def is_finite(x):  # type: ignore[no-untyped-def]
    """Return whether x is neither infinite nor NaN."""
    return (x > MINUS_INFINITY) & (x < float("inf"))
