"""Recurrent and convolution layers: token by token for short rows, in chunks of matrix products for long ones.

A step with more tokens than rows launches both forms of a layer, and each leaves the other's rows out; a decode step
launches the first alone. States are read and written in place, in float32.

Chunks of the gated delta rule: with G the sums of g within a chunk, S the state before it and

    A[i, j] = beta[i] * exp(G[i] - G[j]) * (k[i] . k[j]) for j < i

the chunk's changes are U = (I + A)^-1 beta (v - exp(G) k S). The inverse is computed row by row, for all chunks in
parallel; products of powers of A would lose all digits where keys repeat.

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", NeurIPS 2024; Dao and
Gu, "Transformers are SSMs", ICML 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference_recurrent
from ..reference_recurrent import contiguous_tokens
from .launch import next_power_of_2, round_to
from .variants import Variant, trace_variants

CONV_TOKENS, CONV_CHANNELS = 16, 128
CHUNK, CHUNK_WARPS, CHUNK_STAGES = 16, 8, 2
SHORT = 8
"""Rows of at most so many tokens are computed token by token."""
UNLIMITED = 2**31 - 1


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, offsets: Tensor,
    activation: str | None,
) -> Tensor:  # fmt: skip
    """Convolve as `reference_recurrent.causal_conv` does."""
    num_channels, num_taps = weight.shape
    if not states.is_contiguous() or num_taps > CONV_TOKENS:
        return reference_recurrent.causal_conv(x, weight, bias, states, slots, offsets, activation)
    x, num_rows = contiguous_tokens(x), slots.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (x.shape[0] // CONV_TOKENS + num_rows, triton.cdiv(num_channels, CONV_CHANNELS))
    if num_rows:
        causal_conv_kernel[grid](
            x, weight.contiguous(), bias, states, slots, offsets, out, num_rows, x.stride(0),
            CHANNELS=num_channels, TAPS=num_taps, SILU=activation == "silu", BLOCK_T=CONV_TOKENS,
            BLOCK_C=CONV_CHANNELS, PAST=next_power_of_2(max(num_taps - 1, 1)), num_warps=4,
        )  # fmt: skip
    return out


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, offsets: Tensor,
    scale: float, l2_norm: bool,
) -> Tensor:  # fmt: skip
    """Run the gated delta rule as `reference_recurrent.gated_delta_rule` does."""
    if not states.is_contiguous():
        return reference_recurrent.gated_delta_rule(q, k, v, g, beta, states, slots, offsets, scale, l2_norm)
    (num_key_heads, dim_k), (num_tokens, num_heads, dim_v), num_rows = k.shape[1:], v.shape, slots.shape[0]
    q, k, v, g, beta = (
        contiguous_tokens(q),
        contiguous_tokens(k),
        contiguous_tokens(v),
        g.contiguous(),
        beta.contiguous(),
    )
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not num_rows:
        return out
    sizes = {
        "HEADS": num_heads, "RATIO": num_heads // num_key_heads, "DIM_K": dim_k, "DIM_V": dim_v, "L2_NORM": l2_norm,
        "BLOCK_K": max(16, next_power_of_2(dim_k)),
    }  # fmt: skip
    block_v = min(16 if v.dtype == torch.float32 else 32, max(16, next_power_of_2(dim_v)))
    strides, has_long = (q.stride(0), k.stride(0), v.stride(0)), num_tokens > num_rows
    delta_step_kernel[(num_rows, num_heads, triton.cdiv(dim_v, block_v))](
        q, k, v, g, beta, states, slots, offsets, out, scale, SHORT if has_long else UNLIMITED, *strides,
        **sizes, BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    if has_long:
        options = {"CHUNK": CHUNK, "SHORT": SHORT, "PRECISION": _precision(v)}
        # for each token: its rows of the inverse and of the weights of the chunk's changes
        solved = torch.empty(num_tokens, num_heads, 2, CHUNK, device=v.device)
        delta_solve_kernel[(num_tokens // CHUNK + num_rows, num_heads)](
            q, k, g, beta, offsets, solved, scale, num_rows, *strides[:2],
            **{name: value for name, value in sizes.items() if name != "DIM_V"}, **options, num_warps=4,
        )  # fmt: skip
        delta_chunk_kernel[(num_rows, num_heads, triton.cdiv(dim_v, block_v))](
            q, k, v, g, beta, states, slots, offsets, solved, out, scale, *strides,
            **sizes, BLOCK_V=block_v, **options, STAGES=_chunk_stages(v), num_warps=CHUNK_WARPS,
        )  # fmt: skip
    return out


def ssd_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, states: Tensor, slots: Tensor,
    offsets: Tensor,
) -> Tensor:  # fmt: skip
    """Run the state space model of Mamba-2 as `reference_recurrent.ssd_scan` does."""
    if not states.is_contiguous():
        return reference_recurrent.ssd_scan(x, dt, a, b, c, d, states, slots, offsets)
    (num_groups, dim_n), (num_tokens, num_heads, dim_p), num_rows = b.shape[1:], x.shape, slots.shape[0]
    x, b, c, dt = contiguous_tokens(x), contiguous_tokens(b), contiguous_tokens(c), dt.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    is_large = x.dtype == torch.float32 or dim_n > 128  # many registers per token
    block_p = min(16 if is_large else 32, max(16, next_power_of_2(dim_p)))
    sizes = {
        "HEADS": num_heads, "RATIO": num_heads // num_groups, "DIM_P": dim_p, "DIM_N": dim_n, "BLOCK_P": block_p,
        "BLOCK_N": max(16, next_power_of_2(dim_n)),
    }  # fmt: skip
    strides, has_long = (x.stride(0), b.stride(0), c.stride(0)), num_tokens > num_rows
    grid = (num_rows, num_heads, triton.cdiv(dim_p, block_p))
    tensors = x, dt, a.contiguous(), b, c, None if d is None else d.contiguous(), states, slots, offsets, out
    ssd_step_kernel[grid](*tensors, SHORT if has_long else UNLIMITED, *strides, **sizes, num_warps=4)
    if has_long:
        ssd_chunk_kernel[grid](
            *tensors, *strides, **sizes, CHUNK=CHUNK, SHORT=SHORT, PRECISION=_precision(x), STAGES=_chunk_stages(x),
            num_warps=8 if is_large else 4,
        )  # fmt: skip
    return out


def _precision(x: Tensor) -> str:
    """Return how numbers are multiplied: one product of tf32 for 16-bit inputs, three for float32."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def _chunk_stages(x: Tensor) -> int:
    """Return how many chunks are loaded or computed at a time: float32 products leave no registers for a second."""
    return 1 if x.dtype == torch.float32 else CHUNK_STAGES


def variants(arch: int) -> Iterator[Variant]:
    """Yield the kernel variants of decode steps and prompts, for each dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield from conv_variants(6144, 4, "silu", dtype)
        yield from delta_variants(16, 32, dtype)
        yield from ssd_variants(48, 1, 128, dtype)


def conv_variants(channels: int, taps: int, activation: str | None, dtype: torch.dtype) -> Iterator[Variant]:
    """Yield the kernel variants of a convolution."""
    x, weight = _meta(99, channels, dtype=dtype), _meta(channels, taps, dtype=dtype)
    states, rows = _meta(9, channels, taps - 1, dtype=dtype), (_meta(7, dtype=torch.int32), _meta(8, dtype=torch.int32))
    yield from trace_variants(partial(causal_conv, x, weight, None, states, *rows, activation))


def delta_variants(key_heads: int, heads: int, dtype: torch.dtype) -> Iterator[Variant]:
    """Yield the kernel variants of a gated delta rule with heads of 128."""
    q, v = _meta(99, key_heads, 128, dtype=dtype), _meta(99, heads, 128, dtype=dtype)
    g, beta, states = _meta(99, heads), _meta(99, heads, dtype=dtype), _meta(9, heads, 128, 128)
    rows = _meta(7, dtype=torch.int32), _meta(8, dtype=torch.int32)
    yield from trace_variants(partial(gated_delta_rule, q, q, v, g, beta, states, *rows, 128**-0.5, l2_norm=True))


def ssd_variants(heads: int, groups: int, dim_n: int, dtype: torch.dtype) -> Iterator[Variant]:
    """Yield the kernel variants of a Mamba-2 layer with heads of 64."""
    x, b = _meta(99, heads, 64, dtype=dtype), _meta(99, groups, dim_n, dtype=dtype)
    dt, a, states = _meta(99, heads), _meta(heads), _meta(9, heads, 64, dim_n)
    rows = _meta(7, dtype=torch.int32), _meta(8, dtype=torch.int32)
    yield from trace_variants(partial(ssd_scan, x, dt, a, b, b, a, states, *rows))


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@triton.jit
def find_tile(offsets, num_rows, index, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (row, tile) of program `index`, where rows are divided into tiles of SIZE tokens.

    The tiles of row r start at program offsets[r] // SIZE + r; some programs have a tile after the end of their row.
    """
    low, high = index * 0, num_rows - 1  # the last row that starts at or before `index`
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(offsets + middle) // SIZE + middle <= index:
            low = middle
        else:
            high = middle - 1
    return low, index - tl.load(offsets + low) // SIZE - low


@triton.jit(do_not_specialize=["num_rows"])
def causal_conv_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    states,
    slots,
    offsets,
    out,
    num_rows,
    stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PAST: tl.constexpr,
):
    """Convolve a tile of BLOCK_T tokens of one row. Grid: (tiles of `find_tile`, CHANNELS / BLOCK_C).

    The program of a row's first tile alone reads the row's state; it then replaces it by the row's last inputs.
    """
    row, tile = find_tile(offsets, num_rows, tl.program_id(0), BLOCK_T)
    first = tl.load(offsets + row).to(tl.int64)
    count = (tl.load(offsets + row + 1) - first).to(tl.int32)
    if tile * BLOCK_T >= count:
        return
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = channel < CHANNELS
    state = states + (tl.load(slots + row).to(tl.int64) * CHANNELS + channel) * (TAPS - 1)
    t = tile * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(TAPS):
        at = t + tap - (TAPS - 1)
        value = tl.load(x + (first + at) * stride + channel, mask=(at >= 0) & (at < count) & inside, other=0.0)
        value = value.to(tl.float32)
        if tile == 0:
            value += tl.load(state + (at + TAPS - 1), mask=(at < 0) & inside, other=0.0).to(tl.float32)
        total += value * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + (first + t) * CHANNELS + channel, round_to(total, out.dtype.element_ty), mask=(t < count) & inside)
    if tile == 0:
        past = tl.arange(0, PAST)[:, None]
        source = count + past - (TAPS - 1)
        kept = (past < TAPS - 1) & inside
        old = tl.load(state + (source + TAPS - 1), mask=kept & (source < 0), other=0.0).to(tl.float32)
        new = tl.load(x + (first + source) * stride + channel, mask=kept & (source >= 0), other=0.0).to(tl.float32)
        tl.debug_barrier()  # every thread has read the state
        tl.store(state + past, round_to(old + new, states.dtype.element_ty), mask=kept)


@triton.jit
def load_rows(source, at, dim, inside, scale, L2_NORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load keys or queries as float32, multiplied by `scale` and divided by their norms with L2_NORM."""
    value = tl.load(source + at[:, None] + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    if L2_NORM:
        value *= tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) + 1e-6)
    return value * scale


@triton.jit(do_not_specialize=["most_tokens"])
def delta_step_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    g,
    beta,
    states,
    slots,
    offsets,
    out,
    scale,
    most_tokens,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    L2_NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Run rows of at most `most_tokens` tokens. Grid: (R, HEADS, DIM_V / BLOCK_V)."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    if (first == end) | (end - first > most_tokens):
        return
    i, column = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside, here = i < DIM_K, column < DIM_V
    place = states + ((tl.load(slots + row).to(tl.int64) * HEADS + head) * DIM_K + i[:, None]) * DIM_V + column[None, :]
    state = tl.load(place, mask=inside[:, None] & here[None, :], other=0.0)
    for t in range(first, end):
        key = tl.load(k + t * k_stride + head // RATIO * DIM_K + i, mask=inside, other=0.0).to(tl.float32)
        query = tl.load(q + t * q_stride + head // RATIO * DIM_K + i, mask=inside, other=0.0).to(tl.float32)
        if L2_NORM:
            key *= tl.rsqrt(tl.sum(key * key) + 1e-6)
            query *= tl.rsqrt(tl.sum(query * query) + 1e-6)
        value = tl.load(v + t * v_stride + head * DIM_V + column, mask=here, other=0.0).to(tl.float32)
        state *= tl.exp(tl.load(g + t * HEADS + head).to(tl.float32))
        known = tl.sum(state * key[:, None], axis=0)
        delta = (value - known) * tl.load(beta + t * HEADS + head).to(tl.float32)
        state += key[:, None] * delta[None, :]
        result = tl.sum(state * (query * scale)[:, None], axis=0)
        tl.store(out + (t * HEADS + head) * DIM_V + column, round_to(result, out.dtype.element_ty), mask=here)
    tl.store(place, state, mask=inside[:, None] & here[None, :])


@triton.jit
def decay_sums(g, t, end, HEADS: tl.constexpr, head):  # type: ignore[no-untyped-def]
    """Return the sums of g up to each token of a chunk."""
    return tl.cumsum(tl.load(g + t * HEADS + head, mask=t < end, other=0.0).to(tl.float32), axis=0)


@triton.jit
def decay_between(sums, lower):  # type: ignore[no-untyped-def]
    """Return exp(sums[i] - sums[j]) where `lower` holds, and 0 elsewhere."""
    return tl.where(lower, tl.exp(tl.where(lower, sums[:, None] - sums[None, :], 0.0)), 0.0)


@triton.jit(do_not_specialize=["num_rows"])
def delta_solve_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    g,
    beta,
    offsets,
    solved,
    scale,
    num_rows,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    DIM_K: tl.constexpr,
    L2_NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute (I + A)^-1 of one chunk, and the weights of its changes. Grid: (tiles of `find_tile`, HEADS).

    Shapes: solved [T, HEADS, 2, CHUNK].
    """
    row, tile = find_tile(offsets, num_rows, tl.program_id(0), CHUNK)
    head = tl.program_id(1)
    first = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    if (first + tile * CHUNK >= end) | (end - first <= SHORT):
        return
    i, dim = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    t = first + tile * CHUNK + i
    inside = (t < end)[:, None] & (dim < DIM_K)[None, :]
    keys = load_rows(k, t * k_stride + head // RATIO * DIM_K, dim, inside, 1.0, L2_NORM)
    queries = load_rows(q, t * q_stride + head // RATIO * DIM_K, dim, inside, scale, L2_NORM)
    sums = decay_sums(g, t, end, HEADS, head)
    gate = tl.load(beta + t * HEADS + head, mask=t < end, other=0.0).to(tl.float32)
    products = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    factors = products * decay_between(sums, i[:, None] > i[None, :]) * gate[:, None]
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for n in range(1, CHUNK):
        factor = tl.sum(tl.where(i[:, None] == n, factors, 0.0), axis=0)
        change = tl.sum(factor[:, None] * inverse, axis=0)
        inverse -= tl.where(i[:, None] == n, change[None, :], 0.0)
    weights = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decay_between(sums, i[:, None] >= i[None, :])
    place = solved + (t * HEADS + head)[:, None] * 2 * CHUNK + i[None, :]
    tl.store(place, inverse, mask=(t < end)[:, None])
    tl.store(place + CHUNK, weights, mask=(t < end)[:, None])


@triton.jit
def delta_chunk_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    g,
    beta,
    states,
    slots,
    offsets,
    solved,
    out,
    scale,
    q_stride,
    k_stride,
    v_stride,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    L2_NORM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run rows of more than SHORT tokens, chunk by chunk. Grid: (R, HEADS, DIM_V / BLOCK_V)."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    if end - first <= SHORT:
        return
    i, dim = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    here = column < DIM_V
    slot = tl.load(slots + row).to(tl.int64)
    place = states + ((slot * HEADS + head) * DIM_K + dim[:, None]) * DIM_V + column[None, :]
    held = (dim < DIM_K)[:, None] & here[None, :]
    state = tl.load(place, mask=held, other=0.0)
    for start in tl.range(first, end, CHUNK, num_stages=STAGES):
        t = start + i
        live = t < end
        inside = live[:, None] & (dim < DIM_K)[None, :]
        keys = load_rows(k, t * k_stride + head // RATIO * DIM_K, dim, inside, 1.0, L2_NORM)
        queries = load_rows(q, t * q_stride + head // RATIO * DIM_K, dim, inside, scale, L2_NORM)
        shown = live[:, None] & here[None, :]
        values = tl.load(v + t[:, None] * v_stride + head * DIM_V + column[None, :], mask=shown, other=0.0)
        gate = tl.load(beta + t * HEADS + head, mask=live, other=0.0).to(tl.float32)
        sums = decay_sums(g, t, end, HEADS, head)
        last = tl.sum(tl.where(i == CHUNK - 1, sums, 0.0))
        decay = tl.exp(sums)[:, None]
        known = decay * tl.dot(keys, state, input_precision=PRECISION)
        wanted = (values.to(tl.float32) - known) * gate[:, None]
        at = solved + (t * HEADS + head)[:, None] * 2 * CHUNK + i[None, :]
        inverse = tl.load(at, mask=live[:, None], other=0.0)
        changes = tl.dot(inverse, wanted, input_precision=PRECISION)
        weights = tl.load(at + CHUNK, mask=live[:, None], other=0.0)
        result = decay * tl.dot(queries, state, input_precision=PRECISION)
        result += tl.dot(weights, changes, input_precision=PRECISION)
        target = out + (t[:, None] * HEADS + head) * DIM_V + column[None, :]
        tl.store(target, round_to(result, out.dtype.element_ty), mask=shown)
        state *= tl.exp(last)
        state += tl.dot(tl.trans(keys), changes * tl.exp(last - sums)[:, None], input_precision=PRECISION)
    tl.store(place, state, mask=held)


@triton.jit(do_not_specialize=["most_tokens"])
def ssd_step_kernel(  # type: ignore[no-untyped-def]
    x,
    dt,
    a,
    b,
    c,
    d,
    states,
    slots,
    offsets,
    out,
    most_tokens,
    x_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    DIM_P: tl.constexpr,
    DIM_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Run rows of at most `most_tokens` tokens. Grid: (R, HEADS, DIM_P / BLOCK_P)."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    if (first == end) | (end - first > most_tokens):
        return
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    here, inside = p < DIM_P, n < DIM_N
    place = states + ((tl.load(slots + row).to(tl.int64) * HEADS + head) * DIM_P + p[:, None]) * DIM_N + n[None, :]
    held = here[:, None] & inside[None, :]
    state = tl.load(place, mask=held, other=0.0)
    rate = tl.load(a + head).to(tl.float32)
    for t in range(first, end):
        value = tl.load(x + t * x_stride + head * DIM_P + p, mask=here, other=0.0).to(tl.float32)
        step = tl.load(dt + t * HEADS + head).to(tl.float32)
        near = head // RATIO * DIM_N + n
        given = tl.load(b + t * b_stride + near, mask=inside, other=0.0).to(tl.float32)
        asked = tl.load(c + t * c_stride + near, mask=inside, other=0.0).to(tl.float32)
        state = state * tl.exp(step * rate) + (value * step)[:, None] * given[None, :]
        result = tl.sum(state * asked[None, :], axis=1)
        if d is not None:
            result += value * tl.load(d + head).to(tl.float32)
        tl.store(out + (t * HEADS + head) * DIM_P + p, round_to(result, out.dtype.element_ty), mask=here)
    tl.store(place, state, mask=held)


@triton.jit
def ssd_chunk_kernel(  # type: ignore[no-untyped-def]
    x,
    dt,
    a,
    b,
    c,
    d,
    states,
    slots,
    offsets,
    out,
    x_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    DIM_P: tl.constexpr,
    DIM_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Run rows of more than SHORT tokens, chunk by chunk. Grid: (R, HEADS, DIM_P / BLOCK_P)."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(offsets + row).to(tl.int64)
    end = tl.load(offsets + row + 1).to(tl.int64)
    if end - first <= SHORT:
        return
    i, p, n = tl.arange(0, CHUNK), tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    here, inside = p < DIM_P, n < DIM_N
    place = states + ((tl.load(slots + row).to(tl.int64) * HEADS + head) * DIM_P + p[:, None]) * DIM_N + n[None, :]
    held = here[:, None] & inside[None, :]
    state = tl.load(place, mask=held, other=0.0)
    rate = tl.load(a + head).to(tl.float32)
    for start in tl.range(first, end, CHUNK, num_stages=STAGES):
        t = start + i
        live = t < end
        shown, known = live[:, None] & here[None, :], live[:, None] & inside[None, :]
        values = tl.load(x + t[:, None] * x_stride + head * DIM_P + p[None, :], mask=shown, other=0.0).to(tl.float32)
        near = head // RATIO * DIM_N + n[None, :]
        given = tl.load(b + t[:, None] * b_stride + near, mask=known, other=0.0).to(tl.float32)
        asked = tl.load(c + t[:, None] * c_stride + near, mask=known, other=0.0).to(tl.float32)
        step = tl.load(dt + t * HEADS + head, mask=live, other=0.0).to(tl.float32)
        sums = tl.cumsum(step * rate, axis=0)
        last = tl.sum(tl.where(i == CHUNK - 1, sums, 0.0))
        inputs = values * step[:, None]
        weights = tl.dot(asked, tl.trans(given), input_precision=PRECISION)
        weights *= decay_between(sums, i[:, None] >= i[None, :])
        result = tl.dot(weights, inputs, input_precision=PRECISION)
        result += tl.exp(sums)[:, None] * tl.dot(asked, tl.trans(state), input_precision=PRECISION)
        if d is not None:
            result += values * tl.load(d + head).to(tl.float32)
        target = out + (t[:, None] * HEADS + head) * DIM_P + p[None, :]
        tl.store(target, round_to(result, out.dtype.element_ty), mask=shown)
        state *= tl.exp(last)
        state += tl.dot(tl.trans(inputs * tl.exp(last - sums)[:, None]), given, input_precision=PRECISION)
    tl.store(place, state, mask=held)
