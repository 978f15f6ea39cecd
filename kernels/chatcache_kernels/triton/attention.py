"""The inner loop of paged attention: one tile of queries over the keys of a piece, BLOCK_N at a time.

Merge the partial states of tokens whose keys were cut into several pieces.

Paged attention: one kernel that carries out the pieces of a work list, then one that merges their states.

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
from .configs import MERGE, Chip, chip_of, choose, configs_of
from .launch import INTERPRETED, next_power_of_2, rounded
from .variants import Variant, traced


@triton.jit
def _dot(a, b, total):  # type: ignore[no-untyped-def]
    """Return a @ b + total, in float32. The interpreter would multiply the bits of bfloat16 as integers."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Return tanh(x), which is 1 to the last bit from 10 on."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(x, 20.0) * 2.8853900817779268))


@triton.jit
def attend_tiles(  # type: ignore[no-untyped-def]
    weighted,
    total,
    peak,
    query,
    position,
    k_head,
    v_head,
    table,
    low,
    high,
    scale,
    cap,
    window,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Attend to keys low .. high - 1 of one key head; return (weighted, total, peak), the running state of a softmax.

    Shapes: query [M, W], weighted [M, W] float32, total, peak, position [M], W = HEAD_DIM rounded up to a power of two.
    `scale` turns products into exponents of 2 or, if CAPPED, into arguments of tanh, and `cap` those into exponents of
    2; `peak` is the largest score before that last factor. Unless MASKED, every query must see every key and BLOCK_N
    must divide their number.

    Keys past the end are read as the last one again, so nothing that no token wrote is ever multiplied. The page
    numbers of a tile are loaded while the tile before it is computed and carried over: the pipeliner then sees no loads
    that wait for loads, and keeps num_stages - 1 whole tiles of keys and values in flight, not half as many.
    """
    factor = cap if CAPPED else scale
    column = tl.arange(0, query.shape[1])
    inside = (column < HEAD_DIM)[None, :]
    last = tl.maximum(high - 1, 0)
    reach = tl.minimum(position, last)
    key = low + tl.arange(0, BLOCK_N)
    near = tl.minimum(key, last).to(tl.uint32)
    page = tl.load(table + near // PAGE_SIZE)
    for _ in tl.range(low, high, BLOCK_N):
        at = page.to(tl.int64) * PAGE_STRIDE + (near % PAGE_SIZE * HEAD_DIM).to(tl.int32)
        at = at[:, None] + column[None, :]
        if query.shape[1] == HEAD_DIM:
            keys = tl.load(k_head + at)
            values = tl.load(v_head + at)
        else:
            keys = tl.load(k_head + at, mask=inside, other=0.0)
            values = tl.load(v_head + at, mask=inside, other=0.0)
        score = _dot(query, keys.T, tl.zeros([query.shape[0], BLOCK_N], tl.float32))
        if CAPPED:
            score = _tanh(score * scale)
        if MASKED:
            seen = key[None, :] <= reach[:, None]
            if WINDOWED:
                seen &= key[None, :] > position[:, None] - window
            score = tl.where(seen, score, -float("inf"))
        key += BLOCK_N
        near = tl.minimum(key, last).to(tl.uint32)
        page = tl.load(table + near // PAGE_SIZE)
        higher = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score * factor - (higher * factor)[:, None])
        decay = tl.exp2((peak - higher) * factor)
        if len(total.shape) == 2:
            total = total * decay[:, None] + weight
        else:
            total = total * decay + tl.sum(weight, 1)
        weighted = _dot(rounded(weight, values.dtype), values, weighted * decay[:, None])
        peak = higher
    return weighted, total, peak


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


def _merge_variants(arch: int) -> Iterator[Variant]:
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
    yield from _merge_variants(arch)
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
