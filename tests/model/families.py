"""Small models with random weights for every supported family; transformers is the oracle.

Weights are large enough that outputs vary over the vocabulary, and biases and norms are random too, so that no part of
a family can be left out unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 199
NUM_NEW = 24
PROMPT_LENGTHS = (5, 17, 33, 64)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
GATED = {**COMMON, "intermediate_size": 96, "num_key_value_heads": 2}


def rope(kind: str, **options: Any) -> dict[str, Any]:
    """Return 5.x rope parameters."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


@dataclass(frozen=True)
class Family:
    """`native`: runs on the native decoder, otherwise through transformers' own modules."""

    config: Callable[[], Any]
    native: bool = True


def _gemma2() -> Any:
    options = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 12, "attn_logit_softcapping": 3.0}
    return transformers.Gemma2Config(**{**GATED, "final_logit_softcapping": 5.0}, **options)


def _gpt2() -> Any:
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
    return transformers.GPT2Config(
        vocab_size=VOCAB, **sizes, tie_word_embeddings=False, bos_token_id=0, eos_token_id=None
    )


def _stretched(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: transformers.LlamaConfig(**GATED, **rope(kind, **options))


FAMILIES: dict[str, Family] = {
    "llama": Family(lambda: transformers.LlamaConfig(**{**GATED, "tie_word_embeddings": True})),
    "llama-biases": Family(lambda: transformers.LlamaConfig(**GATED, attention_bias=True, mlp_bias=True)),
    "llama-linear": Family(_stretched("linear", factor=4.0)),
    "llama-dynamic": Family(_stretched("dynamic", factor=4.0)),
    "llama-yarn": Family(_stretched("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-llama3": Family(
        _stretched("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    ),
    "mistral-window": Family(lambda: transformers.MistralConfig(**GATED, sliding_window=13)),
    "qwen2": Family(lambda: transformers.Qwen2Config(**GATED)),
    "qwen2-window": Family(
        lambda: transformers.Qwen2Config(**GATED, use_sliding_window=True, sliding_window=11, max_window_layers=1)
    ),
    "qwen3": Family(lambda: transformers.Qwen3Config(**GATED, head_dim=32)),
    "phi3-native": Family(lambda: transformers.Phi3Config(**GATED, partial_rotary_factor=0.5, sliding_window=40)),
    "phi3": Family(lambda: transformers.Phi3Config(**GATED), native=False),
    "gemma2": Family(_gemma2, native=False),
    "opt": Family(lambda: transformers.OPTConfig(**COMMON, ffn_dim=96, word_embed_proj_dim=64), native=False),
    "gpt2": Family(_gpt2, native=False),
    "gpt-oss-sinks": Family(
        lambda: transformers.GptOssConfig(
            **GATED, head_dim=16, sliding_window=12, num_local_experts=4, num_experts_per_tok=2
        ),
        native=False,
    ),
    "qwen3-moe": Family(
        lambda: transformers.Qwen3MoeConfig(
            **GATED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
        native=False,
    ),
}


@dataclass(frozen=True)
class Sample:
    """A saved model, its transformers object, and its greedy answers."""

    family: str
    folder: Path
    oracle: Any
    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[int, ...], ...]

    def logprobs(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Return transformers' log-probabilities of the token after `tokens`, [V]."""
        with torch.inference_mode():
            logits: torch.Tensor = self.oracle(torch.tensor([tokens])).logits[0, -1]
        return logits.log_softmax(-1)


def make_sample(name: str, folder: Path) -> Sample:
    """Build and save a model, and generate its greedy answers."""
    torch.manual_seed(sum(map(ord, name)))
    oracle = save_random(FAMILIES[name].config(), folder, norms_at=0.0 if "gemma" in name else 1.0)
    prompts = tuple(tuple(torch.randint(0, VOCAB, (length,)).tolist()) for length in PROMPT_LENGTHS)
    return Sample(name, folder, oracle, prompts, tuple(_greedy(oracle, prompt) for prompt in prompts))


def save_random(config: Any, folder: Path, norms_at: float = 1.0, std: float = 0.2) -> Any:
    """Save a model with random weights, norms around `norms_at`; return its transformers object."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # eager: sdpa knows no soft-cap, and older releases of transformers leave it out without a word
    oracle = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            is_norm = weight.ndim == 1 and name.endswith("weight")
            weight.normal_(norms_at if is_norm else 0.0, std)
    oracle.save_pretrained(folder)
    return oracle


def _greedy(oracle: Any, prompt: tuple[int, ...]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
        )
    return tuple(out[0, len(prompt) :].tolist())
