"""Paged attention for rows of few new tokens (decode), reading keys and values in place.

Limited by memory bandwidth.
An item is (row, split, key head): all G query heads of that key head and all new tokens of the row against SPLIT_TOKENS
keys. The split depends on positions alone, so a row's result does not depend on the batch. The thread that finishes the
last split of a row merges all of them by log-sum-exp.

The loops over a tile of keys are shared with `attention_shared`. A SIMD register holds the scores of one query for
`lanes` tokens (K pages are [D, P]) or `lanes` dimensions of one value (V pages are [P, D]); four queries share every
loaded register. While a tile is computed, the next one is prefetched: pages are scattered, so the CPU cannot predict
them. Scores are in units of log2, so that the softmax uses exp2.

Symbols: M = number of queries of an item, num_tokens * G rounded up to a multiple of four; query m = token * G + head
in group; query m sees the keys before position limits[m]; the queries added by rounding are zeros and their results are
not used. A partial result is acc [M, D] (weighted values), row_max [M] (largest score) and row_sum [M] (sum of the
weights relative to it).

Scratch of a thread, float32: q [M / 4, D, 4], scores [M, TILE_KEYS], acc [M, D], row_max, row_sum [M], limits [M]
int32. The argument `zero` is a register of zeros: its type is the register width.

Source: online softmax, Milakov and Gimelshein (2018); split-KV decoding (Flash-Decoding, 2023).
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
from .launch import Launch, compile_kernel, define_job, helper
from .simd import (
    FLOAT32,
    INT32,
    INT64,
    LOG2E,
    add,
    div,
    exp2,
    fetch_add,
    first_lane,
    fma,
    load,
    load_any,
    mask_lanes,
    maximum,
    minimum,
    mul,
    num_lanes,
    pointer,
    prefetch,
    reduce_max,
    reduce_sum,
    scatter,
    splat,
    store,
    store_any,
    zeros,
)

TILE_KEYS = 64  # keys between two updates of the running maximum; a multiple of every page size


@helper
def score_page(
    zero: Any, k: Any, base: int, soon: int, q: Any, scores: Any, part: int, num: int, dim: int, size: int
) -> None:
    """Compute the scores of `num` queries against the keys of one page, and prefetch another.

    `base`, `soon`: offsets in `k` of the page and of the page to prefetch. The scores of the page's tokens go to the
    columns of `scores` from `part` on. Shapes: q [M / 4, D, 4], scores [M, TILE_KEYS].
    """
    lanes = num_lanes(zero)
    wide = num // 8 * 8
    for m in range(0, wide, 8):
        score_page_8_queries(zero, k, base, soon, q, scores, part, m, dim, size)
    for t in range(0, size, lanes):
        for m in range(wide, num, 4):
            a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
            for d in range(0, dim, 2):
                even, odd = load(zero, k, base + d * size + t), load(zero, k, base + (d + 1) * size + t)
                at = m * dim + d * 4
                if m == 0:
                    prefetch(k, soon + d * size + t)
                a0 = fma(splat(zero, q[at]), even, a0)
                a1 = fma(splat(zero, q[at + 1]), even, a1)
                a2 = fma(splat(zero, q[at + 2]), even, a2)
                a3 = fma(splat(zero, q[at + 3]), even, a3)
                b0 = fma(splat(zero, q[at + 4]), odd, b0)
                b1 = fma(splat(zero, q[at + 5]), odd, b1)
                b2 = fma(splat(zero, q[at + 6]), odd, b2)
                b3 = fma(splat(zero, q[at + 7]), odd, b3)
            column = m * TILE_KEYS + part + t
            store(scores, column, add(a0, b0))
            store(scores, column + TILE_KEYS, add(a1, b1))
            store(scores, column + 2 * TILE_KEYS, add(a2, b2))
            store(scores, column + 3 * TILE_KEYS, add(a3, b3))


@helper
def score_page_8_queries(
    zero: Any, k: Any, base: int, soon: int, q: Any, scores: Any, part: int, m: int, dim: int, size: int
) -> None:
    """Compute what `score_page` does for eight queries from m on."""
    lanes, later = num_lanes(zero), 4 * dim  # offset from four queries to the next four
    for t in range(0, size, lanes):
        a0, a1, a2, a3, a4, a5, a6, a7 = zero, zero, zero, zero, zero, zero, zero, zero
        b0, b1, b2, b3, b4, b5, b6, b7 = zero, zero, zero, zero, zero, zero, zero, zero
        for d in range(0, dim, 2):
            even, odd = load(zero, k, base + d * size + t), load(zero, k, base + (d + 1) * size + t)
            at = m * dim + d * 4
            if m == 0:
                prefetch(k, soon + d * size + t)
            a0 = fma(splat(zero, q[at]), even, a0)
            a1 = fma(splat(zero, q[at + 1]), even, a1)
            a2 = fma(splat(zero, q[at + 2]), even, a2)
            a3 = fma(splat(zero, q[at + 3]), even, a3)
            a4 = fma(splat(zero, q[at + later]), even, a4)
            a5 = fma(splat(zero, q[at + later + 1]), even, a5)
            a6 = fma(splat(zero, q[at + later + 2]), even, a6)
            a7 = fma(splat(zero, q[at + later + 3]), even, a7)
            b0 = fma(splat(zero, q[at + 4]), odd, b0)
            b1 = fma(splat(zero, q[at + 5]), odd, b1)
            b2 = fma(splat(zero, q[at + 6]), odd, b2)
            b3 = fma(splat(zero, q[at + 7]), odd, b3)
            b4 = fma(splat(zero, q[at + later + 4]), odd, b4)
            b5 = fma(splat(zero, q[at + later + 5]), odd, b5)
            b6 = fma(splat(zero, q[at + later + 6]), odd, b6)
            b7 = fma(splat(zero, q[at + later + 7]), odd, b7)
        column = m * TILE_KEYS + part + t
        store(scores, column, add(a0, b0))
        store(scores, column + TILE_KEYS, add(a1, b1))
        store(scores, column + 2 * TILE_KEYS, add(a2, b2))
        store(scores, column + 3 * TILE_KEYS, add(a3, b3))
        store(scores, column + 4 * TILE_KEYS, add(a4, b4))
        store(scores, column + 5 * TILE_KEYS, add(a5, b5))
        store(scores, column + 6 * TILE_KEYS, add(a6, b6))
        store(scores, column + 7 * TILE_KEYS, add(a7, b7))


@helper
def online_softmax(
    zero: Any,
    m: int,
    first: int,
    end: int,
    count: int,
    softcap: Any,
    scores: Any,
    row_max: Any,
    row_sum: Any,
    acc: Any,
    dim: int,
) -> None:
    """Replace the scores of query m for one tile of keys by softmax weights, not yet normalised.

    Columns first .. end - 1 are visible to the query; `count` columns hold tokens. Weights are relative to the running
    maximum; when it grows, acc and row_sum are rescaled.
    """
    lanes = num_lanes(zero)
    top = splat(zero, np.float32(-np.inf))
    for t in range(0, count, lanes):
        x = load(zero, scores, m * TILE_KEYS + t)
        if softcap > 0:
            x = apply_softcap(zero, x, softcap)
        if first > t or end < t + lanes:
            x = mask_lanes(x, first - t, end - t, np.float32(-np.inf))
        store(scores, m * TILE_KEYS + t, x)
        top = maximum(top, x)
    new_max = max(row_max[m], reduce_max(top))
    shift = splat(zero, np.float32(-new_max) if new_max > -np.inf else np.float32(0.0))
    sums = zero
    for t in range(0, count, lanes):
        x = exp2(add(load(zero, scores, m * TILE_KEYS + t), shift))
        store(scores, m * TILE_KEYS + t, x)
        sums = add(sums, x)
    if row_max[m] < new_max:
        decay = exp2(splat(zero, np.float32(row_max[m] - new_max)))
        for d in range(m * dim, (m + 1) * dim, lanes):
            store(acc, d, mul(load(zero, acc, d), decay))
        row_sum[m] *= first_lane(decay)
        row_max[m] = new_max
    row_sum[m] += reduce_sum(sums)


@helper
def apply_softcap(zero: Any, x: Any, softcap: Any) -> Any:
    """Return softcap * tanh(x / softcap) * log2(e), because the softmax uses exp2."""
    one, cap = splat(zero, np.float32(1.0)), splat(zero, np.float32(softcap * np.float32(LOG2E)))
    e = exp2(minimum(mul(x, splat(zero, np.float32(2.0 * LOG2E) / softcap)), splat(zero, np.float32(126.0))))
    return mul(cap, add(one, div(splat(zero, np.float32(-2.0)), add(e, one))))


@helper
def accumulate_values(
    zero: Any, v: Any, base: int, soon: int, scores: Any, part: int, count: int, acc: Any, num: int, dim: int
) -> None:
    """Add the values of one page, weighted by the softmax weights, to acc of `num` queries.

    Uses the page's first `count` tokens and the columns of `scores` from `part` on. `base`, `soon`: offsets in `v` of
    the page and of the page to prefetch. Shapes: scores [M, TILE_KEYS] (weights), acc [M, D].
    """
    lanes = num_lanes(zero)
    wide = num // 8 * 8
    for m in range(0, wide, 8):
        accumulate_values_8_queries(zero, v, base, soon, scores, part, count, acc, m, dim)
    for m in range(wide, num, 4):
        row = m * TILE_KEYS + part
        for d in range(0, dim, lanes):
            at = m * dim + d
            a0, a1, b0, b1 = load(zero, acc, at), load(zero, acc, at + dim), zero, zero
            a2, a3, b2, b3 = load(zero, acc, at + 2 * dim), load(zero, acc, at + 3 * dim), zero, zero
            if m == 0:
                for t in range(0, count, 2):
                    prefetch(v, soon + t * dim + 2 * d)
            for t in range(0, count - 1, 2):
                even, odd = load(zero, v, base + t * dim + d), load(zero, v, base + (t + 1) * dim + d)
                a0 = fma(splat(zero, scores[row + t]), even, a0)
                a1 = fma(splat(zero, scores[row + t + TILE_KEYS]), even, a1)
                a2 = fma(splat(zero, scores[row + t + 2 * TILE_KEYS]), even, a2)
                a3 = fma(splat(zero, scores[row + t + 3 * TILE_KEYS]), even, a3)
                b0 = fma(splat(zero, scores[row + t + 1]), odd, b0)
                b1 = fma(splat(zero, scores[row + t + 1 + TILE_KEYS]), odd, b1)
                b2 = fma(splat(zero, scores[row + t + 1 + 2 * TILE_KEYS]), odd, b2)
                b3 = fma(splat(zero, scores[row + t + 1 + 3 * TILE_KEYS]), odd, b3)
            if count % 2:
                last, end = load(zero, v, base + (count - 1) * dim + d), row + count - 1
                a0 = fma(splat(zero, scores[end]), last, a0)
                a1 = fma(splat(zero, scores[end + TILE_KEYS]), last, a1)
                a2 = fma(splat(zero, scores[end + 2 * TILE_KEYS]), last, a2)
                a3 = fma(splat(zero, scores[end + 3 * TILE_KEYS]), last, a3)
            store(acc, at, add(a0, b0))
            store(acc, at + dim, add(a1, b1))
            store(acc, at + 2 * dim, add(a2, b2))
            store(acc, at + 3 * dim, add(a3, b3))


@helper
def accumulate_values_8_queries(
    zero: Any, v: Any, base: int, soon: int, scores: Any, part: int, count: int, acc: Any, m: int, dim: int
) -> None:
    """Compute what `accumulate_values` does, to the same bits, for eight queries from m on."""
    lanes, row, later = num_lanes(zero), m * TILE_KEYS + part, 4 * TILE_KEYS
    for d in range(0, dim, lanes):
        at = m * dim + d
        a0, a1, b0, b1 = load(zero, acc, at), load(zero, acc, at + dim), zero, zero
        a2, a3, b2, b3 = load(zero, acc, at + 2 * dim), load(zero, acc, at + 3 * dim), zero, zero
        a4, a5, b4, b5 = load(zero, acc, at + 4 * dim), load(zero, acc, at + 5 * dim), zero, zero
        a6, a7, b6, b7 = load(zero, acc, at + 6 * dim), load(zero, acc, at + 7 * dim), zero, zero
        if m == 0:
            for t in range(0, count, 2):
                prefetch(v, soon + t * dim + 2 * d)
        for t in range(0, count - 1, 2):
            even, odd = load(zero, v, base + t * dim + d), load(zero, v, base + (t + 1) * dim + d)
            at = row + t
            a0 = fma(splat(zero, scores[at]), even, a0)
            a1 = fma(splat(zero, scores[at + TILE_KEYS]), even, a1)
            a2 = fma(splat(zero, scores[at + 2 * TILE_KEYS]), even, a2)
            a3 = fma(splat(zero, scores[at + 3 * TILE_KEYS]), even, a3)
            a4 = fma(splat(zero, scores[at + later]), even, a4)
            a5 = fma(splat(zero, scores[at + later + TILE_KEYS]), even, a5)
            a6 = fma(splat(zero, scores[at + later + 2 * TILE_KEYS]), even, a6)
            a7 = fma(splat(zero, scores[at + later + 3 * TILE_KEYS]), even, a7)
            b0 = fma(splat(zero, scores[at + 1]), odd, b0)
            b1 = fma(splat(zero, scores[at + 1 + TILE_KEYS]), odd, b1)
            b2 = fma(splat(zero, scores[at + 1 + 2 * TILE_KEYS]), odd, b2)
            b3 = fma(splat(zero, scores[at + 1 + 3 * TILE_KEYS]), odd, b3)
            b4 = fma(splat(zero, scores[at + later + 1]), odd, b4)
            b5 = fma(splat(zero, scores[at + later + 1 + TILE_KEYS]), odd, b5)
            b6 = fma(splat(zero, scores[at + later + 1 + 2 * TILE_KEYS]), odd, b6)
            b7 = fma(splat(zero, scores[at + later + 1 + 3 * TILE_KEYS]), odd, b7)
        if count % 2:
            last, end = load(zero, v, base + (count - 1) * dim + d), row + count - 1
            a0 = fma(splat(zero, scores[end]), last, a0)
            a1 = fma(splat(zero, scores[end + TILE_KEYS]), last, a1)
            a2 = fma(splat(zero, scores[end + 2 * TILE_KEYS]), last, a2)
            a3 = fma(splat(zero, scores[end + 3 * TILE_KEYS]), last, a3)
            a4 = fma(splat(zero, scores[end + later]), last, a4)
            a5 = fma(splat(zero, scores[end + later + TILE_KEYS]), last, a5)
            a6 = fma(splat(zero, scores[end + later + 2 * TILE_KEYS]), last, a6)
            a7 = fma(splat(zero, scores[end + later + 3 * TILE_KEYS]), last, a7)
        at = m * dim + d
        store(acc, at, add(a0, b0))
        store(acc, at + dim, add(a1, b1))
        store(acc, at + 2 * dim, add(a2, b2))
        store(acc, at + 3 * dim, add(a3, b3))
        store(acc, at + 4 * dim, add(a4, b4))
        store(acc, at + 5 * dim, add(a5, b5))
        store(acc, at + 6 * dim, add(a6, b6))
        store(acc, at + 7 * dim, add(a7, b7))


JOB_FIELDS = (
    "q out kind k v tables sinks scratch max_queries table_stride num_heads num_kv_heads head_dim page_size window"
)
"""Job fields that every item reads: addresses, sizes, options (0 = none).

kind: element kind of q and out. scratch: num_scratch_floats(...) per thread. max_queries: the largest M. table_stride:
int32 elements from one row of `tables` to the next. Arrays are contiguous.
"""
JOB_OPTIONS = "scale softcap"


def pad_queries(num_queries: int) -> int:
    """Return M: the number of queries rounded up to a multiple of four."""
    return -(-num_queries // 4) * 4


def num_scratch_floats(queries: int, head_dim: int) -> int:
    """Return the float32 scratch size of one thread for items of M = `queries` queries."""
    return queries * (2 * head_dim + TILE_KEYS + 3)


def num_partial_floats(queries: int, head_dim: int) -> int:
    """Return the floats of a partial result of M = `queries` queries: acc, row_max, row_sum."""
    return queries * (head_dim + 2)


@helper
def scratch_arrays(job: Any, thread: int) -> Any:
    """Return pointers to a thread's scratch arrays: acc, q, scores, row_max, row_sum, limits."""
    most, dim = job.max_queries, job.head_dim
    acc = job.scratch + 4 * thread * most * (2 * dim + TILE_KEYS + 3)
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
def pack_queries(job: Any, zero: Any, thread: int, token: int, limit: int, head: int, m: int) -> None:
    """Load a token's queries of one key head into the scratch, as queries m, m + 1, ...

    They are scaled and stored in the order [M / 4, D, 4]. They see the keys before position `limit`.
    """
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    _, q, _, _, _, limits = scratch_arrays(job, thread)
    scale = splat(zero, np.float32(job.scale if job.softcap > 0 else job.scale * LOG2E))
    source = (token * job.num_heads + head * group) * dim
    for g in range(group):
        at = (m + g) // 4 * 4 * dim + (m + g) % 4
        limits[m + g] = limit
        for d in range(0, dim, num_lanes(zero)):
            scatter(q, at + 4 * d, 4, mul(load_any(job.kind, zero, job.q, source + g * dim + d), scale))


@helper
def attend_keys(
    job: Any, zero: Any, k: Any, v: Any, thread: int, row: int, head: int, low: int, end: int, num_queries: int
) -> None:
    """Compute attention of the packed queries over keys low .. end - 1 of a row, into scratch.

    The result is acc, row_max and row_sum. `low` must be the first position of a page.
    """
    dim, size, lanes = job.head_dim, job.page_size, num_lanes(zero)
    table = pointer(INT32, job.tables + 4 * row * job.table_stride)
    acc, q, scores, row_max, row_sum, limits = scratch_arrays(job, thread)
    num = (num_queries + 3) // 4 * 4
    for m in range(num_queries, num):
        for d in range(dim):
            q[m // 4 * 4 * dim + d * 4 + m % 4] = 0.0
    for i in range(0, num * dim, lanes):
        store(acc, i, zero)
    for m in range(num):
        row_max[m], row_sum[m] = -np.inf, 0.0
    for tile in range(low, end, TILE_KEYS):
        count = min(TILE_KEYS, end - tile)
        for part in range(0, count, size):
            base, soon = _page_offsets(job, table, head, tile + part, end)
            score_page(zero, k, base, soon, q, scores, part, num, dim, size)
        for m in range(num_queries):
            limit = limits[m] - tile  # columns from here on are in the future of this query
            first = limit - job.window if job.window > 0 else 0
            online_softmax(zero, m, first, limit, count, np.float32(job.softcap), scores, row_max, row_sum, acc, dim)
        for part in range(0, count, size):
            base, soon = _page_offsets(job, table, head, tile + part, end)
            accumulate_values(zero, v, base, soon, scores, part, min(size, count - part), acc, num, dim)


@helper
def _page_offsets(job: Any, table: Any, head: int, position: int, end: int) -> Any:
    """Return a key head's element offsets in a position's page and in the page to prefetch.

    The page to prefetch is the one a tile of keys later, or the same page if the keys end before that.
    """
    later = position + TILE_KEYS if position + TILE_KEYS < end else position
    elements = job.page_size * job.head_dim
    base = (table[position // job.page_size] * job.num_kv_heads + head) * elements
    soon = (table[later // job.page_size] * job.num_kv_heads + head) * elements
    return base, soon


@helper
def write_output(job: Any, zero: Any, thread: int, token: int, head: int, first: int) -> None:
    """Write a token's attention output for one key head: acc / row_sum of its G queries.

    `first`: number of the token's first query in the scratch. Attention sinks are added to row_sum.
    """
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    acc, _, _, row_max, row_sum, _ = scratch_arrays(job, thread)
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


@cache
def decode_kernel(kind: int, lanes: int) -> Launch:
    """Return the launcher of the decode attention kernel for pages of one element type.

    Its argument record is a DECODE_JOB. `kind`: element type, see `simd.KINDS`; `lanes`: see `register_lanes`.
    """

    def kernel(address: Any) -> None:
        job = carray(address, 1, DECODE_JOB)[0]
        _run_items(address, job, zeros(lanes), pointer(kind, job.k), pointer(kind, job.v))

    return compile_kernel(kernel)


def max_item_queries(max_tokens: int, num_heads: int, num_kv_heads: int) -> int:
    """Return M, the padded number of queries, of a work item with `max_tokens` new tokens."""
    return pad_queries(max_tokens * (num_heads // num_kv_heads))


@helper
def _run_items(address: Any, job: Any, zero: Any, k: Any, v: Any) -> None:
    """Process work items (row, split, key head) from the shared counter until none is left."""
    num_tokens, start = pointer(INT32, job.num_tokens), pointer(INT32, job.start)
    item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
    base = 0  # first item of the row
    for row in range(job.num_rows):
        tokens, num_splits, first_split = num_tokens[row], 0, 0
        if 0 < tokens <= job.max_tokens:
            if job.window > 0:
                first_split = max(0, start[row] + 1 - job.window) // SPLIT_TOKENS
            num_splits = (start[row] + tokens + SPLIT_TOKENS - 1) // SPLIT_TOKENS - first_split
        while item < base + num_splits * job.num_kv_heads:
            split, head = divmod(item - base, job.num_kv_heads)
            _attend_split(job, zero, k, v, thread, row, head, first_split + split)
            if num_splits == 1 or _merge_splits(job, zero, thread, row, head, base, split, num_splits):
                _write_row(job, zero, thread, row, head)
            item = fetch_add(address, 0, 1)
        base += num_splits * job.num_kv_heads


@helper
def _attend_split(job: Any, zero: Any, k: Any, v: Any, thread: int, row: int, head: int, split: int) -> None:
    """Compute attention of a row over one split of its keys, for one key head, into scratch."""
    group = job.num_heads // job.num_kv_heads
    start, tokens = pointer(INT32, job.start)[row], pointer(INT32, job.num_tokens)[row]
    for token in range(tokens):
        pack_queries(
            job, zero, thread, pointer(INT32, job.offsets)[row] + token, start + token + 1, head, token * group
        )
    low, end = split * SPLIT_TOKENS, min((split + 1) * SPLIT_TOKENS, start + tokens)
    if job.window > 0:
        low = max(low, (start + 1 - job.window) // TILE_KEYS * TILE_KEYS)
    attend_keys(job, zero, k, v, thread, row, head, low, end, tokens * group)


@helper
def _merge_splits(
    job: Any, zero: Any, thread: int, row: int, head: int, base: int, split: int, num_splits: int
) -> bool:
    """Store the result of one split; the last thread to do so merges all splits of the row.

    Returns True in that thread, whose scratch then holds the merged result. `base`: first work item of the row.
    """
    dim, lanes, most = job.head_dim, num_lanes(zero), job.max_queries
    num_queries = pointer(INT32, job.num_tokens)[row] * (job.num_heads // job.num_kv_heads)
    acc, _, _, row_max, row_sum, _ = scratch_arrays(job, thread)
    stride = 4 * most * (dim + 2)  # bytes from one item's partial result to the next
    first = job.partial + stride * (base + head)
    mine = pointer(FLOAT32, first + stride * split * job.num_kv_heads)
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
            row_max[m] = max(row_max[m], pointer(FLOAT32, first + stride * s * job.num_kv_heads)[most * dim + m])
        for s in range(num_splits):
            theirs = pointer(FLOAT32, first + stride * s * job.num_kv_heads)
            share = exp2(splat(zero, np.float32(theirs[most * dim + m] - row_max[m])))
            row_sum[m] += first_lane(share) * theirs[most * (dim + 1) + m]
            for d in range(0, dim, lanes):
                store(acc, m * dim + d, fma(load(zero, theirs, m * dim + d), share, load(zero, acc, m * dim + d)))
    return True


@helper
def _write_row(job: Any, zero: Any, thread: int, row: int, head: int) -> None:
    """Write the attention outputs of all new tokens of a row for one key head."""
    for token in range(pointer(INT32, job.num_tokens)[row]):
        first = token * (job.num_heads // job.num_kv_heads)
        write_output(job, zero, thread, pointer(INT32, job.offsets)[row] + token, head, first)


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
    room = Workspace.of(pages, num_threads * num_scratch_floats(queries, pages.head_dim), num_states, queries, done)
    fields = {
        "tables": batch.tables.data_ptr(),
        "table_stride": batch.tables.stride(0),
        "start": batch.start.data_ptr(),
        "num_tokens": batch.num_tokens.data_ptr(),
        "offsets": batch.offsets.data_ptr(),
        "num_rows": num_rows,
        "max_tokens": most,
        "max_queries": queries,
        "scratch": room.scratch,
        "partial": room.states,
        "splits_done": room.done,
    }
    return StepFields(fields, room.held)


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
