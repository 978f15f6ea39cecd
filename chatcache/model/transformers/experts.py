"""Mixture-of-experts layers of transformers models as grouped products.

transformers multiplies expert by expert in a Python loop, or copies the weights of the chosen experts. Its expert
modules of all families have one form: `gate_up_proj` (or `up_proj`) and `down_proj` [num_experts, ...] with optional
biases, an activation `_apply_gate` (or `act_fn`), and forward(hidden_states, top_k_index, top_k_weights). That forward
is replaced; routers, shared experts and activations without a kernel stay transformers' own.

Each weight is packed and released before the next, so memory never holds two copies of all experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from chatcache_kernels.experts import Activation, ExpertWeights
from torch import Tensor, nn

from chatcache.model.attention import AttentionBackend
from chatcache.model.host_memory import HostArena
from chatcache.model.linear import Int8LinearFactory, LinearFactory, PanelLinearFactory


@dataclass(slots=True)
class GroupedExperts:
    """The experts of one layer, packed for a backend; replaces the forward of an expert module.

    `num_chosen`: experts of a token, known after the first call.
    """

    kernels: AttentionBackend
    up: ExpertWeights
    down: ExpertWeights
    activate: Activation
    num_chosen: int = 0

    @property
    def idle_bytes(self) -> int:
        """Return the bytes of weights that a token does not read."""
        num_experts = len(self.up.weight)
        return (self.up.num_bytes + self.down.num_bytes) * (num_experts - self.num_chosen) // num_experts

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.num_chosen = top_k_index.shape[-1]
        return self.kernels.grouped_experts(
            hidden_states, top_k_index, top_k_weights, self.up, self.down, self.activate
        )


def replace_experts(
    model: nn.Module, kernels: AttentionBackend, make_linear: LinearFactory | None = None
) -> list[GroupedExperts]:
    """Replace the forward of every expert module of a model in place; return the replacements.

    Expert modules of another form stay as they are. Of `make_linear` only the form of its weights matters: 8 bits, or
    panels with a compact copy; they are counted there. Raises: ValueError for 8 bits with a backend other than cpu.
    """
    arena, replaced = HostArena(), []
    for module in model.modules():
        if _is_supported(module):
            device = next(module.parameters()).device
            activate, order = _find_activation(module, kernels, device)
            up = "gate_up_proj" if module.has_gate else "up_proj"
            experts = GroupedExperts(
                kernels,
                _pack(module, up, kernels, arena, make_linear, order),
                _pack(module, "down_proj", kernels, arena, make_linear),
                activate,
            )
            module.forward = experts
            replaced.append(experts)
    return replaced


def _is_supported(module: Any) -> bool:
    """Return whether a module has the form that `transformers.integrations.moe` defines, and no norm after experts."""
    has_norm = getattr(module, "has_post_expert_norm", False)  # not in every release of transformers
    names = ("has_gate", "has_bias", "is_transposed")
    return all(isinstance(getattr(module, name, None), bool) for name in names) and not has_norm


def _pack(
    module: Any,
    name: str,
    kernels: AttentionBackend,
    arena: HostArena,
    make_linear: LinearFactory | None,
    order: Tensor | None = None,
) -> ExpertWeights:
    """Pack one weight of an expert module, and release it unless the packed form refers to it.

    `order`: of its outputs, None as they are.
    """
    weight: Tensor = getattr(module, name).detach()
    bias = getattr(module, f"{name}_bias").detach() if module.has_bias else None
    weight = weight.mT if module.is_transposed else weight
    if order is not None:
        weight, bias = weight[:, order], bias[:, order] if bias is not None else None
    int8 = make_linear if isinstance(make_linear, Int8LinearFactory) else None
    packed = kernels.pack_experts(weight, bias, is_int8=int8 is not None, allocate=arena.empty)
    if packed.form == "panels" and isinstance(make_linear, PanelLinearFactory) and make_linear.compact_tokens > 0:
        packed = replace(packed, compact=make_linear.compact(weight))
    if packed.weight.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
        module.register_parameter(name, None)
        if int8 is not None:
            int8.num_weights += weight.numel()
            int8.num_bytes += packed.num_bytes
    return packed


def _find_activation(module: Any, kernels: AttentionBackend, device: torch.device) -> tuple[Activation, Tensor | None]:
    """Return the activation of an expert module, and the order of outputs of `up` for which it is, None as they are.

    A kernel, if one gives the same; gpt-oss stores gates and ups in turn.
    """
    if not module.has_gate:
        return module.act_fn, None
    probe = 8.0 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(device)
    want = module._apply_gate(probe)
    in_turn = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2))).to(device)
    candidates: list[tuple[Activation, Tensor | None]] = [(kernels.silu_mul, None), (kernels.gelu_mul, None)]
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        clamped = partial(kernels.clamped_silu_mul, slope=float(module.alpha), limit=float(module.limit))
        candidates += [(clamped, None), (clamped, in_turn)]
    for activate, order in candidates:
        got = activate(probe if order is None else probe[:, order])
        if torch.allclose(want, got, rtol=1e-4, atol=1e-5):
            width = module.down_proj.shape[1 if module.is_transposed else 2]
            return activate, None if order is None else torch.arange(2 * width, device=device).view(-1, 2).T.flatten()
    return module._apply_gate, None
