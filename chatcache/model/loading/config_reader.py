"""Read `config.json` of a native family into a frozen `Architecture`.

The reader uses neither transformers nor code from the folder. Field names and defaults are those of transformers, in
both the 4.x spelling (`rope_theta`, `rope_scaling`, `torch_dtype`) and the 5.x one (`rope_parameters`, `dtype`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatcache.errors import ModelFolderError
from chatcache.model.loading.fp8_weights import FIELD, read_fp8_format
from chatcache.model.loading.int_weights import read_int_format

MAX_NUMBER = 1e30
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position settings.

    `dim`: number of rotated dimensions per head; `options`: numeric fields of the rope scaling, sorted by name.
    """

    kind: str
    theta: float
    dim: int
    options: tuple[tuple[str, float], ...] = ()

    def option(self, name: str, default: float | None = None) -> float | None:
        """Return a field of the rope scaling."""
        return dict(self.options).get(name, default)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Description of a decoder of the native family.

    `windows[layer]`: number of tokens that a token attends to, itself included; None means all. `fused`: the folder
    stores fused qkv_proj and gate_up_proj weights (Phi-3).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    fused: bool = False


@dataclass(frozen=True, slots=True)
class _Family:
    """Defaults of a family for fields that the config omits."""

    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_position: int = 32768
    qkv_bias: bool = False
    qk_norm: bool = False
    has_windows: bool = True
    sliding_window: int | None = None
    gated_window: bool = False
    fused: bool = False
    partial_rotary: bool = False


FAMILIES = {
    "llama": _Family(max_position=2048, has_windows=False),
    "mistral": _Family(num_kv_heads=8, max_position=131072, sliding_window=4096),
    "qwen2": _Family(num_kv_heads=32, qkv_bias=True, sliding_window=4096, gated_window=True),
    "qwen3": _Family(num_kv_heads=32, head_dim=128, qk_norm=True, sliding_window=4096, gated_window=True),
    "phi3": _Family(max_position=4096, fused=True, partial_rotary=True),
}


class _Reader:
    """Typed access to a JSON object, with errors that name the file and the field."""

    def __init__(self, config: dict[str, Any], where: Path) -> None:
        self.config = config
        self.where = where

    def fail(self, message: str) -> ModelFolderError:
        return ModelFolderError(f"{self.where}: {message}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{name} must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(f"{name} must be a number, got {value!r}")
        if not abs(value) < MAX_NUMBER:
            raise self.fail(f"{name} must be a finite number, got {value!r:.40}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        if not isinstance(value, bool | None):
            raise self.fail(f"{name} must be true or false, got {value!r}")
        return default if value is None else value


def model_type(config: dict[str, Any], where: Path) -> str:
    """Return the model type. Raises: ModelFolderError if the config has none."""
    value = config.get("model_type")
    if not isinstance(value, str) or not value:
        raise ModelFolderError(f"{where}: model_type is missing")
    return value


def is_native(config: dict[str, Any], where: Path) -> bool:
    """Return whether the native decoder can run this config; transformers runs all others."""
    if model_type(config, where) not in FAMILIES:
        return False
    scaling = _rope_parameters(config)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    plain = config.get("hidden_act", "silu") in ("silu", "swish")
    formats = (read_fp8_format, read_int_format)
    readable = not config.get(FIELD) or any(read(config, where) is not None for read in formats)
    names = config.get("architectures") or ["ForCausalLM"]
    causal = "ForCausalLM" in "".join(names) or all("For" not in name for name in names)  # or a base model
    return plain and readable and causal and kind in ROPE_KINDS


def read_architecture(config: dict[str, Any], where: Path) -> Architecture:
    """Read the config of a native family. `where` is the file, for error messages.

    Raises: ModelFolderError naming a field that is missing or invalid.
    """
    family = model_type(config, where)
    known = FAMILIES[family]
    read = _Reader(config, where)
    if not read.flag("is_causal", True):
        raise read.fail("is_causal is false, and attention that is not causal is not supported")
    hidden, heads, layers = (read.integer(f) for f in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    is_omitted = "num_key_value_heads" not in config  # null is the number of heads
    kv_heads = read.integer("num_key_value_heads", (known.num_kv_heads if is_omitted else None) or heads)
    head_dim = read.integer("head_dim", known.head_dim or hidden // heads)
    if heads % kv_heads:
        raise read.fail(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    max_position = read.integer("max_position_embeddings", known.max_position)
    bias = read.flag("attention_bias") and family in ("llama", "qwen3")
    return Architecture(
        family=family,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=read.number("rms_norm_eps", 1e-5 if known.fused else 1e-6),
        rope=_rope(read, known, head_dim, max_position),
        windows=_windows(read, known, layers),
        qkv_bias=known.qkv_bias or bias,
        out_bias=bias,
        mlp_bias=read.flag("mlp_bias") and family == "llama",
        qk_norm=known.qk_norm,
        tied=read.flag("tie_word_embeddings"),
        fused=known.fused,
    )


def _windows(read: _Reader, known: _Family, num_layers: int) -> tuple[int | None, ...]:
    config = read.config
    window = config.get("sliding_window", known.sliding_window) if known.has_windows else None
    if window is None or (known.gated_window and not read.flag("use_sliding_window")):
        return (None,) * num_layers
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise read.fail(f"sliding_window must be a positive integer, got {window!r}")
    kinds = config.get("layer_types")
    if kinds is None and not known.gated_window:
        return (window,) * num_layers
    if kinds is None:
        first = config.get("max_window_layers")
        first = 28 if first is None else first
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise read.fail(f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    for name in ("rope_scaling", "rope_parameters"):  # the order of transformers
        value = config.get(name)
        if isinstance(value, dict) and value:
            return value
    return {}


def _rope(read: _Reader, known: _Family, head_dim: int, max_position: int) -> Rope:
    scaling = _rope_parameters(read.config)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = scaling.get("rope_theta", read.config.get("rope_theta"))
    share = scaling.get("partial_rotary_factor", read.config.get("partial_rotary_factor"))
    if not known.partial_rotary:
        if share not in (None, 1) and kind != "default":  # transformers cannot run it
            raise read.fail(f"partial_rotary_factor {share} with rope scaling {kind!r} is not supported")
        share = None  # transformers ignores it
    share = 1.0 if share is None else share
    options = {
        name: float(value)
        for name, value in scaling.items()
        if isinstance(value, int | float) and name not in ("rope_theta", "partial_rotary_factor")
    }
    needed: dict[str, tuple[str, ...]] = {"linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",)}
    needed["llama3"] = ("factor", "low_freq_factor", "high_freq_factor")
    for name in needed.get(kind, ()):
        if options.get(name, 0.0) <= 0.0:
            raise read.fail(f"rope scaling {kind!r} needs a positive {name}")
    original = read.config.get("original_max_position_embeddings")
    options.setdefault("original_max_position_embeddings", float(original or max_position))
    dim = int(head_dim * share)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise read.fail(f"rotary dimension {dim} of head_dim {head_dim} must be even and within it")
    return Rope(kind, 10000.0 if theta is None else float(theta), dim, tuple(sorted(options.items())))
