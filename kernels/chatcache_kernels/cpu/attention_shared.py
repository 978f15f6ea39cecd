"""Paged attention over a work list: rows that begin with the same pages read them once.

One piece of work is (item, key head); what items are is said in `types.py`, how they are chosen in `work.py`. A token
with several pieces leaves a state with each, and whoever brings the last one merges them, in order of their keys.
Used where rows share pages that are worth it; `decode.py` does the rest, and is a little quicker at it.

Symbols: see types.py and piece.py. M = members * G queries of a piece, query m = member * G + head in group.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray
from torch import Tensor

from ..prefix_sharing import CostRule, SharingCost
from ..types import AttentionBatch, AttentionWork, KVPages
from ..work_list import SPLIT, cut_step, find_shared
from .attention_decode import (
    FEW_QUERIES,
    FIELDS,
    OPTIONS,
    StepFields,
    Workspace,
    attend,
    finish,
    pack,
    padded,
    partial_floats,
    register_lanes,
    scratch,
    scratch_floats,
)
from .launch import Launch, compile_kernel, helper, record
from .simd import (
    FLOAT32,
    INT32,
    INT64,
    KINDS,
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

I32 = NDArray[np.int32]

TILE_QUERIES = 64  # of an item, at most: from 32 on it hardly matters (measured)

JOB, PACK = record(f"{FIELDS} positions items members merge_offsets merge_states states states_done num_items", OPTIONS)
"""`piece.FIELDS`; addresses of the work list's arrays, X = T; states [S, Hkv]: partial_floats(G, D) each; states_done
[T, Hkv] int64, zeroed; a number."""


def prepare(tables: I32, start: I32, num_tokens: I32, page_size: int, group: int) -> AttentionWork | None:
    """Return the work list of a step in which sharing pages pays, of rows of few tokens; None for any other step.

    One list; each of the T tokens merges as many states as it has, none where its only piece is written at once.
    """
    height = max(1, TILE_QUERIES // group)
    rule = CostRule(_cost(group), SPLIT, (height, height), group)
    ranges, _ = find_shared(tables, start, num_tokens, page_size, rule, rule.heights)
    if ranges is None:
        return None
    most = max(1, FEW_QUERIES // group)
    host = cut_step(start, num_tokens, rule.heights, ranges, height, most)
    offsets = np.zeros(len(host.positions) + 1, np.int32)
    offsets[host.merge_tokens + 1] = np.diff(host.merge_offsets)
    tokens = np.arange(len(host.positions), dtype=np.int32)
    return replace(host, merge_tokens=tokens, merge_offsets=offsets.cumsum(dtype=np.int32)).tensors()


def _cost(group: int) -> SharingCost:
    """Return what pieces cost, in keys of a row alone: bound by arithmetic, of which a tile of many queries needs less.

    Measured on one core with AVX-512, 2 to 8 rows, groups of 1, 3 and 4: sharing breaks even at 32 to 200 keys.
    """
    return SharingCost(reread=1 - 0.72 * group / padded(group), per_item=24.0, per_query=3.0, per_launch=0.0)


def attend_shared(
    q: Tensor,
    out: Tensor,
    pages: KVPages,
    layer: int,
    batch: AttentionBatch,
    work: AttentionWork,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Run the kernel over a work list that `prepare` made, into `out`; rows that are not in it are left alone."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_threads = pages.num_kv_heads, torch.get_num_threads()
    (one,) = work.lists
    group = num_heads // num_kv_heads
    queries = padded(one.max_members * group)
    each = num_threads * scratch_floats(queries, head_dim)
    floats = torch.empty(each + work.num_states * num_kv_heads * partial_floats(group, head_dim))
    done = torch.zeros(num_tokens * num_kv_heads, dtype=torch.int64)
    sinks = sinks.float().contiguous() if sinks is not None else None
    k, v = pages.k, pages.v
    layer_bytes = layer * k.stride(0) * k.element_size()
    job = PACK.pack(
        0, 0, q.data_ptr(), out.data_ptr(), KINDS[q.dtype], k.data_ptr() + layer_bytes, v.data_ptr() + layer_bytes,
        batch.tables.data_ptr(), sinks.data_ptr() if sinks is not None else 0, floats.data_ptr(), queries,
        batch.tables.stride(0), num_heads, num_kv_heads, head_dim, pages.page_size, window or 0,
        work.positions.data_ptr(), one.items.data_ptr(), one.members.data_ptr(), work.merge_offsets.data_ptr(),
        work.merge_states.data_ptr(), floats.data_ptr() + 4 * each, done.data_ptr(), len(one.items), scale,
        softcap or 0.0,
    )  # fmt: skip
    shared_kernel(KINDS[k.dtype], register_lanes(pages.page_size, head_dim))(job, num_threads)


def shared_fields(
    batch: AttentionBatch, work: AttentionWork, pages: KVPages, num_heads: int, num_threads: int
) -> StepFields:
    """Return the fields of `shared.JOB` that a step decides."""
    (one,) = work.lists
    group = num_heads // pages.num_kv_heads
    queries, num_states = padded(one.max_members * group), work.num_states * pages.num_kv_heads
    done = len(work.positions) * pages.num_kv_heads
    room = Workspace.of(pages, num_threads * scratch_floats(queries, pages.head_dim), num_states, group, done)
    fields = {
        "tables": batch.tables.data_ptr(),
        "table_stride": batch.tables.stride(0),
        "positions": work.positions.data_ptr(),
        "items": one.items.data_ptr(),
        "members": one.members.data_ptr(),
        "merge_offsets": work.merge_offsets.data_ptr(),
        "merge_states": work.merge_states.data_ptr(),
        "num_items": len(one.items),
        "max_queries": queries,
        "scratch": room.scratch,
        "states": room.states,
        "states_done": room.done,
    }
    return StepFields(fields, room.held)


@cache
def shared_kernel(kind: int, lanes: int) -> Launch:
    """Return the launcher for pages of one element kind; `lanes` divides page and head size. Takes a JOB."""

    def kernel(address: Any) -> None:
        job = carray(address, 1, JOB)[0]
        _work(address, job, zeros(lanes), pointer(kind, job.k), pointer(kind, job.v))

    return compile_kernel(kernel)


@helper
def _work(address: Any, job: Any, zero: Any, k: Any, v: Any) -> None:
    """Draw pieces of work until none is left."""
    piece, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
    while piece < job.num_items * job.num_kv_heads:
        number, head = divmod(piece, job.num_kv_heads)
        item = pointer(INT32, job.items + 24 * number)
        members = pointer(INT32, job.members + 4 * item[3])
        _attend(job, zero, k, v, thread, item, members, head)
        if item[5] < 0:
            for n in range(item[4]):
                finish(job, zero, thread, members[n], head, n * (job.num_heads // job.num_kv_heads))
        else:
            _keep(job, zero, thread, item, head)
            for n in range(item[4]):
                _merge(job, zero, thread, members[n], head)
        piece = fetch_add(address, 0, 1)


@helper
def _attend(job: Any, zero: Any, k: Any, v: Any, thread: int, item: Any, members: Any, head: int) -> None:
    """Attend the members' queries of one key head to an item's keys. Leaves the result in scratch."""
    group, positions = job.num_heads // job.num_kv_heads, pointer(INT32, job.positions)
    newest, oldest = 0, positions[members[0]] + 1
    for n in range(item[4]):
        limit = positions[members[n]] + 1
        newest, oldest = max(newest, limit), min(oldest, limit)
        pack(job, zero, thread, members[n], limit, head, n * group)
    low, end = item[1], min(item[2], newest)
    if job.window > 0:
        low = max(low, (oldest - job.window) // job.page_size * job.page_size)
    attend(job, zero, k, v, thread, item[0], head, low, end, item[4] * group)


@helper
def _state(job: Any, number: int, head: int) -> Any:
    """Return where a state lies: acc [G, D], peak [G], mass [G]."""
    size = job.num_heads // job.num_kv_heads * (job.head_dim + 2)
    return pointer(FLOAT32, job.states + 4 * (number * job.num_kv_heads + head) * size)


@helper
def _keep(job: Any, zero: Any, thread: int, item: Any, head: int) -> None:
    """Copy the result in scratch to the states of an item's members."""
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    acc, _, _, peak, mass, _ = scratch(job, thread)
    for n in range(item[4]):
        state = _state(job, item[5] + n, head)
        for i in range(0, group * dim, num_lanes(zero)):
            store(state, i, load(zero, acc, n * group * dim + i))
        for g in range(group):
            state[group * dim + g], state[group * (dim + 1) + g] = peak[n * group + g], mass[n * group + g]


@helper
def _merge(job: Any, zero: Any, thread: int, token: int, head: int) -> None:
    """Count one more state of a token; if that was the last, add them up and write the outputs of one key head."""
    dim, group, lanes = job.head_dim, job.num_heads // job.num_kv_heads, num_lanes(zero)
    offsets, numbers = pointer(INT32, job.merge_offsets), pointer(INT32, job.merge_states)
    first, end = offsets[token], offsets[token + 1]
    if fetch_add(pointer(INT64, job.states_done), token * job.num_kv_heads + head, 1) < end - first - 1:
        return
    acc, _, _, peak, mass, _ = scratch(job, thread)
    for g in range(group):
        peak[g], mass[g] = -np.inf, 0.0
        for d in range(0, dim, lanes):
            store(acc, g * dim + d, zero)
        for s in range(first, end):
            peak[g] = max(peak[g], _state(job, numbers[s], head)[group * dim + g])
        for s in range(first, end):
            state = _state(job, numbers[s], head)
            share = exp2(splat(zero, np.float32(state[group * dim + g] - peak[g])))
            mass[g] += first_lane(share) * state[group * (dim + 1) + g]
            for d in range(g * dim, (g + 1) * dim, lanes):
                store(acc, d, fma(load(zero, state, d), share, load(zero, acc, d)))
    finish(job, zero, thread, token, head, 0)
