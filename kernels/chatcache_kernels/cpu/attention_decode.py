"""One tile of paged attention: scores, the online softmax, and the weighted sum of values, four queries at a time.

A register holds one query's scores of `lanes` tokens (K pages are [D, P]) or `lanes` dimensions of one token (V pages
are [P, D]); four queries share each loaded register. While a tile is computed, the next one is prefetched: pages lie
anywhere, so the CPU cannot guess. Source of the softmax: Milakov and Gimelshein (2018).

Shapes in scratch: q [M / 4, D, 4], scores [M, TILE], acc [M, D], peak and mass [M], all float32; M a multiple of four.
`zero` is a register of zeros: its type says how wide registers are.

One piece of paged attention: some queries of one key head against a run of keys, read in place through a page table.

Query m sees the keys before position limits[m]. Queries are counted up to a multiple of four (M); those past the last
are zeros that nobody reads. What happens inside a tile of keys is `tile.py`; who draws which piece, and what becomes of
its result, is `decode.py` and `shared.py`.

Symbols: see types.py. Scores are in units of log2, so that the softmax is exp2. A result is acc [M, D], the weighted
values; peak [M], the largest score; mass [M], the sum of the weights relative to it.

Paged attention for rows of few new tokens: decode. Bound by reading K and V once, at the speed of memory.

One piece of work is (row, split, key head): all G query heads of that key head and all of the row's new tokens against
SPLIT keys. The split rule depends on positions alone, so a row's result does not depend on the batch it runs in. The
thread that ends a row's last split merges them by their maxima and sums. What happens inside a piece is `piece.py`.

Symbols: see types.py and piece.py. M = num_tokens * G queries of a piece, query m = token * G + head in group.

What the attention kernels must be told of a step, for all layers at once: a `Program`'s jobs take it as fields.

`attention.py` and `shared.py` say the same of one layer. Layers share scratch, but each counts its finished pieces.
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
from .launch import Launch, compile_kernel, helper, record
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
    keep,
    largest,
    load,
    load_any,
    maximum,
    minimum,
    mul,
    num_lanes,
    pointer,
    prefetch,
    scatter,
    splat,
    store,
    store_any,
    total,
    zeros,
)

TILE = 64  # keys between two updates of the running maximum; a multiple of every page size


@helper
def score(
    zero: Any, k: Any, base: int, soon: int, q: Any, scores: Any, part: int, num: int, dim: int, size: int
) -> None:
    """Multiply `num` queries with the page of keys at `base`, into scores from column `part`. Prefetch page `soon`."""
    lanes = num_lanes(zero)
    wide = num // 8 * 8
    for m in range(0, wide, 8):
        score_eight(zero, k, base, soon, q, scores, part, m, dim, size)
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
            column = m * TILE + part + t
            store(scores, column, add(a0, b0))
            store(scores, column + TILE, add(a1, b1))
            store(scores, column + 2 * TILE, add(a2, b2))
            store(scores, column + 3 * TILE, add(a3, b3))


@helper
def score_eight(
    zero: Any, k: Any, base: int, soon: int, q: Any, scores: Any, part: int, m: int, dim: int, size: int
) -> None:
    """Do what `score` does for the eight queries from m on."""
    lanes, later = num_lanes(zero), 4 * dim  # from four queries to the next four
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
        column = m * TILE + part + t
        store(scores, column, add(a0, b0))
        store(scores, column + TILE, add(a1, b1))
        store(scores, column + 2 * TILE, add(a2, b2))
        store(scores, column + 3 * TILE, add(a3, b3))
        store(scores, column + 4 * TILE, add(a4, b4))
        store(scores, column + 5 * TILE, add(a5, b5))
        store(scores, column + 6 * TILE, add(a6, b6))
        store(scores, column + 7 * TILE, add(a7, b7))


@helper
def weigh(
    zero: Any,
    m: int,
    first: int,
    end: int,
    count: int,
    softcap: Any,
    scores: Any,
    peak: Any,
    mass: Any,
    acc: Any,
    dim: int,
) -> None:
    """Turn query m's scores in one tile into weights relative to its running maximum, which may grow.

    Columns first .. end - 1 are visible, of `count` that hold tokens. Returns what earlier weights must be scaled by.
    """
    lanes = num_lanes(zero)
    top = splat(zero, np.float32(-np.inf))
    for t in range(0, count, lanes):
        x = load(zero, scores, m * TILE + t)
        if softcap > 0:
            x = soften(zero, x, softcap)
        if first > t or end < t + lanes:
            x = keep(x, first - t, end - t, np.float32(-np.inf))
        store(scores, m * TILE + t, x)
        top = maximum(top, x)
    highest = max(peak[m], largest(top))
    shift = splat(zero, np.float32(-highest) if highest > -np.inf else np.float32(0.0))
    sums = zero
    for t in range(0, count, lanes):
        x = exp2(add(load(zero, scores, m * TILE + t), shift))
        store(scores, m * TILE + t, x)
        sums = add(sums, x)
    if peak[m] < highest:
        decay = exp2(splat(zero, np.float32(peak[m] - highest)))
        for d in range(m * dim, (m + 1) * dim, lanes):
            store(acc, d, mul(load(zero, acc, d), decay))
        mass[m] *= first_lane(decay)
        peak[m] = highest
    mass[m] += total(sums)


@helper
def soften(zero: Any, x: Any, softcap: Any) -> Any:
    """Return softcap * tanh(x / softcap), in units of log2."""
    one, cap = splat(zero, np.float32(1.0)), splat(zero, np.float32(softcap * np.float32(LOG2E)))
    e = exp2(minimum(mul(x, splat(zero, np.float32(2.0 * LOG2E) / softcap)), splat(zero, np.float32(126.0))))
    return mul(cap, add(one, div(splat(zero, np.float32(-2.0)), add(e, one))))


@helper
def accumulate(
    zero: Any, v: Any, base: int, soon: int, scores: Any, part: int, count: int, acc: Any, num: int, dim: int
) -> None:
    """Add `count` weighted values of the page at `base` to `num` queries. Slots past `count` are not read."""
    lanes = num_lanes(zero)
    wide = num // 8 * 8
    for m in range(0, wide, 8):
        accumulate_eight(zero, v, base, soon, scores, part, count, acc, m, dim)
    for m in range(wide, num, 4):
        row = m * TILE + part
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
                a1 = fma(splat(zero, scores[row + t + TILE]), even, a1)
                a2 = fma(splat(zero, scores[row + t + 2 * TILE]), even, a2)
                a3 = fma(splat(zero, scores[row + t + 3 * TILE]), even, a3)
                b0 = fma(splat(zero, scores[row + t + 1]), odd, b0)
                b1 = fma(splat(zero, scores[row + t + 1 + TILE]), odd, b1)
                b2 = fma(splat(zero, scores[row + t + 1 + 2 * TILE]), odd, b2)
                b3 = fma(splat(zero, scores[row + t + 1 + 3 * TILE]), odd, b3)
            if count % 2:
                last, end = load(zero, v, base + (count - 1) * dim + d), row + count - 1
                a0 = fma(splat(zero, scores[end]), last, a0)
                a1 = fma(splat(zero, scores[end + TILE]), last, a1)
                a2 = fma(splat(zero, scores[end + 2 * TILE]), last, a2)
                a3 = fma(splat(zero, scores[end + 3 * TILE]), last, a3)
            store(acc, at, add(a0, b0))
            store(acc, at + dim, add(a1, b1))
            store(acc, at + 2 * dim, add(a2, b2))
            store(acc, at + 3 * dim, add(a3, b3))


@helper
def accumulate_eight(
    zero: Any, v: Any, base: int, soon: int, scores: Any, part: int, count: int, acc: Any, m: int, dim: int
) -> None:
    """Do what `accumulate` does for the eight queries from m on, to the bit."""
    lanes, row, later = num_lanes(zero), m * TILE + part, 4 * TILE
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
            a1 = fma(splat(zero, scores[at + TILE]), even, a1)
            a2 = fma(splat(zero, scores[at + 2 * TILE]), even, a2)
            a3 = fma(splat(zero, scores[at + 3 * TILE]), even, a3)
            a4 = fma(splat(zero, scores[at + later]), even, a4)
            a5 = fma(splat(zero, scores[at + later + TILE]), even, a5)
            a6 = fma(splat(zero, scores[at + later + 2 * TILE]), even, a6)
            a7 = fma(splat(zero, scores[at + later + 3 * TILE]), even, a7)
            b0 = fma(splat(zero, scores[at + 1]), odd, b0)
            b1 = fma(splat(zero, scores[at + 1 + TILE]), odd, b1)
            b2 = fma(splat(zero, scores[at + 1 + 2 * TILE]), odd, b2)
            b3 = fma(splat(zero, scores[at + 1 + 3 * TILE]), odd, b3)
            b4 = fma(splat(zero, scores[at + later + 1]), odd, b4)
            b5 = fma(splat(zero, scores[at + later + 1 + TILE]), odd, b5)
            b6 = fma(splat(zero, scores[at + later + 1 + 2 * TILE]), odd, b6)
            b7 = fma(splat(zero, scores[at + later + 1 + 3 * TILE]), odd, b7)
        if count % 2:
            last, end = load(zero, v, base + (count - 1) * dim + d), row + count - 1
            a0 = fma(splat(zero, scores[end]), last, a0)
            a1 = fma(splat(zero, scores[end + TILE]), last, a1)
            a2 = fma(splat(zero, scores[end + 2 * TILE]), last, a2)
            a3 = fma(splat(zero, scores[end + 3 * TILE]), last, a3)
            a4 = fma(splat(zero, scores[end + later]), last, a4)
            a5 = fma(splat(zero, scores[end + later + TILE]), last, a5)
            a6 = fma(splat(zero, scores[end + later + 2 * TILE]), last, a6)
            a7 = fma(splat(zero, scores[end + later + 3 * TILE]), last, a7)
        at = m * dim + d
        store(acc, at, add(a0, b0))
        store(acc, at + dim, add(a1, b1))
        store(acc, at + 2 * dim, add(a2, b2))
        store(acc, at + 3 * dim, add(a3, b3))
        store(acc, at + 4 * dim, add(a4, b4))
        store(acc, at + 5 * dim, add(a5, b5))
        store(acc, at + 6 * dim, add(a6, b6))
        store(acc, at + 7 * dim, add(a7, b7))


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


SPLIT = 512  # keys of one piece of work; a multiple of TILE
FEW_QUERIES = 64  # a row of up to this many queries for each key head is decoded in place (measured)

JOB, PACK = record(f"{FIELDS} start num_tokens offsets splits_done partial num_rows max_tokens", OPTIONS)
"""`piece.FIELDS`; addresses of contiguous arrays; sizes. `splits_done` [R, Hkv] int64, zeroed; `partial`:
partial_floats(...) for each piece. Both are used where a row has more than one split."""


@cache
def register_lanes(page_size: int, head_dim: int) -> int:
    """Return how many float32 a register should hold to fit page and head size, 0 if none fits."""
    fitting = (n for n in (16, 8) if page_size % n == 0 and head_dim % n == 0 and 64 % page_size == 0)
    return next(fitting, 0)


@cache
def decode_kernel(kind: int, lanes: int) -> Launch:
    """Return the launcher for pages of one element kind; `lanes` divides page and head size. Takes a JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, JOB)[0]
        _work(address, job, zeros(lanes), pointer(kind, job.k), pointer(kind, job.v))

    return compile_kernel(kernel)


def max_queries(max_tokens: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the largest M of a piece."""
    return padded(max_tokens * (num_heads // num_kv_heads))


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
    """Attend the row's queries of one key head to one split. Leaves the result in scratch."""
    group = job.num_heads // job.num_kv_heads
    start, tokens = pointer(INT32, job.start)[row], pointer(INT32, job.num_tokens)[row]
    for token in range(tokens):
        pack(job, zero, thread, pointer(INT32, job.offsets)[row] + token, start + token + 1, head, token * group)
    low, end = split * SPLIT, min((split + 1) * SPLIT, start + tokens)
    if job.window > 0:
        low = max(low, (start + 1 - job.window) // TILE * TILE)
    attend(job, zero, k, v, thread, row, head, low, end, tokens * group)


@helper
def _merge(job: Any, zero: Any, thread: int, row: int, head: int, base: int, split: int, num_splits: int) -> bool:
    """Keep one split's result. Returns True to the thread that brought the last one, with all of them added up."""
    dim, lanes, most = job.head_dim, num_lanes(zero), job.max_queries
    num_queries = pointer(INT32, job.num_tokens)[row] * (job.num_heads // job.num_kv_heads)
    acc, _, _, peak, mass, _ = scratch(job, thread)
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
            mass[m] += first_lane(share) * theirs[most * (dim + 1) + m]
            for d in range(0, dim, lanes):
                store(acc, m * dim + d, fma(load(zero, theirs, m * dim + d), share, load(zero, acc, m * dim + d)))
    return True


@helper
def _finish(job: Any, zero: Any, thread: int, row: int, head: int) -> None:
    """Write the row's outputs of one key head."""
    for token in range(pointer(INT32, job.num_tokens)[row]):
        first = token * (job.num_heads // job.num_kv_heads)
        finish(job, zero, thread, pointer(INT32, job.offsets)[row] + token, head, first)


@dataclass(frozen=True, slots=True)
class StepFields:
    """Fields of every layer's job, and the tensors that they point to besides the batch's own."""

    fields: dict[str, Any]
    held: tuple[Tensor, ...]


def decode_fields(batch: AttentionBatch, pages: KVPages, num_heads: int, num_threads: int) -> StepFields:
    """Return the fields of `decode.JOB` that a step decides."""
    num_rows, most = batch.tables.shape[0], batch.max_new_tokens
    queries = max_queries(most, num_heads, pages.num_kv_heads)
    done = num_rows * pages.num_kv_heads
    num_splits = -(-batch.max_context_tokens // SPLIT)
    num_states = done * num_splits if num_splits > 1 else 0
    room = Workspace.of(pages, num_threads * scratch_floats(queries, pages.head_dim), num_states, queries, done)
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
    """Addresses of working memory: of scratch and states, and of each layer's counts."""

    scratch: int
    states: int
    done: Any
    held: tuple[Tensor, ...]

    @classmethod
    def of(cls, pages: KVPages, scratch: int, num_states: int, queries: int, num_done: int) -> Workspace:
        floats = torch.empty(scratch + num_states * partial_floats(queries, pages.head_dim))
        done = torch.zeros(pages.num_layers, num_done if num_states else 0, dtype=torch.int64)
        layers = done.data_ptr() + 8 * done.stride(0) * np.arange(pages.num_layers)
        return cls(floats.data_ptr(), floats.data_ptr() + 4 * scratch, layers, (floats, done))
