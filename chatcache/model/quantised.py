"""Weights in 8 bits with a scale for each output (`--quantization int8`); activations, embeddings and norms stay.

Each linear layer, the output head included, is quantised as soon as it is read, so a model is never in memory as it was
on disk. A head tied to the embeddings gets 8 bits of its own beside them. There is one form of a weight for any number
of tokens, and no bit of a token's result depends on the tokens beside it, so `deterministic` needs nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.model.arch import Architecture
from chatcache.model.heap import Arena

QUANTIZATIONS = ("none", "int8")


class Int8Linear:
    """A linear layer for inference. Shapes: codes, scales as `chatcache_kernels.cpu.int8` has them, bias [out]."""

    __slots__ = ("bias", "codes", "scales", "whole")

    def __init__(self, weight: Tensor, bias: Tensor | None, arena: Arena) -> None:
        from chatcache_kernels.cpu.codes import pack_numbers, quantise

        numbers, self.scales = quantise(weight)
        self.codes = arena.keep(pack_numbers(numbers))
        self.bias = None if bias is None else bias.float()
        self.whole = self.codes.numel() == weight.numel()  # nothing was added to fill panels up

    def __call__(self, x: Tensor) -> Tensor:
        from chatcache_kernels.cpu.int8 import multiply

        return multiply(x, self.codes, self.scales, self.bias)


class Int8Linears:
    """Makes the layers of one model and counts their weights and bytes."""

    def __init__(self) -> None:
        self.num_weights = self.num_bytes = 0
        self._arena = Arena()

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
    num_parameters: int, dtype: torch.dtype, arch: Architecture | None, int8: Int8Linears | None
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
