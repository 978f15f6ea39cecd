"""Paged attention: one kernel runs the items of a work list, a second merges their states.

Decode, split keys, prefill chunks and shared prefixes are the same kernel over different lists (see `work_list`).

    program = item x key head x slice             rows of its tile, G = 3, M = 16

    item   row of tables, keys 512 .. 1023        row  0  1  2   member 0, its heads 3 h, 3 h + 1, 3 h + 2
           members [4, 9, 17, ...], state 40      row  3  4  5   member 1
    head   h of Hkv                               ...            rows after the last member are not stored
    slice  M of the queries, if there are more

The grid size depends only on the device, the configuration and the size of the buffers; program i runs items i, i +
programs, ... up to `num_items`, which is read on the device, so that a captured launch serves any step. The heads of an
item are adjacent; the last items, which see the most keys, start first.

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

from ..fp8 import DTYPE as FP8
from ..fp8 import SCALE_BYTES
from ..types import AttentionBatch, AttentionWork, KVPages, WorkList
from .configs import MERGE, Chip, choose_config, get_chip, iter_configs
from .launch import FP8_ARCH, INTERPRETED, next_power_of_2, round_to
from .variants import Variant, trace_variants


@triton.jit
def dot(a, b, acc):  # type: ignore[no-untyped-def]
    """Return a @ b + acc, in float32.

    The interpreter would multiply the bits of bfloat16 as integers.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Return tanh(x), which is 1 to the last bit from 10 on."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(x, 20.0) * 2.8853900817779268))


VALUE_UNIT = tl.constexpr(256.0)
"""Factor of the weights of FP8 values: with their scales they would leave the range of float16 downwards, and with this
factor only values beyond 100,000 would leave it upwards."""


@triton.jit
def attend_key_tiles(  # type: ignore[no-untyped-def]
    acc,
    row_sum,
    row_max,
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
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Attend to keys low .. high - 1 of one key head, BLOCK_N at a time.

    Returns (acc, row_sum, row_max), the running state of the online softmax. Shapes: query [M, W], acc [M, W] float32,
    row_sum, row_max, position [M]; W = HEAD_DIM rounded up to a power of two.

    `scale` turns products into exponents of 2 or, if HAS_SOFTCAP, into arguments of tanh, and `cap` those into
    exponents of 2; `row_max` is the largest score before that last factor. Unless MASKED, every query must see every
    key and BLOCK_N must divide their number. FP8 keys and values are multiplied in the type of the queries, which is
    not bfloat16; a key's scale multiplies its scores, a value's scale times VALUE_UNIT its weights.

    Keys past the end are read as the last key again, so slots that were never written are not multiplied. The page
    numbers of a tile are loaded while the tile before is computed: the pipeliner then sees no loads that depend on
    loads, and keeps num_stages - 1 whole tiles of keys and values in flight, not half as many.
    """
    FP8: tl.constexpr = k_head.dtype.element_ty == tl.float8e4nv
    factor = cap if HAS_SOFTCAP else scale
    k_scales = (k_head + PAGE_SIZE * HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)
    v_scales = (v_head + PAGE_SIZE * HEAD_DIM).to(tl.pointer_type(tl.float32), bitcast=True)
    column = tl.arange(0, query.shape[1])
    inside = (column < HEAD_DIM)[None, :]
    last = tl.maximum(high - 1, 0)
    reach = tl.minimum(position, last)
    key = low + tl.arange(0, BLOCK_N)
    near = tl.minimum(key, last).to(tl.uint32)
    page = tl.load(table + near // PAGE_SIZE)
    for _ in tl.range(low, high, BLOCK_N):
        if FP8:
            scale_at = page.to(tl.int64) * (PAGE_STRIDE // 4) + (near % PAGE_SIZE).to(tl.int32)
            key_scale = tl.load(k_scales + scale_at)
            value_scale = tl.load(v_scales + scale_at)
        at = page.to(tl.int64) * PAGE_STRIDE + (near % PAGE_SIZE * HEAD_DIM).to(tl.int32)
        at = at[:, None] + column[None, :]
        if query.shape[1] == HEAD_DIM:
            keys = tl.load(k_head + at)
            values = tl.load(v_head + at)
        else:
            keys = tl.load(k_head + at, mask=inside, other=0.0)
            values = tl.load(v_head + at, mask=inside, other=0.0)
        if FP8:
            keys = keys.to(query.dtype)
            values = values.to(query.dtype)
        score = dot(query, keys.T, tl.zeros([query.shape[0], BLOCK_N], tl.float32))
        if FP8:
            score *= key_scale[None, :]
        if HAS_SOFTCAP:
            score = _tanh(score * scale)
        if MASKED:
            seen = key[None, :] <= reach[:, None]
            if HAS_WINDOW:
                seen &= key[None, :] > position[:, None] - window
            score = tl.where(seen, score, -float("inf"))
        key += BLOCK_N
        near = tl.minimum(key, last).to(tl.uint32)
        page = tl.load(table + near // PAGE_SIZE)
        new_max = tl.maximum(row_max, tl.max(score, 1))
        weight = tl.exp2(score * factor - (new_max * factor)[:, None])
        decay = tl.exp2((row_max - new_max) * factor)
        if len(row_sum.shape) == 2:
            row_sum = row_sum * decay[:, None] + weight
        else:
            row_sum = row_sum * decay + tl.sum(weight, 1)
        if FP8:
            weight *= (value_scale * VALUE_UNIT)[None, :]
        acc = dot(round_to(weight, values.dtype), values, acc * decay[:, None])
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(
    do_not_specialize_on_alignment=["tokens", "offsets", "state_ids", "num_merges"]
)  # parts of one transfer: any alignment
def merge_states_kernel(  # type: ignore[no-untyped-def]
    out,
    states,
    sums,
    tokens,
    offsets,
    state_ids,
    num_merges,
    sinks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the partial states of each (token, head), weighted by exp2 of their log-sum-exp.

    A sink adds weight but no value. Shapes: out [T, H, D]; states [S, H, D] float32; sums [S, H] float32, log-sum-exp
    to base 2, -inf where a state saw no key; tokens, offsets, state_ids, num_merges: `merge_tokens`, `merge_offsets`,
    `merge_states`, `num_merges` of `AttentionWork`; sinks [H]. Grid: programs that take (token, head) pairs in turn, up
    to `num_merges`. BLOCK_S states at a time, in the order listed, so that no bit depends on the rest of the step.
    Source: the associative merge of softmax states (Flash-Decoding, 2023).
    """
    column = tl.arange(0, WIDTH)
    inside = column < HEAD_DIM
    for pair in tl.range(tl.program_id(0), tl.load(num_merges) * HEADS, tl.num_programs(0)):
        head = pair % HEADS
        first = tl.load(offsets + pair // HEADS)
        end = tl.load(offsets + pair // HEADS + 1)
        row_max = -1e30
        row_sum = 0.0
        acc = tl.zeros([WIDTH], tl.float32)
        if HAS_SINKS:
            row_max = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            row_sum = 1.0
        for start in range(first, end, BLOCK_S):
            number = start + tl.arange(0, BLOCK_S)
            listed = number < end
            state = tl.load(state_ids + number, mask=listed, other=0).to(tl.int64) * HEADS + head
            log_sum = tl.load(sums + state, mask=listed, other=-float("inf"))
            value = tl.load(
                states + state[:, None] * HEAD_DIM + column[None, :], mask=listed[:, None] & inside[None, :], other=0.0
            )
            new_max = tl.maximum(row_max, tl.max(log_sum, 0))
            weight = tl.exp2(log_sum - new_max)
            decay = tl.exp2(row_max - new_max)
            row_sum = row_sum * decay + tl.sum(weight, 0)
            acc = acc * decay + tl.sum(weight[:, None] * value, 0)
            row_max = new_max
        token = tl.load(tokens + pair // HEADS).to(tl.int64)
        at = (token * HEADS + head) * HEAD_DIM + column
        tl.store(out + at, round_to(acc / row_sum, out.dtype.element_ty), mask=inside)


def merge_states(
    out: Tensor, states: Tensor, sums: Tensor, work: AttentionWork, sinks: Tensor | None, chip: Chip
) -> None:
    """Write the outputs of tokens that have several partial attention states.

    Shapes: out [T, H, D], states [S, H, D], sums [S, H].
    """
    num_heads, head_dim = out.shape[1:]
    num_pairs = work.merge_tokens.shape[0] * num_heads
    width = max(16, next_power_of_2(head_dim))
    merge_states_kernel[(min(num_pairs, MERGE.programs * chip.multiprocessors),)](
        out, states, sums, work.merge_tokens, work.merge_offsets, work.merge_states, work.num_merges, sinks,
        HEADS=num_heads, HEAD_DIM=head_dim, WIDTH=width, BLOCK_S=max(1, MERGE.block_s * 128 // max(width, 128)),
        HAS_SINKS=sinks is not None, num_warps=MERGE.num_warps,
    )  # fmt: skip


def _merge_variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of `merge_states` for heads of 64 to 512 dimensions."""
    meta = partial(torch.empty, device="meta")
    ints = partial(meta, dtype=torch.int32)
    work = AttentionWork((), ints(5), ints(5), ints(6), ints(7), ints(1), 7)
    for heads, head_dim, dtype in (
        (9, 64, torch.bfloat16), (30, 80, torch.float16), (32, 128, torch.bfloat16), (16, 128, torch.float32),
        (8, 256, torch.bfloat16), (8, 512, torch.bfloat16),
    ):  # fmt: skip
        out, states, sums = meta(5, heads, head_dim, dtype=dtype), meta(7, heads, head_dim), meta(7, heads)
        for sinks in (None, meta(heads, dtype=dtype)):
            yield from trace_variants(partial(merge_states, out, states, sums, work, sinks, Chip(arch // 10, 1)))


LOG2_E = 1.4426950408889634  # exponentials are computed as powers of 2


@triton.jit
def locate_queries(  # type: ignore[no-untyped-def]
    num_items,
    items,
    members,
    done,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """Find the work item, key head and queries of a program that has processed `done` of them.

    Returns item, key head, and for each row of the tile: member, query head, token, whether it exists. RELOAD makes the
    compiler load the values again instead of keeping those of an earlier call in registers.
    """
    work_id = tl.load(num_items, volatile=RELOAD) * (KV_HEADS * SLICES) - 1 - done
    item = items + work_id // (KV_HEADS * SLICES) * 6
    kv_head = work_id // SLICES % KV_HEADS
    lane = work_id % SLICES * ROWS + tl.arange(0, ROWS)
    member = lane // GROUP
    taken = member < tl.load(item + 4)
    token = tl.load(members + tl.load(item + 3) + member, mask=taken, other=0)
    return item, kv_head, member, kv_head * GROUP + lane % GROUP, token, taken


@triton.jit(
    do_not_specialize=["layer", "table_stride", "window"],
    do_not_specialize_on_alignment=[
        "items",
        "members",
        "num_items",
        "positions",
        "tables",
    ],  # parts of one transfer: any alignment
)
def paged_attention_kernel(  # type: ignore[no-untyped-def]
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
    HEAD_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNMASKED_LOOP: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FIXED_TILES: tl.constexpr,
):
    """Run a work list: write `out` for tokens with one item, `states` and `sums` for others.

    Shapes: q [T, H, D] of any strides over tokens and heads; k, v [L, N, Hkv, HEAD_STRIDE]; out [T, H, D]; states
    [S, H, D] float32; sums [S, H] float32, log-sum-exp to base 2; tables [R, ...]; sinks [H]; lists as in
    `types.WorkList`.
    UNMASKED_LOOP: tiles that every member sees whole have a loop of their own without masks, for items of many tiles.
    FIXED_TILES: the first tile in the window begins at a multiple of BLOCK_N, whatever tokens the item has.
    FP8 pages are multiplied in float16, as Hopper converts FP8 to it in a quarter of the instructions that bfloat16
    takes; it is also the more precise of the two.
    """
    HEADS: tl.constexpr = GROUP * KV_HEADS
    PAGE_STRIDE: tl.constexpr = KV_HEADS * HEAD_STRIDE
    FP8: tl.constexpr = k.dtype.element_ty == tl.float8e4nv
    column = tl.arange(0, WIDTH)
    first_page = layer.to(tl.int64) * layer_stride
    num_work_ids = tl.load(num_items) * (KV_HEADS * SLICES)
    for done in tl.range(tl.program_id(0), num_work_ids, tl.num_programs(0)):
        item, kv_head, member, head, token, taken = locate_queries(
            num_items, items, members, done, ROWS, SLICES, GROUP, KV_HEADS, False
        )
        position = tl.load(positions + token, mask=taken, other=-1)
        newest = tl.max(position, 0)
        oldest = tl.min(tl.where(taken, position, newest), 0)
        used = taken[:, None] & (column < HEAD_DIM)[None, :]
        at = token.to(tl.int64) * q_token_stride + head * q_head_stride
        query = tl.load(q + at[:, None] + column[None, :], mask=used, other=0.0)
        if FP8 and query.dtype == tl.bfloat16:
            query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0).to(tl.float16)

        table = tables + tl.load(item).to(tl.int64) * table_stride
        k_head = k + first_page + kv_head * HEAD_STRIDE
        v_head = v + first_page + kv_head * HEAD_STRIDE
        low = tl.load(item + 1)
        high = tl.minimum(tl.load(item + 2), newest + 1)
        if HAS_WINDOW:
            begin = oldest - window + 1
            low = tl.maximum(low, begin // BLOCK_N * BLOCK_N if FIXED_TILES else begin)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        row_sum = tl.zeros([ROWS] if UNMASKED_LOOP else [ROWS, BLOCK_N], tl.float32)
        row_max = tl.full([ROWS], -1e30, tl.float32)  # finite: a tile without visible keys gives 0, not NaN
        if UNMASKED_LOOP:
            if HAS_WINDOW:  # up to here the window of some member has not begun
                begun = tl.minimum(tl.maximum(low, newest - window + 1), high)
                acc, row_sum, row_max = attend_key_tiles(
                    acc, row_sum, row_max, query, position, k_head, v_head, table, low, begun, scale, cap, window,
                    HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_N, True, HAS_SOFTCAP, HAS_WINDOW,
                )  # fmt: skip
                low = tl.maximum(low, begun)
            whole = low + tl.maximum(tl.minimum(high, oldest + 1) - low, 0) // BLOCK_N * BLOCK_N
            acc, row_sum, row_max = attend_key_tiles(
                acc, row_sum, row_max, query, position, k_head, v_head, table, low, whole, scale, cap, window,
                HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_N, False, HAS_SOFTCAP, HAS_WINDOW,
            )  # fmt: skip
            low = whole
        acc, row_sum, row_max = attend_key_tiles(
            acc, row_sum, row_max, query, position, k_head, v_head, table, low, high, scale, cap, window,
            HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, BLOCK_N, True, HAS_SOFTCAP, HAS_WINDOW,
        )  # fmt: skip

        if not UNMASKED_LOOP:
            row_sum = tl.sum(row_sum, 1)
        if FP8:
            acc *= 1 / VALUE_UNIT
        divisor = tl.where(row_sum == 0, 1.0, row_sum)
        log_sum = tl.where(row_sum == 0, -float("inf"), row_max * (cap if HAS_SOFTCAP else scale) + tl.log2(divisor))
        if ROWS > 16:  # reloaded, so that the addresses of results take no registers in the loops above
            item, kv_head, member, head, token, taken = locate_queries(
                num_items, items, members, done, ROWS, SLICES, GROUP, KV_HEADS, True
            )
            used = taken[:, None] & (column < HEAD_DIM)[None, :]
        first_state = tl.load(item + 5)
        if first_state < 0:
            if HAS_SINKS:
                sink = tl.load(sinks + head, mask=taken, other=0.0).to(tl.float32) * 1.4426950408889634
                divisor *= 1.0 + tl.exp2(sink - log_sum)
            at = token.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
            acc /= divisor[:, None]
            tl.store(out + at[:, None] + column[None, :], round_to(acc, out.dtype.element_ty), mask=used)
        else:
            state = (first_state + member).to(tl.int64) * HEADS + head
            acc /= divisor[:, None]
            tl.store(states + state[:, None] * HEAD_DIM + column[None, :], acc, mask=used)
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
    *,
    fixed_tiles: bool = False,
) -> Tensor:
    """Compute attention by the work lists in `batch.work`; see `reference.paged_attention`.

    Shapes: q [num_tokens, num_heads, head_dim], any strides over tokens and heads -> the same. `fixed_tiles`: a window
    begins with a whole tile of keys, so that the tiles do not depend on the tokens of an item. Tokens that no item
    names are not written. Partial states are allocated here and freed on return: torch's allocator reuses the block for
    every layer, and under graph capture it belongs to the graph's pool.

    Raises: ValueError for a batch without `work`, a dtype other than the pages' (unless they are FP8), a last dimension
    that is not contiguous, a scale that is not positive, or heads of more than 512 dimensions.
    """
    chip = get_chip(q.device)
    return paged_attention_on_chip(q, pages, layer, batch, scale, window, softcap, sinks, chip, fixed_tiles=fixed_tiles)


def paged_attention_on_chip(
    q: Tensor,
    pages: KVPages,
    layer: int,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    chip: Chip,
    *,
    fixed_tiles: bool = False,
) -> Tensor:
    """Run `paged_attention` with the configuration of `chip`."""
    work = _check_inputs(q, pages, batch, scale)
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    states = torch.empty((work.num_states, num_heads, head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((work.num_states, num_heads), dtype=torch.float32, device=q.device)
    for one in work.lists:
        group = num_heads // pages.num_kv_heads
        num_queries = one.max_members * group
        config = choose_config(chip, num_queries, head_dim, q.element_size(), fp8_pages=pages.is_fp8)
        slices = -(-num_queries // config.rows)
        num_work_ids = one.items.shape[0] * pages.num_kv_heads * slices
        if not num_work_ids:
            continue
        paged_attention_kernel[(min(num_work_ids, config.programs * chip.multiprocessors),)](
            q, pages.k, pages.v, out, states, sums,
            one.items, one.members, one.num_items, work.positions, batch.tables, sinks,
            layer, pages.k.stride(0), q.stride(0), q.stride(1), batch.tables.stride(0),
            *_exponent_scales(scale, softcap), window or 0,
            ROWS=config.rows, SLICES=slices, GROUP=group, KV_HEADS=pages.num_kv_heads, HEAD_DIM=head_dim,
            WIDTH=max(16, next_power_of_2(head_dim)), PAGE_SIZE=pages.page_size, HEAD_STRIDE=pages.head_elements,
            BLOCK_N=config.block_n, UNMASKED_LOOP=config.unmasked_loop,
            HAS_SOFTCAP=softcap is not None, HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None,
            FIXED_TILES=fixed_tiles and window is not None,
            num_warps=config.num_warps, num_stages=config.num_stages, maxnreg=config.max_registers,
            enable_fp_fusion=True,
        )  # fmt: skip
    if work.merge_tokens.shape[0]:
        merge_states(out, states, sums, work, sinks, chip)
    return out


def _check_inputs(q: Tensor, pages: KVPages, batch: AttentionBatch, scale: float) -> AttentionWork:
    """Return the batch's work lists. Raises: ValueError as `paged_attention` says."""
    if batch.work is None:
        raise ValueError("the Triton backend needs batch.work; make it with `prepare`")
    if q.dtype != pages.k.dtype and not pages.is_fp8:
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


def _exponent_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the kernel arguments (scale, cap) that turn products q * k into exponents of 2."""
    return (scale / softcap, softcap * LOG2_E) if softcap is not None else (scale * LOG2_E, 0.0)


def variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of a chip's configurations, and of other models and options."""
    yield from _merge_variants(arch)
    chip = Chip(arch // 10, 1)
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim, config in iter_configs(chip, dtype.itemsize):
            yield from _attention_variants(chip, dtype, config.rows, 4, 8, head_dim)
    for head_dim in (64, 256):
        yield from _attention_variants(chip, torch.float16, 16, 2, 8, head_dim, window=4096, softcap=50.0)
    yield from _attention_variants(chip, torch.bfloat16, 9, 3, 3, 64, page_size=8)
    yield from _attention_variants(chip, torch.bfloat16, 71, 71, 1, 64, page_size=64)
    yield from _attention_variants(chip, torch.bfloat16, 30, 5, 2, 80, page_size=32)
    for num_queries in (16, 128):
        yield from _attention_variants(
            chip, torch.bfloat16, num_queries, 8, 8, 128, window=4096, softcap=50.0, sinks=True
        )
    for dtype in (torch.bfloat16, torch.float32):
        yield from _attention_variants(chip, dtype, 16, 8, 4, 128, window=4096, fixed_tiles=True)
    if arch >= FP8_ARCH:
        for head_dim, config in iter_configs(chip, 2, fp8_pages=True):
            yield from _attention_variants(chip, torch.bfloat16, config.rows, 4, 8, head_dim, fp8_pages=True)
        yield from _attention_variants(
            chip, torch.float16, 16, 2, 8, 128, window=4096, softcap=50.0, sinks=True, fp8_pages=True
        )


def _attention_variants(
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
    *,
    fixed_tiles: bool = False,
    fp8_pages: bool = False,
) -> Iterator[Variant]:
    """Yield the kernel variants of a work list with tiles of `num_queries`, over a large store."""
    meta = partial(torch.empty, device="meta")
    ints = partial(meta, dtype=torch.int32)
    one = WorkList(ints(5, 6), ints(5), ints(1), max(1, num_queries // group))
    work = AttentionWork((one,), ints(5), ints(0), ints(1), ints(0), ints(1), 0)
    batch = AttentionBatch(ints(5, 9), ints(5), ints(5), ints(6), meta(5, dtype=torch.int64), 1, 9, work)
    shape: tuple[int, ...] = (2, 1 << 20, kv_heads, page_size, head_dim)
    if fp8_pages:
        shape = (*shape[:3], page_size * (head_dim + SCALE_BYTES))
    k, v = (meta(shape, dtype=FP8 if fp8_pages else dtype) for _ in "kv")
    pages = KVPages(k, v, page_size, kv_heads, head_dim)
    heads = group * kv_heads
    q, sink = meta(5, heads, head_dim, dtype=dtype), meta(heads, dtype=dtype) if sinks else None
    attend = partial(paged_attention_on_chip, q, pages, 1, batch, 0.1, window, softcap, sink, chip)
    yield from trace_variants(partial(attend, fixed_tiles=fixed_tiles))
