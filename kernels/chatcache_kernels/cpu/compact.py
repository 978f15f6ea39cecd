"""bf16 weights without loss in about 12.5 bits each, for steps of few tokens.

Such a step is limited by reading the weights. A bf16 number is a sign, 8 bits of exponent and 7 of fraction, but the
exponents of a tile of 32 outputs x 32 inputs are nearly always 16 neighbours: the numbers of such a tile are stored
with 4 bits of exponent above the tile's lowest, and become bf16 again in the registers. A tile with a smaller exponent
(of Gaussian weights 1 in 15, and any with a zero) is stored as it is.

With more tokens, computing bf16 numbers anew takes longer than reading them (Zen 5: 8 tokens take 0.7 of the time, 16
take 0.95; Zen 4: 1 to 8 tokens take 0.8, 16 take 1.15). So this is a second copy of a weight, next to the panels of
`matmul`, and says for how many tokens it is read. It has the same order: panels of 32 outputs; in a panel tiles of 32
inputs; in a tile 2 inputs at a time, as two registers of (16 outputs, input pair).

    stored as it is   16 x [2 halves, 16 outputs, 2 inputs] numbers of 16 bits
    short             8 x [3, 16 outputs, 2 inputs] words of 16 bits, for two input pairs: first the exponents of both,
                      bits 0-3 of the first pair in half 0, 4-7 in half 1, 8-11 and 12-15 of the second pair; then the
                      signs and fractions of each, bits 15 and 0-6 in half 0, 7 and 8-14 in half 1

Computing a tile takes so many instructions that the CPU does not get to the loads of the next ones meanwhile, and the
hardware's prefetcher does not run far enough ahead of them: each round also fetches a tile further on, and the last
rounds of a panel the first tiles of the panel that the thread multiplies next. Fetched into the first-level cache they
come sooner on Zen 5; Zen 4, whose cache is smaller, then takes 1.25 to 1.6 times as long.

A compact weight is uint8: the most tokens for which it is read, int64; an index, int64 [out / 32, in / 32]; and the
tiles. An entry of the index is the offset of a tile (bits 16 and up), its lowest exponent where bf16 has it (bits 7 to
14), and bit 0 for a tile stored as it is.

Exponents of trained weights carry 2 to 3 bits of information: Zhang et al., "70% Size, 100% Accuracy: Lossless LLM
Compression for Efficient GPU Inference via Dynamic-Length Float" (2025), who use a code of variable length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, types
from torch import Tensor

from ..experts import Allocate, empty
from .bf16 import has_amx, has_avx512_bf16
from .launch import Launch, choose_num_threads, compile_kernel, define_job, helper
from .simd import (
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
FEW_TOKENS = 32 if has_amx() else 16 if has_avx512_bf16() else 4  # for which compact weights can be faster
SHORT_BYTES, LONG_BYTES = 1536, 2048  # of a tile
LINE = 64  # bytes of a cache line
TILES_AHEAD = 8  # from a tile to the one that is fetched meanwhile
CACHE_LEVEL = 1 if binding.get_host_cpu_name() == "znver5" else 2  # into which they are fetched
ALIGNMENT = 512  # bytes: of the tiles
HEADER_BYTES = 8  # before the index
_RANGE = 16  # exponents of a short tile
_EXPONENT, _IS_LONG, _OFFSET_SHIFT = 0x7F80, 1, 16  # in an entry of the index

Registers = Callable[[int, int], Any]
"""registers(pair, half) emits the register of an input pair and of a half of the outputs."""

Body = Callable[[Any, Registers, list[Any]], list[Any]]
"""body(tile, registers, values) emits a round of `emit_tiles`, and returns the values after it."""

_PACK_JOB, _PACK = define_job("weight out num_inputs num_outputs")


def compact_weights(weights: Tensor, allocate: Allocate = empty, max_tokens: int = FEW_TOKENS) -> Tensor:
    """Return compact weights, all as long as the longest, which are read for at most `max_tokens` tokens.

    Shapes: weights [num, out, in] bf16 in any strides, of sizes that `matmul.can_pack` -> [num, bytes] uint8.
    `allocate` makes the memory; an address that is a multiple of 64 is fastest. Raises: ValueError for more than
    FEW_TOKENS tokens.
    """
    if max_tokens > FEW_TOKENS:
        raise ValueError(f"max_tokens {max_tokens}: the limit is {FEW_TOKENS}")
    indices = [_make_index(weight.contiguous()) for weight in weights]
    data = allocate((len(indices), max(map(_num_bytes, indices))), torch.uint8)
    for row, weight, index in zip(data, weights, indices, strict=True):
        row[:HEADER_BYTES].view(torch.int64).fill_(max_tokens)
        _pack_into(row, weight.contiguous(), index)
    return data


def _make_index(weight: Tensor) -> Tensor:
    """Return the index of a packed weight."""
    num_outputs, num_inputs = weight.shape
    index = torch.empty(num_outputs // PANEL, num_inputs // PANEL, dtype=torch.int64)
    job = _PACK.pack(0, 0, weight.data_ptr(), index.data_ptr(), num_inputs, num_outputs)
    _index_kernel()(job, choose_num_threads(weight.numel()))
    sizes = torch.where(index & _IS_LONG > 0, LONG_BYTES, SHORT_BYTES).view(-1)
    first = -(-(HEADER_BYTES + index.nbytes) // ALIGNMENT) * ALIGNMENT
    return index.add_((sizes.cumsum(0) - sizes + first).view_as(index) << _OFFSET_SHIFT)


def _num_bytes(index: Tensor) -> int:
    last = int(index[-1, -1])
    return (last >> _OFFSET_SHIFT) + (LONG_BYTES if last & _IS_LONG else SHORT_BYTES)


def _pack_into(data: Tensor, weight: Tensor, index: Tensor) -> None:
    data[HEADER_BYTES : HEADER_BYTES + index.nbytes].copy_(index.view(-1).view(torch.uint8))
    job = _PACK.pack(0, 0, weight.data_ptr(), data.data_ptr(), weight.shape[1], weight.shape[0])
    _write_kernel()(job, choose_num_threads(weight.numel()))


def max_tokens_of(compact: Tensor) -> int:
    """Return the most tokens for which a compact weight is read."""
    return ctypes.c_int64.from_address(compact.data_ptr()).value


def restore(compact: Tensor, num_outputs: int, num_inputs: int) -> Tensor:
    """Return the weight [num_outputs, num_inputs] of a compact one. Slow."""
    num_panels, num_tiles = num_outputs // PANEL, num_inputs // PANEL
    index = compact[HEADER_BYTES:][: 8 * num_panels * num_tiles].view(torch.int64).view(num_panels, num_tiles)
    out = torch.empty(num_panels, num_tiles, 16, 2, 16, 2, dtype=torch.bfloat16)
    for panel, tile in np.ndindex(num_panels, num_tiles):
        entry = int(index[panel, tile])
        at = entry >> _OFFSET_SHIFT
        if entry & _IS_LONG:
            bits = compact[at : at + LONG_BYTES].view(torch.int16).to(torch.int32).view(16, 2, 32)
        else:
            words = compact[at : at + SHORT_BYTES].view(torch.int16).view(8, 3, 1, 32).to(torch.int32) & 0xFFFF
            codes, fractions = words[:, :1], torch.cat((words[:, 1:], words[:, 1:] << 8 | words[:, 1:] >> 8), 2)
            shifts = torch.tensor([[0, 4], [8, 12]]).view(1, 2, 2, 1)
            exponents = (codes >> shifts & 15) + ((entry & _EXPONENT) >> 7)
            bits = (fractions & 0x807F | exponents << 7).view(16, 2, 32)
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
        index = pointer(INT64, job.out + HEADER_BYTES)
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
    out, base = carray(_short_pointer(target), (8, 3, PANEL)), (entry & _EXPONENT) >> 7
    for row in range(16):
        low = carray(_short_pointer(source + row * stride), PANEL)
        high = carray(_short_pointer(source + (row + 16) * stride), PANEL)
        for pair in range(16):
            for side in range(2):
                a, b, place = low[2 * pair + side], high[2 * pair + side], 2 * row + side
                codes = ((a >> 7) & 0xFF) - base | (((b >> 7) & 0xFF) - base) << 4
                if pair % 2 == 0:
                    out[pair // 2, 0, place] = codes
                else:
                    out[pair // 2, 0, place] |= codes << 8
                out[pair // 2, 1 + pair % 2, place] = a & 0x807F | (b & 0x7F) << 8 | (b & 0x8000) >> 8


def _pointer_intrinsic(kind: types.Type) -> Any:
    """Return an intrinsic that makes a typed pointer of an integer address."""

    def typed(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    typed.__name__ = typed.__qualname__ = f"_{kind}_pointer"
    return simd_intrinsic(typed)


_int32_pointer, _short_pointer = map(_pointer_intrinsic, (types.int32, types.uint16))


@helper
def first_tile(compact: int, panel: int, num_tiles: int) -> int:
    """Return the address of a panel's first tile in a compact weight; 0 without one."""
    if compact == 0:
        return 0
    offset: int = pointer(INT64, index_address(compact, panel, num_tiles))[0] >> _OFFSET_SHIFT
    return compact + offset


@helper
def index_address(compact: int, panel: int, num_tiles: int) -> int:
    """Return the address of a panel's part of the index."""
    return compact + HEADER_BYTES + 8 * panel * num_tiles


def _emit_fetched_tile(builder: Any, tile: Any, number: Any, num_tiles: Any, following: Any) -> Any:
    """Emit the address of the tile to fetch while tile `number` of a panel, at address `tile`, is multiplied."""
    place = builder.sub(number, builder.sub(num_tiles, ir.Constant(I64, TILES_AHEAD)))  # in the panel that follows
    return builder.select(
        builder.icmp_signed("<", place, ir.Constant(I64, 0)),
        builder.add(tile, ir.Constant(I64, TILES_AHEAD * SHORT_BYTES)),
        builder.add(following, builder.mul(place, ir.Constant(I64, SHORT_BYTES))),
    )


def emit_tiles(
    builder: Any, native: bool, index: Any, data: Any, num_tiles: Any, following: Any, starts: list[Any], body: Body
) -> list[Any]:
    """Emit a loop over the tiles of a compact panel; return the values that its last round leaves.

    `index`, `data`: addresses of the panel's part of the index and of the compact weight. `starts`: the values before
    the first round. `native`: the CPU has AVX512BW. `following`: address of the tiles to fetch in the last rounds.
    """

    def emit_round(number: Any, values: list[Any]) -> list[Any]:
        weights = _tile_weights(builder, native, index, data, number, num_tiles, following)
        return weights.emit_either(lambda registers: body(number, registers, list(values)))

    return emit_loop(builder, num_tiles, starts, emit_round)


@simd_intrinsic
def restore_tile(
    typing: Any, native: Any, index: Any, data: Any, tile: Any, num_tiles: Any, following: Any, out: Any
) -> Any:
    """Write a tile of a panel as bf16 numbers in the order of a packed weight, and fetch a later one.

    `native`, `index`, `data`, `num_tiles`, `following`: as in `emit_tiles`. `out`: address of LONG_BYTES bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, index, data, number, num_tiles, following, out = args

        def write(registers: Registers) -> list[Any]:
            for pair in range(PANEL // 2):
                for half in range(2):
                    register, place = registers(pair, half), builder.add(out, ir.Constant(I64, 128 * pair + 64 * half))
                    builder.store(register, builder.inttoptr(place, register.type.as_pointer()), align=4)
            return []

        _tile_weights(builder, native.literal_value, index, data, number, num_tiles, following).emit_either(write)
        return context.get_dummy_value()

    return types.void(native, *(types.int64,) * 6), generate


def _tile_weights(
    builder: Any, native: bool, index: Any, data: Any, number: Any, num_tiles: Any, following: Any
) -> _TileWeights:
    entry = emit_load(builder, I64, builder.add(index, builder.mul(number, ir.Constant(I64, 8))))
    tile = builder.add(data, builder.ashr(entry, ir.Constant(I64, _OFFSET_SHIFT)))
    fetched = _emit_fetched_tile(builder, tile, number, num_tiles, following)
    return _TileWeights(builder, native, entry, tile, fetched)


class _TileWeights:
    """Emits the weights of a tile as registers of bf16 numbers, and the prefetches of another tile."""

    def __init__(self, builder: Any, native: bool, entry: Any, tile: Any, fetched: Any) -> None:
        self._builder, self._native, self._tile, self._fetched = builder, native, tile, fetched
        self._words = ir.VectorType(I16, 32)
        self._loaded: dict[int, Any] = {}
        self._is_long = builder.trunc(entry, ir.IntType(1))
        base = builder.and_(builder.trunc(entry, I16), ir.Constant(I16, _EXPONENT))
        self._base = emit_splat(builder, base, 32)
        self._table = builder.add(self._base, ir.Constant(self._words, [(i % _RANGE) << 7 for i in range(32)]))

    def emit_either(self, body: Callable[[Registers], list[Any]]) -> list[Any]:
        """Emit `body(registers)` for tiles stored as they are and for short ones; return the values it leaves."""
        builder, kinds = self._builder, (self._long, self._short)
        blocks, done = [builder.append_basic_block("weights") for _ in kinds], builder.append_basic_block("tile")
        builder.cbranch(self._is_long, *blocks)
        incoming = []
        for registers, block in zip(kinds, blocks, strict=True):
            builder.position_at_end(block)
            incoming.append((body(registers), builder.block))
            builder.branch(done)
        builder.position_at_end(done)
        after = []
        for place, value in enumerate(incoming[0][0]):
            phi = builder.phi(value.type)
            for found, block in incoming:
                phi.add_incoming(found[place], block)
            after.append(phi)
        return after

    def _long(self, pair: int, half: int) -> Any:
        if half == 0:
            self._prefetch(pair, LONG_BYTES // 16)
        return emit_load(self._builder, vector_type(16), self._tile, 128 * pair + 64 * half)

    def _short(self, pair: int, half: int) -> Any:
        builder = self._builder
        if half == 0:
            self._prefetch(pair, SHORT_BYTES // 16)
        group, side = divmod(pair, 2)
        codes, fractions = self._load(3 * group), self._load(3 * group + 1 + side)
        if side or half:
            codes = builder.lshr(codes, self._constant(8 * side + 4 * half))
        if half:  # exchange the bytes
            fractions = emit_call(builder, "llvm.fshl.v32i16", self._words, fractions, fractions, self._constant(8))
        fractions = builder.and_(fractions, self._constant(0x807F))
        return builder.bitcast(builder.or_(fractions, self._exponents(codes)), vector_type(16))

    def _load(self, line: int) -> Any:
        if line not in self._loaded:
            self._loaded[line] = emit_load(self._builder, self._words, self._tile, LINE * line)
        return self._loaded[line]

    def _exponents(self, codes: Any) -> Any:
        builder = self._builder
        if self._native:  # the table has every exponent twice, because bit 4 of an index may be set
            return emit_call(builder, "llvm.x86.avx512.permvar.hi.512", self._words, self._table, codes)
        low = builder.and_(codes, self._constant(_RANGE - 1))
        return builder.add(builder.shl(low, self._constant(7)), self._base)

    def _prefetch(self, pair: int, row_bytes: int) -> None:
        for line in range(-(-pair * row_bytes // LINE), -(-(pair + 1) * row_bytes // LINE)):
            emit_prefetch(self._builder, self._fetched, LINE * line, CACHE_LEVEL)

    def _constant(self, value: int) -> ir.Constant:
        return ir.Constant(self._words, [value] * 32)
