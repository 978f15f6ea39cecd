"""Paged attention over a work list: rows of few new tokens that share pages read them once.

Items are planned by `prepare` (see `types.WorkList`); each thread runs (item, key head) pairs. A token with several
items stores a partial state for each, and the thread that stores the last one merges them in key order. Steps without
worthwhile sharing use `attention_decode`, which is slightly faster.

With AMX, items of 6 queries or more that all see all of their keys are computed as in `attention_prefill`: on one core
of a Xeon, 9 heads of 64 over 3 key heads, 2, 8 and 32 rows that share 1,024 tokens went from 129, 303 and 1,209 to 112,
157 and 439 us.

Symbols: see `attention_decode`; here M = members * G queries of an item, query m = member * G + head in group.
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

from ..prefix_sharing import CostModel, SharingCost
from ..types import AttentionBatch, AttentionWork, KVPages
from ..work_list import SPLIT_TOKENS, build_work_items, find_shared_prefixes
from .attention_decode import (
    JOB_FIELDS,
    JOB_OPTIONS,
    MAX_DECODE_QUERIES,
    MIN_TILE_QUERIES,
    StepFields,
    Workspace,
    allocate_blocks,
    attend_keys,
    finish_block,
    multiplies_pairs,
    num_partial_floats,
    num_scratch_floats,
    pack_queries,
    pad_queries,
    register_lanes,
    scratch_arrays,
    start_block,
    write_output,
)
from .attention_prefill import BLOCK_QUERIES, attend_blocks_tiles, load_query
from .bf16 import has_amx, tile_configure, tile_release
from .launch import Launch, compile_kernel, define_job, helper
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

MAX_TILE_QUERIES = 64  # per item; from 32 on the speed hardly changes (measured)

SHARED_JOB, PACK_SHARED_JOB = define_job(
    f"{JOB_FIELDS} positions items members merge_offsets merge_states states states_done num_items", JOB_OPTIONS
)
"""`JOB_FIELDS`; addresses of the work list's arrays (merge_offsets has T + 1 entries).

Sizes.
states [S, Hkv]: num_partial_floats(G, D) each; states_done [T, Hkv] int64, zeroed.
"""


def prepare(tables: I32, start: I32, num_tokens: I32, page_size: int, group: int) -> AttentionWork | None:
    """Plan a step in which rows of few new tokens share pages.

    Return None if sharing would not pay. Arguments: see `work_list.plan_work`. The plan has one work list; its
    merge_tokens are all of the step's tokens, and a token that is in a single item has no partial states.
    """
    height = max(1, MAX_TILE_QUERIES // group)
    if height == 1:  # a tile holds one row: nothing to share
        return None
    rule = CostModel(_sharing_cost(group), SPLIT_TOKENS, (height, height), group)
    ranges, _ = find_shared_prefixes(tables, start, num_tokens, page_size, rule, rule.heights)
    if ranges is None:
        return None
    most = max(1, MAX_DECODE_QUERIES // group)
    host = build_work_items(start, num_tokens, rule.heights, ranges, height, most)
    offsets = np.zeros(len(host.positions) + 1, np.int32)
    offsets[host.merge_tokens + 1] = np.diff(host.merge_offsets)
    tokens = np.arange(len(host.positions), dtype=np.int32)
    return replace(host, merge_tokens=tokens, merge_offsets=offsets.cumsum(dtype=np.int32)).to_tensors()


def _sharing_cost(group: int) -> SharingCost:
    """Return the cost parameters for a CPU.

    Decode is limited by arithmetic, and large tiles need less of it per key.
    Measured on one core with AVX-512, 2 to 8 rows, groups of 1, 3 and 4: sharing breaks even at 32 to 200 keys.
    """
    return SharingCost(reread=1 - 0.72 * group / pad_queries(group), per_item=24.0, per_query=3.0, per_launch=0.0)


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
    """Write to `out` the attention of the tokens in the work list from `prepare`.

    Other tokens are left unchanged.
    Shapes: q, out [num_tokens, num_heads, head_dim].
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_threads = pages.num_kv_heads, torch.get_num_threads()
    (one,) = work.lists
    group = num_heads // num_kv_heads
    queries = pad_queries(one.max_members * group)
    each = num_threads * num_scratch_floats(queries, head_dim)
    floats = torch.empty(each + work.num_states * num_kv_heads * num_partial_floats(group, head_dim))
    blocks = allocate_blocks(one.max_members, group, head_dim, num_threads)
    done = torch.zeros(num_tokens * num_kv_heads, dtype=torch.int64)
    sinks = sinks.float().contiguous() if sinks is not None else None
    k, v = pages.k, pages.v
    layer_bytes = layer * k.stride(0) * k.element_size()
    job = PACK_SHARED_JOB.pack(
        0, 0, q.data_ptr(), out.data_ptr(), KINDS[q.dtype], k.data_ptr() + layer_bytes, v.data_ptr() + layer_bytes,
        batch.tables.data_ptr(), sinks.data_ptr() if sinks is not None else 0, floats.data_ptr(), queries,
        batch.tables.stride(0), num_heads, num_kv_heads, head_dim, pages.page_size, window or 0, 1,
        *blocks.fields.values(),
        work.positions.data_ptr(), one.items.data_ptr(), one.members.data_ptr(), work.merge_offsets.data_ptr(),
        work.merge_states.data_ptr(), floats.data_ptr() + 4 * each, done.data_ptr(), len(one.items),
        scale, softcap or 0.0,
    )  # fmt: skip
    shared_kernel(KINDS[k.dtype], register_lanes(pages.page_size, head_dim))(job, num_threads)


def shared_fields(
    batch: AttentionBatch, work: AttentionWork, pages: KVPages, num_heads: int, num_threads: int
) -> StepFields:
    """Return the SHARED_JOB fields that change every step, for `MegakernelDecoder`."""
    (one,) = work.lists
    group = num_heads // pages.num_kv_heads
    queries, num_states = pad_queries(one.max_members * group), work.num_states * pages.num_kv_heads
    done = len(work.positions) * pages.num_kv_heads
    blocks = allocate_blocks(one.max_members, group, pages.head_dim, num_threads)
    room = Workspace.of(pages, num_threads * num_scratch_floats(queries, pages.head_dim), num_states, group, done)
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
        "heads_per_item": 1,
        "scratch": room.scratch,
        "states": room.states,
        "states_done": room.done,
    }
    return StepFields(fields | blocks.fields, room.held + blocks.held)


@cache
def shared_kernel(kind: int, lanes: int) -> Launch:
    """Return the launcher of the shared-prefix attention kernel for pages of one element type.

    Its argument record is a SHARED_JOB. `kind`: element type, see `simd.KINDS`; `lanes`: see `register_lanes`.
    """
    pairs = multiplies_pairs(kind, lanes)
    tiles = pairs and has_amx()

    def kernel(address: Any) -> None:
        job, configured = carray(address, 1, SHARED_JOB)[0], False
        zero, k, v = zeros(lanes), pointer(kind, job.k), pointer(kind, job.v)
        num_kv_heads = job.num_kv_heads
        work_id, thread = fetch_add(address, 0, 1), fetch_add(address, 1, 1)
        while work_id < job.num_items * num_kv_heads:
            item, members = _find_item(job, work_id)
            # a thread takes its next item before it computes one, to prefetch its keys
            head, ahead, work_id = work_id % num_kv_heads, (0, 0, 0, 0), fetch_add(address, 0, 1)
            if work_id < job.num_items * num_kv_heads:
                next_item, next_members = _find_item(job, work_id)
                low, end = _key_range(job, next_item, next_members)
                ahead = next_item[0], work_id % num_kv_heads, low, end
            if tiles and _fits_tiles(job, item, members):
                if not configured:
                    tile_configure(job.config)
                    configured = True
                _attend_tiles(job, zero, thread, item, members, head)
            else:
                _attend_item(job, zero, pairs, k, v, thread, item, members, head, ahead)
            _finish_item(job, zero, thread, item, members, head)
        if configured:
            tile_release()

    return compile_kernel(kernel)


@helper
def _finish_item(job: Any, zero: Any, thread: int, item: Any, members: Any, head: int) -> None:
    """Write the outputs of an item, or its partial states."""
    if item[5] < 0:
        for n in range(item[4]):
            write_output(job, zero, thread, members[n], head, n * (job.num_heads // job.num_kv_heads))
    else:
        _store_states(job, zero, thread, item, head)
        for n in range(item[4]):
            _merge_states(job, zero, thread, members[n], head)


@helper
def _fits_tiles(job: Any, item: Any, members: Any) -> bool:
    """Return whether an item has queries enough for AMX, which all see all of its keys."""
    oldest = item[2]
    for n in range(item[4]):
        oldest = min(oldest, pointer(INT32, job.positions)[members[n]] + 1)
    is_many = item[4] * (job.num_heads // job.num_kv_heads) >= MIN_TILE_QUERIES
    return bool(is_many and job.window == 0 and oldest == item[2] and job.block_bytes > 0)


@helper
def _attend_tiles(job: Any, zero: Any, thread: int, item: Any, members: Any, head: int) -> None:
    """Do what `_attend_item` does, by AMX."""
    group, block, end = job.num_heads // job.num_kv_heads, start_block(job, thread), item[2]
    num = item[4] * group
    for m in range((num + BLOCK_QUERIES - 1) // BLOCK_QUERIES * BLOCK_QUERIES):
        number = members[m // group] * job.num_heads + head * group + m % group if m < num else -1
        load_query(block, zero, 0, m, number, end)
    attend_blocks_tiles(block, zero, zero, 0, item[0], head, item[1], end, num)
    finish_block(job, zero, block, thread, num)


@helper
def _find_item(job: Any, work_id: int) -> Any:
    """Return the line of an item and its entries of the work list, see `types.WorkList`."""
    item = pointer(INT32, job.items + 24 * (work_id // job.num_kv_heads))
    return item, pointer(INT32, job.members + 4 * item[3])


@helper
def _key_range(job: Any, item: Any, members: Any) -> Any:
    """Return the first and the end of the keys of an item that its tokens see."""
    positions = pointer(INT32, job.positions)
    newest, oldest = 0, positions[members[0]] + 1
    for n in range(item[4]):
        limit = positions[members[n]] + 1
        newest, oldest = max(newest, limit), min(oldest, limit)
    low, end = item[1], min(item[2], newest)
    if job.window > 0:
        low = max(low, (oldest - job.window) // job.page_size * job.page_size)
    return low, end


@helper
def _attend_item(
    job: Any, zero: Any, pairs: bool, k: Any, v: Any, thread: int, item: Any, members: Any, head: int, ahead: Any
) -> None:
    """Compute attention of an item's tokens over its keys, for one key head, into scratch.

    `ahead`: see `attend_keys`.
    """
    group, positions = job.num_heads // job.num_kv_heads, pointer(INT32, job.positions)
    for n in range(item[4]):
        pack_queries(job, zero, pairs, thread, members[n], positions[members[n]] + 1, head, n * group)
    low, end = _key_range(job, item, members)
    attend_keys(job, zero, pairs, k, v, thread, item[0], head, low, end, item[4] * group, ahead)


@helper
def _state_pointer(job: Any, number: int, head: int) -> Any:
    """Return the address of a key head's partial state: acc [G, D], row_max [G], row_sum [G]."""
    size = job.num_heads // job.num_kv_heads * (job.head_dim + 2)
    return pointer(FLOAT32, job.states + 4 * (number * job.num_kv_heads + head) * size)


@helper
def _store_states(job: Any, zero: Any, thread: int, item: Any, head: int) -> None:
    """Copy the result in scratch to the partial states of an item's member tokens."""
    dim, group = job.head_dim, job.num_heads // job.num_kv_heads
    acc, _, _, row_max, row_sum, _ = scratch_arrays(job, thread)
    for n in range(item[4]):
        state = _state_pointer(job, item[5] + n, head)
        for i in range(0, group * dim, num_lanes(zero)):
            store(state, i, load(zero, acc, n * group * dim + i))
        for g in range(group):
            state[group * dim + g], state[group * (dim + 1) + g] = row_max[n * group + g], row_sum[n * group + g]


@helper
def _merge_states(job: Any, zero: Any, thread: int, token: int, head: int) -> None:
    """Count one more finished partial state of a token, for one key head.

    When all of its states are finished, merge them and write the token's output.
    """
    dim, group, lanes = job.head_dim, job.num_heads // job.num_kv_heads, num_lanes(zero)
    offsets, numbers = pointer(INT32, job.merge_offsets), pointer(INT32, job.merge_states)
    first, end = offsets[token], offsets[token + 1]
    if fetch_add(pointer(INT64, job.states_done), token * job.num_kv_heads + head, 1) < end - first - 1:
        return
    acc, _, _, row_max, row_sum, _ = scratch_arrays(job, thread)
    for g in range(group):
        row_max[g], row_sum[g] = -np.inf, 0.0
        for d in range(0, dim, lanes):
            store(acc, g * dim + d, zero)
        for s in range(first, end):
            row_max[g] = max(row_max[g], _state_pointer(job, numbers[s], head)[group * dim + g])
        for s in range(first, end):
            state = _state_pointer(job, numbers[s], head)
            share = exp2(splat(zero, np.float32(state[group * dim + g] - row_max[g])))
            row_sum[g] += first_lane(share) * state[group * (dim + 1) + g]
            for d in range(g * dim, (g + 1) * dim, lanes):
                store(acc, d, fma(load(zero, state, d), share, load(zero, acc, d)))
    write_output(job, zero, thread, token, head, 0)
