"""Paged attention for rows of few new tokens: decode. Bound by reading K and V once, at the speed of memory.

One piece of work is (row, split, key head): all G query heads of that key head and all of the row's new tokens against
SPLIT keys. The split rule depends on positions alone, so a row's result does not depend on the batch it runs in. The
thread that ends a row's last split merges them by their maxima and sums. What happens inside a piece is `tile.py`.

Symbols: see types.py. M = num_tokens * G queries of a piece, query m = token * G + head in group, counted up to a
multiple of four. Scores are in units of log2, so that the softmax is exp2.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from .launch import Launch, compile_kernel, helper, record
from .tile import LOG2E, TILE, accumulate, score, weigh
from .vectors import (
    FLOAT32,
    INT32,
    INT64,
    div,
    exp2,
    fetch_add,
    fma,
    largest,
    load,
    load_any,
    mul,
    num_lanes,
    pointer,
    splat,
    store,
    store_any,
    zeros,
)

SPLIT = 512  # keys of one piece of work; a multiple of TILE

JOB, PACK = record(
    "q out kind k v tables start num_tokens offsets sinks splits_done partial scratch num_rows max_tokens max_queries"
    " table_stride num_heads num_kv_heads head_dim page_size window",
    "scale softcap",
)
"""Addresses of contiguous arrays, sizes, and options (0 = none). `kind`: of q and out. `max_queries`: the largest M.
`table_stride`: int32 from one row of `tables` to the next. `splits_done` [R, Hkv] int64, zeroed. `scratch`:
scratch_floats(...) for each thread; `partial`: partial_floats(...) for each piece. `splits_done` and `partial` are used
where a row has more than one split."""


@cache
def decode_kernel(kind: int, lanes: int) -> Launch:
    """Return the launcher for pages of one element kind; `lanes` divides page and head size. Takes a JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, JOB)[0]
        _work(address, job, zeros(lanes), pointer(kind, job.k), pointer(kind, job.v))

    return compile_kernel(kernel)


def max_queries(max_tokens: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the largest M of a piece."""
    return -(-max_tokens * (num_heads // num_kv_heads) // 4) * 4


def scratch_floats(queries: int, head_dim: int) -> int:
    """Return the float32 count of one thread's scratch: acc, q, scores, peak, mass."""
    return queries * (2 * head_dim + TILE + 2)


def partial_floats(queries: int, head_dim: int) -> int:
    """Return the float32 count of one piece's partial result: acc, peak, mass."""
    return queries * (head_dim + 2)


@helper
def _scratch(job: Any, thread: int) -> Any:
    """Return a thread's acc, q, scores, peak and mass."""
    most, dim = job.max_queries, job.head_dim
    acc = job.scratch + 4 * thread * most * (2 * dim + TILE + 2)
    peak = acc + 4 * most * (2 * dim + TILE)
    return (
        pointer(FLOAT32, acc),
        pointer(FLOAT32, acc + 4 * most * dim),
        pointer(FLOAT32, acc + 8 * most * dim),
        pointer(FLOAT32, peak),
        pointer(FLOAT32, peak + 4 * most),
    )


@helper
def _work(address: Any, job: Any, zero: Any, k: Any, v: Any) -> None:
    """Draw pieces of work until none is left."""
    num_tokens, start = pointer(INT32, job.num_tokens), pointer(INT32, job.start)
    item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
    base = 0  # the first item of the row
    for row in range(job.num_rows):
        tokens, num_splits, first_split = num_tokens[row], 0, 0
        if 0 < tokens <= job.max_tokens:
            if job.window > 0:
                first_split = max(0, start[row] + 1 - job.window) // SPLIT
            num_splits = (start[row] + tokens + SPLIT - 1) // SPLIT - first_split
        while item < base + num_splits * job.num_kv_heads:
            split, head = divmod(item - base, job.num_kv_heads)
            _attend(job, zero, k, v, thread, row, head, first_split + split)
            if num_splits == 1 or _merge(job, zero, thread, row, head, base, split, num_splits):
                _finish(job, zero, thread, row, head)
            item = fetch_add(address, 0, 1)
        base += num_splits * job.num_kv_heads


@helper
def _attend(job: Any, zero: Any, k: Any, v: Any, thread: int, row: int, head: int, split: int) -> None:
    """Attend the row's queries of one key head to one split. Leaves acc, peak and mass in scratch."""
    dim, size, group, lanes = job.head_dim, job.page_size, job.num_heads // job.num_kv_heads, num_lanes(zero)
    start, tokens = pointer(INT32, job.start)[row], pointer(INT32, job.num_tokens)[row]
    table = pointer(INT32, job.tables + 4 * row * job.table_stride)
    acc, q, scores, peak, mass = _scratch(job, thread)
    num = (tokens * group + 3) // 4 * 4
    _pack(job, zero, row, head, num, q, acc)
    for i in range(0, num * dim, lanes):
        store(acc, i, zero)
    for m in range(num):
        peak[m], mass[m] = -np.inf, 0.0
    low, end = split * SPLIT, min((split + 1) * SPLIT, start + tokens)
    if job.window > 0:
        low = max(low, (start + 1 - job.window) // TILE * TILE)
    for tile in range(low, end, TILE):
        count = min(TILE, end - tile)
        for part in range(0, count, size):
            base, soon = _locate(job, table, head, tile + part, end)
            score(zero, k, base, soon, q, scores, part, num, dim, size)
        for m in range(tokens * group):
            limit = start + m // group + 1 - tile  # columns from here on are in this query's future
            first = limit - job.window if job.window > 0 else 0
            weigh(zero, m, first, limit, count, np.float32(job.softcap), scores, peak, mass, acc, dim)
        for part in range(0, count, size):
            base, soon = _locate(job, table, head, tile + part, end)
            accumulate(zero, v, base, soon, scores, part, min(size, count - part), acc, num, dim)


@helper
def _locate(job: Any, table: Any, head: int, position: int, end: int) -> Any:
    """Return where one key head's page of a position starts, and that of the next tile's (or the same, at the end)."""
    later = position + TILE if position + TILE < end else position
    elements = job.page_size * job.head_dim
    base = (table[position // job.page_size] * job.num_kv_heads + head) * elements
    soon = (table[later // job.page_size] * job.num_kv_heads + head) * elements
    return base, soon


@helper
def _pack(job: Any, zero: Any, row: int, head: int, num: int, q: Any, spare: Any) -> None:
    """Copy the queries to scratch as [M / 4, D, 4], scaled, the surplus zero. `spare` has room for one query."""
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    source = (pointer(INT32, job.offsets)[row] * job.num_heads + head * group) * dim
    num_queries = pointer(INT32, job.num_tokens)[row] * group
    scale = splat(zero, np.float32(job.scale if job.softcap > 0 else job.scale * LOG2E))
    for m in range(num):
        token, member = divmod(m, group)
        for d in range(0, dim, num_lanes(zero)):
            x = zero
            if m < num_queries:
                x = mul(load_any(job.kind, zero, job.q, source + (token * job.num_heads + member) * dim + d), scale)
            store(spare, d, x)
        for d in range(dim):
            q[m // 4 * 4 * dim + d * 4 + m % 4] = spare[d]


@helper
def _merge(job: Any, zero: Any, thread: int, row: int, head: int, base: int, split: int, num_splits: int) -> bool:
    """Keep one split's result. Returns True to the thread that brought the last one, with all of them added up."""
    dim, lanes, most = job.head_dim, num_lanes(zero), job.max_queries
    num_queries = pointer(INT32, job.num_tokens)[row] * (job.num_heads // job.num_kv_heads)
    acc, _, _, peak, mass = _scratch(job, thread)
    stride = 4 * most * (dim + 2)  # bytes from one piece's partial result to the next
    first = job.partial + stride * (base + head)
    mine = pointer(FLOAT32, first + stride * split * job.num_kv_heads)
    for i in range(0, num_queries * dim, lanes):
        store(mine, i, load(zero, acc, i))
    for m in range(num_queries):
        mine[most * dim + m], mine[most * (dim + 1) + m] = peak[m], mass[m]
    if fetch_add(pointer(INT64, job.splits_done), row * job.num_kv_heads + head, 1) < num_splits - 1:
        return False
    for m in range(num_queries):
        peak[m], mass[m] = -np.inf, 0.0
        for d in range(0, dim, lanes):
            store(acc, m * dim + d, zero)
        for s in range(num_splits):
            peak[m] = max(peak[m], pointer(FLOAT32, first + stride * s * job.num_kv_heads)[most * dim + m])
        for s in range(num_splits):
            theirs = pointer(FLOAT32, first + stride * s * job.num_kv_heads)
            share = exp2(splat(zero, np.float32(theirs[most * dim + m] - peak[m])))
            mass[m] += largest(share) * theirs[most * (dim + 1) + m]
            for d in range(0, dim, lanes):
                store(acc, m * dim + d, fma(load(zero, theirs, m * dim + d), share, load(zero, acc, m * dim + d)))
    return True


@helper
def _finish(job: Any, zero: Any, thread: int, row: int, head: int) -> None:
    """Divide by the softmax sums, the sinks among them, and write the outputs."""
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    acc, _, _, peak, mass = _scratch(job, thread)
    first = pointer(INT32, job.offsets)[row] * job.num_heads + head * group
    for m in range(pointer(INT32, job.num_tokens)[row] * group):
        token, member = divmod(m, group)
        share, sum_of_weights = splat(zero, np.float32(1.0)), mass[m]
        if job.sinks != 0:
            sink = pointer(FLOAT32, job.sinks)[head * group + member] * np.float32(LOG2E)
            highest = max(sink, peak[m])
            share = exp2(splat(zero, np.float32(peak[m] - highest)))
            sum_of_weights = mass[m] * largest(share) + largest(exp2(splat(zero, np.float32(sink - highest))))
        share = div(share, splat(zero, np.float32(sum_of_weights)))
        target = (first + token * job.num_heads + member) * dim
        for d in range(0, dim, num_lanes(zero)):
            store_any(job.kind, job.out, target + d, mul(load(zero, acc, m * dim + d), share))
