"""Choose how layers multiply, and how tokens are drawn: by Triton's kernels where attention is Triton's, else by torch
or the CPU's kernels."""

from __future__ import annotations

import logging

import torch

from chatcache.config import EngineConfig
from chatcache.model.invariant import InvariantLinears
from chatcache.model.linear import MakeLinear, TwofoldLinears, fast_linear
from chatcache.model.memory import free_host_bytes
from chatcache.model.plain import PlainDraws, TorchDraws
from chatcache.model.quantised import Int8Linears
from chatcache.model.sampler import AnySampler, Sampler

log = logging.getLogger(__name__)

TWICE_MAX_BYTES = 2 * 2**30  # of weights kept twice; beyond, calls cost little beside reading weights
TWICE_MAX_SHARE = 1 / 3  # of free memory, for weights kept twice: as much again is left for pages and all else


def choose_linear(config: EngineConfig, weight_bytes: int, dtype: torch.dtype, device: torch.device) -> MakeLinear:
    """Return how this model multiplies."""
    if config.quantization == "int8":
        return Int8Linears()
    if config.deterministic:
        return InvariantLinears()
    if device.type != "cpu" or config.attention not in ("auto", "cpu") or dtype != torch.bfloat16:
        return fast_linear
    free_bytes = free_host_bytes()
    twice = keeps_twice(weight_bytes, free_bytes)
    size = f"{weight_bytes / 2**30:.2f} GiB of weights, {free_bytes / 2**30:.2f} GiB free"
    log.info("%s: kept %s", size, "twice, for few tokens and for many" if twice else "once, as oneDNN has them")
    return TwofoldLinears() if twice else fast_linear


def keeps_twice(weight_bytes: int, free_bytes: int) -> bool:
    """Tell whether weights are worth a second form for few tokens: where that is small change, and memory has room."""
    return weight_bytes <= min(TWICE_MAX_BYTES, free_bytes * TWICE_MAX_SHARE)


def choose_sampler(backend: str, vocab_size: int, device: torch.device) -> AnySampler:
    """Return what draws for a runner with this attention backend."""
    if backend != "triton":
        return Sampler(vocab_size, device)
    from chatcache.model.device_sampler import DeviceSampler

    return DeviceSampler(vocab_size, device)


def choose_plain(backend: str, vocab_size: int, device: torch.device) -> PlainDraws:
    """Return what draws within captured steps."""
    if backend != "triton":
        return TorchDraws(vocab_size, device)
    from chatcache.model.kernel_draws import KernelDraws

    return KernelDraws(vocab_size, device)
