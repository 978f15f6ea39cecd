"""Steps of few tokens on a CPU: the whole decoder in one launch, where its kernels take the model.

At decode a kernel runs for microseconds, and calling it through torch takes as long. So a model whose layers are all
`PanelLinear` goes through `chatcache_kernels.cpu.decoder` for steps of up to 64 tokens, in rows of few. SmolLM2-135M
shape, bf16, 2 cores with AMX, busy machine: a step of one token took 22 ms op by op, of which the products took 12 (8.5
at read bandwidth), attention 1.5, norms, rotation and activation 2.3, the sampler 0.7, and calling all of them the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chatcache.model.linear import PanelLinear, Product

if TYPE_CHECKING:
    from chatcache_kernels.cpu.decoder import DecoderWeights, FewTokens, Panels
    from chatcache_kernels.types import KVPages

    from chatcache.model.attention import AttentionStep
    from chatcache.model.decoder import Layer

MAX_BYTES = 2 * 2**30  # of weights kept twice; beyond, calls cost little beside reading weights


class ShortSteps:
    """Runs what it can of a decoder's steps. Satisfies nothing but `Decoder`."""

    def __init__(self, weights: DecoderWeights) -> None:
        self._weights = weights
        self._pages: KVPages | None = None
        self._few: FewTokens | None = None

    def run(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor | None:
        """Return the logits of the drawn tokens, None for a step that it does not take."""
        from chatcache_kernels import cpu
        from chatcache_kernels.cpu.decoder import FewTokens

        if step.kernels is not cpu:
            return None
        if step.pages is not self._pages:
            self._pages = step.pages
            self._few = FewTokens(self._weights, step.pages) if self._weights.fits(step.pages) else None
        if self._few is None or not self._few.takes(step.batch, len(tokens)):
            return None
        return self._few.run(tokens, positions, step.batch, drawn)


def short_steps(
    layers: Sequence[Layer], head: Product, embedding: Tensor, norm: Tensor, eps: float, scale: float, num_heads: int,
    turns: tuple[Tensor, Tensor],
) -> ShortSteps | None:  # fmt: skip
    """Return the steps of a decoder whose layers all keep panels, else None."""
    products = [head, *(each for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down))]
    if not all(isinstance(product, PanelLinear) for product in products):
        return None
    from chatcache_kernels.cpu.decoder import DecoderWeights, LayerWeights

    blocks = [
        LayerWeights(
            layer.attention_norm, _panels(layer.qkv), layer.head_norms, _panels(layer.out), layer.mlp_norm,
            _panels(layer.gate_up), _panels(layer.down), layer.window,
        )
        for layer in layers
    ]  # fmt: skip
    cos, sin = (each.float().contiguous() for each in turns)
    return ShortSteps(DecoderWeights(embedding, cos, sin, blocks, norm, _panels(head), eps, scale, num_heads))


def _panels(product: Product) -> Panels:
    from chatcache_kernels.cpu.decoder import Panels

    assert isinstance(product, PanelLinear)
    return Panels(product.panels, product.bias)
