"""Decoder blocks that replace those of transformers models give what the modules give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chatcache.config import EngineConfig
from chatcache.model.loading.loader import load_model
from chatcache.model.transformers.blocks import Block, BlockStack
from tests.model.drive import Driver, make_draws
from tests.model.families import DELTA, EXPERTS, LAYERS, VOCAB, save_random

PANELS = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}  # projections of whole panels
WIDE = {**LAYERS, **DELTA, "head_dim": 64}  # rotates 16 of 64 dimensions, which fits the kernels
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-5": lambda: transformers.Qwen3_5TextConfig(**WIDE),
    "qwen3-5-bias": lambda: transformers.Qwen3_5TextConfig(**WIDE, attention_bias=True),
    "qwen3-5-panels": lambda: transformers.Qwen3_5TextConfig(**WIDE | PANELS),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**WIDE, **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**LAYERS, **EXPERTS, head_dim=32, mlp_only_layers=[1]),
    "qwen3-moe-yarn": lambda: transformers.Qwen3MoeConfig(
        **LAYERS,
        **EXPERTS,
        head_dim=32,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
}


DENSE = ("qwen3-5", "qwen3-5-bias", "qwen3-5-panels")


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in CONFIGS), *((name, "bfloat16") for name in DENSE)]
)
def test_blocks_give_the_logprobs_of_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    """In bfloat16 without experts: two of nearly equal weight change places by rounding, in transformers as well."""
    oracle = save_random(CONFIGS[name](), tmp_path, norms_at=1.0 if "moe" in name else 0.1, std=0.05)
    runner = load_model(EngineConfig(model=str(tmp_path), dtype=dtype, kv_memory_bytes=2**24, max_num_seqs=2))
    stacks = [each for each in runner._network._model.modules() if isinstance(each, BlockStack)]  # type: ignore[attr-defined]
    assert len(stacks) == 1 and all(isinstance(block, Block) for block in stacks[0].blocks)
    assert (stacks[0]._decode._decoder is not None) == (dtype == "bfloat16" and name == "qwen3-5-panels")
    prompt = torch.randint(0, VOCAB, (29,)).tolist()
    with torch.inference_mode():
        want = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    driver, got = Driver(runner), []
    for first, end in ((0, 17), (17, 28), (28, 29)):
        draws = make_draws([{"row": 0, "num_top": VOCAB}])
        result = driver.feed({0: prompt[first:end]}, draws)
        order = result.top_tokens[0].argsort()
        got.append((end - 1, torch.from_numpy(result.top_logprobs[0][order])))
    for place, logprobs in got:
        difference = (logprobs - want[place]).norm() / want[place].norm()
        assert difference <= (1e-5 if dtype == "float32" else 0.005), (place, difference)
