"""Sums over single rows, of which no bit depends on the other rows, on how many there are, or on the threads.

torch shares rows out among its threads, except where there is only one: then each thread adds up a part of it, and the
last bits depend on the parts. So a lone row is summed as two.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sum(x: Tensor) -> Tensor:
    """Add up each row. Shapes: x [N, K] -> [N]."""
    return _in_company(x).sum(-1)[: len(x)]


def log_sum_exp(x: Tensor) -> Tensor:
    """Return the logarithm of each row's summed exponentials. Shapes: x [N, K] -> [N]."""
    return _in_company(x).logsumexp(-1)[: len(x)]


def _in_company(x: Tensor) -> Tensor:
    return x.expand(2, -1) if len(x) == 1 and torch.get_num_threads() > 1 else x
