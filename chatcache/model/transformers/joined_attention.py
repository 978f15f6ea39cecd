"""Attention layers of transformers models with one product for their projections.

Their norms of heads, their rotary embedding and the page writes are one kernel, where transformers computes about
twenty operations. A layer is replaced only if the new one gives the scores, values and outputs of the old one, up to
rounding, for tokens over the whole context: `record_attention` runs a model once and keeps what goes in and out of its
attention layers, and `join_attention` replaces those whose results agree. The others stay those of transformers.

Pairs of dimensions that a family rotates are neighbours, or half a head apart as the kernels expect; the rows of the
weights of neighbours are reordered, as scores do not depend on the order of dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from chatcache_kernels import reference
from chatcache_kernels.types import HeadNorms
from torch import Tensor, nn
from torch.nn import functional

from chatcache.model.attention import AttentionBackend, AttentionStep
from chatcache.model.transformers.attention import Pass, Probe, attending, current_pass
from chatcache.model.transformers.modules import FusedNorm, UnknownFormError, is_close, replace_modules
from chatcache.model.transformers.network import run_model

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
OUTPUTS = ("o_proj", "out_proj", "dense")
NORMS = (("q_norm", "q_layernorm"), ("k_norm", "k_layernorm"), ("v_norm",))
NORM_MULTIPLE = 16  # of the dimensions of heads that the kernels of all backends normalise
Rotation = Literal["halves", "half", "pairs", "repeated_pairs", "none"]
"""How a family rotates heads: dimensions half a head apart, with cosines for all dimensions or for half of them;
neighbours, with cosines as for halves or each one twice in turn; or not at all."""
ROTATIONS: tuple[Rotation, ...] = ("halves", "half", "pairs", "repeated_pairs")


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer attended with, and got. Shapes: q, out [T, H, D], k, v [T, Hkv, D], sinks [H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def scores(self) -> Tensor:
        """Return the scores of all pairs of tokens, [H, T, T]."""
        k = self.k.repeat_interleave(self.q.shape[1] // self.k.shape[1], dim=1)
        return torch.einsum("thd,shd->hts", self.q.float(), k.float()) * self.scale


@dataclass(slots=True)
class Recorder(Probe):
    """A probe that attends over the tokens of one pass, and keeps what each layer attended with.

    It leaves out windows, soft-caps and sinks, which the new layer only hands on. `answer`: is returned instead of
    attending; a new layer gets what the old one got, as rounding changes the weights of large scores.
    """

    answer: Tensor | None = None
    calls: dict[int, AttentionCall] = field(default_factory=dict)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, *options: Any) -> Tensor:
        Probe.attend(self, q, k, v, layer, scale, *options)
        if (out := self.answer) is None:
            heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
            out = functional.scaled_dot_product_attention(
                heads[0], heads[1], heads[2], is_causal=True, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
        self.calls[layer] = AttentionCall(q, k, v, out, scale, *options)
        return out

    def rope_attend(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *others: Any, norms: HeadNorms | None = None
    ) -> Tensor:
        if norms is not None:
            q, k = reference.rms_norm(q, norms.q, norms.eps), reference.rms_norm(k, norms.k, norms.eps)
        return self.attend(reference.rope(q, cos, sin), reference.rope(k, cos, sin), v, *others)


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of an attention module of transformers. `is_pure`: it changed none of its arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    is_pure: bool


@dataclass(slots=True)
class Recording:
    """One pass of a model: what its attention layers attended with, and the calls of modules that have projections."""

    positions: Tensor
    recorder: Recorder = field(default_factory=Recorder)
    calls: dict[nn.Module, list[ModuleCall]] = field(default_factory=dict)


def record_attention(model: nn.Module, max_position: int) -> Recording:
    """Run some tokens, at positions from the first to the last, and return the calls of the attention layers."""
    device = next(model.parameters()).device
    spread = [0, 1, 2, max_position // 3, max_position - 2, max_position - 1]
    positions = torch.tensor(sorted({min(max(place, 0), max_position - 1) for place in spread}), device=device)
    recording = Recording(positions)
    ids = torch.arange(1, len(positions) + 1, device=device)
    with torch.inference_mode(), _record_calls(model, recording):
        run_model(model, ids, Pass(recording.recorder, positions, {}), {})
    return recording


@contextmanager
def _record_calls(model: nn.Module, recording: Recording) -> Iterator[None]:
    """Record the calls of modules that have a query projection, or one for queries, keys and values."""
    sizes: list[list[int]] = []  # of the arguments of the calls that have not returned
    hooks: list[Any] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes.append(_sizes_of_mappings(kwargs))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        call = ModuleCall(args, kwargs, result, sizes.pop() == _sizes_of_mappings(kwargs))
        recording.calls.setdefault(module, []).append(call)

    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and _children(module) & {"q_proj", "qkv_proj"}:
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _sizes_of_mappings(kwargs: Mapping[str, Any]) -> list[int]:
    return [len(value) for value in kwargs.values() if isinstance(value, Mapping)]


def _children(module: nn.Module) -> set[str]:
    """Return the names of the children that have weights, or are norms."""
    children = module.named_children()
    return {name for name, child in children if name.endswith("norm") or next(child.parameters(), None) is not None}


def join_attention(
    model: nn.Module, recording: Recording, windows: Mapping[int, int], kernels: AttentionBackend
) -> None:
    """Replace the attention layers of a model, in place, where the new ones give the same. `windows`: as in `Pass`."""
    likely: Rotation = "halves"

    def make(module: Any) -> JoinedAttention | None:
        nonlocal likely
        calls = recording.calls.pop(module, [])
        if len(calls) != 1 or not calls[0].is_pure or module.layer_idx not in recording.recorder.calls:
            return None
        attended = recording.recorder.calls[module.layer_idx]
        joined = _join(module, calls[0], attended, recording.positions, likely, kernels)
        if joined is not None:
            likely = joined.rotation if joined.rotation != "none" else likely
            joined.window = joined.window or windows.get(joined.layer_idx)
        return joined

    replace_modules(model, make)


def _join(
    source: Any,
    call: ModuleCall,
    attended: AttentionCall,
    positions: Tensor,
    likely: Rotation,
    kernels: AttentionBackend,
) -> JoinedAttention | None:
    """Return a layer that gives the same as `source`, None if there is none. `likely`: the rotation to try first."""
    given = call.kwargs.get("position_embeddings", call.args[1] if len(call.args) > 1 else None)
    has_angles = isinstance(given, tuple) and all(isinstance(each, Tensor) for each in given)
    rotations = sorted(ROTATIONS, key=lambda each: each != likely) if has_angles else []
    rotary_dim = given[0].shape[-1] if has_angles else 0
    for rotation in (*rotations, "none"):
        recorder = Recorder(answer=attended.out)
        try:
            joined = JoinedAttention(source, call.result, attended, rotation, rotary_dim, kernels)
            with torch.inference_mode(), attending(Pass(recorder, positions, {})):
                result = joined(*call.args, **call.kwargs)
        except (UnknownFormError, AttributeError, TypeError, RuntimeError, ValueError):
            continue  # another form, or another rotation
        mine = recorder.calls[joined.layer_idx]
        pairs = ((attended.scores, mine.scores), (attended.v, mine.v), (_output(call.result), _output(result)))
        if all(is_close(want, got, attended.q.dtype) for want, got in pairs):
            return joined
    return None


def _output(result: Any) -> Tensor:
    output: Tensor = result if isinstance(result, Tensor) else result[0]
    return output


class JoinedAttention(nn.Module):
    """Attention whose projections are one: queries, keys, values and, in some families, gates of the outputs."""

    def __init__(
        self,
        source: Any,
        result: Any,
        attended: AttentionCall,
        rotation: Rotation,
        rotary_dim: int,
        kernels: AttentionBackend,
    ) -> None:
        """Take over the weights of a module of transformers that returned `result`. Raises: UnknownFormError."""
        super().__init__()
        names = _children(source)
        output = next((name for name in OUTPUTS if name in names), "")
        if not output or names - {*PROJECTIONS, *chain.from_iterable(NORMS), output}:
            raise UnknownFormError
        self.num_returned = 0 if isinstance(result, Tensor) else len(result)
        if self.num_returned and any(each is not None for each in result[1:]):
            raise UnknownFormError
        self.layer_idx, self.rotation, self.o_proj = int(source.layer_idx), rotation, getattr(source, output)
        self.scale, self.window, self.softcap = attended.scale, attended.window, attended.softcap
        self.sinks = attended.sinks
        self.num_heads, self.head_dim = attended.q.shape[1:]
        order = _order_of_pairs(self.head_dim, rotary_dim) if rotation in ("pairs", "repeated_pairs") else None
        self.qkv_proj, self.widths = self._join_projections(source, attended.k.shape[1], order)
        self.q_norm, self.k_norm, self.v_norm = self._take_norms(source, order, kernels, attended.v)
        self.has_head_norms = self.q_norm is not None and self.q_norm.weight.shape == (self.head_dim,)

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, *_: Any, **__: Any) -> Any:
        """Return what transformers' module returns: the output [1, T, hidden], alone or with None."""
        current = current_pass()
        angles = None if self.rotation == "none" else current.angles(self.rotation, position_embeddings, self._angles)
        out = self.mix(hidden_states[0], current.step, angles)[None]
        return (out, *[None] * (self.num_returned - 1)) if self.num_returned else out

    def mix(self, x: Tensor, step: AttentionStep | Probe, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        """Return the layer's output. Shapes: x [T, hidden], angles (cos, sin) [T, rotary_dim / 2]."""
        q, k, v, gates = torch.split(self.qkv_proj(x), self.widths, dim=1)
        if not self.widths[2]:
            v = k
        if self.q_norm is not None and self.k_norm is not None and not self.has_head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.view(len(x), -1, self.head_dim) for each in (q, k, v))
        if self.v_norm is not None:
            v = self.v_norm(v)
        layer, scale, window, softcap, sinks = self.layer_idx, self.scale, self.window, self.softcap, self.sinks
        if angles is not None and self.rotation != "none":
            out = step.rope_attend(q, k, v, *angles, layer, scale, window, softcap, sinks, norms=self.head_norms)
        else:
            if self.q_norm is not None and self.k_norm is not None and self.has_head_norms:
                q, k = self.q_norm(q), self.k_norm(k)
            out = step.attend(q, k, v, layer, scale, window, softcap, sinks)
        out = out.reshape(len(x), -1)
        mixed: Tensor = self.o_proj(out * gates.sigmoid() if self.widths[3] else out)
        return mixed

    @property
    def head_norms(self) -> HeadNorms | None:
        """Return the norms of single heads of queries and keys, None if there are none."""
        if not self.has_head_norms or self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def _angles(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines as the kernels take them, [T, rotary_dim / 2] float32."""
        cos, sin = (each.reshape(-1, each.shape[-1]) for each in given)
        if self.rotation == "repeated_pairs":
            cos, sin = cos[:, ::2], sin[:, ::2]
        elif self.rotation != "half":
            cos, sin = cos[:, : cos.shape[1] // 2], sin[:, : sin.shape[1] // 2]
        return cos.float().contiguous(), sin.float().contiguous()

    def _join_projections(self, source: Any, num_kv_heads: int, order: Tensor | None) -> tuple[nn.Linear, list[int]]:
        """Return one layer for all projections, and its widths: queries, keys, values (0: keys), gates.

        transformers stores the gates of a head after its queries. `order`: of the dimensions of heads, None as they
        are. Raises: UnknownFormError.
        """
        width, kv_width = self.num_heads * self.head_dim, num_kv_heads * self.head_dim
        qkv = getattr(source, "qkv_proj", None)
        layers = [each for each in (source.q_proj, source.k_proj, source.v_proj) if each] if qkv is None else [qkv]
        if any(type(each) is not nn.Linear for each in layers):
            raise UnknownFormError
        sizes = [each.out_features for each in layers] if qkv is None else [width, kv_width, kv_width]
        if sizes[0] not in (width, 2 * width) or sizes[1:] not in ([kv_width], [kv_width] * 2):
            raise UnknownFormError

        def join(tensors: list[Tensor]) -> Tensor:
            q, k, *others = torch.split(tensors[0], sizes) if qkv is not None else tensors
            q, *gates = torch.split(q.view(self.num_heads, -1, *q.shape[1:]), self.head_dim, dim=1)
            k = k.view(num_kv_heads, -1, *k.shape[1:])
            if order is not None:
                q, k = q[:, order], k[:, order]
            return torch.cat([q.flatten(0, 1), k.flatten(0, 1), *others, *(each.flatten(0, 1) for each in gates)])

        weights = [each.weight.detach() for each in layers]
        joined = nn.Linear(weights[0].shape[1], sum(sizes), bias=False, device="meta")
        joined.weight = nn.Parameter(join(weights), requires_grad=False)
        if any(each.bias is not None for each in layers):
            biases = [each.weight.new_zeros(each.out_features) if each.bias is None else each.bias for each in layers]
            joined.bias = nn.Parameter(join(biases).detach(), requires_grad=False)
        return joined, [width, kv_width, kv_width if len(sizes) == 3 else 0, sizes[0] - width]

    def _take_norms(
        self, source: Any, order: Tensor | None, kernels: AttentionBackend, like: Tensor
    ) -> tuple[FusedNorm | None, FusedNorm | None, FusedNorm | None]:
        """Return the norms of queries, keys and values, on the device of `like`. Raises: UnknownFormError."""
        q, k, v = (next((getattr(source, name) for name in names if hasattr(source, name)), None) for names in NORMS)
        if v is not None and not isinstance(v, FusedNorm):  # without weights, so it was not replaced
            v = FusedNorm(kernels, torch.ones(self.head_dim, dtype=like.dtype, device=like.device), float(v.eps))
        if q is None and k is None:
            return None, None, v
        if not isinstance(q, FusedNorm) or not isinstance(k, FusedNorm) or q.eps != k.eps:
            raise UnknownFormError
        is_of_heads = q.weight.shape == k.weight.shape == (self.head_dim,)
        if (is_of_heads and self.head_dim % NORM_MULTIPLE) or (order is not None and not is_of_heads):
            raise UnknownFormError
        if order is not None:
            q, k = (FusedNorm(kernels, each.weight[order], each.eps) for each in (q, k))
        return q, k, v


def _order_of_pairs(head_dim: int, rotary_dim: int) -> Tensor:
    """Return the order of dimensions in which the two of a pair are half of the rotated ones apart."""
    rotated = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    return torch.cat((rotated, torch.arange(rotary_dim, head_dim)))
