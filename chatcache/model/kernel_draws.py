"""Plain draws by the sampling kernels, filters included: what `graphs` captures where the kernels are Triton's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from chatcache_kernels.triton import sampling
from chatcache_kernels.triton.launch import dense_last
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.device_results import MESSAGES
from chatcache.model.draw_table import NUM_FIELDS, fill_table, has_cuts, set_slots
from chatcache.model.noise import token_base
from chatcache.model.plain import Parts
from chatcache.sched.plan import I64, Draws, StepResult


class KernelDraws:
    """Plain draws in Triton. Satisfies `plain.PlainDraws`; the same draws as `Sampler`'s. Kind 1 has filters."""

    num_kinds = 2

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._base = token_base(vocab_size, device)

    def parts(self, size: int) -> Parts:
        return {"draws": (np.int32, (NUM_FIELDS, size))}

    def drawn_parts(self, size: int) -> Parts:
        return {"ids": (np.int32, (size,)), "logprobs": (np.float32, (size,)), "faults": (np.int32, (size,))}

    def kind(self, draws: Draws) -> int | None:
        return int(has_cuts(draws, self._vocab_size))

    def fill(self, given: Mapping[str, NDArray[Any]], draws: Draws, slot: I64) -> None:
        fill_table(given["draws"], draws, np.arange(len(draws.row)), self._vocab_size)
        set_slots(given["draws"], slot)

    def draw(
        self, logits: Tensor, given: Mapping[str, Tensor], drawn: Mapping[str, Tensor], last_token: Tensor, kind: int
    ) -> None:
        raw = dense_last(logits)
        draws = sampling.Draws(raw, raw, self._base, given["draws"], None, cuts=kind == 1)
        sampling.draw(draws, last_token, drawn["ids"], drawn["logprobs"], drawn["faults"])

    def result(self, drawn: Mapping[str, NDArray[Any]], count: int) -> StepResult:
        tokens, logprobs = drawn["ids"][:count, None].copy(), drawn["logprobs"][:count, None].copy()
        fault = drawn["faults"][:count]
        faulty = np.flatnonzero(fault)
        tokens[faulty], logprobs[faulty] = -1, -np.inf
        none_i, none_f = np.zeros((count, 0), np.int32), np.zeros((count, 0), np.float32)
        faults = tuple((int(draw), MESSAGES[int(fault[draw])]) for draw in faulty)
        return StepResult(tokens, logprobs, none_i, none_f, faults, none_f, none_f)
