"""Samplers for captured steps: one token from each row, no edits, masks or alternatives.

All parameters are read from the step's buffers; the host takes no decisions, and no memory outlives the step.
`TorchGraphSampler` uses torch; `device_sampler` has one for machines with Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from chatcache.model.sampling.ops import apply_temperature, argmax, draw_keys, gumbel_argmax, log_sum_exp, token_base
from chatcache.model.sampling.sampler import NOT_FINITE
from chatcache.types.plan import I64, Draws, StepPlan, StepResult

ArraySpecs = dict[str, tuple[DTypeLike, tuple[int, ...]]]


class GraphSampler(Protocol):
    """Sampler of captured steps.

    `num_kinds`: number of kinds of steps that are captured separately, because they launch different kernels.
    """

    num_kinds: int

    def input_specs(self, size: int) -> ArraySpecs:
        """Return the dtype and shape of the inputs of `draw` for `size` rows, by name."""
        ...

    def output_specs(self, size: int) -> ArraySpecs:
        """Return the dtype and shape of the outputs of `draw` for `size` rows, by name."""
        ...

    def kind(self, draws: Draws) -> int | None:
        """Return the kind of step for these draws, None if `draw` does not support all of them."""
        ...

    def fill(self, inputs: Mapping[str, NDArray[Any]], draws: Draws, slot: I64) -> None:
        """Write the draws into the input arrays; the columns of padding rows keep stale values.

        Stale values must be harmless. Shapes: slot [size], where each row's token is stored.
        """
        ...

    def draw(
        self, logits: Tensor, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], last_token: Tensor, kind: int
    ) -> None:
        """Draw one token from each row without the host, and store it at the row's slot.

        Shapes: logits [size, V]; last_token [num_slots + 1] int32, which receives the tokens. `inputs` also holds the
        step's other arrays.
        """
        ...

    def result(self, outputs: Mapping[str, NDArray[Any]], count: int) -> StepResult:
        """Return the first `count` draws as a result with its own memory."""
        ...


def is_plain_decode(plan: StepPlan) -> bool:
    """Return whether every row of a step is one token with one plain draw, in row order."""
    rows, draws = plan.rows, plan.draws
    count = len(rows.slot)
    if not count or len(rows.tokens) != count or len(draws.row) != count or plan.scores is not None:
        return False
    if draws.edits or draws.masks or draws.num_top.any():
        return False
    return bool((draws.width == 1).all() and (rows.num_tokens == 1).all() and (draws.row == np.arange(count)).all())


class TorchGraphSampler:
    """Sampler of captured steps in torch, without filters. The results are those of `Sampler`."""

    num_kinds = 1

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._base = token_base(vocab_size, device)

    def input_specs(self, size: int) -> ArraySpecs:
        return {"key_low": (np.int32, (size,)), "key_high": (np.int32, (size,)), "temperature": (np.float32, (size,))}

    def output_specs(self, size: int) -> ArraySpecs:
        return {"ids": (np.int64, (size,)), "logprobs": (np.float32, (size,)), "faulty": (np.int32, (size,))}

    def kind(self, draws: Draws) -> int | None:
        top_k = (draws.top_k > 0) & (draws.top_k < self._vocab_size)
        limited = (top_k | (draws.top_p < 1) | (draws.min_p > 0)) & (draws.temperature > 0)
        return None if limited.any() else 0

    def fill(self, inputs: Mapping[str, NDArray[Any]], draws: Draws, slot: I64) -> None:
        count = len(draws.row)
        inputs["key_low"][:count], inputs["key_high"][:count] = draw_keys(draws.seed, draws.lane, draws.position)
        inputs["temperature"][:count] = draws.temperature

    def draw(
        self, logits: Tensor, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], last_token: Tensor, kind: int
    ) -> None:
        raw, temperature = logits.float(), inputs["temperature"]
        lse, warm = log_sum_exp(raw), temperature > 0
        scaled = apply_temperature(raw, torch.where(warm, temperature, 1.0))
        noisy = gumbel_argmax(scaled, self._base, inputs["key_low"], inputs["key_high"])
        ids = torch.where(warm, noisy, argmax(raw))
        outputs["ids"].copy_(ids)
        outputs["logprobs"].copy_(raw.gather(1, ids[:, None])[:, 0] - lse)
        outputs["faulty"].copy_(~torch.isfinite(lse))
        last_token.index_copy_(0, inputs["slot"], ids.int())

    def result(self, outputs: Mapping[str, NDArray[Any]], count: int) -> StepResult:
        tokens, logprobs = outputs["ids"][:count, None].astype(np.int32), outputs["logprobs"][:count, None].copy()
        faulty = np.flatnonzero(outputs["faulty"][:count])
        tokens[faulty], logprobs[faulty] = -1, -np.inf
        none_i, none_f = np.zeros((count, 0), np.int32), np.zeros((count, 0), np.float32)
        faults = tuple((int(draw), NOT_FINITE) for draw in faulty)
        return StepResult(tokens, logprobs, none_i, none_f, faults, none_f, none_f)
