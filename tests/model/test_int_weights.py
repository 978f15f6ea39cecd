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
from chatcache.model.loading.int_weights import IntFormat, IntWeights, open_weights, read_int_format
from chatcache.model.runner import Runner
from tests.model.families import EXPERTS, LAYERS, save_random
from tests.model.fp8_folders import save_plain
from tests.model.int_folders import FIELDS, SIZE, save_int
from tests.model.test_quantised import logprobs
from tests.model.test_towers import save_composite

Load = Callable[..., Runner]

PROMPTS = ([1, 5, 9], [7] * 20, [3])
SLOW = ("gptq", "gptq-8", "packed", "int8")
LAYOUTS = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FIELDS]
MODULE = "model.layers.0.mlp.down_proj"


def _weights(**changed: Any) -> dict[str, Any]:
    """The groups of a compressed-tensors config with other fields."""
    weights = FIELDS["packed"]["config_groups"]["group_0"]["weights"]
    return {"config_groups": {"group_0": {"weights": {**weights, **changed}}}}


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


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5", "llama4"])
def test_integer_checkpoint_of_composite_model_equals_the_dequantised_model(
    name: str, tmp_path: Path, load: Load
) -> None:
    """The config of the text model has no `quantization_config` of its own."""
    save_composite(name, tmp_path / "plain")
    (tmp_path / "plain/model.safetensors.index.json").unlink()
    tensors: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "plain").glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    save_file(tensors, tmp_path / "plain/model.safetensors")
    runner, oracle = (load(folder, device="cpu") for folder in save_int(tmp_path / "plain", tmp_path, "awq"))
    torch.testing.assert_close(logprobs(runner, PROMPTS), logprobs(oracle, PROMPTS))
    assert runner.model_info.num_parameters == oracle.model_info.num_parameters


def test_expand_all_keeps_the_type_of_tensors_that_are_not_quantised(plain: Path, tmp_path: Path) -> None:
    stored, exact = save_int(plain, tmp_path, "awq", skipped="o_proj")
    weights = open_weights(stored, json.loads((stored / "config.json").read_text()))
    assert isinstance(weights, IntWeights)
    found = weights.expand_all(torch.bfloat16)
    expected = load_file(exact / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        is_quantised = name.endswith("_proj.weight") and "o_proj" not in name
        assert torch.equal(found[name], tensor.to(torch.bfloat16) if is_quantised else tensor)
        assert found[name].dtype == (torch.bfloat16 if is_quantised else tensor.dtype)


def test_weight_with_experts_in_a_third_dimension_is_refused_by_name(tmp_path: Path) -> None:
    words = torch.zeros(2, 8, 8, dtype=torch.int32)
    save_file(
        {"experts.weight_packed": words, "experts.weight_scale": torch.ones(2, 8, 1)}, tmp_path / "model.safetensors"
    )
    weights = open_weights(tmp_path, {"quantization_config": FIELDS["packed"]})
    with pytest.raises(ModelFolderError, match=r"tensor experts\.weight has 3 dimensions; expected two"):
        weights.get("experts.weight", weights.shape("experts.weight"))


def test_empty_tensor_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"a.bias": torch.zeros(0), "a.g_idx": torch.zeros(0)}, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path, {})
    with pytest.raises(ModelFolderError, match=r"tensor a\.bias is empty"):
        weights.get("a.bias", (0,))


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
        ("gptq", {"bits": 4.0}, r"quantization_config\.bits: 4\.0 is not supported"),
        ("packed", {"format": ["pack-quantized"]}, r"quantised \(compressed-tensors\) in a format that is not supp"),
        ("packed", {"format": "gptq"}, r"quantised \(compressed-tensors\) in a format that is not supported"),
        ("packed", {"config_groups": {"a": "b"}}, r"config_groups: must be an object, got 'b'"),
        ("packed", {"config_groups": {"a": {"weights": [4]}}}, r"config_groups\.weights: must be an object, got \[4\]"),
        ("packed", _weights(group_size=[64]), r"config_groups\.weights\.group_size: must be a positive integer or -1"),
        ("packed", _weights(num_bits={}), r"config_groups\.weights\.num_bits: \{\} is not supported"),
        ("packed", {"sparsity_config": "dense"}, r"sparsity_config: must be an object, got 'dense'"),
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
        ("gptq", {"scales": torch.ones(256)}, r"scales holds \[256\] values, expected \[5, 256\]"),
        ("gptq", {"qzeros": torch.zeros(5, 8, 4, dtype=torch.int32)}, r"qzeros has 3 dimensions; expected packed"),
        ("gptq", {"g_idx": torch.zeros(0, dtype=torch.int32)}, r"g_idx is empty"),
        (
            "awq",
            {"qweight": torch.zeros(320, 32)},
            rf"tensor {MODULE}\.qweight is torch\.float32; expected torch\.int32",
        ),
        ("awq", {"qweight": torch.zeros(320, 32, dtype=torch.int8)}, r"qweight is torch\.int8; expected torch\.int32"),
        (
            "packed",
            {"weight_zero_point": torch.zeros(3, dtype=torch.int8)},
            r"zero_point holds \[3\] values, expected \[256, 5\]",
        ),
        (
            "packed",
            {"weight_zero_point": torch.zeros(2, 5, dtype=torch.int8)},
            r"zero_point holds \[2, 5\] values, expected \[256, 5\]",
        ),
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
