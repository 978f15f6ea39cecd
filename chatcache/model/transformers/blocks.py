"""Decoder blocks of transformers models in few operations, on the CPU.

At decode, each operation of torch and each module takes microseconds, and a block of transformers takes a hundred of
them. The text models in `BASES` have one form:

    x += mixer(norm(x))      attention, or a mixer of `recurrent`
    x += mlp(norm(x))        gated MLP, or experts chosen by a router

`replace_bases` replaces such a model, without its output head, by a `BlockStack` that takes over its weights: residual
and norm are one kernel, the projections of attention one product, and the norms of heads, the rotary embedding and the
page writes one kernel. Small steps run as one kernel launch (`BlockDecode`). A model that differs anywhere stays as it
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from chatcache.model.attention import AttentionBackend, AttentionStep
from chatcache.model.linear import LinearFactory, PanelLinearFactory
from chatcache.model.transformers.attention import Probe, current_step
from chatcache.model.transformers.block_decode import BlockDecode
from chatcache.model.transformers.experts import GroupedExperts
from chatcache.model.transformers.joined_attention import JoinedAttention
from chatcache.model.transformers.modules import PROBES, FusedMLP, FusedNorm, UnknownFormError
from chatcache.model.transformers.recurrent import Mixer

BASES = ("Qwen3MoeModel", "Qwen3NextModel", "Qwen3_5TextModel", "Qwen3_5MoeTextModel")
ROPES = ("default", "linear", "yarn", "llama3")  # whose frequencies do not depend on the length of the context


class RoutedExperts(nn.Module):
    """Experts chosen by a softmax router, and in some families a shared one."""

    def __init__(self, source: Any, make_router: LinearFactory) -> None:
        """Take over the weights of a module of transformers. Raises: UnknownFormError."""
        super().__init__()
        children = {name for name, _ in source.named_children()}
        experts = getattr(source.experts, "forward", None)
        if children - {"gate", "experts", "shared_expert", "shared_expert_gate"}:
            raise UnknownFormError
        if not isinstance(experts, GroupedExperts) or len(dict(source.gate.named_parameters())) != 1:
            raise UnknownFormError
        self.experts = experts
        self.num_chosen = int(source.gate.top_k)
        self.is_normalised = bool(getattr(source.gate, "norm_topk_prob", True))
        self.shared_expert = getattr(source, "shared_expert", None)
        self.shared_expert_gate = getattr(source, "shared_expert_gate", None)
        gate_weight = getattr(self.shared_expert_gate, "weight", None)
        self.shared_gate_weight = None if gate_weight is None else gate_weight.detach()  # packing replaces the module
        self.router = make_router(source.gate.weight.detach(), None)  # 8 bits would choose experts less accurately
        self._check_router(source.gate)

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights = self._route(x)
        out = self.experts(x, chosen, weights)
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = out + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, [T, k], and their weights."""
        probs = torch.softmax(self.router(x), -1, dtype=torch.float32)
        weights, chosen = torch.topk(probs, self.num_chosen, dim=-1)
        if self.is_normalised:
            weights /= weights.sum(-1, keepdim=True)
        return chosen, weights.to(x.dtype)

    def _check_router(self, router: Any) -> None:
        """Check that the weights of chosen experts are those of the module. Raises: UnknownFormError."""
        shape, dtype = (PROBES, router.weight.shape[1]), router.weight.dtype
        probe = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        with torch.inference_mode():
            want, (_, got) = router(probe)[1], self._route(probe)
        if want.shape != got.shape or not torch.allclose(want, got, rtol=2e-2, atol=1e-3):
            raise UnknownFormError


class Block(nn.Module):
    """One decoder block: a mixer and an MLP, each after a norm."""

    def __init__(self, source: Any, make_router: LinearFactory) -> None:
        """Take over the modules of a layer of transformers. Raises: UnknownFormError."""
        super().__init__()
        children = dict(source.named_children())
        names = {"input_layernorm", "post_attention_layernorm", "mlp"}
        mixers = [child for name, child in children.items() if name not in names]
        norms = source.input_layernorm, source.post_attention_layernorm
        if len(mixers) != 1 or not all(isinstance(norm, FusedNorm) for norm in norms):
            raise UnknownFormError
        self.mixer_norm, self.mlp_norm = norms
        if not isinstance(mixers[0], Mixer | JoinedAttention):
            raise UnknownFormError
        self.mixer: Any = mixers[0]
        self.mlp: Any = source.mlp if isinstance(source.mlp, FusedMLP) else RoutedExperts(source.mlp, make_router)


class BlockStack(nn.Module):
    """The text model of a family in `BASES`, without its output head."""

    def __init__(self, source: Any, kernels: AttentionBackend) -> None:
        """Take over the weights of a model of transformers. Raises: UnknownFormError."""
        super().__init__()
        rotary = source.rotary_emb
        if rotary.rope_type not in ROPES or not isinstance(source.norm, FusedNorm):
            raise UnknownFormError
        self._kernels, self._rope_scale = kernels, float(rotary.attention_scaling)
        self.frequencies = rotary.inv_freq.float()
        self.embed_tokens, self.norm = source.embed_tokens, source.norm
        make_router = PanelLinearFactory(has_onednn=True)
        self.blocks = nn.ModuleList(Block(layer, make_router) for layer in source.layers)
        self._decode = BlockDecode()

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> MoeModelOutputWithPast:
        """Run a step's tokens; arguments as transformers passes them, [1, T]."""
        x = (self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds)[0]
        angles = position_ids.reshape(-1, len(x))[0, :, None].float() * self.frequencies  # equal on all axes for text
        rotation = angles.cos() * self._rope_scale, angles.sin() * self._rope_scale
        step = current_step()
        states = None if isinstance(step, Probe) else self._decode.run(self, x, rotation, step)
        if states is None:
            states = self._run(list(self.blocks), x, step, rotation)
        return MoeModelOutputWithPast(last_hidden_state=states[None])

    def _run(
        self, blocks: Sequence[Any], x: Tensor, step: AttentionStep | Probe, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the final hidden states, [T, hidden]."""
        add_norm, norms = self._kernels.add_rms_norm, [*(block.mixer_norm for block in blocks[1:]), self.norm]
        h: Tensor = blocks[0].mixer_norm(x)
        for block, norm in zip(blocks, norms, strict=True):
            h, x = add_norm(block.mixer.mix(h, step, rotation), x, block.mlp_norm.weight, block.mlp_norm.eps)
            h, x = add_norm(block.mlp(h), x, norm.weight, norm.eps)
        return h


def replace_bases(model: nn.Module, kernels: AttentionBackend) -> None:
    """Replace the text models of a model in place, after its mixers, experts, norms and MLPs were replaced."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in BASES:
                try:
                    setattr(parent, name, BlockStack(child, kernels))
                except (UnknownFormError, AttributeError):
                    continue
