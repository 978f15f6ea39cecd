"""Pairs of bf16 numbers: their products in float32 (one instruction where the CPU has it, else two), their order and
rounding, and the exponentials that become bf16.

AMX for numba: eight tile registers of 16 rows x 64 bytes, and a product of two of them (bf16 in, float32 out).

A tile of x holds 16 tokens x 32 inputs; a tile of weights 32 inputs x 16 outputs, two inputs side by side for each
output; a tile of sums 16 tokens x 16 outputs. Tile numbers are literals. Source: Intel's architecture manual, AMX.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types

from .simd import F32, I8, I32, emit_call, emit_splat, instruction, round_bfloat16


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no name for LLVM's bfloat
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


@cache
def has_pair_products() -> bool:
    """Tell whether the CPU multiplies pairs of bf16 numbers in one instruction."""
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


@instruction
def dot_pairs(typing: Any, native: Any, sums: Any, a: Any, b: Any) -> Any:
    """dot_pairs(native, sums, a, b): sums + low(a) * low(b) + high(a) * high(b), lane by lane.

    A lane of a and b holds two bf16 numbers, low and high. `native` (a literal) uses AVX512-BF16, 16 lanes only.
    """
    lanes = sums.lanes
    wide = ir.VectorType(F32, lanes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, total, *pairs = args
        if native.literal_value:
            halves = [builder.bitcast(x, ir.VectorType(_BFloat(), 2 * lanes)) for x in pairs]
            return emit_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", wide, total, *halves)
        bits = ir.VectorType(I32, lanes)
        sixteen, upper = ir.Constant(bits, [16] * lanes), ir.Constant(bits, [0xFFFF0000] * lanes)
        words = [builder.bitcast(x, bits) for x in pairs]
        low = [builder.bitcast(builder.shl(x, sixteen), wide) for x in words]
        high = [builder.bitcast(builder.and_(x, upper), wide) for x in words]
        name = f"llvm.fmuladd.v{lanes}f32"
        return emit_call(builder, name, wide, *high, emit_call(builder, name, wide, *low, total))

    return sums(native, sums, a, b), generate


@instruction
def store_rounded(typing: Any, native: Any, target: Any, index: Any, value: Any) -> Any:
    """store_rounded(native, pointer, i, x): write 16 lanes as bf16, by the CPU's own instruction if `native`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, base, at, x = args
        half = ir.VectorType(ir.IntType(16), value.lanes)
        if native.literal_value:
            rounded = ir.VectorType(_BFloat(), value.lanes)
            narrow = builder.bitcast(emit_call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", rounded, x), half)
        else:
            narrow = round_bfloat16(builder, x, value.lanes)
        place = builder.gep(base, [at], source_etype=ir.IntType(16))
        builder.store(narrow, builder.bitcast(place, half.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(native, target, types.int64, value), generate


@instruction
def store_pair(typing: Any, target: Any, index: Any, low: Any, high: Any) -> Any:
    """store_pair(pointer, i, low, high): write 32 lanes as bf16, AVX512-BF16 only."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, at, *parts = args
        rounded = emit_call(
            builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(_BFloat(), 32), *reversed(parts)
        )
        half = ir.VectorType(ir.IntType(16), 32)
        place = builder.gep(base, [at], source_etype=ir.IntType(16))
        builder.store(builder.bitcast(rounded, half), builder.bitcast(place, half.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(target, types.int64, low, high), generate


@instruction
def interleave(typing: Any, like: Any, even: Any, odd: Any) -> Any:
    """interleave(like, address, other): as many bf16 numbers of two rows as `like` has lanes, side by side in pairs."""
    lanes = like.lanes

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half, bits = ir.VectorType(ir.IntType(16), lanes), ir.VectorType(I32, lanes)
        rows = [builder.inttoptr(address, half.as_pointer()) for address in args[1:]]
        low, high = (builder.zext(builder.load(row, align=2, typ=half), bits) for row in rows)
        pairs = builder.or_(low, builder.shl(high, ir.Constant(bits, [16] * lanes)))
        return builder.bitcast(pairs, ir.VectorType(F32, lanes))

    return like(like, types.int64, types.int64), generate


@instruction
def any_above(typing: Any, a: Any, bound: Any) -> Any:
    """any_above(x, y): tell whether a lane is larger than y; NaN is not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        above = builder.fcmp_ordered(">", args[0], emit_splat(builder, args[1], a.lanes))
        return builder.icmp_unsigned("!=", builder.bitcast(above, ir.IntType(a.lanes)), ir.IntType(a.lanes)(0))

    return types.boolean(a, types.float32), generate


@instruction
def exp2_coarse(typing: Any, a: Any) -> Any:
    """exp2_coarse(x): 2 ** x within 1e-4 relative, for weights that become bf16; 16 lanes, AVX-512 only.

    The polynomial is the best of degree 3 on [0, 1] by relative error (Remez).
    """
    coefficients = (0.07802452264047956, 0.22606715542748315, 0.6958335404947528, 0.9999252185627154)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x,), wide = args, ir.VectorType(F32, 16)
        whole, same = ir.Constant(ir.IntType(16), -1), ir.Constant(I32, 4)
        down = ir.Constant(I32, 9)  # x less its floor, no exceptions
        part = emit_call(builder, "llvm.x86.avx512.mask.reduce.ps.512", wide, x, down, x, whole, same)
        power = ir.Constant(wide, [coefficients[0]] * 16)
        for coefficient in coefficients[1:]:
            power = emit_call(builder, "llvm.fmuladd.v16f32", wide, power, part, ir.Constant(wide, [coefficient] * 16))
        return emit_call(builder, "llvm.x86.avx512.mask.scalef.ps.512", wide, power, x, x, whole, same)

    return a(a), generate


@instruction
def reciprocal_coarse(typing: Any, a: Any) -> Any:
    """reciprocal_coarse(x): 1 / x within 2 ** -14 relative, for results that become bf16; 16 lanes, AVX-512 only."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = ir.Constant(ir.IntType(16), -1)
        return emit_call(builder, "llvm.x86.avx512.rcp14.ps.512", ir.VectorType(F32, 16), *args, *args, whole)

    return a(a), generate


TILE_ROWS, TILE_BYTES = 16, 1024
CONFIG_BYTES = 64


@cache
def has_amx() -> bool:
    """Tell whether this process may use tiles for bf16: the CPU has them and the system grants them."""
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    grant: Callable[[], bool] | None = getattr(torch.cpu, "_init_amx", None)  # asks the kernel, once per process
    return grant is not None and grant()


def tile_config(num_rows: tuple[int, ...]) -> bytes:
    """Return what `configure` reads: full rows of 64 bytes, and how many of them each tile has."""
    columns = b"".join((64).to_bytes(2, "little") for _ in num_rows)
    return bytes([1, 0]).ljust(16, b"\0") + columns.ljust(32, b"\0") + bytes(num_rows).ljust(16, b"\0")


def _tile(numbers: Any) -> list[Any]:
    return [ir.Constant(I8, number.literal_value) for number in numbers]


def _address(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I8.as_pointer())


@instruction
def tile_configure(typing: Any, address: Any) -> Any:
    """configure(address): set up the tiles from the 64 bytes of a `tile_config`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), _address(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@instruction
def tile_release(typing: Any) -> Any:
    """release(): let go of the tiles, so that the system need not save them when threads change."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "llvm.x86.tilerelease", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@instruction
def tile_clear(typing: Any, tile: Any) -> Any:
    """tile_clear(t): zeros."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "llvm.x86.tilezero", ir.VoidType(), *_tile((tile,)))
        return context.get_dummy_value()

    return types.void(tile), generate


@instruction
def tile_load(typing: Any, tile: Any, address: Any, stride: Any) -> Any:
    """tile_load(t, address, stride): read the rows, `stride` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(builder, args[1])
        emit_call(builder, "llvm.x86.tileloadd64", ir.VoidType(), *_tile((tile,)), at, args[2])
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), generate


@instruction
def tile_store(typing: Any, tile: Any, address: Any, stride: Any) -> Any:
    """tile_store(t, address, stride): write the rows, `stride` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(builder, args[1])
        emit_call(builder, "llvm.x86.tilestored64", ir.VoidType(), *_tile((tile,)), at, args[2])
        return context.get_dummy_value()

    return types.void(tile, types.int64, types.int64), generate


@instruction
def tile_dot(typing: Any, total: Any, x: Any, weight: Any) -> Any:
    """tile_dot(c, a, b): c += a @ b."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), *_tile((total, x, weight)))
        return context.get_dummy_value()

    return types.void(total, x, weight), generate
