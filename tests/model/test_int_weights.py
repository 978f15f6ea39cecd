"""Integer checkpoints: GPTQ, AWQ and compressed-tensors, and the errors of their files.

The oracle is the same model with the dequantised weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from chatcache.errors import ModelFolderError
from chatcache.model.loading.int_weights import IntFormat, read_int_format
from chatcache.model.runner import Runner
from tests.model.families import EXPERTS, LAYERS, save_random
from tests.model.fp8_folders import save_plain
from tests.model.int_folders import FIELDS, SIZE, save_int
from tests.model.test_quantised import logprobs

Load = Callable[..., Runner]

PROMPTS = ([1, 5, 9], [7] * 20, [3])
SLOW = ("gptq", "gptq-8", "packed", "int8")
LAYOUTS = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FIELDS]
MODULE = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_integer_checkpoint_equals_the_dequantised_model(layout: str, plain: Path, tmp_path: Path, load: Load) -> None:
    stored, exact = save_int(plain, tmp_path, layout, skipped="o_proj")
    runner, oracle = load(stored, device="cpu"), load(exact, device="cpu")
    assert torch.equal(logprobs(runner, PROMPTS), logprobs(oracle, PROMPTS))
    assert runner.model_info.num_parameters == oracle.model_info.num_parameters
    original = logprobs(load(plain, device="cpu"), PROMPTS)
    assert 0 < (logprobs(runner, PROMPTS) - original).norm() / original.norm() < 0.2


@pytest.mark.parametrize("layout", [pytest.param("gptq", marks=pytest.mark.slow), "awq"])
def test_integer_checkpoint_of_transformers_model_equals_the_dequantised_model(
    layout: str, tmp_path: Path, load: Load
) -> None:
    sizes = {**LAYERS, **EXPERTS, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"hidden_size": SIZE, "intermediate_size": 2 * SIZE, "moe_intermediate_size": SIZE}
    save_random(transformers.Qwen3MoeConfig(**sizes), tmp_path / "plain")
    stored, exact = save_int(tmp_path / "plain", tmp_path, layout)
    torch.testing.assert_close(
        logprobs(load(stored, device="cpu"), PROMPTS), logprobs(load(exact, device="cpu"), PROMPTS)
    )


def test_integer_checkpoint_can_be_quantised_to_int8(plain: Path, tmp_path: Path, load: Load) -> None:
    folders = save_int(plain, tmp_path, "awq")
    runners = [load(folder, quantization="int8", device="cpu") for folder in folders]
    assert runners[0].model_info.quantization == "int8"
    assert torch.equal(logprobs(runners[0], PROMPTS), logprobs(runners[1], PROMPTS))


def test_integer_checkpoints_differ_by_digest(plain: Path, tmp_path: Path, load: Load) -> None:
    digests = {
        load(save_int(plain, tmp_path / layout, layout)[0], device="cpu").model_info.digest
        for layout in ("gptq", "gptq-order", "awq")
    }
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (FIELDS["gptq"], IntFormat("gptq", 4, SIZE, zero_offset=1)),
        (FIELDS["gptq-8"], IntFormat("gptq", 8, None)),
        (FIELDS["awq"], IntFormat("awq", 4, SIZE)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"}, IntFormat("awq", 4, 128)),
        (FIELDS["packed"], IntFormat("pack-quantized", 4, SIZE)),
        (FIELDS["int8"], IntFormat("int-quantized", 8, None)),
        ({"quant_method": "fp8"}, None),
        ({"quant_method": "compressed-tensors"}, None),
        (None, None),
    ],
)
def test_read_int_format_returns_the_format(fields: Any, expected: IntFormat | None) -> None:
    assert read_int_format({"quantization_config": fields}, Path("config.json")) == expected


@pytest.mark.parametrize(
    ("layout", "changed", "message"),
    [
        ("gptq", {"bits": 3}, r"config\.json: quantization_config\.bits: 3 is not supported; supported: 2, 4, 8"),
        ("gptq", {"bits": [4]}, r"quantization_config\.bits: \[4\] is not supported"),
        ("gptq", {"group_size": 0}, r"quantization_config\.group_size: must be a positive integer or -1, got 0"),
        (
            "gptq",
            {"checkpoint_format": "marlin"},
            r"checkpoint_format: 'marlin' is not supported; supported: gptq,",
        ),
        ("gptq", {"dynamic": {"a": {"bits": 8}}}, r"quantization_config\.dynamic: per-module settings are not supp"),
        ("awq", {"version": "gemv"}, r"quantization_config\.version: 'gemv' is not supported; supported: gemm"),
        ("packed", {"transform_config": {"a": 1}}, r"transform_config: rotated weights are not supported"),
        ("packed", {"format": "marlin-24"}, r"quantised \(compressed-tensors\) in a format that is not supported"),
    ],
)
def test_unsupported_format_is_refused_by_name(
    layout: str, changed: dict[str, Any], message: str, plain: Path, tmp_path: Path, load: Load
) -> None:
    stored, _ = save_int(plain, tmp_path, layout)
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] |= changed
    (stored / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=message):
        load(stored, device="cpu")


@pytest.mark.parametrize(
    ("layout", "changed", "message"),
    [
        ("gptq", {"qweight": torch.zeros(4, 4, dtype=torch.int32)}, rf"{MODULE}\.weight has shape \[4, 32\], config"),
        ("gptq", {"qzeros": None}, rf"tensor {MODULE}\.qzeros is missing"),
        (
            "gptq",
            {"qzeros": torch.zeros(1, 1, dtype=torch.int32)},
            r"qzeros holds \[8, 1\] values, expected \[256, 5\]",
        ),
        ("gptq", {"scales": torch.full((5, 256), torch.nan)}, rf"tensor {MODULE}\.scales contains NaN or infinity"),
        ("gptq", {"g_idx": torch.full((320,), 5, dtype=torch.int32)}, r"g_idx names groups outside 0 to 4"),
        ("awq", {"qweight": torch.zeros(320, 32)}, rf"tensor {MODULE}\.qweight is torch\.float32; expected packed"),
        ("packed", {"weight_scale": torch.ones(256, 2)}, r"weight_scale holds \[256, 2\] values, expected \[256, 5\]"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused_by_name(
    layout: str, changed: dict[str, Any], message: str, plain: Path, tmp_path: Path, load: Load
) -> None:
    stored, _ = save_int(plain, tmp_path, layout)
    tensors = load_file(stored / "model.safetensors")
    tensors |= {f"{MODULE}.{kind}": tensor for kind, tensor in changed.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, stored / "model.safetensors")
    with pytest.raises(ModelFolderError, match=message):
        load(stored, device="cpu")
