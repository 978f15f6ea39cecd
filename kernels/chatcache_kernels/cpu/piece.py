"""One piece of paged attention: some queries of one key head against a run of keys, read in place through a page table.

Query m sees the keys before position limits[m]. Queries are counted up to a multiple of four (M); those past the last
are zeros that nobody reads. What happens inside a tile of keys is `tile.py`; who draws which piece, and what becomes of
its result, is `decode.py` and `shared.py`.

Symbols: see types.py. Scores are in units of log2, so that the softmax is exp2. A result is acc [M, D], the weighted
values; peak [M], the largest score; mass [M], the sum of the weights relative to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .launch import helper
from .tile import LOG2E, TILE, accumulate, score, weigh
from .vectors import (
    FLOAT32,
    INT32,
    div,
    exp2,
    first_lane,
    load,
    load_any,
    mul,
    num_lanes,
    pointer,
    scatter,
    splat,
    store,
    store_any,
)

FIELDS = "q out kind k v tables sinks scratch max_queries table_stride num_heads num_kv_heads head_dim page_size window"
"""Job fields that a piece reads: addresses of contiguous arrays, sizes, and options (0 = none). `kind`: of q and out.
`scratch`: scratch_floats(...) for each thread. `max_queries`: the largest M. `table_stride`: int32 from one row of
`tables` to the next."""
OPTIONS = "scale softcap"


def padded(num_queries: int) -> int:
    """Return M."""
    return -(-num_queries // 4) * 4


def scratch_floats(queries: int, head_dim: int) -> int:
    """Return the float32 count of one thread's scratch: acc, q, scores, peak, mass, limits."""
    return queries * (2 * head_dim + TILE + 3)


def partial_floats(queries: int, head_dim: int) -> int:
    """Return the float32 count of a result that is kept: acc, peak, mass."""
    return queries * (head_dim + 2)


@helper
def scratch(job: Any, thread: int) -> Any:
    """Return a thread's acc, q, scores, peak, mass and limits."""
    most, dim = job.max_queries, job.head_dim
    acc = job.scratch + 4 * thread * most * (2 * dim + TILE + 3)
    peak = acc + 4 * most * (2 * dim + TILE)
    return (
        pointer(FLOAT32, acc),
        pointer(FLOAT32, acc + 4 * most * dim),
        pointer(FLOAT32, acc + 8 * most * dim),
        pointer(FLOAT32, peak),
        pointer(FLOAT32, peak + 4 * most),
        pointer(INT32, peak + 8 * most),
    )


@helper
def pack(job: Any, zero: Any, thread: int, token: int, limit: int, head: int, m: int) -> None:
    """Make one token's queries of a key head those from m on: scaled, in the order [M / 4, D, 4]."""
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    _, q, _, _, _, limits = scratch(job, thread)
    scale = splat(zero, np.float32(job.scale if job.softcap > 0 else job.scale * LOG2E))
    source = (token * job.num_heads + head * group) * dim
    for g in range(group):
        at = (m + g) // 4 * 4 * dim + (m + g) % 4
        limits[m + g] = limit
        for d in range(0, dim, num_lanes(zero)):
            scatter(q, at + 4 * d, 4, mul(load_any(job.kind, zero, job.q, source + g * dim + d), scale))


@helper
def attend(
    job: Any, zero: Any, k: Any, v: Any, thread: int, row: int, head: int, low: int, end: int, num_queries: int
) -> None:
    """Attend the packed queries to keys low .. end - 1 of a row. Leaves acc, peak and mass in scratch.

    A page begins at `low`.
    """
    dim, size, lanes = job.head_dim, job.page_size, num_lanes(zero)
    table = pointer(INT32, job.tables + 4 * row * job.table_stride)
    acc, q, scores, peak, mass, limits = scratch(job, thread)
    num = (num_queries + 3) // 4 * 4
    for m in range(num_queries, num):
        for d in range(dim):
            q[m // 4 * 4 * dim + d * 4 + m % 4] = 0.0
    for i in range(0, num * dim, lanes):
        store(acc, i, zero)
    for m in range(num):
        peak[m], mass[m] = -np.inf, 0.0
    for tile in range(low, end, TILE):
        count = min(TILE, end - tile)
        for part in range(0, count, size):
            base, soon = _locate(job, table, head, tile + part, end)
            score(zero, k, base, soon, q, scores, part, num, dim, size)
        for m in range(num_queries):
            limit = limits[m] - tile  # columns from here on are in this query's future
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
def finish(job: Any, zero: Any, thread: int, token: int, head: int, first: int) -> None:
    """Write a token's outputs of one key head: queries `first` on over their softmax sums, the sinks among them."""
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    acc, _, _, peak, mass, _ = scratch(job, thread)
    for g in range(group):
        m = first + g
        share, sum_of_weights = splat(zero, np.float32(1.0)), mass[m]
        if job.sinks != 0:
            sink = pointer(FLOAT32, job.sinks)[head * group + g] * np.float32(LOG2E)
            highest = max(sink, peak[m])
            share = exp2(splat(zero, np.float32(peak[m] - highest)))
            sum_of_weights = mass[m] * first_lane(share) + first_lane(exp2(splat(zero, np.float32(sink - highest))))
        share = div(share, splat(zero, np.float32(sum_of_weights)))
        target = (token * job.num_heads + head * group + g) * dim
        for d in range(0, dim, num_lanes(zero)):
            store_any(job.kind, job.out, target + d, mul(load(zero, acc, m * dim + d), share))
