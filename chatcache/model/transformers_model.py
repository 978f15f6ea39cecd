"""Run any other `transformers` causal LM, unchanged, on KV pages.

transformers calls an attention function that is registered by name with q, k and v of every layer. The function here
stores k and v in pages and attends through the step's kernels. The batch runs flattened as one sequence [1, T] with
explicit positions. The `AttentionStep`, which maps tokens to rows, is passed through `forward` as a keyword argument.
No mask function is registered for the name, so transformers builds no attention mask.

Models that cannot work this way are detected by running one token at load, and rejected with the reason: attention that
does not go through the registered function (ALiBi, linear attention, state spaces), layers with different head sizes,
and code from the model folder.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionStep, Geometry
from chatcache.model.loading.weights import is_finite

ATTENTION_NAME = "chatcache_paged"
ALIBI_TYPES = ("bloom", "mpt")
LAYER_KINDS = {"full_attention", "sliding_attention"}


@dataclass(slots=True)
class _Probe:
    """Replaces an `AttentionStep` at load to record what each layer attends with."""

    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    reason: str = ""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float, *_: Any) -> Tensor:
        if layer in self.shapes:
            self.reason = f"layer {layer} attends twice"
        if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
            self.reason = f"layer {layer} has keys {list(k.shape)}, values {list(v.shape)}, queries {list(q.shape)}"
        self.shapes[layer] = (q.shape[1], k.shape[1], k.shape[2])
        return q


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend for one layer of a transformers model.

    Shapes: query [1, H, T, D], key, value [1, Hkv, T, D] -> [1, T, H, D].
    Raises: ModelFolderError for a kind of attention that KV pages do not support.
    """
    step: AttentionStep | _Probe = kwargs["paged_step"]
    if kwargs.get("position_bias") is not None or kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ModelFolderError(f"{type(module).__name__} is not plain causal attention")
    scale = kwargs.get("scaling")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = step.attend(
        q,
        k,
        v,
        int(module.layer_idx),  # type: ignore[arg-type]
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        kwargs.get("sliding_window"),
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
    )
    return out[None], None


class TransformersNetwork:
    """A transformers model as an `attention.Network`. Its steps are not captured as CUDA graphs.

    `base`: the module without the output head, which returns the final hidden states as `last_hidden_state`.
    """

    def __init__(self, model: Any, geometry: Geometry, max_position: int, base: nn.Module | None = None) -> None:
        self.geometry = geometry
        self.max_position = max_position
        self._model = model
        self._base = base
        self._has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, tokens: Tensor, positions: Tensor, step: AttentionStep, drawn: Tensor | None) -> Tensor:
        """Return logits [U, V]; arguments as in `Network.forward`."""
        keep = {"logits_to_keep": drawn} if self._has_logits_to_keep and drawn is not None else {}
        logits: Tensor = _run(self._model, tokens, positions, step, keep)[0]
        return logits if self._has_logits_to_keep or drawn is None else logits[drawn]

    def forward_parts(
        self, tokens: Tensor, positions: Tensor, step: AttentionStep, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield the logits of each part in turn, from one forward pass per part.

        transformers has no general way to run the output head alone. Each pass writes the same keys and values again.
        """
        for part in parts:
            yield self.forward(tokens, positions, step, part)

    def forward_states(
        self, tokens: Tensor, positions: Tensor, step: AttentionStep, pooled: Tensor, drawn: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return final hidden states and logits; arguments as in `Network.forward_states`."""
        if self._base is None:
            raise ValueError("this model returns no hidden states")
        if not len(drawn):
            out = self._base(input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged_step=step)
            return out.last_hidden_state[0, pooled], None
        with _record_states([self._base]) as recorded:
            logits = self.forward(tokens, positions, step, drawn)
        return recorded[-1][1][pooled], logits


@contextmanager
def _record_states(modules: Iterable[nn.Module]) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Append each of `modules` that returns a `last_hidden_state`, with that, [T, hidden], as it is called."""
    recorded: list[tuple[nn.Module, Tensor]] = []

    def record(module: nn.Module, inputs: object, out: Any) -> None:
        if isinstance(states := getattr(out, "last_hidden_state", None), Tensor):
            recorded.append((module, states[0]))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(record).remove)
        yield recorded


def load_transformers(
    folder: Path, raw: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> TransformersNetwork:
    """Load a model through transformers.

    Raises: ModelFolderError for an architecture that is unknown or cannot attend through pages, and for bad weights.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    where = folder / "config.json"
    _refuse_alibi(where, raw)
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    safe = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **safe)
    except Exception as error:  # transformers raises many types for a bad config
        raise ModelFolderError(_explain(where, raw, error)) from error
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if not getattr(kind, "_supports_attention_backend", False):
        raise ModelFolderError(f"{where}: {raw['model_type']} has no attention that can run on KV pages")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            output_loading_info=True,
            **safe,
        )
    except Exception as error:
        raise ModelFolderError(_explain(folder, raw, error)) from error
    if info["missing_keys"]:
        raise ModelFolderError(f"{folder}: tensor {sorted(info['missing_keys'])[0]} is missing")
    for name, weight in model.named_parameters():
        if not is_finite(weight):
            raise ModelFolderError(f"{folder}: tensor {name} contains NaN or infinity")
    return _wrap(model.to(device).eval(), where, dtype, device)


def _wrap(model: Any, where: Path, dtype: torch.dtype, device: torch.device) -> TransformersNetwork:
    text = model.config.get_text_config()
    probe = _Probe()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        try:
            with _record_states(model.modules()) as recorded:
                logits = _run(model, zero, zero, probe, {})
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise ModelFolderError(f"{where}: {text.model_type} does not run on KV pages: {error!r}") from error
    kinds = set(getattr(text, "layer_types", None) or ()) - LAYER_KINDS
    reason = probe.reason or (f"has {sorted(kinds)[0]} layers" if kinds else "")
    if sorted(probe.shapes) != list(range(text.num_hidden_layers)):
        reason = f"{len(probe.shapes)} of {text.num_hidden_layers} layers attend through the registered function"
    if len(set(probe.shapes.values())) > 1:
        reason = "its layers differ in heads"
    if reason:
        raise ModelFolderError(f"{where}: {text.model_type} does not run on KV pages: {reason}")
    num_heads, num_kv_heads, head_dim = probe.shapes[0]
    base, hidden_size = (recorded[-1][0], recorded[-1][1].shape[-1]) if recorded else (None, 0)
    geometry = Geometry(
        len(probe.shapes), num_heads, num_kv_heads, head_dim, logits.shape[-1], dtype, device, hidden_size
    )
    return TransformersNetwork(model, geometry, _max_position(text), base)


def _run(
    model: Any, tokens: Tensor, positions: Tensor, step: AttentionStep | _Probe, keep: dict[str, Tensor]
) -> Tensor:
    out = model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged_step=step, **keep)
    logits: Tensor = out.logits
    return logits


def _max_position(text: Any) -> int:
    """Return the longest context in which a token's rotation does not depend on the batch.

    transformers switches `longrope` and `dynamic` frequencies once a sequence outgrows the original context; cached
    keys cannot be rotated again, so that context is the limit.
    """
    longest = int(getattr(text, "max_position_embeddings", None) or 2048)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for one in kinds:
        if one.get("rope_type") == "longrope" and one.get("original_max_position_embeddings"):
            longest = min(longest, int(one["original_max_position_embeddings"]))
    return longest


def _refuse_alibi(where: Path, raw: dict[str, Any]) -> None:
    alibi = raw.get("alibi") or raw.get("position_embedding_type") == "alibi" or raw.get("model_type") in ALIBI_TYPES
    if alibi:
        raise ModelFolderError(f"{where}: {raw.get('model_type')} uses ALiBi position biases, which are not supported")


def _explain(where: Path, raw: dict[str, Any], error: Exception) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        code = "; code from the folder is never run" if raw.get("auto_map") else ""
        return f"{where}: model_type {kind!r} is not known{code}"
    reason = str(error).strip().splitlines()
    return f"{where}: transformers cannot load this {kind}: {reason[0] if reason else type(error).__name__}"
