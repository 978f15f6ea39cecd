"""Plain torch implementation of every operation: the oracle of all kernels.

Written to be obviously right, on any device. Arithmetic is in float32 whatever the dtype of pages and activations;
results are rounded once, at the end. KV layout: see the package docstring.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import fp8
from .experts import grouped_experts as grouped_experts
from .experts import pack_experts as pack_experts
from .reference_latent import allocate_latent_pages as allocate_latent_pages
from .reference_latent import latent_attention as latent_attention
from .reference_latent import read_latents as read_latents
from .reference_latent import write_latents as write_latents
from .reference_recurrent import causal_conv as causal_conv
from .reference_recurrent import gated_delta_rule as gated_delta_rule
from .reference_recurrent import ssd_scan as ssd_scan
from .types import AttentionBatch, AttentionWork, HeadNorms, HostPages, KVPages, PageStore

I32 = NDArray[np.int32]


def allocate_pages(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> KVPages:
    """Allocate a store of zeroed pages. `dtype` float8_e4m3fn: keys and values are quantised."""
    width = head_dim + (fp8.SCALE_BYTES if dtype == fp8.DTYPE else 0)
    k, v = (torch.zeros(num_layers, num_pages, page_size, num_kv_heads, width, dtype=dtype) for _ in "kv")
    return KVPages(k, v, page_size, num_kv_heads, head_dim)


def write_pages(pages: KVPages, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store keys and values of new tokens. Shapes: k, v [num_tokens, num_kv_heads, head_dim].

    slots [num_tokens].
    """
    for store, new in ((pages.k, k), (pages.v, v)):
        if pages.is_fp8:
            store[layer].view(torch.uint8).flatten(0, 1)[slots] = fp8.pack_vectors(new)
        else:
            store[layer].flatten(0, 1)[slots] = new.to(store.dtype)


def read_pages(pages: KVPages, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values at `slots`.

    Shapes: slots [n] -> [n, num_kv_heads, head_dim] each; of quantised pages in float32.
    """
    if pages.is_fp8:
        k, v = (fp8.unpack_vectors(x[layer].view(torch.uint8).flatten(0, 1)[slots]) for x in pages.tensors)
        return k, v
    return pages.k[layer].flatten(0, 1)[slots], pages.v[layer].flatten(0, 1)[slots]


def copy_pages(pages: PageStore, copies: Tensor) -> None:
    """Copy whole pages, all layers. Shapes: copies [n, 2] (source, target).

    No target is also a source.
    """
    source, target = copies.long().unbind(1)
    for memory in pages.tensors:
        memory[:, target] = memory[:, source]


def swap_out(pages: PageStore, host: HostPages, swaps: Tensor) -> None:
    """Copy whole pages to the host, all layers. Shapes: swaps [n, 2] (page, host page).

    The host pages must be distinct.
    """
    source, target = swaps.long().unbind(1)
    for store, kept in zip(pages.tensors, host.tensors, strict=True):
        kept[target.cpu()] = store[:, source].transpose(0, 1).cpu()


def swap_in(pages: PageStore, host: HostPages, swaps: Tensor) -> None:
    """Copy whole pages from the host, all layers. Shapes: swaps [n, 2] (host page, page).

    The target pages must be distinct.
    """
    source, target = swaps.long().unbind(1)
    for store, kept in zip(pages.tensors, host.tensors, strict=True):
        store[:, target] = kept[source.cpu()].transpose(0, 1).to(store.device)


def prepare(tables: I32, start: I32, num_tokens: I32, page_size: int, group: int) -> AttentionWork | None:
    """Plan a step's attention. Return None: this backend needs no plan.

    Arguments: see `work_list.plan_work`.
    """
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
    """Compute attention of the new tokens over the keys and values of their sequences.

    Causal (a token sees the keys up to and including its own), grouped queries.
    The keys and values of the new tokens must have been written before.

    Shapes: q [num_tokens, num_heads, head_dim] -> the same; query head h uses key head h // (num_heads / num_kv_heads).
    window: a token at position i sees positions j with i - window < j <= i (sliding window).
    softcap: scores become softcap * tanh(scores / softcap).
    sinks: [num_heads], one more logit per head, which takes part in the softmax and contributes no value.
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
    """Compute attention of one row; `seen[i, j]`: whether its new token i sees key j.

    Shapes: q [n, H, D], k, v [S, Hkv, D], seen [n, S] bool, sinks [H] -> [n, H, D] float32.
    """
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
    """Apply RMSNorm over the last dimension.

    Shapes: x [..., hidden], weight [hidden] of x's type or float32 -> [..., hidden].
    Rounds to x.dtype before the weight is applied, as transformers does.
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight * x32.to(x.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual).

    Shapes: x, residual [num_tokens, hidden], weight [hidden].
    """
    total = x + residual
    return rms_norm(total, weight, eps), total


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * silu(gate), over the last dimension.

    Shapes: x, gate [num_tokens, num_heads, dim], weight [dim].
    """
    gate = gate.float()
    return (rms_norm(x, weight, eps) * (gate * torch.sigmoid(gate))).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up.

    Shapes: gate_up [num_tokens, 2 * intermediate], gate first -> [num_tokens, intermediate].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up, with the approximation of GELU by a hyperbolic tangent.

    Shapes: as `silu_mul`. Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    steep = 2.0 * math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    return (gate * torch.sigmoid(steep) * up).to(gate_up.dtype)  # equal, and no small difference of large numbers


def clamped_silu_mul(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """Return gate * sigmoid(slope * gate) * (up + 1), gate at most `limit`, up from -`limit` to `limit` (gpt-oss).

    Shapes: as `silu_mul`.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(slope * gate) * (up + 1.0)).to(gate_up.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to the first rotary_dim dimensions of each head.

    The rest pass through.
    Dimension i is paired with i + rotary_dim / 2 (the transformers convention).
    Shapes: x [num_tokens, heads, head_dim], cos, sin [num_tokens, rotary_dim / 2].
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
    """Normalise heads if asked, apply the rotary embedding to q and k, store k and v, return q.

    Shapes: q [num_tokens, num_heads, head_dim], k, v [num_tokens, num_kv_heads, head_dim] (any strides over tokens),
    cos, sin [num_tokens, rotary_dim / 2], slots [num_tokens] -> [num_tokens, num_heads, head_dim].
    """
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    write_pages(pages, layer, rope(k, cos, sin), v, slots)
    return rope(q, cos, sin)
