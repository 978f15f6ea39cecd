"""Small steps of a `BlockStack` in bf16 as one kernel launch, on CPUs whose linear layers are in panels.

At decode, a kernel takes microseconds, and calling it through torch takes as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from chatcache_kernels.types import KVPages
from torch import Tensor

from chatcache.model.attention import AttentionStep
from chatcache.model.linear import PanelLinear
from chatcache.model.transformers.modules import FusedMLP, PackedModule
from chatcache.model.transformers.recurrent import GatedDeltaNet

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
