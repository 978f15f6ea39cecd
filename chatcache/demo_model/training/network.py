"""The network in training: the tensors and names of `LlamaForCausalLM`, and their export.

Rows of one batch hold one dialogue each, padded on the right. Causal attention never looks right, so no
mask is needed, the fused kernel applies, and no dialogue can see another one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from chatcache.demo_model.training.corpus import SPECIAL


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Say how large the model is; the defaults give 3.3 M parameters."""

    vocab_size: int = 1536
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5

    def to_hf(self, *, bos: int, eos: int, pad: int) -> dict[str, Any]:
        """Return the `config.json` that makes `transformers` build this very model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
        }


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [max_positions, head_dim], in the half-split layout of Llama."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float64), shape.rope_theta**-steps)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys [B, H, T, D] by their positions."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.num_kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        rows, length, _ = x.shape
        q, k, v = (
            project(x).view(rows, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return mixed


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, T, hidden] to [B, T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Everything below the head, under the name that checkpoints give it (`model.`)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, T] to final hidden states [B, T, hidden]."""
        length = tokens.shape[1]
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[:length].to(torch.bfloat16), self.sin[:length].to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """The language model; `state_dict()` is a Llama checkpoint with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Trunk(shape)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.num_layers) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over `targets` [B, T] that are not -100."""
        hidden = self.model(tokens)
        logits = functional.linear(hidden, self.model.embed_tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def export(weights: Mapping[str, Tensor], shape: Shape, folder: pathlib.Path) -> None:
    """Write weights (bf16), `config.json` and `generation_config.json`.

    Each file gets its final name when it is complete.
    """
    pad, _, eos = (SPECIAL.index(token) for token in SPECIAL)  # the trainer numbers them first, in this order
    tensors = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    whole = folder / "model.safetensors"
    partial = whole.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(whole)
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False, "max_new_tokens": 256}
    for name, content in (
        ("config.json", shape.to_hf(bos=pad, eos=eos, pad=pad)),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
