"""The inner loop of paged attention: one tile of queries over the keys of a piece, BLOCK_N at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from .rounding import INTERPRETED, rounded


@triton.jit
def _dot(a, b, total):  # type: ignore[no-untyped-def]
    """Return a @ b + total, in float32. The interpreter would multiply the bits of bfloat16 as integers."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Return tanh(x), which is 1 to the last bit from 10 on."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(x, 20.0) * 2.8853900817779268))


@triton.jit
def attend_tiles(  # type: ignore[no-untyped-def]
    weighted,
    total,
    peak,
    query,
    position,
    k_head,
    v_head,
    table,
    low,
    high,
    scale,
    cap,
    window,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Attend to keys low .. high - 1 of one key head; return (weighted, total, peak), the running state of a softmax.

    Shapes: query [M, W], weighted [M, W] float32, total, peak, position [M], W = HEAD_DIM rounded up to a power of two.
    `scale` turns products into exponents of 2 or, if CAPPED, into arguments of tanh, and `cap` those into exponents of
    2; `peak` is the largest score before that last factor. Unless MASKED, every query must see every key and BLOCK_N
    must divide their number.

    Keys past the end are read as the last one again, so nothing that no token wrote is ever multiplied. The page
    numbers of a tile are loaded while the tile before it is computed and carried over: the pipeliner then sees no loads
    that wait for loads, and keeps num_stages - 1 whole tiles of keys and values in flight, not half as many.
    """
    factor = cap if CAPPED else scale
    column = tl.arange(0, query.shape[1])
    inside = (column < HEAD_DIM)[None, :]
    last = tl.maximum(high - 1, 0)
    reach = tl.minimum(position, last)
    key = low + tl.arange(0, BLOCK_N)
    near = tl.minimum(key, last).to(tl.uint32)
    page = tl.load(table + near // PAGE_SIZE)
    for _ in tl.range(low, high, BLOCK_N):
        at = page.to(tl.int64) * PAGE_STRIDE + (near % PAGE_SIZE * HEAD_DIM).to(tl.int32)
        at = at[:, None] + column[None, :]
        if query.shape[1] == HEAD_DIM:
            keys = tl.load(k_head + at)
            values = tl.load(v_head + at)
        else:
            keys = tl.load(k_head + at, mask=inside, other=0.0)
            values = tl.load(v_head + at, mask=inside, other=0.0)
        score = _dot(query, keys.T, tl.zeros([query.shape[0], BLOCK_N], tl.float32))
        if CAPPED:
            score = _tanh(score * scale)
        if MASKED:
            seen = key[None, :] <= reach[:, None]
            if WINDOWED:
                seen &= key[None, :] > position[:, None] - window
            score = tl.where(seen, score, -float("inf"))
        key += BLOCK_N
        near = tl.minimum(key, last).to(tl.uint32)
        page = tl.load(table + near // PAGE_SIZE)
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score * factor - (higher * factor)[:, None])
        decay = tl.exp2((peak - higher) * factor)
        if len(total.shape) == 2:
            total = total * decay[:, None] + weight
        else:
            total = total * decay + tl.sum(weight, 1)
        weighted = _dot(rounded(weight, values.dtype), values, weighted * decay[:, None])
        peak = higher
    return weighted, total, peak
