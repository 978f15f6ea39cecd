"""The native decoder family: pre-norm, rotary, grouped-query, gated MLP (Llama, Mistral, Qwen2, Qwen3, Phi-3).

A step runs flattened: all rows' new tokens as one [T, hidden]. Only attention knows where a row begins.
Symbols: T tokens, U drawn tokens, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from chatcache_kernels.types import HeadNorms
from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.model.arch import Architecture
from chatcache.model.attention import AttentionStep, Geometry
from chatcache.model.linear import MakeLinear, Product, fast_linear
from chatcache.model.rope import rope_tables
from chatcache.model.short import ShortSteps, short_steps
from chatcache.model.weights import WeightSource

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights. `qkv` gives H query, Hkv key and Hkv value heads side by side; `gate_up` gate first."""

    attention_norm: Tensor
    qkv: Product
    head_norms: HeadNorms | None
    out: Product
    mlp_norm: Tensor
    gate_up: Product
    down: Product
    window: int | None


class Decoder:
    """A loaded model of the native family. Satisfies `attention.Network`."""

    def __init__(
        self,
        arch: Architecture,
        geometry: Geometry,
        embedding: Tensor,
        layers: list[Layer],
        norm: Tensor,
        head: Product,
    ) -> None:
        self.arch = arch
        self.geometry = geometry
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._scale = arch.head_dim**-0.5
        self._cos = self._sin = torch.empty(0, arch.rope.dim // 2)
        self._short: ShortSteps | None = None

    def extend_positions(self, length: int) -> None:
        """Make the rotary tables for contexts of up to `length` tokens."""
        cos, sin = rope_tables(self.arch.rope, length, self.arch.max_position)
        self._cos, self._sin = cos.to(self.geometry.device), sin.to(self.geometry.device)
        self._short = short_steps(
            self._layers, self._head, self._embedding, self._norm, self.arch.rms_norm_eps, self._scale,
            self.arch.num_heads, (self._cos, self._sin),
        )  # fmt: skip

    def forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        """Return logits [U, V] of the tokens at `drawn`, of all if None. Shapes: tokens, positions [T]; drawn [U]."""
        logits = self._short.run(tokens, positions, step, drawn) if self._short is not None else None
        return self._head(self._states(tokens, positions, step, drawn)) if logits is None else logits

    def forward_parts(
        self, tokens: Tensor, positions: Tensor, step: AttentionStep, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield the logits of each part of the tokens in turn, from one pass over the layers."""
        states = self._states(tokens, positions, step, torch.cat(list(parts)))
        for part in torch.split(states, [len(part) for part in parts]):
            yield self._head(part)

    def _states(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        """Return what the head reads, [U, hidden]."""
        ops, eps = step.kernels, self.arch.rms_norm_eps
        cos, sin = self._cos[positions], self._sin[positions]
        norms = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        x = self._embedding[tokens]
        h = ops.rms_norm(x, self._layers[0].attention_norm, eps)
        for index, (layer, norm) in enumerate(zip(self._layers, norms, strict=True)):
            mixed = self._attend(layer, index, h, cos, sin, step)
            if index == len(norms) - 1 and drawn is not None:  # nothing later looks at the tokens that are not drawn
                mixed, x = mixed[drawn], x[drawn]
            h, x = ops.add_rms_norm(layer.out(mixed), x, layer.mlp_norm, eps)
            h, x = ops.add_rms_norm(layer.down(ops.silu_mul(layer.gate_up(h))), x, norm, eps)
        return h

    def _attend(self, layer: Layer, index: int, h: Tensor, cos: Tensor, sin: Tensor, step: AttentionStep) -> Tensor:
        """Return the heads' outputs side by side. Shapes: h [T, hidden] -> [T, H * D]."""
        arch, ops = self.arch, step.kernels
        heads = layer.qkv(h).view(len(h), -1, arch.head_dim)
        q, k, v = torch.split(heads, [arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
        q = ops.rope_write(q, k, v, cos, sin, step.pages, index, step.batch.slots, layer.head_norms)
        out = ops.paged_attention(q, step.pages, index, step.batch, self._scale, layer.window)
        return out.view(len(h), -1)


def load_decoder(
    arch: Architecture,
    weights: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    make_linear: MakeLinear = fast_linear,
) -> Decoder:
    """Build a decoder from a folder's tensors, converted and fused as they are copied.

    Raises: ModelFolderError for a tensor that is missing or of the wrong shape.
    """
    take = _Taker(weights, dtype, device, make_linear)
    a = arch
    embedding = take("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
    layers = []
    for index in range(a.num_layers):
        progress(index / a.num_layers, f"layer {index + 1} of {a.num_layers}")
        layers.append(_load_layer(a, index, take))
    norm = take("model.norm.weight", a.hidden_size)
    head = make_linear(embedding if a.tied else take("lm_head.weight", a.vocab_size, a.hidden_size), None)
    geometry = Geometry(a.num_layers, a.num_heads, a.num_kv_heads, a.head_dim, a.vocab_size, dtype, device)
    return Decoder(a, geometry, embedding, layers, norm, head)


def _load_layer(a: Architecture, index: int, take: _Taker) -> Layer:
    base = f"model.layers.{index}"
    widths = {"q_proj": a.num_heads * a.head_dim, "k_proj": a.num_kv_heads * a.head_dim}
    widths["v_proj"] = widths["k_proj"]
    if a.fused:
        widths = {"qkv_proj": sum(widths.values())}
    gates = dict.fromkeys(("gate_proj", "up_proj"), a.intermediate_size)
    if a.fused:
        gates = {"gate_up_proj": 2 * a.intermediate_size}
    return Layer(
        attention_norm=take(f"{base}.input_layernorm.weight", a.hidden_size),
        qkv=take.linear(f"{base}.self_attn", widths, a.hidden_size, a.qkv_bias),
        head_norms=_head_norms(a, f"{base}.self_attn", take),
        out=take.linear(f"{base}.self_attn", {"o_proj": a.hidden_size}, a.num_heads * a.head_dim, a.out_bias),
        mlp_norm=take(f"{base}.post_attention_layernorm.weight", a.hidden_size),
        gate_up=take.linear(f"{base}.mlp", gates, a.hidden_size, a.mlp_bias),
        down=take.linear(f"{base}.mlp", {"down_proj": a.hidden_size}, a.intermediate_size, a.mlp_bias),
        window=a.windows[index],
    )


def _head_norms(a: Architecture, base: str, take: _Taker) -> HeadNorms | None:
    if not a.qk_norm:
        return None
    q, k = (take(f"{base}.{name}.weight", a.head_dim) for name in ("q_norm", "k_norm"))
    return HeadNorms(q, k, a.rms_norm_eps)


class _Taker:
    """Copies tensors out of the mapped files."""

    def __init__(
        self, weights: WeightSource, dtype: torch.dtype, device: torch.device, make_linear: MakeLinear
    ) -> None:
        self.weights, self.dtype, self.device = weights, dtype, device
        self.make_linear = make_linear

    def __call__(self, name: str, *shape: int) -> Tensor:
        return self._into([self.weights.get(name, shape)])

    def linear(self, base: str, widths: dict[str, int], num_inputs: int, bias: bool) -> Product:
        """Return one layer for several projections, stacked in the order given."""
        get = self.weights.get
        weight = self._into([get(f"{base}.{name}.weight", (width, num_inputs)) for name, width in widths.items()])
        if not bias:
            return self.make_linear(weight, None)
        biases = [get(f"{base}.{name}.bias", (width,)) for name, width in widths.items()]
        return self.make_linear(weight, self._into(biases))

    def _into(self, parts: list[Tensor]) -> Tensor:
        """Stack along the first dimension in one allocation, never aliasing the file."""
        height = sum(len(part) for part in parts)
        whole = torch.empty((height, *parts[0].shape[1:]), dtype=self.dtype, device=self.device)
        for place, part in zip(torch.split(whole, [len(part) for part in parts]), parts, strict=True):
            place.copy_(part)
        return whole


def check_unused(weights: WeightSource, arch: Architecture, folder: Path) -> None:
    """Refuse a folder with more layers than its config says: its text would be silently wrong.

    Raises: ModelFolderError.
    """
    name = f"model.layers.{arch.num_layers}.input_layernorm.weight"
    if name in weights:
        raise ModelFolderError(f"{folder / 'config.json'}: num_hidden_layers is {arch.num_layers}, but {name} exists")
