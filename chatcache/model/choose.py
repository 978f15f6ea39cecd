"""Choose how tokens are drawn: by Triton's kernels where attention is Triton's, else by torch or the CPU's kernels."""

from __future__ import annotations

import torch

from chatcache.model.plain import PlainDraws, TorchDraws
from chatcache.model.sampler import AnySampler, Sampler


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
