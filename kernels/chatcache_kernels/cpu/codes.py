"""Weights as whole numbers of 8 bits and a scale for each output, and the codes that `int8` reads of them.

A code is a sign bit and 7 bits of magnitude; two rows of a tile interleave, eight codes each, as widening takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .matmul import PANEL

LARGEST = 127  # magnitude of a code


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return (numbers [out, in] int8, scales [out] float32): the nearest multiples of a 127th of a row's largest.

    A row that holds what is not finite gets a scale that is not a number.
    """
    numbers, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    rows = max(1, (1 << 20) // max(1, weight.shape[1]))
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows].float()
        largest = part.abs().amax(1) if part.numel() else part.new_zeros(len(part))
        scale = torch.where(largest > 0, largest / LARGEST, 1.0)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        numbers[start : start + rows] = (part / scale[:, None]).round_().nan_to_num_(0.0).to(torch.int8)
        scales[start : start + rows] = scale
    return numbers, scales


def pack_numbers(numbers: Tensor) -> Tensor:
    """Return the codes in the order in which the kernel reads them, with zeros up to whole panels: [out, in] int8."""
    rows, columns = (-(-size // PANEL) * PANEL for size in numbers.shape)
    if (rows, columns) != tuple(numbers.shape):
        numbers = functional.pad(numbers, (0, columns - numbers.shape[1], 0, rows - numbers.shape[0]))
    codes = torch.where(numbers < 0, numbers.neg() | -128, numbers).view(torch.uint8)
    # out = (panel, tile, 4 runs of 4), in = (step, 8 row pairs, 2 rows, 2): a row is 16 outputs of 2 inputs
    parts = codes.view(rows // PANEL, 2, 4, 4, columns // PANEL, 8, 2, 2)
    return parts.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(rows // PANEL, columns // PANEL, 2, 512)
