"""The online softmax of `flash.py`: scores of some queries against a block of keys become weights in bf16.

The largest score is followed loosely: what was added up is rescaled only once a score lies SLACK above it, so that most
lines need neither a maximum nor a sum over lanes. Source: Milakov and Gimelshein (2018).

Shapes, all addresses: scores [32, KEYS] float32, weights [32, KEYS] bf16, and of the queries at hand sums [M, 16]
float32 (of weights, by lane), acc [M, D], peaks [M] float32, limits [M] int32: keys from there on lie in the future.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .launch import helper
from .pairs import any_above, exp2_coarse, store_pair
from .tile import LOG2E, soften
from .vectors import (
    BFLOAT16,
    FLOAT32,
    INT32,
    add,
    exp2,
    fma,
    keep,
    largest,
    load,
    maximum,
    mul,
    pointer,
    splat,
    store,
)

KEYS = 128  # keys of a block: with scores and weights they fit the first cache; more rescale less often
SLACK = 8.0  # how far (log2) a score may lie above the maximum that weights are relative to


@helper
def weigh(
    zero: Any, scores: int, weights: int, sums: int, acc: int, peaks: int, limits: int, num: int, first: int,
    columns: int, dim: int, window: int, scale: Any, softcap: Any,
) -> None:  # fmt: skip
    """Turn the scores of `num` queries against the keys from `first` on into weights, and add up their sums."""
    peak, limit, factor = pointer(FLOAT32, peaks), pointer(INT32, limits), np.float32(scale * np.float32(LOG2E))
    if softcap > 0:
        _soften(zero, scores, num, columns, scale, softcap)
        factor = np.float32(1.0)
    if limit[0] - first < columns or (window > 0 and limit[num - 1] - window > first):
        _hide(zero, scores, limits, num, first, columns, window)
    by = splat(zero, factor)
    for query in range(num):
        line, own = pointer(FLOAT32, scores), pointer(FLOAT32, sums + 64 * query)
        top, other = load(zero, line, 0), load(zero, line, 16)
        for t in range(32, columns, 32):
            top, other = maximum(top, load(zero, line, t)), maximum(other, load(zero, line, t + 16))
        top, highest = mul(maximum(top, other), by), peak[query]
        if any_above(top, np.float32(highest + np.float32(SLACK))):
            peak[query] = largest(top)
            _rescale(zero, acc + 4 * dim * query, dim, own, np.float32(highest - peak[query]))
            highest = peak[query]
        shift = splat(zero, np.float32(-highest) if highest > -np.inf else np.float32(0.0))
        if columns == KEYS:
            _exponents(zero, line, pointer(BFLOAT16, weights), own, by, shift, KEYS)
        else:
            _exponents(zero, line, pointer(BFLOAT16, weights), own, by, shift, columns)
        scores += 4 * KEYS
        weights += 2 * KEYS


@helper
def _exponents(zero: Any, scores: Any, weights: Any, sums: Any, scale: Any, shift: Any, columns: int) -> None:
    """Write one query's weights and add them to its sums."""
    total_low, total_high = load(zero, sums, 0), zero
    for t in range(0, columns, 32):
        low = exp2_coarse(fma(load(zero, scores, t), scale, shift))
        high = exp2_coarse(fma(load(zero, scores, t + 16), scale, shift))
        store_pair(weights, t, low, high)
        total_low, total_high = add(total_low, low), add(total_high, high)
    store(sums, 0, add(total_low, total_high))


@helper
def _soften(zero: Any, scores: int, num: int, columns: int, scale: Any, softcap: Any) -> None:
    """Soft-cap the scores of `num` queries."""
    for _ in range(num):
        line = pointer(FLOAT32, scores)
        for t in range(0, columns, 16):
            store(line, t, soften(zero, mul(load(zero, line, t), splat(zero, scale)), softcap))
        scores += 4 * KEYS


@helper
def _hide(zero: Any, scores: int, limits: int, num: int, first: int, columns: int, window: int) -> None:
    """Make the scores of keys that a query does not see -inf: those in its future and before its window."""
    for n in range(num):
        line, end = pointer(FLOAT32, scores), pointer(INT32, limits)[n] - first
        begin = end - window if window > 0 else 0
        for t in range(0, columns, 16):
            if begin > t or end < t + 16:
                store(line, t, keep(load(zero, line, t), begin - t, end - t, np.float32(-np.inf)))
        scores += 4 * KEYS


@helper
def _rescale(zero: Any, acc: int, dim: int, sums: Any, growth: Any) -> None:
    """Make what was added up for a query relative to a maximum that has grown by -growth."""
    decay, values = exp2(splat(zero, growth)), pointer(FLOAT32, acc)
    for d in range(0, dim, 16):
        store(values, d, mul(load(zero, values, d), decay))
    store(sums, 0, mul(load(zero, sums, 0), decay))
