"""Sums of final hidden states equal transformers' `last_hidden_state`, for any chunks and rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from chatcache.bench.drivers import SHAPES, write_model
from chatcache.config import EngineConfig
from chatcache.errors import ModelFolderError
from chatcache.model.decoder import Decoder
from chatcache.model.loading.files import read_pooling
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import Runner
from chatcache.types.plan import F32, Pools
from tests.model.drive import Driver, make_draws
from tests.model.families import FAMILIES, Sample

Get = Callable[[str], Sample]
Load = Callable[..., Runner]

QUICK_FAMILIES = ("qwen3", "gpt2")  # a native one, and one through transformers; the others are in the second tier


def hidden_states(sample: Sample, tokens: tuple[int, ...]) -> F32:
    """Return transformers' hidden states after the last norm, [T, hidden]."""
    with torch.inference_mode():
        model = AutoModel.from_pretrained(sample.folder, dtype=torch.float32).eval()
        states: F32 = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    return states


def pools_of(rows: list[int], num_tokens: list[int]) -> Pools:
    return Pools(np.array(rows, np.int32), np.array(num_tokens, np.int32))


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in QUICK_FAMILIES else pytest.mark.slow) for name in sorted(FAMILIES)],
)
def test_pooled_states_equal_transformers(family: str, sample_of: Get, load: Load) -> None:
    """One row is pooled at its last token, one over all tokens in two chunks, and one is only drawn."""
    sample = sample_of(family)
    last, mean, drawn = sample.prompts[1], sample.prompts[2], sample.prompts[0]
    runner = load(sample.folder)
    driver = Driver(runner)
    first = driver.feed({0: last, 1: mean[:20], 2: drawn}, make_draws([{"row": 2}]), None, pools_of([0, 1], [1, 20]))
    second = driver.feed({1: mean[20:]}, make_draws([]), None, pools_of([0], [len(mean) - 20]))
    assert first.pooled is not None and second.pooled is not None
    assert runner.model_info.hidden_size == first.pooled.shape[1]
    np.testing.assert_allclose(first.pooled[0], hidden_states(sample, last)[-1], atol=2e-4)
    total = first.pooled[1] + second.pooled[0]
    np.testing.assert_allclose(total, hidden_states(sample, mean).sum(axis=0), atol=2e-3)
    assert first.tokens[0, 0] == sample.answers[0][0]


@pytest.mark.slow
def test_deterministic_states_do_not_depend_on_the_batch(sample_of: Get, load: Load) -> None:
    for family in ("llama", "gpt2"):
        sample = sample_of(family)
        runner = load(sample.folder, deterministic=True, attention_backend="auto")
        prompt, other = sample.prompts[1], sample.prompts[0]
        alone = Driver(runner).feed({0: prompt}, make_draws([]), None, pools_of([0], [1])).pooled
        driver = Driver(runner)
        driver.feed({1: prompt[:6]}, make_draws([]))
        together = driver.feed({0: other, 1: prompt[6:]}, make_draws([{"row": 0}]), None, pools_of([1], [1])).pooled
        assert alone is not None and together is not None
        np.testing.assert_array_equal(alone, together)


def test_cpu_kernels_and_int8_weights_return_states(sample_of: Get, load: Load) -> None:
    sample = sample_of("llama")
    prompt = sample.prompts[1]
    want = hidden_states(sample, prompt)[-1]
    for options, angle in (({}, 0.9999), ({"dtype": "bfloat16"}, 0.995), ({"quantization": "int8"}, 0.99)):
        runner = load(sample.folder, attention_backend="cpu", page_size=16, **options)
        pooled = Driver(runner).feed({0: prompt}, make_draws([]), None, pools_of([0], [1])).pooled
        assert pooled is not None and pooled.dtype == np.float32
        cosine = float(pooled[0] @ want / (np.linalg.norm(pooled[0]) * np.linalg.norm(want)))
        assert cosine > angle, (options, cosine)


@pytest.mark.slow
def test_short_rows_in_one_kernel_have_the_states_of_torch(tmp_path: Path) -> None:
    write_model(SHAPES["tiny"], tmp_path)
    runner = load_model(
        EngineConfig(model=str(tmp_path), dtype="bfloat16", quantization="int8", kv_memory_bytes=1 << 20, device="cpu")
    )
    network = runner._network
    assert isinstance(network, Decoder) and network._fused is not None
    results: list[tuple[F32, list[int]]] = []
    for fused in (network._fused, None):
        network._fused = fused
        driver = Driver(runner)
        driver.feed({0: [1] * 9, 1: [2] * 15, 2: [3] * 4}, make_draws([]))
        grants = {0: [7], 1: [8, 9], 2: [10]}
        result = driver.feed(grants, make_draws([{"row": 0}]), None, pools_of([1, 2], [2, 1]))
        alone = driver.feed({1: [11]}, make_draws([]), None, pools_of([0], [1]))
        assert result.pooled is not None and alone.pooled is not None
        results.append((np.concatenate((result.pooled, alone.pooled)), result.tokens.ravel().tolist()))
    (ours, tokens), (plain, plain_tokens) = results
    assert tokens == plain_tokens
    cosines = (ours * plain).sum(axis=1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(plain, axis=1)
    assert cosines.min() > 0.999


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ('{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}', "mean"),
        ('{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": false, "include_prompt": true}', "last"),
        ('{"pooling_mode_mean_sqrt_len_tokens": true}', "mean"),
        ('{"pooling_mode": "lasttoken"}', "last"),
        ('{"pooling_mode": ["mean"]}', "mean"),
    ],
)
def test_folder_of_sentence_transformers_declares_its_pooling(
    config: str, pooling: str, sample_of: Get, load: Load
) -> None:
    folder = sample_of("llama").folder
    path = folder / "1_Pooling" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(config)
    try:
        assert read_pooling(folder) == load(folder).model_info.pooling == pooling
        assert load(folder, pooling="mean").model_info.pooling == "mean"
    finally:
        path.unlink()
    assert load(folder).model_info.pooling == "last"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ('{"pooling_mode_cls_token": true}', "pooling cls_token is"),
        ('{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}', "mean and max"),
        ("{}", "of no kind"),
    ],
)
def test_unsupported_pooling_is_rejected_unless_chosen(config: str, found: str, sample_of: Get, load: Load) -> None:
    folder = sample_of("llama").folder
    path = folder / "1_Pooling" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(config)
    try:
        with pytest.raises(ModelFolderError, match=f"1_Pooling/config.json: .*{found}.*choose --pooling last or mean"):
            load(folder)
        assert load(folder, pooling="last").model_info.pooling == "last"
    finally:
        path.unlink()


def test_projection_after_the_pooling_is_rejected_unless_pooling_is_chosen(sample_of: Get, load: Load) -> None:
    folder = sample_of("llama").folder
    path = folder / "2_Dense" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"in_features": 64, "out_features": 32}')
    try:
        with pytest.raises(ModelFolderError, match=r"2_Dense/config\.json: a projection after the pooling"):
            load(folder)
        assert load(folder, pooling="last").model_info.pooling == "last"
    finally:
        path.unlink()


def test_unknown_pooling_is_rejected(sample_of: Get, load: Load) -> None:
    with pytest.raises(ModelFolderError, match="pooling 'cls' is not supported; choose auto, last, mean"):
        load(sample_of("llama").folder, pooling="cls")


def test_base_model_without_an_output_head_is_loaded(sample_of: Get, load: Load, tmp_path: Path) -> None:
    """Embedding models are saved without the prefix `model.` of a causal LM; the embeddings replace the head."""
    sample = sample_of("llama")
    AutoModel.from_pretrained(sample.folder, dtype=torch.float32).save_pretrained(tmp_path)
    config = json.loads((sample.folder / "config.json").read_text())
    for architecture, is_tied in (("LlamaForCausalLM", True), ("LlamaModel", True), ("LlamaModel", False)):
        changed = {**config, "architectures": [architecture], "tie_word_embeddings": is_tied}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        prompt = sample.prompts[1]
        result = Driver(load(tmp_path)).feed({0: prompt}, None, None, pools_of([0], [1]))
        assert result.pooled is not None and result.tokens[0, 0] == sample.answers[1][0]
        np.testing.assert_allclose(result.pooled[0], hidden_states(sample, prompt)[-1], atol=2e-4)


@pytest.mark.slow
@pytest.mark.interpreter
def test_triton_kernels_return_states(sample_of: Get, load: Load) -> None:
    sample = sample_of("llama")
    first, second = sample.prompts[0], sample.prompts[1]
    driver = Driver(load(sample.folder, attention_backend="triton"))
    driver.feed({0: second[:9]}, make_draws([]))
    result = driver.feed({1: first, 0: second[9:]}, make_draws([{"row": 0}]), None, pools_of([0, 1], [5, 1]))
    assert result.pooled is not None and result.tokens[0, 0] == sample.answers[0][0]
    np.testing.assert_allclose(result.pooled[0], hidden_states(sample, first).sum(axis=0), atol=1e-3)
    np.testing.assert_allclose(result.pooled[1], hidden_states(sample, second)[-1], atol=3e-4)
