"""Linear layers in bf16: of few tokens, limited by reading the weight once from memory, and with AMX also of many.

oneDNN does the same for many tokens, but each call costs tens of microseconds, as much as reading a weight at decode.
Here a weight is packed in the order in which it is read: panels of 32 outputs; in a panel 2 inputs at a time, as two
registers of (16 outputs, input pair). For AMX, 32 inputs are two interleaved tiles. Reading in strictly ascending order
keeps the hardware prefetcher close to the read bandwidth: with the two tiles one after the other and software
prefetches it was a third of that (Zen 4, one thread, one token). For few tokens the `compact` copy of a weight is read,
if there is one. Ways to multiply, best first: AMX tiles, pairs by AVX512-BF16, pairs widened to float32. In the last
two a token's sum does not depend on other tokens.

AMX multiplies 32 tokens at a time. An item is one panel for all tokens that stay in a cache, so that a panel comes from
memory once (two threads that took 32 tokens each: 64 took 1.25 times as long). Tiles of a compact weight are restored
to a thread's scratch just before they are loaded, for which the core has time while the memory delivers the next ones.
All products of the SmolLM2-135M shape on two threads of a Xeon with 23 GB/s went from 14 to 11.8 ms with 1 to 8 tokens,
from 19 to 15 ms with 32.

With many tokens, outputs are written while the next products are computed, and tokens are loaded past the first-level
cache, in which the panel stays: each alone makes 512 to 2,048 tokens up to 1.1 and 1.27 times as fast. oneDNN took 0.95
to 1.8 times as long with 96 to 512 tokens, 0.87 to 1.07 times with 2,048 (weights of the 135M and 0.6B shapes).

With 8 tokens or more, AVX512-BF16 takes about as long to compute as the memory to deliver a panel, and the CPU did one
after the other. So a thread takes its next item early and fetches that panel meanwhile (Zen 5, all products of the
SmolLM2-135M shape on two threads: 16 tokens from 11.6 to 9.3 ms, 32 from 15.8 to 12.7, 64 from 25.9 to 22.6).

Without bf16 products, with AVX2, a thread widens the inputs of a group of tokens to float32 once, and multiplies all
panels with them before the next group. With 6 tokens at once instead of 4, and the next panel fetched from 2 tokens on,
two threads of a Zen 3 went from 57 to 83 GFLOP/s with 8 tokens, from 93 to 137 with 32 and from 122 to 154 with 256;
their peak is 200, and float32 products of oneDNN reached 45, 107 and 139. With one token a thread takes several
neighbouring panels at once, since the hardware prefetcher starts anew where they end: 1.04 times as fast with the
products of the SmolLM2-135M shape, 1.01 times with one busy program next to it.

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

from ..experts import Allocate, empty
from .bf16 import (
    CONFIG_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    emit_dot_pairs,
    emit_widened,
    has_amx,
    has_avx512_bf16,
    store_bf16,
    store_bf16_pair,
    tile_clear,
    tile_config,
    tile_configure,
    tile_dot,
    tile_load,
    tile_load_once,
    tile_release,
    tile_store,
)
from .compact import FEW_TOKENS, emit_tiles, first_tile, index_address, max_tokens_of, restore_tile
from .launch import Launch, choose_num_threads, compile_kernel, define_job, helper
from .simd import (
    BFLOAT16,
    F32,
    FLOAT32,
    I64,
    INT32,
    INT64,
    add,
    emit_constant,
    emit_fma,
    emit_load,
    emit_loop,
    emit_prefetch,
    emit_splat,
    fetch_add,
    load,
    pointer,
    prefetch,
    simd_intrinsic,
    split_panel,
    store,
    vector_type,
    zeros,
)

PANEL = 32  # outputs of an item, and inputs of a step
GROUP_TOKENS = 2 * TILE_ROWS  # multiplied at once by AMX; without, tokens of an item
LINE_BYTES = 64
RESTORED_TILES = 4  # of a compact weight, which stay in the first-level cache; whole panels took 1.1 times as long
ROWS_PER_STEP = 2  # of pending outputs that are written while AMX multiplies 32 inputs
PENDING_BYTES, SUM_BYTES = 64, 4 * TILE_BYTES
SCRATCH_FLOATS = (PENDING_BYTES + 2 * SUM_BYTES + 2 * TILE_BYTES * RESTORED_TILES) // 4  # per thread
BLOCK_TOKENS = 8  # multiplied at once, at most, without AMX
FLOAT_TOKENS = 6  # the same without bf16 products; from so many tokens on, their inputs are widened first
HAS_COMPACT_BLOCKS = FEW_TOKENS >= BLOCK_TOKENS  # whether compact weights may be read for so many
MAX_MANY_INPUTS = 3072  # with AMX; oneDNN multiplies many tokens with longer panels faster, up to 1.3 times with 8192
SHARE_BYTES, MIN_SHARES = 512 << 10, 8  # of neighbouring panels, and per thread, to balance the load
BLOCK_BYTES, MIN_BLOCK_GROUPS = 1 << 20, 4  # of tokens that stay in a core's cache while all panels are read

WEIGHT_JOB, _PACK_WEIGHT = define_job("weight out num_inputs num_outputs")
MATMUL_JOB, PACK_MATMUL_JOB = define_job(
    "x weight bias out scratch configs num_tokens num_inputs num_outputs compact scratch_bytes_per_thread num_threads"
)
"""Addresses of contiguous arrays and sizes. bias and compact may be 0.

scratch: `scratch_bytes(num_inputs)` or more for each thread. configs: `tile_configs(T)`, for AMX only.
num_threads: those that share the work, see `num_panels_at_once`.
"""


def scratch_bytes(num_inputs: int, unit: str | None = None) -> int:
    """Return the scratch bytes of a thread: SCRATCH_FLOATS, and with the unit "floats" a group of tokens in float32."""
    return 4 * (SCRATCH_FLOATS + (GROUP_TOKENS * num_inputs if (unit or best_unit()) == "floats" else 0))


def pack_weight(weight: Tensor, allocate: Allocate = empty) -> Tensor:
    """Return the weight in the order in which the kernel reads it.

    Shapes: weight [out, in] -> [out / 32, in / 32, 16, 2, 16, 2]. `allocate` makes the memory; an address that is a
    multiple of 64 is fastest.
    """
    num_outputs, num_inputs = weight.shape
    packed = allocate((num_outputs // PANEL, num_inputs // PANEL, 16, 2, 16, 2), weight.dtype)
    pack_into(packed, weight)
    return packed


def pack_into(packed: Tensor, weight: Tensor) -> None:
    """Write what `pack_weight` returns to contiguous memory."""
    num_outputs, num_inputs = weight.shape
    weight = weight.contiguous()
    job = _PACK_WEIGHT.pack(0, 0, weight.data_ptr(), packed.data_ptr(), num_inputs, num_outputs)
    _pack_kernel()(job, choose_num_threads(weight.numel()))


@cache
def _pack_kernel() -> Launch:
    """Return the launcher of `pack_weight`, which moves pairs of inputs. Its argument record is a WEIGHT_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, WEIGHT_JOB)[0]
        source, out = pointer(INT32, job.weight), pointer(INT32, job.out)
        steps, pairs = job.num_inputs // PANEL, job.num_inputs // 2
        panel = fetch_add(address, 0, 1)
        while panel < job.num_outputs // PANEL:
            for step in range(steps):
                first, target = panel * PANEL * pairs + step * 16, (panel * steps + step) * 16 * PANEL
                for row in range(PANEL):
                    for pair in range(16):
                        out[target + pair * PANEL + row] = source[first + row * pairs + pair]
            panel = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


def can_pack(weight: Tensor) -> bool:
    """Return whether `pack_weight` and the kernel support a weight's dtype, device and shape."""
    fits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return fits and weight.shape[0] % PANEL == 0 and weight.shape[1] % PANEL == 0


def is_fast_for_many(num_inputs: int) -> bool:
    """Return whether `multiply` is about as fast as oneDNN, or faster, for any number of tokens."""
    return has_amx() and num_inputs <= MAX_MANY_INPUTS


def multiply(
    x: Tensor, packed: Tensor, bias: Tensor | None = None, unit: str | None = None, compact: Tensor | None = None
) -> Tensor:
    """Apply a bf16 linear layer with a packed weight: return x @ weight.T + bias.

    Shapes: see the module docstring. `compact`: the same weight, see the module of that name. `unit` selects the way to
    multiply (tiles | pairs | floats) in tests; None is the fastest this CPU supports.
    """
    return _multiply(x, packed, bias, unit, compact, packed.shape[0] * PANEL)


def multiply_few(x: Tensor, compact: Tensor, num_outputs: int, bias: Tensor | None = None) -> Tensor:
    """Apply a bf16 linear layer with a compact weight, as `multiply` does. Raises: ValueError for too many tokens."""
    max_tokens = max_tokens_of(compact)
    if len(x) > max_tokens:
        raise ValueError(f"{len(x)} tokens, but the limit is {max_tokens}")
    return _multiply(x, None, bias, None, compact, num_outputs)


def _multiply(
    x: Tensor, packed: Tensor | None, bias: Tensor | None, unit: str | None, compact: Tensor | None, num_outputs: int
) -> Tensor:
    x = x.contiguous()
    out = torch.empty(len(x), num_outputs, dtype=x.dtype)
    threads = torch.get_num_threads()
    each, configs = scratch_bytes(x.shape[1], unit), tile_configs(len(x))
    scratch = torch.empty(threads * each, dtype=torch.uint8)
    job = PACK_MATMUL_JOB.pack(
        0, 0, x.data_ptr(), _address(packed), _address(bias), out.data_ptr(), scratch.data_ptr(), configs.data_ptr(),
        len(x), x.shape[1], num_outputs, _address(compact), each, threads,
    )  # fmt: skip
    multiply_kernel(unit)(job, threads)
    return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def tile_configs(num_tokens: int) -> Tensor:
    """Return two AMX configurations: for a full group of 32 tokens, and for the last group.

    Tiles 0-3 are sums, 4-5 tokens, 6-7 weights.
    """
    last = (num_tokens - 1) % GROUP_TOKENS + 1
    first, second = min(last, TILE_ROWS), max(last - TILE_ROWS, 1)
    rows = [(16,) * 8, (first, first, second, second, first, second, 16, 16)]
    return torch.frombuffer(bytearray(b"".join(tile_config(each) for each in rows)), dtype=torch.uint8)


def best_unit() -> str:
    """Return the fastest way to multiply that this CPU supports: tiles | pairs | floats."""
    return "tiles" if has_amx() else "pairs" if has_avx512_bf16() else "floats"


def multiply_kernel(unit: str | None = None) -> Launch:
    """Return the launcher of the bf16 multiplication kernel.

    Its argument record is a MATMUL_JOB. `unit`: as in `multiply`.
    """
    unit = unit or best_unit()
    return _tile_kernel(has_avx512_bf16()) if unit == "tiles" else _pair_kernel(unit == "pairs")


@cache
def _tile_kernel(native: bool) -> Launch:
    """Return the launcher of the bf16 multiplication kernel that uses AMX tiles.

    `native`: round outputs by AVX512-BF16.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, MATMUL_JOB)[0]
        num_panels, num_groups = job.num_outputs // PANEL, (job.num_tokens + GROUP_TOKENS - 1) // GROUP_TOKENS
        most = max(MIN_BLOCK_GROUPS, BLOCK_BYTES // (2 * GROUP_TOKENS * job.num_inputs))
        block_groups = min(num_groups, most)
        num_blocks = (num_groups + block_groups - 1) // block_groups
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        scratch = job.scratch + thread * job.scratch_bytes_per_thread
        configured = -1
        if item < num_panels * num_blocks:
            start_pending(scratch)
        while item < num_panels * num_blocks:
            next_item = fetch_add(address, 0, 1)
            block, panel = divmod(item, num_panels)
            next_panel = next_item % num_panels
            end = min(num_groups, (block + 1) * block_groups)
            for group in range(block * block_groups, end):
                last = 1 if group == num_groups - 1 else 0
                if last != configured:
                    tile_configure(job.configs + last * CONFIG_BYTES)
                    configured = last
                multiply_group(native, job, group * GROUP_TOKENS, panel, scratch, next_panel)
            item = next_item
        if configured >= 0:
            write_pending(native, scratch)
            tile_release()

    return compile_kernel(kernel)


@helper
def reads_compact(job: Any) -> bool:
    """Return whether the tokens of a job are few enough to read the compact weight."""
    return bool(job.compact != 0 and job.num_tokens <= pointer(INT64, job.compact)[0])


@helper
def multiply_group(
    native: bool, job: Any, token: int, panel: int, scratch: int, next_panel: int, ahead: int = 0, num_lines: int = 0
) -> None:
    """Multiply a group of up to 32 tokens with a panel of 32 outputs, using AMX, and write the outputs before them.

    Its own outputs are written by the next call or `write_pending`, while AMX is busy. `scratch`: address of
    SCRATCH_FLOATS floats, see `start_pending`. Tiles of a compact weight are restored there, and the first ones of
    `next_panel` are fetched at the end. Each step of 32 inputs prefetches the next `num_lines` cache lines from `ahead`
    on.

    Tiles 0-3: sums; 4-5: tokens, which leave the weights in the first-level cache; 6-7: weights.
    """
    stride, steps = 2 * job.num_inputs, job.num_inputs // PANEL
    x, weight = job.x + token * stride, panel_address(job.weight, job.num_inputs, panel)
    index, following = index_address(job.compact, panel, steps), first_tile(job.compact, next_panel, steps)
    more, is_compact = job.num_tokens - token > TILE_ROWS, reads_compact(job)
    pending, sums = pointer(INT64, scratch), scratch + PENDING_BYTES
    source, target, row_bytes, bias, left = pending[0], pending[1], pending[2], pending[3], pending[4]
    restored = sums + 2 * SUM_BYTES
    if source == sums:
        sums += SUM_BYTES
    tile_clear(0)
    tile_clear(1)
    tile_clear(2)
    tile_clear(3)
    for step in range(steps):
        tile = weight + 2 * TILE_BYTES * step
        if is_compact:
            tile = restored + 2 * TILE_BYTES * (step % RESTORED_TILES)
            restore_tile(native, index, job.compact, step, steps, following, tile)
        tile_load_once(4, x + 64 * step, stride)
        tile_load(6, tile, 128)
        tile_load(7, tile + 64, 128)
        tile_dot(0, 4, 6)
        tile_dot(1, 4, 7)
        if more:
            tile_load_once(5, x + 64 * step + TILE_ROWS * stride, stride)
            tile_dot(2, 5, 6)
            tile_dot(3, 5, 7)
        for _ in range(num_lines):
            prefetch(pointer(FLOAT32, ahead), 0)
            ahead += LINE_BYTES
        for _ in range(min(left, ROWS_PER_STEP)):
            _write_row(native, source, target, bias)
            source, target, left = source + 4 * PANEL, target + row_bytes, left - 1
    _write_rows(native, source, target, row_bytes, bias, left)
    tile_store(0, sums, 128)
    tile_store(1, sums + 64, 128)
    if more:
        tile_store(2, sums + 2 * TILE_BYTES, 128)
        tile_store(3, sums + 2 * TILE_BYTES + 64, 128)
    pending[0], pending[1] = sums, job.out + 2 * (token * job.num_outputs + panel * PANEL)
    pending[2], pending[3] = 2 * job.num_outputs, job.bias + 2 * panel * PANEL if job.bias != 0 else 0
    pending[4] = min(GROUP_TOKENS, job.num_tokens - token)


@helper
def start_pending(scratch: int) -> None:
    """Prepare the scratch of `multiply_group`: there are no outputs to write.

    It begins with five integers: the address of the sums that are not yet written, of the outputs and the bytes from
    one row of them to the next, the address of the bias or 0, and the number of rows.
    """
    pending = pointer(INT64, scratch)
    for place in range(5):
        pending[place] = 0


@helper
def write_pending(native: bool, scratch: int) -> None:
    """Write the outputs of the last call of `multiply_group`."""
    pending = pointer(INT64, scratch)
    _write_rows(native, pending[0], pending[1], pending[2], pending[3], pending[4])
    pending[4] = 0


@helper
def _write_rows(native: bool, source: int, target: int, row_bytes: int, bias: int, count: int) -> None:
    for row in range(count):
        _write_row(native, source + 4 * PANEL * row, target + row_bytes * row, bias)


@helper
def _write_row(native: bool, source: int, target: int, bias: int) -> None:
    """Write 32 outputs of a token from their sums; addresses, `bias` may be 0."""
    sums, out, zero = pointer(FLOAT32, source), pointer(BFLOAT16, target), zeros(16)
    low, high = load(zero, sums, 0), load(zero, sums, 16)
    if bias != 0:
        numbers = pointer(BFLOAT16, bias)
        low, high = add(low, load(zero, numbers, 0)), add(high, load(zero, numbers, 16))
    if native:
        store_bf16_pair(out, 0, low, high)
    else:
        store_bf16(native, out, 0, low)
        store_bf16(native, out, 16, high)


@cache
def _pair_kernel(native: bool) -> Launch:
    """Return the launcher of the bf16 multiplication kernel that does not need AMX.

    `native`: multiply pairs by AVX512-BF16, else widened to float32.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, MATMUL_JOB)[0]
        num_panels, num_groups = job.num_outputs // PANEL, (job.num_tokens + GROUP_TOKENS - 1) // GROUP_TOKENS
        size = 1 if native else num_panels_at_once(job)  # of a share: items that a thread takes together
        item, thread = fetch_add(address, 0, size), fetch_add(address, 1, 1)
        sums = job.scratch + thread * job.scratch_bytes_per_thread
        floats, widened = sums + 4 * SCRATCH_FLOATS, -1
        while item < num_panels * num_groups:
            next_item = item + 1 if (item + 1) % size != 0 else fetch_add(address, 0, size)
            if native:
                panel, group = divmod(item, num_groups)
                next_panel = min(next_item // num_groups, num_panels - 1)
            else:  # a group stays the same for a while
                group, panel = divmod(item, num_panels)
                next_panel = next_item % num_panels
            token, end = group * GROUP_TOKENS, min((group + 1) * GROUP_TOKENS, job.num_tokens)
            next_weight = panel_address(job.weight, job.num_inputs, next_panel)
            if not native and end - token >= FLOAT_TOKENS and not reads_compact(job):
                if widened != group:
                    widen(job.x + 2 * token * job.num_inputs, floats, (end - token) * job.num_inputs)
                    widened = group
                multiply_floats(job, token, end, panel, sums, next_weight, floats)
            else:
                next_tile = first_tile(job.compact, next_panel, job.num_inputs // PANEL)
                multiply_pairs(native, job, token, end, panel, sums, next_weight, next_tile)
            item = next_item

    return compile_kernel(kernel)


@helper
def num_panels_at_once(job: Any) -> int:
    """Return how many neighbouring panels a thread takes at once without bf16 products: several with one token."""
    if job.num_tokens > 1:
        return 1
    share = job.num_outputs // PANEL // (MIN_SHARES * job.num_threads)
    return int(max(1, min(share, SHARE_BYTES // (2 * PANEL * job.num_inputs))))


@helper
def multiply_panel(native: bool, job: Any, panel: int, next_panel: int, sums: int, floats: int) -> None:
    """Multiply all tokens with a panel without AMX; another panel of the weight is fetched meanwhile.

    `floats`: address of the inputs in float32, see `widen`; not read if `native`.
    """
    next_weight = panel_address(job.weight, job.num_inputs, next_panel)
    if native:
        next_tile = first_tile(job.compact, next_panel, job.num_inputs // PANEL)
        multiply_pairs(native, job, 0, job.num_tokens, panel, sums, next_weight, next_tile)
    else:
        multiply_floats(job, 0, job.num_tokens, panel, sums, next_weight, floats)


@helper
def panel_address(weight: int, num_inputs: int, panel: int) -> int:
    """Return the address of a panel of a weight."""
    return weight + panel * PANEL * 2 * num_inputs


@helper
def multiply_pairs(
    native: bool, job: Any, token: int, end: int, panel: int, sums: int, next_weight: int, next_tile: int
) -> None:
    """Multiply the tokens from `token` to `end` with a panel, without AMX; `sums`: address of SCRATCH_FLOATS floats.

    `next_weight`, `next_tile`: addresses of the panel and of the first compact tile that are fetched meanwhile.
    """
    stride, steps = 2 * job.num_inputs, job.num_inputs // PANEL
    weight = panel_address(job.weight, job.num_inputs, panel)
    compact, index = job.compact, index_address(job.compact, panel, steps)
    if not reads_compact(job):
        compact = 0
    while token < end:
        count, x = end - token, job.x + token * stride
        if count >= 8:
            count = 8
            if HAS_COMPACT_BLOCKS and compact != 0:
                dot_tiles(native, 8, x, stride, compact, index, steps, sums, next_tile)
            else:
                dot_block(native, False, 8, x, stride, weight, steps, sums, next_weight)
        elif count >= 4:
            count = 4
            if compact != 0:
                dot_tiles(native, 4, x, stride, compact, index, steps, sums, next_tile)
            else:
                dot_block(native, False, 4, x, stride, weight, steps, sums, next_weight)
        elif count >= 2:
            count = 2
            if compact != 0:
                dot_tiles(native, 2, x, stride, compact, index, steps, sums, next_tile)
            else:
                dot_block(native, False, 2, x, stride, weight, steps, sums, next_weight)
        elif compact != 0:
            dot_tiles(native, 1, x, stride, compact, index, steps, sums, next_tile)
        else:
            dot_block(native, False, 1, x, stride, weight, steps, sums, next_weight)
        _write_block(native, job, token, count, panel, sums)
        token += count


@helper
def widen(numbers: int, out: int, count: int) -> None:
    """Write `count` bf16 numbers, a multiple of 16, as float32. `numbers`, `out`: addresses."""
    source, target, zero = pointer(BFLOAT16, numbers), pointer(FLOAT32, out), zeros(16)
    for i in range(0, count, 16):
        store(target, i, load(zero, source, i))


@helper
def multiply_floats(job: Any, token: int, end: int, panel: int, sums: int, next_weight: int, floats: int) -> None:
    """Multiply the tokens from `token` to `end` with a panel, as `multiply_pairs` does.

    `floats`: address of their inputs, see `widen`.
    """
    stride, steps, x = 4 * job.num_inputs, job.num_inputs // PANEL, floats
    weight = panel_address(job.weight, job.num_inputs, panel)
    while token < end:
        count = end - token
        if count >= FLOAT_TOKENS and count != 8:  # two blocks of 4 are faster than 6 and 2
            count = FLOAT_TOKENS
            dot_block(False, True, FLOAT_TOKENS, x, stride, weight, steps, sums, next_weight)
        elif count >= 4:
            count = 4
            dot_block(False, True, 4, x, stride, weight, steps, sums, next_weight)
        elif count >= 2:
            count = 2
            dot_block(False, True, 2, x, stride, weight, steps, sums, next_weight)
        else:
            dot_block(False, True, 1, x, stride, weight, steps, sums, next_weight)
        _write_block(False, job, token, count, panel, sums)
        token, x = token + count, x + count * stride


@helper
def _write_block(native: bool, job: Any, token: int, count: int, panel: int, sums: int) -> None:
    """Write the outputs of `count` tokens for one panel from their sums [count, 32] float32."""
    bias = job.bias + 2 * panel * PANEL if job.bias != 0 else 0
    target = job.out + 2 * (token * job.num_outputs + panel * PANEL)
    _write_rows(native, sums, target, 2 * job.num_outputs, bias, count)


@simd_intrinsic
def dot_tiles(
    typing: Any, native: Any, count: Any, x: Any, stride: Any, compact: Any, index: Any, num_steps: Any, sums: Any,
    following: Any,
) -> Any:  # fmt: skip
    """Multiply tokens as `dot_block` does with a panel of a compact weight.

    `compact`, `index`: addresses of the weight and of this panel's part of its index. `following`: as in `emit_tiles`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_native, rows = native.literal_value, range(count.literal_value)
        block = _Block(builder, is_native, rows, range(2), args[2], args[3])
        tiles = args[5], args[4], args[6], args[8]
        block.store(args[7], emit_tiles(builder, is_native, *tiles, block.starts, block.multiply))
        return context.get_dummy_value()

    return types.void(native, count, *(types.int64,) * 7), generate


@simd_intrinsic
def dot_block(
    typing: Any, native: Any, widened: Any, count: Any, x: Any, stride: Any, weight: Any, num_steps: Any, sums: Any,
    ahead: Any,
) -> Any:  # fmt: skip
    """Multiply `count` (a literal) tokens with a panel, and fetch another one, at `ahead`; write the sums [count, 32].

    `x`, `weight`, `sums`: addresses; `stride`: bytes from one token to the next. There is at least one step of 32
    inputs. `native`: as in `dot_pairs`. `widened` (a literal): the inputs are float32, else bf16. Sums are float32.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_native, is_widened, num_rows = native.literal_value, widened.literal_value, count.literal_value
        wide, fetches = vector_type(16), num_rows >= (8 if is_native else 2)
        _, _, _, x, stride, weight, num_steps, sums, ahead = args
        for rows, halves in split_panel(num_rows, FLOAT_TOKENS if is_widened else 4):
            block = _Block(builder, is_native, rows, halves, x, stride, is_widened)

            def multiply_step(step: Any, totals: list[Any], block: _Block = block, rows: range = rows) -> list[Any]:
                start = builder.mul(step, ir.Constant(I64, 2 * PANEL * PANEL))
                panel, fetched = builder.add(weight, start), builder.add(ahead, start)

                def load_weights(pair: int, half: int) -> Any:
                    if fetches and rows.start == 0:
                        emit_prefetch(builder, fetched, 128 * pair + 64 * half, 2)
                    return emit_load(builder, wide, panel, 128 * pair + 64 * half)

                return block.multiply(step, load_weights, totals)

            block.store(sums, emit_loop(builder, num_steps, block.starts, multiply_step))
        return context.get_dummy_value()

    return types.void(native, widened, count, *(types.int64,) * 6), generate


class _Block:
    """Emits the products of a few tokens (`rows`) with the steps of a panel, or of a half of it.

    `widened`: their inputs are float32.
    """

    def __init__(
        self, builder: Any, native: bool, rows: range, halves: range, x: Any, stride: Any, widened: bool = False
    ) -> None:
        self._builder, self._native, self._halves, self._widened = builder, native, halves, widened
        self._rows = {row: builder.add(x, builder.mul(stride, ir.Constant(I64, row))) for row in rows}
        self.starts = [emit_constant(16, 0.0)] * (len(rows) * len(halves))

    def multiply(self, step: Any, weights: Callable[[int, int], Any], totals: list[Any]) -> list[Any]:
        """Emit the addition of a step's products to the sums; `weights(pair, half)` emits a register of weights."""
        builder, size = self._builder, 8 if self._widened else 4

        def add_pairs(total: Any, pairs: Any, numbers: Any) -> Any:
            return emit_dot_pairs(builder, self._native, total, pairs, numbers)

        def add_product(total: Any, weights: Any, number: Any) -> Any:
            return emit_fma(builder, weights, number, total)

        start = builder.mul(step, ir.Constant(I64, PANEL // 2 * size))
        inputs = [builder.add(row, start) for row in self._rows.values()]
        for pair in range(PANEL // 2):
            registers = [weights(pair, half) for half in self._halves]
            if not self._widened:
                self._add_products(totals, inputs, size * pair, registers, add_pairs)
                continue
            for side in range(2):
                numbers = [emit_widened(builder, each, side) for each in registers]
                self._add_products(totals, inputs, size * pair + 4 * side, numbers, add_product)
        return totals

    def _add_products(
        self, totals: list[Any], inputs: list[Any], offset: int, weights: list[Any], add: Callable[..., Any]
    ) -> None:
        """Emit the addition of the products of each token's input, or pair of inputs, with registers of weights."""
        at = 0
        for place in inputs:
            number = emit_splat(self._builder, emit_load(self._builder, F32, place, offset), 16)
            for each in weights:
                totals[at] = add(totals[at], each, number)
                at += 1

    def store(self, sums: Any, totals: list[Any]) -> None:
        """Emit the stores of the sums."""
        places = [2 * row + half for row in self._rows for half in self._halves]
        for place, total in zip(places, totals, strict=True):
            target = self._builder.add(sums, ir.Constant(I64, 64 * place))
            self._builder.store(total, self._builder.inttoptr(target, total.type.as_pointer()), align=4)
