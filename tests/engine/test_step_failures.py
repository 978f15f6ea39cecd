"""Failures of rows, steps and strategies: which requests fail and which pages are cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from chatcache.decoding.strategy import make_strategy
from chatcache.types.actions import Advance, Candidates, DrawSpec, DroppedCandidate, Extend, Release
from chatcache.types.events import Failed, Finished, Started
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.engine.driver import VOCAB, drain, engine, output, request
from tests.support.fake_runner import FakeRunner, fake_capacity


def test_an_invalid_row_fails_its_request_only_and_its_pages_are_not_cached() -> None:
    runner = FakeRunner(fake_capacity(), VOCAB, faulty_token=63)
    eng = engine(runner)
    eng.add(request("bad", prompt=(*range(30, 60), 63)))
    eng.add(request("good"))
    events = drain(eng)
    assert [event for event in events if event.request_id == "bad"] == [Failed("bad", 1, "the logits are not finite")]
    assert isinstance(events[-1], Finished)
    eng.add(request("again", prompt=(*range(30, 60), 50)))
    assert [e.num_cached_tokens for e in drain(eng) if isinstance(e, Started)] == [0]


class CrashingRunner(FakeRunner):
    """Raises in step `crash_at`, after it corrupted every page of that step."""

    crash_at = 3

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == self.crash_at:
            for page in plan.updates[:, 2].tolist():
                self.cells[page] = 0
            raise RuntimeError("secret details")
        return super().execute(plan)


def test_a_failed_step_fails_its_requests_and_the_engine_continues() -> None:
    eng = engine(CrashingRunner(fake_capacity(), VOCAB), max_num_batched_tokens=40)
    eng.add(request("a", params=SamplingParams(n=3, max_tokens=40, seed=1)))
    eng.add(request("b", num_tokens=50))
    eng.add(request("c", num_tokens=200, prompt=tuple(range(40, 60)) * 10))
    events = drain(eng)
    ends = {event.request_id: event for event in events if isinstance(event, Finished | Failed)}
    assert sum(isinstance(event, Finished | Failed) for event in events) == len(ends) == 3
    failed = [event for event in ends.values() if isinstance(event, Failed)]
    assert failed and all(event.code == "engine_error" and "secret" not in event.message for event in failed)
    assert eng.health().num_pages_in_use == 0
    eng.add(request("a"))
    eng.add(request("d", num_tokens=50))
    reference = engine()
    reference.add(request("d", num_tokens=50))
    assert output(drain(eng), "d") == output(drain(reference), "d")


def test_requests_without_a_row_continue_after_a_failed_step() -> None:
    eng = engine(CrashingRunner(fake_capacity(), VOCAB), max_num_batched_tokens=1)  # "b" gets no token before "a" ends
    eng.add(request("a", num_tokens=40))
    eng.add(request("b", prompt=tuple(range(30, 50))))
    events = drain(eng)
    ends = {event.request_id: type(event) for event in events if isinstance(event, Finished | Failed)}
    assert ends == {"a": Failed, "b": Finished}
    reference = engine()
    reference.add(request("b", prompt=tuple(range(30, 50))))
    assert output(events, "b") == output(drain(reference), "b")


class MisbehavingStrategy:
    """A strategy that misbehaves as its name says, after two tokens."""

    max_branches = 1
    lockstep = False
    has_fixed_draws = False

    def __init__(self, oddity: str) -> None:
        self.oddity = oddity
        self.num_tokens = 0

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        if self.num_tokens == 2 and self.oddity == "raises in draws":
            raise ZeroDivisionError
        return () if self.num_tokens == 2 and self.oddity == "draws nothing" else (DrawSpec(),)

    def drop(self, index: int) -> DroppedCandidate | None:
        return None

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        self.num_tokens += 1
        if self.num_tokens <= 2:
            return Advance((Extend(0, drawn[0][0].tokens[0]),), ())
        match self.oddity:
            case "raises in advance":
                raise ZeroDivisionError
            case "forgets its branch":
                return Advance((), ())
            case "retires all without an end":
                return Advance((Release(0),), ())
            case _:
                return Advance((Extend(7, 1),), ())


@pytest.mark.parametrize(
    "oddity",
    [
        "raises in draws",
        "draws nothing",
        "raises in advance",
        "forgets its branch",
        "retires all without an end",
        "moves an unknown branch",
    ],
)
def test_a_misbehaving_strategy_fails_its_request_only(oddity: str) -> None:
    def factory(request: GenerateRequest, *args: Any, **settings: Any) -> Any:
        return MisbehavingStrategy(oddity) if request.request_id == "odd" else make_strategy(request, *args, **settings)

    eng = engine(make_strategy=factory)
    eng.add(request("odd"))
    eng.add(request("good", num_tokens=35))
    events = drain(eng)
    ends = {event.request_id: type(event) for event in events if isinstance(event, Finished | Failed)}
    assert ends == {"odd": Failed, "good": Finished}
    assert eng.health().num_pages_in_use == 0
