"""What kernels over a vocabulary add to `vectors`: keyed uniform numbers, logarithms, lanes chosen by comparison."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from . import llvm
from .launch import helper
from .llvm import F32, I32, instruction
from .vectors import add, div, fma, mul, splat


@instruction
def uniform(typing: Any, like: Any, base: Any, index: Any, low: Any, high: Any) -> Any:
    """uniform(like, base, i, low, high): the numbers in (0, 1) that int32 elements i, i + 1, ... of `base` and the key
    (low, high) give. Source: the two-round multiply-xorshift hash of least measured bias (Wellons)."""
    lanes = like.lanes

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = llvm.wide(lanes, I32)
        at = llvm.element_pointer(builder, args[1], args[2], I32)
        bits = builder.load(builder.bitcast(at, wide.as_pointer()), align=4, typ=wide)
        key = [llvm.splat(builder, builder.trunc(word, I32), lanes) for word in args[3:5]]
        bits = builder.mul(builder.xor(bits, key[0]), key[1])
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
            bits = builder.xor(bits, builder.lshr(bits, llvm.constant(lanes, shift, I32)))
            bits = builder.mul(bits, llvm.constant(lanes, factor, I32))
        bits = builder.and_(bits, llvm.constant(lanes, 0x7FFFFFFF, I32))
        x = builder.fadd(builder.sitofp(bits, llvm.wide(lanes)), llvm.constant(lanes, 0.5))
        x = builder.fmul(x, llvm.constant(lanes, 2.0**-31))
        most = llvm.constant(lanes, 1.0 - 2.0**-24)
        return builder.select(builder.fcmp_ordered("<", x, most), x, most)

    return like(like, types.CPointer(types.int32), types.int64, types.int64, types.int64), generate


@instruction
def exponent(typing: Any, a: Any) -> Any:
    """exponent(x): e of x = m * 2 ** e with m in [sqrt(1/2), sqrt(2)), for positive normal x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(_exponent(builder, args[0], a.lanes), llvm.wide(a.lanes))

    return a(a), generate


@instruction
def mantissa(typing: Any, a: Any) -> Any:
    """mantissa(x): the m that belongs to `exponent`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], llvm.wide(a.lanes, I32))
        power = builder.shl(_exponent(builder, args[0], a.lanes), llvm.constant(a.lanes, 23, I32))
        return builder.bitcast(builder.sub(bits, power), llvm.wide(a.lanes))

    return a(a), generate


def _exponent(builder: Any, x: Any, lanes: int) -> Any:
    bits = builder.bitcast(x, llvm.wide(lanes, I32))
    above = builder.sub(bits, llvm.constant(lanes, 0x3F3504F3, I32))  # the bits of sqrt(1/2)
    return builder.ashr(above, llvm.constant(lanes, 23, I32))


@instruction
def pick(typing: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """pick(a, b, x, y): x in the lanes where a > b, else y; y where either is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[2], args[3])

    return a(a, a, a, a), generate


@instruction
def count_up(typing: Any, like: Any) -> Any:
    """count_up(like): 0, 1, 2, ..."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(llvm.wide(like.lanes, F32), [float(i) for i in range(like.lanes)])

    return like(like), generate


@instruction
def smallest(typing: Any, a: Any) -> Any:
    """smallest(x): the smallest lane. No lane may be NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.call(builder, f"llvm.vector.reduce.fmin.v{a.lanes}f32", F32, args[0])

    return types.float32(a), generate


@helper
def log(zero: Any, x: Any) -> Any:
    """Return the natural logarithm of positive normal numbers, within 1.5 ulp.

    log m = 2 atanh(s) = f - s (f - 2 s^2 (1/3 + s^2/5 + ...)) with f = m - 1 and s = f / (2 + f), at most 0.172.
    """
    f = add(mantissa(x), splat(zero, -1.0))
    s = div(f, add(f, splat(zero, 2.0)))
    t = mul(s, s)
    series = splat(zero, 2.0 / 11.0)
    series = fma(series, t, splat(zero, 2.0 / 9.0))
    series = fma(series, t, splat(zero, 2.0 / 7.0))
    series = fma(series, t, splat(zero, 2.0 / 5.0))
    series = fma(series, t, splat(zero, 2.0 / 3.0))
    inner = fma(series, t, mul(f, splat(zero, -1.0)))
    return fma(exponent(x), splat(zero, 0.6931471805599453), fma(s, inner, f))


@helper
def gumbel_lanes(zero: Any, base: Any, index: int, low: int, high: int) -> Any:
    """Return standard Gumbel noise, -log(-log(1 - v)) of uniform v. Exact for tiny v, where 1 - v rounds."""
    v = uniform(zero, base, index, low, high)
    minus = splat(zero, -1.0)
    rest = fma(v, minus, splat(zero, 1.0))
    lost = add(v, add(rest, minus))  # v - (1 - rest): what rounding took
    return mul(log(zero, fma(log(zero, rest), minus, lost)), minus)
