"""Intrinsics for bf16: pair products (AVX512-BF16), rounding, fast exponentials, AMX tiles.

A lane of a register can hold two bf16 numbers, low and high; products of such pairs accumulate in float32, in one
instruction where the CPU has it, else in two.

AMX has eight tile registers of 16 rows x 64 bytes and multiplies two of them (bf16 inputs, float32 sums). A tile of x
holds 16 tokens x 32 inputs; a tile of weights 32 inputs x 16 outputs, two inputs adjacent for each output; a tile of
sums 16 tokens x 16 outputs. Tile numbers are literals.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual (AVX512-BF16, AMX).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types

from .simd import (
    F32,
    I8,
    I32,
    I64,
    emit_call,
    emit_fma,
    emit_load,
    emit_loop,
    emit_splat,
    round_bfloat16,
    simd_intrinsic,
)

ROWS = 8  # of one `dot_rows`: their sums fit the registers


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no name for LLVM's bfloat
    """LLVM's type `bfloat`, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


@cache
def has_avx512_bf16() -> bool:
    """Return whether the CPU multiplies pairs of bf16 numbers in one instruction."""
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


@simd_intrinsic
def dot_pairs(typing: Any, native: Any, sums: Any, a: Any, b: Any) -> Any:
    """Return sums + low(a) * low(b) + high(a) * high(b), lane by lane.

    `native` (a literal) selects AVX512-BF16, which needs 16 lanes.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_dot_pairs(builder, native.literal_value, *args[1:])

    return sums(native, sums, a, b), generate


def emit_dot_pairs(builder: Any, native: bool, total: Any, *pairs: Any) -> Any:
    """Emit `dot_pairs`."""
    wide, lanes = total.type, total.type.count
    if native:
        halves = [builder.bitcast(x, ir.VectorType(_BFloat(), 2 * lanes)) for x in pairs]
        return emit_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", wide, total, *halves)
    low, high = ([emit_widened(builder, x, side) for x in pairs] for side in range(2))
    return emit_fma(builder, high[0], high[1], emit_fma(builder, low[0], low[1], total))


def emit_widened(builder: Any, pairs: Any, side: int) -> Any:
    """Emit the low (`side` 0) or high (1) numbers of lanes of bf16 pairs as float32."""
    bits = ir.VectorType(I32, pairs.type.count)
    words = builder.bitcast(pairs, bits)
    if side:
        words = builder.and_(words, ir.Constant(bits, [0xFFFF0000] * bits.count))
    else:
        words = builder.shl(words, ir.Constant(bits, [16] * bits.count))
    return builder.bitcast(words, ir.VectorType(F32, bits.count))


@simd_intrinsic
def dot_rows(
    typing: Any, halves: Any, keep: Any, x: Any, stride: Any, tiles: Any, step_bytes: Any, half_bytes: Any,
    num_steps: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """Multiply ROWS rows of bf16 numbers with tiles of 32 inputs x 16 outputs, as AMX would, by AVX512-BF16.

    `x`, `out`: addresses of the first rows (bf16, float32); `stride`, `out_stride`: bytes from one row to the next.
    `tiles`: address of the first tile; `step_bytes`, `half_bytes`: bytes to the tile of the next 32 inputs, and of the
    next 16 outputs. `halves` (a literal): 1 or 2 tiles of outputs. `keep` (a literal): add to `out`.
    """
    num_halves, wide = halves.literal_value, ir.VectorType(F32, 16)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, x, stride, tiles, step_bytes, half_bytes, num_steps, out, out_stride = args

        def multiply_step(step: Any, totals: list[Any]) -> list[Any]:
            first = builder.add(tiles, builder.mul(step, step_bytes))
            parts = [first, builder.add(first, half_bytes)][:num_halves]
            inputs = [builder.add(row, builder.mul(step, ir.Constant(I64, 64))) for row in rows]
            for pair in range(16):
                weights = [emit_load(builder, wide, part, 64 * pair) for part in parts]
                for row in range(ROWS):
                    numbers = emit_splat(builder, emit_load(builder, F32, inputs[row], 4 * pair), 16)
                    for half in range(num_halves):
                        place = row * num_halves + half
                        totals[place] = emit_dot_pairs(builder, True, totals[place], weights[half], numbers)
            return totals

        def place(row: int, half: int) -> Any:
            at = builder.add(out, builder.mul(out_stride, ir.Constant(I64, row)))
            return builder.add(at, ir.Constant(I64, 64 * half))

        rows = [builder.add(x, builder.mul(stride, ir.Constant(I64, row))) for row in range(ROWS)]
        places = [place(row, half) for row in range(ROWS) for half in range(num_halves)]
        zero = ir.Constant(wide, [0.0] * 16)
        starts = [emit_load(builder, wide, at) if keep.literal_value else zero for at in places]
        for at, total in zip(places, emit_loop(builder, num_steps, starts, multiply_step), strict=True):
            builder.store(total, builder.inttoptr(at, wide.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(halves, keep, *(types.int64,) * 8), generate


def emit_bf16(builder: Any, native: bool, x: Any) -> Any:
    """Emit the bits of float32 lanes as bf16; `native` uses AVX512-BF16, which needs 16 lanes."""
    lanes = x.type.count
    if not native:
        return round_bfloat16(builder, x, lanes)
    rounded = emit_call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_BFloat(), lanes), x)
    return builder.bitcast(rounded, ir.VectorType(ir.IntType(16), lanes))


@simd_intrinsic
def store_bf16(typing: Any, native: Any, target: Any, index: Any, value: Any) -> Any:
    """Store 16 float32 lanes as bf16 from element `index` on; `native` uses AVX512-BF16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, base, at, x = args
        narrow = emit_bf16(builder, native.literal_value, x)
        place = builder.gep(base, [at], source_etype=ir.IntType(16))
        builder.store(narrow, builder.bitcast(place, narrow.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(native, target, types.int64, value), generate


@simd_intrinsic
def store_bf16_pair(typing: Any, target: Any, index: Any, low: Any, high: Any) -> Any:
    """Store the lanes of `low`, then those of `high`, as 32 bf16 numbers; AVX512-BF16 only."""

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


@simd_intrinsic
def load_interleaved(typing: Any, like: Any, even: Any, odd: Any) -> Any:
    """Load bf16 numbers of two rows, at addresses `even` and `odd`, interleaved as pairs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_interleaved(builder, args[1], args[2], like.lanes)

    return like(like, types.int64, types.int64), generate


def emit_interleaved(builder: Any, even: Any, odd: Any, lanes: int) -> Any:
    """Emit `load_interleaved`."""
    half = ir.VectorType(ir.IntType(16), lanes)
    rows = [builder.inttoptr(address, half.as_pointer()) for address in (even, odd)]
    low, high = (builder.load(row, align=2, typ=half) for row in rows)
    order = [place for lane in range(lanes) for place in (lane, lanes + lane)]
    pairs = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 2 * lanes), order))
    return builder.bitcast(pairs, ir.VectorType(F32, lanes))


@simd_intrinsic
def any_lane_greater(typing: Any, a: Any, bound: Any) -> Any:
    """Return whether any lane is greater than `bound`; NaN is not."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        above = builder.fcmp_ordered(">", args[0], emit_splat(builder, args[1], a.lanes))
        return builder.icmp_unsigned("!=", builder.bitcast(above, ir.IntType(a.lanes)), ir.IntType(a.lanes)(0))

    return types.boolean(a, types.float32), generate


@simd_intrinsic
def exp2_approx(typing: Any, a: Any) -> Any:
    """Return 2 ** x within 1e-4 relative, for weights rounded to bf16; 16 lanes, AVX-512 only.

    The polynomial of degree 3 minimises the relative error on [0, 1] (Remez).
    """
    coefficients = (0.07802452264047956, 0.22606715542748315, 0.6958335404947528, 0.9999252185627154)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (x,), wide = args, ir.VectorType(F32, 16)
        whole, same = ir.Constant(ir.IntType(16), -1), ir.Constant(I32, 4)
        down = ir.Constant(I32, 9)  # x - floor(x), no exceptions
        part = emit_call(builder, "llvm.x86.avx512.mask.reduce.ps.512", wide, x, down, x, whole, same)
        power = ir.Constant(wide, [coefficients[0]] * 16)
        for coefficient in coefficients[1:]:
            power = emit_fma(builder, power, part, ir.Constant(wide, [coefficient] * 16))
        return emit_call(builder, "llvm.x86.avx512.mask.scalef.ps.512", wide, power, x, x, whole, same)

    return a(a), generate


@simd_intrinsic
def reciprocal_approx(typing: Any, a: Any) -> Any:
    """Return 1 / x within 2 ** -14 relative, for results rounded to bf16.

    16 lanes, AVX-512 only.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole = ir.Constant(ir.IntType(16), -1)
        return emit_call(builder, "llvm.x86.avx512.rcp14.ps.512", ir.VectorType(F32, 16), *args, *args, whole)

    return a(a), generate


TILE_ROWS, TILE_BYTES = 16, 1024
CONFIG_BYTES = 64


@cache
def has_amx() -> bool:
    """Return whether this process may use AMX bf16 tiles: CPU support and permission of the OS."""
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    grant: Callable[[], bool] | None = getattr(torch.cpu, "_init_amx", None)  # asks the OS kernel, once per process
    return grant is not None and grant()


def has_bf16_products() -> bool:
    """Return whether the CPU multiplies bf16 numbers as they are; others widen them to float32."""
    return has_amx() or has_avx512_bf16()


def tile_config(num_rows: tuple[int, ...]) -> bytes:
    """Return the 64-byte AMX configuration of tiles with these numbers of rows (of 64 bytes)."""
    columns = b"".join((64).to_bytes(2, "little") for _ in num_rows)
    return bytes([1, 0]).ljust(16, b"\0") + columns.ljust(32, b"\0") + bytes(num_rows).ljust(16, b"\0")


def _tile_numbers(numbers: Any) -> list[Any]:
    return [ir.Constant(I8, number.literal_value) for number in numbers]


def _to_pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I8.as_pointer())


@simd_intrinsic
def tile_configure(typing: Any, address: Any) -> Any:
    """Configure the tiles from the 64 bytes of a `tile_config`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), _to_pointer(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@simd_intrinsic
def tile_release(typing: Any) -> Any:
    """Release the tiles, so that the OS need not save them when it switches threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "llvm.x86.tilerelease", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@simd_intrinsic
def tile_clear(typing: Any, tile: Any) -> Any:
    """Set a tile to zeros."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "llvm.x86.tilezero", ir.VoidType(), *_tile_numbers((tile,)))
        return context.get_dummy_value()

    return types.void(tile), generate


def _tile_move(name: str, instruction: str) -> Any:
    """Return an intrinsic (tile, address, stride) that loads or stores a tile whose rows are `stride` bytes apart."""

    def move(typing: Any, tile: Any, address: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at = _to_pointer(builder, args[1])
            emit_call(builder, f"llvm.x86.{instruction}", ir.VoidType(), *_tile_numbers((tile,)), at, args[2])
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.int64), generate

    move.__name__ = move.__qualname__ = name
    return simd_intrinsic(move)


tile_load = _tile_move("tile_load", "tileloadd64")
tile_load_once = _tile_move("tile_load_once", "tileloaddt164")  # keeps what is in the first-level cache
tile_store = _tile_move("tile_store", "tilestored64")


@simd_intrinsic
def tile_dot(typing: Any, total: Any, x: Any, weight: Any) -> Any:
    """Add the product of two tiles to a third: total += x @ weight."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), *_tile_numbers((total, x, weight)))
        return context.get_dummy_value()

    return types.void(total, x, weight), generate
