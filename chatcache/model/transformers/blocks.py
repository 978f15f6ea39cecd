"""Decoder blocks of transformers models in few operations, on the CPU.

At decode, each operation of torch and each module takes microseconds, and a block of transformers takes a hundred of
them. The text models in `BASES` have one form:

    x += mixer(norm(x))      attention, or a mixer of `recurrent`
    x += mlp(norm(x))        gated MLP, or experts chosen by a router

`replace_bases` replaces such a model, without its output head, by a `BlockStack` that takes over its weights: residual
and norm are one kernel. Attention is that of `joined_attention`. On CPUs whose linear layers are in panels, small steps
in bf16 run as one kernel launch (`BlockDecode`). A model that differs anywhere stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from chatcache_kernels.types import KVPages
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from chatcache.model.attention import AttentionBackend, AttentionStep
from chatcache.model.linear import LinearFactory, PanelLinear, PanelLinearFactory
from chatcache.model.transformers.attention import Probe, current_step
from chatcache.model.transformers.experts import GroupedExperts
from chatcache.model.transformers.joined_attention import JoinedAttention
from chatcache.model.transformers.modules import PROBES, FusedMLP, FusedNorm, PackedModule, UnknownFormError
from chatcache.model.transformers.recurrent import GatedDeltaNet, Mixer

if TYPE_CHECKING:
    from chatcache_kernels.cpu.blocks import (
        AttentionWeights,
        BlockDecoder,
        DeltaWeights,
        ExpertsWeights,
        MLPWeights,
        StackWeights,
    )
    from chatcache_kernels.cpu.decoder import PackedLinear

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


class NoPanelsError(Exception):
    """A layer whose weights the kernel does not support."""


class BlockDecode:
    """Runs the steps of a `BlockStack` that fit the kernel."""

    def __init__(self) -> None:
        self._made_for: tuple[object, ...] = ()  # the memory that the kernel addresses
        self._decoder: BlockDecoder | None = None

    def run(self, stack: Any, x: Tensor, rotation: tuple[Tensor, Tensor], step: AttentionStep) -> Tensor | None:
        """Return the final hidden states, [T, hidden], or None if the kernel does not fit.

        Shapes: x [T, hidden], rotation (cos, sin) [T, rotary_dim / 2].
        """
        from chatcache_kernels import cpu

        if step.kernels is not cpu or len(step.stores) != 1 or len(step.batches) != 1:
            return None
        tensors = step.states.tensors if step.states is not None else ()
        if len(self._made_for) != 2 or step.pages is not self._made_for[0] or tensors is not self._made_for[1]:
            self._made_for, self._decoder = (step.pages, tensors), _make_decoder(stack, step, tensors)
        if self._decoder is None or not self._decoder.can_run(step.batch, len(x)):
            return None
        if step.states is not None:
            step.states.is_changed = True
        return self._decoder.run(x, rotation, step.batch, step.states.slots if step.states is not None else None)


def _make_decoder(stack: Any, step: AttentionStep, tensors: Sequence[Tensor]) -> BlockDecoder | None:
    """Return the kernel for the pages and states of a step, None if it does not support the model."""
    from chatcache_kernels.cpu.blocks import BlockDecoder

    pages = step.pages
    places = [place for place in step.places if place is not None]
    in_order = all(place.index == index and place.has_own_kv for index, place in enumerate(places))
    try:
        weights = _stack_weights(stack)
    except NoPanelsError:
        return None
    if not in_order or not isinstance(pages, KVPages) or not weights.is_supported(pages):
        return None
    mixers = [block.mixer for block in stack.blocks if isinstance(block.mixer, GatedDeltaNet)]
    numbers = [mixer.first_state + part for mixer in mixers for part in range(2)]
    return BlockDecoder(weights, pages, [tensors[number] for number in numbers])


def _stack_weights(stack: Any) -> StackWeights:
    """Return the weights of all blocks. Raises: NoPanelsError."""
    from chatcache_kernels.cpu.blocks import BlockWeights, StackWeights

    norms = [stack.norm, *(norm for block in stack.blocks for norm in (block.mixer_norm, block.mlp_norm))]
    if any(norm.eps != stack.norm.eps for norm in norms):
        raise NoPanelsError
    blocks = [
        BlockWeights(
            block.mixer_norm.weight,
            _delta(block.mixer) if isinstance(block.mixer, GatedDeltaNet) else _attention(block.mixer),
            block.mlp_norm.weight,
            _mlp(block.mlp) if isinstance(block.mlp, FusedMLP) else _experts(block.mlp),
        )
        for block in stack.blocks
    ]
    return StackWeights(blocks, stack.norm.weight, stack.norm.eps, len(stack.frequencies))


def _panels(layer: Any) -> PackedLinear:
    """Return the panels of a linear layer. Raises: NoPanelsError."""
    from chatcache_kernels.cpu.decoder import PackedLinear

    product = layer.product if isinstance(layer, PackedModule) else layer
    if not isinstance(product, PanelLinear):
        raise NoPanelsError
    return PackedLinear(product.panels, product.bias, compact=product.compact)


def _attention(mixer: Any) -> AttentionWeights:
    from chatcache_kernels.cpu.blocks import AttentionWeights

    if mixer.head_norms is None or mixer.v_norm is not None or mixer.rotation == "none":
        raise NoPanelsError
    if mixer.softcap is not None or mixer.sinks is not None:
        raise NoPanelsError
    qkv, out = _panels(mixer.qkv_proj), _panels(mixer.o_proj)
    return AttentionWeights(qkv, out, mixer.head_norms, mixer.num_heads, mixer.scale, mixer.window)


def _delta(mixer: GatedDeltaNet) -> DeltaWeights:
    from chatcache_kernels.cpu.blocks import DeltaWeights

    return DeltaWeights(
        _panels(mixer.in_proj), _panels(mixer.out_proj), mixer.conv_weight, mixer.conv_bias, mixer.has_silu,
        mixer.decay, mixer.dt_bias, mixer.norm.weight, mixer.norm.variance_epsilon, mixer.num_k_heads,
        mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim,
    )  # fmt: skip


def _mlp(mlp: Any) -> MLPWeights:
    from chatcache_kernels import cpu
    from chatcache_kernels.cpu.blocks import MLPWeights

    if mlp.activate is not cpu.silu_mul:
        raise NoPanelsError
    return MLPWeights(_panels(mlp.gate_up_proj), _panels(mlp.down_proj))


def _experts(mlp: Any) -> ExpertsWeights:
    """Return the weights of `RoutedExperts`. Raises: NoPanelsError."""
    from chatcache_kernels import cpu
    from chatcache_kernels.cpu.blocks import ExpertsWeights

    experts, shared, gate = mlp.experts, mlp.shared_expert, mlp.shared_gate_weight
    if experts.activate is not cpu.silu_mul or {experts.up.form, experts.down.form} != {"panels"}:
        raise NoPanelsError
    if (shared is None) != (gate is None) or not isinstance(shared, FusedMLP | None):
        raise NoPanelsError
    return ExpertsWeights(
        _panels(mlp.router), experts.up, experts.down, mlp.num_chosen, mlp.is_normalised,
        None if shared is None else _mlp(shared), None if gate is None else gate.detach().reshape(-1),
    )  # fmt: skip
