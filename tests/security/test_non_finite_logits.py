"""Logits of one row in 32 that are no numbers, in a model that computes: that request ends, the others are the same to
the bit, and nothing it computed is ever found again."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import Runner
from chatcache.model.sampling.sampler import NOT_FINITE
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.events import EngineEvent, Failed, Started, Tokens
from chatcache.types.request import GenerateRequest, SamplingParams

SEED = int(os.environ.get("CHATCACHE_TEST_SEED", 22))
NUM_ROWS = 32
NUM_TRIALS = 40
Said = list[tuple[int, tuple[int, ...], tuple[Any, ...]]]


class Poisoned:
    """A network whose logits of one row at random are spoilt, as `how` says, while it is armed."""

    def __init__(self, network: Any, draw: random.Random) -> None:
        self._network = network
        self._draw = draw
        self.armed = False
        self.num_spoilt = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def forward(self, *args: Any) -> Tensor:
        logits: Tensor = self._network.forward(*args)
        if self.armed and len(logits):
            row = self._draw.randrange(len(logits))
            spoilt = logits[row]
            match self._draw.randrange(4):
                case 0:
                    spoilt.fill_(torch.nan)
                case 1:
                    spoilt[self._draw.randrange(len(spoilt))] = torch.nan
                case 2:
                    spoilt[self._draw.randrange(len(spoilt))] = torch.inf
                case _:
                    spoilt.fill_(-torch.inf)
            self.num_spoilt += 1
        return logits


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = load_model(
        EngineConfig(dtype="float32", deterministic=True, kv_memory_bytes=48 << 20, max_num_seqs=NUM_ROWS)
    )
    yield runner
    runner.close()


def requests() -> dict[str, GenerateRequest]:
    return {
        str(i): GenerateRequest(
            request_id=str(i),
            prompt=(i, *range(100, 120)),
            params=SamplingParams(
                max_tokens=200, temperature=0.0 if i % 3 == 0 else 0.9, seed=i, logprobs=i % 4 or None, ignore_eos=True
            ),
        )
        for i in range(1, NUM_ROWS + 1)
    }


def said(events: list[EngineEvent]) -> Said:
    return [(e.index, e.token_ids, e.logprobs) for e in events if isinstance(e, Tokens)]


@contextmanager
def poisoned(runner: Runner) -> Iterator[Poisoned]:
    whole = runner._eager._network
    poison = Poisoned(whole, random.Random(SEED))
    runner._eager._network = poison
    try:
        yield poison
    finally:
        runner._eager._network = whole


def engine_over(runner: Runner) -> Engine:
    return Engine(runner, runner.facts, EngineConfig(strict=True, max_num_seqs=NUM_ROWS))


def undisturbed(runner: Runner, num_steps: int) -> dict[str, Said]:
    engine = engine_over(runner)
    life: dict[str, list[EngineEvent]] = {name: [] for name in requests()}
    for request in requests().values():
        engine.add(request)
    for _ in range(num_steps):
        for event in engine.step():
            life[event.request_id].append(event)
    return {name: said(events) for name, events in life.items()}


def check(runner: Runner, num_trials: int) -> None:
    """Spoil a row in every step. Raises: AssertionError unless exactly its request ends, every time."""
    expected = undisturbed(runner, num_trials + 2)
    with poisoned(runner) as poison:
        engine = engine_over(runner)
        life: dict[str, list[EngineEvent]] = {name: [] for name in requests()}
        for request in requests().values():
            engine.add(request)
        for event in engine.step():
            life[event.request_id].append(event)
        poison.armed = True
        for trial in range(num_trials):
            failed: list[str] = []
            for event in engine.step():
                life[event.request_id].append(event)
                if isinstance(event, Failed):
                    assert event.message == NOT_FINITE
                    failed.append(event.request_id)
            assert len(failed) == 1 and poison.num_spoilt == trial + 1, f"{len(failed)} requests failed of one row"
            _check_lives(life, expected)
            (name,) = failed
            life[name] = []
            engine.add(requests()[name])
            if trial % 10 == 0:
                engine.cache.check()
        for name in list(life):
            engine.abort(name)
        while engine.has_work():
            engine.step()
        assert engine.health().num_pages_in_use == 0


def _check_lives(life: dict[str, list[EngineEvent]], expected: dict[str, Said]) -> None:
    for name, events in life.items():
        told = said(events)
        assert told == expected[name][: len(told)], f"{name} was disturbed"
        if events and isinstance(events[0], Started):
            assert events[0].num_cached_tokens == 0, "what a spoilt request computed was found"


def test_one_of_thirty_two_rows_goes_and_the_others_stay(runner: Runner) -> None:
    check(runner, NUM_TRIALS)


@pytest.mark.long
def test_a_thousand_rows_go(runner: Runner) -> None:
    for _ in range(10):
        check(runner, 100)


def noise_for_numbers(patch: pytest.MonkeyPatch) -> None:
    """A sanitiser makes of what is no number a number, and goes on."""
    spoil = Poisoned.forward

    def forward(self: Poisoned, *args: Any) -> Tensor:
        return torch.nan_to_num(spoil(self, *args), nan=0.0, posinf=0.0, neginf=0.0)

    patch.setattr(Poisoned, "forward", forward)


def pages_are_kept(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.finish
    patch.setattr(Scheduler, "finish", lambda self, request, discard=False: original(self, request))
    commit = Scheduler.commit
    patch.setattr(Scheduler, "commit", lambda self, step, faulty=(): commit(self, step))


@pytest.mark.parametrize(
    ("bug", "words"), [(noise_for_numbers, "0 requests failed"), (pages_are_kept, "was found")], ids=["noise", "kept"]
)
def test_the_check_fails_on(bug: Any, words: str, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        check(runner, NUM_TRIALS)
