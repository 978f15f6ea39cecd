"""Draws that a CUDA graph can hold: one token from each row, no edits, no masks, no alternatives.

Everything is decided by numbers in the buffers of the step, nothing by the host, and no memory is allocated that
outlives the step. These are the torch draws; `device_sampler` has those of the Triton kernels, which only machines with
Triton can import.
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
    """How plain draws are made.

    `num_kinds`: kinds of steps that are captured apart, because they do not launch the same work.
    """

    num_kinds: int

    def input_specs(self, size: int) -> ArraySpecs:
        """Return what `draw` wants to be given for `size` rows: arrays by name."""
        ...

    def output_specs(self, size: int) -> ArraySpecs:
        """Return what `draw` leaves for `result`: arrays by name."""
        ...

    def kind(self, draws: Draws) -> int | None:
        """Return which kind of step these draws make, 0 .. num_kinds - 1; None if `draw` cannot do all of them."""
        ...

    def fill(self, inputs: Mapping[str, NDArray[Any]], draws: Draws, slot: I64) -> None:
        """Write the draws' numbers into the arrays of `parts`. Shapes: slot [size], where each row leaves its token.

        The draws of rows past the last of `draws` are leftovers; whatever they hold must be harmless.
        """
        ...

    def draw(
        self, logits: Tensor, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], last_token: Tensor, kind: int
    ) -> None:
        """Draw one token from each row, without the host, and leave it in `last_token` at the row's slot.

        Shapes: logits [size, V]; last_token [num_slots + 1] int32. `given` holds the step's other arrays, too.
        """
        ...

    def result(self, outputs: Mapping[str, NDArray[Any]], count: int) -> StepResult:
        """Return the first `count` draws as a result of its own memory."""
        ...


def is_plain_decode(plan: StepPlan) -> bool:
    """Whether every row of a step is one token, drawn once, in row order, plainly."""
    rows, draws = plan.rows, plan.draws
    count = len(rows.slot)
    if not count or len(rows.tokens) != count or len(draws.row) != count or plan.scores is not None:
        return False
    if draws.edits or draws.masks or draws.num_top.any():
        return False
    return bool((draws.width == 1).all() and (rows.num_tokens == 1).all() and (draws.row == np.arange(count)).all())


class TorchGraphSampler:
    """Plain draws in torch, without filters. The same draws as `Sampler`'s."""

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
