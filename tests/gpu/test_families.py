"""Models of every kind on a GPU: greedy tokens equal transformers, and every step size is captured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from chatcache.config import EngineConfig
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import AsyncLaunch
from tests.model.drive import Driver, greedy, make_draws
from tests.model.families import FAMILIES, NUM_NEW, RECURRENT, make_sample

pytestmark = pytest.mark.gpu

NAMES = (
    "qwen3", "gemma2", "gemma3", "gemma4-shared-layers", "gpt-oss-sinks", "qwen3-moe", "deepseek-v3", "smollm3",
    "qwen3-next", "qwen3-5", "lfm2-moe", "falcon-h1", "nemotron-h",
)  # fmt: skip
UNCAPTURED = ("gemma3n", "phimoe-window")  # transformers copies numbers from the host in every step
OTHERS = tuple(sorted({*FAMILIES, *RECURRENT} - {*NAMES}))


def check(name: str, folder: Path) -> None:
    """Compare captured and uncaptured steps with transformers on the CPU."""
    try:
        sample = make_sample(name, folder)
    except AttributeError as error:  # a family that this release of transformers does not have
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    config = EngineConfig(
        model=str(folder), device="cuda", dtype="float32", kv_memory_bytes=4 << 20, page_size=8, max_num_seqs=16
    )
    for graphs in (None, AsyncLaunch(())):
        runner = load_model(config, async_launch=graphs)
        captured, planned = runner.captured_steps
        is_captured = graphs is None and not runner._network.geometry.has_chunks
        assert captured == (0 if name in UNCAPTURED else planned) and (planned > 0) == is_captured
        assert greedy(runner, sample.prompts, NUM_NEW) == [list(answer) for answer in sample.answers]
        runner.close()


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logprobs_are_near_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    """Weights of these models are large, so that a logarithm differs by some units of the type's precision."""
    sample = make_sample(name, tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cuda", dtype=dtype, kv_memory_bytes=4 << 20, page_size=8, max_num_seqs=16
    )
    runner = load_model(config)
    prompt = sample.prompts[2]
    driver = Driver(runner)
    driver.feed({0: prompt[:20]})
    found = driver.feed({0: prompt[20:]}, make_draws([{"row": 0, "num_top": 20}]))
    want = sample.logprobs(prompt)[torch.from_numpy(found.top_tokens[0]).long()]
    tolerance = {"float16": 0.05, "bfloat16": 0.4}[dtype]
    torch.testing.assert_close(torch.from_numpy(found.top_logprobs[0]), want, atol=tolerance, rtol=0.0)
    runner.close()


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_of_a_family_equal_transformers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_greedy_tokens_of_another_family_equal_transformers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)
