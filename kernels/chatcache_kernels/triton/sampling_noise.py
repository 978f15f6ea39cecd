"""Keyed noise and numbers in order: what every sampling kernel asks of single elements.

The noise is defined by integers (see `bits_of`), so that a draw is the same on every device; its logarithms are within
two ulps of exact.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix32(x):  # type: ignore[no-untyped-def]
    """Hash int32. Source: the two-round multiply-xorshift hash of least measured bias (Wellons, hash-prospector)."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x21F0AAAD
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x735A2D97
    return x ^ ((x >> 15) & 0x1FFFF)


@triton.jit
def bits_of(base, low, high):  # type: ignore[no-untyped-def]
    """Return the 31 random bits of tokens under a draw's key. All int32; base is the hashed token id."""
    return mix32((base ^ low) * high) & 0x7FFFFFFF


@triton.jit
def log_normal(x):  # type: ignore[no-untyped-def]
    """Return the natural logarithm of positive normal float32, within 2 ulps, without a branch.

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
    """Return standard Gumbel noise, -log(-log(1 - v)) of uniform v; exact for tiny v, where 1 - v rounds."""
    v = (bits_of(base, low, high).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    v = tl.minimum(v, 0.9999999403953552)  # 1 - 2^-24
    rest = 1.0 - v
    lost = v + (rest - 1.0)
    return -log_normal(lost - log_normal(rest))


@triton.jit
def pack_key(value, ids):  # type: ignore[no-untyped-def]
    """Return int64 keys that order as (value, -id): the largest key is the best value, of equals the lowest id."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def unpack_key(key):  # type: ignore[no-untyped-def]
    """Return the (value, id) of keys."""
    ordered = (key >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
