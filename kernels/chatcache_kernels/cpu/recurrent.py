"""Recurrent and convolution layers: one pass over a row's tokens, the states in the first-level cache.

All rows of a step run in one launch; an item is one head (or block of channels) of one row. The recurrent form is used
for prompts, too: it reads and writes each number of the state once per token, from the first-level cache, for 8
operations, and chunked forms need as many. It also makes the results batch-invariant: no bit depends on other rows or
on where a row's tokens are divided between steps, as every token is computed by the same operations in the same order.

The pass that updates the state with token t of the gated delta rule also reads it for the query of token t and for the
key of token t + 1, so that a token costs one pass instead of three.

Sizes that fit no register, and mixed dtypes, use the plain torch path of `reference_recurrent`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from .. import reference_recurrent
from ..reference_recurrent import contiguous_tokens
from .launch import Launch, choose_num_threads, compile_kernel, define_job, helper
from .simd import (
    FLOAT32,
    INT32,
    KINDS,
    LOG2E,
    add,
    div,
    exp2,
    fetch_add,
    first_lane,
    fma,
    join_lanes,
    load,
    minimum,
    mul,
    num_lanes,
    pointer,
    prefetch,
    reduce_sum,
    splat,
    split_lanes,
    store,
    sub,
    zeros,
)

LANES = 16
GATE_LANES = 4
CHANNELS = 256  # of an item of the convolution
DELTA_TOKENS, SSD_TOKENS = 32, 16  # tokens of which a thread keeps keys and queries (B and C) in float32
MAX_TAPS = 8
ROWS_AHEAD = 8  # of a state's rows that are prefetched

CONV_JOB, _PACK_CONV = define_job("x out weight bias states slots offsets scratch num_rows num_channels stride silu")
DELTA_JOB, _PACK_DELTA = define_job(
    "q k v g beta out states slots offsets scratch num_rows num_key_heads num_heads dim_k dim_v q_stride k_stride"
    " v_stride l2_norm",
    "scale",
)
GATES_JOB, _PACK_GATES = define_job("a b g beta decay dt_bias num_tokens num_heads stride")
SSD_JOB, _PACK_SSD = define_job(
    "x dt a b c d out states slots offsets scratch num_rows num_groups num_heads dim_p dim_n x_stride b_stride c_stride"
)
"""Strides are those of tokens, in elements; `bias` and `d` are 0 if there are none; `scratch`: floats per thread."""


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, offsets: Tensor,
    activation: str | None,
) -> Tensor:  # fmt: skip
    """Convolve as `reference_recurrent.causal_conv` does."""
    num_channels, num_taps = weight.shape
    kinds = KINDS.get(x.dtype), KINDS.get(weight.dtype), KINDS.get(states.dtype)
    fits = can_convolve(weight) and x.dtype == states.dtype
    if not fits or None in kinds or not states.is_contiguous() or (bias is not None and bias.dtype != weight.dtype):
        return reference_recurrent.causal_conv(x, weight, bias, states, slots, offsets, activation)
    x, weight, bias = contiguous_tokens(x), weight.contiguous(), None if bias is None else bias.contiguous()
    slots, offsets = slots.int().contiguous(), offsets.int().contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    threads = choose_num_threads(num_taps * x.numel())
    scratch = torch.empty(threads * 2 * num_taps * CHANNELS)
    job = _PACK_CONV.pack(
        0, 0, x.data_ptr(), out.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        states.data_ptr(), slots.data_ptr(), offsets.data_ptr(), scratch.data_ptr(), len(slots), num_channels,
        x.stride(0), activation == "silu",
    )  # fmt: skip
    conv_kernel(kinds[0], kinds[1], num_taps)(job, threads)
    return out


def can_convolve(weight: Tensor) -> bool:
    """Return whether the kernel supports a convolution. Shapes: weight [C, K]."""
    return weight.shape[0] % LANES == 0 and 2 <= weight.shape[1] <= MAX_TAPS and weight.dtype in KINDS


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, offsets: Tensor,
    scale: float, l2_norm: bool,
) -> Tensor:  # fmt: skip
    """Run the gated delta rule as `reference_recurrent.gated_delta_rule` does."""
    (num_key_heads, dim_k), (num_heads, dim_v) = k.shape[1:], v.shape[1:]
    lanes = delta_lanes(dim_k, dim_v)
    same = q.dtype == k.dtype == v.dtype and q.dtype in KINDS and states.dtype == torch.float32
    if not (lanes and same and states.is_contiguous()):
        return reference_recurrent.gated_delta_rule(q, k, v, g, beta, states, slots, offsets, scale, l2_norm)
    q, k, v = (contiguous_tokens(each) for each in (q, k, v))
    g, beta, slots, offsets = g.float().contiguous(), beta.float().contiguous(), slots.int(), offsets.int()
    slots, offsets = slots.contiguous(), offsets.contiguous()
    out = torch.empty(v.shape, dtype=v.dtype)
    threads = choose_num_threads(len(v) * num_heads * dim_k * dim_v // 2)
    scratch = torch.empty(threads * delta_scratch_bytes(dim_k), dtype=torch.uint8)
    job = _PACK_DELTA.pack(
        0, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(), out.data_ptr(),
        states.data_ptr(), slots.data_ptr(), offsets.data_ptr(), scratch.data_ptr(), len(slots), num_key_heads,
        num_heads, dim_k, dim_v, q.stride(0), k.stride(0), v.stride(0), l2_norm, scale,
    )  # fmt: skip
    delta_kernel(KINDS[v.dtype], lanes)(job, threads)
    return out


def delta_lanes(dim_k: int, dim_v: int) -> int:
    """Return the register width, in float32, of the gated delta rule for these heads; 0 if no register fits."""
    return next((n for n in (16, 8, 4) if dim_k % n == 0 and dim_v % (2 * n) == 0), 0)


def delta_scratch_bytes(dim_k: int) -> int:
    """Return the bytes that a thread of the gated delta rule works in."""
    return 4 * DELTA_TOKENS * (2 * dim_k + 2)


def delta_gates(a: Tensor, b: Tensor, decay: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return (g, beta) of the gated delta rule in float32: decay * softplus(a + dt_bias) and sigmoid(b).

    Shapes: a, b [num_tokens, num_heads] with one stride between tokens; num_heads is a multiple of `GATE_LANES`; decay,
    dt_bias [num_heads] float32.
    """
    g, beta = torch.empty(2, *a.shape)
    job = _PACK_GATES.pack(
        0, 0, a.data_ptr(), b.data_ptr(), g.data_ptr(), beta.data_ptr(), decay.data_ptr(), dt_bias.data_ptr(), *a.shape,
        a.stride(0),
    )  # fmt: skip
    gates_kernel(KINDS[a.dtype])(job, choose_num_threads(a.numel()))
    return g, beta


def ssd_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, states: Tensor, slots: Tensor,
    offsets: Tensor,
) -> Tensor:  # fmt: skip
    """Run the state space model of Mamba-2 as `reference_recurrent.ssd_scan` does."""
    (num_heads, dim_p), (num_groups, dim_n) = x.shape[1:], b.shape[1:]
    lanes = next((n for n in (16, 8, 4) if dim_p % n == 0 and dim_n % (2 * n) == 0), 0)
    same = x.dtype == b.dtype == c.dtype and x.dtype in KINDS and states.dtype == torch.float32
    if not (lanes and same and states.is_contiguous()):
        return reference_recurrent.ssd_scan(x, dt, a, b, c, d, states, slots, offsets)
    x, b, c = (contiguous_tokens(each) for each in (x, b, c))
    dt, a, d = dt.float().contiguous(), a.float().contiguous(), None if d is None else d.float().contiguous()
    slots, offsets = slots.int().contiguous(), offsets.int().contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    threads = choose_num_threads(len(x) * num_heads * dim_p * dim_n // 2)
    scratch = torch.empty(threads * SSD_TOKENS * (2 * dim_n + 2 * dim_p + 1))
    job = _PACK_SSD.pack(
        0, 0, x.data_ptr(), dt.data_ptr(), a.data_ptr(), b.data_ptr(), c.data_ptr(),
        0 if d is None else d.data_ptr(), out.data_ptr(), states.data_ptr(), slots.data_ptr(), offsets.data_ptr(),
        scratch.data_ptr(), len(slots), num_groups, num_heads, dim_p, dim_n, x.stride(0), b.stride(0), c.stride(0),
    )  # fmt: skip
    _ssd_kernel(KINDS[x.dtype], lanes)(job, threads)
    return out


@cache
def conv_kernel(kind: int, weight_kind: int, num_taps: int) -> Launch:
    """Return the launcher of the convolution, for inputs of `kind`. Its argument record is a CONV_JOB."""
    num_past = num_taps - 1

    def kernel(address: Any) -> None:
        job = carray(address, 1, CONV_JOB)[0]
        zero = zeros(LANES)
        x, out, states = pointer(kind, job.x), pointer(kind, job.out), pointer(kind, job.states)
        weight, bias = pointer(weight_kind, job.weight), pointer(weight_kind, job.bias)
        slots, offsets = pointer(INT32, job.slots), pointer(INT32, job.offsets)
        channels, thread = job.num_channels, fetch_add(address, 1, 1)
        taps = pointer(FLOAT32, job.scratch + 4 * thread * 2 * num_taps * CHANNELS)  # [num_taps, CHANNELS]
        past = pointer(FLOAT32, job.scratch + 4 * (2 * thread + 1) * num_taps * CHANNELS)  # [num_past, CHANNELS]
        one, minus_log2e = splat(zero, np.float32(1.0)), splat(zero, np.float32(-LOG2E))
        most = splat(zero, np.float32(126.0))
        blocks = (channels + CHANNELS - 1) // CHANNELS
        item = fetch_add(address, 0, 1)
        while item < job.num_rows * blocks:
            row, low = item // blocks, item % blocks * CHANNELS
            width = min(CHANNELS, channels - low)
            start, count = np.int64(offsets[row]), np.int64(offsets[row + 1]) - np.int64(offsets[row])
            state = (np.int64(slots[row]) * channels + low) * num_past
            for i in range(0, width if count > 0 else 0, LANES):
                split_lanes(zero, weight, (low + i) * num_taps, num_taps, taps, i, CHANNELS)
                split_lanes(zero, states, state + i * num_past, num_past, past, i, CHANNELS)
            for t in range(count):
                at = (start + t) * job.stride + low
                for i in range(0, width, LANES):
                    total = zero
                    for tap in range(num_taps):
                        back = num_past - tap
                        if t < back:
                            value = load(zero, past, (t + tap) * CHANNELS + i)
                        else:
                            value = load(zero, x, at + i - back * job.stride)
                        total = fma(value, load(zero, taps, tap * CHANNELS + i), total)
                    if job.bias != 0:
                        total = add(total, load(zero, bias, low + i))
                    if job.silu != 0:
                        total = div(total, add(one, exp2(minimum(mul(total, minus_log2e), most))))
                    store(out, (start + t) * channels + low + i, total)
            for i in range(0, width if count > 0 else 0, LANES):
                for tap in range(num_past):
                    back = num_past - tap
                    if count < back:
                        value = load(zero, past, (count + tap) * CHANNELS + i)
                    else:
                        value = load(zero, x, (start + count - back) * job.stride + low + i)
                    store(past, tap * CHANNELS + i, value)
                join_lanes(zero, states, state + i * num_past, num_past, past, i, CHANNELS)
            item = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@helper
def _scale_row(zero: Any, source: Any, at: int, size: int, l2_norm: int, scale: float, target: Any, to: int) -> None:
    """Write `size` numbers as float32, multiplied by `scale` and, with `l2_norm`, divided by their norm."""
    factor = splat(zero, np.float32(scale))
    if l2_norm != 0:
        squares = zero
        for i in range(0, size, num_lanes(zero)):
            value = load(zero, source, at + i)
            squares = fma(value, value, squares)
        factor = splat(zero, np.float32(scale / np.sqrt(reduce_sum(squares) + 1e-6)))
    for i in range(0, size, num_lanes(zero)):
        store(target, to + i, mul(load(zero, source, at + i), factor))


@cache
def delta_kernel(kind: int, lanes: int) -> Launch:
    """Return the launcher of the gated delta rule, for q, k and v of `kind`. Its argument record is a DELTA_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, DELTA_JOB)[0]
        zero, thread = zeros(lanes), fetch_add(address, 1, 1)
        q, k, v, out = pointer(kind, job.q), pointer(kind, job.k), pointer(kind, job.v), pointer(kind, job.out)
        g, beta = pointer(FLOAT32, job.g), pointer(FLOAT32, job.beta)
        slots, offsets = pointer(INT32, job.slots), pointer(INT32, job.offsets)
        heads, dim_k, dim_v = job.num_heads, job.dim_k, job.dim_v
        floats = job.scratch + 4 * thread * DELTA_TOKENS * (2 * dim_k + 2)
        queries, keys = pointer(FLOAT32, floats), pointer(FLOAT32, floats + 4 * DELTA_TOKENS * dim_k)
        decays = pointer(FLOAT32, floats + 8 * DELTA_TOKENS * dim_k)  # and betas, DELTA_TOKENS later
        item = fetch_add(address, 0, 1)
        while item < job.num_rows * heads:
            row, head = item // heads, item % heads
            key_head = head // (heads // job.num_key_heads)
            first, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
            state = pointer(FLOAT32, job.states + 4 * (np.int64(slots[row]) * heads + head) * dim_k * dim_v)
            while first < end:
                count: Any = min(DELTA_TOKENS, end - first)
                for t in range(count):
                    at = first + t
                    _scale_row(zero, q, at * job.q_stride + key_head * dim_k, dim_k, job.l2_norm, job.scale,
                               queries, t * dim_k)  # fmt: skip
                    _scale_row(zero, k, at * job.k_stride + key_head * dim_k, dim_k, job.l2_norm, 1.0,
                               keys, t * dim_k)  # fmt: skip
                    power = mul(splat(zero, g[at * heads + head]), splat(zero, np.float32(LOG2E)))
                    decays[t] = first_lane(exp2(power))
                    decays[DELTA_TOKENS + t] = beta[at * heads + head]
                for low in range(0, dim_v, 2 * lanes):
                    known0, known1 = zero, zero
                    for i in range(dim_k):
                        if low == 0:  # whole rows in order; the lines of other columns stay in the second-level cache
                            for line in range(0, dim_v, LANES):
                                prefetch(state, (i + ROWS_AHEAD) * dim_v + line)
                        key = splat(zero, keys[i])
                        known0 = fma(key, load(zero, state, i * dim_v + low), known0)
                        known1 = fma(key, load(zero, state, i * dim_v + low + lanes), known1)
                    for t in range(count):
                        decay, gate = splat(zero, decays[t]), splat(zero, decays[DELTA_TOKENS + t])
                        at = (first + t) * job.v_stride + head * dim_v + low
                        delta0 = mul(sub(load(zero, v, at), mul(decay, known0)), gate)
                        delta1 = mul(sub(load(zero, v, at + lanes), mul(decay, known1)), gate)
                        out0, out1, known0, known1 = zero, zero, zero, zero
                        this, following = t * dim_k, min(t + 1, count - 1) * dim_k
                        for i in range(dim_k):
                            place = i * dim_v + low
                            key, query = splat(zero, keys[this + i]), splat(zero, queries[this + i])
                            next_key = splat(zero, keys[following + i])
                            state0 = fma(key, delta0, mul(decay, load(zero, state, place)))
                            state1 = fma(key, delta1, mul(decay, load(zero, state, place + lanes)))
                            store(state, place, state0)
                            store(state, place + lanes, state1)
                            out0, out1 = fma(query, state0, out0), fma(query, state1, out1)
                            known0, known1 = fma(next_key, state0, known0), fma(next_key, state1, known1)
                        at = ((first + t) * heads + head) * dim_v + low
                        store(out, at, out0)
                        store(out, at + lanes, out1)
                first += count
            item = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def gates_kernel(kind: int) -> Launch:
    """Return the launcher of `delta_gates`, for a and b of `kind`. Its argument record is a GATES_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, GATES_JOB)[0]
        zero, heads = zeros(GATE_LANES), job.num_heads
        a, b, g, beta = pointer(kind, job.a), pointer(kind, job.b), pointer(FLOAT32, job.g), pointer(FLOAT32, job.beta)
        decay, dt_bias = pointer(FLOAT32, job.decay), pointer(FLOAT32, job.dt_bias)
        one, minus_log2e = splat(zero, np.float32(1.0)), splat(zero, np.float32(-LOG2E))
        most = splat(zero, np.float32(126.0))
        token = fetch_add(address, 0, 1)
        while token < job.num_tokens:
            for i in range(0, heads, GATE_LANES):
                at = token * heads + i
                power = mul(load(zero, b, token * job.stride + i), minus_log2e)
                store(beta, at, div(one, add(one, exp2(minimum(power, most)))))
                store(g, at, add(load(zero, a, token * job.stride + i), load(zero, dt_bias, i)))
            for i in range(heads):
                x = g[token * heads + i]
                g[token * heads + i] = decay[i] * (x if x > 20.0 else math.log1p(math.exp(x)))
            token = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _ssd_kernel(kind: int, lanes: int) -> Launch:
    """Return the launcher of Mamba-2, for x, b and c of `kind`. Its argument record is an SSD_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, SSD_JOB)[0]
        zero, thread = zeros(lanes), fetch_add(address, 1, 1)
        x, b, c, out = pointer(kind, job.x), pointer(kind, job.b), pointer(kind, job.c), pointer(kind, job.out)
        dt, a, d = pointer(FLOAT32, job.dt), pointer(FLOAT32, job.a), pointer(FLOAT32, job.d)
        slots, offsets = pointer(INT32, job.slots), pointer(INT32, job.offsets)
        heads, dim_p, dim_n = job.num_heads, job.dim_p, job.dim_n
        floats = job.scratch + 4 * thread * SSD_TOKENS * (2 * dim_n + 2 * dim_p + 1)
        bs, cs = pointer(FLOAT32, floats), pointer(FLOAT32, floats + 4 * SSD_TOKENS * dim_n)
        inputs = pointer(FLOAT32, floats + 8 * SSD_TOKENS * dim_n)
        results = pointer(FLOAT32, floats + 4 * SSD_TOKENS * (2 * dim_n + dim_p))
        decays = pointer(FLOAT32, floats + 8 * SSD_TOKENS * (dim_n + dim_p))
        item = fetch_add(address, 0, 1)
        while item < job.num_rows * heads:
            row, head = item // heads, item % heads
            group = head // (heads // job.num_groups)
            first, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
            state = pointer(FLOAT32, job.states + 4 * (np.int64(slots[row]) * heads + head) * dim_p * dim_n)
            skip = zero if job.d == 0 else splat(zero, d[head])
            while first < end:
                count: Any = min(SSD_TOKENS, end - first)
                for t in range(count):
                    at, step = first + t, dt[(first + t) * heads + head]
                    _scale_row(zero, b, at * job.b_stride + group * dim_n, dim_n, 0, 1.0, bs, t * dim_n)
                    _scale_row(zero, c, at * job.c_stride + group * dim_n, dim_n, 0, 1.0, cs, t * dim_n)
                    power = mul(mul(splat(zero, step), splat(zero, a[head])), splat(zero, np.float32(LOG2E)))
                    decays[t] = first_lane(exp2(power))
                    for i in range(0, dim_p, lanes):
                        value = load(zero, x, at * job.x_stride + head * dim_p + i)
                        store(inputs, t * dim_p + i, mul(value, splat(zero, step)))
                        store(results, t * dim_p + i, mul(value, skip))
                for p in range(dim_p):
                    for t in range(count):
                        decay, given = splat(zero, decays[t]), splat(zero, inputs[t * dim_p + p])
                        y0, y1 = zero, zero
                        for n in range(0, dim_n, 2 * lanes):
                            place, near = p * dim_n + n, t * dim_n + n
                            state0 = fma(given, load(zero, bs, near), mul(decay, load(zero, state, place)))
                            state1 = fma(
                                given, load(zero, bs, near + lanes), mul(decay, load(zero, state, place + lanes))
                            )
                            store(state, place, state0)
                            store(state, place + lanes, state1)
                            y0 = fma(state0, load(zero, cs, near), y0)
                            y1 = fma(state1, load(zero, cs, near + lanes), y1)
                        results[t * dim_p + p] += reduce_sum(add(y0, y1))
                for t in range(count):
                    at = ((first + t) * heads + head) * dim_p
                    for i in range(0, dim_p, lanes):
                        store(out, at + i, load(zero, results, t * dim_p + i))
                first += count
            item = fetch_add(address, 0, 1)

    return compile_kernel(kernel)
