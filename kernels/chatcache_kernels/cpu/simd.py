"""SIMD registers for numba kernels: intrinsics that emit LLVM vector instructions.

numba leaves vectorisation to LLVM, which gives up on loops with bf16, exp or several accumulators. A value of type
`Vector(lanes)` is one register of float32 (LLVM splits it on a CPU with narrower registers). Memory is addressed by
typed pointers, which `pointer` makes from an address and an element kind.

An intrinsic is a typing function that returns a signature and a code generator; its first argument is numba's typing
context and is not passed by the caller. The `emit_*` functions are used inside code generators.

Source of exp2: range reduction to [-0.5, 0.5] and the Taylor polynomial of degree 7 (relative error under 1e-7).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic, models, register_model

from .launch import helper

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

# Float32 in a register of this CPU; LLVM keeps a longer vector in several.
REGISTER_LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8


def simd_intrinsic(function: Callable[..., Any]) -> Any:
    """Register a typing function that returns (signature, code generator) as an intrinsic."""
    return intrinsic(prefer_literal=True)(function)


def vector_type(lanes: int, element: ir.Type = F32) -> ir.VectorType:
    """Return the LLVM type of a register."""
    return ir.VectorType(element, lanes)


def emit_constant(lanes: int, value: float, element: ir.Type = F32) -> ir.Constant:
    """Return a register constant with `value` in every lane."""
    return ir.Constant(vector_type(lanes, element), [value] * lanes)


def emit_call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Emit a call of an LLVM intrinsic, by its full name."""
    function_type = ir.FunctionType(result, [a.type for a in args])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, function_type, name), args)


def emit_splat(builder: Any, value: Any, lanes: int) -> Any:
    """Emit a register with a scalar in every lane."""
    none = ir.Constant(vector_type(lanes, value.type), ir.Undefined)
    one = builder.insert_element(none, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, none, emit_constant(lanes, 0, I32))


def emit_pointer(builder: Any, pointer: Any, index: Any, element: ir.Type) -> Any:
    """Emit the address of element `index`."""
    base = builder.bitcast(pointer, element.as_pointer())
    return builder.gep(base, [index], source_etype=element)


def emit_load(builder: Any, kind: ir.Type, address: Any, offset: int = 0) -> Any:
    """Emit an unaligned load from an integer address plus `offset` bytes."""
    place = builder.inttoptr(builder.add(address, ir.Constant(I64, offset)), kind.as_pointer())
    return builder.load(place, align=1, typ=kind)


def emit_prefetch(builder: Any, address: Any, offset: int, level: int) -> None:
    """Emit a request for the cache line at an integer address plus `offset` bytes, into the cache of a level (1-3).

    The address need not be valid.
    """
    place = builder.inttoptr(builder.add(address, ir.Constant(I64, offset)), I8.as_pointer())
    read, locality, is_data = (ir.Constant(I32, number) for number in (0, 4 - level, 1))
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), place, read, locality, is_data)


# Into which cache. Zen 4, whose first one is small, reads keys and values of 32 rows 1.4 times as fast from the second.
PREFETCH_LEVEL = 2 if binding.get_host_cpu_name() == "znver4" else 1


def emit_element_prefetch(builder: Any, source: Any, index: Any, element: Any) -> None:
    """Emit a request for the cache line of an element, whose numba type is `element`."""
    at = emit_pointer(builder, source, index, ir.IntType(element.bitwidth))
    emit_prefetch(builder, builder.ptrtoint(at, I64), 0, PREFETCH_LEVEL)


def emit_loop(builder: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emit a loop of at least one round; return the values that its last round leaves.

    `carried`: values before the first round; body(round, values) emits a round and returns the values after it.
    """
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, values = builder.phi(I64), [builder.phi(each.type) for each in carried]
    following = body(index, list(values))
    end = builder.add(index, ir.Constant(I64, 1))
    starts = [ir.Constant(I64, 0), *carried]
    for phi, start, value in zip([index, *values], starts, [end, *following], strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", end, count), loop, after)
    builder.position_at_end(after)
    return following


def split_panel(count: int, num_rows: int = 4) -> list[tuple[range, range]]:
    """Return the rows and the halves of a panel of 32 outputs that a loop multiplies: as many as fit the registers.

    AVX2 has half as many registers as AVX-512, of half the size; the sums of `num_rows` rows fit them. A panel stays in
    the cache from loop to loop.
    """
    if count <= 2 or REGISTER_LANES == 16:
        return [(range(count), range(2))]
    starts = range(0, count, num_rows)
    return [(range(row, min(row + num_rows, count)), range(half, half + 1)) for row in starts for half in range(2)]


# Rows, and registers of outputs, whose sums `dot_floats` keeps in registers.
FLOAT_ROWS, FLOAT_HALVES = (8, 2) if REGISTER_LANES == 16 else (4, 1)

LOG2E = 1.4426950408889634
FLOAT32, BFLOAT16, FLOAT16, INT32, INT64 = range(5)  # element kinds in memory

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
_ELEMENTS = (types.float32, types.uint16, types.int16, types.int32, types.int64)  # the numba type of each kind


class Vector(types.Type):  # type: ignore[misc]
    """The numba type of a register of `lanes` float32."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"Vector({lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(F32, vector.lanes))


@simd_intrinsic
def pointer(typing: Any, kind: Any, address: Any) -> Any:
    """Return a typed pointer to elements of a literal kind at an integer address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[1], context.get_value_type(signature.return_type))

    return types.CPointer(_ELEMENTS[kind.literal_value])(kind, types.int64), generate


@simd_intrinsic
def zeros(typing: Any, lanes: Any) -> Any:
    """Return a register of zeros; `lanes` is a literal."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_constant(lanes.literal_value, 0.0)

    return Vector(lanes.literal_value)(lanes), generate


@simd_intrinsic
def num_lanes(typing: Any, like: Any) -> Any:
    """Return the number of lanes of a register, a compile-time constant."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(I64, like.lanes)

    return types.int64(like), generate


@simd_intrinsic
def splat(typing: Any, like: Any, value: Any) -> Any:
    """Return a register with `value` in every lane, as wide as `like`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_splat(builder, args[1], like.lanes)

    return like(like, types.float32), generate


def emit_widened(builder: Any, source: Any, index: Any, lanes: int, element: Any) -> Any:
    """Emit a load of elements, given as a numba type, widened to float32."""
    if element == types.float32:
        at = emit_pointer(builder, source, index, F32)
        return builder.load(builder.bitcast(at, vector_type(lanes).as_pointer()), align=4, typ=vector_type(lanes))
    at = emit_pointer(builder, source, index, ir.IntType(16))
    if element == types.uint16:  # bfloat16 is the upper half of a float32
        narrow = vector_type(lanes, ir.IntType(16))
        bits = builder.load(builder.bitcast(at, narrow.as_pointer()), align=2, typ=narrow)
        shifted = builder.shl(builder.zext(bits, vector_type(lanes, I32)), emit_constant(lanes, 16, I32))
        return builder.bitcast(shifted, vector_type(lanes))
    halves = vector_type(lanes, ir.HalfType())
    return builder.fpext(
        builder.load(builder.bitcast(at, halves.as_pointer()), align=2, typ=halves), vector_type(lanes)
    )


def emit_narrowed(builder: Any, target: Any, index: Any, value: Any, element: Any) -> None:
    """Emit a store of float32 lanes as elements, given as a numba type, rounded to nearest even."""
    narrow = _convert(builder, value, value.type.count, element)
    at = emit_pointer(builder, target, index, narrow.type.element)
    builder.store(narrow, builder.bitcast(at, narrow.type.as_pointer()), align=element.bitwidth // 8)


@simd_intrinsic
def load(typing: Any, like: Any, source: Any, index: Any) -> Any:
    """Load elements index .. index + lanes - 1, widened to float32; `like` gives the width."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_widened(builder, args[1], args[2], like.lanes, source.dtype)

    return like(like, source, types.int64), generate


@simd_intrinsic
def store(typing: Any, target: Any, index: Any, value: Any) -> Any:
    """Store the lanes to elements index .. index + lanes - 1, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_narrowed(builder, args[0], args[1], args[2], target.dtype)
        return context.get_dummy_value()

    return types.void(target, types.int64, value), generate


@simd_intrinsic
def scatter(typing: Any, target: Any, index: Any, stride: Any, value: Any) -> Any:
    """Store the lanes, rounded, to elements index, index + stride, index + 2 * stride, ..."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = _convert(builder, args[3], value.lanes, target.dtype)
        at = args[1]
        for lane in range(value.lanes):
            element = builder.extract_element(narrow, ir.Constant(I32, lane))
            builder.store(element, emit_pointer(builder, args[0], at, element.type))
            at = builder.add(at, args[2])
        return context.get_dummy_value()

    return types.void(target, types.int64, types.int64, value), generate


@simd_intrinsic
def scatter_pairs(typing: Any, target: Any, index: Any, stride: Any, value: Any) -> Any:
    """Store the lanes as bf16, two in each of the 32-bit elements index, index + stride, index + 2 * stride, ..."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        narrow = round_bfloat16(builder, args[3], value.lanes)
        words, at = builder.bitcast(narrow, vector_type(value.lanes // 2, I32)), args[1]
        for lane in range(value.lanes // 2):
            builder.store(
                builder.extract_element(words, ir.Constant(I32, lane)), emit_pointer(builder, args[0], at, I32)
            )
            at = builder.add(at, args[2])
        return context.get_dummy_value()

    return types.void(target, types.int64, types.int64, value), generate


@simd_intrinsic
def split_lanes(typing: Any, like: Any, source: Any, index: Any, count: Any, target: Any, place: Any, step: Any) -> Any:
    """Load lanes * count interleaved elements; store element i * count + j to target[place + j * step + i] as float32.

    `count` is a literal.
    """
    lanes, parts = like.lanes, count.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = emit_widened(builder, args[1], args[2], lanes * parts, source.dtype)
        for part in range(parts):
            order = ir.Constant(vector_type(lanes, I32), list(range(part, lanes * parts, parts)))
            value = builder.shuffle_vector(wide, ir.Constant(wide.type, ir.Undefined), order)
            at = builder.add(args[5], builder.mul(args[6], ir.Constant(I64, part)))
            place = emit_pointer(builder, args[4], at, F32)
            builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(like, source, types.int64, count, target, types.int64, types.int64), generate


@simd_intrinsic
def join_lanes(typing: Any, like: Any, target: Any, index: Any, count: Any, source: Any, place: Any, step: Any) -> Any:
    """Store as `split_lanes` loads: the inverse, from float32 to the element type of `target`, rounded."""
    lanes, parts = like.lanes, count.literal_value

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = lanes * parts
        wide = ir.Constant(vector_type(total), ir.Undefined)
        for part in range(parts):
            at = builder.add(args[5], builder.mul(args[6], ir.Constant(I64, part)))
            near = emit_pointer(builder, args[4], at, F32)
            value = builder.load(
                builder.bitcast(near, vector_type(lanes).as_pointer()), align=4, typ=vector_type(lanes)
            )
            spread = ir.Constant(vector_type(total, I32), [i // parts for i in range(total)])
            value = builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), spread)
            order = [i + total if i % parts == part else i for i in range(total)]
            wide = builder.shuffle_vector(wide, value, ir.Constant(vector_type(total, I32), order))
        emit_narrowed(builder, args[1], args[2], wide, target.dtype)
        return context.get_dummy_value()

    return types.void(like, target, types.int64, count, source, types.int64, types.int64), generate


def _convert(builder: Any, x: Any, lanes: int, element: Any) -> Any:
    """Emit the conversion of float32 lanes to an element type, given as its numba type."""
    if element == types.float32:
        return x
    return (
        round_bfloat16(builder, x, lanes)
        if element == types.uint16
        else builder.fptrunc(x, vector_type(lanes, ir.HalfType()))
    )


def round_bfloat16(builder: Any, x: Any, lanes: int) -> Any:
    """Round float32 lanes to the bits of bfloat16; NaN stays NaN."""
    bits = builder.bitcast(x, vector_type(lanes, I32))
    sixteen, one = emit_constant(lanes, 16, I32), emit_constant(lanes, 1, I32)
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    rounded = builder.add(bits, builder.add(odd, emit_constant(lanes, 0x7FFF, I32)))
    rounded = builder.select(builder.fcmp_unordered("uno", x, x), emit_constant(lanes, 0x7FC00000, I32), rounded)
    return builder.trunc(builder.lshr(rounded, sixteen), vector_type(lanes, ir.IntType(16)))


def _reduce_by_halves(builder: Any, x: Any, width: int, combine: Callable[[Any, Any], Any]) -> Any:
    """Emit a reduction: combine the lower and upper half of the lanes until one is left."""
    while width > 1:
        width //= 2
        none = ir.Constant(x.type, ir.Undefined)
        low, high = (ir.Constant(vector_type(width, I32), list(range(i, i + width))) for i in (0, width))
        x = combine(builder.shuffle_vector(x, none, low), builder.shuffle_vector(x, none, high))
    return builder.extract_element(x, ir.Constant(I32, 0))


@simd_intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, fused if the CPU supports it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_fma(builder, *args)

    return a(a, a, a), generate


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit `fma`."""
    return emit_call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, a, b, c)


def _binary_intrinsic(name: str, emit: Any) -> Any:
    """Return an intrinsic f(a, b) over registers of equal width; `emit` generates its code."""

    def typed(typing: Any, a: Any, b: Any) -> Any:
        return a(a, a), lambda context, builder, signature, args: emit(builder, *args)

    typed.__name__ = typed.__qualname__ = name
    return simd_intrinsic(typed)


add = _binary_intrinsic("add", lambda builder, a, b: builder.fadd(a, b))
sub = _binary_intrinsic("sub", lambda builder, a, b: builder.fsub(a, b))
mul = _binary_intrinsic("mul", lambda builder, a, b: builder.fmul(a, b))
div = _binary_intrinsic("div", lambda builder, a, b: builder.fdiv(a, b))
minimum = _binary_intrinsic("minimum", lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
maximum = _binary_intrinsic("maximum", lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@simd_intrinsic
def reduce_max(typing: Any, a: Any) -> Any:
    """Return the largest lane. No lane may be NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _reduce_by_halves(
            builder, args[0], a.lanes, lambda x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y)
        )

    return types.float32(a), generate


@simd_intrinsic
def first_lane(typing: Any, a: Any) -> Any:
    """Return lane 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.Constant(I32, 0))

    return types.float32(a), generate


@simd_intrinsic
def reduce_sum(typing: Any, a: Any) -> Any:
    """Return the sum of the lanes, added by halves."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _reduce_by_halves(builder, args[0], a.lanes, builder.fadd)

    return types.float32(a), generate


@simd_intrinsic
def mask_lanes(typing: Any, a: Any, first: Any, end: Any, other: Any) -> Any:
    """Keep lanes first .. end - 1 of a register and set the others to `other`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lane = ir.Constant(vector_type(a.lanes, I32), list(range(a.lanes)))
        low, high = (emit_splat(builder, builder.trunc(x, I32), a.lanes) for x in args[1:3])
        inside = builder.and_(builder.icmp_signed(">=", lane, low), builder.icmp_signed("<", lane, high))
        return builder.select(inside, args[0], emit_splat(builder, args[3], a.lanes))

    return a(a, types.int64, types.int64, types.float32), generate


@simd_intrinsic
def dot_floats(
    typing: Any, like: Any, rows: Any, halves: Any, keep: Any, x: Any, stride: Any, weights: Any, half_bytes: Any,
    num_inputs: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """Multiply rows of float32 numbers with weights [num_inputs, lanes] float32; `like` gives the width.

    `rows` (a literal): how many. `halves` (a literal): 1, or 2 for further weights `half_bytes` after the first ones.
    `x`, `out`: addresses of the first rows; `stride`, `out_stride`: bytes from one row to the next. `keep` (a literal):
    add to `out`. 4 divides num_inputs.
    """
    lanes, counts = like.lanes, (rows.literal_value, halves.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, _, _, x, stride, weights, half_bytes, num_inputs, out, out_stride = args
        wide = vector_type(lanes)

        def multiply_step(step: Any, totals: list[Any]) -> list[Any]:
            start = builder.add(weights, builder.mul(step, ir.Constant(I64, 16 * lanes)))
            parts = [start, builder.add(start, half_bytes)][: counts[1]]
            inputs = [builder.add(row, builder.mul(step, ir.Constant(I64, 16))) for row in sources]
            for i in range(4):
                registers = [emit_load(builder, wide, part, 4 * lanes * i) for part in parts]
                for row, source in enumerate(inputs):
                    number = emit_splat(builder, emit_load(builder, F32, source, 4 * i), lanes)
                    for half, register in enumerate(registers):
                        place = row * counts[1] + half
                        totals[place] = emit_fma(builder, register, number, totals[place])
            return totals

        sources, targets = (
            [builder.add(base, builder.mul(step, ir.Constant(I64, row))) for row in range(counts[0])]
            for base, step in ((x, stride), (out, out_stride))
        )
        places = [
            builder.inttoptr(builder.add(each, ir.Constant(I64, 4 * lanes * half)), wide.as_pointer())
            for each in targets
            for half in range(counts[1])
        ]
        zero = emit_constant(lanes, 0.0)
        starts = [builder.load(at, align=4, typ=wide) if keep.literal_value else zero for at in places]
        num_steps = builder.lshr(num_inputs, ir.Constant(I64, 2))
        for at, total in zip(places, emit_loop(builder, num_steps, starts, multiply_step), strict=True):
            builder.store(total, at, align=4)
        return context.get_dummy_value()

    return types.void(like, rows, halves, keep, *(types.int64,) * 7), generate


@simd_intrinsic
def exp2(typing: Any, a: Any) -> Any:
    """Return 2 ** x for x <= 127; 0 below -126 (including -inf); NaN for NaN."""
    lanes = a.lanes

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        in_range = builder.fcmp_unordered(">=", args[0], emit_constant(lanes, -126.0))
        x = builder.select(in_range, args[0], emit_constant(lanes, 0.0))
        magic = emit_constant(lanes, 1.5 * 2.0**23)  # adding it rounds x to an integer in the lowest bits
        shifted = builder.fadd(x, magic)
        part = builder.fsub(x, builder.fsub(shifted, magic))
        power = emit_constant(lanes, math.log(2) ** 7 / math.factorial(7))
        for degree in range(6, -1, -1):
            coefficient = emit_constant(lanes, math.log(2) ** degree / math.factorial(degree))
            power = emit_fma(builder, power, part, coefficient)
        exponent = builder.shl(builder.bitcast(shifted, vector_type(lanes, I32)), emit_constant(lanes, 23, I32))
        scaled = builder.bitcast(
            builder.add(builder.bitcast(power, vector_type(lanes, I32)), exponent), vector_type(lanes)
        )
        return builder.select(in_range, scaled, emit_constant(lanes, 0.0))

    return a(a), generate


@simd_intrinsic
def prefetch(typing: Any, source: Any, index: Any) -> Any:
    """Prefetch the cache line of element `index`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_element_prefetch(builder, args[0], args[1], source.dtype)
        return context.get_dummy_value()

    return types.void(source, types.int64), generate


@simd_intrinsic
def fetch_add(typing: Any, source: Any, index: Any, amount: Any) -> Any:
    """Add `amount` to a 64-bit element atomically; return its previous value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", emit_pointer(builder, args[0], args[1], I64), args[2], "seq_cst")

    return types.int64(source, types.int64, types.int64), generate


@simd_intrinsic
def void_pointer(typing: Any, address: Any) -> Any:
    """Return an integer address as an untyped pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


@helper
def load_any(kind: int, like: Any, address: int, index: int) -> Any:
    """Load elements whose type (`kind`) is known only at run time."""
    if kind == FLOAT32:
        return load(like, pointer(FLOAT32, address), index)
    if kind == BFLOAT16:
        return load(like, pointer(BFLOAT16, address), index)
    return load(like, pointer(FLOAT16, address), index)


@helper
def store_any(kind: int, address: int, index: int, value: Any) -> None:
    """Store elements whose type (`kind`) is known only at run time."""
    if kind == FLOAT32:
        store(pointer(FLOAT32, address), index, value)
    elif kind == BFLOAT16:
        store(pointer(BFLOAT16, address), index, value)
    else:
        store(pointer(FLOAT16, address), index, value)
