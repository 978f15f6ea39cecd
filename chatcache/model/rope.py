"""Rotary position tables with the scalings of the supported families.

Source: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); Llama 3.1's frequency-dependent scaling; "NTK-aware" dynamic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from chatcache.model.arch import Rope


def rope_tables(rope: Rope, length: int, max_position: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [length, rope.dim / 2], attention factor included.

    `max_position` is the context the model was made for. Dynamic scaling is a property of the longest context served
    (`length`), not of each step: keys in pages would otherwise have been turned by another base than later queries.
    Up to `max_position` it changes nothing, as in transformers.
    """
    frequencies, factor = _frequencies(rope, length, max_position)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos() * factor, angles.sin() * factor


def _frequencies(rope: Rope, length: int, max_position: int) -> tuple[Tensor, float]:
    theta, factor = rope.theta, rope.option("factor", 1.0) or 1.0
    if rope.kind == "dynamic":
        longest = max(length, max_position)
        theta *= ((factor * longest / max_position) - (factor - 1)) ** (rope.dim / (rope.dim - 2))
    plain = 1.0 / (theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim))
    if rope.kind == "linear":
        return plain / factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain, factor), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, factor), _yarn_attention(rope, factor)
    return plain, 1.0


def _original(rope: Rope) -> float:
    """Return the context before the stretch; the config reader always sets it."""
    return dict(rope.options)["original_max_position_embeddings"]


def _llama3(rope: Rope, plain: Tensor, factor: float) -> Tensor:
    """Leave short wavelengths, divide long ones by `factor`, blend between."""
    low, high = rope.option("low_freq_factor", 1.0) or 1.0, rope.option("high_freq_factor", 4.0) or 4.0
    turns = _original(rope) * plain / (2 * math.pi)  # full turns within the original context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain / factor * (1 - blend) + plain * blend


def _yarn(rope: Rope, plain: Tensor, factor: float) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, ramp between those that turn beta_slow and beta_fast times."""

    def dimension(turns: float) -> float:
        return rope.dim * math.log(_original(rope) / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.option("beta_fast") or 32.0), dimension(rope.option("beta_slow") or 1.0)
    if rope.option("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2).float() - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain / factor * ramp + plain * (1 - ramp)


def _yarn_attention(rope: Rope, factor: float) -> float:
    """Return the factor that cos and sin carry so that attention sharpens with the stretch."""
    given = rope.option("attention_factor")
    if given is not None:
        return given

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, all_dim = rope.option("mscale"), rope.option("mscale_all_dim")
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
