"""Paged attention: one kernel that carries out the pieces of a work list, then one that merges their states.

Decode, split keys, prompt chunks and shared prefixes are the same kernel over different lists (`work.py` cuts them).

    a piece = item x key head x slice             what its tile holds, G = 3, M = 16 rows

    item   row of tables, keys 512 .. 1023        row  0  1  2   member 0, its heads 3 h, 3 h + 1, 3 h + 2
           members [4, 9, 17, ...], state 40      row  3  4  5   member 1
    head   h of Hkv                               ...            rows past the last member compute nothing that is kept
    slice  M of the queries, if they are more

Grid: a number of programs that depends on the device, the configuration and the size of the buffers alone; program i
carries out pieces i, i + programs, ... of as many as `num_items` says on the device, so a captured launch serves any
step. The heads of an item are neighbours; the last items, which see the most keys, start first.

Source: online softmax over tiles (FlashAttention, Dao et al. 2022; FlashAttention-2, 2023), split keys (Flash-Decoding,
2023), queries that share a key head packed into a tile (FlashInfer, Ye et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import AttentionBatch, AttentionWork, KVPages, WorkList
from .configs import Chip, chip_of, choose, configs_of
from .launch import next_power_of_2
from .merge import merge_states
from .rounding import rounded
from .tiles import attend_tiles
from .variants import Variant, traced

LOG2_E = 1.4426950408889634  # exponentials are powers of 2


@triton.jit
def _queries(  # type: ignore[no-untyped-def]
    num_items,
    items,
    members,
    done,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    AFRESH: tl.constexpr,
):
    """Return (item, key head, and of each row of the tile: member, query head, token, whether there is one).

    AFRESH keeps the compiler from remembering instead what an earlier call returned.
    """
    piece = tl.load(num_items, volatile=AFRESH) * (KV_HEADS * SLICES) - 1 - done
    item = items + piece // (KV_HEADS * SLICES) * 6
    kv_head = piece // SLICES % KV_HEADS
    lane = piece % SLICES * ROWS + tl.arange(0, ROWS)
    member = lane // GROUP
    taken = member < tl.load(item + 4)
    token = tl.load(members + tl.load(item + 3) + member, mask=taken, other=0)
    return item, kv_head, member, kv_head * GROUP + lane % GROUP, token, taken


@triton.jit(
    do_not_specialize=["layer", "table_stride", "window"],
    do_not_specialize_on_alignment=["items", "members", "num_items", "positions", "tables"],  # pieces of one transfer
)
def attend_items(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    states,
    sums,
    items,
    members,
    num_items,
    positions,
    tables,
    sinks,
    layer,
    layer_stride,
    q_token_stride,
    q_head_stride,
    table_stride,
    scale,
    cap,
    window,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Carry out a work list: write `out` for whole tokens, `states` and `sums` for parts of them.

    Shapes: q [T, H, D] of any strides over tokens and heads; k, v [L, N, Hkv, P, D]; out [T, H, D]; states
    [S, H, D] float32; sums [S, H] float32, logarithms to base 2; tables [R, ...]; sinks [H]; lists as in `types.py`.
    PARTED keeps masks out of the tiles that every member sees whole: a loop of its own, worth it where tiles are many.
    """
    HEADS: tl.constexpr = GROUP * KV_HEADS
    PAGE_STRIDE: tl.constexpr = KV_HEADS * PAGE_SIZE * HEAD_DIM
    column = tl.arange(0, WIDTH)
    first_page = layer.to(tl.int64) * layer_stride
    num_pieces = tl.load(num_items) * (KV_HEADS * SLICES)
    for done in tl.range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        item, kv_head, member, head, token, taken = _queries(
            num_items, items, members, done, ROWS, SLICES, GROUP, KV_HEADS, False
        )
        position = tl.load(positions + token, mask=taken, other=-1)
        newest = tl.max(position, 0)
        oldest = tl.min(tl.where(taken, position, newest), 0)
        used = taken[:, None] & (column < HEAD_DIM)[None, :]
        at = token.to(tl.int64) * q_token_stride + head * q_head_stride
        query = tl.load(q + at[:, None] + column[None, :], mask=used, other=0.0)

        table = tables + tl.load(item).to(tl.int64) * table_stride
        k_head = k + first_page + kv_head * (PAGE_SIZE * HEAD_DIM)
        v_head = v + first_page + kv_head * (PAGE_SIZE * HEAD_DIM)
        low = tl.load(item + 1)
        high = tl.minimum(tl.load(item + 2), newest + 1)
        if WINDOWED:
            low = tl.maximum(low, oldest - window + 1)
        weighted = tl.zeros([ROWS, WIDTH], tl.float32)
        total = tl.zeros([ROWS] if PARTED else [ROWS, BLOCK_N], tl.float32)
        peak = tl.full([ROWS], -1e30, tl.float32)  # finite, so that a tile without a visible key leaves zeros, not NaN
        if PARTED:
            if WINDOWED:  # up to here some member's window has not begun
                begun = tl.minimum(tl.maximum(low, newest - window + 1), high)
                weighted, total, peak = attend_tiles(
                    weighted, total, peak, query, position, k_head, v_head, table, low, begun, scale, cap, window,
                    HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_N, True, CAPPED, WINDOWED,
                )  # fmt: skip
                low = tl.maximum(low, begun)
            whole = low + tl.maximum(tl.minimum(high, oldest + 1) - low, 0) // BLOCK_N * BLOCK_N
            weighted, total, peak = attend_tiles(
                weighted, total, peak, query, position, k_head, v_head, table, low, whole, scale, cap, window,
                HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_N, False, CAPPED, WINDOWED,
            )  # fmt: skip
            low = whole
        weighted, total, peak = attend_tiles(
            weighted, total, peak, query, position, k_head, v_head, table, low, high, scale, cap, window,
            HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_N, True, CAPPED, WINDOWED,
        )  # fmt: skip

        if not PARTED:
            total = tl.sum(total, 1)
        divisor = tl.where(total == 0, 1.0, total)
        log_sum = tl.where(total == 0, -float("inf"), peak * (cap if CAPPED else scale) + tl.log2(divisor))
        if ROWS > 16:  # found out again, so that what only addresses results takes no registers in the loops above
            item, kv_head, member, head, token, taken = _queries(
                num_items, items, members, done, ROWS, SLICES, GROUP, KV_HEADS, True
            )
            used = taken[:, None] & (column < HEAD_DIM)[None, :]
        first_state = tl.load(item + 5)
        if first_state < 0:
            if SINKS:
                sink = tl.load(sinks + head, mask=taken, other=0.0).to(tl.float32) * 1.4426950408889634
                divisor *= 1.0 + tl.exp2(sink - log_sum)
            at = token.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
            weighted /= divisor[:, None]
            tl.store(out + at[:, None] + column[None, :], rounded(weighted, out.dtype.element_ty), mask=used)
        else:
            state = (first_state + member).to(tl.int64) * HEADS + head
            weighted /= divisor[:, None]
            tl.store(states + state[:, None] * HEAD_DIM + column[None, :], weighted, mask=used)
            tl.store(sums + state, log_sum, mask=taken)


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
    """Attend as `reference.paged_attention` says, carrying out `batch.work`. q may have any strides over tokens, heads.

    Tokens that no item names keep what was in memory. The states of tokens in several pieces live in memory taken here
    and given back on return: torch's allocator hands the same block to every layer, and under graph capture it lies in
    the graph's pool.

    Raises: ValueError for a batch without `work`, a dtype other than the pages', a last dimension that is not
    contiguous, a scale that is not positive, or heads of more than 256 dimensions.
    """
    return attend(q, pages, layer, batch, scale, window, softcap, sinks, chip_of(q.device))


def attend(
    q: Tensor,
    pages: KVPages,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    chip: Chip,
) -> Tensor:
    """Do what `paged_attention` does as it is done on `chip`."""
    work = _checked(q, pages, batch, scale)
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    states = torch.empty((work.num_states, num_heads, head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((work.num_states, num_heads), dtype=torch.float32, device=q.device)
    for one in work.lists:
        group = num_heads // pages.num_kv_heads
        num_queries = one.max_members * group
        config = choose(chip, num_queries, head_dim, q.element_size())
        slices = -(-num_queries // config.rows)
        num_pieces = one.items.shape[0] * pages.num_kv_heads * slices
        if not num_pieces:
            continue
        attend_items[(min(num_pieces, config.programs * chip.multiprocessors),)](
            q, pages.k, pages.v, out, states, sums,
            one.items, one.members, one.num_items, work.positions, batch.tables, sinks,
            layer, pages.k.stride(0), q.stride(0), q.stride(1), batch.tables.stride(0),
            *_exponents(scale, softcap), window or 0,
            ROWS=config.rows, SLICES=slices, GROUP=group, KV_HEADS=pages.num_kv_heads, HEAD_DIM=head_dim,
            WIDTH=max(16, next_power_of_2(head_dim)), PAGE_SIZE=pages.page_size,
            BLOCK_N=config.block_n, PARTED=config.parted,
            CAPPED=softcap is not None, WINDOWED=window is not None, SINKS=sinks is not None,
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers,
            enable_fp_fusion=True,
        )  # fmt: skip
    if work.merge_tokens.shape[0]:
        merge_states(out, states, sums, work, sinks, chip)
    return out


def _checked(q: Tensor, pages: KVPages, batch: AttentionBatch, scale: float) -> AttentionWork:
    """Return the batch's work. Raises: ValueError as `paged_attention` says."""
    if batch.work is None:
        raise ValueError("the Triton backend needs batch.work; make it with `prepare`")
    if q.dtype != pages.k.dtype:
        raise ValueError(f"q must have the dtype of the pages, {pages.k.dtype}, not {q.dtype}")
    if q.shape[1] % pages.num_kv_heads or q.shape[2] != pages.head_dim:
        raise ValueError(
            f"q must be [T, {pages.num_kv_heads} * G, {pages.head_dim}] for these pages, not {list(q.shape)}"
        )
    if q.stride(2) != 1:
        raise ValueError(f"the last dimension of q must be contiguous, not of stride {q.stride(2)}")
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    return batch.work


def _exponents(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the kernel's (scale, cap): from products to exponents of 2, by way of tanh if there is a cap."""
    return (scale / softcap, softcap * LOG2_E) if softcap is not None else (scale * LOG2_E, 0.0)


def variants(arch: int) -> Iterator[Variant]:
    """Yield every configuration of a chip, then other heads, groups and page sizes, and what a layer may ask for."""
    chip = Chip(arch // 10, 1)
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim, config in configs_of(chip, dtype.itemsize):
            yield from _form(chip, dtype, config.rows, 4, 8, head_dim)
    for head_dim in (64, 256):
        yield from _form(chip, torch.float16, 16, 2, 8, head_dim, window=4096, softcap=50.0)
    yield from _form(chip, torch.bfloat16, 9, 3, 3, 64, page_size=8)
    yield from _form(chip, torch.bfloat16, 71, 71, 1, 64, page_size=64)
    yield from _form(chip, torch.bfloat16, 30, 5, 2, 80, page_size=32)
    for num_queries in (16, 128):
        yield from _form(chip, torch.bfloat16, num_queries, 8, 8, 128, window=4096, softcap=50.0, sinks=True)


def _form(
    chip: Chip,
    dtype: torch.dtype,
    num_queries: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> Iterator[Variant]:
    """Yield what a work list of tiles of `num_queries` launches on `chip` over a large store."""
    meta = partial(torch.empty, device="meta")
    ints = partial(meta, dtype=torch.int32)
    one = WorkList(ints(5, 6), ints(5), ints(1), max(1, num_queries // group))
    work = AttentionWork((one,), ints(5), ints(0), ints(1), ints(0), ints(1), 0)
    batch = AttentionBatch(ints(5, 9), ints(5), ints(5), ints(6), meta(5, dtype=torch.int64), 1, 9, work)
    k, v = (meta(2, 1 << 20, kv_heads, page_size, head_dim, dtype=dtype) for _ in "kv")
    pages = KVPages(k, v, page_size, kv_heads, head_dim)
    heads = group * kv_heads
    q, sink = meta(5, heads, head_dim, dtype=dtype), meta(heads, dtype=dtype) if sinks else None
    yield from traced(partial(attend, q, pages, 1, batch, 0.1, window, softcap, sink, chip))
