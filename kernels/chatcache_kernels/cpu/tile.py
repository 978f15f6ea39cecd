"""One tile of paged attention: scores, the online softmax, and the weighted sum of values, four queries at a time.

A register holds one query's scores of `lanes` tokens (K pages are [D, P]) or `lanes` dimensions of one token (V pages
are [P, D]); four queries share each loaded register. While a tile is computed, the next one is prefetched: pages lie
anywhere, so the CPU cannot guess. Source of the softmax: Milakov and Gimelshein (2018).

Shapes in scratch: q [M / 4, D, 4], scores [M, TILE], acc [M, D], peak and mass [M], all float32; M a multiple of four.
`zero` is a register of zeros: its type says how wide registers are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .launch import helper
from .vectors import (
    add,
    div,
    exp2,
    first_lane,
    fma,
    keep,
    largest,
    load,
    maximum,
    minimum,
    mul,
    num_lanes,
    prefetch,
    splat,
    store,
    total,
)

TILE = 64  # keys between two updates of the running maximum; a multiple of every page size
LOG2E = 1.4426950408889634


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
