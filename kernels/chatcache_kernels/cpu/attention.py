"""Paged attention on a CPU: choose the kernel for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import AttentionBatch, KVPages
from .attention_decode import (
    MAX_DECODE_QUERIES,
    PACK_DECODE_JOB,
    SPLIT_TOKENS,
    allocate_blocks,
    choose_heads_per_item,
    decode_kernel,
    max_item_queries,
    num_partial_floats,
    num_scratch_floats,
    register_lanes,
)
from .attention_prefill import prefill_attention, supports_pages
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
    """Compute attention of the new tokens over the keys and values of their sequences.

    Causal, grouped queries. Rows of few new tokens use `attention_decode`, or `attention_shared` if `prepare` planned
    shared prefixes; rows of many use `attention_prefill`. Options: see `reference.paged_attention`.

    Shapes: q [num_tokens, num_heads, head_dim], sinks [num_heads] -> [num_tokens, num_heads, head_dim].
    """
    q = q.contiguous()
    out = torch.empty_like(q)
    fits = register_lanes(pages.page_size, pages.head_dim) > 0
    few = max(1, MAX_DECODE_QUERIES * pages.num_kv_heads // q.shape[1]) if fits else 0
    max_decode_tokens = batch.max_new_tokens
    if max_decode_tokens > few:
        counts, offsets = batch.num_tokens.tolist(), batch.offsets.tolist()
        if supports_pages(pages):
            prefill_attention(q, out, pages, layer, batch, few + 1, scale, window, softcap, sinks)
        else:
            for row in (r for r, count in enumerate(counts) if count > few):
                part = slice(offsets[row], offsets[row + 1])
                out[part] = _attend_row(q[part], pages, layer, batch, row, scale, window, softcap, sinks)
        max_decode_tokens = max((count for count in counts if count <= few), default=0)
    if max_decode_tokens and batch.work is not None:
        attend_shared(q, out, pages, layer, batch, batch.work, scale, window, softcap, sinks)
    elif max_decode_tokens:
        decode_attention(q, out, pages, layer, batch, max_decode_tokens, scale, window, softcap, sinks)
    return out


def decode_attention(
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
    *,
    is_exact: bool = False,
) -> None:
    """Write to `out` the attention of rows with at most `max_tokens` new tokens (decode kernel).

    Tokens of other rows are left unchanged. `is_exact`: see `decode_kernel`.
    Shapes: q, out [num_tokens, num_heads, head_dim].
    """
    num_rows, table_stride = batch.tables.shape[0], batch.tables.stride(0)
    _, num_heads, head_dim = q.shape
    num_kv_heads, num_threads = pages.num_kv_heads, torch.get_num_threads()
    queries = max_item_queries(max_tokens, num_heads, num_kv_heads)
    num_splits, done = -(-batch.max_context_tokens // SPLIT_TOKENS), num_rows * num_kv_heads
    heads = choose_heads_per_item(num_kv_heads, queries, num_rows * num_splits, num_threads)
    scratch = num_threads * heads * num_scratch_floats(queries, head_dim)
    most = 1 if is_exact else min(max_tokens, batch.max_new_tokens)
    blocks = allocate_blocks(most, num_heads // num_kv_heads, head_dim, num_threads)
    partial = done * num_splits * num_partial_floats(queries, head_dim) if num_splits > 1 else 0
    floats = torch.empty(scratch + partial)
    splits_done = torch.zeros(done if num_splits > 1 else 0, dtype=torch.int64)
    sinks = sinks.float().contiguous() if sinks is not None else None
    k, v = pages.k, pages.v
    layer_bytes = layer * k.stride(0) * k.element_size()
    job = PACK_DECODE_JOB.pack(
        0, 0, q.data_ptr(), out.data_ptr(), KINDS[q.dtype], k.data_ptr() + layer_bytes, v.data_ptr() + layer_bytes,
        batch.tables.data_ptr(), sinks.data_ptr() if sinks is not None else 0, floats.data_ptr(), queries, table_stride,
        num_heads, num_kv_heads, head_dim, pages.page_size, window or 0, heads, *blocks.fields.values(),
        batch.start.data_ptr(), batch.num_tokens.data_ptr(), batch.offsets.data_ptr(), splits_done.data_ptr(),
        floats.data_ptr() + 4 * scratch, num_rows, max_tokens, scale, softcap or 0.0,
    )  # fmt: skip
    decode_kernel(KINDS[k.dtype], register_lanes(pages.page_size, head_dim), is_exact=is_exact)(job, num_threads)


QUERY_BLOCK = 256  # queries that share one matrix of scores


def _attend_row(
    q: Tensor,
    pages: KVPages,
    layer: int,
    batch: AttentionBatch,
    row: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend the new tokens of one row with torch in float32, for shapes that no kernel supports.

    Shapes: q [n, num_heads, head_dim], sinks [num_heads] -> [n, num_heads, head_dim]. Inside: queries [Hkv, G, n, D],
    keys and values [Hkv, S, D].
    """
    num_tokens, num_heads, head_dim = q.shape
    start = int(batch.start[row])
    end = start + num_tokens
    table = batch.tables[row, : -(-end // pages.page_size)]
    k = pages.k[layer][table].permute(1, 0, 3, 2).flatten(1, 2)[:, :end].float()
    v = pages.v[layer][table].transpose(0, 1).flatten(1, 2)[:, :end].float()
    queries = q.float().view(num_tokens, pages.num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    parts = []
    for first in range(0, num_tokens, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, num_tokens)
        scores = torch.matmul(queries[:, :, first:last], k[:, None, : start + last].mT) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        i, j = torch.arange(start + first, start + last)[:, None], torch.arange(start + last)
        hidden = j > i if window is None else (j > i) | (j <= i - window)
        scores.masked_fill_(hidden, -torch.inf)
        total = torch.logsumexp(scores, dim=-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float().view(*total.shape[:2], 1))
        parts.append(torch.matmul(scores.sub_(total[..., None]).exp_(), v[:, None, : start + last]))
    return torch.cat(parts, dim=2).permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim).to(q.dtype)
