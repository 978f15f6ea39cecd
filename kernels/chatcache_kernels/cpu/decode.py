"""Paged attention for rows of few new tokens: decode. Bound by reading K and V once, at the speed of memory.

One piece of work is (row, split, key head): all G query heads of that key head and all of the row's new tokens against
SPLIT keys. The split rule depends on positions alone, so a row's result does not depend on the batch it runs in. The
thread that ends a row's last split merges them by their maxima and sums. What happens inside a piece is `piece.py`.

Symbols: see types.py and piece.py. M = num_tokens * G queries of a piece, query m = token * G + head in group.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray

from .launch import Launch, compile_kernel, helper, record
from .piece import FIELDS, OPTIONS, attend, finish, pack, padded, scratch
from .tile import TILE
from .vectors import (
    FLOAT32,
    INT32,
    INT64,
    exp2,
    fetch_add,
    first_lane,
    fma,
    load,
    num_lanes,
    pointer,
    splat,
    store,
    zeros,
)

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
