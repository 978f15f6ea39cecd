"""`LLM` with asynchronous launches, and with a lost device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache import LLM, BeamSearchParams, SamplingParams
from chatcache import factory as compose
from chatcache.config import EngineConfig
from chatcache.errors import DeviceLostError
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import AsyncLaunch, LaunchedStep, Runner
from chatcache.types.plan import StepPlan

PROMPTS = [[7, 8, 9], [100] * 40, list(range(30, 95)), [7, 8, 9, 10]]
PARAMS: list[Any] = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(n=3, seed=1, max_tokens=30, temperature=0.8),
    SamplingParams(seed=2, max_tokens=12, frequency_penalty=0.5),
    BeamSearchParams(beam_width=3, max_tokens=8),
]


@pytest.fixture
def ahead(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    def load_runner(config: EngineConfig, progress: Any = None) -> Runner:
        return load_model(config, progress, async_launch=AsyncLaunch(()))

    monkeypatch.setattr(compose, "load_runner", load_runner)
    with LLM(str(folder), dtype="float32", attention_backend="reference", kv_memory="4MiB") as llm:
        yield llm


def test_outputs_are_those_of_one_step_at_a_time(llm: LLM, ahead: LLM) -> None:
    expected, outputs = llm.generate(PROMPTS, PARAMS), ahead.generate(PROMPTS, PARAMS)
    for one, other in zip(outputs, expected, strict=True):
        assert [output.token_ids for output in one.outputs] == [output.token_ids for output in other.outputs]
        assert [output.finish_reason for output in one.outputs] == [output.finish_reason for output in other.outputs]
    assert llm.health().num_steps_ahead == 0 < ahead.health().num_steps_ahead


def test_interrupted_generate_leaves_an_idle_engine(ahead: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a step is waited for, another one behind it."""
    original, steps = LaunchedStep.result, iter(range(100))

    def result(self: LaunchedStep) -> Any:
        if next(steps) == 5:
            raise KeyboardInterrupt
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(LaunchedStep, "result", result)
        with pytest.raises(KeyboardInterrupt):
            ahead.generate(PROMPTS[0], PARAMS[0])
    assert not ahead._engine.has_work() and ahead.health().num_pages_in_use == 0
    again = ahead.generate(PROMPTS[0], PARAMS[0])[0].outputs[0].token_ids
    ahead.reset_prefix_cache()
    assert again == ahead.generate(PROMPTS[0], PARAMS[0])[0].outputs[0].token_ids


def test_lost_device_is_raised_by_every_later_call(ahead: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Runner.launch

    def launch(self: Runner, plan: StepPlan) -> LaunchedStep:
        if plan.step >= 6:
            raise DeviceLostError("the device is lost: an illegal memory access")
        return original(self, plan)

    monkeypatch.setattr(Runner, "launch", launch)
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="illegal memory access"):
            ahead.generate(PROMPTS, PARAMS)
    health = ahead.health()
    assert not health.ready and "illegal memory access" in health.detail
