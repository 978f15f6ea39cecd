"""Models with latent attention against transformers: forms, engine, preemption, beams, deterministic mode."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import ModelFolderError
from chatcache.model.runner import Runner
from chatcache.model.transformers.latent import LatentAttention
from chatcache.types.events import CandidateDone, Failed, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, SamplingParams
from tests.model.drive import KERNELS, Driver, greedy, make_draws
from tests.model.families import LATENT, VOCAB, Sample, save_random
from tests.model.test_folders import set_config

Get = Callable[[str], Sample]
Load = Callable[..., Runner]
LATENT_FAMILIES = ("deepseek-v3", "deepseek-v3-yarn", "deepseek-v2", "glm4-moe-lite")


def _generate(sample: Sample, prompt: tuple[int, ...], num_new: int, **options: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = sample.oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, pad_token_id=0, **options
        )
    return [row[len(prompt) :].tolist() for row in out]


def _run(engine: Engine, requests: list[GenerateRequest]) -> dict[str, list[list[int]]]:
    """Return the candidates of every request, in order of their index."""
    found: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Tokens):
                found.setdefault((event.request_id, event.index), []).extend(event.token_ids)
            elif isinstance(event, CandidateDone):
                found.setdefault((event.request_id, event.index), [])
    return {
        request.request_id: [found[key] for key in sorted(found) if key[0] == request.request_id]
        for request in requests
    }


@pytest.mark.parametrize("family", ["deepseek-v3", pytest.param("glm4-moe-lite", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "cpu"])
def test_greedy_and_beams_equal_transformers_in_a_mixed_batch_that_swaps(
    family: str, backend: str, sample_of: Get, load: Load
) -> None:
    """Twice: the second time, prefixes are cached. The store is too small for all requests."""
    sample = sample_of(family)
    first, second, third, fourth = sample.prompts
    page_bytes = 3 * 8 * 40 * 4  # layers, tokens, dimensions, float32
    runner = load(
        sample.folder, attention_backend=backend, kv_memory_bytes=22 * page_bytes, swap_space_bytes=60 * page_bytes
    )
    assert runner.capacity().kv_bytes == 22 * page_bytes and runner.capacity().num_host_pages == 60
    config = EngineConfig(page_size=8, max_num_batched_tokens=48, preemption_mode="swap")
    engine = Engine(runner, runner.model_info, config)
    plain = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    fork = SamplingParams(temperature=0.0, max_tokens=12, n=3, ignore_eos=True)
    beams = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    requests = [
        GenerateRequest(request_id="greedy", prompt=second, params=plain),
        GenerateRequest(request_id="long", prompt=fourth, params=plain),
        GenerateRequest(request_id="beams", prompt=third, params=beams),
        GenerateRequest(request_id="forks", prompt=first, params=fork),
    ]
    want = {
        "greedy": _generate(sample, second, 64),
        "long": _generate(sample, fourth, 64),
        "beams": _generate(sample, third, 10, num_beams=4, num_return_sequences=4),
        "forks": _generate(sample, first, 12) * 3,
    }
    for _ in range(2):
        assert _run(engine, requests) == want
    health = engine.health()
    assert health.num_preemptions > 0 and health.num_page_copies > 0


def _logprobs(runner: Runner, prompt: tuple[int, ...], known: int) -> torch.Tensor:
    """Return the log-probabilities after a prompt whose first `known` tokens are cached, next to a decoding row."""
    driver = Driver(runner)
    driver.feed({0: prompt[:known], 1: prompt[:5]})
    result = driver.feed({1: prompt[5:6], 0: prompt[known:]}, make_draws([{"row": 1, "num_top": VOCAB}]))
    found = torch.full((VOCAB,), torch.nan)
    found[torch.from_numpy(result.top_tokens[0]).long()] = torch.from_numpy(result.top_logprobs[0])
    return found


@pytest.mark.parametrize("family", LATENT_FAMILIES)
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_both_forms_equal_transformers(
    family: str, form: str, sample_of: Get, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"absorbed": "expanded", "expanded": "absorbed"}[form]
    monkeypatch.setattr(LatentAttention, f"cost_of_{other}", lambda *_: float("inf"))
    sample = sample_of(family)
    prompt = sample.prompts[3]
    runner = load(sample.folder, attention_backend="cpu")
    calls: list[int] = []
    expand = LatentAttention._attend_expanded

    def record(self: LatentAttention, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(q))
        return expand(self, q, *rest)

    monkeypatch.setattr(LatentAttention, "_attend_expanded", record)
    torch.testing.assert_close(_logprobs(runner, prompt, 40), sample.logprobs(prompt), atol=1e-4, rtol=1e-4)
    assert sorted(calls) == ([] if form == "absorbed" else [5] * 3 + [24] * 3 + [40] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v2"])
def test_interpreted_kernels_give_the_same_answers(family: str, sample_of: Get, load: Load) -> None:
    sample = sample_of(family)
    runner = load(sample.folder, attention_backend="triton", device=str(KERNELS))
    assert greedy(runner, sample.prompts[:2], 6, chunk=9) == [list(answer[:6]) for answer in sample.answers[:2]]


@pytest.mark.slow
def test_deterministic_mode_gives_the_same_bits_cached_and_cold(sample_of: Get, load: Load) -> None:
    sample = sample_of("deepseek-v3")
    prompt = sample.prompts[2]
    runner = load(sample.folder, attention_backend="cpu", deterministic=True)
    cold = Driver(runner).feed({0: prompt}, make_draws([{"row": 0, "num_top": VOCAB}]))
    cached = _logprobs(runner, prompt, 20)
    alone = torch.full((VOCAB,), torch.nan)
    alone[torch.from_numpy(cold.top_tokens[0]).long()] = torch.from_numpy(cold.top_logprobs[0])
    assert torch.equal(alone, cached)
    torch.testing.assert_close(alone, sample.logprobs(prompt), atol=1e-4, rtol=1e-4)


def test_kimi_k2_runs_as_deepseek_v3(sample_of: Get, load: Load, tmp_path: Path) -> None:
    sample = sample_of("deepseek-v3")
    folder = Path(shutil.copytree(sample.folder, tmp_path / "model"))
    set_config(
        folder, model_type="kimi_k2", auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    )
    assert greedy(load(folder), sample.prompts[:1], 8) == [list(sample.answers[0][:8])]


def test_sparse_latent_attention_is_rejected(tmp_path: Path, load: Load) -> None:
    """DeepSeek V3.2 chooses keys with an indexer."""
    save_random(transformers.DeepseekV32Config(**LATENT, q_lora_rank=48, n_group=1, topk_group=1), tmp_path)
    with pytest.raises(ModelFolderError, match="deepseek_v32 does not run on KV pages"):
        load(tmp_path)
