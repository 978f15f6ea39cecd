"""FP8 (e4m3): weights of linear layers, and keys and values, as all backends share them; quantisation in plain torch.

A number is stored as value / scale, where the largest value that shares the scale becomes 448. Weights share a scale
per output, or in blocks of 128 outputs and 128 inputs. Activations share one per token, or per token and 128 inputs,
so that each scale belongs to a whole number of products. Keys and values share one per token and head: it is known
when they are written, whatever is in their page, and it is a factor of one score or of one weight of the softmax.

    weight  numbers [out, in]          x  numbers [T, in]
            scales  [out / rows, in / columns]     scales  [T, in / columns]

Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; DeepSeek-V3 (blocks of 128).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
TINY = 1e-12  # the smallest maximum that a scale is made for
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """The weight of a linear layer. `rows`, `columns`: number of outputs and inputs that share a scale.

    Shapes: numbers [out, in] float8_e4m3fn, scales [ceil(out / rows), ceil(in / columns)] float32, both contiguous.
    """

    numbers: Tensor
    scales: Tensor
    rows: int
    columns: int

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs."""
        return self.numbers.shape[0]

    @property
    def num_inputs(self) -> int:
        """Return the number of inputs."""
        return self.numbers.shape[1]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the numbers and scales."""
        return self.numbers.nbytes + self.scales.nbytes

    def dequantise(self) -> Tensor:
        """Return the weight in float32, [out, in]."""
        scales = self.scales.repeat_interleave(self.rows, 0)[: self.num_outputs]
        if self.columns < self.num_inputs:
            scales = scales.repeat_interleave(self.columns, 1)[:, : self.num_inputs]
        return self.numbers.float() * scales


def stack(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    """Return the weight of several layers with the same inputs, whose outputs are concatenated.

    Blocks keep their numbers: where a layer ends within a block, fewer outputs share a scale.
    """
    if len(parts) == 1:
        return parts[0]
    rows = math.gcd(*(part.rows for part in parts), *(part.num_outputs for part in parts[:-1]))
    scales = []
    for part in parts:
        narrow = part.scales.repeat_interleave(part.rows // rows, 0)
        scales.append(narrow[: -(-part.num_outputs // rows)])
    numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts]).view(DTYPE)
    return Fp8Weight(numbers, torch.cat(scales), rows, parts[0].columns)


def quantise_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise activations, or a weight with one scale per output; each `group` of a row shares a scale.

    Shapes: x [num_rows, width] -> numbers [num_rows, width] float8_e4m3fn, scales [num_rows, ceil(width / group)].
    """
    num_rows, width = x.shape
    groups = functional.pad(x.float(), (0, -width % group)).view(num_rows, -(-width // group), group)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=TINY)
    inverse = torch.full_like(largest, LARGEST) / largest  # `LARGEST / largest` would round twice
    numbers = (groups * inverse).clamp(-LARGEST, LARGEST).to(DTYPE)
    return numbers.flatten(1)[:, :width].contiguous(), (largest * (1 / LARGEST)).squeeze(-1)


def pack_vectors(x: Tensor) -> Tensor:
    """Quantise vectors and append its scale to each. Shapes: x [..., width] -> [..., width + SCALE_BYTES] uint8."""
    numbers, scales = quantise_rows(x.reshape(-1, x.shape[-1]), x.shape[-1])
    return torch.cat((numbers.view(torch.uint8), scales.view(torch.uint8)), -1).view(*x.shape[:-1], -1)


def unpack_vectors(packed: Tensor) -> Tensor:
    """Return the vectors of `pack_vectors`. Shapes: packed [..., width + SCALE_BYTES] uint8 -> [..., width] float32."""
    numbers, scales = packed[..., :-SCALE_BYTES].contiguous(), packed[..., -SCALE_BYTES:].contiguous()
    return numbers.view(DTYPE).float() * scales.view(torch.float32)


def multiply(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias of quantised activations, summed in float32.

    Shapes: x [num_tokens, in], bias [out] -> [num_tokens, out].
    """
    numbers, scales = quantise_rows(x, weight.columns)
    tokens = Fp8Weight(numbers, scales, 1, weight.columns).dequantise()
    return multiply_few_rows(tokens, weight, bias).to(x.dtype)


def multiply_few_rows(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias of activations as they are, summed in float32.

    Shapes: x [num_tokens, in], bias [out] -> [num_tokens, out].
    """
    return functional.linear(x.float(), weight.dequantise(), None if bias is None else bias.float()).to(x.dtype)
