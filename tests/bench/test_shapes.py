"""Models with random weights: written folders and weights drawn on the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from chatcache import factory
from chatcache.bench.drivers import (
    SHAPES,
    TRANSFORMERS_SHAPES,
    RandomWeights,
    Shape,
    write_config,
    write_model,
    write_transformers_model,
)
from chatcache.bench.engine_bench import (
    count_matmul_params,
)
from chatcache.cli.bench import ShapeName
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import ModelFolderError
from chatcache.model.loading.loader import load_model
from chatcache.types.events import Tokens
from chatcache.types.request import GenerateRequest, SamplingParams
from loadtest.peers.__main__ import SHAPES as COMPARED

QUICK = EngineConfig(dtype="float32", attention_backend="reference", kv_memory_bytes=2**24)


def greedy(num_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=1.0, n=n, max_tokens=num_tokens, ignore_eos=True)


def write_folder(shape: Shape, folder: Path) -> Path:
    write_model(shape, folder, dtype=torch.float32)
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_write_model_loads_completely_in_transformers(tmp_path: Path, tied: bool, qk_norm: bool) -> None:
    shape = dataclasses.replace(SHAPES["tiny"], tied=tied, qk_norm=qk_norm)
    write_model(shape, tmp_path, seed=3)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    weight = model.model.layers[1].mlp.up_proj.weight.float()
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    engine = factory.build_engine(msgspec.structs.replace(QUICK, model=str(tmp_path)), need_tokenizer=False)
    body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name)
    assert count_matmul_params(tmp_path, engine.model_info) == body


def test_random_weights_depend_on_seed_only(tmp_path: Path) -> None:
    """The text depends on the seed; the tensors are those of transformers' model."""
    shape, texts = dataclasses.replace(SHAPES["tiny"], tied=False, qk_norm=True), []
    write_config(shape, tmp_path, dtype=torch.float32)
    for seed in (0, 0, 1):
        weights = RandomWeights(shape, "cpu", dtype=torch.float32, seed=seed, std=0.2)
        config = msgspec.structs.replace(QUICK, model=str(tmp_path))
        runner = load_model(config, weights=weights)
        assert runner.model_info.digest == load_model(config, weights=weights).model_info.digest
        engine = Engine(runner, runner.model_info, config)
        engine.add(GenerateRequest(request_id="a", prompt=tuple(range(20)), params=greedy(8)))
        events = [event for _ in range(20) if engine.has_work() for event in engine.step()]
        texts.append([event.token_ids for event in events if isinstance(event, Tokens)])
    assert texts[0] == texts[1] != texts[2]
    model = AutoModelForCausalLM.from_pretrained(write_folder(shape, tmp_path / "written"), dtype=torch.float32)
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert all(weights.get(name, size).shape == size for name, size in names.items())
    with pytest.raises(ModelFolderError, match="random weights have shape"):
        weights.get("lm_head.weight", (2, 2))


TINY: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "vocab_size": 199,
    },
    "qwen3-moe-1b": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 199,
    },
    "gemma3-1b": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "vocab_size": 199,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS_SHAPES)
def test_write_transformers_model_writes_a_model_that_loads(name: str, tmp_path: Path) -> None:
    write_transformers_model({**TRANSFORMERS_SHAPES[name], **TINY[name]}, tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    runner = load_model(msgspec.structs.replace(QUICK, model=str(tmp_path), max_model_len=64))
    info = runner.model_info
    body = sum(p.numel() for key, p in model.named_parameters() if "embed" not in key and "lm_head" not in key)
    unused = sum(p.numel() for key, p in model.named_parameters() if "experts" in key) // 2
    assert count_matmul_params(tmp_path, info) == body - unused


def test_shape_names_of_the_command_are_those_of_the_models() -> None:
    names = get_args(get_args(get_args(ShapeName)[0])[0])
    assert names == (*SHAPES, *TRANSFORMERS_SHAPES)
    assert set(COMPARED) < set(names)
