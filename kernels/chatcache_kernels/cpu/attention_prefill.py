"""Paged attention for rows of many new tokens: prefill, chunks, a turn after a long history.

An item is (row, some of its tokens, key head): all G query heads of those tokens against every key they see. A block of
BLOCK_KEYS keys and values is repacked, then all queries pass over it, 32 at a time: scores, online softmax in float32
registers, weighted values. Blocks in a query's future, or before its window, are skipped. Results do not depend on the
item, the batch or the threads. The running maximum is lazy: sums are rescaled only if a score exceeds it by
RESCALE_THRESHOLD, so most lines need no reduction over lanes.

Ways to multiply, best first (`choose_unit`):

    tiles   AMX. Keys and values are rows of pages interleaved in pairs, which fits both [D, P] keys and [P, D] values;
            queries and softmax weights are bf16
    pairs   AVX512-BF16, by `dot_rows` over the same layout
    floats  all in float32, by `dot_floats`: for other CPUs, and models in float32 or float16

M = number of queries of an item rounded up to a multiple of 32; query m = token * G + head in group; E = D, for bf16
rounded up to 32. Scratch of a thread: acc [M, D] float32, q [M, E], row_sums [M, 16] float32 (by lane), row_max [M]
float32, limits [M] int32 (keys from there on are in the future); keys [BLOCK_KEYS, E], values [BLOCK_KEYS, D], scores
[32, BLOCK_KEYS] float32, weights [32, BLOCK_KEYS] bf16 of one block (in float32 they replace the scores); a row of
zeros. Numbers without a type are bf16 or float32.

On one core of a Sapphire Rapids, 9 heads of 64 over 3 key heads, page size 16: 2,048 tokens took 9 ms with AMX and 20
ms with torch's flash attention; 32 tokens after 2,048 took 0.4 ms and 1.5 ms. On one core of a Zen 4 without AMX, 2,048
tokens took 29 ms and 79 ms, 512 tokens 2.2 and 9.8 ms. In float32 on one core of a Zen 5: 23 and 68 ms, 1.6 and 8.2
ms; in bf16 with its AVX2 instructions only: 49 and 72 ms, 3.3 and 8.9 ms.

Source: Dao (2023), FlashAttention-2; Milakov and Gimelshein (2018).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ..types import AttentionBatch, KVPages
from .attention_tile import apply_softcap
from .bf16 import (
    ROWS,
    TILE_BYTES,
    TILE_ROWS,
    any_lane_greater,
    dot_rows,
    exp2_approx,
    has_amx,
    has_avx512_bf16,
    load_interleaved,
    store_bf16_pair,
    tile_clear,
    tile_config,
    tile_configure,
    tile_dot,
    tile_load,
    tile_release,
    tile_store,
)
from .launch import Launch, compile_kernel, define_job, helper
from .simd import (
    BFLOAT16,
    FLOAT32,
    FLOAT_HALVES,
    FLOAT_ROWS,
    INT32,
    KINDS,
    LOG2E,
    add,
    dot_floats,
    exp2,
    fetch_add,
    first_lane,
    fma,
    load,
    load_any,
    mask_lanes,
    maximum,
    mul,
    num_lanes,
    pointer,
    reduce_max,
    reduce_sum,
    splat,
    store,
    store_any,
    zeros,
)

BLOCK_KEYS = 128  # keys of a block: with scores and weights they fit the L1 cache
RESCALE_THRESHOLD = 8.0  # log2 by which a score may exceed the running maximum before sums are rescaled


def _make_online_softmax(exponentiate: Any, weight_bytes: int) -> Any:
    """Return the helper of a block's softmax; `exponentiate` writes the weights, of `weight_bytes` each."""

    @helper
    def online_softmax(
        zero: Any, scores: int, weights: int, sums: int, acc: int, row_maxes: int, limits: int, num: int, first: int,
        columns: int, dim: int, window: int, scale: Any, softcap: Any,
    ) -> None:  # fmt: skip
        """Turn the scores of `num` queries for a block of keys into softmax weights, not normalised.

        The weights are added to the queries' sums; where a maximum grows much, sums and acc are rescaled. `first`:
        position of the block's first key; `columns`: number of its keys. scores .. limits are addresses.
        """
        lanes, row_max, limit = num_lanes(zero), pointer(FLOAT32, row_maxes), pointer(INT32, limits)
        factor = np.float32(scale * np.float32(LOG2E))
        if softcap > 0:
            _apply_softcap(zero, scores, num, columns, scale, softcap)
            factor = np.float32(1.0)
        if limit[0] - first < columns or (window > 0 and limit[num - 1] - window > first):
            _mask_scores(zero, scores, limits, num, first, columns, window)
        by = splat(zero, factor)
        for query in range(num):
            line, own = pointer(FLOAT32, scores), pointer(FLOAT32, sums + 64 * query)
            top, other = load(zero, line, 0), load(zero, line, lanes)
            for t in range(2 * lanes, columns, 2 * lanes):
                top, other = maximum(top, load(zero, line, t)), maximum(other, load(zero, line, t + lanes))
            top, new_max = mul(maximum(top, other), by), row_max[query]
            if any_lane_greater(top, np.float32(new_max + np.float32(RESCALE_THRESHOLD))):
                row_max[query] = reduce_max(top)
                _rescale(zero, acc + 4 * dim * query, dim, own, np.float32(new_max - row_max[query]))
                new_max = row_max[query]
            shift = splat(zero, np.float32(-new_max) if new_max > -np.inf else np.float32(0.0))
            if columns == BLOCK_KEYS:
                exponentiate(zero, line, weights, own, by, shift, BLOCK_KEYS)
            else:
                exponentiate(zero, line, weights, own, by, shift, columns)
            scores += 4 * BLOCK_KEYS
            weights += weight_bytes * BLOCK_KEYS

    return online_softmax


@helper
def _exponentiate_bf16(zero: Any, scores: Any, weights: int, sums: Any, scale: Any, shift: Any, columns: int) -> None:
    """Write a query's softmax weights, 2 ** (scores * scale + shift), and add them to its sums."""
    total_low, total_high, out = load(zero, sums, 0), zero, pointer(BFLOAT16, weights)
    for t in range(0, columns, 32):
        low = exp2_approx(fma(load(zero, scores, t), scale, shift))
        high = exp2_approx(fma(load(zero, scores, t + 16), scale, shift))
        store_bf16_pair(out, t, low, high)
        total_low, total_high = add(total_low, low), add(total_high, high)
    store(sums, 0, add(total_low, total_high))


@helper
def _exponentiate_floats(zero: Any, scores: Any, weights: int, sums: Any, scale: Any, shift: Any, columns: int) -> None:
    """Do what `_exponentiate_bf16` does, in float32."""
    lanes, total, out = num_lanes(zero), load(zero, sums, 0), pointer(FLOAT32, weights)
    for t in range(0, columns, lanes):
        weight = exp2(fma(load(zero, scores, t), scale, shift))
        store(out, t, weight)
        total = add(total, weight)
    store(sums, 0, total)


_softmax_bf16 = _make_online_softmax(_exponentiate_bf16, 2)
_softmax_floats = _make_online_softmax(_exponentiate_floats, 4)


@helper
def _apply_softcap(zero: Any, scores: int, num: int, columns: int, scale: Any, softcap: Any) -> None:
    """Apply scale and softcap to the scores of `num` queries, in place."""
    for _ in range(num):
        line = pointer(FLOAT32, scores)
        for t in range(0, columns, num_lanes(zero)):
            store(line, t, apply_softcap(zero, mul(load(zero, line, t), splat(zero, scale)), softcap))
        scores += 4 * BLOCK_KEYS


@helper
def _mask_scores(zero: Any, scores: int, limits: int, num: int, first: int, columns: int, window: int) -> None:
    """Set scores of keys in a query's future or before its window to -inf."""
    lanes = num_lanes(zero)
    for n in range(num):
        line, end = pointer(FLOAT32, scores), pointer(INT32, limits)[n] - first
        begin = end - window if window > 0 else 0
        for t in range(0, columns, lanes):
            if begin > t or end < t + lanes:
                store(line, t, mask_lanes(load(zero, line, t), begin - t, end - t, np.float32(-np.inf)))
        scores += 4 * BLOCK_KEYS


@helper
def _rescale(zero: Any, acc: int, dim: int, sums: Any, growth: Any) -> None:
    """Multiply a query's acc and sum of weights by 2 ** growth, because its maximum has grown.

    `growth`: the old maximum minus the new one, so it is negative.
    """
    decay, values = exp2(splat(zero, growth)), pointer(FLOAT32, acc)
    for d in range(0, dim, num_lanes(zero)):
        store(values, d, mul(load(zero, values, d), decay))
    store(sums, 0, mul(load(zero, sums, 0), decay))


BLOCK_QUERIES = 2 * TILE_ROWS  # queries that pass over a block at a time


def scratch_bytes(queries: int, head_dim: int, is_bf16: bool) -> int:
    """Return the scratch bytes that one thread needs for items of `queries` queries."""
    wide, size = (_round_up_to_tiles(head_dim), 2) if is_bf16 else (head_dim, 4)
    queries = -(-queries // BLOCK_QUERIES) * BLOCK_QUERIES
    return (
        queries * (4 * head_dim + size * wide + 72)
        + BLOCK_KEYS * size * (wide + head_dim)
        + BLOCK_QUERIES * BLOCK_KEYS * 6
        + size * wide
    )


def _round_up_to_tiles(head_dim: int) -> int:
    """Return the head size rounded up to a multiple of 32, the width of an AMX tile in bf16."""
    return -(-head_dim // 32) * 32


@helper
def _padded_dim(job: Any) -> Any:
    """Return E, see above."""
    return (job.head_dim + 31) // 32 * 32 if job.number_bytes == 2 else job.head_dim


@helper
def scratch_layout(job: Any, thread: int) -> Any:
    """Return the addresses of a thread's scratch arrays.

    In this order: acc, q, row_max, row_sums, limits, keys, values, scores, weights, a row of zeros.
    """
    dim, wide, size = job.head_dim, _padded_dim(job), job.number_bytes
    most = (job.block_tokens * (job.num_heads // job.num_kv_heads) + BLOCK_QUERIES - 1) // BLOCK_QUERIES * BLOCK_QUERIES
    each = most * (4 * dim + size * wide + 72) + BLOCK_KEYS * size * (wide + dim)
    each += BLOCK_QUERIES * BLOCK_KEYS * 6 + size * wide
    acc = job.scratch + thread * each
    q = acc + most * 4 * dim
    row_sums = q + most * size * wide
    row_max = row_sums + most * 64
    limits = row_max + most * 4
    keys = limits + most * 4
    values = keys + BLOCK_KEYS * size * wide
    scores = values + BLOCK_KEYS * size * dim
    weights = scores + BLOCK_QUERIES * BLOCK_KEYS * 4
    return acc, q, row_max, row_sums, limits, keys, values, scores, weights, weights + BLOCK_QUERIES * BLOCK_KEYS * 2


@helper
def _pack_pairs(job: Any, zero: Any, part: Any, thread: int, row: int, head: int, first: int, count: int) -> None:
    """Copy keys and values of `count` positions from `first` on into the layout of AMX tiles.

    keys: [BLOCK_KEYS / 16, E / 32] tiles of [16 pairs of dimensions, 16 keys, 2], where E is the head dimension D
    rounded up to 32; values: [BLOCK_KEYS / 32, D / 16] tiles of [16 pairs of keys, 16 dimensions, 2]. The rest of the
    block is undefined and must be masked.
    """
    dim, wide, size, lanes = job.head_dim, (job.head_dim + 31) // 32 * 32, job.page_size, num_lanes(part)
    table = pointer(INT32, job.tables + 4 * row * job.table_stride)
    _, _, _, _, _, keys, values, _, _, nothing = scratch_layout(job, thread)
    for t in range(0, count, lanes):
        page = (table[(first + t) // size] * job.num_kv_heads + head) * size * dim
        source = job.k + 2 * (page + (first + t) % size)
        for d in range(0, wide, 2):
            at = (t // 16 * wide // 32 + d // 32) * TILE_BYTES + d % 32 * 32 + t % 16 * 4
            even = source + 2 * d * size if d < dim else nothing
            odd = source + 2 * (d + 1) * size if d < dim else nothing
            store(pointer(FLOAT32, keys + at), 0, load_interleaved(part, even, odd))
    for t in range(0, (count + 31) // 32 * 32, 2):
        even, odd, step = nothing, nothing, 0
        if t < count:
            page = (table[(first + t) // size] * job.num_kv_heads + head) * size * dim
            even, step = job.v + 2 * (page + (first + t) % size * dim), 2
            odd = even + 2 * dim if t + 1 < count else nothing
        target = values + t // 32 * (dim // 16) * TILE_BYTES + t % 32 * 32
        for d in range(0, dim, 16):
            pair = load_interleaved(zero, even + step * d, odd + 2 * d)
            store(pointer(FLOAT32, target + d // 16 * TILE_BYTES), 0, pair)


@helper
def _pack_floats(job: Any, zero: Any, part: Any, thread: int, row: int, head: int, first: int, count: int) -> None:
    """Copy keys and values of `count` positions from `first` on as float32.

    keys: [BLOCK_KEYS / lanes, D, lanes]; values: [D / lanes, BLOCK_KEYS, lanes]. The rest of the block is as in
    `_pack_pairs`.
    """
    dim, size, lanes = job.head_dim, job.page_size, num_lanes(part)
    table = pointer(INT32, job.tables + 4 * row * job.table_stride)
    _, _, _, _, _, keys, values, _, _, _ = scratch_layout(job, thread)
    for t in range(0, count, lanes):
        source = (table[(first + t) // size] * job.num_kv_heads + head) * size * dim + (first + t) % size
        target = pointer(FLOAT32, keys + 4 * t * dim)
        for d in range(dim):
            store(target, d * lanes, load_any(job.page_kind, zero, job.k, source + d * size))
    target = pointer(FLOAT32, values)
    for t in range((count + 31) // 32 * 32):
        if t >= count:
            for d in range(0, dim, lanes):
                store(target, d * BLOCK_KEYS + t * lanes, zero)
            continue
        page = (table[(first + t) // size] * job.num_kv_heads + head) * size * dim
        source = page + (first + t) % size * dim
        for d in range(0, dim, lanes):
            store(target, d * BLOCK_KEYS + t * lanes, load_any(job.page_kind, zero, job.v, source + d))


@helper
def _multiply_rows(
    zero: Any, halves: int, keep: bool, num: int, x: int, stride: int, tiles: int, half_bytes: int, num_inputs: int,
    out: int, out_stride: int,
) -> None:  # fmt: skip
    """Multiply `num` rows, and those up to a multiple of FLOAT_ROWS, by `dot_floats`."""
    for row in range(0, num, FLOAT_ROWS):
        at, to = x + row * stride, out + row * out_stride
        dot_floats(zero, FLOAT_ROWS, halves, keep, at, stride, tiles, half_bytes, num_inputs, to, out_stride)


@helper
def _multiply_qk_floats(job: Any, zero: Any, thread: int, m: int, num: int, columns: int) -> None:
    """Compute what `_multiply_qk_pairs` does in float32."""
    dim, lanes = job.head_dim, num_lanes(zero)
    _, q, _, _, _, keys, _, scores, _, _ = scratch_layout(job, thread)
    for column in range(0, columns, FLOAT_HALVES * lanes):
        _multiply_rows(
            zero, FLOAT_HALVES, False, num, q + 4 * m * dim, 4 * dim, keys + 4 * dim * column, 4 * dim * lanes, dim,
            scores + 4 * column, 4 * BLOCK_KEYS,
        )  # fmt: skip


@helper
def _multiply_pv_floats(job: Any, zero: Any, thread: int, m: int, num: int, columns: int) -> None:
    """Do what `_multiply_pv_pairs` does in float32."""
    dim, lanes = job.head_dim, num_lanes(zero)
    acc, _, _, _, _, _, values, scores, _, _ = scratch_layout(job, thread)
    half_bytes = 4 * BLOCK_KEYS * lanes
    for d in range(0, dim, FLOAT_HALVES * lanes):
        tiles, out = values + 4 * d * BLOCK_KEYS, acc + 4 * (m * dim + d)
        if d + (FLOAT_HALVES - 1) * lanes < dim:
            _multiply_rows(
                zero, FLOAT_HALVES, True, num, scores, 4 * BLOCK_KEYS, tiles, half_bytes, columns, out, 4 * dim
            )
        else:
            _multiply_rows(zero, 1, True, num, scores, 4 * BLOCK_KEYS, tiles, half_bytes, columns, out, 4 * dim)


@helper
def _multiply_qk_pairs(job: Any, zero: Any, thread: int, m: int, num: int, columns: int) -> None:
    """Compute the scores of queries m .. m + num - 1 against the block's first `columns` keys."""
    wide = (job.head_dim + 31) // 32 * 32
    _, q, _, _, _, keys, _, scores, _, _ = scratch_layout(job, thread)
    half = wide // 32 * TILE_BYTES
    for row in range(0, num, ROWS):
        for column in range(0, columns, 32):
            tiles, out = keys + column // 16 * half, scores + 4 * (row * BLOCK_KEYS + column)
            x = q + (m + row) * 2 * wide
            dot_rows(2, False, x, 2 * wide, tiles, TILE_BYTES, half, wide // 32, out, 4 * BLOCK_KEYS)


@helper
def _multiply_pv_pairs(job: Any, zero: Any, thread: int, m: int, num: int, columns: int) -> None:
    """Add the weighted values of the block's first `columns` keys to acc of queries m .. m + num - 1."""
    dim = job.head_dim
    acc, _, _, _, _, _, values, _, weights, _ = scratch_layout(job, thread)
    step_bytes = dim // 16 * TILE_BYTES
    for row in range(0, num, ROWS):
        x = weights + row * 2 * BLOCK_KEYS
        for d in range(0, dim, 32):
            tiles, out = values + d // 16 * TILE_BYTES, acc + 4 * ((m + row) * dim + d)
            if d + 16 < dim:
                dot_rows(2, True, x, 2 * BLOCK_KEYS, tiles, step_bytes, TILE_BYTES, columns // 32, out, 4 * dim)
            else:
                dot_rows(1, True, x, 2 * BLOCK_KEYS, tiles, step_bytes, TILE_BYTES, columns // 32, out, 4 * dim)


@helper
def _multiply_qk_tiles(job: Any, zero: Any, thread: int, m: int, num: int, columns: int) -> None:
    """Compute what `_multiply_qk_pairs` does by AMX, for up to 32 queries."""
    more = num > TILE_ROWS
    wide = (job.head_dim + 31) // 32 * 32
    _, q, _, _, _, keys, _, scores, _, _ = scratch_layout(job, thread)
    q += m * 2 * wide
    for column in range(0, columns, 32):
        tile_clear(0)
        tile_clear(1)
        tile_clear(2)
        tile_clear(3)
        right = keys + column // 16 * (wide // 32) * TILE_BYTES
        for d in range(wide // 32):
            tile_load(4, q + 64 * d, 2 * wide)
            tile_load(6, right + d * TILE_BYTES, 64)
            tile_load(7, right + (wide // 32 + d) * TILE_BYTES, 64)
            tile_dot(0, 4, 6)
            tile_dot(1, 4, 7)
            if more:
                tile_load(5, q + 64 * d + TILE_ROWS * 2 * wide, 2 * wide)
                tile_dot(2, 5, 6)
                tile_dot(3, 5, 7)
        at = scores + 4 * column
        tile_store(0, at, 4 * BLOCK_KEYS)
        tile_store(1, at + 64, 4 * BLOCK_KEYS)
        if more:
            tile_store(2, at + TILE_ROWS * 4 * BLOCK_KEYS, 4 * BLOCK_KEYS)
            tile_store(3, at + TILE_ROWS * 4 * BLOCK_KEYS + 64, 4 * BLOCK_KEYS)


@helper
def _multiply_pv_tiles(job: Any, zero: Any, thread: int, m: int, num: int, columns: int) -> None:
    """Compute what `_multiply_pv_pairs` does by AMX, for up to 32 queries."""
    more = num > TILE_ROWS
    dim = job.head_dim
    acc, _, _, _, _, _, values, _, weights, _ = scratch_layout(job, thread)
    for d in range(0, dim, 32):
        at, second = acc + 4 * (m * dim + d), d + 16 < dim
        below = at + TILE_ROWS * 4 * dim
        tile_load(0, at, 4 * dim)
        if second:
            tile_load(1, at + 64, 4 * dim)
        if more:
            tile_load(2, below, 4 * dim)
            if second:
                tile_load(3, below + 64, 4 * dim)
        for step in range(columns // 32):
            right = values + (step * (dim // 16) + d // 16) * TILE_BYTES
            tile_load(4, weights + 64 * step, 2 * BLOCK_KEYS)
            tile_load(6, right, 64)
            tile_dot(0, 4, 6)
            if second:
                tile_load(7, right + TILE_BYTES, 64)
                tile_dot(1, 4, 7)
            if more:
                tile_load(5, weights + 64 * step + TILE_ROWS * 2 * BLOCK_KEYS, 2 * BLOCK_KEYS)
                tile_dot(2, 5, 6)
                if second:
                    tile_dot(3, 5, 7)
        tile_store(0, at, 4 * dim)
        if second:
            tile_store(1, at + 64, 4 * dim)
        if more:
            tile_store(2, below, 4 * dim)
            if second:
                tile_store(3, below + 64, 4 * dim)


MAX_ITEM_QUERIES = 512  # of an item
ITEM_TOKENS_MULTIPLE = 32  # an item has a multiple of this many tokens, so that its queries fill tiles
MIN_ITEMS_PER_THREAD = 4  # if there are enough tokens

PREFILL_JOB, PACK_PREFILL_JOB = define_job(
    "q out kind k v page_kind tables sinks scratch config start num_tokens offsets num_rows min_tokens block_tokens"
    " table_stride num_heads num_kv_heads head_dim page_size window number_bytes",
    "scale softcap",
)
"""Addresses of contiguous arrays, sizes, and options (0 = none).

kind, page_kind: element kinds of q and out, and of k and v. Rows of fewer than min_tokens new tokens are left out.
scratch: `scratch_bytes` for each thread; number_bytes: of a number there. config: `full_tile_config()`; table_stride:
int32 elements from row to row.
"""


def supports_pages(pages: KVPages) -> bool:
    """Return whether the kernel supports the shape of these pages."""
    return pages.page_size % 8 == 0 and BLOCK_KEYS % pages.page_size == 0 and pages.head_dim % 8 == 0


def choose_unit(q: Tensor, pages: KVPages) -> str:
    """Return how products are computed, see above: tiles | pairs | floats."""
    if q.dtype != torch.bfloat16 or pages.k.dtype != torch.bfloat16 or pages.head_dim % 16 or not has_avx512_bf16():
        return "floats"
    return "tiles" if has_amx() else "pairs"


def prefill_attention(
    q: Tensor,
    out: Tensor,
    pages: KVPages,
    layer: int,
    batch: AttentionBatch,
    min_tokens: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Write to `out` the attention of rows with at least `min_tokens` new tokens.

    Tokens of other rows are left unchanged.
    Shapes: q, out [num_tokens, num_heads, head_dim]. The options are those of `reference.paged_attention`.
    """
    threads, num_heads, k, unit = torch.get_num_threads(), q.shape[1], pages.k, choose_unit(q, pages)
    block = choose_item_tokens(len(q), num_heads, pages.num_kv_heads, threads)
    queries = block * (num_heads // pages.num_kv_heads)
    scratch = torch.empty(threads * scratch_bytes(queries, pages.head_dim, unit != "floats") // 4)
    sinks = sinks.float().contiguous() if sinks is not None else None
    layer_bytes = layer * k.stride(0) * k.element_size()
    job = PACK_PREFILL_JOB.pack(
        0, 0, q.data_ptr(), out.data_ptr(), KINDS[q.dtype], k.data_ptr() + layer_bytes,
        pages.v.data_ptr() + layer_bytes, KINDS[k.dtype], batch.tables.data_ptr(),
        sinks.data_ptr() if sinks is not None else 0, scratch.data_ptr(), full_tile_config().data_ptr(),
        batch.start.data_ptr(), batch.num_tokens.data_ptr(), batch.offsets.data_ptr(), batch.tables.shape[0],
        min_tokens, block, batch.tables.stride(0), num_heads, pages.num_kv_heads, pages.head_dim, pages.page_size,
        window or 0, 4 if unit == "floats" else 2, scale, softcap or 0.0,
    )  # fmt: skip
    is_wide = pages.page_size % 16 == 0 and pages.head_dim % 16 == 0
    prefill_kernel(16 if is_wide else 8, unit)(job, threads)


def choose_item_tokens(num_tokens: int, num_heads: int, num_kv_heads: int, num_threads: int) -> int:
    """Return how many of a row's new tokens one work item has.

    Many tokens make repacking keys worthwhile; few leave enough items for all threads.
    """
    most = max(1, MAX_ITEM_QUERIES * num_kv_heads // num_heads // ITEM_TOKENS_MULTIPLE)
    shared = num_tokens * num_kv_heads // (MIN_ITEMS_PER_THREAD * num_threads * ITEM_TOKENS_MULTIPLE)
    return ITEM_TOKENS_MULTIPLE * max(1, min(most, shared))


@cache
def full_tile_config() -> Tensor:
    """Return the AMX configuration in which all eight tiles have 16 rows."""
    return torch.frombuffer(bytearray(tile_config((TILE_ROWS,) * 8)), dtype=torch.uint8)


@helper
def load_query(job: Any, zero: Any, thread: int, m: int, number: int, limit: int) -> None:
    """Load query `number` (of all heads and tokens; -1: zeros) as query m of the scratch, and clear its acc and sums.

    It sees the keys before position `limit`.
    """
    dim, size, lanes = job.head_dim, job.number_bytes, num_lanes(zero)
    words = _padded_dim(job) * size // 4  # of a query, 32 bits each
    acc, q, row_max, row_sums, limits, _, _, _, _, nothing = scratch_layout(job, thread)
    target = q + m * 4 * words
    for d in range(0, words, lanes):
        store(pointer(FLOAT32, nothing), d, zero)
        store(pointer(FLOAT32, target), d, zero)
    if number >= 0:
        for d in range(0, dim, lanes):
            numbers = load_any(job.kind, zero, job.q, number * dim + d)
            if size == 2:
                store(pointer(BFLOAT16, target), d, numbers)
            else:
                store(pointer(FLOAT32, target), d, numbers)
    for d in range(0, dim, lanes):
        store(pointer(FLOAT32, acc), m * dim + d, zero)
    store(pointer(FLOAT32, row_sums), m * 16, zero)
    pointer(FLOAT32, row_max)[m] = -np.inf
    pointer(INT32, limits)[m] = limit


@helper
def _load_queries(job: Any, zero: Any, thread: int, head: int, offset: int, start: int, tokens: int) -> None:
    """Load a work item's queries into the scratch, those of `tokens` tokens from `offset` and position `start` on."""
    group = job.num_heads // job.num_kv_heads
    num = tokens * group
    for m in range((num + BLOCK_QUERIES - 1) // BLOCK_QUERIES * BLOCK_QUERIES):
        number = (offset + m // group) * job.num_heads + head * group + m % group if m < num else -1
        load_query(job, zero, thread, m, number, start + min(m, num - 1) // group + 1)


@helper
def _write_outputs(job: Any, zero: Any, thread: int, head: int, offset: int, tokens: int) -> None:
    """Write a work item's outputs: acc / row sums, with attention sinks in the sums."""
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    acc, _, row_maxes, row_sums, _, _, _, _, _, _ = scratch_layout(job, thread)
    for m in range(tokens * group):
        row_max, weight = pointer(FLOAT32, row_maxes)[m], reduce_sum(load(zero, pointer(FLOAT32, row_sums), m * 16))
        share = np.float32(1.0)
        if job.sinks != 0:
            sink = pointer(FLOAT32, job.sinks)[head * group + m % group] * np.float32(LOG2E)
            new_max = max(sink, row_max)
            share = first_lane(exp2(splat(zero, np.float32(row_max - new_max))))
            weight = weight * share + first_lane(exp2(splat(zero, np.float32(sink - new_max))))
        factor = splat(zero, np.float32(share / weight))
        target = ((offset + m // group) * job.num_heads + head * group + m % group) * dim
        for d in range(0, dim, num_lanes(zero)):
            store_any(job.kind, job.out, target + d, mul(load(zero, pointer(FLOAT32, acc), m * dim + d), factor))


def _make_attend_blocks(pack: Any, qk: Any, softmax: Any, pv: Any) -> Any:
    """Return the helper that computes attention by these helpers of a unit."""

    @helper
    def attend_blocks(
        job: Any, zero: Any, part: Any, thread: int, row: int, head: int, low: int, end: int, num: int
    ) -> None:
        """Compute attention of the scratch's `num` queries over keys low .. end - 1 of a row, for one key head.

        Their limits ascend, and are `end` at most.
        """
        acc, _, row_maxes, row_sums, limits, _, _, scores, weights, _ = scratch_layout(job, thread)
        weights = scores if job.number_bytes == 4 else weights
        limit = pointer(INT32, limits)
        for first in range(low, end, BLOCK_KEYS):
            count = min(BLOCK_KEYS, end - first)
            pack(job, zero, part, thread, row, head, first, count)
            for m in range(0, num, BLOCK_QUERIES):
                last = limit[min(m + BLOCK_QUERIES, num) - 1]
                if last > first and (job.window == 0 or first + count > limit[m] - job.window):
                    columns = (min(last - first, count) + 31) // 32 * 32
                    qk(job, zero, thread, m, min(BLOCK_QUERIES, num - m), columns)
                    softmax(
                        zero, scores, weights, row_sums + 64 * m, acc + 4 * job.head_dim * m, row_maxes + 4 * m,
                        limits + 4 * m, min(BLOCK_QUERIES, num - m), first, columns, job.head_dim, job.window,
                        np.float32(job.scale), np.float32(job.softcap),
                    )  # fmt: skip
                    pv(job, zero, thread, m, min(BLOCK_QUERIES, num - m), columns)

    return attend_blocks


attend_blocks_tiles = _make_attend_blocks(_pack_pairs, _multiply_qk_tiles, _softmax_bf16, _multiply_pv_tiles)
_attend_blocks_pairs = _make_attend_blocks(_pack_pairs, _multiply_qk_pairs, _softmax_bf16, _multiply_pv_pairs)
_attend_blocks_floats = _make_attend_blocks(_pack_floats, _multiply_qk_floats, _softmax_floats, _multiply_pv_floats)


@cache
def prefill_kernel(lanes: int, unit: str) -> Launch:
    """Return the launcher of the attention kernel for prefill.

    Its argument record is a PREFILL_JOB. `lanes`: 16 or 8, divides the page size, and with the unit "floats" the head
    size. `unit`: see `choose_unit`.
    """
    tiles, pairs, width = unit == "tiles", unit == "pairs", lanes if unit == "floats" else 16

    def kernel(address: Any) -> None:
        job = carray(address, 1, PREFILL_JOB)[0]
        num_tokens, zero, part = pointer(INT32, job.num_tokens), zeros(width), zeros(lanes)
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        base, configured = 0, False
        for row in range(job.num_rows):
            blocks = 0
            if num_tokens[row] >= job.min_tokens:
                blocks = (num_tokens[row] + job.block_tokens - 1) // job.block_tokens
            while item < base + blocks * job.num_kv_heads:
                if tiles and not configured:
                    tile_configure(job.config)
                    configured = True
                block, head = divmod(item - base, job.num_kv_heads)
                token = (blocks - 1 - block) * job.block_tokens  # longest first
                start, offset = pointer(INT32, job.start)[row] + token, pointer(INT32, job.offsets)[row] + token
                tokens, low = min(job.block_tokens, num_tokens[row] - token), 0
                if job.window > 0:
                    low = max(0, start + 1 - job.window) // BLOCK_KEYS * BLOCK_KEYS
                end, num = start + tokens, tokens * (job.num_heads // job.num_kv_heads)
                _load_queries(job, zero, thread, head, offset, start, tokens)
                if tiles:  # numba compiles only the branch that is taken
                    attend_blocks_tiles(job, zero, part, thread, row, head, low, end, num)
                elif pairs:
                    _attend_blocks_pairs(job, zero, part, thread, row, head, low, end, num)
                else:
                    _attend_blocks_floats(job, zero, part, thread, row, head, low, end, num)
                _write_outputs(job, zero, thread, head, offset, tokens)
                item = fetch_add(address, 0, 1)
            base += blocks * job.num_kv_heads
        if configured:
            tile_release()

    return compile_kernel(kernel)
