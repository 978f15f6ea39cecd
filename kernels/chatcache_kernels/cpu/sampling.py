"""Passes over the vocabulary, row by row: draws, noise, argmax, the largest values, temperature, log-sum-exp.

Sampling in torch calls takes a dozen passes over [num_rows, vocab_size], each through memory; at 32 rows that costs as
much as a small model's whole step. No bit of a row depends on other rows, on their number, or on the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from .launch import Launch, choose_num_threads, compile_kernel, define_job, helper
from .simd import (
    F32,
    FLOAT32,
    I32,
    INT32,
    INT64,
    KINDS,
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

x [R, W] float32; base [W] int32, or [R, W] with base_stride W; low, high [R] int32; levels [R] float32; chosen
[R, size] int64, an output. W is the vocabulary size.
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


def argmax(x: Tensor) -> Tensor:
    """Return the index of the largest value of each row; of equal values, the first.

    NaN is never chosen.
    Shapes: x [num_rows, vocab_size] float32 -> [num_rows] int64.
    """
    x = _pad_to_register(x)
    out = torch.empty(len(x), dtype=torch.int64)
    _run(_argmax_kernel(), x, out, x.shape[1])
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


def log_sum_exp(x: Tensor) -> Tensor:
    """Return log(sum(exp(x))) of each row.

    Not finite if a value is NaN or +inf, or all are -inf.
    Shapes: x [num_rows, vocab_size] float32 -> [num_rows] float32.
    """
    x = _pad_to_register(x)
    out = torch.empty(len(x))
    _run(_lse_kernel(), x, out, x.shape[1])
    return out


DRAW_FIELDS = "width seed lane position temperature top_k top_p min_p num_top"
DRAW_JOB, _PACK_DRAW = define_job(
    f"logits index base {DRAW_FIELDS} floor tokens logprobs top_values top_tokens size num_draws vocab_size"
)
"""Addresses, shapes and types as in `draw_tokens`; tokens [D] int32 and logprobs [D] float32 are written.

floor [D] float32: the smallest scaled logit that passes min_p. top_values [D, size] float32 and top_tokens [D, size]
int64: memory for the largest scaled logits of draws with top_k.
"""

_DRAW_TYPES = (np.int32, np.uint64, np.int32, np.int32, np.float32, np.int32, np.float32, np.float32, np.int32)
_UNSUPPORTED, _BROKEN = -2, -1  # instead of a token


def draw_tokens(
    logits: Tensor, index: NDArray[np.int64], fields: Sequence[NDArray[Any]], base: Tensor
) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
    """Sample one token for each draw in one kernel; return the tokens and their log-probabilities.

    Returns None unless every draw has width 1, no alternatives to report, and a top_k of at most MAX_TOP. Temperature
    0 is greedy; otherwise the token is the one of largest (logit - largest) / temperature + noise of those that pass
    min_p, then top_k, then top_p. The noise is keyed by (seed, lane, position). Equal logits rank by token. A token is
    -1 where the logits are not finite. Log-probabilities are those of all logits, as of `log_sum_exp`.

    Between two steps of a model its weights replace everything in the caches, so that each operation on the logits
    costs several times what it costs in a loop.
    Shapes: logits [U, V] float32, bfloat16 or float16; index [D], the row of each draw; fields: DRAW_FIELDS, each [D];
    base [V] -> [D] each.
    """
    num_draws, vocab_size = len(index), logits.shape[1]
    if vocab_size < _LANES or not num_draws:
        return None
    logits = logits.contiguous()
    arrays: list[NDArray[Any]] = [np.ascontiguousarray(index, np.int64)]
    arrays += map(np.ascontiguousarray, fields, _DRAW_TYPES)
    top_k, min_p = arrays[6], arrays[8]
    size = max(int(top_k.max()), 0)
    if size:
        size = min(int(top_k.max(initial=0, where=top_k < vocab_size)), MAX_TOP)
    floor = min_p
    if min_p.any():
        with np.errstate(divide="ignore"):
            floor = np.log(np.maximum(min_p, 0.0)).astype(np.float32)
    tokens, logprobs = np.empty(num_draws, np.int32), np.empty(num_draws, np.float32)
    values, ids = np.empty((num_draws, size), np.float32), np.empty((num_draws, size), np.int64)
    places = [array.ctypes.data for array in (*arrays, floor, tokens, logprobs, values, ids)]
    job = _PACK_DRAW.pack(0, 0, logits.data_ptr(), places[0], base.data_ptr(), *places[1:], size, num_draws, vocab_size)
    _draw_kernel(KINDS[logits.dtype])(job, min(choose_num_threads(num_draws * vocab_size), num_draws))
    return None if tokens[0] == _UNSUPPORTED else (tokens, logprobs)


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


@helper
def _row_max(zero: Any, x: Any, start: int, width: int) -> Any:
    """Return the largest value of the row that begins at element `start`."""
    top = splat(zero, np.float32(-np.inf))
    for step in range(_num_registers(width)):
        top = maximum(load(zero, x, start + _register_offset(step, width)), top)
    return reduce_max(top)


@helper
def _row_log_sum_exp(zero: Any, x: Any, start: int, width: int, highest: float) -> Any:
    """Return log(sum(exp(x))) of the row that begins at element `start`, whose largest value is `highest`."""
    best, scale, summed = splat(zero, np.float32(-highest)), splat(zero, np.float32(LOG2E)), zero
    for block in range(0, _num_registers(width), _SUM_BLOCK):  # partial sums, so that small terms are not lost
        some = zero
        for step in range(block, min(block + _SUM_BLOCK, _num_registers(width))):
            at = _register_offset(step, width)
            weight = exp2(mul(add(load(zero, x, start + at), best), scale))
            if at < step * _LANES:
                weight = mask_lanes(weight, step * _LANES - at, _LANES, np.float32(0.0))
            some = add(some, weight)
        summed = add(summed, some)
    return highest + np.float32(np.log(reduce_sum(summed))) if highest > -np.inf else np.float32(-np.inf)


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
def _argmax_kernel() -> Launch:
    """Return the launcher of the argmax kernel. Takes a SAMPLING_JOB with x and out."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, SAMPLING_JOB)[0]
        zero, width = zeros(_LANES), job.width
        x, out = pointer(FLOAT32, job.x), pointer(INT64, job.out)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            out[row] = max(_greedy_token(zero, x, row * width, width), 0)
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@helper
def _insert(values: Any, ids: Any, first: int, count: int, size: int, value: Any, token: int) -> int:
    """Insert a value and its token into the `count` largest so far, best first; return how many there are now.

    `values` and `ids` have them from element `first` on, at most `size`. Of equal values, the earlier one stays ahead.
    """
    if count < size:
        count += 1
    elif not value > values[first + size - 1]:
        return count
    at = first + count - 1
    while at > first and values[at - 1] < value:
        values[at], ids[at] = values[at - 1], ids[at - 1]
        at -= 1
    values[at], ids[at] = value, token
    return count


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
                    count = _insert(out, chosen, start, count, size, x[row * width + index], index)
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
            highest, level = _row_max(zero, x, row * width, width), pointer(FLOAT32, job.levels)[row]
            best, by = splat(zero, np.float32(-highest)), splat(zero, level)
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
        x, out = pointer(FLOAT32, job.x), pointer(FLOAT32, job.out)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            out[row] = _row_log_sum_exp(zero, x, row * width, width, _row_max(zero, x, row * width, width))
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@helper
def _mix64(x: Any) -> Any:
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


@helper
def _is_supported(job: Any, draw: int, vocab_size: int) -> Any:
    """Return whether a draw has width 1, no alternatives to report, and no large top_k."""
    top_k = pointer(INT32, job.top_k)[draw]
    has_few = top_k <= MAX_TOP or top_k >= vocab_size
    return pointer(INT32, job.width)[draw] == 1 and pointer(INT32, job.num_top)[draw] == 0 and has_few


@helper
def _lane(register: Any, lane: int) -> Any:
    """Return one lane of a register; not NaN."""
    return reduce_max(mask_lanes(register, lane, lane + 1, np.float32(-np.inf)))


# In the following, `row` is (logits, first element, width, -largest logit, temperature), the last two in each lane;
# `noise` is (base, low, high), as in `gumbel`.


@helper
def _scaled(zero: Any, row: Any, at: int) -> Any:
    """Return the register of scaled logits (logit - largest) / temperature from token `at` on."""
    x, start, _, shift, by = row
    return div(add(load(zero, x, start + at), shift), by)


@helper
def _weight(zero: Any, scaled: Any) -> Any:
    """Return e to the power of each lane."""
    return exp2(mul(scaled, splat(zero, np.float32(LOG2E))))


@helper
def _first_of_largest(zero: Any, best: Any, where: Any, width: int) -> Any:
    """Return the lowest of the tokens `where` in the lanes of `best` that are the largest; -1 if none is above -inf."""
    largest = reduce_max(best)
    if not largest > -np.inf:
        return -1
    chosen = select_greater(splat(zero, largest), best, splat(zero, np.float32(width)), where)
    return np.int64(reduce_min(chosen))


@helper
def _greedy_token(zero: Any, x: Any, start: int, width: int) -> Any:
    """Return the token of the largest logit."""
    best, where = splat(zero, np.float32(-np.inf)), zero
    for step in range(_num_registers(width)):
        at = _register_offset(step, width)
        value = load(zero, x, start + at)
        where = select_greater(value, best, add(lane_indices(zero), splat(zero, np.float32(at))), where)
        best = select_greater(value, best, value, best)
    return _first_of_largest(zero, best, where, width)


@helper
def _noisy_token(zero: Any, row: Any, noise: Any, value: Any, end: Any) -> Any:
    """Return the token of the largest scaled logit plus noise; -1 if there is none.

    Only of tokens that rank before token `end` of scaled logit `value`, of all if `end` is the width.
    """
    width, (base, low, high) = row[2], noise
    none, level, last = splat(zero, np.float32(-np.inf)), splat(zero, value), splat(zero, np.float32(end))
    best, where = none, zero
    for step in range(_num_registers(width)):
        at = _register_offset(step, width)
        here, tokens = _scaled(zero, row, at), add(lane_indices(zero), splat(zero, np.float32(at)))
        noisy = add(here, gumbel_lanes(zero, base, at, low, high))
        if end < width:
            equal = select_greater(level, here, none, select_greater(last, tokens, noisy, none))
            noisy = select_greater(here, level, noisy, equal)
        where = select_greater(noisy, best, tokens, where)
        best = select_greater(noisy, best, noisy, best)
    return _first_of_largest(zero, best, where, width)


@helper
def _mass_before(zero: Any, row: Any, floor: Any, value: Any, token: int) -> Any:
    """Return the share of the row's probability that ranks before `token`, whose scaled logit is `value`.

    Scaled logits below `floor` have none.
    """
    width, least, level = row[2], splat(zero, floor), splat(zero, value)
    before_sum, all_sum = zero, zero
    for block in range(0, _num_registers(width), _SUM_BLOCK):  # partial sums, so that small terms are not lost
        partial_before, some = zero, zero
        for step in range(block, min(block + _SUM_BLOCK, _num_registers(width))):
            at = _register_offset(step, width)
            here = _scaled(zero, row, at)
            weight = select_greater(least, here, zero, _weight(zero, here))
            if at < step * _LANES:
                weight = mask_lanes(weight, step * _LANES - at, _LANES, np.float32(0.0))
            before = select_greater(here, level, weight, zero)
            if at < token:  # equal values with a lower index
                earlier = mask_lanes(weight, 0, token - at, np.float32(0.0))
                before = select_greater(here, level, weight, select_greater(level, here, zero, earlier))
            partial_before, some = add(partial_before, before), add(some, weight)
        before_sum, all_sum = add(before_sum, partial_before), add(all_sum, some)
    return reduce_sum(before_sum) / reduce_sum(all_sum)


@helper
def _random_token(zero: Any, row: Any, noise: Any, floor: Any, top_p: Any) -> Any:
    """Return the token of the largest scaled logit plus noise of those that pass min_p and top_p.

    A token that does not pass rules out all that rank after it; so the next one is searched before it.
    """
    width = row[2]
    token = _noisy_token(zero, row, noise, np.float32(0.0), width)
    while token >= 0:
        at = min(token, width - _LANES)
        value = _lane(_scaled(zero, row, at), token - at)
        if value >= floor and (top_p >= 1 or _mass_before(zero, row, floor, value, token) < top_p):
            break
        earlier = _noisy_token(zero, row, noise, value, token)
        if earlier < 0:
            break
        token = earlier
    return token


@helper
def _find_top(zero: Any, row: Any, values: Any, ids: Any, first: int, size: int) -> None:
    """Write the `size` largest scaled logits and their tokens from element `first` on, best first."""
    width, count = row[2], 0
    for step in range(_num_registers(width)):
        at = _register_offset(step, width)
        here = _scaled(zero, row, at)
        if count == size and reduce_max(here) <= values[first + size - 1]:
            continue
        for lane in range(step * _LANES - at, _LANES):
            count = _insert(values, ids, first, count, size, _lane(here, lane), at + lane)


@helper
def _random_top_token(
    zero: Any, row: Any, noise: Any, floor: Any, top_p: Any, values: Any, ids: Any, first: int, size: int
) -> Any:
    """Return the token of the largest scaled logit plus noise of the `size` largest that pass min_p and top_p.

    `values`, `ids`: memory for these, from element `first` on.
    """
    width, (base, low, high) = row[2], noise
    _find_top(zero, row, values, ids, first, size)
    total, before = np.float32(0.0), np.float32(0.0)
    for place in range(first, first + size):
        if values[place] >= floor:
            total += _lane(_weight(zero, splat(zero, values[place])), 0)
    best, token = np.float32(-np.inf), ids[first]
    for place in range(first, first + size):
        is_kept = values[place] >= floor and (top_p >= 1 or before / total < top_p)
        if place > first and not is_kept:
            break
        before += _lane(_weight(zero, splat(zero, values[place])), 0)
        at = min(ids[place], width - _LANES)
        noisy = values[place] + _lane(gumbel_lanes(zero, base, at, low, high), ids[place] - at)
        if noisy > best:
            best, token = noisy, ids[place]
    return token


@cache
def _draw_kernel(kind: int) -> Launch:
    """Return the launcher of the `draw_tokens` kernel for a kind of logits. Takes a DRAW_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, DRAW_JOB)[0]
        zero, width = zeros(_LANES), job.vocab_size
        x, base = pointer(kind, job.logits), pointer(INT32, job.base)
        tokens, logprobs = pointer(INT32, job.tokens), pointer(FLOAT32, job.logprobs)
        for draw in range(job.num_draws):
            if not _is_supported(job, draw, width):
                tokens[0] = _UNSUPPORTED
                return
        draw = fetch_add(address, 0, 1)
        while draw < job.num_draws:
            start = pointer(INT64, job.index)[draw] * width
            highest, temperature = _row_max(zero, x, start, width), pointer(FLOAT32, job.temperature)[draw]
            total = _row_log_sum_exp(zero, x, start, width, highest)
            if np.isfinite(total):
                place = np.uint64(pointer(INT32, job.lane)[draw] & 0xFFFFFFFF) << np.uint64(32)
                place |= np.uint64(pointer(INT32, job.position)[draw] & 0xFFFFFFFF)
                seed = np.uint64(pointer(INT64, job.seed)[draw]) + np.uint64(0x9E3779B97F4A7C15)
                key = _mix64(_mix64(seed) ^ place)
                low: Any = np.int64(key & np.uint64(0xFFFFFFFF))
                high: Any = np.int64(key >> np.uint64(32)) | 1
                row = x, start, width, splat(zero, np.float32(-highest)), splat(zero, temperature)
                noise = base, low, high
                top_k, top_p = pointer(INT32, job.top_k)[draw], pointer(FLOAT32, job.top_p)[draw]
                floor = np.float32(-np.inf)
                if pointer(FLOAT32, job.min_p)[draw] > 0:
                    floor = pointer(FLOAT32, job.floor)[draw]
                if not temperature > 0:
                    token = _greedy_token(zero, x, start, width)
                elif 0 < top_k < width:
                    values, ids = pointer(FLOAT32, job.top_values), pointer(INT64, job.top_tokens)
                    token = _random_top_token(zero, row, noise, floor, top_p, values, ids, draw * job.size, top_k)
                else:
                    token = _random_token(zero, row, noise, floor, top_p)
                at = min(token, width - _LANES)
                tokens[draw], logprobs[draw] = token, _lane(load(zero, x, start + at), token - at) - total
            else:
                tokens[draw], logprobs[draw] = _BROKEN, np.float32(-np.inf)
            draw = fetch_add(address, 0, 1)

    return compile_kernel(kernel)
