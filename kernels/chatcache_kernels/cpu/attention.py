"""Paged attention on a CPU: which kernel computes which row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import AttentionBatch, KVPages
from . import attention_prefill
from .attention_decode import (
    FEW_QUERIES,
    PACK,
    SPLIT,
    decode_kernel,
    max_queries,
    partial_floats,
    register_lanes,
    scratch_floats,
)
from .attention_prefill import attend_row
from .attention_shared import attend_shared
from .simd import KINDS


def paged_attention(
    q: Tensor,
    pages: KVPages,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend each new token to its row's keys up to and including its own (already written). Causal, GQA.

    Shapes: q [T, H, D], sinks [H] -> [T, H, D]. The meaning of every option is `reference.paged_attention`.
    Rows of few new tokens go to a kernel that reads pages in place, once for rows that share them if `prepare` said so;
    the others are gathered and multiplied.
    """
    q = q.contiguous()
    out = torch.empty_like(q)
    fits = register_lanes(pages.page_size, pages.head_dim) > 0
    few = max(1, FEW_QUERIES * pages.num_kv_heads // q.shape[1]) if fits else 0
    most_few = batch.max_new_tokens
    if most_few > few:
        counts, offsets = batch.num_tokens.tolist(), batch.offsets.tolist()
        if attention_prefill.fits(q, pages):
            attention_prefill.attend_chunks(q, out, pages, layer, batch, few + 1, scale, window, softcap, sinks)
        else:
            for row in (r for r, count in enumerate(counts) if count > few):
                part = slice(offsets[row], offsets[row + 1])
                out[part] = attend_row(q[part], pages, layer, batch, row, scale, window, softcap, sinks)
        most_few = max((count for count in counts if count <= few), default=0)
    if most_few and batch.work is not None:
        attend_shared(q, out, pages, layer, batch, batch.work, scale, window, softcap, sinks)
    elif most_few:
        attend_pages(q, out, pages, layer, batch, most_few, scale, window, softcap, sinks)
    return out


def attend_pages(
    q: Tensor,
    out: Tensor,
    pages: KVPages,
    layer: int,
    batch: AttentionBatch,
    max_tokens: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Run the decode kernel over the rows of at most `max_tokens` new tokens, into `out`; other rows are left alone."""
    num_rows, table_stride = batch.tables.shape[0], batch.tables.stride(0)
    _, num_heads, head_dim = q.shape
    num_kv_heads, num_threads = pages.num_kv_heads, torch.get_num_threads()
    queries = max_queries(max_tokens, num_heads, num_kv_heads)
    scratch, done = num_threads * scratch_floats(queries, head_dim), num_rows * num_kv_heads
    num_splits = -(-batch.max_context_tokens // SPLIT)
    partial = done * num_splits * partial_floats(queries, head_dim) if num_splits > 1 else 0
    floats = torch.empty(scratch + partial)
    splits_done = torch.zeros(done if num_splits > 1 else 0, dtype=torch.int64)
    sinks = sinks.float().contiguous() if sinks is not None else None
    k, v = pages.k, pages.v
    layer_bytes = layer * k.stride(0) * k.element_size()
    job = PACK.pack(
        0, 0, q.data_ptr(), out.data_ptr(), KINDS[q.dtype], k.data_ptr() + layer_bytes, v.data_ptr() + layer_bytes,
        batch.tables.data_ptr(), sinks.data_ptr() if sinks is not None else 0, floats.data_ptr(), queries, table_stride,
        num_heads, num_kv_heads, head_dim, pages.page_size, window or 0, batch.start.data_ptr(),
        batch.num_tokens.data_ptr(), batch.offsets.data_ptr(), splits_done.data_ptr(), floats.data_ptr() + 4 * scratch,
        num_rows, max_tokens, scale, softcap or 0.0,
    )  # fmt: skip
    decode_kernel(KINDS[k.dtype], register_lanes(pages.page_size, head_dim))(job, num_threads)
