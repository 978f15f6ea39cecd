"""Mixture-of-experts layers: the data that all backends share, and the plain torch part of `reference`.

A router, which is not part of this package, chooses k experts for each token and a weight for each of them. A pair is
one token with one of its experts. A layer computes for each pair down[e] @ activate(up[e] @ x), and adds the results of
a token's pairs with their weights.

Backends have two functions: `pack_experts` lays out the weights once, and `grouped_experts` sorts the pairs by expert,
multiplies the pairs of each expert together, and reads the weights of no other expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
"""[num_pairs, outputs of `up`] -> [num_pairs, inputs of `down`], each row alone: silu(gate) * up, for example."""

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Return an uninitialised contiguous tensor."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One linear layer of all experts, laid out by a backend.

    Shapes: weight [num_experts, ...], bias [num_experts, num_outputs], scales [num_experts, num_outputs] float32.
    `form`: the layout, which belongs to the backend; "plain" is [num_experts, num_outputs, num_inputs] in any strides.
    `compact` [num_experts, bytes]: the same weights for few tokens, see `cpu.compact`.
    """

    weight: Tensor
    bias: Tensor | None
    num_outputs: int
    num_inputs: int
    form: str = "plain"
    scales: Tensor | None = None
    compact: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights and scales."""
        return self.weight.nbytes + (self.scales.nbytes if self.scales is not None else 0)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor."""
    return torch.empty(shape, dtype=dtype)


def plain_weights(weight: Tensor, bias: Tensor | None) -> ExpertWeights:
    """Return weights as they are. Shapes: weight [num_experts, out, in], bias [num_experts, out]."""
    return ExpertWeights(weight, bias, weight.shape[1], weight.shape[2])


def pack_experts(
    weight: Tensor, bias: Tensor | None, *, is_int8: bool = False, allocate: Allocate = empty
) -> ExpertWeights:
    """Return the weights of one linear layer of all experts as they are.

    Shapes: weight [num_experts, out, in], bias [num_experts, out].
    Raises: ValueError for int8, which only the backend `cpu` has.
    """
    if is_int8:
        raise ValueError("int8 experts need the backend cpu")
    return plain_weights(weight, bias)


def grouped_experts(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, up: ExpertWeights, down: ExpertWeights, activate: Activation
) -> Tensor:
    """Apply the experts that a router chose for each token, and add their results with the router's weights.

    Shapes: x [num_tokens, in], expert_ids (integers), expert_weights [num_tokens, k] -> [num_tokens, out].
    """
    total = torch.zeros(len(x), down.num_outputs, device=x.device)
    for expert in sorted(set(expert_ids.flatten().tolist())):
        token, choice = torch.where(expert_ids == expert)
        hidden = activate(_multiply_expert(x[token], up, expert))
        y = _multiply_expert(hidden, down, expert)
        total.index_add_(0, token, y * expert_weights[token, choice, None].float())
    return total.to(x.dtype)


def _multiply_expert(x: Tensor, weights: ExpertWeights, expert: int) -> Tensor:
    out = x.float() @ weights.weight[expert].float().T
    return out if weights.bias is None else out + weights.bias[expert].float()
