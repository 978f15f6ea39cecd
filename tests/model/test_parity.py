"""Every family generates exactly the tokens that transformers generates.

Batched, paged, chunked or whole, with and without the prefix cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.model.decoder import Decoder
from chatcache.model.loading import loader
from chatcache.model.runner import Runner
from chatcache.types.events import Failed, Started, Tokens
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.model.drive import Driver, greedy, make_draws
from tests.model.families import FAMILIES, NUM_NEW, SLOW, VOCAB, Sample

SETTINGS = {
    "page8-chunked-cached": EngineConfig(page_size=8, max_num_batched_tokens=12, attention_backend="reference"),
    "page16-whole": EngineConfig(
        page_size=16, max_num_batched_tokens=512, enable_prefix_caching=False, attention_backend="auto"
    ),
}

Get = Callable[[str], Sample]
Load = Callable[..., Runner]


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAMILIES])
def sample(request: pytest.FixtureRequest, sample_of: Get, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """A family's model, loaded by the path the family is meant to test."""
    native = FAMILIES[request.param].native
    if not native:
        monkeypatch.setattr(loader, "is_native", lambda *_: False)
    return sample_of(request.param)


def continue_all(runner: Runner, config: EngineConfig, sample: Sample, rounds: int) -> list[list[tuple[int, ...]]]:
    """Answer all prompts at once through a real engine, `rounds` times over the same cache."""
    engine = Engine(runner, runner.model_info, config)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    answers: list[list[tuple[int, ...]]] = []
    for number in range(rounds):
        found: dict[str, list[int]] = {str(index): [] for index in range(len(sample.prompts))}
        for index, prompt in enumerate(sample.prompts):
            engine.add(GenerateRequest(request_id=str(index), prompt=prompt, params=params))
        while engine.has_work():
            for event in engine.step():
                assert not isinstance(event, Failed), event
                if isinstance(event, Tokens):
                    found[event.request_id] += event.token_ids
                if isinstance(event, Started) and number and config.enable_prefix_caching:
                    assert event.num_cached_tokens == event.num_prompt_tokens - 1
        answers.append([tuple(tokens) for tokens in found.values()])
    return answers


@pytest.mark.parametrize("setting", SETTINGS)
def test_parity_tokens(sample: Sample, setting: str, load: Load) -> None:
    config = SETTINGS[setting]
    assert len({token for answer in sample.answers for token in answer}) > 20, "the sample repeats itself"
    runner = load(sample.folder, page_size=config.page_size, attention_backend=config.attention_backend)
    assert isinstance(runner._network, Decoder) == FAMILIES[sample.family].native
    rounds = 2 if config.enable_prefix_caching else 1
    for answers in continue_all(runner, config, sample, rounds):
        assert answers == list(sample.answers)


def test_parity_logprobs(sample: Sample, load: Load) -> None:
    """A ragged prefill and a decode step agree with transformers over the whole vocabulary."""
    driver = Driver(load(sample.folder))
    everything = make_draws([{"row": row, "num_top": VOCAB} for row in range(2)])
    first, second = sample.prompts[1], sample.prompts[2]
    driver.feed({0: first[:9], 1: second[:20]})
    for fed in ({0: first[9:], 1: second[20:]}, {0: sample.answers[1][:1], 1: sample.answers[2][:1]}):
        result = driver.feed(fed, everything)
        for row, tokens in enumerate((first, second)):
            tokens += fed[row] if len(fed[row]) == 1 else ()
            got = torch.full((VOCAB,), torch.nan)
            got[torch.from_numpy(result.top_tokens[row]).long()] = torch.from_numpy(result.top_logprobs[row])
            torch.testing.assert_close(got, sample.logprobs(tokens), atol=1e-4, rtol=1e-4)


INJECTED: list[tuple[str, str, Any]] = [
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 20000.0}),
    ("llama", "rms_norm_eps", 0.5),
    ("llama-yarn", "rope_parameters", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    ("llama-llama3", "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
    ("mistral-window", "sliding_window", 12),
    ("mistral-window", "sliding_window", 14),
    ("qwen2-window", "layer_types", ["full_attention"] * 2 + ["sliding_attention"]),
    ("phi3-native", "sliding_window", 41),
    ("gemma2", "attn_logit_softcapping", 2.5),
    ("gemma2", "sliding_window", 13),
    ("gpt-oss-sinks", "sliding_window", 13),
]


@pytest.mark.parametrize(("family", "field", "value"), INJECTED)
def test_injected_config_mistake_changes_tokens(
    family: str, field: str, value: Any, sample_of: Get, load: Load, tmp_path: Path
) -> None:
    """One config field read wrongly, by as little as a window of one token, changes the tokens."""
    sample = sample_of(family)
    folder = Path(shutil.copytree(sample.folder, tmp_path / "injected"))
    config = json.loads((folder / "config.json").read_text())
    assert config[field] != value
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    assert greedy(load(folder), sample.prompts, NUM_NEW) != [list(answer) for answer in sample.answers]
