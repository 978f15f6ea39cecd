"""Linear layers of few tokens in bf16. Limited by reading the weight once from memory.

oneDNN does the same for many tokens, but each call costs tens of microseconds, as much as reading a weight at decode.
Here a weight is packed in the order in which it is read: panels of 32 outputs; in a panel 32 inputs at a time, as two
tiles of 16 outputs; a tile is 16 rows of (input pair, output). An item is one panel for up to 32 tokens. Ways to
multiply, best first: AMX tiles, pairs by AVX512-BF16, pairs widened to float32. In the last two a token's sum does not
depend on other tokens.

Shapes: x [num_tokens, in] bf16, packed [out / 32, in / 32, 2, 16, 16, 2] bf16 -> [num_tokens, out] bf16. 32 must divide
in and out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from numba import carray
from torch import Tensor

from .bf16 import (
    CONFIG_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    dot_pairs,
    has_amx,
    has_avx512_bf16,
    store_bf16,
    tile_clear,
    tile_config,
    tile_configure,
    tile_dot,
    tile_load,
    tile_release,
    tile_store,
)
from .launch import Launch, compile_kernel, define_job, helper
from .simd import BFLOAT16, FLOAT32, add, fetch_add, load, pointer, prefetch, splat, zeros

PANEL = 32  # outputs of an item, and inputs of a step
GROUP_TOKENS = 2 * TILE_ROWS  # tokens of an item
SCRATCH_FLOATS = 4 * TILE_BYTES // 4  # per thread

MATMUL_JOB, PACK_MATMUL_JOB = define_job("x weight bias out scratch configs num_tokens num_inputs num_outputs")
"""Addresses of contiguous arrays and sizes. bias may be 0.

For AMX only: scratch: SCRATCH_FLOATS for each thread; configs: `tile_configs(T)`.
"""


def pack_weight(weight: Tensor, keep: Callable[[Tensor], Tensor] = Tensor.contiguous) -> Tensor:
    """Return the weight in the order in which the kernel reads it.

    Shapes: weight [out, in] -> [out / 32, in / 32, 2, 16, 16, 2]. `keep` makes the contiguous copy in memory of the
    caller's choice; an address that is a multiple of 64 is fastest.
    """
    num_outputs, num_inputs = weight.shape
    parts = weight.view(num_outputs // PANEL, 2, 16, num_inputs // PANEL, 16, 2)
    return keep(parts.permute(0, 3, 1, 4, 2, 5))


def can_pack(weight: Tensor) -> bool:
    """Return whether `pack_weight` and the kernel support a weight's dtype, device and shape."""
    fits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return fits and weight.shape[0] % PANEL == 0 and weight.shape[1] % PANEL == 0


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None, unit: str | None = None) -> Tensor:
    """Apply a bf16 linear layer with a packed weight: return x @ weight.T + bias.

    Shapes: see the module docstring. `unit` selects the way to multiply (tiles | pairs | floats) in tests; None is the
    fastest this CPU supports.
    """
    x, num_outputs = x.contiguous(), packed.shape[0] * PANEL
    out = torch.empty(len(x), num_outputs, dtype=x.dtype)
    threads = torch.get_num_threads()
    scratch, configs = torch.empty(threads * SCRATCH_FLOATS), tile_configs(len(x))
    job = PACK_MATMUL_JOB.pack(
        0, 0, x.data_ptr(), packed.data_ptr(), bias.data_ptr() if bias is not None else 0, out.data_ptr(),
        scratch.data_ptr(), configs.data_ptr(), len(x), x.shape[1], num_outputs,
    )  # fmt: skip
    multiply_kernel(unit)(job, threads)
    return out


@cache
def tile_configs(num_tokens: int) -> Tensor:
    """Return two AMX configurations: for a full group of 32 tokens, and for the last group.

    Tiles 0-3 are sums, 4-5 tokens, 6-7 weights.
    """
    last = (num_tokens - 1) % GROUP_TOKENS + 1
    first, second = min(last, TILE_ROWS), max(last - TILE_ROWS, 1)
    rows = [(16,) * 8, (first, first, second, second, first, second, 16, 16)]
    return torch.frombuffer(bytearray(b"".join(tile_config(each) for each in rows)), dtype=torch.uint8)


def multiply_kernel(unit: str | None = None) -> Launch:
    """Return the launcher of the bf16 multiplication kernel.

    Its argument record is a MATMUL_JOB. `unit`: as in `multiply`.
    """
    best = "tiles" if has_amx() else "pairs" if has_avx512_bf16() else "floats"
    return _tile_kernel(has_avx512_bf16()) if (unit or best) == "tiles" else _pair_kernel((unit or best) == "pairs")


@cache
def _tile_kernel(native: bool) -> Launch:
    """Return the launcher of the bf16 multiplication kernel that uses AMX tiles.

    `native`: round outputs by AVX512-BF16.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, MATMUL_JOB)[0]
        num_panels, num_groups = job.num_outputs // PANEL, (job.num_tokens + GROUP_TOKENS - 1) // GROUP_TOKENS
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        scratch = job.scratch + thread * SCRATCH_FLOATS * 4
        configured = -1
        while item < num_panels * num_groups:
            panel, group = divmod(item, num_groups)
            last = 1 if group == num_groups - 1 else 0
            if last != configured:
                tile_configure(job.configs + last * CONFIG_BYTES)
                configured = last
            _multiply_amx(native, job, group * GROUP_TOKENS, panel, scratch)
            item = fetch_add(address, 0, 1)
        if configured >= 0:
            tile_release()

    return compile_kernel(kernel)


@helper
def _multiply_amx(native: bool, job: Any, token: int, panel: int, scratch: int) -> None:
    """Multiply a group of up to 32 tokens with a panel of 32 outputs, using AMX.

    Tiles 0-3: sums; 4-5: tokens; 6-7: weights. `scratch`: address of SCRATCH_FLOATS floats.
    """
    stride = 2 * job.num_inputs
    x, weight = job.x + token * stride, job.weight + panel * PANEL * stride
    more = job.num_tokens - token > TILE_ROWS
    tile_clear(0)
    tile_clear(1)
    tile_clear(2)
    tile_clear(3)
    for step in range(job.num_inputs // PANEL):
        tile_load(4, x + 64 * step, stride)
        tile_load(6, weight, 64)
        tile_load(7, weight + TILE_BYTES, 64)
        tile_dot(0, 4, 6)
        tile_dot(1, 4, 7)
        if more:
            tile_load(5, x + 64 * step + TILE_ROWS * stride, stride)
            tile_dot(2, 5, 6)
            tile_dot(3, 5, 7)
        weight += 2 * TILE_BYTES
    tile_store(0, scratch, 128)
    tile_store(1, scratch + 64, 128)
    if more:
        tile_store(2, scratch + 2 * TILE_BYTES, 128)
        tile_store(3, scratch + 2 * TILE_BYTES + 64, 128)
    sums, zero = pointer(FLOAT32, scratch), zeros(16)
    for row in range(min(GROUP_TOKENS, job.num_tokens - token)):
        for half in range(2):
            _write_outputs(
                native, job, token + row, panel * PANEL + 16 * half, load(zero, sums, row * PANEL + 16 * half)
            )


@helper
def _write_outputs(native: bool, job: Any, token: int, output: int, value: Any) -> None:
    """Add the bias to 16 sums of a token and store them as outputs in bf16."""
    if job.bias != 0:
        value = add(value, load(value, pointer(BFLOAT16, job.bias), output))
    store_bf16(native, pointer(BFLOAT16, job.out), token * job.num_outputs + output, value)


@cache
def _pair_kernel(native: bool) -> Launch:
    """Return the launcher of the bf16 multiplication kernel that does not need AMX.

    `native`: multiply pairs by AVX512-BF16, else widened to float32.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, MATMUL_JOB)[0]
        num_panels, num_groups = job.num_outputs // PANEL, (job.num_tokens + GROUP_TOKENS - 1) // GROUP_TOKENS
        item = fetch_add(address, 0, 1)
        while item < num_panels * num_groups:
            panel, group = divmod(item, num_groups)
            token, end = group * GROUP_TOKENS, min((group + 1) * GROUP_TOKENS, job.num_tokens)
            while token + 4 <= end:
                _multiply_4_tokens(native, job, token, panel)
                token += 4
            while token < end:
                _multiply_1_token(native, job, token, panel)
                token += 1
            item = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@helper
def _multiply_1_token(native: bool, job: Any, token: int, panel: int) -> None:
    """Compute the 32 outputs of a panel for one token."""
    x = pointer(FLOAT32, job.x + 2 * token * job.num_inputs)
    weight = pointer(FLOAT32, job.weight + 2 * panel * PANEL * job.num_inputs)
    zero = zeros(16)
    a, b = zero, zero
    for step in range(job.num_inputs // PANEL):
        at = step * 2 * 256
        for row in range(16):
            prefetch(weight, at + row * 16 + 2048)
            prefetch(weight, at + row * 16 + 256 + 2048)
            pair = splat(zero, x[step * 16 + row])
            a = dot_pairs(native, a, load(zero, weight, at + row * 16), pair)
            b = dot_pairs(native, b, load(zero, weight, at + row * 16 + 256), pair)
    _write_outputs(native, job, token, panel * PANEL, a)
    _write_outputs(native, job, token, panel * PANEL + 16, b)


@helper
def _multiply_4_tokens(native: bool, job: Any, token: int, panel: int) -> None:
    """Compute the 32 outputs of a panel for four tokens."""
    width = job.num_inputs // 2
    x = pointer(FLOAT32, job.x + 4 * token * width)
    weight = pointer(FLOAT32, job.weight + 2 * panel * PANEL * job.num_inputs)
    zero = zeros(16)
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    for step in range(job.num_inputs // PANEL):
        for row in range(16):
            at, pair = step * 2 * 256 + row * 16, step * 16 + row
            even, odd = load(zero, weight, at), load(zero, weight, at + 256)
            x0, x1 = splat(zero, x[pair]), splat(zero, x[pair + width])
            x2, x3 = splat(zero, x[pair + 2 * width]), splat(zero, x[pair + 3 * width])
            a0, b0 = dot_pairs(native, a0, even, x0), dot_pairs(native, b0, odd, x0)
            a1, b1 = dot_pairs(native, a1, even, x1), dot_pairs(native, b1, odd, x1)
            a2, b2 = dot_pairs(native, a2, even, x2), dot_pairs(native, b2, odd, x2)
            a3, b3 = dot_pairs(native, a3, even, x3), dot_pairs(native, b3, odd, x3)
    for half in range(2):
        output = panel * PANEL + 16 * half
        _write_outputs(native, job, token, output, a0 if half == 0 else b0)
        _write_outputs(native, job, token + 1, output, a1 if half == 0 else b1)
        _write_outputs(native, job, token + 2, output, a2 if half == 0 else b2)
        _write_outputs(native, job, token + 3, output, a3 if half == 0 else b3)
