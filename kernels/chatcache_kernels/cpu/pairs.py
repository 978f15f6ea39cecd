"""Products of pairs of bf16 numbers, added up in float32: one instruction where the CPU has it, else two."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import binding, ir
from numba import types

from .vectors import _call, _instruction, _round_bfloat16

_F32, _I32 = ir.FloatType(), ir.IntType(32)


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


@_instruction
def dot_pairs(typing: Any, native: Any, sums: Any, a: Any, b: Any) -> Any:
    """dot_pairs(native, sums, a, b): sums + low(a) * low(b) + high(a) * high(b), lane by lane.

    A lane of a and b holds two bf16 numbers, low and high. `native` (a literal) uses AVX512-BF16, 16 lanes only.
    """
    lanes = sums.lanes
    wide = ir.VectorType(_F32, lanes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, total, *pairs = args
        if native.literal_value:
            halves = [builder.bitcast(x, ir.VectorType(_BFloat(), 2 * lanes)) for x in pairs]
            return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", wide, total, *halves)
        bits = ir.VectorType(_I32, lanes)
        sixteen, upper = ir.Constant(bits, [16] * lanes), ir.Constant(bits, [0xFFFF0000] * lanes)
        words = [builder.bitcast(x, bits) for x in pairs]
        low = [builder.bitcast(builder.shl(x, sixteen), wide) for x in words]
        high = [builder.bitcast(builder.and_(x, upper), wide) for x in words]
        name = f"llvm.fmuladd.v{lanes}f32"
        return _call(builder, name, wide, *high, _call(builder, name, wide, *low, total))

    return sums(native, sums, a, b), generate


@_instruction
def store_rounded(typing: Any, native: Any, target: Any, index: Any, value: Any) -> Any:
    """store_rounded(native, pointer, i, x): write 16 lanes as bf16, by the CPU's own instruction if `native`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, base, at, x = args
        half = ir.VectorType(ir.IntType(16), value.lanes)
        if native.literal_value:
            rounded = ir.VectorType(_BFloat(), value.lanes)
            narrow = builder.bitcast(_call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", rounded, x), half)
        else:
            narrow = _round_bfloat16(builder, x, value.lanes)
        place = builder.gep(base, [at], source_etype=ir.IntType(16))
        builder.store(narrow, builder.bitcast(place, half.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(native, target, types.int64, value), generate
