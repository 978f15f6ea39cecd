"""The text model inside a composite model: a language model wrapped with vision or audio towers.

Published folders of such models have a config with a `text_config`, and name the tensors of the text model with a
prefix (`model.language_model.*`, `language_model.model.*`). Only the text model is loaded. If its family is native, the
native decoder reads its tensors through `TowerWeights`; otherwise transformers builds the model without its other
towers.
Families with multi-axis rotary positions (Qwen2-VL to Qwen3-VL) use the same position on every axis for text, which is
the plain rotary embedding of their base family.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from chatcache.errors import ModelFolderError
from chatcache.model.loading.weights import Part, Weights, WeightSource

log = logging.getLogger(__name__)

PREFIXES = (
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "text_model.model.",
    "thinker.model.",
    "model.",
)
HEADS = ("lm_head.weight", "language_model.lm_head.weight", "text_model.lm_head.weight", "thinker.lm_head.weight")
FLAT_TYPES = ("qwen2_vl", "qwen2_5_vl")  # whose first configs hold the text model's fields at the top
PLAIN_FAMILIES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""The native family that a text model equals if it reads text alone."""
REQUIRED = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size")
TEXT_MODULES = ("language_model", "text_model")
TIMM_TYPES = ("gemma3n",)
"""Composite models with a tower of `timm`; the class of their text model reads the tensors of the composite model."""


class TowerWeights:
    """Tensors of the text model of a composite model, under the names of a causal LM."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix
        self._head = next((name for name in HEADS if name in weights), HEADS[0])
        self.skipped = Counter(_tower(name) for name in weights.names() if not self._is_text(name))
        self.num_parameters = weights.count_parameters(self._is_text)

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._weights

    def get(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """Return one tensor. Raises: as `WeightSource.get`."""
        return self._weights.get(self._stored_name(name), shape, part)

    def digest(self) -> str:
        """Return the digest of all tensors, also of those of other towers."""
        return self._weights.digest()

    def _is_text(self, name: str) -> bool:
        return name.startswith(self._prefix) or name == self._head

    def _stored_name(self, name: str) -> str:
        if name.startswith("model."):
            return self._prefix + name.removeprefix("model.")
        return self._head + name.removeprefix(HEADS[0])  # also its scales


def open_text_tower(raw: dict[str, Any], weights: WeightSource, where: Path) -> tuple[dict[str, Any], WeightSource]:
    """Return the config and the tensors of the text model of a folder.

    A folder that is not composite is its own text model.
    `where`: the config file, for messages. The log names the number of tensors that are skipped.
    Raises: ModelFolderError for a composite model whose text model cannot be found.
    """
    text = _text_config(raw)
    if text is None or not isinstance(weights, Weights):
        return raw, weights
    prefix = next((each for each in PREFIXES if f"{each}embed_tokens.weight" in weights), None)
    if prefix is None:
        raise ModelFolderError(
            f"{where.parent}: no text model found: no tensor is named embed_tokens.weight after "
            f"{', '.join(PREFIXES[:-1])} or {PREFIXES[-1]}"
        )
    tower = TowerWeights(weights, prefix)
    if tower.skipped:
        parts = [f"{count} {kind}" for kind, count in tower.skipped.most_common()]
        log.info("text only: %s tensors skipped", " and ".join(parts))
    if "lm_head.weight" not in tower:
        flags = raw.get("tie_word_embeddings"), text.get("tie_word_embeddings")
        text["tie_word_embeddings"] = True in flags or flags[0] is None
    else:
        text["tie_word_embeddings"] = False
    return text, tower


def _text_config(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config of a composite model's text model as that of a causal LM, None if it has none of its own.

    A quantised model stays quantised, and fields that are missing stay missing.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        if raw.get("model_type") not in FLAT_TYPES:
            return None
        text = raw
    kind = str(text.get("model_type", raw.get("model_type")))
    text = {name: value for name, value in text.items() if name not in ("architectures", "vision_config")}
    text["model_type"] = PLAIN_FAMILIES.get(kind, kind) if all(text.get(name) for name in REQUIRED) else f"{kind}_text"
    if raw.get("quantization_config"):
        text["quantization_config"] = raw["quantization_config"]
    for name in ("rope_parameters", "rope_scaling"):
        scaling = text.get(name)
        if isinstance(scaling, dict) and "mrope" in (scaling.get("type"), scaling.get("rope_type")):
            text[name] = {**scaling, "type": "default", "rope_type": "default"}
    return text


def _tower(name: str) -> str:
    """Return which part of a composite model a tensor belongs to: vision | audio | other."""
    if any(word in name for word in ("audio", "speech")):
        return "audio"
    return "vision" if any(word in name for word in ("vis", "image", "projector", "merger")) else "other"


def text_only_class(config: Any) -> tuple[Any, Any]:
    """Return the transformers class that runs the text model of a config, and the config to build it from.

    The class is that of the text model if transformers has one, else that of the composite model, which then drops its
    other towers before weights are read. The class is None if transformers has no causal LM for the config.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    if config.model_type in TIMM_TYPES:
        config = config.get_text_config()
    kinds = (auto._model_mapping.get(type(config), None) for auto in (
        AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM
    ))  # fmt: skip
    kind: Any = next((each for each in kinds if each is not None), None)
    text = config.sub_configs.get("text_config")
    if kind is None or text is None:
        return kind, config
    if kind.config_class is text:
        return kind, config.get_text_config()
    return _without_towers(kind), config


def _without_towers(kind: Any) -> Any:
    """Return a subclass of a composite model's class that keeps the text model and the output head only.

    It has the name of the class, by which transformers finds how the tensors of a checkpoint are named.
    """

    def __init__(self: Any, config: Any) -> None:
        kind.__init__(self, config)
        for owner in (self, self.base_model):
            kept = (*TEXT_MODULES, owner.base_model_prefix, "lm_head")
            if any(name in TEXT_MODULES for name, _ in owner.named_children()):
                for name in [name for name, _ in owner.named_children() if name not in kept]:
                    setattr(owner, name, None)

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})
