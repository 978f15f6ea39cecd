"""One thread's block of keys in the order that AMX tiles want, and the products of queries with it.

A thread's scratch holds acc, q, mass, peak and limits of all queries of a piece; keys, values, scores and weights of
one block; and a row of zeros. Symbols: those of `flash.py`.
"""

from __future__ import annotations

from typing import Any

from .amx import TILE_BYTES, TILE_ROWS, tile_clear, tile_dot, tile_load, tile_store
from .launch import helper
from .pairs import interleave
from .softmax import KEYS
from .vectors import FLOAT32, INT32, num_lanes, pointer, store

QUERIES = 2 * TILE_ROWS  # queries that pass over a block at a time


def scratch_bytes(queries: int, head_dim: int) -> int:
    """Return one thread's scratch: acc, q, peak, mass, limits; keys, values, scores, weights, a row of zeros."""
    wide = _even_tiles(head_dim)
    queries = -(-queries // QUERIES) * QUERIES
    return queries * (4 * head_dim + 2 * wide + 72) + KEYS * 2 * (wide + head_dim) + QUERIES * KEYS * 6 + 2 * wide


def _even_tiles(head_dim: int) -> int:
    return -(-head_dim // 32) * 32


@helper
def layout(job: Any, thread: int) -> Any:
    """Return where a thread's acc, q, peak, mass, limits, keys, values, scores, weights and zeros lie."""
    dim, wide = job.head_dim, (job.head_dim + 31) // 32 * 32
    most = (job.block_tokens * (job.num_heads // job.num_kv_heads) + QUERIES - 1) // QUERIES * QUERIES
    each = most * (4 * dim + 2 * wide + 72) + KEYS * 2 * (wide + dim) + QUERIES * KEYS * 6 + 2 * wide
    acc = job.scratch + thread * each
    q = acc + most * 4 * dim
    mass = q + most * 2 * wide
    peak = mass + most * 64
    limits = peak + most * 4
    keys = limits + most * 4
    values = keys + KEYS * 2 * wide
    scores = values + KEYS * 2 * dim
    weights = scores + QUERIES * KEYS * 4
    return acc, q, peak, mass, limits, keys, values, scores, weights, weights + QUERIES * KEYS * 2


@helper
def order_keys(job: Any, zero: Any, part: Any, thread: int, row: int, head: int, first: int, count: int) -> None:
    """Bring keys and values of positions first .. first + count - 1 into tiles. Slots past them are never used.

    keys [KEYS / 16, E / 32] tiles of [16 pairs of dimensions, 16 keys, 2]; values [KEYS / 32, D / 16] tiles of
    [16 pairs of keys, 16 dimensions, 2].
    """
    dim, wide, size, lanes = job.head_dim, (job.head_dim + 31) // 32 * 32, job.page_size, num_lanes(part)
    table = pointer(INT32, job.tables + 4 * row * job.table_stride)
    _, _, _, _, _, keys, values, _, _, nothing = layout(job, thread)
    for t in range(0, count, lanes):
        page = (table[(first + t) // size] * job.num_kv_heads + head) * size * dim
        source = job.k + 2 * (page + (first + t) % size)
        for d in range(0, wide, 2):
            at = (t // 16 * wide // 32 + d // 32) * TILE_BYTES + d % 32 * 32 + t % 16 * 4
            even = source + 2 * d * size if d < dim else nothing
            odd = source + 2 * (d + 1) * size if d < dim else nothing
            store(pointer(FLOAT32, keys + at), 0, interleave(part, even, odd))
    for t in range(0, (count + 31) // 32 * 32, 2):
        even, odd, step = nothing, nothing, 0
        if t < count:
            page = (table[(first + t) // size] * job.num_kv_heads + head) * size * dim
            even, step = job.v + 2 * (page + (first + t) % size * dim), 2
            odd = even + 2 * dim if t + 1 < count else nothing
        target = values + t // 32 * (dim // 16) * TILE_BYTES + t % 32 * 32
        for d in range(0, dim, 16):
            pair = interleave(zero, even + step * d, odd + 2 * d)
            store(pointer(FLOAT32, target + d // 16 * TILE_BYTES), 0, pair)


@helper
def multiply_keys(job: Any, thread: int, m: int, more: bool, columns: int) -> None:
    """Score 32 queries (16 unless `more`) against the block's first `columns` keys."""
    wide = (job.head_dim + 31) // 32 * 32
    _, q, _, _, _, keys, _, scores, _, _ = layout(job, thread)
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
        tile_store(0, at, 4 * KEYS)
        tile_store(1, at + 64, 4 * KEYS)
        if more:
            tile_store(2, at + TILE_ROWS * 4 * KEYS, 4 * KEYS)
            tile_store(3, at + TILE_ROWS * 4 * KEYS + 64, 4 * KEYS)


@helper
def multiply_values(job: Any, thread: int, m: int, more: bool, columns: int) -> None:
    """Add the weighted values of the block's first `columns` keys to 32 queries (16 unless `more`)."""
    dim = job.head_dim
    acc, _, _, _, _, _, values, _, weights, _ = layout(job, thread)
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
            tile_load(4, weights + 64 * step, 2 * KEYS)
            tile_load(6, right, 64)
            tile_dot(0, 4, 6)
            if second:
                tile_load(7, right + TILE_BYTES, 64)
                tile_dot(1, 4, 7)
            if more:
                tile_load(5, weights + 64 * step + TILE_ROWS * 2 * KEYS, 2 * KEYS)
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
