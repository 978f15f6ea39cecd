"""Models with random weights: written folders and weights drawn on the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from chatcache import factory
from chatcache.bench.drivers import SHAPES, RandomWeights, Shape, write_config, write_model
from chatcache.bench.engine_bench import (
    count_matmul_params,
)
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import ModelFolderError
from chatcache.model.loading.loader import load_model
from chatcache.types.events import Tokens
from chatcache.types.request import GenerateRequest, SamplingParams

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
