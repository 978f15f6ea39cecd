"""Latent attention on a CPU: gathered latents and matrix products.

All heads attend to one vector per token, so a decode step multiplies its heads with each latent that it reads: 20 heads
make 40 operations for each byte of bfloat16. That is work for matrix products (oneDNN, MKL), not for a kernel that
reads memory once. Rows of one new token and of similar length are gathered together and multiplied as one batch.

Scores of bfloat16 latents are rounded to bfloat16 before the softmax, as in transformers' eager attention: products
with float32 results took 3.5 times as long. Measured on one thread without AMX, 20 heads, 576 dimensions, bfloat16: one
row of 4,096 tokens takes 2.3 ms, of which 0.8 ms are the gather; torch's flash attention takes 8.0 ms. Its products run
at 80 GFLOP/s, and its latents are read at 2 GB/s of the 14 GB/s that one thread reads: arithmetic is the limit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference_latent import context_slots, read_latents, write_latents
from ..types import AttentionBatch, LatentPages
from .pages import empty_pages

__all__ = ["allocate_latent_pages", "latent_attention", "read_latents", "write_latents"]

MAX_GATHERED = 1 << 22
"""Elements of latents that one batch of rows gathers."""
MAX_SCORES = 1 << 22
"""Scores of a tile of new tokens of one row."""
MAX_PADDING = 1.25
"""Longest row of a batch, relative to its shortest."""


def allocate_latent_pages(
    num_layers: int, num_pages: int, page_size: int, width: int, rank: int, dtype: torch.dtype
) -> LatentPages:
    """Allocate a store of uninitialised latents. Arguments as `reference_latent.allocate_latent_pages`."""
    return LatentPages(empty_pages((num_layers, num_pages, page_size, width), dtype), rank)


def latent_attention(q: Tensor, pages: LatentPages, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
    """Compute attention over latents; see `reference_latent.latent_attention`."""
    out = torch.empty(*q.shape[:2], pages.rank, dtype=q.dtype)
    counts, starts, offsets = batch.num_tokens.tolist(), batch.start.tolist(), batch.offsets.tolist()
    single = sorted((starts[row] + 1, row) for row, count in enumerate(counts) if count == 1)
    first = 0
    while first < len(single):
        last = first + 1
        while last < len(single) and _fits(single[first][0], single[last][0], last + 1 - first, pages):
            last += 1
        lengths, rows = zip(*single[first:last], strict=True)
        _decode(q, out, pages, layer, batch, rows, lengths, [offsets[row] for row in rows], scale)
        first = last
    for row, count in enumerate(counts):
        if count > 1:
            part = slice(offsets[row], offsets[row] + count)
            out[part] = _prefill(q[part], pages, layer, batch.tables[row], starts[row], scale)
    return out


def _fits(shortest: int, longest: int, count: int, pages: LatentPages) -> bool:
    """Return whether `count` rows of these lengths are gathered together."""
    padded = longest <= max(MAX_PADDING * shortest, shortest + pages.page_size)
    return padded and count * longest * pages.data.shape[-1] <= MAX_GATHERED


def _decode(
    q: Tensor,
    out: Tensor,
    pages: LatentPages,
    layer: int,
    batch: AttentionBatch,
    rows: tuple[int, ...],
    lengths: tuple[int, ...],
    tokens: list[int],
    scale: float,
) -> None:
    """Write to `out` the attention of rows of one new token. `lengths`: increasing; `tokens`: of q, one per row.

    Positions after the end of a row read its last token again and have no weight, so stale memory is not multiplied.
    """
    size, longest = pages.page_size, lengths[-1]
    position = torch.arange(longest)
    end = torch.tensor(lengths)[:, None]
    near = torch.minimum(position, end - 1)
    table = batch.tables[list(rows)].long()
    slots = table.gather(1, near // size) * size + near % size
    latents = read_latents(pages, layer, slots.flatten()).view(len(rows), longest, -1).to(q.dtype)
    index = torch.tensor(tokens)
    scores = torch.bmm(q.index_select(0, index), latents.transpose(1, 2)).float().mul_(scale)
    if lengths[0] < longest:
        scores.masked_fill_((position >= end)[:, None], -torch.inf)
    out[index] = torch.bmm(scores.softmax(-1).to(q.dtype), latents)[..., : pages.rank]  # a slice would be copied


def _prefill(q: Tensor, pages: LatentPages, layer: int, table: Tensor, start: int, scale: float) -> Tensor:
    """Return the attention of the new tokens of one row, tile by tile. Shapes: q [n, H, W] -> [n, H, rank]."""
    count, num_heads, width = q.shape
    latents = read_latents(pages, layer, context_slots(pages, table, start + count)).to(q.dtype)
    out = torch.empty(count, num_heads, pages.rank, dtype=q.dtype)
    position = torch.arange(start + count)
    tile = max(1, MAX_SCORES // (num_heads * (start + count)))
    for first in range(0, count, tile):
        last = min(first + tile, count)
        seen = latents[: start + last]
        scores = (q[first:last].reshape(-1, width) @ seen.T).float().mul_(scale).view(last - first, num_heads, -1)
        hidden = position[None, : start + last] > position[start + first : start + last, None]
        weights = scores.masked_fill_(hidden[:, None], -torch.inf).softmax(-1).to(q.dtype)
        out[first:last] = (weights.view(-1, start + last) @ seen[:, : pages.rank]).view(last - first, num_heads, -1)
    return out
