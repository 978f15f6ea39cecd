"""Batch-invariant variants of the `cpu` operations: results do not depend on other rows.

No bit of a token's result depends on other rows, their number or order, on how many of its row's tokens are computed at
once, or on the number of threads. Norms, the activation, the rotary embedding and page writes are batch-invariant
anyway, since each token is computed alone. Recurrent layers and convolutions are, since each row is computed token by
token, in one order of operations for all lengths of rows. Attention is if every row uses the decode kernel: its splits
and tiles are at fixed positions, and masked keys add exact zeros. (`cpu` has another kernel for rows of many tokens.)

Raises: ValueError for shapes that `cpu` would leave to torch, whose reductions depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..reference import prepare
from ..types import AttentionBatch, HeadNorms, KVPages, LatentPages
from . import fused, latent, rope
from .attention import decode_attention
from .attention_decode import MAX_DECODE_QUERIES, SPLIT_TOKENS, max_item_queries, num_partial_floats, register_lanes
from .expert_layer import grouped_experts
from .experts import pack_experts
from .latent import allocate_latent_pages, read_latents, write_latents
from .pages import allocate_pages, copy_pages, read_pages, swap_in, swap_out
from .recurrent import causal_conv, gated_delta_rule, ssd_scan
from .rope import write_pages

__all__ = [
    "add_rms_norm",
    "allocate_latent_pages",
    "allocate_pages",
    "causal_conv",
    "clamped_silu_mul",
    "copy_pages",
    "gated_delta_rule",
    "gated_rms_norm",
    "gelu_mul",
    "grouped_experts",
    "latent_attention",
    "pack_experts",
    "paged_attention",
    "prepare",
    "read_latents",
    "read_pages",
    "rms_norm",
    "rope_write",
    "silu_mul",
    "ssd_scan",
    "swap_in",
    "swap_out",
    "write_latents",
    "write_pages",
]

MAX_PARTIAL_FLOATS = 1 << 23  # of one launch; long prompts over long contexts need several launches


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
    """Attend as `cpu.paged_attention` does, every row by the decode kernel; long rows are split."""
    if not register_lanes(pages.page_size, pages.head_dim):
        raise ValueError(f"heads of {pages.head_dim} in pages of {pages.page_size} tokens: 8 must divide both")
    q = q.contiguous()
    out = torch.empty_like(q)
    most = max(1, MAX_DECODE_QUERIES * pages.num_kv_heads // q.shape[1])
    if batch.max_new_tokens > most:
        batch = _split_rows(batch, most)
    for part in _iter_launches(batch, q.shape[1], pages):
        decode_attention(q, out, pages, layer, part, part.max_new_tokens, scale, window, softcap, sinks, is_exact=True)
    return out


def latent_attention(q: Tensor, pages: LatentPages, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
    """Attend to latents as `cpu.latent_attention` does, for a single token: products are not batch-invariant."""
    if len(q) != 1:
        raise ValueError(f"latent attention of {len(q)} tokens at once depends on the batch")
    return latent.latent_attention(q, pages, layer, batch, scale)


def _split_rows(batch: AttentionBatch, most: int) -> AttentionBatch:
    """Return the batch with each row of more than `most` new tokens split into several rows."""
    counts, start = batch.num_tokens.numpy(), batch.start.numpy()
    num_parts = -(-counts // most)
    row = np.repeat(np.arange(len(counts)), num_parts)
    done = (np.arange(len(row)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)) * most
    num_tokens = np.minimum(counts[row] - done, most)
    return AttentionBatch(
        tables=batch.tables[torch.from_numpy(row)],
        start=torch.from_numpy((start[row] + done).astype(np.int32)),
        num_tokens=torch.from_numpy(num_tokens.astype(np.int32)),
        offsets=torch.from_numpy(np.concatenate(([0], np.cumsum(num_tokens))).astype(np.int32)),
        slots=batch.slots,
        max_new_tokens=most,
        max_context_tokens=batch.max_context_tokens,
    )


def _iter_launches(batch: AttentionBatch, num_heads: int, pages: KVPages) -> Iterator[AttentionBatch]:
    """Split a batch into batches of rows whose partial results fit MAX_PARTIAL_FLOATS."""
    num_rows = batch.tables.shape[0]
    splits = -(-batch.max_context_tokens // SPLIT_TOKENS)
    queries = max_item_queries(batch.max_new_tokens, num_heads, pages.num_kv_heads)
    each = pages.num_kv_heads * splits * num_partial_floats(queries, pages.head_dim)
    size = max(1, MAX_PARTIAL_FLOATS // max(each, 1)) if splits > 1 else max(num_rows, 1)
    if size >= num_rows:
        yield batch
        return
    for first in range(0, num_rows, size):
        rows, ends = slice(first, first + size), batch.offsets[first : first + size + 1]
        tables, start, num_tokens = batch.tables[rows], batch.start[rows], batch.num_tokens[rows]
        yield replace(batch, tables=tables, start=start, num_tokens=num_tokens, offsets=ends)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise as `cpu.rms_norm` does."""
    _require(fused.can_fuse_norm(x, weight), x)
    return fused.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add and normalise as `cpu.add_rms_norm` does."""
    _require(fused.can_fuse_norm(x, weight) and residual.dtype == x.dtype, x)
    return fused.add_rms_norm(x, residual, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise and gate as `cpu.gated_rms_norm` does."""
    _require(fused.can_fuse_norm(x, weight) and gate.dtype == x.dtype, x)
    return fused.gated_rms_norm(x, gate, weight, eps)


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    pages: KVPages,
    layer: int,
    slots: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Normalise, rotate and store as `cpu.rope_write` does."""
    if norms is not None:
        _require(fused.can_fuse_norm(q, norms.q), q)
    return rope.rope_write(q, k, v, cos, sin, pages, layer, slots, norms)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Apply the activation as `cpu.silu_mul` does."""
    _require(fused.can_fuse_activation(gate_up), gate_up)
    return fused.silu_mul(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Apply the activation as `cpu.gelu_mul` does."""
    _require(fused.can_fuse_activation(gate_up), gate_up)
    return fused.gelu_mul(gate_up)


def clamped_silu_mul(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """Apply the activation as `cpu.clamped_silu_mul` does."""
    _require(fused.can_fuse_activation(gate_up), gate_up)
    return fused.clamped_silu_mul(gate_up, slope, limit)


def _require(fits: bool, x: Tensor) -> None:
    """Raise ValueError, with the width and dtype of `x`, if the kernels do not support them."""
    if not fits:
        raise ValueError(f"rows of {x.shape[-1]} {x.dtype} numbers: 16 must divide norms and activations, of one dtype")
