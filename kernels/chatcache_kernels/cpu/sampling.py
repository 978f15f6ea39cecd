"""Passes over the vocabulary, row by row: Gumbel noise, argmax, the largest values, temperature, log-sum-exp.

Sampling in torch calls takes a dozen passes over [num_rows, vocab_size], each through memory; at 32 rows that costs as
much as a small model's whole step. No bit of a row depends on other rows, on their number, or on the threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from torch import Tensor
from torch.nn import functional

from .launch import Launch, choose_num_threads, compile_kernel, define_job, helper
from .simd import (
    F32,
    FLOAT32,
    I32,
    INT32,
    INT64,
    LOG2E,
    add,
    div,
    emit_call,
    emit_constant,
    emit_pointer,
    emit_splat,
    exp2,
    fetch_add,
    fma,
    load,
    mask_lanes,
    maximum,
    mul,
    pointer,
    reduce_max,
    reduce_sum,
    simd_intrinsic,
    splat,
    store,
    vector_type,
    zeros,
)


@simd_intrinsic
def uniform(typing: Any, like: Any, base: Any, index: Any, low: Any, high: Any) -> Any:
    """Return uniform random numbers in (0, 1), keyed by (low, high), one per lane.

    Lane i hashes element index + i of `base`, the hashed token ids.
    Source: the two-round multiply-xorshift hash of least measured bias (Wellons, hash-prospector).
    """
    lanes = like.lanes

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = vector_type(lanes, I32)
        at = emit_pointer(builder, args[1], args[2], I32)
        bits = builder.load(builder.bitcast(at, wide.as_pointer()), align=4, typ=wide)
        key = [emit_splat(builder, builder.trunc(word, I32), lanes) for word in args[3:5]]
        bits = builder.mul(builder.xor(bits, key[0]), key[1])
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
            bits = builder.xor(bits, builder.lshr(bits, emit_constant(lanes, shift, I32)))
            bits = builder.mul(bits, emit_constant(lanes, factor, I32))
        bits = builder.and_(bits, emit_constant(lanes, 0x7FFFFFFF, I32))
        x = builder.fadd(builder.sitofp(bits, vector_type(lanes)), emit_constant(lanes, 0.5))
        x = builder.fmul(x, emit_constant(lanes, 2.0**-31))
        most = emit_constant(lanes, 1.0 - 2.0**-24)
        return builder.select(builder.fcmp_ordered("<", x, most), x, most)

    return like(like, types.CPointer(types.int32), types.int64, types.int64, types.int64), generate


@simd_intrinsic
def exponent(typing: Any, a: Any) -> Any:
    """Return e of x = m * 2 ** e with m in [sqrt(1/2), sqrt(2)), for positive normal x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sitofp(_exponent(builder, args[0], a.lanes), vector_type(a.lanes))

    return a(a), generate


@simd_intrinsic
def mantissa(typing: Any, a: Any) -> Any:
    """Return m of x = m * 2 ** e, with e as returned by `exponent`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], vector_type(a.lanes, I32))
        power = builder.shl(_exponent(builder, args[0], a.lanes), emit_constant(a.lanes, 23, I32))
        return builder.bitcast(builder.sub(bits, power), vector_type(a.lanes))

    return a(a), generate


def _exponent(builder: Any, x: Any, lanes: int) -> Any:
    """Emit e of x = m * 2 ** e (see `exponent`) as integers."""
    bits = builder.bitcast(x, vector_type(lanes, I32))
    above = builder.sub(bits, emit_constant(lanes, 0x3F3504F3, I32))  # the bits of sqrt(1/2)
    return builder.ashr(above, emit_constant(lanes, 23, I32))


@simd_intrinsic
def select_greater(typing: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """Return x in the lanes where a > b, else y; y where a or b is NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[2], args[3])

    return a(a, a, a, a), generate


@simd_intrinsic
def lane_indices(typing: Any, like: Any) -> Any:
    """Return a register with lanes 0, 1, 2, ..."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(vector_type(like.lanes, F32), [float(i) for i in range(like.lanes)])

    return like(like), generate


@simd_intrinsic
def reduce_min(typing: Any, a: Any) -> Any:
    """Return the smallest lane. No lane may be NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_call(builder, f"llvm.vector.reduce.fmin.v{a.lanes}f32", F32, args[0])

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
    """Return standard Gumbel noise for the tokens `index`, `index` + 1, ..., one per lane.

    The noise is -log(-log(1 - v)) of uniform v, exact for tiny v, where 1 - v is rounded.
    """
    v = uniform(zero, base, index, low, high)
    minus = splat(zero, -1.0)
    rest = fma(v, minus, splat(zero, 1.0))
    lost = add(v, add(rest, minus))  # v - (1 - rest): the rounding error
    return mul(log(zero, fma(log(zero, rest), minus, lost)), minus)


_LANES = 16
_SUM_BLOCK = 64  # registers per partial sum

SAMPLING_JOB, _PACK = define_job("x base base_stride low high levels chosen out num_rows width size")
"""Addresses; a kernel reads those that it needs.

x [R, W] float32; base [W] int32, or [R, W] with base_stride W; low, high [R] int32; levels [R] float32; chosen [R]
int64, or [R, size] as an output. W is the vocabulary size.
"""

MAX_TOP = 512  # values of a row that `top_tokens` can return


def gumbel(base: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return Gumbel noise keyed by (base, low, high).

    Shapes: base [vocab_size] or [num_rows, vocab_size]; low, high [num_rows]; int32 -> [num_rows, vocab_size] float32.
    """
    num_rows, width = len(low), base.shape[-1]
    if width < _LANES:
        return gumbel(functional.pad(base, (0, _LANES - width)), low, high)[:, :width]
    out = torch.empty(num_rows, width)
    _run(_gumbel_kernel(), None, out, width, base=base, low=low, high=high)
    return out


def gumbel_argmax(x: Tensor, base: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the index of the largest x + gumbel(base, low, high) of each row.

    Of equal values the first is returned.
    Shapes: x [num_rows, vocab_size] float32, base [vocab_size] -> [num_rows] int64.
    """
    x = _pad_to_register(x)
    if len(base) < _LANES:
        base = functional.pad(base, (0, _LANES - len(base)))
    out = torch.empty(len(x), dtype=torch.int64)
    _run(_argmax_kernel(True), x, out, x.shape[1], base=base, low=low, high=high)
    return out


def argmax(x: Tensor) -> Tensor:
    """Return the index of the largest value of each row; of equal values, the first.

    NaN is never chosen.
    Shapes: x [num_rows, vocab_size] float32 -> [num_rows] int64.
    """
    x = _pad_to_register(x)
    out = torch.empty(len(x), dtype=torch.int64)
    _run(_argmax_kernel(False), x, out, x.shape[1])
    return out


def top_tokens(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` largest values of each row and their indices, best first; of equal values, the first.

    A row with NaN has any values. `size` is at most MAX_TOP and the length of a row.
    Shapes: x [num_rows, vocab_size] float32 -> [num_rows, size] float32, [num_rows, size] int64.
    """
    x = _pad_to_register(x)
    out, chosen = torch.empty(len(x), size), torch.empty(len(x), size, dtype=torch.int64)
    _run(_top_kernel(), x, out, x.shape[1], size, chosen=chosen)
    return out, chosen


def apply_temperature(x: Tensor, temperature: Tensor) -> Tensor:
    """Return (x - row maximum) / temperature.

    Shapes: x [num_rows, vocab_size], temperature [num_rows]; float32.
    """
    width = x.shape[1]
    x = _pad_to_register(x)
    out = torch.empty_like(x)
    _run(_temperature_kernel(), x, out, x.shape[1], levels=temperature)
    return out[:, :width]


def mass_before(x: Tensor, chosen: Tensor, floor: Tensor) -> Tensor:
    """Return the share of a row's exponentials that precedes the chosen token in rank order.

    Greater values precede, and equal values with a lower index. Values below `floor` have no mass.
    Shapes: x [num_rows, vocab_size], floor [num_rows] float32, chosen [num_rows] int64 -> [num_rows] float32.
    """
    x = _pad_to_register(x)
    out = torch.empty(len(x))
    _run(_mass_before_kernel(), x, out, x.shape[1], levels=floor, chosen=chosen)
    return out


def log_sum_exp(x: Tensor) -> Tensor:
    """Return log(sum(exp(x))) of each row.

    Not finite if a value is NaN or +inf, or all are -inf.
    Shapes: x [num_rows, vocab_size] float32 -> [num_rows] float32.
    """
    x = _pad_to_register(x)
    out = torch.empty(len(x))
    _run(_lse_kernel(), x, out, x.shape[1])
    return out


def _pad_to_register(x: Tensor) -> Tensor:
    """Pad rows that are shorter than a SIMD register with -inf."""
    if x.shape[1] < _LANES:
        x = functional.pad(x, (0, _LANES - x.shape[1]), value=-np.inf)
    return x.contiguous()


def _run(kernel: Launch, x: Tensor | None, out: Tensor, width: int, size: int = 1, **arrays: Tensor) -> None:
    """Launch a sampling kernel over the rows of `out`; `arrays` are fields of its SAMPLING_JOB."""
    tensors = {name: tensor.contiguous() for name, tensor in arrays.items()}
    if x is not None:
        tensors["x"] = x
    fields = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    base, num_rows = tensors.get("base"), len(out)
    fields |= {"out": out.data_ptr(), "num_rows": num_rows, "width": width, "size": size}
    fields["base_stride"] = base.stride(0) if base is not None and base.ndim == 2 else 0
    job = _PACK.pack(*(fields.get(name, 0) for name in SAMPLING_JOB.names or ()))
    kernel(job, min(choose_num_threads(num_rows * width), max(num_rows, 1)))


@helper
def _num_registers(width: int) -> int:
    """Return the number of SIMD registers that cover a row of `width` numbers."""
    return (width + _LANES - 1) // _LANES


@helper
def _register_offset(step: int, width: int) -> int:
    """Return the index in a row of the first element of its `step`-th register.

    The last register may overlap the one before.
    """
    return min(step * _LANES, width - _LANES)


@cache
def _gumbel_kernel() -> Launch:
    """Return the launcher of the Gumbel noise kernel. Takes a SAMPLING_JOB without x."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, SAMPLING_JOB)[0]
        zero, width = zeros(_LANES), job.width
        base, out = pointer(INT32, job.base), pointer(FLOAT32, job.out)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            low, high = pointer(INT32, job.low)[row], pointer(INT32, job.high)[row]
            for step in range(_num_registers(width)):
                at = _register_offset(step, width)
                store(out, row * width + at, gumbel_lanes(zero, base, row * job.base_stride + at, low, high))
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _argmax_kernel(noisy: bool) -> Launch:
    """Return the launcher of the argmax kernel, with Gumbel noise added if `noisy`.

    Takes a SAMPLING_JOB; without noise, one without base and keys.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, SAMPLING_JOB)[0]
        zero, width = zeros(_LANES), job.width
        x, out, base = pointer(FLOAT32, job.x), pointer(INT64, job.out), pointer(INT32, job.base)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            best, where = splat(zero, np.float32(-np.inf)), zero
            for step in range(_num_registers(width)):
                at = _register_offset(step, width)
                value = load(zero, x, row * width + at)
                if noisy:
                    low, high = pointer(INT32, job.low)[row], pointer(INT32, job.high)[row]
                    value = add(value, gumbel_lanes(zero, base, at, low, high))
                where = select_greater(value, best, add(lane_indices(zero), splat(zero, np.float32(at))), where)
                best = select_greater(value, best, value, best)
            highest = splat(zero, reduce_max(best))
            out[row] = np.int64(reduce_min(select_greater(highest, best, splat(zero, np.float32(width)), where)))
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _top_kernel() -> Launch:
    """Return the launcher of the `top_tokens` kernel. Takes a SAMPLING_JOB with x, chosen, out and size.

    The largest values so far are kept sorted; most registers have none that is larger than the smallest of these.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, SAMPLING_JOB)[0]
        zero, width, size = zeros(_LANES), job.width, job.size
        x, out, chosen = pointer(FLOAT32, job.x), pointer(FLOAT32, job.out), pointer(INT64, job.chosen)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            start, count = row * size, 0
            for step in range(_num_registers(width)):
                here = load(zero, x, row * width + _register_offset(step, width))
                if count == size and reduce_max(here) <= out[start + size - 1]:
                    continue
                for index in range(step * _LANES, min((step + 1) * _LANES, width)):
                    value = x[row * width + index]
                    if count < size:
                        count += 1
                    elif not value > out[start + size - 1]:
                        continue
                    at = start + count - 1
                    while at > start and out[at - 1] < value:
                        out[at], chosen[at] = out[at - 1], chosen[at - 1]
                        at -= 1
                    out[at], chosen[at] = value, index
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _temperature_kernel() -> Launch:
    """Return the launcher of the temperature kernel. Takes a SAMPLING_JOB with x, levels, out."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, SAMPLING_JOB)[0]
        zero, width = zeros(_LANES), job.width
        x, out = pointer(FLOAT32, job.x), pointer(FLOAT32, job.out)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            top = splat(zero, np.float32(-np.inf))
            for step in range(_num_registers(width)):
                top = maximum(load(zero, x, row * width + _register_offset(step, width)), top)
            best, by = splat(zero, np.float32(-reduce_max(top))), splat(zero, pointer(FLOAT32, job.levels)[row])
            for step in range(_num_registers(width)):
                at = row * width + _register_offset(step, width)
                store(out, at, div(add(load(zero, x, at), best), by))
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _lse_kernel() -> Launch:
    """Return the launcher of the log-sum-exp kernel. Takes a SAMPLING_JOB with x and out."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, SAMPLING_JOB)[0]
        zero, width = zeros(_LANES), job.width
        x, out, scale = pointer(FLOAT32, job.x), pointer(FLOAT32, job.out), splat(zero, np.float32(LOG2E))
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            top = splat(zero, np.float32(-np.inf))
            for step in range(_num_registers(width)):
                top = maximum(load(zero, x, row * width + _register_offset(step, width)), top)
            highest, summed = reduce_max(top), zero
            best = splat(zero, np.float32(-highest))
            for block in range(0, _num_registers(width), _SUM_BLOCK):  # partial sums, so that small terms are not lost
                some = zero
                for step in range(block, min(block + _SUM_BLOCK, _num_registers(width))):
                    at = _register_offset(step, width)
                    weight = exp2(mul(add(load(zero, x, row * width + at), best), scale))
                    if at < step * _LANES:
                        weight = mask_lanes(weight, step * _LANES - at, _LANES, np.float32(0.0))
                    some = add(some, weight)
                summed = add(summed, some)
            out[row] = highest + np.float32(np.log(reduce_sum(summed))) if highest > -np.inf else np.float32(-np.inf)
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _mass_before_kernel() -> Launch:
    """Return the launcher of the `mass_before` kernel.

    Takes a SAMPLING_JOB with x, levels, chosen and out.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, SAMPLING_JOB)[0]
        zero, width = zeros(_LANES), job.width
        x, out, chosen = pointer(FLOAT32, job.x), pointer(FLOAT32, job.out), pointer(INT64, job.chosen)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            level = splat(zero, pointer(FLOAT32, job.levels)[row])
            value = splat(zero, x[row * width + chosen[row]])
            before_sum, all_sum, scale = zero, zero, splat(zero, np.float32(LOG2E))
            for block in range(0, _num_registers(width), _SUM_BLOCK):  # partial sums, so that small terms are not lost
                partial_before, some = zero, zero
                for step in range(block, min(block + _SUM_BLOCK, _num_registers(width))):
                    at = _register_offset(step, width)
                    here = load(zero, x, row * width + at)
                    weight = select_greater(level, here, zero, exp2(mul(here, scale)))
                    if at < step * _LANES:
                        weight = mask_lanes(weight, step * _LANES - at, _LANES, np.float32(0.0))
                    before = select_greater(here, value, weight, zero)
                    if at < chosen[row]:  # equal values with a lower index
                        earlier = mask_lanes(weight, 0, chosen[row] - at, np.float32(0.0))
                        before = select_greater(here, value, weight, select_greater(value, here, zero, earlier))
                    partial_before, some = add(partial_before, before), add(some, weight)
                before_sum, all_sum = add(before_sum, partial_before), add(all_sum, some)
            out[row] = reduce_sum(before_sum) / reduce_sum(all_sum)
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)
