"""Steps of few tokens on a CPU: the whole decoder in one launch, where its kernels take the model.

At decode a kernel runs for microseconds, and calling it through torch takes as long. So a model whose layers are all
`PanelLinear` or all `Int8Linear` goes through `chatcache_kernels.cpu.decoder` for steps of up to 64 tokens, in rows of
few. SmolLM2-135M shape, bf16, 2 cores with AMX: a step of one token took 22 ms op by op, of which the products took 14
(8.5 at read bandwidth), attention 1.5, norms, rotation and activation 2.3, the sampler 0.7, and Python between them the
rest. On one thread the CPU time of a step went from 37 to 23 ms with batch 1, from 43 to 27 with 8, from 62 to 44 with
32; with 8-bit weights, in another run, from 24 to 16, from 26 to 19 and from 62 to 44.

Later, weights on huge pages and the log-sum-exp in a kernel of its own: a step of 32 tokens of 96-token contexts takes
37 ms on one thread, of which the layers' products take 19.4, the head's 5.0, attention 9.7 (a row's first 64 keys
are not prefetched), rotation and page writes 1.6, norms 0.7, the activation 0.6. Two threads wait for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from chatcache.model.linear import PanelLinear, Product
from chatcache.model.quantised import Int8Linear

if TYPE_CHECKING:
    from chatcache_kernels.cpu.decoder import DecoderWeights, FewTokens, Panels
    from chatcache_kernels.types import KVPages

    from chatcache.model.attention import AttentionStep
    from chatcache.model.decoder import Layer


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
    from chatcache_kernels.cpu.decoder import DecoderWeights, LayerWeights

    products = [head, *(each for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down))]
    panels = [each for each in map(_panels, products) if each is not None]
    if len(panels) < len(products):
        return None
    blocks = []
    for layer, qkv, out, gate_up, down in zip(layers, *(panels[1 + place :: 4] for place in range(4)), strict=True):
        blocks.append(
            LayerWeights(layer.attention_norm, qkv, layer.head_norms, out, layer.mlp_norm, gate_up, down, layer.window)
        )
    cos, sin = (each.float().contiguous() for each in turns)
    return ShortSteps(DecoderWeights(embedding, cos, sin, blocks, norm, panels[0], eps, scale, num_heads))


def _panels(product: Product) -> Panels | None:
    """Return a layer as the kernels of few tokens take it, None where they do not."""
    from chatcache_kernels.cpu.decoder import Panels

    if isinstance(product, PanelLinear):
        return Panels(product.panels, product.bias)
    if isinstance(product, Int8Linear) and product.whole:
        return Panels(product.codes, product.bias, product.scales)
    return None
