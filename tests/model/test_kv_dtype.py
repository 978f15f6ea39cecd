"""Models with FP8 pages, on the reference and on Triton kernels, against the same models with plain pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chatcache_kernels import reference
from chatcache_kernels.fp8 import DTYPE as FP8
from chatcache_kernels.fp8 import SCALE_BYTES
from msgspec.structs import replace

from chatcache.errors import ModelFolderError
from chatcache.model.attention import allocate_stores
from chatcache.model.runner import Runner
from tests.model.drive import CPU, KERNELS, greedy
from tests.model.test_quantised import logprobs

Get = Callable[[str], Any]
Load = Callable[..., Runner]

PROMPTS = ([1, 5, 9] * 9, [7, 2] * 4, [3])
TRITON = {"attention_backend": "triton", "device": KERNELS.type, "dtype": "float32" if CPU == KERNELS else "bfloat16"}


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_logits_over_fp8_pages_are_close_to_those_over_plain_pages(name: str, sample_of: Get, load: Load) -> None:
    """As close as 3-bit fractions allow, and the same whatever part of the prompt was stored before."""
    folder = sample_of(name).folder
    runner, plain = load(folder, kv_cache_dtype="fp8"), load(folder)
    assert 1e-5 < distance(logprobs(runner, PROMPTS), logprobs(plain, PROMPTS)) < 0.05
    assert greedy(runner, PROMPTS, 8) == greedy(runner, PROMPTS, 8, chunk=5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_logits_over_fp8_pages_of_triton_are_close_to_reference(name: str, sample_of: Get, load: Load) -> None:
    """Keys that differ in their last bit may be quantised to neighbours, so the results are not equal."""
    if CPU != KERNELS and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    folder = sample_of(name).folder
    runner, expected = load(folder, kv_cache_dtype="fp8", **TRITON), load(folder, kv_cache_dtype="fp8")
    assert distance(logprobs(runner, PROMPTS), logprobs(expected, PROMPTS)) < (2e-3 if CPU == KERNELS else 2e-2)


@pytest.mark.usefixtures("dot_of_single_rows")
@pytest.mark.slow
def test_deterministic_model_over_fp8_pages_does_not_depend_on_chunks(sample_of: Get, load: Load) -> None:
    """Logits are equal to the bit; loading has also compared batches, chunks and single tokens."""
    if CPU != KERNELS and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    runner = load(sample_of("qwen3").folder, kv_cache_dtype="fp8", deterministic=True, **TRITON)
    together = logprobs(runner, PROMPTS)
    alone = torch.cat([logprobs(runner, [prompt]) for prompt in PROMPTS])
    assert torch.equal(together, alone)


def test_fp8_pages_take_a_byte_per_number_and_have_another_digest(sample_of: Get, load: Load) -> None:
    folder = sample_of("llama").folder
    runner, plain = load(folder, kv_cache_dtype="fp8"), load(folder)
    geometry, size = runner._network.geometry, plain.capacity().page_size
    heads = [layer.kv for layer in geometry.layers if layer is not None]
    assert geometry.page_bytes(size) == sum(2 * size * kv.num_kv_heads * (kv.head_dim + SCALE_BYTES) for kv in heads)
    assert sum(store.page_bytes for store in allocate_stores(reference, geometry, 3, size)) == geometry.page_bytes(size)
    assert {memory.dtype for store in runner._eager._stores for memory in store.tensors} == {FP8}
    assert runner.capacity().num_pages > plain.capacity().num_pages
    assert runner.model_info.digest != plain.model_info.digest
    assert replace(runner.model_info, digest="") == replace(plain.model_info, digest="")


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {"attention_backend": "cpu", "device": "cpu"}, "'fp8' is for GPUs"),
        ("llama", {"kv_cache_dtype": "int4"}, "'int4' is not supported; choose auto or fp8"),
        ("deepseek-v3", {}, "does not work with latent attention"),
    ],
)
def test_unsupported_kv_cache_dtype_is_refused_with_the_reason(
    name: str, options: dict[str, str], reason: str, sample_of: Get, load: Load
) -> None:
    folder: Path = sample_of(name).folder
    with pytest.raises(ModelFolderError, match=f"kv_cache_dtype .*{reason}"):
        load(folder, **{"kv_cache_dtype": "fp8", **options})
