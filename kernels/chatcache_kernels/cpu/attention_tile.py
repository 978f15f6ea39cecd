"""Paged attention to one tile of keys: scores, online softmax and weighted values, in SIMD registers.

A register holds the scores of one query for `lanes` tokens (K pages are [D, P]) or `lanes` dimensions of one value (V
pages are [P, D]); four or eight queries share every loaded register. Scores are in units of log2, so that the softmax
uses exp2. With AVX512-BF16, bf16 keys and values are multiplied as they are, in pairs of dimensions and of tokens
(argument `pairs`): queries are rounded to bf16 before they are scaled, and softmax weights after their sum is taken, as
in prefill. While a page is read, another one is prefetched: pages are scattered, so the CPU cannot predict them.

Symbols: see `attention_decode`. The argument `zero` is a register of zeros: its type is the register width.

Source: online softmax, Milakov and Gimelshein (2018).
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from .bf16 import emit_bf16, emit_dot_pairs, emit_interleaved
from .launch import helper
from .simd import (
    F32,
    I16,
    I32,
    I64,
    LOG2E,
    REGISTER_LANES,
    add,
    div,
    emit_constant,
    emit_element_prefetch,
    emit_fma,
    emit_loop,
    emit_narrowed,
    emit_pointer,
    emit_splat,
    emit_widened,
    exp2,
    first_lane,
    load,
    mask_lanes,
    maximum,
    minimum,
    mul,
    num_lanes,
    reduce_max,
    reduce_sum,
    simd_intrinsic,
    splat,
    store,
)

# Queries that share a loaded register, at most, so that their sums fit the registers. AVX2 has half as many, of half
# the size: with 8 queries, and two sums for each, 32 rows of 1,000 tokens took 1.4 times as long (Zen 3).
MAX_LOAD_QUERIES = 8 if REGISTER_LANES == 16 else 4
TILE_KEYS = 64  # keys between two updates of the running maximum; a multiple of every page size


@helper
def score_page(
    zero: Any, pairs: bool, k: Any, base: int, soon: int, q: Any, scores: Any, part: int, num: int, dim: int, size: int,
    scale: Any,
) -> None:  # fmt: skip
    """Compute the scores of `num` queries against the keys of one page, and prefetch another.

    `base`, `soon`: offsets in `k` of the page and of the page to prefetch. The scores of the page's tokens go to the
    columns of `scores` from `part` on. Shapes: q as in the scratch, scores [M, TILE_KEYS].
    """
    wide, words = num // MAX_LOAD_QUERIES * MAX_LOAD_QUERIES, dim // 2 if pairs else dim  # of a query
    for t in range(0, size, num_lanes(zero)):
        at, column = base + t, part + t
        for m in range(0, wide, MAX_LOAD_QUERIES):
            first, score = m * words, m * TILE_KEYS + column
            score_queries(
                zero, pairs, MAX_LOAD_QUERIES, k, at, size, soon + t, q, first, words, scores, score, dim // 4, scale
            )
        if wide < num:
            first, score = wide * words, wide * TILE_KEYS + column
            score_queries(zero, pairs, 4, k, at, size, soon + t, q, first, words, scores, score, dim // 4, scale)


@simd_intrinsic
def score_queries(
    typing: Any, zero: Any, pairs: Any, count: Any, k: Any, at: Any, row: Any, soon: Any, q: Any, first: Any,
    words: Any, scores: Any, column: Any, num_steps: Any, scale: Any,
) -> Any:  # fmt: skip
    """Compute the scores of `count` (a literal) queries for one register of tokens, in steps of four dimensions.

    `at`: offset in `k` of the tokens' first dimension; `row`: from one dimension to the next; `soon`: offset of what is
    prefetched. `first`: offset in `q` of the first query, of `words` words each. Queries in pairs are not scaled yet.
    `column`: place of the first score; the next query's are TILE_KEYS further on.
    """
    is_paired, num, lanes = pairs.literal_value, count.literal_value, zero.lanes
    num_sums = 2 if lanes <= REGISTER_LANES else 1  # of a query; a single sum waits for itself

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, start, stride, ahead, queries, first_word, num_words, target, first_score, steps, factor = args[3:]

        def emit_step(step: Any, totals: list[Any]) -> list[Any]:
            for pair in range(2):
                offset = builder.mul(emit_affine(builder, step, 4, 2 * pair), stride)
                emit_element_prefetch(builder, source, builder.add(ahead, offset), k.dtype)
                even = builder.add(start, offset)
                rows = emit_rows(builder, is_paired, source, even, builder.add(even, stride), lanes, k.dtype)
                for query in range(num):
                    group, place_in_group = divmod(query, 4)
                    word = builder.add(first_word, builder.mul(num_words, ir.Constant(I64, 4 * group)))
                    for number, values in enumerate(rows):
                        line = emit_affine(builder, step, *((2, pair) if is_paired else (4, 2 * pair + number)))
                        index = builder.add(word, emit_affine(builder, line, 4, place_in_group))
                        total = num_sums * query + (pair if is_paired else number) % num_sums
                        weight = emit_splat(builder, builder.load(emit_pointer(builder, queries, index, F32)), lanes)
                        totals[total] = emit_multiply_add(builder, is_paired, values, weight, totals[total])
            return totals

        totals = emit_loop(builder, steps, [emit_constant(lanes, 0.0)] * (num_sums * num), emit_step)
        for query in range(num):
            score = reduce(builder.fadd, totals[num_sums * query : num_sums * (query + 1)])
            if is_paired:
                score = builder.fmul(score, emit_splat(builder, factor, lanes))
            at_score = builder.add(first_score, ir.Constant(I64, query * TILE_KEYS))
            emit_narrowed(builder, target, at_score, score, scores.dtype)
        return context.get_dummy_value()

    offsets = (types.int64,) * 3
    return types.void(
        zero, pairs, count, k, *offsets, q, types.int64, types.int64, scores, types.int64, types.int64,
        types.float32,
    ), generate  # fmt: skip


def emit_affine(builder: Any, number: Any, factor: int, offset: int) -> Any:
    """Emit number * factor + offset."""
    return builder.add(builder.mul(number, ir.Constant(I64, factor)), ir.Constant(I64, offset))


def emit_rows(builder: Any, paired: bool, source: Any, even: Any, odd: Any, lanes: int, element: Any) -> list[Any]:
    """Emit the loads of two rows of numbers: one register of bf16 pairs, or two registers of float32."""
    if not paired:
        return [emit_widened(builder, source, at, lanes, element) for at in (even, odd)]
    low, high = (builder.ptrtoint(emit_pointer(builder, source, at, I16), I64) for at in (even, odd))
    return [emit_interleaved(builder, low, high, lanes)]


def emit_multiply_add(builder: Any, paired: bool, values: Any, weights: Any, total: Any) -> Any:
    """Emit total + values * weights, of bf16 pairs or of float32."""
    if paired:
        return emit_dot_pairs(builder, True, total, values, weights)
    return emit_fma(builder, weights, values, total)


@helper
def online_softmax(
    zero: Any, pairs: bool, m: int, first: int, end: int, count: int, softcap: Any, scores: Any, row_max: Any,
    row_sum: Any, acc: Any, dim: int,
) -> None:  # fmt: skip
    """Replace the scores of query m for one tile of keys by softmax weights, not yet normalised.

    Columns first .. end - 1 are visible to the query; `count` columns hold tokens. Weights are relative to the running
    maximum; when it grows, acc and row_sum are rescaled. With `pairs` they are stored as bf16, from the place of the
    first score on.
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
        store_weights(pairs, scores, m * TILE_KEYS, t, x)
        sums = add(sums, x)
    if row_max[m] < new_max:
        decay = exp2(splat(zero, np.float32(row_max[m] - new_max)))
        for d in range(m * dim, (m + 1) * dim, lanes):
            store(acc, d, mul(load(zero, acc, d), decay))
        row_sum[m] *= first_lane(decay)
        row_max[m] = new_max
    row_sum[m] += reduce_sum(sums)


@simd_intrinsic
def store_weights(typing: Any, pairs: Any, scores: Any, row: Any, column: Any, value: Any) -> Any:
    """Store softmax weights in a row of the scores, as bf16 from its place on if `pairs` (a literal)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not pairs.literal_value:
            emit_narrowed(builder, args[1], builder.add(args[2], args[3]), args[4], scores.dtype)
            return context.get_dummy_value()
        narrow = emit_bf16(builder, True, args[4])
        at = emit_pointer(builder, emit_pointer(builder, args[1], args[2], F32), args[3], I16)
        builder.store(narrow, builder.bitcast(at, narrow.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(pairs, scores, types.int64, types.int64, value), generate


@helper
def apply_softcap(zero: Any, x: Any, softcap: Any) -> Any:
    """Return softcap * tanh(x / softcap) * log2(e), because the softmax uses exp2."""
    one, cap = splat(zero, np.float32(1.0)), splat(zero, np.float32(softcap * np.float32(LOG2E)))
    e = exp2(minimum(mul(x, splat(zero, np.float32(2.0 * LOG2E) / softcap)), splat(zero, np.float32(126.0))))
    return mul(cap, add(one, div(splat(zero, np.float32(-2.0)), add(e, one))))


@helper
def accumulate_values(
    job: Any, zero: Any, pairs: bool, v: Any, tile: Any, h: int, scores: Any, count: int, acc: Any, num: int
) -> None:
    """Add the values of a tile, weighted by the softmax weights, to acc of `num` queries of an item's `h`-th key head.

    `tile`: see `attention_decode.tile_pages`. `count`: the tile's tokens. Shapes: scores [M, TILE_KEYS] (weights), acc
    [M, D].
    """
    dim, size, lanes, wide = job.head_dim, job.page_size, num_lanes(zero), num // MAX_LOAD_QUERIES * MAX_LOAD_QUERIES
    pages, _, head, soon_pages, num_soon, soon_head = tile
    stride, at, soon = job.num_kv_heads * size * dim, (head + h) * size * dim, (soon_head + h) * size * dim
    for m in range(0, wide, MAX_LOAD_QUERIES):
        for d in range(0, dim, lanes):
            weigh_values(
                zero, pairs, MAX_LOAD_QUERIES, 1, v, pages, at + d, soon_pages, num_soon, soon + 2 * d, stride, size,
                dim, scores, m * TILE_KEYS, acc, m * dim + d, count,
            )  # fmt: skip
    if wide < num:
        even = dim // (2 * lanes) * 2 * lanes
        for d in range(0, even, 2 * lanes):  # two registers: four sums alone would have to wait for each other
            weigh_values(
                zero, pairs, 4, 2, v, pages, at + d, soon_pages, num_soon, soon + 2 * d, stride, size, dim, scores,
                wide * TILE_KEYS, acc, wide * dim + d, count,
            )  # fmt: skip
        for d in range(even, dim, lanes):
            weigh_values(
                zero, pairs, 4, 1, v, pages, at + d, soon_pages, num_soon, soon + 2 * d, stride, size, dim, scores,
                wide * TILE_KEYS, acc, wide * dim + d, count,
            )  # fmt: skip


@simd_intrinsic
def weigh_values(
    typing: Any, zero: Any, pairs: Any, count: Any, width: Any, v: Any, pages: Any, at: Any, soon_pages: Any,
    num_soon: Any, soon: Any, page_stride: Any, size: Any, row: Any, scores: Any, column: Any, acc: Any, first: Any,
    num_tokens: Any,
) -> Any:  # fmt: skip
    """Add to acc of `count` queries `width` (literals) registers of a tile's weighted values, two tokens at a time.

    `pages`: the tile's part of the page table; `at`: offset in a page of `v` of the first token; `row`: from one token
    to the next; `page_stride`: elements of a page. `soon_pages`, `num_soon`, `soon`: the pages to prefetch, and where
    in them. `column`: place of the first query's weights, in pairs if `pairs`; the next query's are TILE_KEYS further
    on. `first`: offset in `acc`; the next query is `row` further on. After the last of an odd number of tokens the
    weight is 0, and its values are read instead of the next ones.
    """
    is_paired, num, wide, lanes = pairs.literal_value, count.literal_value, width.literal_value, zero.lanes

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, table, start, next_table, num_next, ahead, elements, tokens, stride = args[4:13]
        weights, first_weight, sums, first_sum, end = args[13:]

        def emit_page_start(table: Any, index: Any, offset: Any) -> Any:
            page = builder.sext(builder.load(emit_pointer(builder, table, index, I32)), I64)
            return builder.add(builder.mul(page, elements), offset)

        def emit_least(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed("<", a, b), a, b)

        def emit_page(page: Any, totals: list[Any]) -> list[Any]:
            before = builder.mul(page, tokens)
            num_here = emit_least(builder.sub(end, before), tokens)
            last = emit_affine(builder, num_here, 1, -1)
            base = emit_page_start(table, page, start)
            fetched = emit_page_start(next_table, emit_least(page, emit_affine(builder, num_next, 1, -1)), ahead)
            line = builder.add(first_weight, builder.ashr(before, ir.Constant(I64, 1)) if is_paired else before)

            def emit_step(step: Any, totals: list[Any]) -> list[Any]:
                token = emit_affine(builder, step, 2, 0)
                offset = builder.mul(token, stride)
                to_next = builder.select(builder.icmp_signed("<", token, last), stride, ir.Constant(I64, 0))
                for part in range(wide):
                    at_fetched = emit_affine(builder, builder.add(fetched, offset), 1, 2 * lanes * part)
                    emit_element_prefetch(builder, source, at_fetched, v.dtype)
                    even = emit_affine(builder, builder.add(base, offset), 1, lanes * part)
                    rows = emit_rows(builder, is_paired, source, even, builder.add(even, to_next), lanes, v.dtype)
                    for number, values in enumerate(rows):
                        place = builder.add(line, step if is_paired else emit_affine(builder, token, 1, number))
                        for query in range(num):
                            index = emit_affine(builder, place, 1, query * TILE_KEYS)
                            weight = builder.load(emit_pointer(builder, weights, index, F32))
                            total = query * wide + part
                            totals[total] = emit_multiply_add(
                                builder, is_paired, values, emit_splat(builder, weight, lanes), totals[total]
                            )
                return totals

            num_steps = builder.ashr(emit_affine(builder, num_here, 1, 1), ir.Constant(I64, 1))
            return emit_loop(builder, num_steps, totals, emit_step)

        queries = [builder.add(first_sum, emit_affine(builder, stride, query, 0)) for query in range(num)]
        targets = [emit_affine(builder, query, 1, lanes * part) for query in queries for part in range(wide)]
        totals = [emit_widened(builder, sums, target, lanes, acc.dtype) for target in targets]
        num_pages = builder.sdiv(emit_affine(builder, builder.add(end, tokens), 1, -1), tokens)
        for target, total in zip(targets, emit_loop(builder, num_pages, totals, emit_page), strict=True):
            emit_narrowed(builder, sums, target, total, acc.dtype)
        return context.get_dummy_value()

    return types.void(
        zero, pairs, count, width, v, pages, types.int64, soon_pages, *(types.int64,) * 5, scores, types.int64, acc,
        types.int64, types.int64,
    ), generate  # fmt: skip
