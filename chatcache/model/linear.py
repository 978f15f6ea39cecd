"""y = x W^T + b, with the weight laid out once for the machine it runs on.

Weights in 8 bits with a scale for each output (`--quantization int8`); activations, embeddings and norms stay.

Each linear layer, the output head included, is quantised as soon as it is read, so a model is never in memory as it was
on disk. A head tied to the embeddings gets 8 bits of its own beside them. There is one form of a weight for any number
of tokens, and no bit of a token's result depends on the tokens beside it, so `deterministic` needs nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from chatcache.errors import ModelFolderError
from chatcache.model.host_memory import HostArena
from chatcache.model.loading.config_reader import Architecture

log = logging.getLogger(__name__)

Linear = Callable[[Tensor], Tensor]
"""A linear layer: [T, in] -> [T, out]."""

LinearFactory = Callable[[Tensor, Tensor | None], Linear]
"""Makes a layer of a weight [out, in] and perhaps a bias [out]."""


class PanelLinear:
    """A layer that keeps its weight a second time, in the panels of `chatcache_kernels.cpu.matmul`, for few tokens."""

    __slots__ = ("bias", "panels", "product")

    def __init__(self, product: Linear, panels: Tensor, bias: Tensor | None) -> None:
        self.product, self.panels, self.bias = product, panels, bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)


class DualLayoutLinearFactory:
    """Makes a model's layers, for many tokens by oneDNN and, where the CPU's kernels take the weight, for few."""

    def __init__(self) -> None:
        self._arena = HostArena()

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        from chatcache_kernels.cpu.matmul import can_pack, pack_weight

        panels = pack_weight(weight, self._arena.copy) if can_pack(weight) else None
        product = fast_linear(weight, bias)
        return product if panels is None else PanelLinear(product, panels, bias)


def fast_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Return a linear layer for inference.

    On CPUs the weight is reordered by oneDNN once, which streams it 1.5 to 3 times as fast as `F.linear` at small T;
    where that operator is missing or disagrees with `F.linear`, the plain weight is kept.
    """
    return packed_linear(weight, bias) or (lambda x: functional.linear(x, weight, bias))


def packed_linear(weight: Tensor, bias: Tensor | None) -> Linear | None:
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


QUANTIZATIONS = ("none", "int8")


class Int8Linear:
    """A linear layer for inference. Shapes: codes, scales as `chatcache_kernels.cpu.int8` has them, bias [out]."""

    __slots__ = ("bias", "codes", "is_unpadded", "scales")

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: HostArena) -> None:
        from chatcache_kernels.cpu.int8 import pack_numbers, quantise

        numbers, self.scales = quantise(weight)
        self.codes = arena.copy(pack_numbers(numbers))
        self.bias = None if bias is None else bias.float()
        self.is_unpadded = self.codes.numel() == weight.numel()  # nothing was added to fill panels up

    def __call__(self, x: Tensor) -> Tensor:
        from chatcache_kernels.cpu.int8 import multiply

        return multiply(x, self.codes, self.scales, self.bias)


class Int8LinearFactory:
    """Makes the layers of one model and counts their weights and bytes."""

    def __init__(self) -> None:
        self.num_weights = self.num_bytes = 0
        self._arena = HostArena()

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
        layer = Int8Linear(weight, bias, self._arena)
        self.num_weights += weight.numel()
        self.num_bytes += layer.codes.nbytes + layer.scales.nbytes
        return layer


def check_quantization(name: str, device: torch.device) -> None:
    """Let `--quantization` pass where it can be had.

    Raises: ModelFolderError for what is neither none nor int8, or what this device does not have.
    """
    if name not in QUANTIZATIONS:
        raise ModelFolderError(f"quantization {name!r} is not supported; choose none or int8")
    if name != "none" and device.type != "cpu":
        raise ModelFolderError(
            f"quantization {name} works on CPUs only so far, and this model would run on {device}; choose none, "
            f"or device cpu"
        )


def weight_sizes(
    num_parameters: int, dtype: torch.dtype, arch: Architecture | None, int8: Int8LinearFactory | None
) -> tuple[int, int]:
    """Return how many bytes of weights are held, second forms not counted, and how many of them every step reads: all
    but an embedding table that serves look-ups alone. `arch` is None for a model of other people's modules."""
    held = num_parameters * dtype.itemsize
    if arch is None:
        return held, held
    table = arch.vocab_size * arch.hidden_size
    if int8 is None:
        return held, held - (0 if arch.tied else table * dtype.itemsize)
    held += int8.num_bytes - (int8.num_weights - (table if arch.tied else 0)) * dtype.itemsize
    return held, held - table * dtype.itemsize
