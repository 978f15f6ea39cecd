"""Engines with asynchronous launches give the same answers as synchronous ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatcache.engine.engine import Engine
from chatcache.model import runner as runner_module
from chatcache.model.cuda_graphs import capture_sizes
from chatcache.model.runner import AsyncLaunch
from chatcache.model.static_steps import Replay
from chatcache.types.events import CandidateDone, Failed, Tokens
from chatcache.types.request import GenerateRequest, Params, SamplingParams
from tests.gpu.engine_cases import PAGE_BYTES, build, drain, prompt_of
from tests.model.lazy_streams import lazy_streams

pytestmark = pytest.mark.slow

Outputs = dict[tuple[str, int], tuple[tuple[int, ...], str]]


class Replays:
    """Counts what is replayed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, work: Replay) -> Replay:
        def replay() -> None:
            self.count += 1
            work()

        return replay


def requests() -> list[tuple[str, tuple[int, ...], Params]]:
    """Return requests of different kinds.

    They decode plainly, with filters, in several branches, and with reported alternatives.
    """
    plain: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    return [
        ("greedy", prompt_of(30), SamplingParams(temperature=0.0, **plain)),
        ("short", prompt_of(5, 1), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)),
        ("four", prompt_of(19, 2), SamplingParams(temperature=1.0, n=4, seed=5, **plain)),
        ("long", prompt_of(70, 3), SamplingParams(temperature=0.7, seed=6, max_tokens=40, ignore_eos=True)),
        ("filtered", prompt_of(12, 4), SamplingParams(temperature=1.0, top_p=0.8, seed=7, **plain)),
        ("tops", prompt_of(12, 5), SamplingParams(temperature=0.0, logprobs=2, max_tokens=9, ignore_eos=True)),
        ("stops", prompt_of(25, 6), SamplingParams(temperature=1.0, seed=8, max_tokens=40, stop_token_ids=(3, 9, 70))),
    ]


def outputs_of(engine: Engine) -> Outputs:
    for name, prompt, params in requests():
        engine.add(GenerateRequest(request_id=name, prompt=prompt, params=params))
    events = drain(engine)
    assert not [event for event in events if isinstance(event, Failed)]
    parts = [event for event in events if isinstance(event, Tokens)]
    return {
        (done.request_id, done.index): (
            tuple(
                token
                for part in parts
                if (part.request_id, part.index) == (done.request_id, done.index)
                for token in part.token_ids
            ),
            done.finish_reason,
        )
        for done in events
        if isinstance(done, CandidateDone)
    }


@pytest.mark.parametrize("num_pages", [256, 34], ids=["roomy", "tight"])
@pytest.mark.parametrize("sizes", [capture_sizes(16), ()], ids=["static", "uncaptured"])
def test_asynchronous_engine_gives_the_same_answers(
    sizes: list[int], num_pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "kv_memory_bytes": num_pages * PAGE_BYTES,
        "swap_space_bytes": 64 * PAGE_BYTES,
        "preemption_mode": "swap",
    }
    expected = outputs_of(build(tmp_path, "reference", **settings))
    monkeypatch.setattr(runner_module, "make_streams", lambda device: lazy_streams(False, False))
    replays = Replays()
    engine = build(tmp_path, "reference", graphs=AsyncLaunch(sizes, replays), **settings)
    assert outputs_of(engine) == expected
    assert engine._pipeline.num_ahead > 20, "hardly any step was launched behind another"
    assert (replays.count > 10) == bool(sizes)
    assert engine.scheduler.num_preemptions > 0 or num_pages > 100
