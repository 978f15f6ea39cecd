"""Failures of rows, steps and strategies: which requests fail and which pages are cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from chatcache.decoding.strategy import make_strategy
from chatcache.engine.engine import Engine
from chatcache.scheduler.request import Branch
from chatcache.types.actions import Advance, Candidates, DrawSpec, DroppedCandidate, Extend, Release
from chatcache.types.events import CandidateDone, EngineEvent, Failed, Finished, Started
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import BeamSearchParams, GenerateRequest, SamplingParams
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


class CopyRecorder(CrashingRunner):
    """Counts the page copies of the step that fails."""

    num_copies = 0

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == self.crash_at:
            self.num_copies = len(plan.copies)
        return super().execute(plan)


def test_targets_of_page_copies_in_a_failed_step_are_not_matched() -> None:
    """Beams that rest have no row in the step that copies their pages, whichever step that is."""
    beams = request("beams", prompt=tuple(range(1, 8)), params=BeamSearchParams(beam_width=3, max_tokens=12))
    other = request("other", prompt=tuple(range(20, 26)), params=SamplingParams(max_tokens=20, temperature=0.0))
    reference = engine(FakeRunner(fake_capacity(page_size=16), VOCAB))
    reference.add(beams)
    expected = results(drain(reference))
    num_copies = 0
    for failing in range(3, 13):
        runner = CopyRecorder(fake_capacity(page_size=16), VOCAB)
        runner.crash_at = failing
        eng = engine(runner)
        eng.add(beams)
        eng.add(other)

        def rest(branches: list[Branch], eng: Engine = eng, failing: int = failing) -> list[int] | None:
            others = [row for row, branch in enumerate(branches) if branch.request.request_id == "other"]
            return others if eng.scheduler.num_steps == failing else None

        eng.scheduler._decode_batch._choose_branches = rest
        events = drain(eng)
        if not any(isinstance(event, Failed) and event.request_id == "beams" for event in events):
            assert results(events) == expected
            num_copies += runner.num_copies
        eng.add(beams)
        assert results(drain(eng)) == expected
    assert num_copies >= 3


def results(events: list[EngineEvent]) -> list[tuple[float, list[int]]]:
    """Return the score and the tokens of each beam."""
    ends = [event for event in events if isinstance(event, CandidateDone) and event.request_id == "beams"]
    return [(event.score, output(events, "beams", event.index)) for event in ends]


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
