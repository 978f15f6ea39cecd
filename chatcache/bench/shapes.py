"""Models with random weights in the shapes of known models, for use without a download."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from chatcache.errors import ModelFolderError

STD = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of a Llama or Qwen3 model."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    tied: bool
    rope_theta: float
    qk_norm: bool = False


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 16, 512, 2048, True, 10_000.0),
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 64, 49_152, 8192, True, 100_000.0),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151_936, 40_960, True, 1_000_000.0, qk_norm=True),
    "llama3-8b": Shape(4096, 14_336, 32, 32, 8, 128, 128_256, 8192, False, 500_000.0),
}


def write_model(shape: Shape, folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
    """Write `config.json` and `model.safetensors` with N(0, 0.02) weights; no tokenizer."""
    write_config(shape, folder, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(size, dtype=dtype)
        if len(size) == 1
        else torch.empty(size, dtype=dtype).normal_(0.0, STD, generator=generator)
        for name, size in _tensor_shapes(shape).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_config(shape: Shape, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write only `config.json`, for use with `RandomWeights`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape, dtype), indent=2), encoding="utf-8")


class RandomWeights:
    """Random weights drawn on the device when they are requested: 8 B parameters take seconds.

    `std`: standard deviation of the matrices. Implements `model.weights.WeightSource`. The same seed draws the same
    weights on the same kind of device, in any order of requests.
    """

    def __init__(
        self, shape: Shape, device: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, std: float = STD
    ) -> None:
        self._shape, self._device, self._dtype, self._seed, self._std = shape, device, dtype, seed, std

    @cached_property
    def _sizes(self) -> dict[str, tuple[int, ...]]:
        return _tensor_shapes(self._shape)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(size) for size in self._sizes.values())

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Draw one tensor.

        Raises: ModelFolderError for a tensor that is not part of this shape of model.
        """
        if self._sizes.get(name) != shape:
            raise ModelFolderError(f"tensor {name}: random weights have shape {self._sizes.get(name)}, not {shape}")
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        own = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:7], "little")
        generator = torch.Generator(self._device).manual_seed(own)
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0.0, self._std, generator=generator)

    def digest(self) -> str:
        """Return a hex digest of everything that determines the weights."""
        facts = (self._shape, self._device, self._dtype, self._seed, self._std)
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def _config(shape: Shape, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the checkpoint, by its transformers name."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, shape.hidden)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        sizes |= {
            prefix + "input_layernorm.weight": (shape.hidden,),
            prefix + "self_attn.q_proj.weight": (queries, shape.hidden),
            prefix + "self_attn.k_proj.weight": (keys, shape.hidden),
            prefix + "self_attn.v_proj.weight": (keys, shape.hidden),
            prefix + "self_attn.o_proj.weight": (shape.hidden, queries),
            prefix + "post_attention_layernorm.weight": (shape.hidden,),
            prefix + "mlp.gate_proj.weight": (shape.intermediate, shape.hidden),
            prefix + "mlp.up_proj.weight": (shape.intermediate, shape.hidden),
            prefix + "mlp.down_proj.weight": (shape.hidden, shape.intermediate),
        }
        if shape.qk_norm:
            sizes |= {
                prefix + "self_attn.q_norm.weight": (shape.head_dim,),
                prefix + "self_attn.k_norm.weight": (shape.head_dim,),
            }
    sizes["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab_size, shape.hidden)
    return sizes
