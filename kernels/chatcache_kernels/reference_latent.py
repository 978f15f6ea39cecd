"""Latent attention in plain torch, and the page store of latents, which all backends lay out alike.

A layer with latent attention (DeepSeek's MLA) keeps one vector per token for all heads: the latent, from which keys and
values are projected, and the rotary part of the key. With queries that are projected into the latent space, attention
is that of one key head of `rank + rope` dimensions, whose values are the first `rank` of them:

    page     token 0  [ latent: rank dimensions | rotary key: rope dimensions ]
             token 1  [ ...                                                    ]

Source: DeepSeek-V2 (2024), multi-head latent attention with absorbed projections.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import AttentionBatch, LatentPages


def allocate_latent_pages(
    num_layers: int, num_pages: int, page_size: int, width: int, rank: int, dtype: torch.dtype
) -> LatentPages:
    """Allocate a store of zeroed latents. `width`: dimensions of a token; `rank`: those of them that are the latent."""
    return LatentPages(torch.zeros(num_layers, num_pages, page_size, width, dtype=dtype), rank)


def write_latents(pages: LatentPages, layer: int, latents: Tensor, slots: Tensor) -> None:
    """Store the latents of new tokens. Shapes: latents [num_tokens, width], slots [num_tokens]."""
    pages.data[layer].flatten(0, 1).index_copy_(0, slots, latents.to(pages.data.dtype))


def read_latents(pages: LatentPages, layer: int, slots: Tensor) -> Tensor:
    """Return the latents at `slots`. Shapes: slots [n] -> [n, width]."""
    return pages.data[layer].flatten(0, 1).index_select(0, slots)


def context_slots(pages: LatentPages, table: Tensor, length: int) -> Tensor:
    """Return the slots of the first `length` tokens of a sequence. Shapes: table [max_pages] -> [length]."""
    position = torch.arange(length, device=table.device)
    return table.long()[position // pages.page_size] * pages.page_size + position % pages.page_size


def latent_attention(q: Tensor, pages: LatentPages, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
    """Compute attention of the new tokens over the latents of their sequences.

    Causal: a token sees the tokens up to and including its own, whose latents must have been written before. Every head
    attends to the same latents. A row whose `num_tokens` is 0 is skipped, and its tokens' results are undefined.

    Shapes: q [num_tokens, num_heads, width], queries projected into the latent space, followed by their rotary part ->
    weighted latents [num_tokens, num_heads, rank].
    """
    out = torch.empty(*q.shape[:2], pages.rank, dtype=q.dtype, device=q.device)
    for row in range(batch.start.numel()):
        first, start, count = int(batch.offsets[row]), int(batch.start[row]), int(batch.num_tokens[row])
        if not count:
            continue
        latents = read_latents(pages, layer, context_slots(pages, batch.tables[row], start + count)).float()
        scores = torch.einsum("nhw,sw->hns", q[first : first + count].float(), latents) * scale
        position = torch.arange(start + count, device=q.device)
        scores = scores.masked_fill(position[None, :] > position[start:, None], -torch.inf)
        values = latents[:, : pages.rank]
        out[first : first + count] = torch.einsum("hns,sr->nhr", scores.softmax(-1), values).to(q.dtype)
    return out
