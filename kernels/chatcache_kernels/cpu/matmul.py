"""Linear layers of few tokens in bf16. Limited by reading the weight once from memory.

oneDNN does the same for many tokens, but each call costs tens of microseconds, as much as reading a weight at decode.
Here a weight is packed in the order in which it is read: panels of 32 outputs; in a panel 2 inputs at a time, as two
registers of (16 outputs, input pair). For AMX, 32 inputs are two interleaved tiles. Reading in strictly ascending order
keeps the hardware prefetcher close to the read bandwidth: with the two tiles one after the other and software
prefetches it was a third of that (Zen 4, one thread, one token). An item is one panel for up to 32 tokens. Ways to
multiply, best first: AMX tiles, pairs by AVX512-BF16, pairs widened to float32. In the last two a token's sum does not
depend on other tokens.

Shapes: x [num_tokens, in] bf16, packed [out / 32, in / 32, 16, 2, 16, 2] bf16 -> [num_tokens, out] bf16. 32 must divide
in and out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import carray, types
from torch import Tensor

from .bf16 import (
    CONFIG_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    emit_dot_pairs,
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
from .simd import (
    BFLOAT16,
    F32,
    FLOAT32,
    I64,
    add,
    emit_constant,
    emit_load,
    emit_loop,
    emit_splat,
    fetch_add,
    load,
    pointer,
    simd_intrinsic,
    vector_type,
    zeros,
)

PANEL = 32  # outputs of an item, and inputs of a step
GROUP_TOKENS = 2 * TILE_ROWS  # tokens of an item
SCRATCH_FLOATS = 4 * TILE_BYTES // 4  # per thread

MATMUL_JOB, PACK_MATMUL_JOB = define_job("x weight bias out scratch configs num_tokens num_inputs num_outputs")
"""Addresses of contiguous arrays and sizes. bias may be 0.

scratch: SCRATCH_FLOATS for each thread. configs: `tile_configs(T)`, for AMX only.
"""


def pack_weight(weight: Tensor, keep: Callable[[Tensor], Tensor] = Tensor.contiguous) -> Tensor:
    """Return the weight in the order in which the kernel reads it.

    Shapes: weight [out, in] -> [out / 32, in / 32, 16, 2, 16, 2]. `keep` makes the contiguous copy in memory of the
    caller's choice; an address that is a multiple of 64 is fastest.
    """
    num_outputs, num_inputs = weight.shape
    parts = weight.view(num_outputs // PANEL, 2, 16, num_inputs // PANEL, 16, 2)
    return keep(parts.permute(0, 3, 4, 1, 2, 5))


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
        tile_load(6, weight, 128)
        tile_load(7, weight + 64, 128)
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
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        sums, stride, steps = job.scratch + thread * SCRATCH_FLOATS * 4, 2 * job.num_inputs, job.num_inputs // PANEL
        while item < num_panels * num_groups:
            panel, group = divmod(item, num_groups)
            token, end = group * GROUP_TOKENS, min((group + 1) * GROUP_TOKENS, job.num_tokens)
            weight = job.weight + panel * PANEL * stride
            while token < end:
                count, x = end - token, job.x + token * stride
                if count >= 8:
                    count = 8
                    dot_block(native, 8, x, stride, weight, steps, sums)
                elif count >= 4:
                    count = 4
                    dot_block(native, 4, x, stride, weight, steps, sums)
                elif count >= 2:
                    count = 2
                    dot_block(native, 2, x, stride, weight, steps, sums)
                else:
                    dot_block(native, 1, x, stride, weight, steps, sums)
                _write_block(native, job, token, count, panel, sums)
                token += count
            item = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@helper
def _write_block(native: bool, job: Any, token: int, count: int, panel: int, sums: int) -> None:
    """Write the outputs of `count` tokens for one panel from their sums [count, 32] float32."""
    source, zero = pointer(FLOAT32, sums), zeros(16)
    for row in range(count):
        for half in range(0, PANEL, 16):
            value = load(zero, source, row * PANEL + half)
            _write_outputs(native, job, token + row, panel * PANEL + half, value)


@simd_intrinsic
def dot_block(typing: Any, native: Any, count: Any, x: Any, stride: Any, weight: Any, num_steps: Any, sums: Any) -> Any:
    """Multiply `count` (a literal) tokens with a panel; write the sums [count, 32] float32.

    `x`, `weight`, `sums`: addresses; `stride`: bytes from one token to the next. There is at least one step of 32
    inputs. `native`: as in `dot_pairs`.
    """
    num, wide = count.literal_value, vector_type(16)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x, stride, weight, num_steps, sums = args

        def multiply_step(step: Any, totals: list[Any]) -> list[Any]:
            panel = builder.add(weight, builder.mul(step, ir.Constant(I64, 2 * PANEL * PANEL)))
            inputs = [builder.add(row, builder.mul(step, ir.Constant(I64, 2 * PANEL))) for row in rows]
            for pair in range(PANEL // 2):
                weights = [emit_load(builder, wide, panel, 128 * pair + 64 * half) for half in range(2)]
                for row in range(num):
                    numbers = emit_splat(builder, emit_load(builder, F32, inputs[row], 4 * pair), 16)
                    for place in (2 * row, 2 * row + 1):
                        operands = totals[place], weights[place % 2], numbers
                        totals[place] = emit_dot_pairs(builder, native.literal_value, *operands)
            return totals

        rows = [builder.add(x, builder.mul(stride, ir.Constant(I64, row))) for row in range(num)]
        starts = [emit_constant(16, 0.0)] * (2 * num)
        for place, total in enumerate(emit_loop(builder, num_steps, starts, multiply_step)):
            target = builder.add(sums, ir.Constant(I64, 64 * place))
            builder.store(total, builder.inttoptr(target, wide.as_pointer()), align=4)
        return context.get_dummy_value()

    numbers = (types.int64,) * 5
    return types.void(native, count, *numbers), generate
