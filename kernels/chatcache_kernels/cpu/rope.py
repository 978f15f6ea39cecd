"""Apply the rotary embedding and write keys and values to their pages, in one pass.

q, k and v may be slices of one fused projection: only the stride between tokens must be uniform. Heads that no register
divides, and mixed dtypes, use the plain torch path.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from .. import reference
from ..types import HeadNorms, KVPages
from .fused import rms_norm
from .launch import Launch, choose_num_threads, compile_kernel, define_job, helper
from .pages import write_slots_torch
from .simd import (
    FLOAT32,
    INT64,
    KINDS,
    fetch_add,
    fma,
    load,
    mul,
    num_lanes,
    pointer,
    reduce_sum,
    scatter,
    splat,
    store,
    zeros,
)

ROPE_JOB, _PACK = define_job(
    "q k v out cos sin k_pages v_pages slots q_norm k_norm num_tokens q_stride k_stride v_stride num_heads num_kv_heads"
    " head_dim half page_size tokens_per_item",
    "eps",
)
"""Addresses, sizes, and strides between tokens in elements.

cos, sin [T, C] float32; half = C, 0 = no rotation. q_norm, k_norm [D], 0 = none. tokens_per_item: tokens of an item.
"""

_PAGEWISE_MIN_TOKENS = (
    64  # from here on a thread takes a page of tokens at a time: in the store neighbours share cache lines
)


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

    Shapes: q [num_tokens, num_heads, head_dim], k, v [num_tokens, num_kv_heads, head_dim], cos, sin
    [num_tokens, rotary_dim / 2], slots [num_tokens] -> [num_tokens, num_heads, head_dim].
    """
    half = cos.shape[-1]
    lanes = register_lanes(pages.head_dim, half)
    of_norms = (norms.q.dtype, norms.k.dtype) if norms is not None else (q.dtype, q.dtype)
    has_norms = of_norms in ((q.dtype, q.dtype), (torch.float32, torch.float32))
    if not lanes or not has_norms or {q.dtype, k.dtype, v.dtype} != {pages.k.dtype}:
        if norms is not None:
            q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
        write_slots_torch(pages, layer, reference.rope(k, cos, sin), v, slots)
        return reference.rope(q, cos, sin)
    q, k, v = (_dense_heads(x) for x in (q, k, v))
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    _run(q, k, v, out, cos.data_ptr(), sin.data_ptr(), half, lanes, pages, layer, slots, norms)
    return out


def write_pages(pages: KVPages, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store keys and values of new tokens.

    Shapes: k, v [num_tokens, num_kv_heads, head_dim]; slots [num_tokens].
    """
    lanes = register_lanes(pages.head_dim, 0)
    if not lanes:
        write_slots_torch(pages, layer, k, v, slots)
        return
    k, v = (_dense_heads(x.to(pages.k.dtype)) for x in (k, v))
    _run(k[:, :0], k, v, k, 0, 0, 0, lanes, pages, layer, slots)


@cache
def register_lanes(head_dim: int, half: int) -> int:
    """Return the SIMD register width, in float32, for heads of this shape.

    The widest of 16 and 8 that divides `half`, half of the rotated dimensions, and the dimensions that are not rotated;
    0 if none does.
    """
    return next((n for n in (16, 8) if half % n == 0 and (head_dim - 2 * half) % n == 0), 0)


def _dense_heads(x: Tensor) -> Tensor:
    """Return x with contiguous heads, copied only if they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _run(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cos: int, sin: int, half: int, lanes: int, pages: KVPages, layer: int,
    slots: Tensor, norms: HeadNorms | None = None,
) -> None:  # fmt: skip
    """Launch the rotary and page-write kernel for one layer; cos and sin are addresses."""
    layer_bytes = layer * pages.k.stride(0) * pages.k.element_size()
    slots = slots.to(torch.int64).contiguous()
    num_tokens, num_heads = q.shape[:2]
    job = _PACK.pack(
        0, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), cos, sin, pages.k.data_ptr() + layer_bytes,
        pages.v.data_ptr() + layer_bytes, slots.data_ptr(), norms.q.data_ptr() if norms else 0,
        norms.k.data_ptr() if norms else 0, num_tokens, q.stride(0), k.stride(0), v.stride(0), num_heads,
        pages.num_kv_heads, pages.head_dim, half, pages.page_size,
        pages.page_size if num_tokens >= _PAGEWISE_MIN_TOKENS else 1, norms.eps if norms else 0.0,
    )  # fmt: skip
    threads = choose_num_threads(num_tokens * (num_heads + 2 * pages.num_kv_heads) * pages.head_dim)
    rope_kernel(KINDS[pages.k.dtype], lanes, KINDS[norms.q.dtype] if norms else None)(job, threads)


@cache
def rope_kernel(kind: int, lanes: int, norm_kind: int | None = None) -> Launch:
    """Return the launcher of the kernel that rotates q and k, and writes k and v to pages.

    Its argument record is a ROPE_JOB. `kind`: element type; `norm_kind`: that of the norms' weights, None is `kind`;
    `lanes`: see `register_lanes`.
    """
    if norm_kind is None:
        norm_kind = kind

    def kernel(address: Any) -> None:
        job = carray(address, 1, ROPE_JOB)[0]
        q, k, v, out = pointer(kind, job.q), pointer(kind, job.k), pointer(kind, job.v), pointer(kind, job.out)
        k_pages, v_pages = pointer(kind, job.k_pages), pointer(kind, job.v_pages)
        q_norm, k_norm = pointer(norm_kind, job.q_norm), pointer(norm_kind, job.k_norm)
        zero, slots, size, dim = zeros(lanes), pointer(INT64, job.slots), job.page_size, job.head_dim
        token = fetch_add(address, 0, job.tokens_per_item)
        while token < job.num_tokens:
            for head in range(job.num_heads):
                target = (token * job.num_heads + head) * dim
                _rotate(zero, job, token, q, q_norm, token * job.q_stride + head * dim, out, target, 1)
            page, offset = divmod(slots[token], size)
            for head in range(job.num_kv_heads):
                base = (page * job.num_kv_heads + head) * size * dim
                _rotate(zero, job, token, k, k_norm, token * job.k_stride + head * dim, k_pages, base + offset, size)
                for d in range(0, dim, lanes):
                    store(v_pages, base + offset * dim + d, load(zero, v, token * job.v_stride + head * dim + d))
            token += 1
            if token % job.tokens_per_item == 0:
                token = fetch_add(address, 0, job.tokens_per_item)

    return compile_kernel(kernel)


@helper
def _rotate(zero: Any, job: Any, token: int, source: Any, norm: Any, at: int, target: Any, to: int, step: int) -> None:
    """Rotate one head from element `at` of `source` to element `to` of `target`.

    Elements of `target` are `step` apart. If the job has norm weights, the head is normalised first.
    """
    half, lanes = job.half, num_lanes(zero)
    cos, sin = pointer(FLOAT32, job.cos), pointer(FLOAT32, job.sin)
    minus, scale = splat(zero, np.float32(-1.0)), zero
    if job.q_norm != 0:
        squares = zero
        for i in range(0, job.head_dim, lanes):
            x = load(zero, source, at + i)
            squares = fma(x, x, squares)
        scale = splat(zero, np.float32(1.0 / np.sqrt(reduce_sum(squares) / job.head_dim + job.eps)))
    for i in range(0, half, lanes):
        c, s = load(zero, cos, token * half + i), load(zero, sin, token * half + i)
        first, second = load(zero, source, at + i), load(zero, source, at + half + i)
        if job.q_norm != 0:
            first = mul(mul(first, scale), load(zero, norm, i))
            second = mul(mul(second, scale), load(zero, norm, half + i))
        _store_strided(target, to + i * step, step, fma(first, c, mul(minus, mul(second, s))))
        _store_strided(target, to + (half + i) * step, step, fma(second, c, mul(first, s)))
    for i in range(2 * half, job.head_dim, lanes):
        x = load(zero, source, at + i)
        if job.q_norm != 0:
            x = mul(mul(x, scale), load(zero, norm, i))
        _store_strided(target, to + i * step, step, x)


@helper
def _store_strided(target: Any, to: int, step: int, value: Any) -> None:
    """Store a register to elements `step` apart."""
    if step == 1:
        store(target, to, value)
    else:
        scatter(target, to, step, value)
