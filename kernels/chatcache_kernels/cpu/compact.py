"""bf16 weights without loss in about 12.5 bits each, for steps of few tokens.

Such a step is limited by reading the weights. A bf16 number is a sign, 8 bits of exponent and 7 of fraction, but the
exponents of a tile of 32 outputs x 32 inputs are nearly always 16 neighbours: the numbers of such a tile are stored
with 4 bits of exponent above the tile's lowest, and become bf16 again in the registers. A tile with a smaller exponent
(of Gaussian weights 1 in 15, and any with a zero) is stored as it is. For more than FEW_TOKENS tokens, computing bf16
numbers anew takes longer than reading them (Zen 5: 8 tokens take 0.85 of the time, 16 about the same), so this is a
second copy of a weight, next to the panels of `matmul`, and has the same order: panels of 32 outputs; in a panel tiles
of 32 inputs; in a tile 2 inputs at a time, as two registers of (16 outputs, input pair).

    stored as it is   16 x [2 halves, 16 outputs, 2 inputs] numbers of 16 bits
    short             16 x ([2, 16, 2] signs and fractions of 8 bits, [16, 2] exponents: low 4 bits half 0, high half 1)

Computing a tile takes so many instructions that the CPU does not get to the loads of the next ones meanwhile, and the
hardware's prefetcher does not run far enough ahead of them: each round also fetches a tile further on, and the last
rounds of a panel the first tiles of the panel that the thread multiplies next.

A compact weight is uint8: an index, int64 [out / 32, in / 32], then the tiles. An entry of the index is the offset of a
tile (bits 16 and up), its lowest exponent where bf16 has it (bits 7 to 14), and bit 0 for a tile stored as it is.

Exponents of trained weights carry 2 to 3 bits of information: Zhang et al., "70% Size, 100% Accuracy: Lossless LLM
Compression for Efficient GPU Inference via Dynamic-Length Float" (2025), who use a code of variable length.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from torch import Tensor

from ..experts import Allocate, empty
from .bf16 import has_amx, has_avx512_bf16
from .launch import Launch, choose_num_threads, compile_kernel, define_job, helper
from .simd import (
    I8,
    I16,
    I64,
    INT64,
    emit_call,
    emit_load,
    emit_loop,
    emit_prefetch,
    emit_splat,
    fetch_add,
    pointer,
    simd_intrinsic,
    vector_type,
)

PANEL = 32  # outputs of a panel, and inputs of a tile
FEW_TOKENS = 8 if has_avx512_bf16() and not has_amx() else 4  # of a step, for which a compact weight is read
SHORT_BYTES, LONG_BYTES = 1536, 2048  # of a tile
LINE = 64  # bytes of a cache line
TILES_AHEAD = 4  # from a tile to the one that is fetched meanwhile
ALIGNMENT = 512  # bytes: of the tiles
_RANGE = 16  # exponents of a short tile
_EXPONENT, _IS_LONG, _OFFSET_SHIFT = 0x7F80, 1, 16  # in an entry of the index

_PACK_JOB, _PACK = define_job("weight out num_inputs num_outputs")


def compact_weights(weights: Tensor, allocate: Allocate = empty) -> Tensor:
    """Return compact weights, all as long as the longest.

    Shapes: weights [num, out, in] bf16 in any strides, of sizes that `matmul.can_pack` -> [num, bytes] uint8.
    `allocate` makes the memory; an address that is a multiple of 64 is fastest.
    """
    indices = [_make_index(weight.contiguous()) for weight in weights]
    data = allocate((len(indices), max(map(_num_bytes, indices))), torch.uint8)
    for row, weight, index in zip(data, weights, indices, strict=True):
        _pack_into(row, weight.contiguous(), index)
    return data


def _make_index(weight: Tensor) -> Tensor:
    """Return the index of a packed weight."""
    num_outputs, num_inputs = weight.shape
    index = torch.empty(num_outputs // PANEL, num_inputs // PANEL, dtype=torch.int64)
    job = _PACK.pack(0, 0, weight.data_ptr(), index.data_ptr(), num_inputs, num_outputs)
    _index_kernel()(job, choose_num_threads(weight.numel()))
    sizes = torch.where(index & _IS_LONG > 0, LONG_BYTES, SHORT_BYTES).view(-1)
    first = -(-index.nbytes // ALIGNMENT) * ALIGNMENT
    return index.add_((sizes.cumsum(0) - sizes + first).view_as(index) << _OFFSET_SHIFT)


def _num_bytes(index: Tensor) -> int:
    last = int(index[-1, -1])
    return (last >> _OFFSET_SHIFT) + (LONG_BYTES if last & _IS_LONG else SHORT_BYTES)


def _pack_into(data: Tensor, weight: Tensor, index: Tensor) -> None:
    data[: index.nbytes].copy_(index.view(-1).view(torch.uint8))
    job = _PACK.pack(0, 0, weight.data_ptr(), data.data_ptr(), weight.shape[1], weight.shape[0])
    _write_kernel()(job, choose_num_threads(weight.numel()))


def restore(compact: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """Return the weight [num_outputs, num_inputs] of a compact one. Slow."""
    num_panels, num_tiles = num_outputs // PANEL, num_inputs // PANEL
    index = compact[: 8 * num_panels * num_tiles].view(torch.int64).view(num_panels, num_tiles)
    out = torch.empty(num_panels, num_tiles, 16, 2, 16, 2, dtype=torch.bfloat16)
    for panel, tile in np.ndindex(num_panels, num_tiles):
        entry = int(index[panel, tile])
        at = entry >> _OFFSET_SHIFT
        if entry & _IS_LONG:
            bits = compact[at : at + LONG_BYTES].view(torch.int16).to(torch.int32).view(16, 2, 32)
        else:
            rows = compact[at : at + SHORT_BYTES].view(16, 96).to(torch.int32)
            exponents = torch.stack((rows[:, 64:] & 15, rows[:, 64:] >> 4), 1) + ((entry & _EXPONENT) >> 7)
            signs = rows[:, :64].view(16, 2, 32)
            bits = (signs & 0x80) << 8 | exponents << 7 | signs & 0x7F
        out[panel, tile] = bits.to(torch.int16).view(torch.bfloat16).view(16, 2, 16, 2)
    return out.permute(0, 3, 4, 1, 2, 5).reshape(num_outputs, num_inputs)


@cache
def _index_kernel() -> Launch:
    """Return the launcher of the kernel that writes the index, without offsets. Its argument record is a _PACK_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, _PACK_JOB)[0]
        source, index = pointer(INT64, job.weight), pointer(INT64, job.out)
        tiles, quads = job.num_inputs // PANEL, job.num_inputs // 4  # four numbers are read as one
        panel = fetch_add(address, 0, 1)
        while panel < job.num_outputs // PANEL:
            for tile in range(tiles):
                first = panel * PANEL * quads + tile * 8
                low, high = np.int64(0xFF), np.int64(0)
                for row in range(PANEL):
                    for quad in range(8):
                        numbers = source[first + row * quads + quad]
                        for place in range(4):
                            exponent = (numbers >> (16 * place + 7)) & 0xFF
                            low, high = min(low, exponent), max(high, exponent)
                base = max(high - (_RANGE - 1), np.int64(0))
                index[panel * tiles + tile] = base << 7 | (_IS_LONG if low < base else 0)
            panel = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _write_kernel() -> Launch:
    """Return the launcher of the kernel that writes the tiles after the index. Its argument record is a _PACK_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, _PACK_JOB)[0]
        index = pointer(INT64, job.out)
        tiles = job.num_inputs // PANEL
        panel = fetch_add(address, 0, 1)
        while panel < job.num_outputs // PANEL:
            for tile in range(tiles):
                entry = index[panel * tiles + tile]
                first = job.weight + 2 * (panel * PANEL * job.num_inputs + tile * PANEL)
                _write_tile(first, 2 * job.num_inputs, job.out + (entry >> _OFFSET_SHIFT), entry)
            panel = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@helper
def _write_tile(source: int, stride: int, target: int, entry: int) -> None:
    """Write the tile of 32 rows of numbers that are `stride` bytes apart."""
    if entry & _IS_LONG:
        words = carray(_int32_pointer(target), (16, PANEL))
        for row in range(PANEL):
            pairs = carray(_int32_pointer(source + row * stride), 16)
            for pair in range(16):
                words[pair, row] = pairs[pair]
        return
    out, base = carray(_byte_pointer(target), (16, 96)), (entry & _EXPONENT) >> 7
    for row in range(16):
        low = carray(_short_pointer(source + row * stride), PANEL)
        high = carray(_short_pointer(source + (row + 16) * stride), PANEL)
        for pair in range(16):
            for side in range(2):
                a, b, place = low[2 * pair + side], high[2 * pair + side], 2 * row + side
                out[pair, place] = (a >> 8) & 0x80 | a & 0x7F
                out[pair, 32 + place] = (b >> 8) & 0x80 | b & 0x7F
                out[pair, 64 + place] = ((a >> 7) & 0xFF) - base | (((b >> 7) & 0xFF) - base) << 4


def _pointer_intrinsic(kind: types.Type) -> Any:
    """Return an intrinsic that makes a typed pointer of an integer address."""

    def typed(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    typed.__name__ = typed.__qualname__ = f"_{kind}_pointer"
    return simd_intrinsic(typed)


_int32_pointer, _short_pointer, _byte_pointer = map(_pointer_intrinsic, (types.int32, types.uint16, types.uint8))


@helper
def first_tile(compact: int, panel: int, num_tiles: int) -> int:
    """Return the address of a panel's first tile in a compact weight; 0 without one."""
    if compact == 0:
        return 0
    offset: int = pointer(INT64, compact)[panel * num_tiles] >> _OFFSET_SHIFT
    return compact + offset


def _emit_fetched_tile(builder: Any, tile: Any, number: Any, num_tiles: Any, following: Any) -> Any:
    """Emit the address of the tile to fetch while tile `number` of a panel, at address `tile`, is multiplied."""
    place = builder.sub(number, builder.sub(num_tiles, ir.Constant(I64, TILES_AHEAD)))  # in the panel that follows
    return builder.select(
        builder.icmp_signed("<", place, ir.Constant(I64, 0)),
        builder.add(tile, ir.Constant(I64, TILES_AHEAD * SHORT_BYTES)),
        builder.add(following, builder.mul(place, ir.Constant(I64, SHORT_BYTES))),
    )


def emit_tiles(
    builder: Any, native: bool, index: Any, data: Any, num_tiles: Any, following: Any, carried: list[Any], body: Any
) -> list[Any]:
    """Emit a loop over the tiles of a compact panel; return the values that its last round leaves.

    `index`, `data`: addresses of the panel's part of the index and of the compact weight. `body(tile, weights, values)`
    emits a round, where `weights(pair, half)` is the register of an input pair and of a half of the outputs. `native`:
    the CPU has AVX512BW. `following`: address of the tiles to fetch in the last rounds.
    """
    words, wide = ir.VectorType(I16, 32), vector_type(16)

    def constant(value: int) -> ir.Constant:
        return ir.Constant(words, [value] * 32)

    def emit_round(number: Any, values: list[Any]) -> list[Any]:
        entry = emit_load(builder, I64, builder.add(index, builder.mul(number, ir.Constant(I64, 8))))
        tile = builder.add(data, builder.ashr(entry, ir.Constant(I64, _OFFSET_SHIFT)))
        is_long = builder.trunc(entry, ir.IntType(1))
        base = emit_splat(builder, builder.and_(builder.trunc(entry, I16), ir.Constant(I16, _EXPONENT)), 32)
        table = builder.add(base, ir.Constant(words, [(i % _RANGE) << 7 for i in range(32)]))

        fetched = _emit_fetched_tile(builder, tile, number, num_tiles, following)

        def prefetch(pair: int, row_bytes: int) -> None:
            for line in range(-(-pair * row_bytes // LINE), -(-(pair + 1) * row_bytes // LINE)):
                emit_prefetch(builder, fetched, LINE * line)

        def load_bytes(offset: int) -> Any:
            return emit_load(builder, ir.VectorType(I8, 32), tile, offset)

        def exponents(codes: Any, half: int) -> Any:
            codes = codes if half == 0 else builder.lshr(codes, constant(4))
            if native:  # the table has every exponent twice, because bit 4 of an index may be set
                return emit_call(builder, "llvm.x86.avx512.permvar.hi.512", words, table, codes)
            return builder.add(builder.shl(builder.and_(codes, constant(_RANGE - 1)), constant(7)), base)

        def short(pair: int, half: int) -> Any:
            if half == 0:
                prefetch(pair, SHORT_BYTES // 16)
            codes = builder.zext(load_bytes(96 * pair + 64), words)
            fractions = builder.and_(builder.sext(load_bytes(96 * pair + 32 * half), words), constant(0x807F))
            return builder.bitcast(builder.or_(fractions, exponents(codes, half)), wide)

        def long(pair: int, half: int) -> Any:
            if half == 0:
                prefetch(pair, LONG_BYTES // 16)
            return emit_load(builder, wide, tile, 128 * pair + 64 * half)

        results, done = [], builder.append_basic_block("tile")
        for weights, block in zip((long, short), map(builder.append_basic_block, ("long", "short")), strict=True):
            results.append((weights, block))
        builder.cbranch(is_long, results[0][1], results[1][1])
        incoming = []
        for weights, block in results:
            builder.position_at_end(block)
            incoming.append((body(number, weights, list(values)), builder.block))
            builder.branch(done)
        builder.position_at_end(done)
        after = []
        for place, value in enumerate(values):
            phi = builder.phi(value.type)
            for found, block in incoming:
                phi.add_incoming(found[place], block)
            after.append(phi)
        return after

    return emit_loop(builder, num_tiles, carried, emit_round)
