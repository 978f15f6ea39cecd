"""Merge the partial states of tokens whose keys were cut into several pieces."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import AttentionWork
from .configs import MERGE, Chip
from .launch import next_power_of_2
from .rounding import rounded
from .variants import Variant, traced


@triton.jit(do_not_specialize_on_alignment=["tokens", "offsets", "pieces", "num_merges"])  # pieces of one transfer
def merge_tokens(  # type: ignore[no-untyped-def]
    out,
    states,
    sums,
    tokens,
    offsets,
    pieces,
    num_merges,
    sinks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Weigh each state of a token and head by the exponential of its log-sum-exp; a sink adds weight but no value.

    Shapes: out [T, H, D]; states [S, H, D] float32; sums [S, H] float32, logarithms to base 2, -inf where a state saw
    no key; tokens, offsets, pieces, num_merges: `merge_tokens`, `merge_offsets`, `merge_states`, `num_merges` of
    `AttentionWork`; sinks [H].
    Grid: programs that take (token, head) pairs in turn, as many as `num_merges` says; BLOCK_S states at a time, in the
    order listed, so that no bit depends on the rest of the step.
    Source: the associative merge of softmax states (Flash-Decoding, 2023).
    """
    column = tl.arange(0, WIDTH)
    inside = column < HEAD_DIM
    for pair in tl.range(tl.program_id(0), tl.load(num_merges) * HEADS, tl.num_programs(0)):
        head = pair % HEADS
        first = tl.load(offsets + pair // HEADS)
        end = tl.load(offsets + pair // HEADS + 1)
        peak = -1e30
        total = 0.0
        weighted = tl.zeros([WIDTH], tl.float32)
        if SINKS:
            peak = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            total = 1.0
        for start in range(first, end, BLOCK_S):
            number = start + tl.arange(0, BLOCK_S)
            listed = number < end
            state = tl.load(pieces + number, mask=listed, other=0).to(tl.int64) * HEADS + head
            log_sum = tl.load(sums + state, mask=listed, other=-float("inf"))
            value = tl.load(
                states + state[:, None] * HEAD_DIM + column[None, :], mask=listed[:, None] & inside[None, :], other=0.0
            )
            higher = tl.maximum(peak, tl.max(log_sum, 0))
            weight = tl.exp2(log_sum - higher)
            decay = tl.exp2(peak - higher)
            total = total * decay + tl.sum(weight, 0)
            weighted = weighted * decay + tl.sum(weight[:, None] * value, 0)
            peak = higher
        token = tl.load(tokens + pair // HEADS).to(tl.int64)
        at = (token * HEADS + head) * HEAD_DIM + column
        tl.store(out + at, rounded(weighted / total, out.dtype.element_ty), mask=inside)


def merge_states(
    out: Tensor, states: Tensor, sums: Tensor, work: AttentionWork, sinks: Tensor | None, chip: Chip
) -> None:
    """Write the outputs of tokens with several states. Shapes: out [T, H, D], states [S, H, D], sums [S, H]."""
    num_heads, head_dim = out.shape[1:]
    num_pairs = work.merge_tokens.shape[0] * num_heads
    merge_tokens[(min(num_pairs, MERGE.programs * chip.multiprocessors),)](
        out, states, sums, work.merge_tokens, work.merge_offsets, work.merge_states, work.num_merges, sinks,
        HEADS=num_heads, HEAD_DIM=head_dim, WIDTH=max(16, next_power_of_2(head_dim)), BLOCK_S=MERGE.block_s,
        SINKS=sinks is not None, num_warps=MERGE.num_warps,
    )  # fmt: skip


def variants(arch: int) -> Iterator[Variant]:
    """Yield the merges of models with heads of 64 to 256 dimensions."""
    meta = partial(torch.empty, device="meta")
    ints = partial(meta, dtype=torch.int32)
    work = AttentionWork((), ints(5), ints(5), ints(6), ints(7), ints(1), 7)
    for heads, head_dim, dtype in (
        (9, 64, torch.bfloat16), (30, 80, torch.float16), (32, 128, torch.bfloat16), (16, 128, torch.float32),
        (8, 256, torch.bfloat16),
    ):  # fmt: skip
        out, states, sums = meta(5, heads, head_dim, dtype=dtype), meta(7, heads, head_dim), meta(7, heads)
        for sinks in (None, meta(heads, dtype=dtype)):
            yield from traced(partial(merge_states, out, states, sums, work, sinks, Chip(arch // 10, 1)))
