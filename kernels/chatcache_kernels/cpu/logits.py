"""Passes over a vocabulary, a row at a time: the noise of draws, the best token, temperature, the mass before a token.

Sampling in torch calls takes a dozen passes over [draws, vocabulary], each through memory; at 32 draws that costs as
much as a small model's whole step. No bit of a row depends on the other rows, on their number, or on the threads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional

from .launch import Launch, compile_kernel, helper, record, threads_for
from .noise import count_up, gumbel_lanes, pick, smallest
from .tile import LOG2E
from .vectors import (
    FLOAT32,
    INT32,
    INT64,
    add,
    div,
    exp2,
    fetch_add,
    keep,
    largest,
    load,
    maximum,
    mul,
    pointer,
    splat,
    store,
    total,
    zeros,
)

_LANES = 16
_BLOCK = 64  # registers summed before they join the rest

JOB, _PACK = record("x base base_stride low high levels chosen out num_rows width")
"""Addresses: x [R, W] float32; base int32 [W], or [R, W] with base_stride W; low, high [R] int32; levels [R] float32;
chosen [R] int64. A kernel reads those it needs."""


def gumbel(base: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the noise of draws, float32 [R, W]. Shapes: base [W] or [R, W]; low, high [R]; all int32."""
    num_rows, width = len(low), base.shape[-1]
    if width < _LANES:
        return gumbel(functional.pad(base, (0, _LANES - width)), low, high)[:, :width]
    out = torch.empty(num_rows, width)
    _run(_gumbel_kernel(), None, out, width, base=base, low=low, high=high)
    return out


def noisy_argmax(x: Tensor, base: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return where x + gumbel(base, low, high) is largest, the first of equals.

    Shapes: x [R, W] float32, base [W] -> [R] int64.
    """
    x = _wide_enough(x)
    if len(base) < _LANES:
        base = functional.pad(base, (0, _LANES - len(base)))
    out = torch.empty(len(x), dtype=torch.int64)
    _run(_argmax_kernel(True), x, out, x.shape[1], base=base, low=low, high=high)
    return out


def argmax(x: Tensor) -> Tensor:
    """Return where each row is largest, the first of equals; NaN never is. Shapes: x [R, W] float32 -> [R] int64."""
    x = _wide_enough(x)
    out = torch.empty(len(x), dtype=torch.int64)
    _run(_argmax_kernel(False), x, out, x.shape[1])
    return out


def scale(x: Tensor, temperature: Tensor) -> Tensor:
    """Return (x - largest of the row) / temperature. Shapes: x [R, W], temperature [R]; float32."""
    width = x.shape[1]
    x = _wide_enough(x)
    out = torch.empty_like(x)
    _run(_scale_kernel(), x, out, x.shape[1], levels=temperature)
    return out[:, :width]


def share_ahead(x: Tensor, chosen: Tensor, floor: Tensor) -> Tensor:
    """Return which share of a row's exponentials lies ahead of the chosen place: greater ones, and equal ones to its
    left. Exponentials of what is below `floor` do not count.

    Shapes: x [R, W] and floor [R] float32, chosen [R] int64 -> [R].
    """
    x = _wide_enough(x)
    out = torch.empty(len(x))
    _run(_share_kernel(), x, out, x.shape[1], levels=floor, chosen=chosen)
    return out


def log_sum_exp(x: Tensor) -> Tensor:
    """Return the logarithm of each row's summed exponentials; not finite where a value is NaN or +inf, or all -inf.

    Shapes: x [R, W] float32 -> [R] float32.
    """
    x = _wide_enough(x)
    out = torch.empty(len(x))
    _run(_lse_kernel(), x, out, x.shape[1])
    return out


def _wide_enough(x: Tensor) -> Tensor:
    if x.shape[1] < _LANES:
        x = functional.pad(x, (0, _LANES - x.shape[1]), value=-np.inf)
    return x.contiguous()


def _run(kernel: Launch, x: Tensor | None, out: Tensor, width: int, **arrays: Tensor) -> None:
    """Launch over the rows of `out`; `arrays` are fields of the job."""
    tensors = {name: tensor.contiguous() for name, tensor in arrays.items()}
    if x is not None:
        tensors["x"] = x
    fields = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    base, num_rows = tensors.get("base"), len(out)
    fields |= {"out": out.data_ptr(), "num_rows": num_rows, "width": width}
    fields["base_stride"] = base.stride(0) if base is not None and base.ndim == 2 else 0
    job = _PACK.pack(*(fields.get(name, 0) for name in JOB.names or ()))
    kernel(job, min(threads_for(num_rows * width), max(num_rows, 1)))


@helper
def _num_steps(width: int) -> int:
    return (width + _LANES - 1) // _LANES


@helper
def _place(step: int, width: int) -> int:
    """Return where the `step`-th register of a row begins; the last one overlaps the one before."""
    return min(step * _LANES, width - _LANES)


@cache
def _gumbel_kernel() -> Launch:
    """Return the launcher. Takes a JOB without x."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, JOB)[0]
        zero, width = zeros(_LANES), job.width
        base, out = pointer(INT32, job.base), pointer(FLOAT32, job.out)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            low, high = pointer(INT32, job.low)[row], pointer(INT32, job.high)[row]
            for step in range(_num_steps(width)):
                at = _place(step, width)
                store(out, row * width + at, gumbel_lanes(zero, base, row * job.base_stride + at, low, high))
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _argmax_kernel(noisy: bool) -> Launch:
    """Return the launcher. Takes a JOB; without noise, one without base and keys."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, JOB)[0]
        zero, width = zeros(_LANES), job.width
        x, out, base = pointer(FLOAT32, job.x), pointer(INT64, job.out), pointer(INT32, job.base)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            best, where = splat(zero, np.float32(-np.inf)), zero
            for step in range(_num_steps(width)):
                at = _place(step, width)
                value = load(zero, x, row * width + at)
                if noisy:
                    low, high = pointer(INT32, job.low)[row], pointer(INT32, job.high)[row]
                    value = add(value, gumbel_lanes(zero, base, at, low, high))
                where = pick(value, best, add(count_up(zero), splat(zero, np.float32(at))), where)
                best = pick(value, best, value, best)
            highest = splat(zero, largest(best))
            out[row] = np.int64(smallest(pick(highest, best, splat(zero, np.float32(width)), where)))
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _scale_kernel() -> Launch:
    """Return the launcher. Takes a JOB with x, levels and out."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, JOB)[0]
        zero, width = zeros(_LANES), job.width
        x, out = pointer(FLOAT32, job.x), pointer(FLOAT32, job.out)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            top = splat(zero, np.float32(-np.inf))
            for step in range(_num_steps(width)):
                top = maximum(load(zero, x, row * width + _place(step, width)), top)
            best, by = splat(zero, np.float32(-largest(top))), splat(zero, pointer(FLOAT32, job.levels)[row])
            for step in range(_num_steps(width)):
                at = row * width + _place(step, width)
                store(out, at, div(add(load(zero, x, at), best), by))
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _lse_kernel() -> Launch:
    """Return the launcher. Takes a JOB with x and out."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, JOB)[0]
        zero, width = zeros(_LANES), job.width
        x, out, scale = pointer(FLOAT32, job.x), pointer(FLOAT32, job.out), splat(zero, np.float32(LOG2E))
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            top = splat(zero, np.float32(-np.inf))
            for step in range(_num_steps(width)):
                top = maximum(load(zero, x, row * width + _place(step, width)), top)
            highest, summed = largest(top), zero
            best = splat(zero, np.float32(-highest))
            for block in range(0, _num_steps(width), _BLOCK):  # sums of sums, so that small terms are not lost
                some = zero
                for step in range(block, min(block + _BLOCK, _num_steps(width))):
                    at = _place(step, width)
                    weight = exp2(mul(add(load(zero, x, row * width + at), best), scale))
                    if at < step * _LANES:
                        weight = keep(weight, step * _LANES - at, _LANES, np.float32(0.0))
                    some = add(some, weight)
                summed = add(summed, some)
            out[row] = highest + np.float32(np.log(total(summed))) if highest > -np.inf else np.float32(-np.inf)
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _share_kernel() -> Launch:
    """Return the launcher. Takes a JOB with x, levels, chosen and out."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, JOB)[0]
        zero, width = zeros(_LANES), job.width
        x, out, chosen = pointer(FLOAT32, job.x), pointer(FLOAT32, job.out), pointer(INT64, job.chosen)
        row = fetch_add(address, 0, 1)
        while row < job.num_rows:
            level = splat(zero, pointer(FLOAT32, job.levels)[row])
            value = splat(zero, x[row * width + chosen[row]])
            ahead, behind, scale = zero, zero, splat(zero, np.float32(LOG2E))
            for block in range(0, _num_steps(width), _BLOCK):  # sums of sums, so that small terms are not lost
                some_ahead, some = zero, zero
                for step in range(block, min(block + _BLOCK, _num_steps(width))):
                    at = _place(step, width)
                    here = load(zero, x, row * width + at)
                    weight = pick(level, here, zero, exp2(mul(here, scale)))
                    if at < step * _LANES:
                        weight = keep(weight, step * _LANES - at, _LANES, np.float32(0.0))
                    before = pick(here, value, weight, zero)
                    if at < chosen[row]:  # of equals, those that come first
                        earlier = keep(weight, 0, chosen[row] - at, np.float32(0.0))
                        before = pick(here, value, weight, pick(value, here, zero, earlier))
                    some_ahead, some = add(some_ahead, before), add(some, weight)
                ahead, behind = add(ahead, some_ahead), add(behind, some)
            out[row] = total(ahead) / total(behind)
            row = fetch_add(address, 0, 1)

    return compile_kernel(kernel)
