"""Linear layers with int8 weights and one scale per output.

Half the weight bytes of bf16 are read. Ways to multiply (`unit`), best first: AMX tiles; products of int16 numbers
(`int16`), which quantise activations too; pairs widened to float32 (the only one for float32 activations). In each, the
order of a token's sum does not depend on other tokens. The first and the last are in this module: weights are packed in
panels of 32 outputs, 32 inputs at a time. A thread widens a panel to bf16, which is exact, into a buffer that fits its
core's cache, and multiplies it with its tokens from there, so one packed form serves a few or hundreds of tokens.

A code is a sign bit and 7 bits of magnitude; two rows of a tile interleave, eight codes each, as `widen_codes` reads
them. Every magnitude up to 127 is a bf16 number. With AVX512-VBMI the two bytes of the result are two table look-ups by
the magnitude; otherwise the numbers are converted.

On one core with AMX and 14 GB/s of memory bandwidth, a weight of 576 x 3072 from memory took 161, 229 and 427
microseconds for 1, 32 and 64 tokens (bf16 panels: 278, 353 and 484); from the cache, 128, 512 and 2048 tokens ran at
0.95, 0.85 and 0.78 of oneDNN's bf16 speed. Unpacking the weight for torch was slower up to 1024 tokens.

Shapes: x [num_tokens, in] bf16 or float32, codes [out / 32, in / 32, 2, 512] uint8 (those of `int16` differ), scales,
bias [out] float32 -> [num_tokens, out].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from llvmlite import binding, ir
from numba import carray, types
from torch import Tensor
from torch.nn import functional

from . import int16
from .bf16 import (
    CONFIG_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    dot_pairs,
    has_amx,
    has_avx512_bf16,
    store_bf16,
    tile_clear,
    tile_configure,
    tile_dot,
    tile_load,
    tile_release,
    tile_store,
)
from .launch import Launch, compile_kernel, define_job, helper
from .matmul import GROUP_TOKENS, PANEL, tile_configs
from .simd import (
    BFLOAT16,
    F32,
    FLOAT32,
    I8,
    I16,
    I32,
    KINDS,
    emit_call,
    fetch_add,
    fma,
    load,
    mul,
    pointer,
    prefetch,
    simd_intrinsic,
    splat,
    store,
    zeros,
)

MAX_CODE = 127  # largest magnitude of a code


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a weight to int8 with one scale per output (symmetric, round to nearest).

    Shapes: weight [out, in] -> (numbers [out, in] int8, scales [out] float32). The scale is the row's largest magnitude
    / 127; NaN if the row is not finite.
    """
    numbers, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    rows = max(1, (1 << 20) // max(1, weight.shape[1]))
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows].float()
        largest = part.abs().amax(1) if part.numel() else part.new_zeros(len(part))
        scale = torch.where(largest > 0, largest / MAX_CODE, 1.0)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        numbers[start : start + rows] = (part / scale[:, None]).round_().nan_to_num_(0.0).to(torch.int8)
        scales[start : start + rows] = scale
    return numbers, scales


def choose_unit(dtype: torch.dtype) -> str:
    """Return the fastest way to multiply (tiles | int16 | floats) that this CPU has for activations of a dtype."""
    if dtype != torch.bfloat16:
        return "floats"
    return "tiles" if has_amx() else "int16" if int16.has_int16_products() else "floats"


def pack_numbers(numbers: Tensor, unit: str) -> Tensor:
    """Pack int8 numbers into codes in the order in which the kernel of a `unit` reads them.

    Zeros fill up whole panels. Shapes: numbers [out, in] int8 -> codes as in the module docstring.
    """
    rows, columns = (-(-size // PANEL) * PANEL for size in numbers.shape)
    if (rows, columns) != tuple(numbers.shape):
        numbers = functional.pad(numbers, (0, columns - numbers.shape[1], 0, rows - numbers.shape[0]))
    if unit == "int16":
        return int16.pack_numbers(numbers)
    codes = torch.where(numbers < 0, numbers.neg() | -128, numbers).view(torch.uint8)
    # out = (panel, tile, 4 runs of 4), in = (step, 8 row pairs, 2 rows, 2): a row is 16 outputs of 2 inputs
    parts = codes.view(rows // PANEL, 2, 4, 4, columns // PANEL, 8, 2, 2)
    return parts.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(rows // PANEL, columns // PANEL, 2, 512)


_CODES, _WORDS = ir.VectorType(I8, 64), ir.VectorType(I16, 64)
_RUNS = [[16 * run + 8 * row + i for run in range(4) for i in range(8)] for row in range(2)]  # the codes of a row


@cache
def has_avx512_vbmi() -> bool:
    """Return whether the CPU looks up 64 bytes at once in a table of 128 (AVX512-VBMI)."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512vbmi") and features.get("avx512bw"))


@simd_intrinsic
def widen_codes(typing: Any, tables: Any, source: Any, target: Any) -> Any:
    """Widen 64 int8 codes (two rows of a tile) to bf16; `source` and `target` are addresses.

    In each run of 16 codes the first eight belong to the first row. `tables` (a literal) selects AVX512-VBMI.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes = builder.load(builder.inttoptr(args[1], _CODES.as_pointer()), align=1, typ=_CODES)
        widened = _widen_by_table(builder, codes) if tables.literal_value else _widen_by_conversion(builder, codes)
        for number, row in enumerate(widened):
            at = builder.add(args[2], ir.Constant(args[2].type, 64 * number))
            builder.store(row, builder.inttoptr(at, row.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(tables, types.int64, types.int64), generate


def _widen_by_table(builder: Any, codes: Any) -> list[Any]:
    """Emit the widening of 64 codes by table look-ups; return the bf16 registers of both rows."""
    values = torch.arange(128).bfloat16().view(torch.int16)
    sign = builder.and_(codes, ir.Constant(_CODES, [0x80] * 64))
    low, high = (_lookup_128(builder, codes, ((values >> shift) & 0xFF).tolist()) for shift in (0, 8))
    high = builder.or_(high, sign)
    order = [[i for place in row for i in (place, 64 + place)] for row in _RUNS]
    return [
        builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 64), each)) for each in order
    ]  # interleaved within 16 bytes: one instruction each


def _lookup_128(builder: Any, codes: Any, values: list[int]) -> Any:
    """Emit a look-up of 64 byte codes in a table of 128 byte values."""
    first, second = ir.Constant(_CODES, values[:64]), ir.Constant(_CODES, values[64:])
    return emit_call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _CODES, first, codes, second)


def _widen_by_conversion(builder: Any, codes: Any) -> list[Any]:
    """Emit the widening of 64 codes by float conversion; return the bf16 registers of both rows."""
    wide = builder.zext(codes, ir.VectorType(I32, 64))
    magnitude = builder.and_(wide, ir.Constant(wide.type, [0x7F] * 64))
    bits = builder.bitcast(builder.sitofp(magnitude, ir.VectorType(F32, 64)), wide.type)
    sign = builder.shl(builder.and_(wide, ir.Constant(wide.type, [0x80] * 64)), ir.Constant(wide.type, [8] * 64))
    words = builder.trunc(builder.or_(builder.lshr(bits, ir.Constant(wide.type, [16] * 64)), sign), _WORDS)
    none = ir.Constant(_WORDS, ir.Undefined)
    return [builder.shuffle_vector(words, none, ir.Constant(ir.VectorType(I32, 32), row)) for row in _RUNS]


@simd_intrinsic
def low_half(typing: Any, a: Any) -> Any:
    """Return the bf16 number in the lower half of each lane, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = ir.VectorType(I32, a.lanes)
        moved = builder.shl(builder.bitcast(args[0], bits), ir.Constant(bits, [16] * a.lanes))
        return builder.bitcast(moved, args[0].type)

    return a(a), generate


@simd_intrinsic
def high_half(typing: Any, a: Any) -> Any:
    """Return the bf16 number in the upper half of each lane, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = ir.VectorType(I32, a.lanes)
        kept = builder.and_(builder.bitcast(args[0], bits), ir.Constant(bits, [0xFFFF0000] * a.lanes))
        return builder.bitcast(kept, args[0].type)

    return a(a), generate


SUMS_BYTES = 4 * TILE_BYTES
PREFETCH_BYTES = 2048  # prefetch distance
MIN_GROUPS, MAX_GROUPS = 8, 16  # groups of tokens that share widened panels
MAX_INPUT_BYTES = 1 << 20  # tokens that stay in a core's cache while panels are read
MAX_WIDENED_BYTES = 512 << 10  # widened panels
MIN_ITEMS_PER_THREAD = 4  # so that no thread is idle for long at the end

INT8_JOB, PACK_INT8_JOB = define_job(
    "x weight scales bias out scratch configs num_tokens num_inputs num_outputs groups_per_item panels_per_item"
    " scratch_bytes_per_thread"
)
"""Addresses of contiguous arrays and sizes; 32 divides num_inputs and num_outputs.

bias may be 0. scratch: `scratch_bytes_per_thread` bytes for each thread, at least `scratch_bytes(num_inputs)`. configs:
`tile_configs(T)`, for AMX only. An item is `panels_per_item` panels for `groups_per_item` groups of 32 tokens.
"""


def multiply(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, unit: str) -> Tensor:
    """Apply a linear layer with int8 weights packed for a `unit`: x @ (numbers * scales).T + bias.

    The number of outputs is len(scales). Shapes: see the module docstring.
    """
    num_outputs, padded = len(scales), codes.shape[0] * PANEL
    num_inputs = codes.shape[1] * PANEL
    if x.shape[1] != num_inputs:
        x = functional.pad(x, (0, num_inputs - x.shape[1]))
    if padded != num_outputs:
        scales = functional.pad(scales, (0, padded - num_outputs))
        bias = None if bias is None else functional.pad(bias, (0, padded - num_outputs))
    arguments = x.contiguous(), codes, scales, bias
    out = int16.multiply(*arguments) if unit == "int16" else _multiply_widened(*arguments, unit)
    return out if padded == num_outputs else out[:, :num_outputs].contiguous()


def _multiply_widened(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, unit: str) -> Tensor:
    """Apply a linear layer of whole panels, widening the weights."""
    num_inputs, padded = x.shape[1], codes.shape[0] * PANEL
    out = torch.empty(len(x), padded, dtype=x.dtype)
    threads, each = torch.get_num_threads(), scratch_bytes(num_inputs)
    scratch, configs = torch.empty(threads * each, dtype=torch.uint8), tile_configs(len(x))
    job = PACK_INT8_JOB.pack(
        0, 0, x.data_ptr(), codes.data_ptr(), scales.data_ptr(), bias.data_ptr() if bias is not None else 0,
        out.data_ptr(), scratch.data_ptr(), configs.data_ptr(), len(x), num_inputs, padded,
        *choose_blocking(len(x), num_inputs, codes.shape[0], threads), each,
    )  # fmt: skip
    widening_kernel(x.dtype, unit)(job, threads)
    return out


def scratch_bytes(num_inputs: int) -> int:
    """Return the scratch bytes that a thread needs: widened panels and sums."""
    return max(MAX_WIDENED_BYTES, 2 * PANEL * num_inputs) + SUMS_BYTES


def choose_blocking(num_tokens: int, num_inputs: int, num_panels: int, num_threads: int) -> tuple[int, int]:
    """Choose the size of a work item: return (groups_per_item, panels_per_item).

    A group is 32 tokens, a panel 32 outputs. More groups widen codes less often; more panels write longer runs of each
    token's outputs; there must be enough items for all threads.
    """
    num_groups, min_items = -(-num_tokens // GROUP_TOKENS), MIN_ITEMS_PER_THREAD * num_threads
    most = max(MIN_GROUPS, min(MAX_GROUPS, MAX_INPUT_BYTES // (2 * GROUP_TOKENS * num_inputs)))
    groups = max(1, min(most, num_groups // max(1, min_items // num_panels)))
    if groups == 1:
        return 1, 1
    blocks = -(-num_groups // groups)
    fit = MAX_WIDENED_BYTES // (2 * PANEL * num_inputs)
    return groups, max(1, min(fit, num_panels * blocks // min_items))


def widening_kernel(dtype: torch.dtype, unit: str) -> Launch:
    """Return the launcher of the kernel that widens weights, for activations of a dtype and a `unit`.

    Its argument record is an INT8_JOB.
    """
    if unit == "tiles":
        return _tile_kernel(has_avx512_vbmi(), has_avx512_bf16())
    return _row_kernel(has_avx512_vbmi(), KINDS[dtype])


@helper
def _widen_block(tables: bool, source: int, num_codes: int, target: int) -> None:
    """Widen `num_codes` int8 codes to bf16, and prefetch the codes PREFETCH_BYTES later."""
    for block in range(num_codes // 64):
        prefetch(pointer(BFLOAT16, source), 32 * block + PREFETCH_BYTES // 2)
        widen_codes(tables, source + 64 * block, target + 128 * block)


@cache
def _tile_kernel(tables: bool, native: bool) -> Launch:
    """Return the launcher of the int8 multiplication kernel that uses AMX tiles.

    `tables`: use AVX512-VBMI; `native`: use AVX512-BF16.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, INT8_JOB)[0]
        num_groups, num_panels = (job.num_tokens + GROUP_TOKENS - 1) // GROUP_TOKENS, job.num_outputs // PANEL
        num_blocks = (num_groups + job.groups_per_item - 1) // job.groups_per_item
        num_strips = (num_panels + job.panels_per_item - 1) // job.panels_per_item
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        panel_bytes = 2 * PANEL * job.num_inputs
        sums = job.scratch + thread * job.scratch_bytes_per_thread
        configured = -1
        while item < num_strips * num_blocks:
            block, strip = divmod(item, num_strips)
            first, end = block * job.groups_per_item, min(num_groups, (block + 1) * job.groups_per_item)
            for group in range(first, end):
                last = 1 if group == num_groups - 1 else 0
                if last != configured:
                    tile_configure(job.configs + last * CONFIG_BYTES)
                    configured = last
                weight = sums + SUMS_BYTES
                for panel in range(strip * job.panels_per_item, min(num_panels, (strip + 1) * job.panels_per_item)):
                    if group == first:
                        keep = 1 if end - first > 1 else 0
                        _multiply_first_group(native, tables, job, group * GROUP_TOKENS, panel, weight, sums, keep)
                    else:
                        _multiply_next_group(native, job, group * GROUP_TOKENS, panel, weight, sums)
                    weight += panel_bytes
            item = fetch_add(address, 0, 1)
        if configured >= 0:
            tile_release()

    return compile_kernel(kernel)


@helper
def _multiply_first_group(
    native: bool, tables: bool, job: Any, token: int, panel: int, weight: int, sums: int, keep: int
) -> None:
    """Multiply a group of up to 32 tokens with a panel, widening the panel's codes on the way.

    `keep` (0 or 1): keep the whole widened panel at `weight` for the next groups.
    """
    stride = 2 * job.num_inputs
    x, codes = job.x + token * stride, job.weight + panel * PANEL * job.num_inputs
    more, num_steps = job.num_tokens - token > TILE_ROWS, job.num_inputs // PANEL
    _clear_sums()
    at = weight
    for step in range(num_steps):
        _widen_block(tables, codes + TILE_BYTES * step, TILE_BYTES, at)
        _multiply_step(x + 64 * step, stride, at, more)
        at += keep * 2 * TILE_BYTES
    _write_sums(native, job, token, panel, sums, more)


@helper
def _multiply_next_group(native: bool, job: Any, token: int, panel: int, weight: int, sums: int) -> None:
    """Multiply a group of up to 32 tokens with the widened panel at `weight`."""
    stride = 2 * job.num_inputs
    x = job.x + token * stride
    more, num_steps = job.num_tokens - token > TILE_ROWS, job.num_inputs // PANEL
    _clear_sums()
    for step in range(num_steps):
        _multiply_step(x + 64 * step, stride, weight + 2 * TILE_BYTES * step, more)
    _write_sums(native, job, token, panel, sums, more)


@helper
def _clear_sums() -> None:
    """Set the AMX tiles 0-3, which hold the sums, to zeros."""
    tile_clear(0)
    tile_clear(1)
    tile_clear(2)
    tile_clear(3)


@helper
def _multiply_step(x: int, stride: int, weight: int, more: bool) -> None:
    """Add the products of 32 inputs to the sums. Tiles 0-3: sums; 4-5: tokens; 6-7: weights.

    `x`, `weight`: addresses. `stride`: bytes from one token to the next. `more`: there are more than 16 tokens.
    """
    tile_load(4, x, stride)
    tile_load(6, weight, 64)
    tile_load(7, weight + TILE_BYTES, 64)
    tile_dot(0, 4, 6)
    tile_dot(1, 4, 7)
    if more:
        tile_load(5, x + TILE_ROWS * stride, stride)
        tile_dot(2, 5, 6)
        tile_dot(3, 5, 7)


@helper
def _write_sums(native: bool, job: Any, token: int, panel: int, sums: int, more: bool) -> None:
    """Scale the sums of a group of tokens for one panel, add the bias, and store the outputs."""
    tile_store(0, sums, 128)
    tile_store(1, sums + 64, 128)
    if more:
        tile_store(2, sums + 2 * TILE_BYTES, 128)
        tile_store(3, sums + 2 * TILE_BYTES + 64, 128)
    source, target, width = pointer(FLOAT32, sums), pointer(BFLOAT16, job.out), job.num_outputs
    zero = zeros(16)
    scales = pointer(FLOAT32, job.scales)
    scale_0, scale_1 = load(zero, scales, panel * PANEL), load(zero, scales, panel * PANEL + 16)
    bias_0, bias_1 = zero, zero
    if job.bias != 0:
        bias = pointer(FLOAT32, job.bias)
        bias_0, bias_1 = load(zero, bias, panel * PANEL), load(zero, bias, panel * PANEL + 16)
    at = token * width + panel * PANEL
    for row in range(min(GROUP_TOKENS, job.num_tokens - token)):
        store_bf16(native, target, at, fma(load(zero, source, row * PANEL), scale_0, bias_0))
        store_bf16(native, target, at + 16, fma(load(zero, source, row * PANEL + 16), scale_1, bias_1))
        at += width


@helper
def _write_outputs(kind: int, job: Any, token: int, output: int, value: Any) -> None:
    """Scale 16 sums of a token, add the bias, and store them as outputs."""
    scale = load(value, pointer(FLOAT32, job.scales), output)
    if job.bias != 0:
        value = fma(value, scale, load(value, pointer(FLOAT32, job.bias), output))
    else:
        value = mul(value, scale)
    at = token * job.num_outputs + output
    if kind == BFLOAT16:
        store_bf16(False, pointer(BFLOAT16, job.out), at, value)
    else:
        store(pointer(FLOAT32, job.out), at, value)


@cache
def _row_kernel(tables: bool, kind: int) -> Launch:
    """Return the launcher of the int8 multiplication kernel that computes in float32.

    Each thread takes a panel of outputs, widens its weights to bf16 and multiplies them with up to 4 tokens at a time.
    `tables`: widen by table look-up; `kind`: element type of activations and outputs.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, INT8_JOB)[0]
        num_groups, num_panels = (job.num_tokens + GROUP_TOKENS - 1) // GROUP_TOKENS, job.num_outputs // PANEL
        num_blocks = (num_groups + job.groups_per_item - 1) // job.groups_per_item
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        weight = job.scratch + thread * job.scratch_bytes_per_thread
        while item < num_panels * num_blocks:
            block, panel = divmod(item, num_panels)
            token = block * job.groups_per_item * GROUP_TOKENS
            end = min(job.num_tokens, token + job.groups_per_item * GROUP_TOKENS)
            multiply_rows(tables, kind, job, token, end, panel, weight)
            item = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@helper
def multiply_rows(tables: bool, kind: int, job: Any, token: int, end: int, panel: int, weight: int) -> None:
    """Multiply the tokens from `token` to `end` with a panel, in float32.

    `weight`: address of 2 * PANEL * num_inputs bytes, to which the panel is widened.
    """
    _widen_block(tables, job.weight + panel * PANEL * job.num_inputs, PANEL * job.num_inputs, weight)
    while token + 4 <= end:
        _multiply_4_tokens(kind, job, token, panel, weight)
        token += 4
    while token < end:
        _multiply_1_token(kind, job, token, panel, weight)
        token += 1


@helper
def _add_pair(kind: int, total: Any, weights: Any, x: int, pair: int) -> Any:
    """Add to the sums `total` of 16 outputs the products of their weights with a pair of inputs.

    `x`: address of the token's inputs; `pair`: index of the pair.
    """
    if kind == BFLOAT16:
        return dot_pairs(False, total, weights, splat(total, pointer(FLOAT32, x)[pair]))
    inputs = pointer(FLOAT32, x)
    total = fma(low_half(weights), splat(total, inputs[2 * pair]), total)
    return fma(high_half(weights), splat(total, inputs[2 * pair + 1]), total)


@helper
def _multiply_1_token(kind: int, job: Any, token: int, panel: int, weight: int) -> None:
    """Compute the 32 outputs of a panel for one token; `weight`: address of the widened panel."""
    x = job.x + token * job.num_inputs * (2 if kind == BFLOAT16 else 4)
    weights, zero = pointer(FLOAT32, weight), zeros(16)
    a, b = zero, zero
    for step in range(job.num_inputs // PANEL):
        for row in range(16):
            at, pair = step * 2 * 256 + row * 16, step * 16 + row
            a = _add_pair(kind, a, load(zero, weights, at), x, pair)
            b = _add_pair(kind, b, load(zero, weights, at + 256), x, pair)
    _write_outputs(kind, job, token, panel * PANEL, a)
    _write_outputs(kind, job, token, panel * PANEL + 16, b)


@helper
def _multiply_4_tokens(kind: int, job: Any, token: int, panel: int, weight: int) -> None:
    """Compute the 32 outputs of a panel for four tokens; `weight`: address of the widened panel."""
    width = job.num_inputs * (2 if kind == BFLOAT16 else 4)
    x0 = job.x + token * width
    x1, x2, x3 = x0 + width, x0 + 2 * width, x0 + 3 * width
    weights, zero = pointer(FLOAT32, weight), zeros(16)
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    for step in range(job.num_inputs // PANEL):
        for row in range(16):
            at, pair = step * 2 * 256 + row * 16, step * 16 + row
            even, odd = load(zero, weights, at), load(zero, weights, at + 256)
            a0, b0 = _add_pair(kind, a0, even, x0, pair), _add_pair(kind, b0, odd, x0, pair)
            a1, b1 = _add_pair(kind, a1, even, x1, pair), _add_pair(kind, b1, odd, x1, pair)
            a2, b2 = _add_pair(kind, a2, even, x2, pair), _add_pair(kind, b2, odd, x2, pair)
            a3, b3 = _add_pair(kind, a3, even, x3, pair), _add_pair(kind, b3, odd, x3, pair)
    for half in range(2):
        output = panel * PANEL + 16 * half
        _write_outputs(kind, job, token, output, a0 if half == 0 else b0)
        _write_outputs(kind, job, token + 1, output, a1 if half == 0 else b1)
        _write_outputs(kind, job, token + 2, output, a2 if half == 0 else b2)
        _write_outputs(kind, job, token + 3, output, a3 if half == 0 else b3)
