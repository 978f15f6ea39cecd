"""What sampling asks of rows of logits: by the CPU's own kernels on CPUs, in torch elsewhere.

No bit of a row's answer depends on the other rows, on how many there are, or on the threads. torch shares rows out
among its threads, except where there is only one: then each thread adds up a part of it, and the last bits depend on
the parts. So a lone row is summed as two.

Shapes: x [N, K] float32; what has one number for each row is [N].
"""

from __future__ import annotations

import torch
from chatcache_kernels.cpu import logits
from torch import Tensor

from chatcache.model.noise import gumbel


def row_sum(x: Tensor) -> Tensor:
    """Add up each row."""
    return _in_company(x).sum(-1)[: len(x)]


def log_sum_exp(x: Tensor) -> Tensor:
    """Return the logarithm of each row's summed exponentials."""
    return logits.log_sum_exp(x) if x.device.type == "cpu" else _in_company(x).logsumexp(-1)[: len(x)]


def first_largest(x: Tensor) -> Tensor:
    """Return where each row is largest, int64, the first of equals."""
    return logits.argmax(x) if x.device.type == "cpu" else x.argmax(-1)


def noisy_largest(x: Tensor, base: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return where x + `noise.gumbel` is largest, int64. Shapes: base [K]; low, high [N] int32."""
    if x.device.type == "cpu":
        return logits.noisy_argmax(x, base, low, high)
    return (x + gumbel(base, low, high)).argmax(-1)


def scale(x: Tensor, temperature: Tensor) -> Tensor:
    """Return (x - its row's largest) / temperature. Shapes: temperature [N] float32."""
    if x.device.type == "cpu":
        return logits.scale(x, temperature)
    return (x - x.amax(-1, keepdim=True)) / temperature[:, None]


def share_ahead(x: Tensor, chosen: Tensor, floor: Tensor) -> Tensor:
    """Return which share of each row's exponentials comes before that of `chosen`, the largest first, equals by place;
    those of x below `floor` do not count. Shapes: chosen [N] int64, floor [N] float32."""
    if x.device.type == "cpu":
        return logits.share_ahead(x, chosen, floor)
    value, places = x.gather(-1, chosen[:, None]), torch.arange(x.shape[1], device=x.device)
    ahead = (x > value) | ((x == value) & (places < chosen[:, None]))
    weight = x.exp().masked_fill_(x < floor[:, None], 0.0)
    return row_sum(weight * ahead) / row_sum(weight)


def _in_company(x: Tensor) -> Tensor:
    return x.expand(2, -1) if len(x) == 1 and torch.get_num_threads() > 1 else x
