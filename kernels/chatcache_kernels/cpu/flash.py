"""Paged attention by AMX tiles, for rows of several new tokens in bf16: prompts, chunks, a turn after a long history.

One piece of work is (row, some of its tokens, key head): all G query heads of those tokens against every key they see.
A block of KEYS keys is brought into the order that tiles want (rows of pages interleaved two by two, for which [D, P]
keys and [P, D] values are both right), then all queries pass over it, 32 at a time: scores by tiles, softmax in float32
registers, weights rounded to bf16, weighted values by tiles. Blocks in a query's future, or before its window, are
skipped. Results depend neither on the piece nor on the batch nor on threads.

The softmax is `softmax.py`. Source: Dao (2023), FlashAttention-2. Symbols: see types.py.
M queries of a piece, counted up to a multiple of 32; query m = token * G + head in group; E = D counted up to 32.
Shapes: q, out [T, H, D] bf16. On one core of a Sapphire Rapids, 9 heads of 64 over 3 key heads, page size 16, 2,048
tokens took 9 ms where gathering and torch's flash attention took 20; 32 tokens after 2,048 took 0.4 ms against 1.5.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ..types import AttentionBatch, KVPages
from .amx import (
    TILE_ROWS,
    configure,
    has_amx,
    release,
    tile_config,
)
from .flash_block import QUERIES, layout, multiply_keys, multiply_values, order_keys, scratch_bytes
from .launch import Launch, compile_kernel, helper, record
from .pairs import has_pair_products, store_rounded
from .softmax import KEYS, weigh
from .tile import LOG2E
from .vectors import (
    BFLOAT16,
    FLOAT32,
    INT32,
    exp2,
    fetch_add,
    first_lane,
    load,
    mul,
    pointer,
    splat,
    store,
    total,
    zeros,
)

MOST_QUERIES = 512  # of a piece
TOKENS = 32  # a piece has a multiple of these, so that its queries fill tiles
PIECES = 4  # for each thread, at least, where there are enough tokens

JOB, PACK = record(
    "q out k v tables sinks scratch config start num_tokens offsets num_rows min_tokens block_tokens table_stride"
    " num_heads num_kv_heads head_dim page_size window",
    "scale softcap",
)
"""Addresses of contiguous arrays, sizes, and options (0 = none). Rows of fewer than `min_tokens` are left alone.
`scratch`: `scratch_bytes` for each thread; `config`: `full_tiles()`; `table_stride`: int32 from row to row."""


def fits(q: Tensor, pages: KVPages) -> bool:
    """Tell whether this CPU, these dtypes and these shapes take the kernel."""
    shapes = pages.page_size % 8 == 0 and KEYS % pages.page_size == 0 and pages.head_dim % 16 == 0
    return shapes and q.dtype == pages.k.dtype == torch.bfloat16 and has_amx() and has_pair_products()


def attend_chunks(
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
    """Attend the rows of at least `min_tokens` new tokens, into `out`; other rows are left alone."""
    threads, num_heads, k = torch.get_num_threads(), q.shape[1], pages.k
    block = block_tokens(len(q), num_heads, pages.num_kv_heads, threads)
    scratch = torch.empty(threads * scratch_bytes(block * (num_heads // pages.num_kv_heads), pages.head_dim) // 4)
    sinks = sinks.float().contiguous() if sinks is not None else None
    layer_bytes = layer * k.stride(0) * k.element_size()
    job = PACK.pack(
        0, 0, q.data_ptr(), out.data_ptr(), k.data_ptr() + layer_bytes, pages.v.data_ptr() + layer_bytes,
        batch.tables.data_ptr(), sinks.data_ptr() if sinks is not None else 0, scratch.data_ptr(),
        full_tiles().data_ptr(), batch.start.data_ptr(), batch.num_tokens.data_ptr(), batch.offsets.data_ptr(),
        batch.tables.shape[0], min_tokens, block, batch.tables.stride(0), num_heads, pages.num_kv_heads,
        pages.head_dim, pages.page_size, window or 0, scale, softcap or 0.0,
    )  # fmt: skip
    flash_kernel(16 if pages.page_size % 16 == 0 else 8)(job, threads)


def block_tokens(num_tokens: int, num_heads: int, num_kv_heads: int, num_threads: int) -> int:
    """Return how many tokens a piece has: enough to be worth bringing keys into order, few enough to share out."""
    most = max(1, MOST_QUERIES * num_kv_heads // num_heads // TOKENS)
    shared = num_tokens * num_kv_heads // (PIECES * num_threads * TOKENS)
    return TOKENS * max(1, min(most, shared))


@cache
def full_tiles() -> Tensor:
    """Return the set-up of eight full tiles."""
    return torch.frombuffer(bytearray(tile_config((TILE_ROWS,) * 8)), dtype=torch.uint8)


@cache
def flash_kernel(lanes: int) -> Launch:
    """Return the launcher; `lanes` (16 or 8) divides the page size. Takes a JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, JOB)[0]
        num_tokens, zero, part = pointer(INT32, job.num_tokens), zeros(16), zeros(lanes)
        item, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        base, configured = 0, False
        for row in range(job.num_rows):
            blocks = 0
            if num_tokens[row] >= job.min_tokens:
                blocks = (num_tokens[row] + job.block_tokens - 1) // job.block_tokens
            while item < base + blocks * job.num_kv_heads:
                if not configured:
                    configure(job.config)
                    configured = True
                block, head = divmod(item - base, job.num_kv_heads)
                _piece(job, zero, part, thread, row, head, (blocks - 1 - block) * job.block_tokens)  # longest first
                item = fetch_add(address, 0, 1)
            base += blocks * job.num_kv_heads
        if configured:
            release()

    return compile_kernel(kernel)


@helper
def _piece(job: Any, zero: Any, part: Any, thread: int, row: int, head: int, token: int) -> None:
    """Attend a block of a row's tokens, from `token` on, to their keys of one head and write the outputs."""
    group = job.num_heads // job.num_kv_heads
    start, offset = pointer(INT32, job.start)[row] + token, pointer(INT32, job.offsets)[row] + token
    tokens = min(job.block_tokens, pointer(INT32, job.num_tokens)[row] - token)
    num, end = tokens * group, start + tokens
    _begin(job, zero, thread, head, offset, start, tokens)
    low = 0
    if job.window > 0:
        low = max(0, start + 1 - job.window) // KEYS * KEYS
    acc, _, peaks, mass, limits, _, _, scores, weights, _ = layout(job, thread)
    limit = pointer(INT32, limits)
    for first in range(low, end, KEYS):
        count = min(KEYS, end - first)
        order_keys(job, zero, part, thread, row, head, first, count)
        for m in range(0, num, QUERIES):
            last = limit[min(m + QUERIES, num) - 1]
            if last > first and (job.window == 0 or first + count > limit[m] - job.window):
                columns = (min(last - first, count) + 31) // 32 * 32
                multiply_keys(job, thread, m, num - m > TILE_ROWS, columns)
                weigh(
                    zero, scores, weights, mass + 64 * m, acc + 4 * job.head_dim * m, peaks + 4 * m, limits + 4 * m,
                    min(QUERIES, num - m), first, columns, job.head_dim, job.window, np.float32(job.scale),
                    np.float32(job.softcap),
                )  # fmt: skip
                multiply_values(job, thread, m, num - m > TILE_ROWS, columns)
    _finish(job, zero, thread, head, offset, tokens)


@helper
def _begin(job: Any, zero: Any, thread: int, head: int, offset: int, start: int, tokens: int) -> None:
    """Gather the queries and clear the results."""
    dim, wide, group = job.head_dim, (job.head_dim + 31) // 32 * 32, job.num_heads // job.num_kv_heads
    acc, q, peak, mass, limits, _, _, _, _, nothing = layout(job, thread)
    for d in range(0, wide, 32):
        store(pointer(FLOAT32, nothing), d // 2, zero)
    num = tokens * group
    for m in range((num + QUERIES - 1) // QUERIES * QUERIES):
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
        store(pointer(FLOAT32, mass), m * 16, zero)
        pointer(FLOAT32, peak)[m] = -np.inf
        pointer(INT32, limits)[m] = start + min(m, num - 1) // group + 1


@helper
def _finish(job: Any, zero: Any, thread: int, head: int, offset: int, tokens: int) -> None:
    """Write the outputs: sums over their softmax sums, the sinks among them."""
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    acc, _, peaks, mass, _, _, _, _, _, _ = layout(job, thread)
    for m in range(tokens * group):
        peak, weight = pointer(FLOAT32, peaks)[m], total(load(zero, pointer(FLOAT32, mass), m * 16))
        share = np.float32(1.0)
        if job.sinks != 0:
            sink = pointer(FLOAT32, job.sinks)[head * group + m % group] * np.float32(LOG2E)
            highest = max(sink, peak)
            share = first_lane(exp2(splat(zero, np.float32(peak - highest))))
            weight = weight * share + first_lane(exp2(splat(zero, np.float32(sink - highest))))
        factor = splat(zero, np.float32(share / weight))
        target = ((offset + m // group) * job.num_heads + head * group + m % group) * dim
        for d in range(0, dim, 16):
            value = mul(load(zero, pointer(FLOAT32, acc), m * dim + d), factor)
            store_rounded(True, pointer(BFLOAT16, job.out), target + d, value)
