"""y = x W^T + b, with the weight laid out once for the machine it runs on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from chatcache.model.heap import Arena

log = logging.getLogger(__name__)

Product = Callable[[Tensor], Tensor]
"""A linear layer: [T, in] -> [T, out]."""

MakeLinear = Callable[[Tensor, Tensor | None], Product]
"""Makes a layer of a weight [out, in] and perhaps a bias [out]."""


class PanelLinear:
    """A layer that keeps its weight a second time, in the panels of `chatcache_kernels.cpu.matmul`, for few tokens."""

    __slots__ = ("bias", "panels", "product")

    def __init__(self, product: Product, panels: Tensor, bias: Tensor | None) -> None:
        self.product, self.panels, self.bias = product, panels, bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


class TwofoldLinears:
    """Makes a model's layers, for many tokens by oneDNN and, where the CPU's kernels take the weight, for few."""

    def __init__(self) -> None:
        self._arena = Arena()

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        from chatcache_kernels.cpu.matmul import pack_weight, packs

        panels = pack_weight(weight, self._arena.keep) if packs(weight) else None
        product = fast_linear(weight, bias)
        return product if panels is None else PanelLinear(product, panels, bias)


def fast_linear(weight: Tensor, bias: Tensor | None = None) -> Product:
    """Return a linear layer for inference.

    On CPUs the weight is reordered by oneDNN once, which streams it 1.5 to 3 times as fast as `F.linear` at small T;
    where that operator is missing or disagrees with `F.linear`, the plain weight is kept.
    """
    return packed_product(weight, bias) or (lambda x: functional.linear(x, weight, bias))


def packed_product(weight: Tensor, bias: Tensor | None) -> Product | None:
    """Return the layer over a reordered weight; the given one is let go. None where oneDNN cannot, or not well."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
        return None
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    multiply = torch.ops.mkldnn._linear_pointwise
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        probe = torch.linspace(-1.0, 1.0, weight.shape[1], dtype=torch.float32).to(weight.dtype)[None]
        got = multiply(probe, packed, bias, "none", [], "").float()
        want = functional.linear(probe, weight, bias).float()
    except RuntimeError as error:
        log.info("oneDNN cannot pack a weight %s: %s", tuple(weight.shape), error)
        return None
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    if not (got - want).abs().max() <= tolerance * want.abs().max().clamp(min=1.0):
        return None

    def product(x: Tensor) -> Tensor:
        out: Tensor = multiply(x, packed, bias, "none", [], "")
        return out

    return product
