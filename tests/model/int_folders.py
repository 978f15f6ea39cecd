"""Small models with integer weights, written in the formats of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZE = 64  # of a group
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs whose numbers a word holds, from its lowest bits


def _scheme(bits: int, kind: str, **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", **fields}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


FIELDS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "desc_act": False, "sym": False},
    "gptq-8": {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
    "gptq-order": {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": SIZE, "zero_point": True, "version": "gemm"},
    "packed": _scheme(4, "pack-quantized", strategy="group", group_size=SIZE, symmetric=True),
    "packed-zeros": _scheme(4, "pack-quantized", strategy="group", group_size=SIZE, symmetric=False),
    "int8": _scheme(8, "int-quantized", strategy="channel", symmetric=True),
}


def save_int(plain: Path, folder: Path, layout: str, skipped: str = "") -> tuple[Path, Path]:
    """Save a model with integer weights, and the same weights dequantised; return both folders.

    `layout`: a key of FIELDS. `skipped`: a projection that keeps its type.
    """
    generator = np.random.default_rng(5)
    stored: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight") or (skipped and skipped in name):
            stored[name] = exact[name] = tensor
            continue
        tensors, exact[name] = _quantise(tensor.float().numpy(), layout, generator)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{kind}": torch.from_numpy(np.ascontiguousarray(each)) for kind, each in tensors.items()}
    config = json.loads((plain / "config.json").read_text())
    for kind, content, fields in (("int", stored, {"quantization_config": FIELDS[layout]}), ("exact", exact, {})):
        (folder / kind).mkdir(parents=True)
        save_file(content, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps({**config, **fields}))
    return folder / "int", folder / "exact"


def _quantise(
    weight: NDArray[np.float32], layout: str, generator: np.random.Generator
) -> tuple[dict[str, NDArray[Any]], Tensor]:
    """Return the tensors of a weight [out, in], and what they stand for."""
    num_outputs, num_inputs = weight.shape
    fields = FIELDS[layout]
    bits = fields.get("bits") or fields["config_groups"]["group_0"]["weights"]["num_bits"]
    size = num_inputs if layout in ("gptq-8", "int8") else SIZE
    groups = np.arange(num_inputs) // size
    if layout == "gptq-order":
        groups = generator.permutation(groups)
    num_groups = groups.max() + 1
    middle = 2 ** (bits - 1)
    zeros = np.full((num_outputs, num_groups), middle)
    if layout not in ("packed", "int8"):
        zeros += generator.integers(-2, 3, zeros.shape)
        zeros[0] = 0  # stored as the largest number by the first format of GPTQ
    scales = np.stack([np.abs(weight[:, groups == group]).max(axis=1) for group in range(num_groups)], axis=1)
    scales = (scales / (middle - 3)).astype(np.float16)
    numbers = np.rint(weight / scales[:, groups].astype(np.float32)) + zeros[:, groups]
    numbers = numbers.clip(0, 2**bits - 1).astype(np.int64)
    exact = (numbers - zeros[:, groups]).astype(np.float32) * scales[:, groups].astype(np.float32)
    if fields["quant_method"] == "gptq":
        stored_zeros = (zeros - (fields.get("checkpoint_format") != "gptq_v2")) & (2**bits - 1)
        tensors = {
            "qweight": _pack(numbers, bits).T,
            "qzeros": _pack(stored_zeros.T, bits),
            "scales": scales.T,
            "g_idx": groups.astype(np.int32),
        }
    elif layout == "awq":
        order = np.arange(num_outputs).reshape(-1, 8)[:, AWQ_COLUMNS].ravel()
        tensors = {
            "qweight": _pack(numbers.T[:, order], bits),
            "qzeros": _pack(zeros.T[:, order], bits),
            "scales": scales.T,
        }
    elif layout == "int8":
        tensors = {"weight": (numbers - middle).astype(np.int8), "weight_scale": scales}
    else:
        tensors = {
            "weight_packed": _pack(numbers, bits),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if layout == "packed-zeros":
            tensors["weight_zero_point"] = _pack(zeros.T, bits).T
    return tensors, torch.from_numpy(exact)


def _pack(numbers: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """Pack the numbers of each row into 32-bit words, the first into the lowest bits."""
    shifted = numbers.reshape(len(numbers), -1, 32 // bits) << np.arange(0, 32, bits)
    packed: NDArray[np.int32] = shifted.sum(axis=2).astype(np.uint32).view(np.int32)
    return packed
