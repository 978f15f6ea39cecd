"""Parts of mixture-of-experts layers: one product for the tokens of each expert, all in one launch; routing; sums.

The panels and the ways to multiply are those of `matmul`, `int16` and `int8`. An item is one panel of 32 outputs of one
expert for a tile of its tokens. Threads take items from one counter, so they get equal work whatever the routing, and a
weight is read from memory once if its expert has no more tokens than a tile. With one token, only the weights of its
experts are read. As in those modules, a token's result does not depend on other tokens.

float32 and other shapes use a plain product of torch for each expert that has tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor
from torch.nn import functional

from ..experts import Allocate, ExpertWeights, empty, plain_weights
from . import int8, int16, matmul
from .bf16 import CONFIG_BYTES, has_amx, has_avx512_bf16, tile_configure, tile_release
from .compact import first_tile
from .int8 import has_avx512_vbmi, quantise
from .launch import Launch, choose_num_threads, compile_kernel, define_job, helper
from .matmul import GROUP_TOKENS, LINE_BYTES, PANEL, SCRATCH_FLOATS
from .simd import (
    BFLOAT16,
    FLOAT32,
    INT64,
    KINDS,
    LOG2E,
    add,
    exp2,
    fetch_add,
    first_lane,
    fma,
    load,
    maximum,
    minimum,
    mul,
    pointer,
    reduce_max,
    reduce_sum,
    splat,
    store,
    void_pointer,
    zeros,
)

MAX_TILE_BYTES = 512 << 10  # inputs of a tile, which stay in a core's cache while panels are read
MIN_PREFETCH_GROUPS = 3  # of tokens, with AMX: fewer wait for memory, which the CPU's own prefetches keep busier
LANES = 16

PLAN_JOB, PACK_PLAN_JOB = define_job("ids order tokens starts tiles num_pairs num_choices num_experts tile_tokens")
"""Addresses of int64 arrays and sizes; see `plan_pairs`. starts [num_experts + 1] is scratch."""

EXPERTS_JOB, PACK_EXPERTS_JOB = define_job(
    "x weight scales bias out scratch tiles configs num_inputs num_outputs row_bytes expert_bytes"
    " scratch_bytes_per_thread compact compact_bytes"
)
"""Addresses of contiguous arrays and sizes; bias and compact may be 0. x: rows of `row_bytes`, sorted by expert.

scratch: for each thread JOB_BYTES, then what the way to multiply needs.
"""

ROUTE_JOB, _PACK_ROUTE = define_job("logits scores ids weights num_tokens num_experts num_chosen is_normalised")
"""scores [num_tokens, num_experts] float32 is scratch."""

SHARED_JOB, _PACK_SHARED = define_job("x gate y out num_tokens num_inputs width")

COMBINE_JOB, PACK_COMBINE_JOB = define_job("y places weights out num_tokens num_choices width rows_per_item")

TILE_JOB, _ = define_job("x weight scales bias out num_tokens num_inputs num_outputs compact")
"""The fields of a MATMUL_JOB, a MULTIPLY_JOB or an INT8_JOB that the product of one tile needs."""

JOB_BYTES = 128  # of a thread's scratch: a TILE_JOB
PANEL_SCRATCH_BYTES = JOB_BYTES + 4 * SCRATCH_FLOATS  # of a thread, for panels in bf16


def pack_experts(
    weight: Tensor, bias: Tensor | None, *, is_int8: bool = False, allocate: Allocate = empty
) -> ExpertWeights:
    """Lay out the weights of one linear layer of all experts; `allocate` makes the memory.

    One expert at a time is copied, so the peak is both layouts of this layer. Weights that the kernels do not support
    stay as they are. Shapes: weight [num_experts, out, in] in any strides, bias [num_experts, out].
    """
    num_experts, num_outputs, num_inputs = weight.shape
    fits = num_outputs % PANEL == 0 and num_inputs % PANEL == 0 and weight.device.type == "cpu"
    dtypes = (torch.bfloat16, torch.float32) if is_int8 else (torch.bfloat16,)
    if not fits or weight.dtype not in dtypes:
        return plain_weights(weight, bias)
    panels = (num_experts, num_outputs // PANEL, num_inputs // PANEL)
    if not is_int8:
        packed = allocate((*panels, 16, 2, 16, 2), weight.dtype)
        for expert in range(num_experts):
            matmul.pack_into(packed[expert], weight[expert])
        return ExpertWeights(packed, _keep(bias, weight.dtype), num_outputs, num_inputs, "panels")
    unit = _int8_unit(weight.dtype)
    codes = allocate((*panels, 2, 512), torch.uint8)
    scales = torch.empty(num_experts, num_outputs)
    for expert in range(num_experts):
        numbers, scales[expert] = quantise(weight[expert])
        codes[expert].view(-1).copy_(int8.pack_numbers(numbers, unit).view(torch.uint8).view(-1))
    return ExpertWeights(codes, _keep(bias, torch.float32), num_outputs, num_inputs, unit, scales)


def _keep(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype).contiguous()


def _int8_unit(dtype: torch.dtype) -> str:
    return "int16" if dtype == torch.bfloat16 and int16.has_int16_products() else "floats"


def plan_pairs(expert_ids: Tensor, num_experts: int, tile_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert and divide the pairs of each expert into tiles.

    Returns (places, tokens, tiles), all int64: places [num_pairs]: where each pair is in sorted order, tokens
    [num_pairs]: the token of each place; tiles [1 + most, 3]: first (their number, 0, 0), then (expert, first place,
    end) of each, at most `tile_tokens` places.
    """
    num_tokens, num_choices = expert_ids.shape
    num_pairs = num_tokens * num_choices
    ids = expert_ids.to(torch.int64).contiguous()
    order, tokens = torch.empty(2, num_pairs, dtype=torch.int64)
    starts = torch.empty(num_experts + 1, dtype=torch.int64)
    tiles = torch.empty(max_tiles(num_pairs, num_experts, tile_tokens), 3, dtype=torch.int64)
    job = PACK_PLAN_JOB.pack(
        0, 0, ids.data_ptr(), order.data_ptr(), tokens.data_ptr(), starts.data_ptr(), tiles.data_ptr(), num_pairs,
        num_choices, num_experts, tile_tokens,
    )  # fmt: skip
    plan_kernel()(job, 1)
    return order, tokens, tiles


def choose_tile_tokens(num_inputs: int) -> int:
    """Return the most tokens of a tile, for experts with so many inputs."""
    return max(GROUP_TOKENS, min(1024, MAX_TILE_BYTES // (2 * num_inputs)))


def max_tiles(num_pairs: int, num_experts: int, tile_tokens: int) -> int:
    """Return the most lines of the tiles of `plan_pairs`."""
    return 1 + min(num_pairs, num_experts) + num_pairs // tile_tokens


@cache
def plan_kernel() -> Launch:
    """Return the launcher of `plan_pairs`, a single item. Its argument record is a PLAN_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, PLAN_JOB)[0]
        if fetch_add(address, 0, 1) > 0:
            return
        ids, order, tokens = pointer(INT64, job.ids), pointer(INT64, job.order), pointer(INT64, job.tokens)
        starts, tiles = pointer(INT64, job.starts), pointer(INT64, job.tiles)
        for expert in range(job.num_experts + 1):
            starts[expert] = 0
        for pair in range(job.num_pairs):
            starts[ids[pair] + 1] += 1
        count = 0
        for expert in range(job.num_experts):
            first = starts[expert]
            end = first + starts[expert + 1]
            starts[expert + 1] = end
            while first < end:
                count += 1
                tiles[3 * count], tiles[3 * count + 1] = expert, first
                first = min(end, first + job.tile_tokens)
                tiles[3 * count + 2] = first
        tiles[0], tiles[1], tiles[2] = count, 0, 0
        for pair in range(job.num_pairs):
            place = starts[ids[pair]]
            starts[ids[pair]] = place + 1
            order[pair], tokens[place] = place, pair // job.num_choices

    return compile_kernel(kernel)


def choose_experts(logits: Tensor, num_chosen: int, *, is_normalised: bool) -> tuple[Tensor, Tensor]:
    """Return the most probable experts of each token, best first, and the softmax of their logits in float32.

    `is_normalised`: the weights of a token add up to 1.
    Shapes: logits [num_tokens, num_experts], a multiple of `LANES` -> [num_tokens, num_chosen] int64, float32.
    """
    num_tokens = len(logits)
    ids, weights = torch.empty(num_tokens, num_chosen, dtype=torch.int64), torch.empty(num_tokens, num_chosen)
    scores = torch.empty(logits.shape)
    job = _PACK_ROUTE.pack(
        0, 0, logits.data_ptr(), scores.data_ptr(), ids.data_ptr(), weights.data_ptr(), *logits.shape, num_chosen,
        is_normalised,
    )  # fmt: skip
    route_kernel(KINDS[logits.dtype])(job, choose_num_threads(logits.numel()))
    return ids, weights


@cache
def route_kernel(kind: int) -> Launch:
    """Return the launcher of `choose_experts`. Its argument record is a ROUTE_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, ROUTE_JOB)[0]
        zero, num = zeros(LANES), job.num_experts
        logits, ids = pointer(kind, job.logits), pointer(INT64, job.ids)
        scores, weights = pointer(FLOAT32, job.scores), pointer(FLOAT32, job.weights)
        log2e = splat(zero, np.float32(LOG2E))
        token = fetch_add(address, 0, 1)
        while token < job.num_tokens:
            first, total, top = token * num, zero, splat(zero, np.float32(-np.inf))
            for i in range(first, first + num, LANES):
                value = load(zero, logits, i)
                store(scores, i, value)
                top = maximum(top, value)
            highest = splat(zero, np.float32(-reduce_max(top)))
            for i in range(first, first + num, LANES):
                value = exp2(mul(add(load(zero, scores, i), highest), log2e))
                store(scores, i, value)
                total = add(total, value)
            whole, chosen = reduce_sum(total), np.float32(0.0)
            for place in range(token * job.num_chosen, (token + 1) * job.num_chosen):
                best, expert = np.float32(-1.0), 0
                for i in range(num):
                    if scores[first + i] > best:
                        best, expert = scores[first + i], i
                scores[first + expert] = np.float32(-2.0)
                ids[place], weights[place] = expert, best
                chosen += best
            if job.is_normalised != 0:
                whole = chosen
            for place in range(token * job.num_chosen, (token + 1) * job.num_chosen):
                weights[place] /= whole
            token = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


def add_shared_expert(out: Tensor, y: Tensor, x: Tensor, gate: Tensor) -> None:
    """Add y * sigmoid(x . gate) to `out`, in place.

    Shapes: out, y [num_tokens, width], x [num_tokens, in], gate [in]; multiples of `LANES`, of one type.
    """
    job = _PACK_SHARED.pack(
        0, 0, x.data_ptr(), gate.data_ptr(), y.data_ptr(), out.data_ptr(), len(out), x.shape[1], out.shape[1]
    )
    shared_kernel(KINDS[out.dtype])(job, choose_num_threads(out.numel()))


@cache
def shared_kernel(kind: int) -> Launch:
    """Return the launcher of `add_shared_expert`. Its argument record is a SHARED_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, SHARED_JOB)[0]
        zero, num_inputs, width = zeros(LANES), job.num_inputs, job.width
        x, gate, y, out = pointer(kind, job.x), pointer(kind, job.gate), pointer(kind, job.y), pointer(kind, job.out)
        most = splat(zero, np.float32(126.0))
        token = fetch_add(address, 0, 1)
        while token < job.num_tokens:
            total = zero
            for i in range(0, num_inputs, LANES):
                total = fma(load(zero, x, token * num_inputs + i), load(zero, gate, i), total)
            power = minimum(splat(zero, np.float32(-LOG2E) * reduce_sum(total)), most)
            share = splat(zero, np.float32(1.0) / (np.float32(1.0) + first_lane(exp2(power))))
            for i in range(token * width, (token + 1) * width, LANES):
                store(out, i, fma(load(zero, y, i), share, load(zero, out, i)))
            token = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


def compact_fields(weights: ExpertWeights) -> dict[str, int]:
    """Return the fields of an EXPERTS_JOB for the compact weights, zeros without them."""
    if weights.compact is None:
        return {"compact": 0, "compact_bytes": 0}
    return {"compact": weights.compact.data_ptr(), "compact_bytes": weights.compact.stride(0)}


def panel_kernel() -> Launch:
    """Return the launcher of the fastest kernel for panels in bf16. Its argument record is an EXPERTS_JOB."""
    return _panel_kernel(has_amx(), has_avx512_bf16())


def multiply(x: Tensor, tokens: Tensor | None, weights: ExpertWeights, tiles: Tensor) -> Tensor:
    """Multiply sorted rows with the weights of their experts.

    Shapes: x [num_tokens, in]; with `tokens` [num_pairs] row i is x[tokens[i]] -> [num_pairs, out].
    """
    if weights.form == "plain":
        rows = x if tokens is None else x.index_select(0, tokens)
        return _multiply_plain(rows, weights, tiles)
    dtype = x.dtype
    x = x.contiguous()
    if weights.form == "int16":
        x = int16.quantise_tokens(x)
    if tokens is not None:
        x = x.index_select(0, tokens)
    out, threads = torch.empty(len(x), weights.num_outputs, dtype=dtype), torch.get_num_threads()
    each = {
        "panels": PANEL_SCRATCH_BYTES,
        "int16": JOB_BYTES + int16.SUMS_BYTES,
        "floats": JOB_BYTES + 2 * PANEL * weights.num_inputs,
    }[weights.form]
    scratch, bias, scales = torch.empty(threads * each, dtype=torch.uint8), weights.bias, weights.scales
    has_tiles = weights.form == "panels" and has_amx()
    job = PACK_EXPERTS_JOB.pack(
        0, 0, x.data_ptr(), weights.weight.data_ptr(), scales.data_ptr() if scales is not None else 0,
        bias.data_ptr() if bias is not None else 0, out.data_ptr(), scratch.data_ptr(), tiles.data_ptr(),
        group_configs().data_ptr() if has_tiles else 0, weights.num_inputs, weights.num_outputs, x.stride(0) *
        x.element_size(), weights.weight.stride(0) * weights.weight.element_size(), each,
        *compact_fields(weights).values(),
    )  # fmt: skip
    if weights.form == "panels":
        kernel = panel_kernel()
    elif weights.form == "int16":
        kernel = _int16_kernel(has_avx512_bf16())
    else:
        kernel = _row_kernel(has_avx512_vbmi(), KINDS[dtype])
    kernel(job, threads)
    return out


def _multiply_plain(rows: Tensor, weights: ExpertWeights, tiles: Tensor) -> Tensor:
    """Multiply sorted rows with the weights of their experts, by one product of torch for each tile."""
    out = torch.empty(len(rows), weights.num_outputs, dtype=rows.dtype)
    for expert, first, end in tiles[1 : 1 + int(tiles[0, 0])].tolist():
        bias = None if weights.bias is None else weights.bias[expert]
        out[first:end] = functional.linear(rows[first:end], weights.weight[expert], bias)
    return out


@cache
def group_configs() -> Tensor:
    """Return the AMX configurations for groups of 1 to 32 tokens, in ascending order, after an unused one."""
    return torch.cat([matmul.tile_configs(max(1, count))[CONFIG_BYTES:] for count in range(GROUP_TOKENS + 1)])


@helper
def _enter_tile(job: Any, mine: Any, tile: int, bias_size: int, out_size: int) -> None:
    """Write the TILE_JOB of a tile; `bias_size`, `out_size`: bytes of a number of the bias and of the outputs."""
    at = pointer(INT64, job.tiles + 24 * (tile + 1))
    expert, first = at[0], at[1]
    mine.x, mine.out = job.x + first * job.row_bytes, job.out + out_size * first * job.num_outputs
    mine.weight, mine.scales = job.weight + expert * job.expert_bytes, job.scales + 4 * expert * job.num_outputs
    mine.bias = job.bias + bias_size * expert * job.num_outputs if job.bias != 0 else 0
    mine.num_tokens, mine.num_inputs, mine.num_outputs = at[2] - first, job.num_inputs, job.num_outputs
    mine.compact = job.compact + expert * job.compact_bytes if job.compact != 0 else 0


@helper
def multiply_tiled(
    native: bool, job: Any, panel: int, next_panel: int, scratch: int, configs: int, configured: int
) -> int:
    """Multiply the tokens of a TILE_JOB with a panel by AMX; with many tokens, the next panel is prefetched meanwhile.

    Returns the number of tokens that AMX is configured for: `configured` before, by `configs` of `group_configs`.
    `native`, `scratch`: as in `multiply_group`, which leaves the last outputs to be written. A kernel calls this under
    a constant of its closure, so that it is compiled for AMX only: LLVM cannot generate AMX code for other CPUs, even
    if never reached.
    """
    num_groups = (job.num_tokens + GROUP_TOKENS - 1) // GROUP_TOKENS
    num_lines = PANEL // num_groups if num_groups >= MIN_PREFETCH_GROUPS else 0
    ahead = matmul.panel_address(job.weight, job.num_inputs, next_panel)
    for token in range(0, job.num_tokens, GROUP_TOKENS):
        count = min(GROUP_TOKENS, job.num_tokens - token)
        if count != configured:
            tile_configure(configs + count * CONFIG_BYTES)
            configured = count
        matmul.multiply_group(native, job, token, panel, scratch, next_panel, ahead, num_lines)
        ahead += num_lines * LINE_BYTES * (job.num_inputs // PANEL)
    return configured


@helper
def finish_tiles(native: bool, scratch: int, configured: int) -> None:
    """Write the last outputs and end the use of AMX, if there was an item."""
    if configured > 0:
        matmul.write_pending(native, scratch)
        tile_release()


@cache
def _panel_kernel(tiled: bool, native: bool) -> Launch:
    """Return the launcher of the bf16 kernel. Its argument record is an EXPERTS_JOB.

    `tiled`: use AMX; `native`: as in `matmul`.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, EXPERTS_JOB)[0]
        tiles, num_panels = pointer(INT64, job.tiles), job.num_outputs // PANEL
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        scratch = job.scratch + thread * job.scratch_bytes_per_thread
        mine = carray(void_pointer(scratch), 1, TILE_JOB)[0]
        configured, sums = 0, scratch + JOB_BYTES
        if tiled and item < tiles[0] * num_panels:
            matmul.start_pending(sums)
        while item < tiles[0] * num_panels:
            tile, panel = divmod(item, num_panels)
            _enter_tile(job, mine, tile, 2, 2)
            next_item = fetch_add(address, 0, 1)
            if tiled:
                next_panel = min(panel + 1, num_panels - 1)
                configured = multiply_tiled(native, mine, panel, next_panel, sums, job.configs, configured)
            else:
                next_tile, next_panel = divmod(min(next_item, tiles[0] * num_panels - 1), num_panels)
                expert = tiles[3 * next_tile + 3]
                weight = matmul.panel_address(job.weight + expert * job.expert_bytes, job.num_inputs, next_panel)
                compact = job.compact + expert * job.compact_bytes if job.compact != 0 else 0
                compact = first_tile(compact, next_panel, job.num_inputs // PANEL)
                matmul.multiply_pairs(native, mine, 0, mine.num_tokens, panel, sums, weight, compact)
            item = next_item
        if tiled:
            finish_tiles(native, sums, configured)

    return compile_kernel(kernel)


@cache
def _int16_kernel(native: bool) -> Launch:
    """Return the launcher of the int8 kernel with int16 activations. Its argument record is an EXPERTS_JOB.

    `native`: as in `int16`.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, EXPERTS_JOB)[0]
        tiles, num_panels = pointer(INT64, job.tiles), job.num_outputs // PANEL
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        scratch = job.scratch + thread * job.scratch_bytes_per_thread
        mine = carray(void_pointer(scratch), 1, TILE_JOB)[0]
        while item < tiles[0] * num_panels:
            tile, panel = divmod(item, num_panels)
            _enter_tile(job, mine, tile, 4, 2)
            int16.multiply_rows(native, mine, 0, mine.num_tokens, panel, scratch + JOB_BYTES)
            item = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


@cache
def _row_kernel(tables: bool, kind: int) -> Launch:
    """Return the launcher of the int8 kernel that computes in float32. Its argument record is an EXPERTS_JOB.

    `tables`, `kind`: as in `int8`.
    """
    itemsize = 2 if kind == BFLOAT16 else 4

    def kernel(address: Any) -> None:
        job = carray(address, 1, EXPERTS_JOB)[0]
        tiles, num_panels = pointer(INT64, job.tiles), job.num_outputs // PANEL
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        scratch = job.scratch + thread * job.scratch_bytes_per_thread
        mine = carray(void_pointer(scratch), 1, TILE_JOB)[0]
        while item < tiles[0] * num_panels:
            tile, panel = divmod(item, num_panels)
            _enter_tile(job, mine, tile, 4, itemsize)
            int8.multiply_rows(tables, kind, mine, 0, mine.num_tokens, panel, scratch + JOB_BYTES)
            item = fetch_add(address, 0, 1)

    return compile_kernel(kernel)


def combine(y: Tensor, places: Tensor, expert_weights: Tensor) -> Tensor:
    """Add the results of each token's pairs with their weights, in float32 and in the order of the token's experts.

    Shapes: y [num_pairs, width], places [num_pairs], expert_weights [num_tokens, k] -> [num_tokens, width].
    """
    num_tokens, num_choices = expert_weights.shape
    weights, out = expert_weights.float().contiguous(), torch.empty(num_tokens, y.shape[1], dtype=y.dtype)
    job = PACK_COMBINE_JOB.pack(
        0, 0, y.data_ptr(), places.data_ptr(), weights.data_ptr(), out.data_ptr(), num_tokens, num_choices, y.shape[1],
        max(1, min(16, num_tokens // 16)),
    )  # fmt: skip
    combine_kernel(KINDS[y.dtype])(job, choose_num_threads(y.numel()))
    return out


@cache
def combine_kernel(kind: int) -> Launch:
    """Return the launcher of the kernel of `combine`. Its argument record is a COMBINE_JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, COMBINE_JOB)[0]
        zero, width = zeros(LANES), job.width
        y, out = pointer(kind, job.y), pointer(kind, job.out)
        places, weights = pointer(INT64, job.places), pointer(FLOAT32, job.weights)
        token = fetch_add(address, 0, job.rows_per_item)
        while token < job.num_tokens:
            first = token * job.num_choices
            for i in range(0, width, LANES):
                total = zero
                for pair in range(first, first + job.num_choices):
                    total = fma(load(zero, y, places[pair] * width + i), splat(zero, weights[pair]), total)
                store(out, token * width + i, total)
            token += 1
            if token % job.rows_per_item == 0:
                token = fetch_add(address, 0, job.rows_per_item)

    return compile_kernel(kernel)
