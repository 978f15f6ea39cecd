"""A request resumed on another engine after any event continues bit-identically."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from chatcache.config import EngineConfig
from chatcache.decoding.logit_edits import LogitEdits
from chatcache.decoding.sampling import SamplingStrategy
from chatcache.decoding.stopping import START
from chatcache.engine.engine import Engine
from chatcache.engine_process.recovery import RequestJournal
from chatcache.errors import EngineError
from chatcache.types.events import CandidateDone, EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.request import GenerateRequest, SamplingParams, StructuredOutputs
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_facts

VOCAB = 256
BYTES = tuple(bytes([byte]) for byte in range(VOCAB))
WORD = StructuredOutputs(regex="(ab|ba|c){6,20}")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 7},
    "no seed": {},
    "three": {"n": 3, "seed": 1, "logprobs": 2},
    "penalties": {
        "n": 2, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7, "logit_bias": {5: 4.0}
    },
    "stop strings": {"stop": ("A", "\x01\x02", "zz"), "min_tokens": 3, "n": 4},
    "ends early": {"n": 5, "stop_token_ids": tuple(range(0, VOCAB, 9)), "min_tokens": 2, "logprobs": 0},
    "grammar": {"structured_outputs": WORD, "n": 2},
    "prompt": {"prompt_logprobs": 1, "seed": 3},
}  # fmt: skip


def make_engine(*, ahead: bool = False, num_pages: int = 256) -> Engine:
    capacity = fake_capacity(num_pages, 4, 64, 1024, has_async_launch=ahead)
    runner = FakeRunner(capacity, VOCAB, None, lazy=ahead)
    return Engine(runner, fake_facts(VOCAB, ()), EngineConfig(strict=True), BYTES)


def make_request(kind: str, name: str = "a") -> GenerateRequest:
    params = SamplingParams(**({"max_tokens": 24} | KINDS[kind]))
    return GenerateRequest(request_id=name, prompt=tuple(range(40, 59)), params=params)


def run(engine: Engine, *requests: GenerateRequest, most: int = 10_000) -> list[EngineEvent]:
    """Run to the end, or until that many events; the events of a step stay together."""
    events: list[EngineEvent] = []
    for request in requests:
        engine.add(request)
    while engine.has_work() and len(events) < most:
        events += engine.step()
    return events


def resumed(request: GenerateRequest, events: list[EngineEvent]) -> GenerateRequest:
    sent = RequestJournal(request)
    for event in events:
        sent.record(event)
    return sent.resumed_request()


def visible_output(events: list[EngineEvent]) -> list[object]:
    """Return all that a reader sees, without the counters of the work itself."""
    streams: dict[int, list[object]] = {}
    ends: list[object] = []
    for event in events:
        if isinstance(event, Tokens):
            streams.setdefault(event.index, []).append((event.token_ids, event.logprobs, event.score))
        elif isinstance(event, CandidateDone):
            streams.setdefault(event.index, []).append(replace(event, seq=0))
        elif isinstance(event, Started):
            ends.append(event.prompt_logprobs)
        else:
            assert isinstance(event, Finished), event
            ends.append((event.num_prompt_tokens, event.num_output_tokens, event.cancelled))
    return [sorted(streams.items()), ends]


class Cuts:
    """An undisturbed run of one request, to be cut and resumed."""

    def __init__(self, kind: str, *, ahead: bool = False) -> None:
        self.request = make_request(kind)
        self.whole: list[EngineEvent] = []
        self.at_steps: list[int] = []  # how many events had come when a step was over
        self._engine = make_engine(ahead=ahead)
        self._engine.add(self.request)
        while self._engine.has_work():
            self.whole += self._engine.step()
            self.at_steps.append(len(self.whole))
        self.at_steps = sorted(set(self.at_steps) - {len(self.whole)})

    def check_each(self, cuts: list[int]) -> None:
        for cut in cuts:
            self.check(cut)

    def check(self, cut: int) -> None:
        """Resume after `cut` events, together with another request."""
        first, other = self.whole[:cut], make_request("three", "other")
        rest = run(self._engine, replace(other, prompt=(9, 8, 7)), resumed(self.request, first))
        rest = [event for event in rest if event.request_id == "a"]
        assert [event.seq for event in (*first, *rest)] == list(range(1, cut + len(rest) + 1))
        assert visible_output(first + rest) == visible_output(self.whole), f"cut at {cut}"
        assert sum(isinstance(event, Started) for event in (*first, *rest)) == 1
        self._engine.cache.check()


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_request_resumed_after_any_event_continues_identically(kind: str, ahead: bool) -> None:
    cuts = Cuts(kind, ahead=ahead)
    assert len(cuts.at_steps) > 4
    for cut in (*cuts.at_steps[:3], *cuts.at_steps[3::5]):
        cuts.check(cut)


@pytest.mark.parametrize("kind", ["ends early", "three", "grammar"])
@pytest.mark.slow
def test_a_request_resumed_within_a_step_continues_identically(kind: str) -> None:
    """Cut within the events of a step, for instance after one candidate's first token."""
    cuts = Cuts(kind)
    for cut in sorted({1, 2, 3, 4, 5, *range(6, len(cuts.whole), 4), len(cuts.whole) - 1}):
        cuts.check(cut)


def test_many_resumed_requests_on_few_pages_continue_identically() -> None:
    """Resumed requests are preempted like any other."""
    requests = [replace(make_request(kind, kind), prompt=tuple(range(1, 30))) for kind in KINDS]
    alone = {request.request_id: visible_output(run(make_engine(), request)) for request in requests}
    engine = make_engine()
    first = run(engine, *requests, most=random.Random(5).randrange(40, 120))
    sent = {request.request_id: [e for e in first if e.request_id == request.request_id] for request in requests}
    open_ones = [r for r in requests if not sent[r.request_id] or not isinstance(sent[r.request_id][-1], Finished)]
    small = make_engine(num_pages=64)
    rest = run(small, *(resumed(request, sent[request.request_id]) for request in open_ones))
    assert small.health().num_preemptions > 0
    for name, expected in alone.items():
        assert visible_output([*sent[name], *(e for e in rest if e.request_id == name)]) == expected
    small.cache.check()


def test_a_cancelled_candidate_stays_cancelled_after_resume() -> None:
    request = make_request("three")
    for num_steps in (0, 3):
        engine = make_engine()
        engine.add(request)
        events = [event for _ in range(num_steps) for event in engine.step()]
        engine.cancel_candidate("a", 1)
        events += engine.pop_events()
        rest = run(make_engine(), resumed(request, events))
        ends = [event for event in (*events, *rest) if isinstance(event, CandidateDone)]
        assert sorted((end.index, end.finish_reason) for end in ends) == [
            (0, "length"),
            (1, "cancelled"),
            (2, "length"),
        ]
        assert not [event for event in rest if isinstance(event, Tokens) and event.index == 1]


def test_a_full_queue_accepts_resumed_requests() -> None:
    capacity = fake_capacity(256, 4, 64, 1024)
    engine = Engine(
        FakeRunner(capacity, VOCAB, None), fake_facts(VOCAB, ()), EngineConfig(max_queued_requests=1), BYTES
    )
    for number in range(5):
        engine.add(resumed(make_request("seeded", f"r{number}"), []))
    assert sum(isinstance(event, Finished) for event in run(engine)) == 5


def test_a_request_that_cannot_be_resumed_fails_alone() -> None:
    request = make_request("grammar")
    sent = resumed(request, run(make_engine(), request, most=4))
    assert sent.resume_point is not None
    other = replace(sent.resume_point.candidates[0], tokens=b"\xff\0\0\0")  # a token that the grammar does not have
    bad = replace(sent, resume_point=replace(sent.resume_point, candidates=(other, *sent.resume_point.candidates[1:])))
    events = run(make_engine(), bad, make_request("seeded", "b"))
    assert [type(event) for event in events if event.request_id == "a"] == [Failed]
    assert [event for event in events if isinstance(event, Finished)][-1].request_id == "b"


def _no_penalties(patch: pytest.MonkeyPatch) -> None:
    original = SamplingStrategy.resume

    def forgetful(self: SamplingStrategy, candidates: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(LogitEdits, "record", lambda *_: None)
            return original(self, candidates)

    patch.setattr(SamplingStrategy, "resume", forgetful)


def _no_trail(patch: pytest.MonkeyPatch) -> None:
    original = SamplingStrategy.resume

    def forgetful(self: SamplingStrategy, candidates: Any) -> Any:
        ends = original(self, candidates)
        for lane in self._candidates.values():
            lane.progress = START
        return ends

    patch.setattr(SamplingStrategy, "resume", forgetful)


def _no_score(patch: pytest.MonkeyPatch) -> None:
    original = SamplingStrategy.resume

    def forgetful(self: SamplingStrategy, candidates: Any) -> Any:
        return original(self, [replace(each, score=0.0) for each in candidates])

    patch.setattr(SamplingStrategy, "resume", forgetful)


def _no_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        SamplingStrategy, "resume", lambda self, candidates: self._wanted.clear() or self._wanted.update((0,)) or ()
    )


@pytest.mark.parametrize(
    ("bug", "kind"),
    [(_no_penalties, "penalties"), (_no_trail, "greedy"), (_no_score, "three"), (_no_tokens, "greedy")],
)
def test_resume_check_detects_an_injected_bug(bug: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = Cuts(kind)
    bug(monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        cuts.check_each(cuts.at_steps[5::4])
