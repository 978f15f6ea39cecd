"""Attention backend in plain torch that follows the work list and nothing else of the batch.

It tests the lists of `plan_work` and the buffers that they are copied to; Triton's interpreter would take too long.
"""

from __future__ import annotations

import torch
from chatcache_kernels.reference import (
    add_rms_norm,
    allocate_latent_pages,
    allocate_pages,
    causal_conv,
    clamped_silu_mul,
    copy_pages,
    gated_delta_rule,
    gated_rms_norm,
    gelu_mul,
    grouped_experts,
    latent_attention,
    pack_experts,
    read_latents,
    read_pages,
    rms_norm,
    rope_write,
    silu_mul,
    ssd_scan,
    swap_in,
    swap_out,
    write_latents,
    write_pages,
)
from chatcache_kernels.types import I32, AttentionBatch, AttentionWork, KVPages
from chatcache_kernels.work_list import plan_work
from torch import Tensor

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
    "rms_norm",
    "rope_write",
    "silu_mul",
    "ssd_scan",
    "swap_in",
    "swap_out",
    "write_latents",
    "write_pages",
]


def prepare(tables: I32, start: I32, num_tokens: I32, page_size: int, group: int) -> AttentionWork:
    return plan_work(tables, start, num_tokens, page_size, group, share="always")


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
    """Compute every item, then merge. A token without items stays nan."""
    assert batch.work is not None and window is None and softcap is None and sinks is None
    work = batch.work
    out, states = torch.full_like(q, torch.nan), torch.full((work.num_states, *q.shape[1:]), torch.nan)
    sums = torch.full((work.num_states, q.shape[1]), torch.nan)
    for one in work.lists:
        for row, first, end, member, count, state in one.items[: int(one.num_items[0])].tolist():
            assert 0 < count <= one.max_members
            for number, token in enumerate(one.members[member : member + count].tolist()):
                stop = min(end, int(work.positions[token]) + 1)
                values, total = _piece(q[token], pages, layer, batch.tables[row], first, stop, scale)
                if state < 0:
                    out[token] = values
                else:
                    states[state + number], sums[state + number] = values, total
    for number, token in enumerate(work.merge_tokens[: int(work.num_merges[0])].tolist()):
        which = work.merge_states[int(work.merge_offsets[number]) : int(work.merge_offsets[number + 1])].long()
        weights = torch.softmax(sums[which], 0)
        out[token] = (weights[:, :, None] * states[which]).nan_to_num(0.0).sum(0)
    return out


def _piece(
    q: Tensor, pages: KVPages, layer: int, table: Tensor, first: int, stop: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return one token's (weighted values [H, D], log-sum-exp [H]) over keys first .. stop - 1."""
    if stop <= first:
        return torch.zeros_like(q), torch.full((q.shape[0],), -torch.inf)
    j = torch.arange(first, stop)
    slots = table.long()[j // pages.page_size] * pages.page_size + j % pages.page_size
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[1], 1) for x in read_pages(pages, layer, slots))
    scores = torch.einsum("hd,shd->hs", q, k) * scale
    return torch.einsum("hs,shd->hd", scores.softmax(-1), v), scores.logsumexp(-1)
