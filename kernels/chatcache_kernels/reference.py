"""What every kernel computes, in plain torch: the oracle. Written to be obviously right, usable on any device.

All arithmetic is in float32 whatever the dtype of pages and activations; results are rounded once, at the end.
Symbols are those of `types.py`. Layout here: k, v [L, N, P, Hkv, D], so that a slot is one index.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .types import AttentionBatch, AttentionWork, HeadNorms, HostPages, KVPages

I32 = NDArray[np.int32]


def allocate_pages(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KVPages:
    """Return a store of zeroed pages."""
    k, v = (torch.zeros(num_layers, num_pages, page_size, num_kv_heads, head_dim, dtype=dtype) for _ in "kv")
    return KVPages(k, v, page_size, num_kv_heads, head_dim)


def write_pages(pages: KVPages, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store keys and values of new tokens. Shapes: k, v [T, Hkv, D]; slots [T]."""
    pages.k[layer].flatten(0, 1)[slots] = k.to(pages.k.dtype)
    pages.v[layer].flatten(0, 1)[slots] = v.to(pages.v.dtype)


def read_pages(pages: KVPages, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values at `slots`. Shapes: slots [S] -> [S, Hkv, D] each."""
    return pages.k[layer].flatten(0, 1)[slots], pages.v[layer].flatten(0, 1)[slots]


def copy_pages(pages: KVPages, copies: Tensor) -> None:
    """Copy whole pages, all layers. Shapes: copies [C, 2] (src, dst); no dst is a src."""
    source, target = copies.long().unbind(1)
    pages.k[:, target] = pages.k[:, source]
    pages.v[:, target] = pages.v[:, source]


def swap_out(pages: KVPages, host: HostPages, swaps: Tensor) -> None:
    """Copy whole pages to the host, all layers. Shapes: swaps [S, 2] (page, host page); no host page twice."""
    source, target = swaps.long().unbind(1)
    for store, kept in ((pages.k, host.k), (pages.v, host.v)):
        kept[target.cpu()] = store[:, source].transpose(0, 1).cpu()


def swap_in(pages: KVPages, host: HostPages, swaps: Tensor) -> None:
    """Copy whole pages back, all layers. Shapes: swaps [S, 2] (host page, page); no page twice."""
    source, target = swaps.long().unbind(1)
    for store, kept in ((pages.k, host.k), (pages.v, host.v)):
        store[:, target] = kept[source.cpu()].transpose(0, 1).to(store.device)


def prepare(tables: I32, start: I32, num_tokens: I32, page_size: int, group: int) -> AttentionWork | None:
    """Cut a step's attention into pieces, if this backend wants that; `work.plan_work` says what the arguments are."""
    return None


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

    Shapes: q [T, H, D] -> [T, H, D]; query head h reads key head h // G.
    window: a token at position i sees positions j with i - window < j <= i.
    softcap: scores become softcap * tanh(scores / softcap).
    sinks: [H], one more logit per head that takes part in the softmax and contributes no value.
    """
    out = torch.empty_like(q)
    for row in range(batch.start.numel()):
        first, last = int(batch.offsets[row]), int(batch.offsets[row + 1])
        if first == last:
            continue
        start = int(batch.start[row])
        end = start + last - first
        j = torch.arange(end, device=q.device)
        slots = batch.tables[row].long()[j // pages.page_size] * pages.page_size + j % pages.page_size
        k, v = read_pages(pages, layer, slots)
        i = torch.arange(start, end, device=q.device)
        seen = j[None, :] <= i[:, None]
        if window is not None:
            seen &= j[None, :] > i[:, None] - window
        out[first:last] = _attend(q[first:last], k, v, seen, scale, softcap, sinks)
    return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attend one row. Shapes: q [n, H, D], k, v [S, Hkv, D], seen [n, S] bool, sinks [H] -> [n, H, D] float32."""
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    k = k.float().repeat_interleave(group, dim=1)
    v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,shd->hns", q.float(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.float().view(num_heads, 1, 1).expand(num_heads, num_tokens, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : v.shape[0]]
    return torch.einsum("hns,shd->nhd", weights, v)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by `estimate_size`. Shapes: x [..., C], weight [C].

    Rounds to x.dtype before the weight is applied, as transformers does.
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual). Shapes: x, residual [T, C], weight [C]."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up. Shapes: gate_up [T, 2 * I], gate first -> [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * C dimensions of each head, pairing i with i + C; the rest pass through.

    Shapes: x [T, heads, D], cos, sin [T, C] with 2 * C <= D.
    """
    half = cos.shape[-1]
    x32 = x.float()
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    cos, sin = cos.float()[:, None], sin.float()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


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
    """Norm each head if asked, rotate q and k, store k and v, return q.

    Shapes: q [T, H, D], k, v [T, Hkv, D] (any strides over tokens), cos, sin [T, C], slots [T].
    """
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    write_pages(pages, layer, rope(k, cos, sin), v, slots)
    return rope(q, cos, sin)
