"""Paged attention for rows of few new tokens (decode), reading keys and values in place.

Limited by memory bandwidth.
An item is (row, split, key heads): all G query heads of each key head and all new tokens of the row against
SPLIT_TOKENS keys. The split depends on positions alone, so a row's result does not depend on the batch. The thread that
finishes the last split of a row merges all of them by log-sum-exp.

A tile of keys is computed at a time (`attention_tile`). While it is, the next one is prefetched, in the last tile of an
item the first one of the thread's next item. Where there are enough splits, an item has several key heads: their keys
are adjacent in a page, and consecutive pages then are one stream, which the CPU prefetches by itself.

Symbols: M = number of queries of a key head, num_tokens * G rounded up to a multiple of four; query m = token * G +
head in group; query m sees the keys before position limits[m]; the queries added by rounding are zeros and their
results are not used. A partial result is acc [M, D] (weighted values), row_max [M] (largest score) and row_sum [M] (sum
of the weights relative to it).

Scratch of a slot (a key head of a thread's item), float32: q [M / 4, D, 4] (in pairs: words of two bf16, [M / 4, D / 2,
4]), scores [M, TILE_KEYS], acc [M, D], row_max, row_sum [M], limits [M] int32.

With AMX, the queries of a row of several new tokens are multiplied as in `attention_prefill`: after 2,048 tokens, a
step of 16 new ones took 21 ms instead of 34 (the SmolLM2-135M shape, two cores of a Xeon). Deterministic serving does
without.

Source: split-KV decoding (Flash-Decoding, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ..types import AttentionBatch, KVPages
from .attention_prefill import (
    BLOCK_QUERIES,
    PREFILL_JOB,
    attend_blocks_tiles,
    full_tile_config,
    load_query,
    scratch_bytes,
    scratch_layout,
)
from .attention_tile import TILE_KEYS, accumulate_values, online_softmax, score_page
from .bf16 import has_amx, has_avx512_bf16, tile_configure, tile_release
from .launch import Launch, compile_kernel, define_job, helper
from .simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    LOG2E,
    div,
    exp2,
    fetch_add,
    first_lane,
    fma,
    load,
    load_any,
    mul,
    num_lanes,
    pointer,
    prefetch,
    reduce_sum,
    scatter,
    scatter_pairs,
    splat,
    store,
    store_any,
    void_pointer,
    zeros,
)

JOB_FIELDS = (
    "q out kind k v tables sinks scratch max_queries table_stride num_heads num_kv_heads head_dim page_size window"
    " heads_per_item blocks block_bytes block_tokens config"
)
"""Job fields that every item reads: addresses, sizes, options (0 = none).

kind: element kind of q and out. scratch: num_scratch_floats(...) for each of the heads_per_item slots of each thread.
max_queries: the largest M. table_stride: int32 elements from one row of `tables` to the next. Arrays are contiguous.
For AMX: blocks: `block_bytes` for each thread (0: AMX is not used), for items of at most `block_tokens` tokens; config:
`full_tile_config()`.
"""
JOB_OPTIONS = "scale softcap"


def pad_queries(num_queries: int) -> int:
    """Return M: the number of queries rounded up to a multiple of four."""
    return -(-num_queries // 4) * 4


def num_scratch_floats(queries: int, head_dim: int) -> int:
    """Return the float32 scratch size of one slot for items of M = `queries` queries."""
    return queries * (2 * head_dim + TILE_KEYS + 3)


def num_partial_floats(queries: int, head_dim: int) -> int:
    """Return the floats of a partial result of M = `queries` queries: acc, row_max, row_sum."""
    return queries * (head_dim + 2)


@helper
def scratch_arrays(job: Any, slot: int) -> Any:
    """Return pointers to the scratch arrays of one key head: acc, q, scores, row_max, row_sum, limits.

    `slot`: thread * heads_per_item + number of the key head in the thread's item.
    """
    most, dim = job.max_queries, job.head_dim
    acc = job.scratch + 4 * slot * most * (2 * dim + TILE_KEYS + 3)
    row_max = acc + 4 * most * (2 * dim + TILE_KEYS)
    return (
        pointer(FLOAT32, acc),
        pointer(FLOAT32, acc + 4 * most * dim),
        pointer(FLOAT32, acc + 8 * most * dim),
        pointer(FLOAT32, row_max),
        pointer(FLOAT32, row_max + 4 * most),
        pointer(INT32, row_max + 8 * most),
    )


@helper
def pack_queries(job: Any, zero: Any, pairs: bool, slot: int, token: int, limit: int, head: int, m: int) -> None:
    """Load a token's queries of one key head into the scratch, as queries m, m + 1, ...

    In float32 they are scaled. They see the keys before position `limit`.
    """
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    _, q, _, _, _, limits = scratch_arrays(job, slot)
    scale = splat(zero, score_scale(job))
    source = (token * job.num_heads + head * group) * dim
    for g in range(group):
        words = dim // 2 if pairs else dim
        at = (m + g) // 4 * 4 * words + (m + g) % 4
        limits[m + g] = limit
        for d in range(0, dim, num_lanes(zero)):
            x = load_any(job.kind, zero, job.q, source + g * dim + d)
            if pairs:
                scatter_pairs(q, at + 2 * d, 4, x)
            else:
                scatter(q, at + 4 * d, 4, mul(x, scale))


@helper
def score_scale(job: Any) -> Any:
    """Return the factor from products of queries and keys to scores."""
    return np.float32(job.scale if job.softcap > 0 else job.scale * LOG2E)


@helper
def attend_keys(
    job: Any, zero: Any, pairs: bool, k: Any, v: Any, thread: int, row: int, head: int, low: int, end: int,
    num_queries: int, ahead: Any,
) -> None:  # fmt: skip
    """Compute attention of the packed queries over keys low .. end - 1 of a row, into scratch.

    For the heads_per_item key heads from `head` on, with `num_queries` each. The result is acc, row_max and row_sum of
    their slots. `low` must be the first position of a page. `ahead`: row, first key head and keys (low, end) of the
    thread's next item, whose first tile is prefetched.
    """
    dim, size, lanes, heads = job.head_dim, job.page_size, num_lanes(zero), job.heads_per_item
    num, slot = (num_queries + 3) // 4 * 4, thread * heads
    words = dim // 2 if pairs else dim
    for h in range(heads):
        acc, q, _, row_max, row_sum, _ = scratch_arrays(job, slot + h)
        for m in range(num_queries, num):
            for word in range(words):
                q[m // 4 * 4 * words + word * 4 + m % 4] = 0.0
        for i in range(0, num * dim, lanes):
            store(acc, i, zero)
        for m in range(num):
            row_max[m], row_sum[m] = -np.inf, 0.0
    for first_key in range(low, end, TILE_KEYS):
        count = min(TILE_KEYS, end - first_key)
        tile = tile_pages(job, row, head, first_key, end, ahead)
        pages, num_pages, _, soon_pages, num_soon, soon_head = tile
        for page in range(num_pages):
            base, soon = _offset(job, pages[page], head), _offset(job, soon_pages[min(page, num_soon - 1)], soon_head)
            for h in range(heads):
                _, q, scores, _, _, _ = scratch_arrays(job, slot + h)
                score_page(zero, pairs, k, base, soon, q, scores, page * size, num, dim, size, score_scale(job))
                base, soon = base + size * dim, soon + size * dim
        for h in range(heads):
            acc, _, scores, row_max, row_sum, limits = scratch_arrays(job, slot + h)
            for m in range(num_queries):
                limit = limits[m] - first_key  # columns from here on are in the future of this query
                first = limit - job.window if job.window > 0 else 0
                cap = np.float32(job.softcap)
                online_softmax(zero, pairs, m, first, limit, count, cap, scores, row_max, row_sum, acc, dim)
            accumulate_values(job, zero, pairs, v, tile, h, scores, count, acc, num)
        for page in range(num_pages, num_soon):
            soon = _offset(job, soon_pages[page], soon_head)
            for i in range(0, heads * size * dim, 32):
                prefetch(k, soon + i)
                prefetch(v, soon + i)


@helper
def tile_pages(job: Any, row: int, head: int, first: int, end: int, ahead: Any) -> Any:
    """Return the pages of a tile of keys, from `first` up to `end`, and the pages to prefetch.

    Of both: their part of a page table, how many they are, and the key head. To prefetch are those of the next tile, or
    of the first tile of the next item (`ahead`: row, key head, keys), or none: the same ones.
    """
    pages, count = _page_entries(job, row, first, end)
    next_row, next_head, next_first, next_end = ahead
    if first + TILE_KEYS < end:
        next_row, next_head, next_first, next_end = row, head, first + TILE_KEYS, end
    if next_first >= next_end:
        return pages, count, head, pages, count, head
    next_pages, next_count = _page_entries(job, next_row, next_first, next_end)
    return pages, count, head, next_pages, next_count, next_head


@helper
def _page_entries(job: Any, row: int, first: int, end: int) -> Any:
    """Return a row's part of the page tables for the tile of keys from `first` up to `end`, and its number of pages."""
    size = job.page_size
    pages = pointer(INT32, job.tables + 4 * (row * job.table_stride + first // size))
    return pages, (min(TILE_KEYS, end - first) + size - 1) // size


@helper
def _offset(job: Any, page: int, head: int) -> Any:
    """Return the element offset of a key head in a page."""
    return (page * job.num_kv_heads + head) * (job.page_size * job.head_dim)


MIN_TILE_QUERIES = 6  # of an item that is computed by AMX
_BLOCK_JOB_BYTES = -(-PREFILL_JOB.itemsize // 64) * 64


def block_bytes(queries: int, head_dim: int) -> int:
    """Return the bytes that a thread needs for items of `queries` queries by AMX: a PREFILL_JOB and its scratch."""
    return -(-(_BLOCK_JOB_BYTES + scratch_bytes(queries, head_dim, is_bf16=True)) // 64) * 64 if has_amx() else 0


@helper
def start_block(job: Any, thread: int) -> Any:
    """Return the thread's PREFILL_JOB for an item that is computed as in `attention_prefill`, with scratch number 0."""
    address = job.blocks + thread * job.block_bytes
    block = carray(void_pointer(address), 1, PREFILL_JOB)[0]
    block.q, block.kind, block.k, block.v, block.page_kind = job.q, job.kind, job.k, job.v, BFLOAT16
    block.tables, block.table_stride, block.scratch = job.tables, job.table_stride, address + _BLOCK_JOB_BYTES
    block.num_heads, block.num_kv_heads, block.head_dim = job.num_heads, job.num_kv_heads, job.head_dim
    block.page_size, block.window, block.number_bytes, block.block_tokens = job.page_size, 0, 2, job.block_tokens
    block.scale, block.softcap = job.scale, job.softcap
    return block


@helper
def finish_block(job: Any, zero: Any, block: Any, slot: int, num: int) -> None:
    """Copy the results of `num` queries to the scratch of a slot."""
    acc, _, _, row_max, row_sum, _ = scratch_arrays(job, slot)
    found, _, row_maxes, row_sums, _, _, _, _, _, _ = scratch_layout(block, 0)
    for i in range(0, num * job.head_dim, num_lanes(zero)):
        store(acc, i, load(zero, pointer(FLOAT32, found), i))
    for m in range(num):
        row_max[m] = pointer(FLOAT32, row_maxes)[m]
        row_sum[m] = reduce_sum(load(zero, pointer(FLOAT32, row_sums), m * 16))


@helper
def write_output(job: Any, zero: Any, slot: int, token: int, head: int, first: int) -> None:
    """Write a token's attention output for one key head: acc / row_sum of its G queries.

    `first`: number of the token's first query in the scratch. Attention sinks are added to row_sum.
    """
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    acc, _, _, row_max, row_sum, _ = scratch_arrays(job, slot)
    for g in range(group):
        m = first + g
        share, sum_of_weights = splat(zero, np.float32(1.0)), row_sum[m]
        if job.sinks != 0:
            sink = pointer(FLOAT32, job.sinks)[head * group + g] * np.float32(LOG2E)
            new_max = max(sink, row_max[m])
            share = exp2(splat(zero, np.float32(row_max[m] - new_max)))
            sum_of_weights = row_sum[m] * first_lane(share) + first_lane(exp2(splat(zero, np.float32(sink - new_max))))
        share = div(share, splat(zero, np.float32(sum_of_weights)))
        target = (token * job.num_heads + head * group + g) * dim
        for d in range(0, dim, num_lanes(zero)):
            store_any(job.kind, job.out, target + d, mul(load(zero, acc, m * dim + d), share))


SPLIT_TOKENS = 512  # keys of one item; a multiple of TILE_KEYS
MAX_DECODE_QUERIES = 64  # rows of up to this many queries per key head use this kernel (measured)

DECODE_JOB, PACK_DECODE_JOB = define_job(
    f"{JOB_FIELDS} start num_tokens offsets splits_done partial num_rows max_tokens", JOB_OPTIONS
)
"""`JOB_FIELDS`; addresses of contiguous arrays; sizes.

splits_done [R, Hkv] int64, zeroed; partial: num_partial_floats(...) per item. Both are used by rows of several splits.
"""


@cache
def register_lanes(page_size: int, head_dim: int) -> int:
    """Return the SIMD register width, in float32, for a page size and head size.

    The widest of 16 and 8 that divides both; 0 if the kernels do not support these sizes.
    """
    fitting = (n for n in (16, 8) if page_size % n == 0 and head_dim % n == 0 and 64 % page_size == 0)
    return next(fitting, 0)


def multiplies_pairs(kind: int, lanes: int) -> bool:
    """Return whether queries, keys, weights and values are multiplied as pairs of bf16 numbers."""
    return kind == BFLOAT16 and lanes == 16 and has_avx512_bf16()


@cache
def decode_kernel(kind: int, lanes: int, *, is_exact: bool = False) -> Launch:
    """Return the launcher of the decode attention kernel for pages of one element type.

    Its argument record is a DECODE_JOB. `kind`: element type, see `simd.KINDS`; `lanes`: see `register_lanes`.
    `is_exact`: a token's result does not depend on the number of new tokens of its row, so AMX is not used.
    """
    pairs = multiplies_pairs(kind, lanes)
    tiles = pairs and has_amx() and not is_exact

    def kernel(address: Any) -> None:
        job, configured = carray(address, 1, DECODE_JOB)[0], False
        zero, k, v = zeros(lanes), pointer(kind, job.k), pointer(kind, job.v)
        thread, item = fetch_add(address, 1, 1), _find_item(job, fetch_add(address, 0, 1), 0, 0)
        while item[0] < job.num_rows:
            row, base, head, split, first_split, num_splits = item
            # a thread takes its next item before it computes one, to prefetch its keys
            item = _find_item(job, fetch_add(address, 0, 1), row, base)
            low, end = _split_keys(job, item[0], item[3])
            if tiles and _fits_tiles(job, row):
                if not configured:
                    tile_configure(job.config)
                    configured = True
                _attend_split_tiles(job, zero, thread, row, head, split)
            else:
                _attend_split(job, zero, pairs, k, v, thread, row, head, split, (item[0], item[2], low, end))
            for h in range(job.heads_per_item):
                slot = thread * job.heads_per_item + h
                first = base * job.heads_per_item + head + h  # partial result of the row's first split
                is_whole = num_splits == 1
                if is_whole or _merge_splits(job, zero, slot, row, head + h, first, split - first_split, num_splits):
                    _write_row(job, zero, slot, row, head + h)
        if configured:
            tile_release()

    return compile_kernel(kernel)


def max_item_queries(max_tokens: int, num_heads: int, num_kv_heads: int) -> int:
    """Return M, the padded number of queries, of a work item with `max_tokens` new tokens."""
    return pad_queries(max_tokens * (num_heads // num_kv_heads))


MAX_ITEM_QUERIES = 32  # of the key heads of one item, so that its scratch stays in the first caches
MIN_ITEMS_PER_THREAD = 4  # of several key heads


@cache
def choose_heads_per_item(num_kv_heads: int, queries: int, num_splits: int, num_threads: int) -> int:
    """Return how many key heads an item has. `queries`: M; `num_splits`: the splits of all rows."""
    if num_splits < MIN_ITEMS_PER_THREAD * num_threads:
        return 1
    most = max(1, MAX_ITEM_QUERIES // queries)
    return max(heads for heads in range(1, min(most, num_kv_heads) + 1) if num_kv_heads % heads == 0)


@helper
def _find_item(job: Any, number: int, row: int, base: int) -> Any:
    """Return an item's row, the row's first item, first key head, split, the row's first split and number of splits.

    `row`, `base`: a row that is not after the item's, and its first item. The row is num_rows if there is no such item.
    """
    num_tokens, start = pointer(INT32, job.num_tokens), pointer(INT32, job.start)
    items_per_split = job.num_kv_heads // job.heads_per_item
    while row < job.num_rows:
        tokens, num_splits, first_split = num_tokens[row], 0, 0
        if 0 < tokens <= job.max_tokens:
            if job.window > 0:
                first_split = max(0, start[row] + 1 - job.window) // SPLIT_TOKENS
            num_splits = (start[row] + tokens + SPLIT_TOKENS - 1) // SPLIT_TOKENS - first_split
        if number < base + num_splits * items_per_split:
            split, part = divmod(number - base, items_per_split)
            return row, base, part * job.heads_per_item, first_split + split, first_split, num_splits
        base += num_splits * items_per_split
        row += 1
    return row, base, 0, 0, 0, 0


@helper
def _split_keys(job: Any, row: int, split: int) -> Any:
    """Return the first and the end of the keys of a row's split; (0, 0) after the last row."""
    if row == job.num_rows:
        return 0, 0
    start, tokens = pointer(INT32, job.start)[row], pointer(INT32, job.num_tokens)[row]
    low, end = split * SPLIT_TOKENS, min((split + 1) * SPLIT_TOKENS, start + tokens)
    if job.window > 0:
        low = max(low, (start + 1 - job.window) // TILE_KEYS * TILE_KEYS)
    return low, end


@helper
def _attend_split(
    job: Any, zero: Any, pairs: bool, k: Any, v: Any, thread: int, row: int, head: int, split: int, ahead: Any
) -> None:
    """Compute attention of a row over one split of its keys, for the key heads of an item, into scratch."""
    group = job.num_heads // job.num_kv_heads
    start, tokens = pointer(INT32, job.start)[row], pointer(INT32, job.num_tokens)[row]
    for h in range(job.heads_per_item):
        for token in range(tokens):
            new, slot = pointer(INT32, job.offsets)[row] + token, thread * job.heads_per_item + h
            pack_queries(job, zero, pairs, slot, new, start + token + 1, head + h, token * group)
    low, end = _split_keys(job, row, split)
    attend_keys(job, zero, pairs, k, v, thread, row, head, low, end, tokens * group, ahead)


@helper
def _fits_tiles(job: Any, row: int) -> bool:
    """Return whether a row has several new tokens, and queries enough for AMX."""
    tokens = pointer(INT32, job.num_tokens)[row]
    is_many = tokens > 1 and tokens * (job.num_heads // job.num_kv_heads) >= MIN_TILE_QUERIES
    return bool(is_many and job.window == 0 and job.block_bytes > 0)


@helper
def _attend_split_tiles(job: Any, zero: Any, thread: int, row: int, head: int, split: int) -> None:
    """Do what `_attend_split` does, by AMX."""
    group, block = job.num_heads // job.num_kv_heads, start_block(job, thread)
    start, tokens = pointer(INT32, job.start)[row], pointer(INT32, job.num_tokens)[row]
    num, (low, end) = tokens * group, _split_keys(job, row, split)
    for h in range(head, head + job.heads_per_item):
        for m in range((num + BLOCK_QUERIES - 1) // BLOCK_QUERIES * BLOCK_QUERIES):
            token, number = min(m, num - 1) // group, -1
            if m < num:
                number = (pointer(INT32, job.offsets)[row] + token) * job.num_heads + h * group + m % group
            load_query(block, zero, 0, m, number, min(start + token + 1, end))
        attend_blocks_tiles(block, zero, zero, 0, row, h, low, end, num)
        finish_block(job, zero, block, thread * job.heads_per_item + h - head, num)


@helper
def _merge_splits(job: Any, zero: Any, slot: int, row: int, head: int, first: int, split: int, num_splits: int) -> bool:
    """Store the result of one split of a row for a key head; the last thread to do so merges all of them.

    Returns True in that thread, whose scratch then holds the merged result. `first`: number of the partial result of
    the row's first split; `split` counts from there.
    """
    dim, lanes, most = job.head_dim, num_lanes(zero), job.max_queries
    num_queries = pointer(INT32, job.num_tokens)[row] * (job.num_heads // job.num_kv_heads)
    acc, _, _, row_max, row_sum, _ = scratch_arrays(job, slot)
    stride = 4 * most * (dim + 2)  # bytes from one partial result to the next
    address = job.partial + stride * first
    mine = pointer(FLOAT32, address + stride * split * job.num_kv_heads)
    for i in range(0, num_queries * dim, lanes):
        store(mine, i, load(zero, acc, i))
    for m in range(num_queries):
        mine[most * dim + m], mine[most * (dim + 1) + m] = row_max[m], row_sum[m]
    if fetch_add(pointer(INT64, job.splits_done), row * job.num_kv_heads + head, 1) < num_splits - 1:
        return False
    for m in range(num_queries):
        row_max[m], row_sum[m] = -np.inf, 0.0
        for d in range(0, dim, lanes):
            store(acc, m * dim + d, zero)
        for s in range(num_splits):
            row_max[m] = max(row_max[m], pointer(FLOAT32, address + stride * s * job.num_kv_heads)[most * dim + m])
        for s in range(num_splits):
            theirs = pointer(FLOAT32, address + stride * s * job.num_kv_heads)
            share = exp2(splat(zero, np.float32(theirs[most * dim + m] - row_max[m])))
            row_sum[m] += first_lane(share) * theirs[most * (dim + 1) + m]
            for d in range(0, dim, lanes):
                store(acc, m * dim + d, fma(load(zero, theirs, m * dim + d), share, load(zero, acc, m * dim + d)))
    return True


@helper
def _write_row(job: Any, zero: Any, slot: int, row: int, head: int) -> None:
    """Write the attention outputs of all new tokens of a row for one key head."""
    for token in range(pointer(INT32, job.num_tokens)[row]):
        first = token * (job.num_heads // job.num_kv_heads)
        write_output(job, zero, slot, pointer(INT32, job.offsets)[row] + token, head, first)


@dataclass(frozen=True, slots=True)
class StepFields:
    """Kernel arguments that are set once a step, for the attention calls of all layers.

    `held`: the tensors whose addresses are among the `fields`, kept alive.
    """

    fields: dict[str, Any]
    held: tuple[Tensor, ...]


def decode_fields(batch: AttentionBatch, pages: KVPages, num_heads: int, num_threads: int) -> StepFields:
    """Return the DECODE_JOB fields that change every step, for `MegakernelDecoder`."""
    num_rows, most = batch.tables.shape[0], batch.max_new_tokens
    queries = max_item_queries(most, num_heads, pages.num_kv_heads)
    done = num_rows * pages.num_kv_heads
    num_splits = -(-batch.max_context_tokens // SPLIT_TOKENS)
    num_states = done * num_splits if num_splits > 1 else 0
    heads = choose_heads_per_item(pages.num_kv_heads, queries, num_rows * num_splits, num_threads)
    scratch = num_threads * heads * num_scratch_floats(queries, pages.head_dim)
    blocks = allocate_blocks(most, num_heads // pages.num_kv_heads, pages.head_dim, num_threads)
    room = Workspace.of(pages, scratch, num_states, queries, done)
    fields = {
        "tables": batch.tables.data_ptr(),
        "table_stride": batch.tables.stride(0),
        "start": batch.start.data_ptr(),
        "num_tokens": batch.num_tokens.data_ptr(),
        "offsets": batch.offsets.data_ptr(),
        "num_rows": num_rows,
        "max_tokens": most,
        "max_queries": queries,
        "heads_per_item": heads,
        "scratch": room.scratch,
        "partial": room.states,
        "splits_done": room.done,
    }
    return StepFields(fields | blocks.fields, room.held + blocks.held)


def allocate_blocks(max_tokens: int, group: int, head_dim: int, num_threads: int) -> StepFields:
    """Return the job fields for items of 2 to `max_tokens` tokens that are computed by AMX, and their memory."""
    size = block_bytes(max_tokens * group, head_dim) if max_tokens > 1 else 0
    blocks, config = torch.empty(num_threads * size, dtype=torch.uint8), full_tile_config()
    fields = {
        "blocks": blocks.data_ptr(),
        "block_bytes": size,
        "block_tokens": max_tokens,
        "config": config.data_ptr(),
    }
    return StepFields(fields, (blocks, config))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Addresses of the memory that the attention calls of a step work in.

    `scratch` and `states` (partial results) are shared by all layers; `done` has an address per layer, of counters of
    the finished partial results. `held` owns the memory.
    """

    scratch: int
    states: int
    done: Any
    held: tuple[Tensor, ...]

    @classmethod
    def of(cls, pages: KVPages, scratch: int, num_states: int, queries: int, num_done: int) -> Workspace:
        """Allocate `scratch` floats and `num_states` partial results, and `num_done` counters for each layer.

        `queries`: number of query rows in a partial result. The counters start at 0; none are allocated if `num_states`
        is 0.
        """
        floats = torch.empty(scratch + num_states * num_partial_floats(queries, pages.head_dim))
        done = torch.zeros(pages.num_layers, num_done if num_states else 0, dtype=torch.int64)
        layers = done.data_ptr() + 8 * done.stride(0) * np.arange(pages.num_layers)
        return cls(floats.data_ptr(), floats.data_ptr() + 4 * scratch, layers, (floats, done))
