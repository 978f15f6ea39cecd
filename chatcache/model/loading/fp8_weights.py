"""FP8 checkpoints: how `config.json` describes them, and their tensors.

    quant_method        weights                       scales
    fp8                 float8_e4m3fn [out, in]       weight_scale_inv [out / 128, in / 128], or weight_scale as below
    compressed-tensors  float8_e4m3fn [out, in]       weight_scale [out, 1], [1], or of blocks

A weight is numbers x scales, whatever the name of the scales. Scales of activations are not read: activations are
quantised by their own values. Modules that a checkpoint leaves unquantised are those without scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from chatcache_kernels.fp8 import DTYPE, Fp8Weight
from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.model.loading.weights import Part, Weights, WeightSource

FIELD = "quantization_config"
SCALES = ("_scale_inv", "_scale")  # after the name of the weight
UNREAD = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """`block`: number of outputs and inputs that share a scale; None: all inputs, and one output or all."""

    block: tuple[int, int] | None


def read_fp8_format(config: dict[str, Any], where: Path) -> Fp8Format | None:
    """Return the format of an FP8 checkpoint, None if the weights are not FP8 or in no format that is read.

    Raises: ModelFolderError naming the field whose value is invalid.
    """
    fields = config.get(FIELD)
    if not isinstance(fields, dict):
        return None
    if fields.get("quant_method") == "fp8":
        return Fp8Format(_block(fields.get("weight_block_size"), f"{where}: {FIELD}.weight_block_size"))
    if fields.get("quant_method") != "compressed-tensors" or not isinstance(fields.get("config_groups"), dict):
        return None
    schemes = [group.get("weights") or {} for group in fields["config_groups"].values()]
    strategies = {scheme.get("strategy") for scheme in schemes}
    is_fp8 = all(scheme.get("type") == "float" and scheme.get("num_bits") == 8 for scheme in schemes)
    if not is_fp8 or not (strategies <= {"tensor", "channel"} or strategies == {"block"}):
        return None
    name = f"{where}: {FIELD}.config_groups.weights.block_structure"
    blocks = {_block(scheme.get("block_structure"), name) for scheme in schemes}
    return Fp8Format(blocks.pop()) if len(blocks) == 1 else None


def _block(value: Any, name: str) -> tuple[int, int] | None:
    """Return the size of a block. Raises: ModelFolderError that begins with `name`."""
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)):
        raise ModelFolderError(f"{name} must be two positive integers, got {value!r:.60}")
    return value[0], value[1]


def dequantise_all(weights: Weights, layout: Fp8Format, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all tensors of an FP8 checkpoint but the scales, with the dequantised ones in `dtype`.

    Raises: as `Fp8Weights.get`.
    """
    found, fp8 = {}, Fp8Weights(weights, layout)
    for name in weights.names():
        if not name.endswith((*(f"weight{suffix}" for suffix in SCALES), *UNREAD)):
            shape = weights.shape(name)
            weight = fp8.get_fp8(name, shape)
            found[name] = fp8.get(name, shape) if weight is None else weight.dequantise().to(dtype)
    return found


class Fp8Weights:
    """Tensors of an FP8 checkpoint: dequantised to float32, or as they are."""

    def __init__(self, weights: WeightSource, layout: Fp8Format) -> None:
        self._weights = weights
        self._layout = layout
        self.num_parameters = weights.num_parameters

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """Return one tensor, dequantised. Raises: as `WeightSource.get`, and for FP8 numbers without scales."""
        weight = self.get_fp8(name, shape)
        if weight is not None:
            return weight.dequantise() if part is None else part(weight.dequantise())
        tensor = self._weights.get(name, shape, part)
        if tensor.itemsize == 1:
            raise ModelFolderError(f"tensor {name} is {tensor.dtype}, and tensor {name}_scale_inv is missing")
        return tensor

    def get_fp8(self, name: str, shape: tuple[int, ...]) -> Fp8Weight | None:
        """Return an FP8 weight, None if the tensor has no scales. Raises: as `WeightSource.get`."""
        scale_name = next((name + suffix for suffix in SCALES if name + suffix in self._weights), None)
        if scale_name is None:
            return None
        numbers = self._weights.get(name, shape)
        if numbers.dtype != DTYPE:
            raise ModelFolderError(f"tensor {name} is {numbers.dtype}, and {scale_name} exists; expected {DTYPE}")
        if len(shape) != 2:
            raise ModelFolderError(f"tensor {name} has scales and {len(shape)} dimensions; FP8 weights have two")
        num_outputs, num_inputs = shape
        if self._layout.block is None:
            return Fp8Weight(numbers, self._scales_of_outputs(scale_name, num_outputs), 1, num_inputs)
        rows, columns = self._layout.block
        scales = self._weights.get(scale_name, (-(-num_outputs // rows), -(-num_inputs // columns)))
        return Fp8Weight(numbers, scales.float(), rows, columns)

    def digest(self) -> str:
        """Return the digest of the stored tensors."""
        return self._weights.digest()

    def _scales_of_outputs(self, name: str, num_outputs: int) -> Tensor:
        """Return one scale per output, [out, 1], from as many or a single one."""
        problem: ModelFolderError | None = None
        for shape in ((num_outputs, 1), (num_outputs,), (1,), ()):
            try:
                scales = self._weights.get(name, shape)
            except ModelFolderError as error:  # another shape
                problem = problem or error
            else:
                return scales.float().reshape(-1, 1).expand(num_outputs, 1).contiguous()
        raise problem or ModelFolderError(name)
