"""Models with FP8 layers on Triton kernels, compiled on a GPU and interpreted elsewhere.

The oracle is the same model, with layers that plain torch computes from the same quantised numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chatcache_kernels import fp8
from chatcache_kernels.fp8 import Fp8Weight
from chatcache_kernels.triton import fp8 as kernels
from torch import Tensor

from chatcache.model.decoder import Decoder
from chatcache.model.linear import Fp8Linear, Fp8LinearFactory
from chatcache.model.runner import Runner
from tests.model.drive import CPU, KERNELS, greedy
from tests.model.fp8_folders import save_fp8, save_plain
from tests.model.test_quantised import logprobs

Load = Callable[..., Runner]

PROMPTS = ([1, 5, 9], [7, 2] * 4, [3])
IS_CPU = KERNELS == CPU
OPTIONS = {"attention_backend": "triton", "device": KERNELS.type, "dtype": "float32" if IS_CPU else "bfloat16"}
CLOSE = 1e-4 if IS_CPU else 2e-2  # relative, of float32 and bfloat16 activations


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if not IS_CPU and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(tmp_path_factory.mktemp("plain"))


def in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the kernels of FP8 layers by their reference."""

    def few(x: Tensor, weight: Fp8Weight, bias: Tensor | None, locks: Tensor) -> Tensor:
        return fp8.multiply_few_rows(x, weight, bias)

    monkeypatch.setattr(kernels, "multiply", fp8.multiply)
    monkeypatch.setattr(kernels, "multiply_few_rows", few)


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).norm() <= CLOSE * expected.norm()


def count_fp8(runner: Runner) -> int:
    network: Any = runner._network
    assert isinstance(network, Decoder)
    products = [each for layer in network._layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    assert not isinstance(network._head, Fp8Linear)
    return sum(isinstance(each, Fp8Linear) for each in products)


@pytest.mark.slow
def test_triton_fp8_model_equals_plain_torch(plain: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more than FEW_ROWS tokens are multiplied in FP8, single tokens are not."""
    monkeypatch.setattr(kernels, "FEW_ROWS", 4)
    runner = load(plain, quantization="fp8", **OPTIONS)
    assert count_fp8(runner) == 8
    got, text = logprobs(runner, PROMPTS), greedy(runner, PROMPTS, 4)
    original = logprobs(load(plain, **OPTIONS), PROMPTS)
    assert 1e-4 < (got - original).norm() / original.norm() < 0.1
    in_plain_torch(monkeypatch)
    assert_close(got, logprobs(runner, PROMPTS))
    if IS_CPU:
        assert text == greedy(runner, PROMPTS, 4)


@pytest.mark.parametrize(
    ("layout", "prompts"),
    [
        ("block", PROMPTS[:1]),
        *(
            pytest.param(layout, prompts, marks=pytest.mark.slow)
            for layout, prompts in (("block", PROMPTS[1:]), ("tensor", PROMPTS), ("channel", PROMPTS))
        ),
    ],
)
def test_triton_fp8_checkpoint_equals_the_dequantised_model(
    layout: str, prompts: Sequence[list[int]], plain: Path, tmp_path: Path, load: Load
) -> None:
    """Few rows use the weights as stored, without another rounding; a layer that is not FP8 stays as it is."""
    folder, exact = save_fp8(plain, tmp_path, layout, skipped="o_proj")
    runner = load(folder, **OPTIONS)
    assert (runner.model_info.quantization, count_fp8(runner)) == ("fp8", 6)
    for prompt in prompts:  # each alone: few rows
        assert_close(logprobs(runner, [prompt]), logprobs(load(exact, **OPTIONS), [prompt]))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["block", "channel"])
def test_triton_fp8_checkpoint_multiplies_many_rows_in_fp8(
    layout: str, plain: Path, tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "FEW_ROWS", 0)
    runner = load(save_fp8(plain, tmp_path, layout)[0], **OPTIONS)
    got = logprobs(runner, PROMPTS)
    in_plain_torch(monkeypatch)
    assert_close(got, logprobs(runner, PROMPTS))


@pytest.mark.slow
def test_triton_fp8_model_info_reports_sizes_and_another_digest(plain: Path, tmp_path: Path, load: Load) -> None:
    infos = [load(plain, **OPTIONS).model_info, load(plain, quantization="fp8", **OPTIONS).model_info]
    assert infos[0].digest != infos[1].digest
    assert infos[1].precision.endswith("fp8 weights")
    itemsize = 4 if IS_CPU else 2
    weights, outputs = 2 * (384 * 256 + 256 * 256 + 640 * 256 + 256 * 320), 2 * (384 + 256 + 640 + 256)
    assert infos[0].weight_bytes - infos[1].weight_bytes == weights * (itemsize - 1) - 4 * outputs
    assert infos[0].step_bytes - infos[1].step_bytes == weights * (itemsize - 1) - 4 * outputs


def test_fp8_factory_leaves_sizes_that_the_products_do_not_support() -> None:
    make = Fp8LinearFactory(quantises=True)
    assert isinstance(make(torch.randn(32, 48, device=KERNELS)), Fp8Linear)
    assert not isinstance(make(torch.randn(33, 48, device=KERNELS)), Fp8Linear)
    assert not isinstance(make(torch.randn(32, 40, device=KERNELS)), Fp8Linear)
    assert not isinstance(Fp8LinearFactory(quantises=False)(torch.randn(32, 48, device=KERNELS)), Fp8Linear)
    assert (make.num_weights, make.num_bytes) == (32 * 48, 32 * 48 + 4 * 32)


@pytest.mark.slow
def test_triton_fp8_transformers_model_is_close_to_the_model(
    sample_of: Callable[[str], Any], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = sample_of("gemma2")
    prompts = [prompt[:9] for prompt in sample.prompts]
    runner = load(sample.folder, quantization="fp8", **OPTIONS)
    got, original = logprobs(runner, prompts), logprobs(load(sample.folder, **OPTIONS), prompts)
    assert 1e-4 < (got - original).norm() / original.norm() < 0.15
    in_plain_torch(monkeypatch)
    assert_close(got, logprobs(runner, prompts))
