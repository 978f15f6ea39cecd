"""Head norms, rotary embedding and page writes in one launch.

q, k and v may be slices of one fused projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..fp8 import DTYPE as FP8
from ..reference import rms_norm
from ..types import HeadNorms, KVPages
from .fp8 import quantise_heads
from .launch import EXACT, FP8_ARCH, contiguous_last_dim, heads_per_program, next_power_of_2, round_to
from .pages import allocate_pages, store_heads
from .variants import Variant, trace_variants

ELEMENTS_PER_THREAD = 16
"""Elements of the heads that one thread takes: 8 of either half, 16 bytes of 16-bit numbers."""


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

    Shapes: q [num_tokens, num_heads, head_dim], k, v [num_tokens, num_kv_heads, head_dim] (any strides over tokens and
    heads), cos, sin [num_tokens, rotary_dim / 2], slots [num_tokens] -> [num_tokens, num_heads, head_dim].
    """
    if norms is not None and not (q.dtype == k.dtype and norms.q.dtype == norms.k.dtype in (q.dtype, torch.float32)):
        q, k, norms = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps), None
    num_tokens, num_heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    q, k, v = contiguous_last_dim(q), contiguous_last_dim(k), contiguous_last_dim(v)
    half, kv_heads = cos.shape[-1], k.shape[1]
    half_block, dim_block = next_power_of_2(half), next_power_of_2(dim)
    warps = max(2, 2 * half_block // 32)
    heads, kv_tile = (
        heads_per_program(count, dim, 32 * warps * ELEMENTS_PER_THREAD) for count in (num_heads, kv_heads)
    )
    rope_write_kernel[(num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(kv_heads, kv_tile))](
        q, k, v, out, cos.contiguous(), sin.contiguous(), pages.k, pages.v, slots.contiguous(),
        norms.q if norms else q, norms.k if norms else k, norms.eps if norms else 0.0,
        layer, pages.k.stride(0), q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        NORM=norms is not None, NUM_HEADS=num_heads, NUM_KV_HEADS=kv_heads, DIM=dim, HALF=half, PAGE=pages.page_size,
        HEAD_STRIDE=pages.head_elements, HEADS=heads, KV_HEADS=kv_tile, HALF_BLOCK=half_block,
        REST_BLOCK=next_power_of_2(dim - 2 * half), DIM_BLOCK=dim_block, num_warps=warps, **EXACT,
    )  # fmt: skip
    return out


def variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants for SmolLM, Qwen3, Llama 3, Phi (partial rotation) and others."""
    for heads, kv_heads, dim, half, page_size, dtype, norm in (
        (9, 3, 64, 32, 16, torch.bfloat16, False), (9, 3, 64, 32, 16, torch.float32, False),
        (16, 8, 128, 64, 16, torch.bfloat16, True), (16, 8, 128, 64, 64, torch.bfloat16, True),
        (32, 8, 128, 64, 16, torch.bfloat16, False), (32, 8, 128, 64, 64, torch.float16, False),
        (28, 4, 128, 64, 16, torch.bfloat16, False), (32, 32, 80, 16, 16, torch.float16, False),
        (24, 8, 128, 48, 16, torch.bfloat16, False), (8, 4, 256, 128, 16, torch.bfloat16, True),
        (16, 8, 128, 64, 8, torch.float32, True), (16, 8, 128, 64, 16, FP8, True), (24, 8, 128, 48, 16, FP8, False),
    ):  # fmt: skip
        pages_dtype, dtype = dtype, torch.bfloat16 if dtype == FP8 else dtype
        if pages_dtype == FP8 and arch < FP8_ARCH:
            continue
        with torch.device("meta"):
            pages = allocate_pages(30, 9000 if dim == 128 else 50, page_size, kv_heads, dim, pages_dtype)
            qkv = torch.empty(7, heads + 2 * kv_heads, dim, dtype=dtype)
            angles, slots = torch.empty(7, half), torch.empty(7, dtype=torch.int64)
            weight = torch.empty(dim, dtype=dtype)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        norms = HeadNorms(weight, weight, 1e-6) if norm else None
        yield from trace_variants(partial(rope_write, q, k, v, angles, angles, pages, 1, slots, norms), wide=dim < 256)
        if norm and dtype == torch.bfloat16:  # Gemma, whose weights are 1 plus those of the checkpoint
            norms = HeadNorms(weight.float(), weight.float(), 1e-6)
            yield from trace_variants(partial(rope_write, q, k, v, angles, angles, pages, 1, slots, norms))


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots"])
def rope_write_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    cos,
    sin,
    k_pages,
    v_pages,
    slots,
    q_norm,
    k_norm,
    eps,
    layer,
    layer_stride,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Process HEADS query heads of one token, or KV_HEADS key heads and value heads.

    Shapes: q, out [T, NUM_HEADS, DIM], k, v [T, NUM_KV_HEADS, DIM], cos, sin [T, HALF], slots [T], norms [DIM], pages
    [L, N, NUM_KV_HEADS, HEAD_STRIDE]; *_token, *_head are strides. Grid: (T, NUM_HEADS / HEADS + NUM_KV_HEADS /
    KV_HEADS), query blocks first. There are twice as many threads as C: with fewer, Triton keeps the layout of cos and
    sin, and heads go through shared memory on their way in and out (with norms, 14 barriers and 1.8 times the
    instructions). This way there is no shared memory and no barrier up to D = 128, and on sm_90 a thread takes 32 to 52
    registers.
    """
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_blocks: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    angle = tl.arange(0, HALF_BLOCK)[None, :]
    c = tl.load(cos + token * HALF + angle, mask=angle < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + token * HALF + angle, mask=angle < HALF, other=0.0).to(tl.float32)
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)[:, None]
        source = q + token * q_token + head * q_head
        target = out + (token * NUM_HEADS + head) * DIM
        rotate_heads(
            source, target, None, head < NUM_HEADS, q_norm, c, s, eps, q.dtype.element_ty, out.dtype.element_ty,
            NORM, DIM, HALF, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token).to(tl.int64)
        kv_head = (block - q_blocks) * KV_HEADS + tl.arange(0, KV_HEADS)[:, None]
        to = layer.to(tl.int64) * layer_stride + slot // PAGE * (NUM_KV_HEADS * HEAD_STRIDE) + kv_head * HEAD_STRIDE
        column = tl.arange(0, DIM_BLOCK)[None, :]
        inside = (kv_head < NUM_KV_HEADS) & (column < DIM)
        values = tl.load(v + token * v_token + kv_head * v_head + column, mask=inside, other=0.0).to(tl.float32)
        scales = (k_pages + to + PAGE * DIM).to(tl.pointer_type(tl.float32), bitcast=True) + slot % PAGE
        rotate_heads(
            k + token * k_token + kv_head * k_head, k_pages + to + slot % PAGE * DIM, scales, kv_head < NUM_KV_HEADS,
            k_norm, c, s, eps, k.dtype.element_ty, k_pages.dtype.element_ty, NORM, DIM, HALF, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
        store_heads(v_pages + to, values, inside, kv_head < NUM_KV_HEADS, slot % PAGE, column, DIM, PAGE)


@triton.jit
def rotate_heads(  # type: ignore[no-untyped-def]
    source,
    target,
    scales,
    inside,
    weight,
    c,
    s,
    eps,
    kind: tl.constexpr,
    target_kind: tl.constexpr,
    NORM: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Normalise and rotate heads from `source` to `target`.

    Shapes: source, target [heads, 1]: pointers to the first element of each head; inside [heads, 1]: mask of the heads
    that exist; c, s [1, HALF_BLOCK]: cosines and sines. Normalises only if NORM. Every step rounds to `kind`, the dtype
    of the activations, as the reference does. An FP8 target also gets `scales` [heads, 1], pointers to float32.
    """
    half, rest = tl.arange(0, HALF_BLOCK)[None, :], 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    in_half, in_rest = inside & (half < HALF), inside & (rest < DIM)
    first = tl.load(source + half, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + half, mask=in_half, other=0.0).to(tl.float32)
    if 2 * HALF < DIM:
        others = tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if 2 * HALF < DIM:
            squares += tl.sum(others * others, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / DIM + eps)
        first = normalize(first, scale, weight + half, half < HALF, kind)
        second = normalize(second, scale, weight + HALF + half, half < HALF, kind)
        if 2 * HALF < DIM:
            others = normalize(others, scale, weight + rest, rest < DIM, kind)
    turned_first = round_to(first * c - second * s, kind).to(tl.float32)
    turned_second = round_to(second * c + first * s, kind).to(tl.float32)
    if target_kind == tl.float8e4nv:
        largest = tl.max(tl.maximum(tl.abs(turned_first), tl.abs(turned_second)), axis=1, keep_dims=True)
        if 2 * HALF < DIM:
            largest = tl.maximum(largest, tl.max(tl.abs(others), axis=1, keep_dims=True))
            numbers, scale = quantise_heads(others, largest)
            tl.store(target + rest, numbers, mask=in_rest)
        numbers, scale = quantise_heads(turned_first, largest)
        tl.store(target + half, numbers, mask=in_half)
        numbers, scale = quantise_heads(turned_second, largest)
        tl.store(target + HALF + half, numbers, mask=in_half)
        tl.store(scales, scale, mask=inside)
    else:
        tl.store(target + half, round_to(turned_first, target_kind), mask=in_half)
        tl.store(target + HALF + half, round_to(turned_second, target_kind), mask=in_half)
        if 2 * HALF < DIM:
            tl.store(target + rest, round_to(others, target_kind), mask=in_rest)


@triton.jit
def normalize(x, scale, weight, inside, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return x * scale * weight in float32, rounded to `kind` after each product."""
    loaded = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    return round_to(loaded * round_to(x * scale, kind).to(tl.float32), kind).to(tl.float32)
