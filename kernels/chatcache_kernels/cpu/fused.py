"""RMSNorm and the gated activations, in one pass each.

In a decode step these would be several tiny torch calls per layer, where calling costs more than computing. Widths that
no register divides, and mixed dtypes, use the plain torch path of `reference`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from .. import reference
from .bf16 import exp2_approx, has_avx512_bf16, reciprocal_approx
from .int16 import quantise_row
from .launch import Launch, choose_num_threads, compile_kernel, define_job, helper
from .simd import (
    BFLOAT16,
    KINDS,
    LOG2E,
    add,
    div,
    exp2,
    fetch_add,
    fma,
    load,
    maximum,
    minimum,
    mul,
    pointer,
    reduce_sum,
    splat,
    store,
    zeros,
)

LANES = 16

NORM_JOB, _PACK_NORM = define_job("x residual weight out total quantised num_rows width rows_per_item", "eps")
GATED_NORM_JOB, _PACK_GATED_NORM = define_job("x gate weight out num_rows width heads gate_stride rows_per_item", "eps")
GATE_JOB, _PACK_GATE = define_job("x gate out num_rows width gate_stride")
ACTIVATION_JOB, _PACK_ACTIVATION = define_job("gate_up out quantised num_rows width rows_per_item", "slope limit")
"""`quantised`: address of the rows of `out` quantised for `int16`; used only by kernels made with `quantise`.

`slope`, `limit`: of CLAMPED_SILU.
"""

SILU, GELU, CLAMPED_SILU = range(3)
GELU_SLOPE, GELU_CUBE = 2.0 * math.sqrt(2.0 / math.pi), 0.044715
"""gelu(x), approximated by a hyperbolic tangent, is x * sigmoid(GELU_SLOPE * (x + GELU_CUBE * x^3))."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm over the last dimension. Shapes: x [..., hidden], weight [hidden] of x's type or float32."""
    if not can_fuse_norm(x, weight):
        return reference.rms_norm(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_norm(x, 0, weight, out, 0, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual).

    Shapes: x, residual [num_tokens, hidden], weight [hidden].
    """
    if not can_fuse_norm(x, weight) or residual.dtype != x.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    out, summed = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, residual.data_ptr(), weight, out, summed.data_ptr(), eps)
    return out, summed


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * silu(gate), over the last dimension.

    Shapes: x [num_tokens, num_heads, dim], gate the same with any stride over tokens, weight [dim].
    """
    num_tokens, num_heads, width = x.shape
    if not can_fuse_norm(x, weight) or gate.dtype != x.dtype:
        return reference.gated_rms_norm(x, gate, weight, eps)
    if gate.stride(2) != 1 or gate.stride(1) != width:
        gate = gate.contiguous()
    x = x.contiguous()
    out, num_rows = torch.empty_like(x), num_tokens * num_heads
    job = _PACK_GATED_NORM.pack(
        0, 0, x.data_ptr(), gate.data_ptr(), weight.data_ptr(), out.data_ptr(), num_rows, width, num_heads,
        gate.stride(0), rows_per_item(num_rows), eps,
    )  # fmt: skip
    gated_norm_kernel(KINDS[x.dtype], KINDS[weight.dtype])(job, choose_num_threads(x.numel()))
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate).

    Shapes: x [num_tokens, width] contiguous, gate the same with any stride over tokens; width is a multiple of `LANES`.
    """
    out = torch.empty_like(x)
    job = _PACK_GATE.pack(0, 0, x.data_ptr(), gate.data_ptr(), out.data_ptr(), *x.shape, gate.stride(0))
    gate_kernel(KINDS[x.dtype])(job, choose_num_threads(x.numel()))
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up.

    Shapes: gate_up [num_tokens, 2 * intermediate], gate first -> [num_tokens, intermediate].
    """
    return _activate(gate_up, SILU) if can_fuse_activation(gate_up) else reference.silu_mul(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, with the approximation of GELU by a hyperbolic tangent. Shapes: as `silu_mul`."""
    return _activate(gate_up, GELU) if can_fuse_activation(gate_up) else reference.gelu_mul(gate_up)


def clamped_silu_mul(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """Return gate * sigmoid(slope * gate) * (up + 1), gate at most `limit`, up from -`limit` to `limit` (gpt-oss).

    Shapes: as `silu_mul`.
    """
    if not can_fuse_activation(gate_up):
        return reference.clamped_silu_mul(gate_up, slope, limit)
    return _activate(gate_up, CLAMPED_SILU, slope, limit)


def _activate(gate_up: Tensor, activation: int, slope: float = 1.0, limit: float = 0.0) -> Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty(num_rows, width, dtype=gate_up.dtype)
    job = _PACK_ACTIVATION.pack(
        0, 0, gate_up.data_ptr(), out.data_ptr(), 0, num_rows, width, rows_per_item(num_rows), slope, limit
    )
    activation_kernel(KINDS[gate_up.dtype], activation)(job, choose_num_threads(gate_up.numel()))
    return out


def can_fuse_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel supports a norm; otherwise torch computes it."""
    has_type = weight.dtype in (x.dtype, torch.float32)
    return x.shape[-1] % LANES == 0 and x.dtype in KINDS and has_type and weight.is_contiguous()


def can_fuse_activation(gate_up: Tensor) -> bool:
    """Return whether the kernel supports an activation; otherwise torch computes it."""
    return gate_up.shape[1] % (2 * LANES) == 0 and gate_up.dtype in KINDS


def rows_per_item(num_rows: int) -> int:
    """Return how many rows a thread takes from the work counter at a time.

    Taking them costs as much as computing a short row.
    """
    return max(1, min(16, num_rows // 16))


def _launch_norm(x: Tensor, residual: int, weight: Tensor, out: Tensor, summed: int, eps: float) -> None:
    """Launch the RMSNorm kernel; `residual` and `summed` (x + residual) are addresses, 0 = none."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    job = _PACK_NORM.pack(
        0, 0, x.data_ptr(), residual, weight.data_ptr(), out.data_ptr(), summed, 0, num_rows, width,
        rows_per_item(num_rows), eps,
    )  # fmt: skip
    norm_kernel(KINDS[x.dtype], False, KINDS[weight.dtype])(job, choose_num_threads(x.numel()))


@cache
def norm_kernel(kind: int, quantise: bool = False, weight_kind: int | None = None) -> Launch:
    """Return the launcher of the RMSNorm kernel. Its argument record is a NORM_JOB.

    Without a residual to add, the fields `residual` and `total` are 0. `quantise`: also quantise the bf16 result.
    `weight_kind`: None is `kind`.
    """
    if weight_kind is None:
        weight_kind = kind

    def kernel(address: Any) -> None:
        job = carray(address, 1, NORM_JOB)[0]
        zero, width = zeros(LANES), job.width
        x, weight, out = pointer(kind, job.x), pointer(weight_kind, job.weight), pointer(kind, job.out)
        residual, summed = pointer(kind, job.residual), pointer(kind, job.total)
        row = fetch_add(address, 0, job.rows_per_item)
        while row < job.num_rows:
            squares = zero
            for i in range(row * width, (row + 1) * width, LANES):
                value = load(zero, x, i)
                if job.residual != 0:
                    store(summed, i, add(value, load(zero, residual, i)))
                    value = load(zero, summed, i)  # rounded, as the next layer reads it
                squares = fma(value, value, squares)
            scale = splat(zero, np.float32(1.0 / np.sqrt(reduce_sum(squares) / width + job.eps)))
            source = x if job.residual == 0 else summed
            for i in range(0, width, LANES):
                value = mul(load(zero, source, row * width + i), scale)
                store(out, row * width + i, mul(value, load(zero, weight, i)))
            if quantise:
                quantise_row(job.out, row, width, job.quantised)
            row += 1
            if row % job.rows_per_item == 0:
                row = fetch_add(address, 0, job.rows_per_item)

    return compile_kernel(kernel)


@cache
def gated_norm_kernel(kind: int, weight_kind: int) -> Launch:
    """Return the launcher of the gated RMSNorm kernel. Its argument record is a GATED_NORM_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, GATED_NORM_JOB)[0]
        zero, width = zeros(LANES), job.width
        x, gate, out = pointer(kind, job.x), pointer(kind, job.gate), pointer(kind, job.out)
        weight = pointer(weight_kind, job.weight)
        one, minus_log2e = splat(zero, np.float32(1.0)), splat(zero, np.float32(-LOG2E))
        most = splat(zero, np.float32(126.0))
        row = fetch_add(address, 0, job.rows_per_item)
        while row < job.num_rows:
            token, head = divmod(row, job.heads)
            squares = zero
            for i in range(row * width, (row + 1) * width, LANES):
                value = load(zero, x, i)
                squares = fma(value, value, squares)
            scale = splat(zero, np.float32(1.0 / np.sqrt(reduce_sum(squares) / width + job.eps)))
            for i in range(0, width, LANES):
                normed = mul(mul(load(zero, x, row * width + i), scale), load(zero, weight, i))
                by = load(zero, gate, token * job.gate_stride + head * width + i)
                factor = div(by, add(one, exp2(minimum(mul(by, minus_log2e), most))))
                store(out, row * width + i, mul(normed, factor))
            row += 1
            if row % job.rows_per_item == 0:
                row = fetch_add(address, 0, job.rows_per_item)

    return compile_kernel(kernel)


@cache
def gate_kernel(kind: int) -> Launch:
    """Return the launcher of `sigmoid_mul`. Its argument record is a GATE_JOB; `out` may be `x`."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, GATE_JOB)[0]
        zero, width = zeros(LANES), job.width
        x, gate, out = pointer(kind, job.x), pointer(kind, job.gate), pointer(kind, job.out)
        one, minus_log2e = splat(zero, np.float32(1.0)), splat(zero, np.float32(-LOG2E))
        most = splat(zero, np.float32(126.0))
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            for i in range(0, width, LANES):
                power = minimum(mul(load(zero, gate, row * job.gate_stride + i), minus_log2e), most)
                store(out, row * width + i, div(load(zero, x, row * width + i), add(one, exp2(power))))
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@helper
def activate_row(
    coarse: bool, activation: int, slope: float, limit: float, gates: Any, at: int, out: Any, out_at: int, width: int
) -> None:
    """Write the activation of `width` gates, from number `at` of `gates` on, and of what follows them, to `out`.

    `coarse` (a literal): use approximations within bf16 precision, in half the time.
    `activation` (a literal): SILU, GELU or CLAMPED_SILU, of which `slope` and `limit` are.
    """
    zero = zeros(LANES)
    one, most = splat(zero, np.float32(1.0)), splat(zero, np.float32(126.0))
    minus_log2e, cube = splat(zero, np.float32(-LOG2E)), zero
    if activation == GELU:
        minus_log2e, cube = splat(zero, np.float32(-LOG2E * GELU_SLOPE)), splat(zero, np.float32(GELU_CUBE))
    high, low = zero, zero
    if activation == CLAMPED_SILU:
        minus_log2e = splat(zero, np.float32(-LOG2E * slope))
        high, low = splat(zero, np.float32(limit)), splat(zero, np.float32(-limit))
    for i in range(0, width, LANES):
        gate, up = load(zero, gates, at + i), load(zero, gates, at + width + i)
        if activation == CLAMPED_SILU:
            gate, up = minimum(gate, high), add(minimum(maximum(up, low), high), one)
        power = mul(gate, minus_log2e)
        if activation == GELU:
            power = mul(power, fma(mul(gate, gate), cube, one))
        power = minimum(power, most)
        if coarse:
            value = mul(mul(gate, reciprocal_approx(add(one, exp2_approx(power)))), up)
        else:
            value = mul(div(gate, add(one, exp2(power))), up)
        store(out, out_at + i, value)


def activation_kernel(kind: int, activation: int = SILU, *, quantise: bool = False) -> Launch:
    """Return the launcher of the kernel of a gated activation. Its argument record is an ACTIVATION_JOB.

    `quantise`: also quantise the bf16 result.
    """
    return _activation_kernel(kind, activation, kind == BFLOAT16 and has_avx512_bf16(), quantise)


@cache
def _activation_kernel(kind: int, activation: int, coarse: bool, quantise: bool) -> Launch:
    """Return the launcher of an activation for one element type.

    `coarse`: as in `activate_row`.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, ACTIVATION_JOB)[0]
        width = job.width
        gate_up, out = pointer(kind, job.gate_up), pointer(kind, job.out)
        row = fetch_add(address, 0, job.rows_per_item)
        while row < job.num_rows:
            activate_row(coarse, activation, job.slope, job.limit, gate_up, 2 * row * width, out, row * width, width)
            if quantise:
                quantise_row(job.out, row, width, job.quantised)
            row += 1
            if row % job.rows_per_item == 0:
                row = fetch_add(address, 0, job.rows_per_item)

    return compile_kernel(kernel)
