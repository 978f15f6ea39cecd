"""What the attention kernels must be told of a step, for all layers at once: a `Program`'s jobs take it as fields.

`attention.py` and `shared.py` say the same of one layer. Layers share scratch, but each counts its finished pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..types import AttentionBatch, AttentionWork, KVPages
from .decode import SPLIT, max_queries
from .piece import padded, partial_floats, scratch_floats


@dataclass(frozen=True, slots=True)
class Listed:
    """Fields of every layer's job, and the tensors that they point to besides the batch's own."""

    fields: dict[str, Any]
    held: tuple[Tensor, ...]


def list_rows(batch: AttentionBatch, pages: KVPages, num_heads: int, num_threads: int) -> Listed:
    """Return the fields of `decode.JOB` that a step decides."""
    num_rows, most = batch.tables.shape[0], batch.max_new_tokens
    queries = max_queries(most, num_heads, pages.num_kv_heads)
    done = num_rows * pages.num_kv_heads
    num_splits = -(-batch.max_context_tokens // SPLIT)
    num_states = done * num_splits if num_splits > 1 else 0
    room = _Room.of(pages, num_threads * scratch_floats(queries, pages.head_dim), num_states, queries, done)
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
    return Listed(fields, room.held)


def list_shared(batch: AttentionBatch, work: AttentionWork, pages: KVPages, num_heads: int, num_threads: int) -> Listed:
    """Return the fields of `shared.JOB` that a step decides."""
    (one,) = work.lists
    group = num_heads // pages.num_kv_heads
    queries, num_states = padded(one.max_members * group), work.num_states * pages.num_kv_heads
    done = len(work.positions) * pages.num_kv_heads
    room = _Room.of(pages, num_threads * scratch_floats(queries, pages.head_dim), num_states, group, done)
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
    return Listed(fields, room.held)


@dataclass(frozen=True, slots=True)
class _Room:
    """Addresses of working memory: of scratch and states, and of each layer's counts."""

    scratch: int
    states: int
    done: Any
    held: tuple[Tensor, ...]

    @classmethod
    def of(cls, pages: KVPages, scratch: int, num_states: int, queries: int, num_done: int) -> _Room:
        floats = torch.empty(scratch + num_states * partial_floats(queries, pages.head_dim))
        done = torch.zeros(pages.num_layers, num_done if num_states else 0, dtype=torch.int64)
        layers = done.data_ptr() + 8 * done.stride(0) * np.arange(pages.num_layers)
        return cls(floats.data_ptr(), floats.data_ptr() + 4 * scratch, layers, (floats, done))
