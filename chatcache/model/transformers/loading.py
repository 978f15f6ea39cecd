"""Load a model through transformers, and reject the models that cannot run on KV pages.

Models that cannot work this way are detected by running one token at load, and rejected with the reason: attention that
does not go through the registered function (ALiBi, linear attention, state spaces), and code from the model folder.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chatcache.errors import ModelFolderError
from chatcache.model.attention import AttentionBackend
from chatcache.model.geometry import Geometry
from chatcache.model.linear import Fp8LinearFactory, Int8LinearFactory, LinearFactory, fast_linear
from chatcache.model.loading.fp8_weights import dequantise_all, read_fp8_format
from chatcache.model.loading.int_weights import IntWeights, open_weights, read_int_format
from chatcache.model.loading.weights import is_finite
from chatcache.model.transformers.attention import (
    ATTENTION_NAME,
    Pass,
    Probe,
    paged_attention,
    share_blocks,
    take_over_tuning,
)
from chatcache.model.transformers.blocks import replace_bases
from chatcache.model.transformers.experts import replace_experts
from chatcache.model.transformers.joined_attention import join_attention, record_attention
from chatcache.model.transformers.latent import install_latent_attention
from chatcache.model.transformers.modules import fuse_modules, pack_linears, unpacked_share
from chatcache.model.transformers.network import TransformersNetwork, record_states, run_model
from chatcache.model.transformers.recurrent import Mixer, replace_mixers, state_shapes
from chatcache.model.transformers.towers import text_only_class

log = logging.getLogger(__name__)

MAX_UNPACKED = 0.25  # of the matrices of a model in 8 bits: the share that may keep its type
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not know and that another one equals."""
ALIBI_TYPES = ("bloom", "mpt")
FORM_ERRORS = (KeyError, TypeError, AttributeError, RuntimeError, ValueError)
"""What modules of transformers raise that do not run on KV pages."""
LAYER_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
TOKEN_KINDS = {"mlp", "moe"}  # layers without attention and state


def load_transformers(
    folder: Path,
    raw: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    kernels: AttentionBackend,
    make_linear: LinearFactory = fast_linear,
) -> TransformersNetwork:
    """Load a model through transformers; `kernels` run its experts.

    `make_linear`: of the linear layers on a CPU, and of FP8 layers.
    Raises: ModelFolderError for an architecture that is unknown or cannot attend through pages, and for bad weights.
    """
    from transformers import AttentionInterface, AutoConfig

    where = folder / "config.json"
    _refuse_alibi(where, raw)
    _refuse_quantised(where, raw)
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    try:
        if alias := ALIASES.get(raw["model_type"]):
            config = AutoConfig.for_model(alias, **{name: raw[name] for name in raw if name != "model_type"})
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many types for a bad config
        raise ModelFolderError(_explain(where, raw, error)) from error
    kind, config = text_only_class(config)
    if not (getattr(kind, "_supports_attention_backend", False) or _can_replace_attention(kind)):
        raise ModelFolderError(f"{where}: {raw['model_type']} has no attention that can run on KV pages")
    try:
        model, info = kind.from_pretrained(
            **_source(folder, raw, config, dtype),
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
        )
    except Exception as error:
        raise ModelFolderError(_explain(folder, raw, error)) from error
    if info["missing_keys"]:
        raise ModelFolderError(f"{folder}: tensor {sorted(info['missing_keys'])[0]} is missing")
    for name, weight in model.named_parameters():
        if not is_finite(weight):
            raise ModelFolderError(f"{folder}: tensor {name} contains NaN or infinity")
    return _wrap(model.to(device).eval(), where, dtype, device, kernels, make_linear)


def _source(folder: Path, raw: dict[str, Any], config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return where `from_pretrained` reads the weights: the folder, or the tensors of a quantised checkpoint."""
    layout, weights = read_fp8_format(raw, folder / "config.json"), open_weights(folder, raw)
    if layout is not None:
        log.warning("FP8 weights are dequantised: %s runs through transformers", raw["model_type"])
        tensors = dequantise_all(weights, layout, dtype)
    elif isinstance(weights, IntWeights):
        tensors = weights.expand_all(dtype)
    else:
        return {"pretrained_model_name_or_path": folder}
    vars(config).pop("quantization_config", None)  # the config of a composite model's text model has none
    return {"pretrained_model_name_or_path": None, "state_dict": tensors}


def _wrap(
    model: Any,
    where: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: AttentionBackend,
    make_linear: LinearFactory,
) -> TransformersNetwork:
    text = model.config.get_text_config()
    packed = make_linear if isinstance(make_linear, Int8LinearFactory | Fp8LinearFactory) else None
    try:
        experts = replace_experts(model, kernels, make_linear)
        mixers = replace_mixers(model)
        _check_layer_kinds(text, mixers)
    except ValueError as error:
        raise ModelFolderError(f"{where}: {text.model_type} does not run on KV pages: {error}") from error
    install_latent_attention(model)
    take_over_tuning(model)
    share_blocks(model)
    fuse_modules(model, kernels)
    _join_attention(model, text, kernels)
    if device.type == "cpu":
        replace_bases(model, kernels)
    if device.type == "cpu" or packed is not None:
        pack_linears(model, make_linear)
    if packed is not None:
        left = unpacked_share(model, packed.num_weights)
        if left > MAX_UNPACKED:
            what = f"{left:.0%} of the weights of this {text.model_type} are not in plain linear layers"
            name = "fp8" if isinstance(packed, Fp8LinearFactory) else "int8"
            raise ModelFolderError(f"{where}: quantization {name} saves too little: {what}")
    probe = Probe()
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        try:
            with record_states(model.modules()) as recorded:
                logits = run_model(model, zero, Pass(probe, zero, {}), {}).logits[0]
        except ModelFolderError as error:
            raise ModelFolderError(f"{where}: {text.model_type} does not run on KV pages: {error}") from error
        except FORM_ERRORS as error:
            reason = f"one of its layers is not supported ({error!r})"
            raise ModelFolderError(f"{where}: {text.model_type} does not run on KV pages: {reason}") from error
    reason = probe.reason or _find_unknown_layers(text, probe, mixers)
    if not reason and mixers and not recorded:
        reason = "it keeps states, and returns no hidden states"
    if reason:
        raise ModelFolderError(f"{where}: {text.model_type} does not run on KV pages: {reason}")
    base, hidden_size = (recorded[-1][0], recorded[-1][1].shape[-1]) if recorded else (None, 0)
    chunks = dict.fromkeys(_layers_of(text, "chunked_attention"), getattr(text, "attention_chunk_size", None))
    attention = {layer: replace(shape, chunk=chunks.get(layer)) for layer, shape in probe.layers.items()}
    layers = tuple(attention.get(layer) for layer in range(text.num_hidden_layers))
    geometry = Geometry(layers, logits.shape[-1], dtype, device, hidden_size, state_shapes(mixers))
    network = TransformersNetwork(model, geometry, _max_position(text), base, _windows_of_mask(model, text, probe))
    network.idle_bytes = sum(each.idle_bytes for each in experts)  # the probe has chosen experts
    return network


def _join_attention(model: Any, text: Any, kernels: AttentionBackend) -> None:
    """Replace the attention layers that can be; a model that does not run is reported by the probe that follows."""
    try:
        recording = record_attention(model, _max_position(text))
    except (ModelFolderError, *FORM_ERRORS):
        return
    join_attention(model, recording, _windows_of_mask(model, text, recording.recorder), kernels)


def _can_replace_attention(kind: Any) -> bool:
    """Return whether a class looks up its attention function by name; not all that do are marked so."""
    return hasattr(sys.modules.get(getattr(kind, "__module__", "")), "ALL_ATTENTION_FUNCTIONS")


def _layers_of(text: Any, kind: str) -> list[int]:
    return [layer for layer, one in enumerate(getattr(text, "layer_types", None) or ()) if one == kind]


def _windows_of_mask(model: Any, text: Any, probe: Probe) -> dict[int, int]:
    """Return the windows of the layers that a family limits by its mask, without passing them to attention."""
    window = getattr(text, "sliding_window", None)
    sources = [sys.modules.get(type(module).__module__) for module in model.modules()]
    if not window or not any(hasattr(source, "create_sliding_window_causal_mask") for source in sources):
        return {}
    layers = _layers_of(text, "sliding_attention") if getattr(text, "layer_types", None) else list(probe.layers)
    return {layer: int(window) for layer in layers if probe.windows.get(layer, window) is None}


def _check_layer_kinds(text: Any, mixers: list[Mixer]) -> None:
    """Raise ValueError for a layer of an unknown kind that no mixer replaces."""
    mixed = {mixer.layer_idx for mixer in mixers}
    kinds = getattr(text, "layer_types", None) or ()
    for layer, kind in enumerate(kinds[: text.num_hidden_layers]):
        if layer not in mixed and kind not in LAYER_KINDS | TOKEN_KINDS:
            raise ValueError(f"has {kind} layers")


def _find_unknown_layers(text: Any, probe: Probe, mixers: list[Mixer]) -> str:
    """Return which layers of a model are not known to run on pages and states, "" if all are.

    Every layer attends through the registered function, is replaced by a mixer, both, or looks at single tokens only.
    """
    kinds = list(getattr(text, "layer_types", None) or ())
    mixed = {mixer.layer_idx for mixer in mixers}
    for layer in set(range(text.num_hidden_layers)) - mixed:
        is_token_layer = layer < len(kinds) and kinds[layer] in TOKEN_KINDS
        if layer not in probe.layers and not is_token_layer:
            num_known = len(mixed | probe.layers.keys())
            return f"{num_known} of {text.num_hidden_layers} layers attend through the registered function"
    return "" if probe.layers else "none of its layers attends"


def _max_position(text: Any) -> int:
    """Return the longest context in which a token's rotation does not depend on the batch.

    transformers switches `longrope` and `dynamic` frequencies once a sequence outgrows the original context; cached
    keys cannot be rotated again, so that context is the limit.
    """
    names = "max_position_embeddings", "max_target_positions"
    longest = next((int(value) for name in names if (value := getattr(text, name, None))), 2048)
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


def _refuse_quantised(where: Path, raw: dict[str, Any]) -> None:
    """Refuse quantised weights in formats that are not read; those of gpt-oss are expanded by transformers."""
    if read_fp8_format(raw, where) is not None or read_int_format(raw, where) is not None:
        return
    method = (raw.get("quantization_config") or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise ModelFolderError(
            f"{where}: its weights are quantised ({method}) in a format that is not supported; use the bfloat16 version"
        )


def _explain(where: Path, raw: dict[str, Any], error: Exception) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = raw.get("model_type")
    if kind not in CONFIG_MAPPING:
        code = "; code from the folder is never run" if raw.get("auto_map") else ""
        return f"{where}: model_type {kind!r} is not known{code}"
    reason = str(error).strip().splitlines()
    return f"{where}: transformers cannot load this {kind}: {reason[0] if reason else type(error).__name__}"
