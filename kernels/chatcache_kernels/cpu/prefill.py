"""Paged attention for rows of many new tokens: prompts and their chunks. Bound by matrix multiplication.

A row's pages are gathered into contiguous keys and values once, then torch's flash attention does the work: the cached
prefix (no mask) and the chunk itself (causal) apart, merged by their log-sum-exps, so that no mask is ever built. A
sliding window needs one, over the few keys that a block of queries can see. A soft-capped score has no flash kernel:
it is computed in float32, a block of queries at a time.

Shapes inside: q [Hkv, G, n, D], keys and values [Hkv, S, D], log-sum-exps [Hkv, G, n]. Symbols: see types.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..types import AttentionBatch, KVPages

QUERY_BLOCK = 256  # queries that share one mask or one score matrix


def attend_row(
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
    """Attend the new tokens of one row. Shapes: q [n, H, D], sinks [H] -> [n, H, D]."""
    num_tokens, num_heads, head_dim = q.shape
    start = int(batch.start[row])
    end = start + num_tokens
    first = 0 if window is None else max(0, start + 1 - window) // pages.page_size * pages.page_size
    k, v = _gather(pages, layer, batch.tables[row, first // pages.page_size : -(-end // pages.page_size)], end - first)
    k, v = k.to(q.dtype), v.to(q.dtype)
    start -= first  # from here on, positions count from the first gathered key
    grouped = q.view(num_tokens, pages.num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).contiguous()
    if softcap is not None:
        out, lse = _blocks(grouped, k, v, start, scale, window, softcap)
    elif window is not None and window < end - first:
        out, lse = _blocks(grouped, k, v, start, scale, window, None)
    else:
        out, lse = _flash(grouped, k[:, start:], v[:, start:], scale, causal=True)
        if start:
            out, lse = _merge(out, lse, *_prefix(grouped, k[:, :start], v[:, :start], scale))
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.float().view(*lse.shape[:2], 1))[..., None]
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim).to(q.dtype)


def _gather(pages: KVPages, layer: int, table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of consecutive pages, [Hkv, S, D] each."""
    k = pages.k[layer][table].permute(1, 0, 3, 2).contiguous().flatten(1, 2)  # flash attention needs D innermost
    v = pages.v[layer][table].transpose(0, 1).contiguous().flatten(1, 2)
    return k[:, :num_tokens], v[:, :num_tokens]


def _prefix(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to keys that every query sees. The G heads become queries of one head, which reads keys once (faster)."""
    out, lse = _flash(q.flatten(1, 2)[:, None], k, v, scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return torch's flash attention and its log-sum-exp: key heads are the batch, their query heads share keys."""
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys."""
    share = torch.sigmoid(lse - other_lse)[..., None]
    return other + share * (out.float() - other), torch.logaddexp(lse, other_lse)


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend a block of queries at a time to the keys it can see, with a mask."""
    parts = []
    for block in range(0, q.shape[2], QUERY_BLOCK):
        queries = q[:, :, block : block + QUERY_BLOCK]
        low, high = start + block, start + block + queries.shape[2]
        first = 0 if window is None else max(0, low + 1 - window)
        i, j = torch.arange(low, high)[:, None], torch.arange(first, high)
        hidden = j > i if window is None else (j > i) | (j <= i - window)
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -math.inf)
        keys, values = k[:, first:high], v[:, first:high]
        if softcap is None:
            parts.append(_flash(queries, keys, values, scale, mask=mask))
        else:
            parts.append(_softcapped(queries, keys, values, mask, scale, softcap))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Attend with soft-capped scores, in float32."""
    scores = torch.matmul(q.float() * (scale / softcap), k.float()[:, None].mT).tanh_().mul_(softcap).add_(mask)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(scores.sub_(lse[..., None]).exp_(), v.float()[:, None]), lse
