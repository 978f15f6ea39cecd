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


LATENT: dict[str, Any] = {
    **COMMON, "intermediate_size": 96, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip

DENSE_LATENT = {name: value for name, value in LATENT.items() if "expert" not in name and "moe" not in name}


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


def _gemma4(layers: int, **options: Any) -> Any:
    """Window layers with 2 x 16 heads, full layers with `num_global_key_value_heads` x 32."""
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    sizes: dict[str, Any] = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 12, "num_hidden_layers": layers}
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    return transformers.Gemma4TextConfig(**{**GATED, **sizes, **per_layer, **options}, layer_types=kinds)


def _gemma3n() -> Any:
    """Two layers that use the keys of the layers before, and two whose MLPs are sparse."""
    kinds = ["sliding_attention", "full_attention"] * 3
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 16}
    sparse = {"activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0], "num_kv_shared_layers": 2}
    sizes = {**GATED, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 12, "pad_token_id": 0}
    return transformers.Gemma3nTextConfig(**sizes, **per_layer, **sparse, layer_types=kinds)


def _llama4() -> Any:
    """Three layers in chunks of 32 tokens, one without rotary embedding whose queries are tuned by position."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    sizes = {"num_hidden_layers": 4, "intermediate_size": 32, "intermediate_size_mlp": 96, "head_dim": 16}
    tuning = {"floor_scale": 8, "attn_scale": 0.5, "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 32}
    return transformers.Llama4TextConfig(**{**GATED, **sizes, **experts, **tuning})


def _ministral3() -> Any:
    stretched = rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.5)
    return transformers.Ministral3Config(**GATED, head_dim=16, **stretched)


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
    "gemma3": Family(
        lambda: transformers.Gemma3TextConfig(
            **GATED, head_dim=16, query_pre_attn_scalar=16, sliding_window=12, sliding_window_pattern=3
        ),
        native=False,
    ),
    "gemma4-key-is-value": Family(
        lambda: _gemma4(4, num_global_key_value_heads=1, attention_k_eq_v=True), native=False
    ),
    "gemma4-shared-layers": Family(
        lambda: _gemma4(6, num_kv_shared_layers=2, use_double_wide_mlp=True, final_logit_softcapping=5.0), native=False
    ),
    "gemma4-moe": Family(
        lambda: _gemma4(
            4,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
        native=False,
    ),
    "gemma3n": Family(_gemma3n, native=False),
    "llama4": Family(_llama4, native=False),
    "ministral3": Family(_ministral3, native=False),
    "nemotron": Family(
        lambda: transformers.NemotronConfig(**GATED, head_dim=16, partial_rotary_factor=0.5), native=False
    ),
    "stablelm": Family(lambda: transformers.StableLmConfig(**GATED, use_qkv_bias=True), native=False),
    "stablelm-parallel": Family(
        lambda: transformers.StableLmConfig(**GATED, qk_layernorm=True, use_parallel_residual=True), native=False
    ),
    "smollm3": Family(lambda: transformers.SmolLM3Config(**GATED, no_rope_layer_interval=3), native=False),
    "olmo3": Family(
        lambda: transformers.Olmo3Config(**{**GATED, "num_hidden_layers": 4}, sliding_window=12), native=False
    ),
    "cohere2": Family(
        lambda: transformers.Cohere2Config(
            **{**GATED, "num_hidden_layers": 4}, head_dim=16, sliding_window=12, logit_scale=0.25
        ),
        native=False,
    ),
    "granite": Family(
        lambda: transformers.GraniteConfig(
            **GATED, embedding_multiplier=2.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=3.0
        ),
        native=False,
    ),
    "glm4": Family(lambda: transformers.Glm4Config(**GATED, head_dim=16, attention_bias=True), native=False),
    "exaone4": Family(
        lambda: transformers.Exaone4Config(
            **{**GATED, "num_hidden_layers": 4}, sliding_window=12, sliding_window_pattern=4
        ),
        native=False,
    ),
    "phimoe-window": Family(
        lambda: transformers.PhimoeConfig(**GATED, sliding_window=12, num_local_experts=4), native=False
    ),
    "qwen2-moe-window": Family(
        lambda: transformers.Qwen2MoeConfig(
            **GATED,
            use_sliding_window=True,
            sliding_window=12,
            max_window_layers=3,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
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


LAYERS = {**GATED, "num_hidden_layers": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "head_dim": 16}
DELTA |= {"linear_value_head_dim": 16}
CONVOLUTION = {**LAYERS, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}


def _nemotron_h() -> Any:
    options = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8}
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
    return transformers.NemotronHConfig(
        **GATED | {"num_hidden_layers": None}, **options, head_dim=16, layers_block_type=kinds
    )


def _zamba2() -> Any:
    """Two hybrid layers share the weights of attention, with adapters of their own."""
    kinds = ["linear_attention", "hybrid"] * 2
    mamba = {"mamba_d_state": 16, "n_mamba_heads": 4, "mamba_ngroups": 2, "chunk_size": 8}
    shared = {"num_mem_blocks": 1, "use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 8}
    sizes = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    return transformers.Zamba2Config(**sizes, **mamba, **shared, layers_block_type=kinds)


RECURRENT: dict[str, Family] = {
    "qwen3-next": Family(
        lambda: transformers.Qwen3NextConfig(**LAYERS, **DELTA, **EXPERTS, shared_expert_intermediate_size=32), False
    ),
    "qwen3-5": Family(lambda: transformers.Qwen3_5TextConfig(**LAYERS, **DELTA), False),
    "qwen3-5-moe": Family(
        lambda: transformers.Qwen3_5MoeTextConfig(**LAYERS, **DELTA, **EXPERTS, shared_expert_intermediate_size=32),
        False,
    ),
    "olmo-hybrid": Family(lambda: transformers.OlmoHybridConfig(**LAYERS, **DELTA), False),
    "lfm2": Family(lambda: transformers.Lfm2Config(**CONVOLUTION, block_auto_adjust_ff_dim=False), False),
    "lfm2-moe": Family(lambda: transformers.Lfm2MoeConfig(**CONVOLUTION, **EXPERTS, num_dense_layers=2), False),
    "lfm3": Family(lambda: transformers.Lfm3Config(**CONVOLUTION), False),
    "bamba": Family(lambda: transformers.BambaConfig(**LAYERS, **MAMBA, attn_layer_indices=[1, 3]), False),
    "falcon-h1": Family(lambda: transformers.FalconH1Config(**LAYERS, **MAMBA, mamba_d_ssm=128), False),
    "falcon-h1-norm": Family(
        lambda: transformers.FalconH1Config(**LAYERS, **MAMBA, mamba_d_ssm=128, mamba_rms_norm=True), False
    ),
    "granite-4": Family(
        lambda: transformers.GraniteMoeHybridConfig(
            **LAYERS,
            **MAMBA,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            layer_types=["mamba", "attention", "mamba", "attention"],
        ),
        False,
    ),
    "nemotron-h": Family(_nemotron_h, False),
    "zamba2": Family(_zamba2, False),
}
"""Families with recurrent or convolution layers."""


def _longcat_flash() -> Any:
    """Two attention layers and one of experts in each block; two of the experts return their input."""
    sizes = {
        name: value for name, value in DENSE_LATENT.items() if name not in ("num_hidden_layers", "intermediate_size")
    }
    experts = {"n_routed_experts": 6, "zero_expert_num": 2, "moe_topk": 2, "expert_ffn_hidden_size": 32}
    return transformers.LongcatFlashConfig(
        **sizes | {"head_dim": 8}, **experts, num_layers=2, ffn_hidden_size=96, q_lora_rank=48
    )


YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.8}
FAMILIES |= {
    "deepseek-v3": Family(
        lambda: transformers.DeepseekV3Config(**LATENT, q_lora_rank=48, n_group=4, topk_group=2), native=False
    ),
    "deepseek-v3-yarn": Family(
        lambda: transformers.DeepseekV3Config(
            **LATENT, **rope("yarn", **YARN), q_lora_rank=None, n_group=4, topk_group=2, rope_interleave=False
        ),
        native=False,
    ),
    "deepseek-v2": Family(
        lambda: transformers.DeepseekV2Config(**LATENT, q_lora_rank=None, n_group=1, topk_group=1), native=False
    ),
    "minicpm3": Family(lambda: transformers.MiniCPM3Config(**DENSE_LATENT, q_lora_rank=48), native=False),
    "youtu": Family(lambda: transformers.YoutuConfig(**DENSE_LATENT, q_lora_rank=48), native=False),
    "longcat-flash": Family(_longcat_flash, native=False),
    "glm4-moe-lite": Family(
        lambda: transformers.Glm4MoeLiteConfig(**LATENT, q_lora_rank=48, n_group=1, topk_group=1), native=False
    ),
}
SLOW = {
    "gemma3", "gemma4-key-is-value", "gemma4-moe", "ministral3", "stablelm-parallel", "smollm3", "olmo3", "cohere2",
    "granite", "glm4", "exaone4", "phimoe-window", "stablelm", "nemotron", "llama-linear", "llama-yarn", "qwen2",
    "qwen2-moe-window", "llama-biases", "deepseek-v2", "glm4-moe-lite", "minicpm3", "youtu",
}  # fmt: skip
"""Families whose parts are in the first tier with another one."""


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
    family, is_around_zero = (
        {**FAMILIES, **RECURRENT}[name],
        any(word in name for word in ("gemma", "qwen3-next", "qwen3-5")),
    )
    oracle = save_random(family.config(), folder, norms_at=0.0 if is_around_zero else 1.0)
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
