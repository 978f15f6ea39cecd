"""Plain draws by the sampling kernels, filters included: what `graphs` captures where the kernels are Triton's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from chatcache_kernels.triton import sampling
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.draw_table import NUM_FIELDS, fill_table
from chatcache.model.noise import token_base
from chatcache.model.plain import Parts
from chatcache.sched.plan import Draws


class KernelDraws:
    """Plain draws in Triton. Satisfies `plain.PlainDraws`; the same draws as `Sampler`'s."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._base = token_base(vocab_size, device)
        self._nowhere = torch.zeros(1, dtype=torch.int64, device=device)

    def parts(self, size: int) -> Parts:
        return {"draws": (np.int32, (NUM_FIELDS, size))}

    def can(self, draws: Draws) -> bool:
        return True

    def fill(self, given: Mapping[str, NDArray[Any]], draws: Draws) -> None:
        fill_table(given["draws"], draws, np.arange(len(draws.row)), self._vocab_size)

    def draw(self, logits: Tensor, given: Mapping[str, Tensor], drawn: Mapping[str, Tensor]) -> None:
        draws = sampling.Draws(logits, logits, self._base, given["draws"], None, cuts=True)
        sampling.draw(draws, self._nowhere, drawn["tokens"], drawn["logprobs"], drawn["faulty"])
