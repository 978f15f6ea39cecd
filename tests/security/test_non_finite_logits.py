"""Test NaN and infinite logits in one of 32 rows of a real network (goal G22).

The request of that row fails, the results of the others are identical to the bit, and its pages are never reused.
"""

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
TokenEvents = list[tuple[int, tuple[int, ...], tuple[Any, ...]]]


class CorruptingNetwork:
    """A network that corrupts the logits of a random row, as `how` says, while `is_armed`."""

    def __init__(self, network: Any, draw: random.Random) -> None:
        self._network = network
        self._draw = draw
        self.is_armed = False
        self.num_corrupted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def forward(self, *args: Any) -> Tensor:
        logits: Tensor = self._network.forward(*args)
        if self.is_armed and len(logits):
            row = self._draw.randrange(len(logits))
            row_logits = logits[row]
            match self._draw.randrange(4):
                case 0:
                    row_logits.fill_(torch.nan)
                case 1:
                    row_logits[self._draw.randrange(len(row_logits))] = torch.nan
                case 2:
                    row_logits[self._draw.randrange(len(row_logits))] = torch.inf
                case _:
                    row_logits.fill_(-torch.inf)
            self.num_corrupted += 1
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


def tokens_of(events: list[EngineEvent]) -> TokenEvents:
    return [(e.index, e.token_ids, e.logprobs) for e in events if isinstance(e, Tokens)]


@contextmanager
def corrupted_network(runner: Runner) -> Iterator[CorruptingNetwork]:
    network = runner._eager._network
    poison = CorruptingNetwork(network, random.Random(SEED))
    runner._eager._network = poison
    try:
        yield poison
    finally:
        runner._eager._network = network


def build_engine(runner: Runner) -> Engine:
    return Engine(runner, runner.model_info, EngineConfig(strict=True, max_num_seqs=NUM_ROWS))


def run_uncorrupted(runner: Runner, num_steps: int) -> dict[str, TokenEvents]:
    engine = build_engine(runner)
    events_of: dict[str, list[EngineEvent]] = {name: [] for name in requests()}
    for request in requests().values():
        engine.add(request)
    for _ in range(num_steps):
        for event in engine.step():
            events_of[event.request_id].append(event)
    return {name: tokens_of(events) for name, events in events_of.items()}


def check(runner: Runner, num_trials: int) -> None:
    """Corrupt one row per step. Raises: AssertionError unless exactly its request fails each time."""
    expected = run_uncorrupted(runner, num_trials + 2)
    with corrupted_network(runner) as poison:
        engine = build_engine(runner)
        events_of: dict[str, list[EngineEvent]] = {name: [] for name in requests()}
        for request in requests().values():
            engine.add(request)
        for event in engine.step():
            events_of[event.request_id].append(event)
        poison.is_armed = True
        for trial in range(num_trials):
            failed: list[str] = []
            for event in engine.step():
                events_of[event.request_id].append(event)
                if isinstance(event, Failed):
                    assert event.message == NOT_FINITE
                    failed.append(event.request_id)
            assert len(failed) == 1 and poison.num_corrupted == trial + 1, f"{len(failed)} requests failed of one row"
            _check_events(events_of, expected)
            (name,) = failed
            events_of[name] = []
            engine.add(requests()[name])
            if trial % 10 == 0:
                engine.cache.check()
        for name in list(events_of):
            engine.abort(name)
        while engine.has_work():
            engine.step()
        assert engine.health().num_pages_in_use == 0


def _check_events(events_of: dict[str, list[EngineEvent]], expected: dict[str, TokenEvents]) -> None:
    for name, events in events_of.items():
        tokens = tokens_of(events)
        assert tokens == expected[name][: len(tokens)], f"{name} differs"
        if events and isinstance(events[0], Started):
            assert events[0].num_cached_tokens == 0, "pages of a failed request were found"


@pytest.mark.slow
def test_non_finite_row_fails_its_request_only(runner: Runner) -> None:
    check(runner, NUM_TRIALS)


@pytest.mark.long
def test_thousand_non_finite_rows_fail_their_requests_only(runner: Runner) -> None:
    for _ in range(10):
        check(runner, 100)


def sanitised_logits(patch: pytest.MonkeyPatch) -> None:
    """Replace non-finite logits by numbers and continue."""
    forward_corrupted = CorruptingNetwork.forward

    def forward(self: CorruptingNetwork, *args: Any) -> Tensor:
        return torch.nan_to_num(forward_corrupted(self, *args), nan=0.0, posinf=0.0, neginf=0.0)

    patch.setattr(CorruptingNetwork, "forward", forward)


def kept_pages(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.finish
    patch.setattr(Scheduler, "finish", lambda self, request, discard=False: original(self, request))
    commit = Scheduler.commit
    patch.setattr(Scheduler, "commit", lambda self, step, faulty=(): commit(self, step))


@pytest.mark.parametrize(
    ("bug", "words"), [(sanitised_logits, "0 requests failed"), (kept_pages, "were found")], ids=["noise", "kept"]
)
def test_injected_bug_is_found(bug: Any, words: str, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        check(runner, NUM_TRIALS)
