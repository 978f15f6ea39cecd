"""Linear layers with int8 weights and int16 activations, for CPUs with AVX512-VNNI or AVX2.

Half the weight bytes of bf16 are read. A thread widens weights to int16 in registers, and one instruction multiplies 32
of them with inputs (AVX2: two instructions for 16). Activations are quantised for each token in groups of 512 inputs,
as many as sums of 32 bits can hold, each with its own scale. The error is below 2 ** -16 of the group's largest input,
which bf16 rounds by 2 ** -9. (int8 activations would need half the instructions, but add an error as large as that of
the weights.) Sums of a group are exact integers, and groups are added in order, so a token's result does not depend on
other tokens. With AVX2, one core multiplies 1.4 to 3.0 times as fast as with bf16 weights, at 1 to 128 tokens.

A weight is packed in the order in which it is read: panels of 32 outputs; in a panel 2 inputs at a time. Reading in
strictly ascending order keeps the hardware prefetcher at 0.9 of the read bandwidth (Zen 4, one thread, one token); with
two streams 512 bytes apart it was 0.5, and software prefetches made it slower.

Shapes: x [num_tokens, in] bf16, quantised [num_tokens, row_bytes(in)] uint8, codes [out / 32, in / 32, 16, 64] int8,
scales, bias [out] float32 -> [num_tokens, out] bf16. A quantised row is `in` int16 numbers, then the scale (float32) of
each group. 32 divides in and out.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual (VPDPWSSD, VPMADDWD).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from llvmlite import binding, ir
from numba import carray, types
from torch import Tensor

from .bf16 import has_avx512_bf16, store_bf16
from .launch import Launch, choose_num_threads, compile_kernel, define_job, helper
from .simd import (
    BFLOAT16,
    F32,
    FLOAT32,
    I8,
    I16,
    I32,
    I64,
    emit_call,
    emit_constant,
    emit_load,
    emit_loop,
    emit_splat,
    fetch_add,
    fma,
    load,
    mul,
    pointer,
    simd_intrinsic,
    split_panel,
    vector_type,
    zeros,
)

PANEL = 32  # outputs of a panel, and inputs of a step
GROUP_STEPS = 16  # steps whose inputs share a scale
MAX_NUMBER = 32767  # largest magnitude of a quantised activation
MAX_BLOCK = 8  # tokens whose sums fit the registers
BLOCKS_PER_ITEM = 32  # of MAX_BLOCK tokens: their inputs stay in a core's cache while panels are read
MIN_ITEMS_PER_THREAD = 4  # so that no thread is idle for long at the end
SUMS_BYTES = 4 * PANEL * MAX_BLOCK  # scratch of a thread

MULTIPLY_JOB, PACK_MULTIPLY_JOB = define_job(
    "x weight scales bias out scratch num_tokens num_inputs num_outputs blocks_per_item"
)
"""Addresses of contiguous arrays and sizes; bias may be 0.

scratch: SUMS_BYTES for each thread. An item is a panel for `blocks_per_item` blocks of MAX_BLOCK tokens.
"""

QUANTISE_JOB, PACK_QUANTISE_JOB = define_job("x out num_tokens num_inputs tokens_per_item")


@cache
def has_avx512_vnni() -> bool:
    """Return whether the CPU adds the products of 32 pairs of 16-bit numbers in one instruction."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512vnni") and features.get("avx512bw"))


def has_int16_products() -> bool:
    """Return whether the kernels of this module run on this CPU."""
    return has_avx512_vnni() or bool(binding.get_host_cpu_features().get("avx2"))


def pack_numbers(numbers: Tensor) -> Tensor:
    """Pack int8 numbers in the order in which the kernel reads them; 32 must divide both sizes."""
    rows, columns = numbers.shape
    parts = numbers.view(rows // PANEL, PANEL, columns // PANEL, 16, 2)
    return parts.permute(0, 2, 3, 1, 4).reshape(rows // PANEL, columns // PANEL, 16, 2 * PANEL)


def row_bytes(num_inputs: int) -> int:
    """Return the bytes of a quantised row."""
    return 2 * num_inputs + 4 * (-(-num_inputs // (PANEL * GROUP_STEPS)))


def quantise_tokens(x: Tensor) -> Tensor:
    """Quantise activations. Shapes: [num_tokens, in] bf16 -> [num_tokens, row_bytes(in)] uint8."""
    out = torch.empty(len(x), row_bytes(x.shape[1]), dtype=torch.uint8)
    job = PACK_QUANTISE_JOB.pack(0, 0, x.data_ptr(), out.data_ptr(), len(x), x.shape[1], max(1, min(16, len(x) // 16)))
    quantise_kernel()(job, choose_num_threads(x.numel()))
    return out


def multiply(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer with int8 weights; x is contiguous."""
    num_outputs, threads = codes.shape[0] * PANEL, torch.get_num_threads()
    quantised = quantise_tokens(x)
    out, scratch = torch.empty(len(x), num_outputs, dtype=x.dtype), torch.empty(threads * SUMS_BYTES, dtype=torch.uint8)
    job = PACK_MULTIPLY_JOB.pack(
        0, 0, quantised.data_ptr(), codes.data_ptr(), scales.data_ptr(), bias.data_ptr() if bias is not None else 0,
        out.data_ptr(), scratch.data_ptr(), len(x), x.shape[1], num_outputs,
        choose_blocks_per_item(len(x), codes.shape[0], threads),
    )  # fmt: skip
    multiply_kernel()(job, threads)
    return out


def choose_blocks_per_item(num_tokens: int, num_panels: int, num_threads: int) -> int:
    """Return the blocks of tokens of an item: many, but so few that there are items for all threads."""
    blocks = -(-num_tokens // MAX_BLOCK)
    num_parts = -(-MIN_ITEMS_PER_THREAD * num_threads // max(1, num_panels))
    return max(1, min(BLOCKS_PER_ITEM, blocks // num_parts))


@cache
def quantise_kernel() -> Launch:
    """Return the launcher of the kernel that quantises activations. Its argument record is a QUANTISE_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, QUANTISE_JOB)[0]
        token = fetch_add(address, 0, job.tokens_per_item)
        while token < job.num_tokens:
            quantise_row(job.x, token, job.num_inputs, job.out)
            token += 1
            if token % job.tokens_per_item == 0:
                token = fetch_add(address, 0, job.tokens_per_item)

    return compile_kernel(kernel)


@helper
def quantise_row(x: int, row: int, width: int, out: int) -> None:
    """Quantise one row of bf16 numbers of the matrix at address `x` to that of the quantised rows at `out`."""
    num_steps = width // PANEL
    num_groups = (num_steps + GROUP_STEPS - 1) // GROUP_STEPS
    source, target = x + 2 * row * width, out + row * (2 * width + 4 * num_groups)
    for group in range(num_groups):
        step = group * GROUP_STEPS
        steps, done = min(GROUP_STEPS, num_steps - step), 2 * PANEL * step
        quantise_group(source + done, steps, target + done, target + 2 * width + 4 * group)


@simd_intrinsic
def quantise_group(typing: Any, x: Any, num_steps: Any, numbers: Any, scale: Any) -> Any:
    """Quantise 32 * `num_steps` bf16 inputs at address `x` to int16 at `numbers`; write their scale at `scale`.

    The scale is the largest magnitude / MAX_NUMBER, NaN if an input is not finite.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, num_steps, numbers, scale = args
        wide, bits, words = vector_type(16), vector_type(16, I32), vector_type(32, I16)

        def read(step: Any) -> Any:
            return emit_load(builder, words, builder.add(x, builder.mul(step, ir.Constant(I64, 2 * PANEL))))

        def compare(step: Any, largest: list[Any]) -> list[Any]:
            magnitudes = builder.and_(read(step), emit_constant(32, 0x7FFF, I16))
            return [emit_call(builder, "llvm.umax.v32i16", words, magnitudes, *largest)]

        def write(step: Any, _: list[Any]) -> list[Any]:
            source = read(step)
            for start in (0, 16):
                lanes = ir.Constant(bits, list(range(start, start + 16)))
                half = builder.zext(builder.shuffle_vector(source, source, lanes), bits)
                half = builder.bitcast(builder.shl(half, emit_constant(16, 16, I32)), wide)
                rounded = _emit_round(builder, builder.fmul(half, factors))
                narrow = builder.trunc(rounded, vector_type(16, I16))
                at = builder.add(numbers, builder.mul(step, ir.Constant(I64, 2 * PANEL)))
                at = builder.add(at, ir.Constant(I64, 2 * start))
                builder.store(narrow, builder.inttoptr(at, narrow.type.as_pointer()), align=1)
            return []

        # bf16 magnitudes are ordered as their bits; NaN is largest
        (magnitudes,) = emit_loop(builder, num_steps, [emit_constant(32, 0, I16)], compare)
        largest = emit_call(builder, "llvm.vector.reduce.umax.v32i16", I16, magnitudes)
        size = builder.bitcast(builder.shl(builder.zext(largest, I32), ir.Constant(I32, 16)), F32)
        value = builder.fmul(size, ir.Constant(F32, 1 / MAX_NUMBER))
        finite = builder.icmp_unsigned("<", largest, ir.Constant(I16, 0x7F80))
        value = builder.select(finite, value, ir.Constant(F32, float("nan")))
        builder.store(value, builder.inttoptr(scale, F32.as_pointer()), align=1)
        factors = emit_splat(builder, builder.fdiv(ir.Constant(F32, float(MAX_NUMBER)), size), 16)
        emit_loop(builder, num_steps, [], write)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


def _emit_round(builder: Any, values: Any) -> Any:
    """Emit the conversion of 16 numbers to int32, to nearest even; the lower half of NaN and infinity is 0."""
    if has_avx512_vnni():
        rest = emit_constant(16, 0, I32), ir.Constant(I16, -1), ir.Constant(I32, 4)
        return emit_call(builder, "llvm.x86.avx512.mask.cvtps2dq.512", vector_type(16, I32), values, *rest)
    return _emit_in_halves(builder, "llvm.x86.avx.cvt.ps2dq.256", values)


def _emit_in_halves(builder: Any, name: str, *operands: Any) -> Any:
    """Emit an AVX2 instruction on each half of its operands; return both results, 8 x int32 each, as one register."""
    count = operands[0].type.count // 2
    halves = []
    for start in (0, count):
        lanes = ir.Constant(vector_type(count, I32), list(range(start, start + count)))
        parts = [builder.shuffle_vector(each, each, lanes) for each in operands]
        halves.append(emit_call(builder, name, vector_type(8, I32), *parts))
    return builder.shuffle_vector(*halves, ir.Constant(vector_type(16, I32), list(range(16))))


def multiply_kernel() -> Launch:
    """Return the launcher of the multiplication kernel. Its argument record is a MULTIPLY_JOB."""
    return _multiply_kernel(has_avx512_bf16())


@cache
def _multiply_kernel(native: bool) -> Launch:
    """Return the launcher of the multiplication kernel; `native`: round outputs by AVX512-BF16."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, MULTIPLY_JOB)[0]
        tokens_per_item = job.blocks_per_item * MAX_BLOCK
        num_panels, num_parts = job.num_outputs // PANEL, (job.num_tokens + tokens_per_item - 1) // tokens_per_item
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        sums = job.scratch + thread * SUMS_BYTES
        while item < num_panels * num_parts:
            part, panel = divmod(item, num_panels)
            token, end = part * tokens_per_item, min((part + 1) * tokens_per_item, job.num_tokens)
            multiply_rows(native, job, token, end, panel, sums)
            item = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@helper
def multiply_rows(native: bool, job: Any, token: int, end: int, panel: int, sums: int) -> None:
    """Multiply the quantised rows from `token` to `end` with a panel; `sums`: address of SUMS_BYTES bytes."""
    num_steps = job.num_inputs // PANEL
    stride = 2 * job.num_inputs + 4 * ((num_steps + GROUP_STEPS - 1) // GROUP_STEPS)
    weight = job.weight + panel * PANEL * job.num_inputs
    while token < end:
        count, x = end - token, job.x + token * stride
        if count >= 8:
            count = 8
            dot_block(8, x, stride, weight, num_steps, sums)
        elif count >= 4:
            count = 4
            dot_block(4, x, stride, weight, num_steps, sums)
        elif count >= 2:
            count = 2
            dot_block(2, x, stride, weight, num_steps, sums)
        else:
            dot_block(1, x, stride, weight, num_steps, sums)
        _write_outputs(native, job, token, count, panel * PANEL, sums)
        token += count


@helper
def _write_outputs(native: bool, job: Any, token: int, count: int, output: int, sums: int) -> None:
    """Scale the sums of `count` tokens for one panel, add the bias, and store the outputs."""
    zero = zeros(16)
    source, target, scales = pointer(FLOAT32, sums), pointer(BFLOAT16, job.out), pointer(FLOAT32, job.scales)
    for half in range(0, PANEL, 16):
        scale = load(zero, scales, output + half)
        for row in range(count):
            value = load(zero, source, row * PANEL + half)
            at = (token + row) * job.num_outputs + output + half
            if job.bias != 0:
                store_bf16(native, target, at, fma(value, scale, load(zero, pointer(FLOAT32, job.bias), output + half)))
            else:
                store_bf16(native, target, at, mul(value, scale))


@simd_intrinsic
def dot_block(typing: Any, count: Any, x: Any, stride: Any, weight: Any, num_steps: Any, sums: Any) -> Any:
    """Multiply `count` (a literal) quantised rows with a panel; write the sums [count, 32] float32.

    `x`, `weight`, `sums`: addresses; `stride`: bytes from one row to the next. There is at least one step of 32 inputs.
    """
    wide = vector_type(16)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, x, stride, weight, num_steps, sums = args

        def at(base: Any, index: Any, size: int) -> Any:
            return builder.add(base, builder.mul(index, ir.Constant(I64, size)))

        def multiply_part(part: range, halves: range) -> list[Any]:
            """Emit the products of these rows with these halves of the panel; return their sums."""
            rows = [at(x, stride, row) for row in part]
            scales = [at(row, num_steps, 2 * PANEL) for row in rows]

            def multiply_group(group: Any, totals: list[Any]) -> list[Any]:
                first = builder.mul(group, ir.Constant(I64, GROUP_STEPS))
                left, most = builder.sub(num_steps, first), ir.Constant(I64, GROUP_STEPS)
                count = builder.select(builder.icmp_signed("<", left, most), left, most)

                def multiply_step(number: Any, dots: list[Any]) -> list[Any]:
                    step = builder.add(first, number)
                    panel, inputs = at(weight, step, PANEL * PANEL), [at(row, step, 2 * PANEL) for row in rows]
                    for pair in range(PANEL // 2):
                        offsets = [64 * pair + 32 * half for half in halves]
                        codes = [emit_load(builder, vector_type(32, I8), panel, offset) for offset in offsets]
                        weights = [builder.sext(each, vector_type(32, I16)) for each in codes]
                        place = 0
                        for row in inputs:
                            numbers = emit_splat(builder, emit_load(builder, I32, row, 4 * pair), 16)
                            for each in weights:
                                dots[place] = _emit_dot(builder, dots[place], each, numbers)
                                place += 1
                    return dots

                dots = emit_loop(builder, count, [emit_constant(16, 0, I32)] * len(totals), multiply_step)
                factors = [emit_splat(builder, emit_load(builder, F32, at(row, group, 4)), 16) for row in scales]
                operands = zip(dots, [each for each in factors for _ in halves], totals, strict=True)
                return [
                    emit_call(builder, "llvm.fma.v16f32", wide, builder.sitofp(dot, wide), scale, total)
                    for dot, scale, total in operands
                ]

            more = builder.add(num_steps, ir.Constant(I64, GROUP_STEPS - 1))
            num_groups = builder.sdiv(more, ir.Constant(I64, GROUP_STEPS))
            starts = [emit_constant(16, 0.0)] * (len(rows) * len(halves))
            return emit_loop(builder, num_groups, starts, multiply_group)

        for part, halves in split_panel(count.literal_value):
            places = [2 * row + half for row in part for half in halves]
            for place, total in zip(places, multiply_part(part, halves), strict=True):
                target = at(sums, ir.Constant(I64, place), 64)
                builder.store(total, builder.inttoptr(target, wide.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(count, types.int64, types.int64, types.int64, types.int64, types.int64), generate


def _emit_dot(builder: Any, total: Any, weights: Any, numbers: Any) -> Any:
    """Emit total + even(weights) * even(numbers) + odd(weights) * odd(numbers) in 32 bits, lane by lane.

    Types: total, numbers 16 x int32, weights 32 x int16. AVX2 multiplies and adds half as many in two instructions.
    """
    if has_avx512_vnni():
        operands = total, builder.bitcast(weights, total.type), numbers
        return emit_call(builder, "llvm.x86.avx512.vpdpwssd.512", total.type, *operands)
    pairs = builder.bitcast(numbers, weights.type)
    return builder.add(total, _emit_in_halves(builder, "llvm.x86.avx2.pmadd.wd", weights, pairs))
