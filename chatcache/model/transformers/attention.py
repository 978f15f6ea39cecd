"""The attention function that transformers calls, and the probe that records what a model's layers attend with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from chatcache_kernels.types import HeadNorms
from torch import Tensor, nn

from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionStep
from chatcache.model.geometry import AttentionLayer, KVShape
from chatcache.model.transformers.latent import LatentAttention

ATTENTION_NAME = "chatcache_paged"

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding, [T, rotary_dim / 2]."""


@dataclass(slots=True)
class Probe:
    """Replaces an `AttentionStep` at load to record what each layer attends with."""

    layers: dict[int, AttentionLayer] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    reason: str = ""
    _keys: dict[int, Tensor] = field(default_factory=dict)  # kept, so that no later layer's are at the same address

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, window: int | None, *_: Any) -> Tensor:
        if layer in self.layers:
            self.reason = f"layer {layer} attends twice"
        if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
            self.reason = f"layer {layer} has keys {list(k.shape)}, values {list(v.shape)}, queries {list(q.shape)}"
        source = next((other for other, keys in self._keys.items() if keys.data_ptr() == k.data_ptr()), None)
        self._keys[layer], self.windows[layer] = k, window
        self.layers[layer] = AttentionLayer(q.shape[1], KVShape(k.shape[1], k.shape[2]), kv_layer=source)
        return q

    def rope_attend(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *others: Any, norms: HeadNorms | None = None
    ) -> Tensor:
        return self.attend(q, k, v, *others)

    def attend_latents(self, layer: int, latent: LatentAttention, q: Tensor, latents: Tensor) -> Tensor:
        if layer in self.layers:
            self.reason = f"layer {layer} attends twice"
        self.layers[layer] = AttentionLayer(q.shape[1], KVShape(1, latents.shape[1], latent.rank))
        return q.new_zeros(*q.shape[:2], latent.value_dim)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the layers of a model.

    `windows`: of the layers whose window transformers puts into the mask alone. Shapes: positions [T] int64.
    """

    step: AttentionStep | Probe
    positions: Tensor
    windows: Mapping[int, int]
    _angles: dict[tuple[str, int], tuple[Any, Angles]] = field(default_factory=dict, init=False)

    def angles(self, form: str, given: Any, prepare: Callable[[Any], Angles]) -> Angles:
        """Return `prepare(given)`, computed once a pass for each `given` and form: most layers share theirs."""
        found = self._angles.get((form, id(given[0])))
        if found is None:
            found = self._angles[form, id(given[0])] = given, prepare(given)
        return found[1]


_PASS: ContextVar[Pass] = ContextVar("pass")  # not all families hand keyword arguments on to attention


@contextmanager
def attending(current: Pass) -> Iterator[None]:
    """Make `current` the pass of the attention calls of this thread."""
    token = _PASS.set(current)
    try:
        yield
    finally:
        _PASS.reset(token)


def current_pass() -> Pass:
    """Return the pass that runs in this thread."""
    return _PASS.get()


def current_step() -> AttentionStep | Probe:
    """Return the step of the pass that runs in this thread."""
    return _PASS.get().step


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend for one layer of a transformers model.

    Shapes: query [1, H, T, D], key, value [1, Hkv, T, D] -> [1, T, H, D]. With latent attention, see `latent`.
    Raises: ModelFolderError for a kind of attention that KV pages do not support.
    """
    current, layer = _PASS.get(), int(module.layer_idx)  # type: ignore[arg-type]
    biases, is_causal = (attention_mask, kwargs.get("position_bias")), getattr(module, "is_causal", True)
    if any(bias is not None for bias in biases) or kwargs.get("is_causal", is_causal) is False:
        raise ModelFolderError(f"{type(module).__name__} is not plain causal attention")
    scale = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else float(kwargs["scaling"])
    if getattr(module, "has_tuned_queries", False):
        query = _tune(module, query, current.positions)
    options = kwargs.get("sliding_window") or current.windows.get(layer), kwargs.get("softcap"), kwargs.get("s_aux")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    latent: LatentAttention | None = getattr(module, "latent_attention", None)
    if latent is None:
        return current.step.attend(q, k, v, layer, scale, *options)[None], None
    if any(option is not None for option in options):
        raise ModelFolderError(f"{type(module).__name__} has latent attention with a window, a soft-cap or sinks")
    if isinstance(current.step, Probe):
        return current.step.attend_latents(layer, latent, q, k[:, 0])[None], None
    return latent.attend(current.step, layer, q, k[:, 0], scale)[None], None


def take_over_tuning(model: nn.Module) -> None:
    """Make `paged_attention` apply the temperature tuning of Llama 4, which takes the batch for one sequence."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            module.attn_temperature_tuning = False  # type: ignore[assignment]
            module.has_tuned_queries = not module.use_rope  # type: ignore[assignment]


def share_blocks(model: nn.Module) -> None:
    """Make the tied attention blocks of Zamba2 one module, which takes the number of its layer from each call."""
    blocks: dict[int, nn.Module] = {}
    for module in list(model.modules()):
        block: Any = getattr(module, "shared_transformer", None)
        if block is not None:
            module.shared_transformer = blocks.setdefault(id(block.self_attn.q_proj.weight), block)
    for block in blocks.values():
        block.self_attn.register_forward_pre_hook(_take_layer_number, with_kwargs=True)


def _take_layer_number(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    module.layer_idx = kwargs["layer_idx"]


def _tune(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Return the queries [1, H, T, D], scaled by the logarithm of their positions."""
    scales = torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
    tuned: Tensor = (query * scales[:, None]).to(query.dtype)
    return tuned
