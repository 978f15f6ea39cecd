"""Small models with FP8 weights, written in the formats of published checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from chatcache_kernels.fp8 import DTYPE, LARGEST, Fp8Weight, quantise_rows
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.families import VOCAB, save_random

BLOCK = 128
FIELDS = {
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    },
}


def save_plain(folder: Path, **options: Any) -> Path:
    """Save a random model whose layers have several blocks, and key heads that end within one."""
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": VOCAB}
    torch.manual_seed(3)
    save_random(transformers.Qwen3Config(**{**sizes, "tie_word_embeddings": True, **options}), folder, std=0.06)
    return folder


def save_fp8(plain: Path, folder: Path, layout: str, skipped: str = "") -> tuple[Path, Path]:
    """Save a model in FP8, and the same weights dequantised; return both folders.

    `layout`: block | tensor | channel. `skipped`: a projection that keeps its type.
    """
    tensors, exact = load_file(plain / "model.safetensors"), {}
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight") or (skipped and skipped in name):
            stored[name] = exact[name] = tensor
            continue
        weight = _quantise(tensor.float(), layout)
        stored[name], exact[name] = weight.numbers, weight.dequantise()
        scale_name = name + ("_scale_inv" if layout == "block" else "_scale")
        stored[scale_name] = weight.scales if layout != "tensor" else weight.scales[0, 0].clone()
        if layout == "tensor":
            stored[name.replace("weight", "input_scale")] = torch.tensor(0.5)
    config = json.loads((plain / "config.json").read_text())
    for name, content, fields in (("fp8", stored, {"quantization_config": FIELDS[layout]}), ("exact", exact, {})):
        (folder / name).mkdir(parents=True)
        save_file(content, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps({**config, **fields}))
    return folder / "fp8", folder / "exact"


def _quantise(weight: Tensor, layout: str) -> Fp8Weight:
    num_outputs, num_inputs = weight.shape
    if layout == "channel":
        return Fp8Weight(*quantise_rows(weight, num_inputs), 1, num_inputs)
    if layout == "tensor":
        scale = weight.abs().max() / LARGEST
        return Fp8Weight((weight / scale).to(DTYPE), scale.expand(num_outputs, 1), 1, num_inputs)
    rows, columns = -(-num_outputs // BLOCK), -(-num_inputs // BLOCK)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = weight[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            scales[row, column] = block.abs().max() / LARGEST
    spread = Fp8Weight(torch.ones_like(weight).to(DTYPE), scales, BLOCK, BLOCK).dequantise()
    return Fp8Weight((weight / spread).to(DTYPE), scales, BLOCK, BLOCK)
