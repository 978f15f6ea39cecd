"""Native decoder family: Llama, Mistral, Qwen2, Qwen3 and Phi-3.

The architecture is pre-norm with rotary positions, grouped-query attention and a gated MLP. A step runs flattened: the
new tokens of all rows form one [T, hidden] tensor, and only attention distinguishes rows.
Symbols: T tokens, U tokens whose logits are needed, H query heads, Hkv key/value heads, D head size.

On a CPU, steps of up to 64 tokens run as one kernel launch (`FusedDecode`) if all layers are `PanelLinear` or all are
`Int8Linear`. At decode, a kernel takes microseconds, and calling it through torch takes as long. Measured for the shape
of SmolLM2-135M in bf16 with AMX: the CPU time of a step on one thread went from 37 to 23 ms at batch size 1, from 43 to
27 ms at 8 and from 62 to 44 ms at 32; with 8-bit weights from 24 to 16, 26 to 19 and 62 to 44 ms. With weights on huge
pages, a step of 32 tokens at 96 tokens of context takes 37 ms, of which the layers' products take 19.4, the output head
5.0 and attention 9.7 ms.

Source: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); Llama 3.1 (frequency-dependent scaling); NTK-aware dynamic
scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from chatcache_kernels.fp8 import DTYPE as FP8
from chatcache_kernels.fp8 import Fp8Weight, stack
from chatcache_kernels.types import HeadNorms
from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionStep
from chatcache.model.geometry import Geometry
from chatcache.model.linear import (
    Fp8LinearFactory,
    Int8Linear,
    Linear,
    LinearFactory,
    PanelLinear,
    fast_linear,
    gated_mlp,
    head_factory,
)
from chatcache.model.loading.config_reader import Architecture, Rope
from chatcache.model.loading.fp8_weights import Fp8Weights
from chatcache.model.loading.weights import WeightSource
from chatcache.model.parallel import RankGroup, no_head
from chatcache.model.streams import Uploader, make_streams

if TYPE_CHECKING:
    from chatcache_kernels.cpu.decoder import DecoderWeights, MegakernelDecoder, PackedLinear
    from chatcache_kernels.types import KVPages


Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder block.

    `qkv` returns H query heads, Hkv key heads and Hkv value heads, concatenated; `gate_up` returns the gate first.
    """

    attention_norm: Tensor
    qkv: Linear
    head_norms: HeadNorms | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
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
        head: Linear,
    ) -> None:
        self.arch = arch
        self.geometry = geometry
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._scale = arch.head_dim**-0.5
        self._cos = self._sin = torch.empty(0, arch.rope.dim // 2)
        self._fused: FusedDecode | None = None

    def extend_positions(self, length: int) -> None:
        """Compute the rotary tables for contexts of up to `length` tokens."""
        cos, sin = rope_tables(self.arch.rope, length, self.arch.max_position)
        self._cos, self._sin = cos.to(self.geometry.device), sin.to(self.geometry.device)
        self._fused = make_fused_decode(
            self._layers, self._head, self._embedding, self._norm, self.arch.rms_norm_eps, self._scale,
            self.arch.num_heads, (self._cos, self._sin),
        )  # fmt: skip

    def forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        """Return logits [U, V]; arguments as in `Network.forward`."""
        logits = self._fused.run(tokens, positions, step, drawn) if self._fused is not None else None
        return self._head(self._states(tokens, positions, step, drawn)) if logits is None else logits

    def hidden_states(self, tokens: Tensor, positions: Tensor, step: AttentionStep, wanted: Tensor) -> Tensor:
        """Return final hidden states [N, hidden]; arguments as in `Network.hidden_states`."""
        states = self._fused.run_states(tokens, positions, step, wanted) if self._fused is not None else None
        return self._states(tokens, positions, step, wanted) if states is None else states

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits of final hidden states, [N, V]."""
        return self._head(hidden_states)

    def _states(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        """Return the hidden states that the output head reads, [U, hidden]."""
        ops, eps = step.kernels, self.arch.rms_norm_eps
        cos, sin = self._cos[positions], self._sin[positions]
        norms = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        x = self._embedding[tokens]
        h = ops.rms_norm(x, self._layers[0].attention_norm, eps)
        for index, (layer, norm) in enumerate(zip(self._layers, norms, strict=True)):
            mixed = self._attend(layer, index, h, cos, sin, step)
            if index == len(norms) - 1 and drawn is not None:  # the other tokens' hidden states are not needed any more
                mixed, x = mixed[drawn], x[drawn]
            h, x = ops.add_rms_norm(layer.out(mixed), x, layer.mlp_norm, eps)
            h, x = ops.add_rms_norm(gated_mlp(layer.gate_up, layer.down, h, ops.silu_mul), x, norm, eps)
        return h

    def _attend(self, layer: Layer, index: int, h: Tensor, cos: Tensor, sin: Tensor, step: AttentionStep) -> Tensor:
        """Compute attention of one layer; return the concatenated outputs of its heads.

        Shapes: h [T, hidden] -> [T, H * D].
        """
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
    make_linear: LinearFactory = fast_linear,
    ranks: RankGroup | None = None,
) -> Decoder:
    """Build a decoder from the tensors of a model folder.

    Tensors are converted and fused while they are copied. `ranks`: `arch` and `weights` are those of one rank's share.
    Raises: ModelFolderError for a tensor that is missing or has the wrong shape.
    """
    load = _WeightLoader(weights, dtype, device, make_linear)
    a = arch
    embedding = load("model.embed_tokens.weight", a.vocab_size, a.hidden_size)
    layers = []
    for index in range(a.num_layers):
        progress(index / a.num_layers, f"layer {index + 1} of {a.num_layers}")
        layer = _load_layer(a, index, load)
        if ranks is not None:
            layer = replace(layer, out=ranks.sum_outputs(layer.out), down=ranks.sum_outputs(layer.down))
        layers.append(layer)
    norm = load("model.norm.weight", a.hidden_size)
    head: Linear = no_head
    if ranks is None or ranks.rank == 0:
        weight = embedding
        if not a.tied or "lm_head.weight" in weights:
            weight = load("lm_head.weight", a.vocab_size, a.hidden_size)
        if a.tied and torch.equal(weight, embedding):
            weight = embedding
        a = replace(a, tied=weight is embedding)  # as in transformers, a stored head of its own counts
        head = head_factory(make_linear)(weight, None)
    geometry = Geometry.uniform(
        a.num_layers, a.num_heads, a.num_kv_heads, a.head_dim, a.vocab_size, dtype, device, a.hidden_size
    )
    return Decoder(a, geometry, embedding, layers, norm, head)


def _load_layer(a: Architecture, index: int, load: _WeightLoader) -> Layer:
    base = f"model.layers.{index}"
    widths = {"q_proj": a.num_heads * a.head_dim, "k_proj": a.num_kv_heads * a.head_dim}
    widths["v_proj"] = widths["k_proj"]
    if a.fused:
        widths = {"qkv_proj": sum(widths.values())}
    gates = dict.fromkeys(("gate_proj", "up_proj"), a.intermediate_size)
    if a.fused:
        gates = {"gate_up_proj": 2 * a.intermediate_size}
    return Layer(
        attention_norm=load(f"{base}.input_layernorm.weight", a.hidden_size),
        qkv=load.linear(f"{base}.self_attn", widths, a.hidden_size, a.qkv_bias),
        head_norms=_head_norms(a, f"{base}.self_attn", load),
        out=load.linear(f"{base}.self_attn", {"o_proj": a.hidden_size}, a.num_heads * a.head_dim, a.out_bias),
        mlp_norm=load(f"{base}.post_attention_layernorm.weight", a.hidden_size),
        gate_up=load.linear(f"{base}.mlp", gates, a.hidden_size, a.mlp_bias),
        down=load.linear(f"{base}.mlp", {"down_proj": a.hidden_size}, a.intermediate_size, a.mlp_bias),
        window=a.windows[index],
    )


def _head_norms(a: Architecture, base: str, load: _WeightLoader) -> HeadNorms | None:
    if not a.qk_norm:
        return None
    q, k = (load(f"{base}.{name}.weight", a.head_dim) for name in ("q_norm", "k_norm"))
    return HeadNorms(q, k, a.rms_norm_eps)


class _WeightLoader:
    """Copies tensors out of the memory-mapped weight files; to a GPU through pinned memory."""

    def __init__(
        self, weights: WeightSource, dtype: torch.dtype, device: torch.device, make_linear: LinearFactory
    ) -> None:
        self.weights, self.dtype, self.device = weights, dtype, device
        self.make_linear = make_linear
        self.uploader = Uploader(make_streams(device).main, pinned=True) if device.type == "cuda" else None

    def __call__(self, name: str, *shape: int) -> Tensor:
        return self._stack([self.weights.get(name, shape)])

    def linear(self, base: str, widths: dict[str, int], num_inputs: int, bias: bool) -> Linear:
        """Return one linear layer for several projections, stacked in the given order.

        `base`: common prefix of the tensors' names; `widths`: number of outputs of each projection.
        """
        get = self.weights.get
        added = None
        if bias:
            added = self._stack([get(f"{base}.{name}.bias", (width,)) for name, width in widths.items()])
        shapes = {f"{base}.{name}.weight": (width, num_inputs) for name, width in widths.items()}
        if isinstance(self.make_linear, Fp8LinearFactory) and isinstance(self.weights, Fp8Weights):
            packed = [self.weights.get_fp8(name, shape) for name, shape in shapes.items()]
            parts = [self._upload(part) for part in packed if part is not None and self.make_linear.can_pack(part)]
            if len(parts) == len(packed):
                return self.make_linear.pack(stack(parts), added)
        return self.make_linear(self._stack([get(name, shape) for name, shape in shapes.items()]), added)

    def _upload(self, weight: Fp8Weight) -> Fp8Weight:
        """Return an FP8 weight in memory of the device."""
        scales = weight.scales.to(self.device, copy=True)
        return replace(weight, numbers=self._stack([weight.numbers], FP8), scales=scales)

    def _stack(self, parts: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Concatenate tensors along the first dimension into new memory, on the device.

        `dtype`: None is the model's.
        """
        height = sum(len(part) for part in parts)
        whole = torch.empty((height, *parts[0].shape[1:]), dtype=dtype or self.dtype, device=self.device)
        for place, part in zip(torch.split(whole, [len(part) for part in parts]), parts, strict=True):
            if self.uploader is not None and part.device.type == "cpu":
                self.uploader.copy(place, part)
            else:
                place.copy_(part)
        return whole


def check_layer_count(weights: WeightSource, arch: Architecture, folder: Path) -> None:
    """Reject a folder that has more layers than its config: the output would be silently wrong.

    Raises: ModelFolderError.
    """
    name = f"model.layers.{arch.num_layers}.input_layernorm.weight"
    if name in weights:
        raise ModelFolderError(f"{folder / 'config.json'}: num_hidden_layers is {arch.num_layers}, but {name} exists")


def rope_tables(rope: Rope, length: int, max_position: int) -> tuple[Tensor, Tensor]:
    """Return the rotary tables cos and sin, float32 [length, rope.dim / 2].

    The attention factor of YaRN is included. `max_position` is the context that the model was trained for. Dynamic
    scaling depends on the longest context served (`length`), not on each step, because cached keys cannot be rotated
    again. Up to `max_position` it has no effect, as in transformers.
    """
    frequencies, factor = _frequencies(rope, length, max_position)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos() * factor, angles.sin() * factor


def _frequencies(rope: Rope, length: int, max_position: int) -> tuple[Tensor, float]:
    theta, factor = rope.theta, rope.option("factor", 1.0) or 1.0
    if rope.kind == "dynamic":
        longest = max(length, max_position)
        theta *= ((factor * longest / max_position) - (factor - 1)) ** (rope.dim / (rope.dim - 2))
    plain = 1.0 / (theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim))
    if rope.kind == "linear":
        return plain / factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain, factor), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, factor), _yarn_attention(rope, factor)
    return plain, 1.0


def _original_context(rope: Rope) -> float:
    """Return the context length before scaling; the config reader always sets it."""
    return dict(rope.options)["original_max_position_embeddings"]


def _llama3(rope: Rope, plain: Tensor, factor: float) -> Tensor:
    """Scale rotary frequencies as Llama 3.1: slow ones by 1 / `factor`, fast ones not at all.

    In between the two are blended. `plain`: the frequencies before scaling.
    """
    low, high = rope.option("low_freq_factor", 1.0) or 1.0, rope.option("high_freq_factor", 4.0) or 4.0
    turns = _original_context(rope) * plain / (2 * math.pi)  # full turns within the original context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain / factor * (1 - blend) + plain * blend


def _yarn(rope: Rope, plain: Tensor, factor: float) -> Tensor:
    """Scale rotary frequencies as YaRN: slow dimensions by 1 / `factor`, fast ones not at all.

    In between, from `beta_slow` to `beta_fast` full turns over the original context, the two are blended. `plain`: the
    frequencies before scaling.
    """

    def dimension(turns: float) -> float:
        return rope.dim * math.log(_original_context(rope) / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.option("beta_fast") or 32.0), dimension(rope.option("beta_slow") or 1.0)
    if rope.option("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2).float() - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return plain / factor * ramp + plain * (1 - ramp)


def _yarn_attention(rope: Rope, factor: float) -> float:
    """Return the factor of cos and sin that scales attention logits for longer contexts."""
    given = rope.option("attention_factor")
    if given is not None:
        return given

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, all_dim = rope.option("mscale"), rope.option("mscale_all_dim")
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)


class FusedDecode:
    """Runs small steps of a `Decoder` on a CPU as one kernel launch."""

    def __init__(self, weights: DecoderWeights) -> None:
        from chatcache_kernels import cpu

        self._kernels = cpu
        self._weights = weights
        self._pages: KVPages | None = None
        self._megakernel: MegakernelDecoder | None = None

    def run(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor | None:
        """Return the logits of the tokens `drawn` (indices), or None if the kernel does not fit."""
        kernel = self._kernel_for(tokens, step)
        return None if kernel is None else kernel.run(tokens, positions, step.batch, drawn)

    def run_states(self, tokens: Tensor, positions: Tensor, step: AttentionStep, wanted: Tensor) -> Tensor | None:
        """Return the final hidden states of the tokens `wanted`, or None if the kernel does not fit."""
        kernel = self._kernel_for(tokens, step)
        return None if kernel is None else kernel.run_states(tokens, positions, step.batch, wanted, wanted[:0])[0]

    def _kernel_for(self, tokens: Tensor, step: AttentionStep) -> MegakernelDecoder | None:
        """Return the kernel if it can run this step."""
        if step.kernels is not self._kernels:
            return None
        pages = step.pages
        if pages is not self._pages:
            from chatcache_kernels.cpu.decoder import MegakernelDecoder

            self._pages = pages
            self._megakernel = MegakernelDecoder(self._weights, pages) if self._weights.is_supported(pages) else None
        if self._megakernel is None or not self._megakernel.can_run(step.batch, len(tokens)):
            return None
        return self._megakernel


def make_fused_decode(
    layers: Sequence[Layer], head: Linear, embedding: Tensor, norm: Tensor, eps: float, scale: float, num_heads: int,
    turns: tuple[Tensor, Tensor],
) -> FusedDecode | None:  # fmt: skip
    """Return a `FusedDecode` if every layer has packed weights, else None.

    `turns`: the rotary tables (cos, sin).
    """
    from chatcache_kernels.cpu.decoder import DecoderWeights, LayerWeights

    products = [head, *(each for layer in layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down))]
    panels = [each for each in map(_panels, products) if each is not None]
    if len(panels) < len(products):
        return None
    blocks = []
    for layer, qkv, out, gate_up, down in zip(layers, *(panels[1 + place :: 4] for place in range(4)), strict=True):
        blocks.append(
            LayerWeights(layer.attention_norm, qkv, layer.head_norms, out, layer.mlp_norm, gate_up, down, layer.window)
        )
    cos, sin = (each.float().contiguous() for each in turns)
    return FusedDecode(DecoderWeights(embedding, cos, sin, blocks, norm, panels[0], eps, scale, num_heads))


def _panels(product: Linear) -> PackedLinear | None:
    """Return a layer's packed weights for the fused kernel, None if it has none."""
    from chatcache_kernels.cpu.decoder import PackedLinear

    if isinstance(product, PanelLinear):
        return PackedLinear(product.panels, product.bias, compact=product.compact)
    if isinstance(product, Int8Linear) and product.is_unpadded:
        return PackedLinear(product.codes, product.bias, product.scales)
    return None
