"""8-bit codes (a sign bit and 7 bits of magnitude) widened to bf16, and pairs of bf16 split into float32.

Every magnitude up to 127 is a bf16 number. Where the CPU looks bytes up in a table of 128 (AVX512-VBMI), the two bytes
of the result are two look-ups by the magnitude, and the sign is the sign; else numbers are converted.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from llvmlite import binding, ir
from numba import types

from . import llvm
from .llvm import F32, I8, I16, I32, instruction

_CODES, _WORDS = ir.VectorType(I8, 64), ir.VectorType(I16, 64)
_RUNS = [[16 * run + 8 * row + i for run in range(4) for i in range(8)] for row in range(2)]  # where a row's codes lie


@cache
def has_byte_tables() -> bool:
    """Tell whether the CPU looks up 64 bytes at once in a table of 128."""
    features = binding.get_host_cpu_features()
    return bool(features.get("avx512vbmi") and features.get("avx512bw"))


@instruction
def widen_codes(typing: Any, tables: Any, source: Any, target: Any) -> Any:
    """widen_codes(tables, source, target): widen the 64 codes of two rows of a tile to bf16, at addresses.

    In 16 codes the first eight are of the first row. `tables` (a literal) uses byte tables.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        codes = builder.load(builder.inttoptr(args[1], _CODES.as_pointer()), align=1, typ=_CODES)
        widened = _look_up(builder, codes) if tables.literal_value else _convert(builder, codes)
        for number, row in enumerate(widened):
            at = builder.add(args[2], ir.Constant(args[2].type, 64 * number))
            builder.store(row, builder.inttoptr(at, row.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(tables, types.int64, types.int64), generate


def _look_up(builder: Any, codes: Any) -> list[Any]:
    values = torch.arange(128).bfloat16().view(torch.int16)
    sign = builder.and_(codes, ir.Constant(_CODES, [0x80] * 64))
    low, high = (_table(builder, codes, ((values >> shift) & 0xFF).tolist()) for shift in (0, 8))
    high = builder.or_(high, sign)
    order = [[i for place in row for i in (place, 64 + place)] for row in _RUNS]
    return [
        builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 64), each)) for each in order
    ]  # interleaved within 16 bytes: one instruction each


def _table(builder: Any, codes: Any, values: list[int]) -> Any:
    first, second = ir.Constant(_CODES, values[:64]), ir.Constant(_CODES, values[64:])
    return llvm.call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _CODES, first, codes, second)


def _convert(builder: Any, codes: Any) -> list[Any]:
    wide = builder.zext(codes, ir.VectorType(I32, 64))
    magnitude = builder.and_(wide, ir.Constant(wide.type, [0x7F] * 64))
    bits = builder.bitcast(builder.sitofp(magnitude, ir.VectorType(F32, 64)), wide.type)
    sign = builder.shl(builder.and_(wide, ir.Constant(wide.type, [0x80] * 64)), ir.Constant(wide.type, [8] * 64))
    words = builder.trunc(builder.or_(builder.lshr(bits, ir.Constant(wide.type, [16] * 64)), sign), _WORDS)
    none = ir.Constant(_WORDS, ir.Undefined)
    return [builder.shuffle_vector(words, none, ir.Constant(ir.VectorType(I32, 32), row)) for row in _RUNS]


@instruction
def low_half(typing: Any, a: Any) -> Any:
    """low_half(x): the bf16 number in the lower half of each lane's bits, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = ir.VectorType(I32, a.lanes)
        moved = builder.shl(builder.bitcast(args[0], bits), ir.Constant(bits, [16] * a.lanes))
        return builder.bitcast(moved, args[0].type)

    return a(a), generate


@instruction
def high_half(typing: Any, a: Any) -> Any:
    """high_half(x): the bf16 number in the upper half of each lane's bits, as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = ir.VectorType(I32, a.lanes)
        kept = builder.and_(builder.bitcast(args[0], bits), ir.Constant(bits, [0xFFFF0000] * a.lanes))
        return builder.bitcast(kept, args[0].type)

    return a(a), generate
