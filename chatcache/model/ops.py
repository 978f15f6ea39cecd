"""The decoder's small operations in plain torch, with few calls each: at one token a step, calls are what they cost.

They round where transformers rounds, so both agree in any dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale rows to unit root mean square, then by `weight`. Shapes: x [T, C], weight [C]; or x [T, H, D], [H, D]."""
    if weight.ndim == 1:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x, weight.shape[-1:], None, eps) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up. Shapes: gate_up [T, 2 * I], gate first -> [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def rotary(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Lay tables [N, C] out for `rotate`: [N, 1, 2 * C] each, the first half of sin negated."""
    doubled = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return doubled[0].to(dtype)[:, None], doubled[1].to(dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first R dimensions of each head, pairing i with i + R / 2. Shapes: x [T, H, D]; cos, sin [T, 1, R]."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate(x[..., :size], cos, sin), x[..., size:]), -1)
    return torch.addcmul(x * cos, x.roll(size // 2, -1), sin)
