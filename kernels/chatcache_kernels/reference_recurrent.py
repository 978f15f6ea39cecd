"""Recurrent layers in plain PyTorch, token by token: the oracle of the other backends.

Each function runs all rows of a step. Row r has the tokens offsets[r] to offsets[r + 1] - 1; it reads the state of slot
slots[r] and updates it in place. Rows without tokens are allowed. Symbols: T tokens, R rows, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor, offsets: Tensor,
    activation: str | None,
) -> Tensor:  # fmt: skip
    """Convolve each channel with the last K inputs of its row. The states are the last K - 1 inputs, oldest first.

    Shapes: x [T, C], weight [C, K], bias [C], states [S, C, K - 1], slots [R], offsets [R + 1] int32 -> [T, C].
    """
    out = torch.empty_like(x)
    for slot, first, end in _rows(slots, offsets):
        inputs = torch.cat((states[slot].to(x.dtype), x[first:end].T), dim=1)
        states[slot] = inputs[:, end - first :].to(states.dtype)
        windows = inputs.unfold(1, weight.shape[1], 1)  # [C, tokens, K]
        row = (windows.float() * weight.float()[:, None]).sum(-1)
        if bias is not None:
            row = row + bias.float()[:, None]
        out[first:end] = (functional.silu(row) if activation == "silu" else row).T.to(x.dtype)
    return out


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, offsets: Tensor,
    scale: float, l2_norm: bool,
) -> Tensor:  # fmt: skip
    """Run the gated delta rule; value head h uses key head h // (Hv / Hk).

    Shapes: q, k [T, Hk, Dk], v [T, Hv, Dv], g [T, Hv] (logarithm of the decay, float32), beta [T, Hv], states
    [S, Hv, Dk, Dv] float32 -> [T, Hv, Dv].
    """
    if l2_norm:
        q, k = (x.float() * torch.rsqrt((x.float() ** 2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    ratio = v.shape[1] // k.shape[1]
    q, k = (x.float().repeat_interleave(ratio, dim=1) for x in (q * scale, k))
    out = torch.empty_like(v)
    for slot, first, end in _rows(slots, offsets):
        state = states[slot].clone()
        for t in range(first, end):
            state *= g[t].float().exp()[:, None, None]
            known = torch.einsum("hkv,hk->hv", state, k[t])
            delta = (v[t].float() - known) * beta[t].float()[:, None]
            state += k[t][:, :, None] * delta[:, None]
            out[t] = torch.einsum("hkv,hk->hv", state, q[t]).to(v.dtype)
        states[slot] = state
    return out


def ssd_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, states: Tensor, slots: Tensor,
    offsets: Tensor,
) -> Tensor:  # fmt: skip
    """Run the state space model of Mamba-2; head h uses group h // (H / G).

    Shapes: x [T, H, P], dt [T, H] float32, a [H] float32 (negative), b, c [T, G, N], d [H], states [S, H, P, N] float32
    -> [T, H, P].
    """
    ratio = x.shape[1] // b.shape[1]
    b, c = (each.float().repeat_interleave(ratio, dim=1) for each in (b, c))
    out = torch.empty_like(x)
    for slot, first, end in _rows(slots, offsets):
        state = states[slot].clone()
        for t in range(first, end):
            inputs = x[t].float() * dt[t][:, None]
            state = state * (dt[t] * a).exp()[:, None, None] + inputs[:, :, None] * b[t][:, None]
            y = torch.einsum("hpn,hn->hp", state, c[t])
            if d is not None:
                y = y + x[t].float() * d.float()[:, None]
            out[t] = y.to(x.dtype)
        states[slot] = state
    return out


def _rows(slots: Tensor, offsets: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the slot, the first token and the end of each row that has tokens."""
    bounds = offsets.tolist()
    for slot, first, end in zip(slots.tolist(), bounds[:-1], bounds[1:], strict=True):
        if end > first:
            yield slot, first, end


def contiguous_tokens(x: Tensor) -> Tensor:
    """Return x if each token's numbers are contiguous, as in a part of a split; a copy otherwise."""
    size = 1
    for dim in range(x.dim() - 1, 0, -1):
        if x.stride(dim) != size and x.shape[dim] != 1:
            return x.contiguous()
        size *= x.shape[dim]
    return x
