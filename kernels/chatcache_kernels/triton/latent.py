"""Latent attention over paged latents: one kernel runs the items of a work list, `merge_states` merges their states.

The work lists are those of `attention` with all heads in one group, since every head reads the same latents. A tile of
latents is loaded once and multiplied twice, as keys and as values, in two parts: the latent, and the rotary key.

    scores = query_latent [M, rank] @ latent^T  +  query_rope [M, rope] @ rope^T        acc += weights @ latent

Shared memory decides the tiles: 32 tokens of 576 bfloat16 take 36 KiB, and 16 queries 18 KiB. The results of 64 queries
take half of all registers.

Source: DeepSeek-V2 (2024); FlashMLA (DeepSeek, 2025); split keys as in Flash-Decoding (2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference_latent import allocate_latent_pages, read_latents, write_latents
from ..types import AttentionBatch, AttentionWork, LatentPages, WorkList
from ..work_list import PREFILL_TILE_QUERIES, tokens_per_tile
from .attention import LOG2_E, dot, locate_queries, merge_states
from .configs import Chip, Config, get_chip
from .launch import next_power_of_2, round_to
from .variants import Variant, trace_variants

__all__ = ["allocate_latent_pages", "latent_attention", "read_latents", "write_latents"]


@triton.jit(
    do_not_specialize=["layer", "table_stride"],
    do_not_specialize_on_alignment=["items", "members", "num_items", "positions", "tables"],
)
def latent_attention_kernel(  # type: ignore[no-untyped-def]
    q,
    data,
    out,
    states,
    sums,
    items,
    members,
    num_items,
    positions,
    tables,
    layer,
    layer_stride,
    q_token_stride,
    q_head_stride,
    table_stride,
    scale,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Run a work list: write `out` for tokens with one item, `states` and `sums` for others.

    Shapes: q [T, H, RANK + ROPE] of any strides over tokens and heads; data [L, N, P, RANK + ROPE]; out [T, H, RANK];
    states [S, H, RANK] float32; sums [S, H] float32, log-sum-exp to base 2; lists as in `types.WorkList`. `scale` turns
    products into exponents of 2. Tokens past the end are read as the last one again, as in `attention`.
    """
    WIDTH: tl.constexpr = RANK + ROPE
    column = tl.arange(0, RANK_BLOCK)
    turn = tl.arange(0, ROPE_BLOCK)
    in_rank = (column < RANK)[None, :]
    in_rope = (turn < ROPE)[None, :]
    latents = data + layer.to(tl.int64) * layer_stride
    num_work_ids = tl.load(num_items) * SLICES
    for done in tl.range(tl.program_id(0), num_work_ids, tl.num_programs(0)):
        item, _, member, head, token, taken = locate_queries(
            num_items, items, members, done, ROWS, SLICES, HEADS, 1, False
        )
        position = tl.load(positions + token, mask=taken, other=-1)
        at = (token.to(tl.int64) * q_token_stride + head * q_head_stride)[:, None]
        query = tl.load(q + at + column[None, :], mask=taken[:, None] & in_rank, other=0.0)
        query_rope = tl.load(q + at + RANK + turn[None, :], mask=taken[:, None] & in_rope, other=0.0)
        table = tables + tl.load(item).to(tl.int64) * table_stride
        low = tl.load(item + 1)
        high = tl.minimum(tl.load(item + 2), tl.max(position, 0) + 1)
        last = tl.maximum(high - 1, 0)
        reach = tl.minimum(position, last)
        acc = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        row_max = tl.full([ROWS], -1e30, tl.float32)  # finite: a tile without visible keys gives 0, not NaN
        lane = tl.arange(0, BLOCK_N)
        page = tl.load(table + tl.minimum(low + lane, last).to(tl.uint32) // PAGE_SIZE)
        for start in tl.range(low, high, BLOCK_N):
            key = start + lane
            near = tl.minimum(key, last).to(tl.uint32)
            cell = (page.to(tl.int64) * (PAGE_SIZE * WIDTH) + (near % PAGE_SIZE * WIDTH).to(tl.int32))[:, None]
            if RANK == RANK_BLOCK and ROPE == ROPE_BLOCK:
                latent = tl.load(latents + (cell + column[None, :]))
                rope = tl.load(latents + (cell + (RANK + turn)[None, :]))
            else:
                latent = tl.load(latents + (cell + column[None, :]), mask=in_rank, other=0.0)
                rope = tl.load(latents + (cell + (RANK + turn)[None, :]), mask=in_rope, other=0.0)
            score = dot(query_rope, rope.T, tl.zeros([ROWS, BLOCK_N], tl.float32))
            score = dot(query, latent.T, score)
            score = tl.where(key[None, :] <= reach[:, None], score, -float("inf"))
            page = tl.load(table + tl.minimum(key + BLOCK_N, last).to(tl.uint32) // PAGE_SIZE)
            new_max = tl.maximum(row_max, tl.max(score, 1))
            weight = tl.exp2(score * scale - (new_max * scale)[:, None])
            decay = tl.exp2((row_max - new_max) * scale)
            row_sum = row_sum * decay + tl.sum(weight, 1)
            acc = dot(round_to(weight, latent.dtype), latent, acc * decay[:, None])
            row_max = new_max

        divisor = tl.where(row_sum == 0, 1.0, row_sum)
        acc /= divisor[:, None]
        if ROWS > 16:  # reloaded, so that the addresses of results take no registers in the loop above
            item, _, member, head, token, taken = locate_queries(
                num_items, items, members, done, ROWS, SLICES, HEADS, 1, True
            )
        used = taken[:, None] & in_rank
        first_state = tl.load(item + 5)
        if first_state < 0:
            to = (token.to(tl.int64) * HEADS + head)[:, None] * RANK
            tl.store(out + to + column[None, :], round_to(acc, out.dtype.element_ty), mask=used)
        else:
            state = (first_state + member).to(tl.int64) * HEADS + head
            tl.store(states + state[:, None] * RANK + column[None, :], acc, mask=used)
            log_sum = tl.where(row_sum == 0, -float("inf"), row_max * scale + tl.log2(divisor))
            tl.store(sums + state, log_sum, mask=taken)


def choose_latent_config(chip: Chip, num_queries: int, itemsize: int) -> Config:
    """Return the launch configuration of latent attention for items of so many queries.

    The tiles fit the shared memory of the chip at 576 dimensions. On Hopper, 64 queries are one tile of its matrix
    units (wgmma), so that 128 heads read each latent twice.
    """
    if chip.major == 0:
        return Config(16 if num_queries <= 16 else 32, 64, 1, 1, programs=1)
    if itemsize == 4:
        return Config(16, 16, 8, 1, programs=1)
    large = chip.major in (9, 10)
    if num_queries <= 16 or not large:
        return Config(16, 32, 4, 2 if large else 1, programs=2)
    if num_queries <= 32 or chip.major == 10:
        return Config(32, 32, 8, 2, programs=1)
    return Config(64, 64, 8, 2, programs=1)


def latent_attention(q: Tensor, pages: LatentPages, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
    """Compute attention over latents by the work lists in `batch.work`; see `reference_latent.latent_attention`.

    Raises: ValueError for a batch without `work`, a dtype other than the pages', or a last dimension that is not
    contiguous.
    """
    return latent_attention_on_chip(q, pages, layer, batch, scale, get_chip(q.device))


def latent_attention_on_chip(
    q: Tensor, pages: LatentPages, layer: int, batch: AttentionBatch, scale: float, chip: Chip
) -> Tensor:
    """Run `latent_attention` with the configuration of `chip`."""
    work = batch.work
    if work is None or q.dtype != pages.data.dtype or q.stride(2) != 1:
        raise ValueError("latent attention needs batch.work, and q of the pages' dtype with contiguous dimensions")
    (num_tokens, num_heads, width), rank = q.shape, pages.rank
    out = torch.empty((num_tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    states = torch.empty((work.num_states, num_heads, rank), dtype=torch.float32, device=q.device)
    sums = torch.empty((work.num_states, num_heads), dtype=torch.float32, device=q.device)
    for one in work.lists:
        num_queries = one.max_members * num_heads
        config = choose_latent_config(chip, num_queries, q.element_size())
        slices = -(-num_queries // config.rows)
        num_work_ids = one.items.shape[0] * slices
        if not num_work_ids:
            continue
        latent_attention_kernel[(min(num_work_ids, config.programs * chip.multiprocessors),)](
            q, pages.data, out, states, sums,
            one.items, one.members, one.num_items, work.positions, batch.tables,
            layer, pages.data.stride(0), q.stride(0), q.stride(1), batch.tables.stride(0), scale * LOG2_E,
            ROWS=config.rows, SLICES=slices, HEADS=num_heads, RANK=rank, ROPE=width - rank,
            RANK_BLOCK=max(16, next_power_of_2(rank)), ROPE_BLOCK=max(16, next_power_of_2(width - rank)),
            PAGE_SIZE=pages.page_size, BLOCK_N=config.block_n,
            num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    if work.merge_tokens.shape[0]:
        merge_states(out, states, sums, work, None, chip)
    return out


MODELS = {"deepseek-v2-lite": 16, "glm-4.7-flash": 20, "kimi-k2": 64, "deepseek-v3": 128}
"""Heads of published models; all have latents of 512 dimensions and rotary keys of 64."""


def variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of published models in bfloat16, and one in float32."""
    for heads in MODELS.values():
        yield from _variants(Chip(arch // 10, 1), heads, 512, 64, torch.bfloat16)
    yield from _variants(Chip(arch // 10, 1), 16, 512, 64, torch.float32)
    yield from _variants(Chip(arch // 10, 1), 40, 256, 32, torch.bfloat16)


def _variants(chip: Chip, heads: int, rank: int, rope: int, dtype: torch.dtype) -> Iterator[Variant]:
    """Yield the kernel variants of work lists with small, large and prefill tiles, over a large store."""
    meta = partial(torch.empty, device="meta")
    ints = partial(meta, dtype=torch.int32)
    pages = LatentPages(meta(2, 1 << 20, 16, rank + rope, dtype=dtype), rank)
    q = meta(5, heads, rank + rope, dtype=dtype)
    for height in {*tokens_per_tile(heads), max(1, PREFILL_TILE_QUERIES // heads)}:
        tiles = WorkList(ints(5, 6), ints(5), ints(1), height)
        work = AttentionWork((tiles,), ints(5), ints(5), ints(6), ints(7), ints(1), 7)
        batch = AttentionBatch(ints(5, 9), ints(5), ints(5), ints(6), meta(5, dtype=torch.int64), 1, 9, work)
        yield from trace_variants(partial(latent_attention_on_chip, q, pages, 1, batch, 0.1, chip))
