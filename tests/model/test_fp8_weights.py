"""FP8 checkpoints on devices without FP8 products, and the errors of their files.

The oracle is the same model with the dequantised weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from chatcache.errors import ModelFolderError
from chatcache.model.linear import choose_quantization, fp8_problem
from chatcache.model.loading.fp8_weights import Fp8Format, read_fp8_format
from chatcache.model.loading.weights import is_finite
from chatcache.model.runner import Runner
from tests.model.families import EXPERTS, LAYERS, save_random
from tests.model.fp8_folders import FIELDS, save_fp8, save_plain
from tests.model.test_quantised import logprobs

Load = Callable[..., Runner]

PROMPTS = ([1, 5, 9], [7] * 20, [3])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("layout", FIELDS)
def test_fp8_checkpoint_without_fp8_products_equals_the_dequantised_model(
    layout: str, plain: Path, tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    fp8, exact = save_fp8(plain, tmp_path, layout, skipped="down_proj")
    with caplog.at_level(logging.WARNING):
        runner = load(fp8, device="cpu")
    assert "FP8 weights are dequantised: FP8 products need the attention backend 'triton'" in caplog.text
    assert runner.model_info.quantization == "none"
    assert torch.equal(logprobs(runner, PROMPTS), logprobs(load(exact, device="cpu"), PROMPTS))
    original = logprobs(load(plain, device="cpu"), PROMPTS)
    assert 0 < (logprobs(runner, PROMPTS) - original).norm() / original.norm() < 0.05


@pytest.mark.parametrize("layout", ["block", "channel"])
def test_fp8_checkpoint_of_transformers_model_equals_the_dequantised_model(
    layout: str, tmp_path: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {**LAYERS, **EXPERTS, "num_hidden_layers": 2, "head_dim": 32}
    save_random(transformers.Qwen3MoeConfig(**sizes), tmp_path / "plain")
    fp8, exact = save_fp8(tmp_path / "plain", tmp_path, layout)
    with caplog.at_level(logging.WARNING):
        runner = load(fp8, device="cpu")
    assert "FP8 weights are dequantised: qwen3_moe runs through transformers" in caplog.text
    torch.testing.assert_close(logprobs(runner, PROMPTS), logprobs(load(exact, device="cpu"), PROMPTS))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_is_finite_finds_every_fp8_number_that_is_not(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    for number in numbers:
        assert is_finite(number[None]) == bool(number.float().isfinite())


def test_fp8_checkpoint_can_be_quantised_to_int8(plain: Path, tmp_path: Path, load: Load) -> None:
    fp8, exact = save_fp8(plain, tmp_path, "block")
    runners = [load(folder, quantization="int8", device="cpu") for folder in (fp8, exact)]
    assert runners[0].model_info.quantization == "int8"
    assert torch.equal(logprobs(runners[0], PROMPTS), logprobs(runners[1], PROMPTS))


def test_quantization_fp8_on_a_cpu_is_refused_with_the_reason(plain: Path, load: Load) -> None:
    with pytest.raises(ModelFolderError, match=r"quantization fp8: FP8 products need .* 'triton', and on cpu that is"):
        load(plain, quantization="fp8", device="cpu")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (FIELDS["block"], Fp8Format((128, 128))),
        (FIELDS["tensor"], Fp8Format(None)),
        (FIELDS["channel"], Fp8Format(None)),
        ({"quant_method": "awq", "bits": 4}, None),
        ({"quant_method": "compressed-tensors"}, None),
        (_groups := {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}, None),
        (
            {**_groups, "config_groups": {"a": {"weights": {
                "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}}},
            Fp8Format((128, 128)),
        ),
        (None, None),
    ],
)  # fmt: skip
def test_read_fp8_format_returns_the_block(fields: Any, expected: Fp8Format | None) -> None:
    assert read_fp8_format({"quantization_config": fields}, Path("config.json")) == expected


@pytest.mark.parametrize("block", [[128], [128, 0], "128", [128, 12.5]])
def test_malformed_block_size_is_refused_by_name(block: Any, plain: Path, tmp_path: Path, load: Load) -> None:
    fp8, _ = save_fp8(plain, tmp_path, "block")
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = block
    (fp8 / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=r"config\.json: quantization_config\.weight_block_size must be two pos"):
        load(fp8)


def test_other_quantised_weights_are_refused_by_name(plain: Path, tmp_path: Path, load: Load) -> None:
    fp8, _ = save_fp8(plain, tmp_path, "block")
    config = json.loads((fp8 / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "exl3"}}))
    with pytest.raises(ModelFolderError, match=r"its weights are quantised \(exl3\)"):
        load(fp8)


def test_scales_of_a_weight_without_two_dimensions_are_refused_by_name(plain: Path, tmp_path: Path, load: Load) -> None:
    fp8, _ = save_fp8(plain, tmp_path, "channel")
    tensors = load_file(fp8 / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file({**tensors, "model.norm.weight_scale": torch.ones(1)}, fp8 / "model.safetensors")
    with pytest.raises(
        ModelFolderError, match=r"model\.norm\.weight has scales and 1 dimensions; FP8 weights have two"
    ):
        load(fp8)


def test_bad_scales_are_refused_by_name(plain: Path, tmp_path: Path, load: Load) -> None:
    fp8, _ = save_fp8(plain, tmp_path, "block")
    tensors = load_file(fp8 / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    scales = tensors[f"{name}_scale_inv"]
    for changed, message in (
        ({f"{name}_scale_inv": torch.full_like(scales, torch.nan)}, rf"{name}_scale_inv contains NaN"),
        ({f"{name}_scale_inv": scales[:1].clone()}, rf"{name}_scale_inv has shape \[1, 3\]"),
        ({name: tensors[name].float()}, rf"{name} is torch.float32, and {name}_scale_inv exists"),
        ({f"{name}_scale_inv": None}, rf"{name} is torch.float8_e4m3fn, and tensor {name}_scale_inv is missing"),
        ({name: torch.full_like(tensors[name], torch.nan)}, rf"{name} contains NaN"),
    ):
        stored = {key: value for key, value in {**tensors, **changed}.items() if value is not None}
        save_file(stored, fp8 / "model.safetensors")
        with pytest.raises(ModelFolderError, match=message):
            load(fp8)


def test_choose_quantization_depends_on_checkpoint_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_quantization("none", "", is_fp8=True) == choose_quantization("fp8", "", is_fp8=False) == "fp8"
    assert choose_quantization("none", "", is_fp8=False) == choose_quantization("fp8", "old", is_fp8=True) == "none"
    assert choose_quantization("int8", "", is_fp8=True) == "int8"
    with pytest.raises(ModelFolderError, match="quantization fp8: old; choose none"):
        choose_quantization("fp8", "old", is_fp8=False)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "compute capability 8.9, and cuda:0 has 8.6" in fp8_problem("triton", gpu, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8_problem("triton", gpu, torch.bfloat16) == ""
    assert "need dtype bfloat16" in fp8_problem("triton", gpu, torch.float32)
    assert "deterministic is set" in fp8_problem("triton", gpu, torch.bfloat16, deterministic=True)
