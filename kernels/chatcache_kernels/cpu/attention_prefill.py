"""Paged attention for rows of many new tokens: prefill, chunks, a turn after a long history.

With AVX512-BF16 (`prefill_attention_bf16`): an item is (row, some of its tokens, key head), all G query heads of those
tokens against every key they see. A block of BLOCK_KEYS keys and values is repacked for AMX tiles (rows of pages
interleaved in pairs, which fits both [D, P] keys and [P, D] values), then all queries pass over it, 32 at a time:
scores by tiles, online softmax in float32 registers, weights rounded to bf16, weighted values by tiles (without AMX, by
`dot_rows` over the same layout). Blocks in a query's future, or before its window, are skipped. Results do not depend
on the item, the batch or the threads. The running maximum is lazy: sums are rescaled only if a score exceeds it by
RESCALE_THRESHOLD, so most lines need no reduction over lanes.

M = number of queries of an item rounded up to a multiple of 32; query m = token * G + head in group; E = D rounded up
to 32. Scratch of a thread: acc [M, D] float32, q [M, E] bf16, row_sums [M, 16] float32 (by lane), row_max [M] float32,
limits [M] int32 (keys from there on are in the future); keys [BLOCK_KEYS, E], values [BLOCK_KEYS, D] bf16, scores [32,
BLOCK_KEYS] float32, weights [32, BLOCK_KEYS] bf16 of one block; a row of zeros.

Otherwise (`prefill_attention_torch`): a row's pages are gathered into contiguous keys and values, then torch's flash
attention runs on the cached prefix (no mask) and on the chunk itself (causal), merged by log-sum-exp, so that no mask
is built. A sliding window needs a mask over the few keys that a block of queries can see. torch's flash kernel has no
softcap: such scores are computed in float32, a block of queries at a time.

On one core of a Sapphire Rapids, 9 heads of 64 over 3 key heads, page size 16: 2,048 tokens took 9 ms with AMX and 20
ms with torch; 32 tokens after 2,048 took 0.4 ms and 1.5 ms. On one core of a Zen 4 without AMX, 2,048 tokens took 29 ms
and 79 ms, 512 tokens 2.2 and 9.8 ms.

Source: Dao (2023), FlashAttention-2; Milakov and Gimelshein (2018).
"""

from __future__ import annotations

import math
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
    has_bf16_products,
    load_interleaved,
    store_bf16,
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
    INT32,
    LOG2E,
    add,
    exp2,
    fetch_add,
    first_lane,
    fma,
    load,
    mask_lanes,
    maximum,
    mul,
    num_lanes,
    pointer,
    reduce_max,
    reduce_sum,
    splat,
    store,
    zeros,
)

BLOCK_KEYS = 128  # keys of a block: with scores and weights they fit the L1 cache
RESCALE_THRESHOLD = 8.0  # log2 by which a score may exceed the running maximum before sums are rescaled


@helper
def online_softmax(
    zero: Any, scores: int, weights: int, sums: int, acc: int, row_maxes: int, limits: int, num: int, first: int,
    columns: int, dim: int, window: int, scale: Any, softcap: Any,
) -> None:  # fmt: skip
    """Turn the scores of `num` queries for a block of keys into softmax weights, not normalised.

    The weights are stored as bf16 and added to the queries' sums; where a maximum grows much, sums and acc are
    rescaled. `first`: position of the block's first key; `columns`: number of its keys. scores .. limits are addresses.
    """
    row_max, limit, factor = pointer(FLOAT32, row_maxes), pointer(INT32, limits), np.float32(scale * np.float32(LOG2E))
    if softcap > 0:
        _apply_softcap(zero, scores, num, columns, scale, softcap)
        factor = np.float32(1.0)
    if limit[0] - first < columns or (window > 0 and limit[num - 1] - window > first):
        _mask_scores(zero, scores, limits, num, first, columns, window)
    by = splat(zero, factor)
    for query in range(num):
        line, own = pointer(FLOAT32, scores), pointer(FLOAT32, sums + 64 * query)
        top, other = load(zero, line, 0), load(zero, line, 16)
        for t in range(32, columns, 32):
            top, other = maximum(top, load(zero, line, t)), maximum(other, load(zero, line, t + 16))
        top, new_max = mul(maximum(top, other), by), row_max[query]
        if any_lane_greater(top, np.float32(new_max + np.float32(RESCALE_THRESHOLD))):
            row_max[query] = reduce_max(top)
            _rescale(zero, acc + 4 * dim * query, dim, own, np.float32(new_max - row_max[query]))
            new_max = row_max[query]
        shift = splat(zero, np.float32(-new_max) if new_max > -np.inf else np.float32(0.0))
        if columns == BLOCK_KEYS:
            _exponentiate(zero, line, pointer(BFLOAT16, weights), own, by, shift, BLOCK_KEYS)
        else:
            _exponentiate(zero, line, pointer(BFLOAT16, weights), own, by, shift, columns)
        scores += 4 * BLOCK_KEYS
        weights += 2 * BLOCK_KEYS


@helper
def _exponentiate(zero: Any, scores: Any, weights: Any, sums: Any, scale: Any, shift: Any, columns: int) -> None:
    """Write a query's softmax weights, 2 ** (scores * scale + shift), and add them to its sums."""
    total_low, total_high = load(zero, sums, 0), zero
    for t in range(0, columns, 32):
        low = exp2_approx(fma(load(zero, scores, t), scale, shift))
        high = exp2_approx(fma(load(zero, scores, t + 16), scale, shift))
        store_bf16_pair(weights, t, low, high)
        total_low, total_high = add(total_low, low), add(total_high, high)
    store(sums, 0, add(total_low, total_high))


@helper
def _apply_softcap(zero: Any, scores: int, num: int, columns: int, scale: Any, softcap: Any) -> None:
    """Apply scale and softcap to the scores of `num` queries, in place."""
    for _ in range(num):
        line = pointer(FLOAT32, scores)
        for t in range(0, columns, 16):
            store(line, t, apply_softcap(zero, mul(load(zero, line, t), splat(zero, scale)), softcap))
        scores += 4 * BLOCK_KEYS


@helper
def _mask_scores(zero: Any, scores: int, limits: int, num: int, first: int, columns: int, window: int) -> None:
    """Set scores of keys in a query's future or before its window to -inf."""
    for n in range(num):
        line, end = pointer(FLOAT32, scores), pointer(INT32, limits)[n] - first
        begin = end - window if window > 0 else 0
        for t in range(0, columns, 16):
            if begin > t or end < t + 16:
                store(line, t, mask_lanes(load(zero, line, t), begin - t, end - t, np.float32(-np.inf)))
        scores += 4 * BLOCK_KEYS


@helper
def _rescale(zero: Any, acc: int, dim: int, sums: Any, growth: Any) -> None:
    """Multiply a query's acc and sum of weights by 2 ** growth, because its maximum has grown.

    `growth`: the old maximum minus the new one, so it is negative.
    """
    decay, values = exp2(splat(zero, growth)), pointer(FLOAT32, acc)
    for d in range(0, dim, 16):
        store(values, d, mul(load(zero, values, d), decay))
    store(sums, 0, mul(load(zero, sums, 0), decay))


BLOCK_QUERIES = 2 * TILE_ROWS  # queries that pass over a block at a time


def scratch_bytes(queries: int, head_dim: int) -> int:
    """Return the scratch bytes that one thread needs for items of `queries` queries."""
    wide = _round_up_to_tiles(head_dim)
    queries = -(-queries // BLOCK_QUERIES) * BLOCK_QUERIES
    return (
        queries * (4 * head_dim + 2 * wide + 72)
        + BLOCK_KEYS * 2 * (wide + head_dim)
        + BLOCK_QUERIES * BLOCK_KEYS * 6
        + 2 * wide
    )


def _round_up_to_tiles(head_dim: int) -> int:
    """Return the head size rounded up to a multiple of 32, the width of an AMX tile in bf16."""
    return -(-head_dim // 32) * 32


@helper
def scratch_layout(job: Any, thread: int) -> Any:
    """Return the addresses of a thread's scratch arrays.

    In this order: acc, q, row_max, row_sums, limits, keys, values, scores, weights, a row of zeros.
    """
    dim, wide = job.head_dim, (job.head_dim + 31) // 32 * 32
    most = (job.block_tokens * (job.num_heads // job.num_kv_heads) + BLOCK_QUERIES - 1) // BLOCK_QUERIES * BLOCK_QUERIES
    each = most * (4 * dim + 2 * wide + 72) + BLOCK_KEYS * 2 * (wide + dim) + BLOCK_QUERIES * BLOCK_KEYS * 6 + 2 * wide
    acc = job.scratch + thread * each
    q = acc + most * 4 * dim
    row_sums = q + most * 2 * wide
    row_max = row_sums + most * 64
    limits = row_max + most * 4
    keys = limits + most * 4
    values = keys + BLOCK_KEYS * 2 * wide
    scores = values + BLOCK_KEYS * 2 * dim
    weights = scores + BLOCK_QUERIES * BLOCK_KEYS * 4
    return acc, q, row_max, row_sums, limits, keys, values, scores, weights, weights + BLOCK_QUERIES * BLOCK_KEYS * 2


@helper
def pack_keys_values(job: Any, zero: Any, part: Any, thread: int, row: int, head: int, first: int, count: int) -> None:
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
def multiply_qk(job: Any, thread: int, m: int, num: int, columns: int) -> None:
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
def multiply_pv(job: Any, thread: int, m: int, num: int, columns: int) -> None:
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
def multiply_qk_amx(job: Any, thread: int, m: int, num: int, columns: int) -> None:
    """Compute what `multiply_qk` does by AMX, for up to 32 queries."""
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
def multiply_pv_amx(job: Any, thread: int, m: int, num: int, columns: int) -> None:
    """Compute what `multiply_pv` does by AMX, for up to 32 queries."""
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
    "q out k v tables sinks scratch config start num_tokens offsets num_rows min_tokens block_tokens table_stride"
    " num_heads num_kv_heads head_dim page_size window",
    "scale softcap",
)
"""Addresses of contiguous arrays, sizes, and options (0 = none).

Rows of fewer than min_tokens new tokens are left out. scratch: `scratch_bytes` for each thread; config:
`full_tile_config()`; table_stride: int32 elements from row to row.
"""


def can_use_bf16(q: Tensor, pages: KVPages) -> bool:
    """Return whether the bf16 kernel supports this CPU, these dtypes and these shapes."""
    shapes = pages.page_size % 8 == 0 and BLOCK_KEYS % pages.page_size == 0 and pages.head_dim % 16 == 0
    return shapes and q.dtype == pages.k.dtype == torch.bfloat16 and has_avx512_bf16()


def prefill_attention_bf16(
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
    """Write to `out` the attention of rows with at least `min_tokens` new tokens, by AMX or AVX512-BF16.

    Tokens of other rows are left unchanged.
    Shapes: q, out [num_tokens, num_heads, head_dim] bf16. The options are those of `reference.paged_attention`.
    """
    threads, num_heads, k = torch.get_num_threads(), q.shape[1], pages.k
    block = choose_item_tokens(len(q), num_heads, pages.num_kv_heads, threads)
    scratch = torch.empty(threads * scratch_bytes(block * (num_heads // pages.num_kv_heads), pages.head_dim) // 4)
    sinks = sinks.float().contiguous() if sinks is not None else None
    layer_bytes = layer * k.stride(0) * k.element_size()
    job = PACK_PREFILL_JOB.pack(
        0, 0, q.data_ptr(), out.data_ptr(), k.data_ptr() + layer_bytes, pages.v.data_ptr() + layer_bytes,
        batch.tables.data_ptr(), sinks.data_ptr() if sinks is not None else 0, scratch.data_ptr(),
        full_tile_config().data_ptr(), batch.start.data_ptr(), batch.num_tokens.data_ptr(), batch.offsets.data_ptr(),
        batch.tables.shape[0], min_tokens, block, batch.tables.stride(0), num_heads, pages.num_kv_heads,
        pages.head_dim, pages.page_size, window or 0, scale, softcap or 0.0,
    )  # fmt: skip
    prefill_kernel(16 if pages.page_size % 16 == 0 else 8, has_amx())(job, threads)


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
def _load_queries(job: Any, zero: Any, thread: int, head: int, offset: int, start: int, tokens: int) -> None:
    """Load a work item's queries into the scratch, set their limits, and clear acc and sums."""
    dim, wide, group = job.head_dim, (job.head_dim + 31) // 32 * 32, job.num_heads // job.num_kv_heads
    acc, q, row_max, row_sums, limits, _, _, _, _, nothing = scratch_layout(job, thread)
    for d in range(0, wide, 32):
        store(pointer(FLOAT32, nothing), d // 2, zero)
    num = tokens * group
    for m in range((num + BLOCK_QUERIES - 1) // BLOCK_QUERIES * BLOCK_QUERIES):
        target = pointer(FLOAT32, q + m * 2 * wide)
        for d in range(0, wide, 32):
            store(target, d // 2, zero)
        if m < num:
            source = pointer(BFLOAT16, job.q)
            at = ((offset + m // group) * job.num_heads + head * group + m % group) * dim
            for d in range(0, dim, 16):
                store(pointer(BFLOAT16, q + m * 2 * wide), d, load(zero, source, at + d))
        for d in range(0, dim, 16):
            store(pointer(FLOAT32, acc), m * dim + d, zero)
        store(pointer(FLOAT32, row_sums), m * 16, zero)
        pointer(FLOAT32, row_max)[m] = -np.inf
        pointer(INT32, limits)[m] = start + min(m, num - 1) // group + 1


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
        for d in range(0, dim, 16):
            value = mul(load(zero, pointer(FLOAT32, acc), m * dim + d), factor)
            store_bf16(True, pointer(BFLOAT16, job.out), target + d, value)


def _make_attend_item(qk: Any, pv: Any) -> Any:
    """Return the helper that computes an item; `qk`, `pv`: `multiply_qk` and `multiply_pv`, or those by AMX."""

    @helper
    def attend_item(job: Any, zero: Any, part: Any, thread: int, row: int, head: int, token: int) -> None:
        """Compute attention of a block of a row's new tokens, from `token` on, for one key head."""
        group = job.num_heads // job.num_kv_heads
        start, offset = pointer(INT32, job.start)[row] + token, pointer(INT32, job.offsets)[row] + token
        tokens = min(job.block_tokens, pointer(INT32, job.num_tokens)[row] - token)
        num, end = tokens * group, start + tokens
        _load_queries(job, zero, thread, head, offset, start, tokens)
        low = 0
        if job.window > 0:
            low = max(0, start + 1 - job.window) // BLOCK_KEYS * BLOCK_KEYS
        acc, _, row_maxes, row_sums, limits, _, _, scores, weights, _ = scratch_layout(job, thread)
        limit = pointer(INT32, limits)
        for first in range(low, end, BLOCK_KEYS):
            count = min(BLOCK_KEYS, end - first)
            pack_keys_values(job, zero, part, thread, row, head, first, count)
            for m in range(0, num, BLOCK_QUERIES):
                last = limit[min(m + BLOCK_QUERIES, num) - 1]
                if last > first and (job.window == 0 or first + count > limit[m] - job.window):
                    columns = (min(last - first, count) + 31) // 32 * 32
                    qk(job, thread, m, min(BLOCK_QUERIES, num - m), columns)
                    online_softmax(
                        zero, scores, weights, row_sums + 64 * m, acc + 4 * job.head_dim * m, row_maxes + 4 * m,
                        limits + 4 * m, min(BLOCK_QUERIES, num - m), first, columns, job.head_dim, job.window,
                        np.float32(job.scale), np.float32(job.softcap),
                    )  # fmt: skip
                    pv(job, thread, m, min(BLOCK_QUERIES, num - m), columns)
        _write_outputs(job, zero, thread, head, offset, tokens)

    return attend_item


_attend_item = _make_attend_item(multiply_qk, multiply_pv)
_attend_item_amx = _make_attend_item(multiply_qk_amx, multiply_pv_amx)


@cache
def prefill_kernel(lanes: int, amx: bool) -> Launch:
    """Return the launcher of the bf16 attention kernel for prefill.

    Its argument record is a PREFILL_JOB. `lanes` (16 or 8) divides the page size. `amx`: multiply by AMX tiles.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, PREFILL_JOB)[0]
        num_tokens, zero, part = pointer(INT32, job.num_tokens), zeros(16), zeros(lanes)
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        base, configured = 0, False
        for row in range(job.num_rows):
            blocks = 0
            if num_tokens[row] >= job.min_tokens:
                blocks = (num_tokens[row] + job.block_tokens - 1) // job.block_tokens
            while item < base + blocks * job.num_kv_heads:
                if amx and not configured:
                    tile_configure(job.config)
                    configured = True
                block, head = divmod(item - base, job.num_kv_heads)
                token = (blocks - 1 - block) * job.block_tokens  # longest first
                if amx:  # numba compiles only the branch that is taken
                    _attend_item_amx(job, zero, part, thread, row, head, token)
                else:
                    _attend_item(job, zero, part, thread, row, head, token)
                item = fetch_add(address, 0, 1)
            base += blocks * job.num_kv_heads
        if configured:
            tile_release()

    return compile_kernel(kernel)


TORCH_QUERY_BLOCK = 256  # queries that share one mask or one score matrix


def prefill_attention_torch(
    q: Tensor,
    pages: KVPages,
    layer: int,
    batch: AttentionBatch,
    row: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend the new tokens of one row with torch's kernels.

    Shapes: q [n, num_heads, head_dim], sinks [num_heads] -> [n, num_heads, head_dim]. Inside: q [Hkv, G, n, D], keys
    and values [Hkv, S, D], log-sum-exps [Hkv, G, n].
    """
    num_tokens, num_heads, head_dim = q.shape
    start = int(batch.start[row])
    end = start + num_tokens
    first = 0 if window is None else max(0, start + 1 - window) // pages.page_size * pages.page_size
    k, v = _gather_pages(
        pages, layer, batch.tables[row, first // pages.page_size : -(-end // pages.page_size)], end - first
    )
    dtype = q.dtype
    if dtype == torch.bfloat16 and not has_bf16_products():  # torch would take several times as long
        q = q.float()
    k, v = k.to(q.dtype), v.to(q.dtype)
    start -= first  # from here on, positions count from the first gathered key
    grouped = q.view(num_tokens, pages.num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).contiguous()
    if softcap is not None:
        out, lse = _attend_query_blocks(grouped, k, v, start, scale, window, softcap)
    elif window is not None and window < end - first:
        out, lse = _attend_query_blocks(grouped, k, v, start, scale, window, None)
    else:
        out, lse = _flash_attention(grouped, k[:, start:], v[:, start:], scale, causal=True)
        if start:
            out, lse = _merge_by_lse(out, lse, *_attend_prefix(grouped, k[:, :start], v[:, :start], scale))
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.float().view(*lse.shape[:2], 1))[..., None]
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim).to(dtype)


def _gather_pages(pages: KVPages, layer: int, table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of consecutive pages. Shapes: [Hkv, S, D] each."""
    k = pages.k[layer][table].permute(1, 0, 3, 2).contiguous().flatten(1, 2)  # flash attention needs D innermost
    v = pages.v[layer][table].transpose(0, 1).contiguous().flatten(1, 2)
    return k[:, :num_tokens], v[:, :num_tokens]


def _attend_prefix(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to keys that every query sees; return (output, log-sum-exp).

    The G query heads of a key head are passed to torch as more queries of one head, so that keys are read once.
    """
    out, lse = _flash_attention(q.flatten(1, 2)[:, None], k, v, scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run torch's flash attention; return (output, log-sum-exp).

    Key heads are the batch dimension.
    """
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def _merge_by_lse(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two attention results (output, log-sum-exp) over disjoint sets of keys."""
    share = torch.sigmoid(lse - other_lse)[..., None]
    return other + share * (out.float() - other), torch.logaddexp(lse, other_lse)


def _attend_query_blocks(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend one block of queries at a time to the keys it can see, with a mask."""
    parts = []
    for block in range(0, q.shape[2], TORCH_QUERY_BLOCK):
        queries = q[:, :, block : block + TORCH_QUERY_BLOCK]
        low, high = start + block, start + block + queries.shape[2]
        first = 0 if window is None else max(0, low + 1 - window)
        i, j = torch.arange(low, high)[:, None], torch.arange(first, high)
        hidden = j > i if window is None else (j > i) | (j <= i - window)
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -math.inf)
        keys, values = k[:, first:high], v[:, first:high]
        if softcap is None:
            parts.append(_flash_attention(queries, keys, values, scale, mask=mask))
        else:
            parts.append(_attend_with_softcap(queries, keys, values, mask, scale, softcap))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _attend_with_softcap(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Attend with softcapped scores, in float32."""
    scores = torch.matmul(q.float() * (scale / softcap), k.float()[:, None].mT).tanh_().mul_(softcap).add_(mask)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(scores.sub_(lse[..., None]).exp_(), v.float()[:, None]), lse
