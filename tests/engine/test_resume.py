"""A request resumed on another engine after any event continues bit-identically."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from chatcache.config import EngineConfig
from chatcache.decoding.beam_search import BeamStrategy, FinishedHypotheses
from chatcache.decoding.grammar.compiler import GrammarChecker
from chatcache.decoding.logit_edits import LogitEdits
from chatcache.decoding.sampling import BestOfStrategy, SamplingStrategy
from chatcache.decoding.stopping import START
from chatcache.decoding.unique import DistinctStrategy
from chatcache.engine import engine as engine_module
from chatcache.engine.engine import Engine, EventQueue
from chatcache.engine_process.recovery import RequestJournal
from chatcache.errors import EngineError
from chatcache.scheduler.request import LiveRequest
from chatcache.types.actions import Extend, Fork, Release
from chatcache.types.events import (
    Beams,
    CandidateDone,
    EngineEvent,
    Failed,
    Finished,
    SearchStep,
    Started,
    Tokens,
)
from chatcache.types.request import (
    BeamSearchParams,
    GenerateRequest,
    SamplingParams,
    StructuredOutputs,
    ThinkingMarks,
)
from tests.engine import test_isolation
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB = 256
BYTES = tuple(bytes([byte]) for byte in range(VOCAB))
WORD = StructuredOutputs(regex="(ab|ba|c){6,20}")
THOUGHT: dict[str, Any] = {
    "thinking_token_budget": 9,
    "thinking_marks": ThinkingMarks(opening="<", closing=">", closing_ids=(10, 62, 10), is_open=True),
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 7},
    "no seed": {},
    "three": {"n": 3, "seed": 1, "logprobs": 2},
    "penalties": {
        "n": 2, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7, "logit_bias": {5: 4.0}
    },
    "bans": {"n": 2, "seed": 2, "no_repeat_ngram_size": 1, "allowed_token_ids": tuple(range(60, 120))},
    "stop strings": {"stop": ("A", "\x01\x02", "zz"), "min_tokens": 3, "n": 4},
    "ends early": {"n": 5, "stop_token_ids": tuple(range(0, VOCAB, 9)), "min_tokens": 2, "logprobs": 0},
    "grammar": {"structured_outputs": WORD, "n": 2},
    "prompt": {"prompt_logprobs": 1, "seed": 3},
    "thinking": {"n": 3, "seed": 8, **THOUGHT},
}  # fmt: skip
ENDS: dict[str, Any] = {"stop_token_ids": tuple(range(0, VOCAB, 11)), "stop": ("A", "\x01\x02"), "max_tokens": 14}
SEARCHES: dict[str, SamplingParams | BeamSearchParams] = {
    "beams": BeamSearchParams(beam_width=5, stream_beams=True, **ENDS | {"stop": ()}),
    "beam stop strings": BeamSearchParams(
        beam_width=4, n=3, logprobs=2, prompt_logprobs=1, min_tokens=3, early_stopping="never", **ENDS
    ),
    "groups": BeamSearchParams(
        beam_width=6, num_beam_groups=3, diversity_penalty=0.6, stream_beams=True, logprobs=1, **ENDS
    ),
    "beam penalties": BeamSearchParams(
        beam_width=4,
        logprobs=1,
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        no_repeat_ngram_size=1,
        bad_words_ids=((5, 6), (7,)),
        max_tokens=14,
    ),
    "beam grammar": BeamSearchParams(beam_width=4, num_beam_groups=2, structured_outputs=WORD, max_tokens=14),
    "beam thinking": BeamSearchParams(beam_width=4, max_tokens=16, **THOUGHT),
    "distinct thinking": SamplingParams(n=4, distinct=True, seed=4, max_tokens=16, **THOUGHT),
    "best_of": SamplingParams(n=2, best_of=5, logprobs=1, **ENDS),
    "best_of grammar": SamplingParams(
        n=1, best_of=3, seed=5, structured_outputs=WORD, frequency_penalty=0.4, max_tokens=14
    ),
    "distinct": SamplingParams(n=5, distinct=True, logprobs=2, min_tokens=2, frequency_penalty=0.5, **ENDS),
    "distinct grammar": SamplingParams(n=4, distinct=True, seed=9, structured_outputs=WORD, max_tokens=14),
}


def make_engine(*, ahead: bool = False, num_pages: int = 256) -> Engine:
    capacity = fake_capacity(num_pages, 4, 64, 1024, has_async_launch=ahead)
    runner = FakeRunner(capacity, VOCAB, None, lazy=ahead)
    return Engine(runner, fake_model_info(VOCAB, ()), EngineConfig(strict=True), BYTES)


def make_request(kind: str, name: str = "a") -> GenerateRequest:
    params = SEARCHES[kind] if kind in SEARCHES else SamplingParams(**({"max_tokens": 24} | KINDS[kind]))
    return GenerateRequest(request_id=name, prompt=tuple(range(40, 59)), params=params)


def run(engine: Engine, *requests: GenerateRequest, most: int = 10_000) -> list[EngineEvent]:
    """Run to the end, or until that many events; the events of a step stay together."""
    events: list[EngineEvent] = []
    for request in requests:
        engine.add(request)
    while engine.has_work() and len(events) < most:
        events += engine.step()
    return events


def resumed(
    request: GenerateRequest, events: list[EngineEvent], search_steps: Sequence[SearchStep] = ()
) -> GenerateRequest:
    sent = RequestJournal(request)
    for step in search_steps:
        sent.record_search_step(step.record)
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
        elif isinstance(event, Beams):
            streams.setdefault(-1, []).append(event.beams)
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
        self.search_steps: list[tuple[int, SearchStep]] = []  # with the number of events before each
        self._engine = make_engine(ahead=ahead)
        self._engine.add(self.request)
        while self._engine.has_work():
            events = self._engine.step()
            self.search_steps += [(len(self.whole), step) for step in self._engine.search_steps]
            self.whole += events
            self.at_steps.append(len(self.whole))
        self.at_steps = sorted(set(self.at_steps) - {len(self.whole)})

    def check_each(self, cuts: list[int]) -> None:
        for cut in cuts:
            self.check(cut)

    def search_cuts(self) -> list[tuple[int, int]]:
        """Return (number of steps, number of events) after each step of a search, but not after its last event."""
        nums_events = [*(num_before for num_before, _ in self.search_steps[1:]), len(self.whole) - 1]
        return list(enumerate(nums_events, 1))

    def check_after_each_step(self) -> None:
        for num_steps, cut in self.search_cuts():
            self.check(cut, num_steps, other="")

    def check(self, cut: int, num_steps: int = 0, other: str = "three") -> None:
        """Resume after `cut` events and `num_steps` steps of a search, together with another request."""
        first, steps = self.whole[:cut], [step for _, step in self.search_steps[:num_steps]]
        others = [replace(make_request(other, "other"), prompt=(9, 8, 7))] if other else []
        rest = run(self._engine, *others, resumed(self.request, first, steps))
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


@pytest.mark.parametrize("kind", ["beams", "groups", "best_of", "distinct"])
def test_a_search_resumed_after_any_step_continues_identically(kind: str) -> None:
    cuts = Cuts(kind)
    assert len(cuts.search_steps) > 6
    cuts.check_after_each_step()


@pytest.mark.parametrize(
    ("kind", "ahead"), [(kind, False) for kind in SEARCHES] + [("beams", True), ("best_of", True), ("distinct", True)]
)
@pytest.mark.slow
def test_a_search_resumed_within_any_step_continues_identically(kind: str, ahead: bool) -> None:
    """Cut before and within the events of each recorded step."""
    cuts = Cuts(kind, ahead=ahead)
    start = 1
    for num_steps, cut in cuts.search_cuts():
        for each in {start, (start + cut) // 2, max(cut - 1, start)}:
            cuts.check(each, num_steps)
        start = cut


def test_a_search_whose_start_was_not_sent_starts_again() -> None:
    cuts = Cuts("beams")
    cuts.check(0, 1)
    cuts.check(0, 0)


@pytest.mark.parametrize(("num_events", "num_steps"), [(5, 1), (5, 0)])
def test_a_search_with_missing_records_fails_in_order(num_events: int, num_steps: int) -> None:
    cuts = Cuts("beams")
    steps = [step for _, step in cuts.search_steps[:num_steps]]
    request = resumed(cuts.request, cuts.whole[:num_events], steps or [SearchStep("a", b"\x01")])
    (end,) = run(make_engine(), request)
    assert isinstance(end, Failed) and end.seq == num_events + 1


@pytest.mark.parametrize("kind", ["n", "best_of", "distinct", "beams"])
def test_a_resumed_request_fails_if_and_only_if_all_candidates_end_in_dead_ends(kind: str) -> None:
    constraint = StructuredOutputs(regex="([a-f][0-9]|[g-z][a-z][0-9]|z[a-z]{3})")
    engine = test_isolation.engine()
    num_failed = num_cuts = 0
    for seed in range(16):
        fields: dict[str, Any] = {"best_of": {"n": 1, "best_of": 3}, "distinct": {"n": 3, "distinct": True}}
        params = SamplingParams(seed=seed, structured_outputs=constraint, **fields.get(kind, {"n": 3}))
        search = BeamSearchParams(beam_width=2, structured_outputs=constraint)
        asked = test_isolation.request("a", (3, 4, 5 + seed), search if kind == "beams" else params)
        whole: list[EngineEvent] = []
        cuts: list[tuple[int, int]] = []
        steps: list[SearchStep] = []
        engine.add(asked)
        while engine.has_work():
            whole += engine.step()
            steps += engine.search_steps
            cuts.append((len(whole), len(steps)))
        for num_events, num_steps in cuts[:-1]:
            first = whole[:num_events]
            if not first:
                continue
            rest = run(engine, resumed(asked, first, steps[:num_steps]))
            assert [*first, *rest][:-1] == whole[:-1]
            assert type(rest[-1]) is type(whole[-1])
            num_cuts += 1
        num_failed += isinstance(whole[-1], Failed)
    assert num_failed and num_cuts > num_failed


@pytest.mark.parametrize(
    "kinds", [KINDS, pytest.param(("no seed", *SEARCHES), marks=pytest.mark.slow)], ids=["plain", "searches"]
)
def test_many_resumed_requests_on_few_pages_continue_identically(kinds: Iterable[str]) -> None:
    """Resumed requests are preempted like any other."""
    requests = [replace(make_request(kind, kind), prompt=tuple(range(1, 30))) for kind in kinds]
    requests = [
        replace(each, params=replace(each.params, max_tokens=30, stop_token_ids=()))
        if each.request_id in SEARCHES
        else each
        for each in requests
    ]
    alone = {request.request_id: visible_output(run(make_engine(), request)) for request in requests}
    engine = make_engine()
    first: list[EngineEvent] = []
    steps: dict[str, list[SearchStep]] = {}
    searches = SEARCHES.keys() & kinds
    slow = {name for name in searches if "grammar" in name}  # they start when another thread has compiled the grammar

    def step_until(is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            first.extend(engine.step())
            for step in engine.search_steps:
                steps.setdefault(step.request_id, []).append(step)

    for request in sorted(requests, key=lambda each: each.request_id not in slow):
        if request.request_id not in slow:
            step_until(lambda: steps.keys() >= slow)
        engine.add(request)
    num_first = random.Random(5).randrange(40, 120)
    step_until(lambda: len(first) >= num_first and steps.keys() == searches)
    sent = {request.request_id: [e for e in first if e.request_id == request.request_id] for request in requests}
    open_ones = [r for r in requests if not sent[r.request_id] or not isinstance(sent[r.request_id][-1], Finished)]
    small = make_engine(num_pages=64)
    rest = run(small, *(resumed(each, sent[each.request_id], steps.get(each.request_id, ())) for each in open_ones))
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


@pytest.mark.parametrize("num_events", [0, 6])
def test_candidates_are_cancelled_once_while_a_resumed_request_waits_for_its_grammar(
    num_events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=4, seed=1, max_tokens=12, structured_outputs=WORD)
    request = replace(make_request("grammar"), params=params)
    engine = make_engine()
    events = run(engine, request, most=num_events)
    engine.cancel_candidate("a", 1)
    events += engine.pop_events()
    gate = threading.Event()
    monkeypatch.setattr(GrammarChecker, "check", lambda *_: "" if gate.wait(30) else "?")
    other = make_engine()
    other.add(resumed(request, events))
    assert other.is_compiling_grammar("a")
    for index in (1, 2, 2):
        other.cancel_candidate("a", index)
    gate.set()
    rest = other.pop_events()
    ended = [(end.index, end.finish_reason) for end in (*events, *rest) if isinstance(end, CandidateDone)]
    assert ended == [(1, "cancelled"), (2, "cancelled")]
    rest = run(other)
    assert {event.index for event in rest if isinstance(event, Tokens | CandidateDone)} == {0, 3}
    assert isinstance(rest[-1], Finished) and not rest[-1].cancelled


def test_a_full_queue_accepts_resumed_requests() -> None:
    capacity = fake_capacity(256, 4, 64, 1024)
    engine = Engine(
        FakeRunner(capacity, VOCAB, None), fake_model_info(VOCAB, ()), EngineConfig(max_queued_requests=1), BYTES
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


def _no_suppression(patch: pytest.MonkeyPatch) -> None:
    original = EventQueue.emit_repeated
    patch.setattr(EventQueue, "emit_repeated", lambda self, request, outputs, _: original(self, request, outputs, 0))


def _no_numbers(patch: pytest.MonkeyPatch) -> None:
    def emit(self: EventQueue, request: LiveRequest, outputs: Any, last_seq: int) -> None:
        self._last_seq[request.request_id] = last_seq

    patch.setattr(EventQueue, "emit_repeated", emit)


def _no_hypotheses(patch: pytest.MonkeyPatch) -> None:
    original = BeamStrategy.replay

    def forgetful(self: BeamStrategy, record: bytes) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(FinishedHypotheses, "add", lambda *_: None)
            return original(self, record)

    patch.setattr(BeamStrategy, "replay", forgetful)


def _no_repeated_penalties(patch: pytest.MonkeyPatch) -> None:
    original = DistinctStrategy.replay

    def forgetful(self: DistinctStrategy, record: bytes) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(LogitEdits, "record", lambda *_: None)
            return original(self, record)

    patch.setattr(DistinctStrategy, "replay", forgetful)


def _no_scores(patch: pytest.MonkeyPatch) -> None:
    original = BestOfStrategy.replay

    def forgetful(self: BestOfStrategy, record: bytes) -> Any:
        advance = original(self, record)
        for candidate in self._inner._candidates.values():  # type: ignore[attr-defined]
            candidate.score = 0.0
        return advance

    patch.setattr(BestOfStrategy, "replay", forgetful)


def _swapped_forks(patch: pytest.MonkeyPatch) -> None:
    original = engine_module._repeat_action

    def repeat(branches: dict[int, Any], action: Extend | Fork | Release) -> None:
        original(branches, replace(action, parent=min(branches)) if isinstance(action, Fork) else action)

    patch.setattr(engine_module, "_repeat_action", repeat)


@pytest.mark.parametrize(
    ("bug", "kind"),
    [
        (_no_suppression, "beams"),
        (_no_numbers, "groups"),
        (_no_hypotheses, "beams"),
        (_no_hypotheses, "groups"),
        (_no_repeated_penalties, "distinct"),
        (_no_scores, "best_of"),
        (_swapped_forks, "beams"),
        (_swapped_forks, "groups"),
    ],
)
def test_search_resume_check_detects_an_injected_bug(bug: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = Cuts(kind)
    bug(monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        cuts.check_after_each_step()


@pytest.mark.parametrize(
    ("bug", "kind"),
    [(_no_penalties, "penalties"), (_no_trail, "greedy"), (_no_score, "three"), (_no_tokens, "greedy")],
)
def test_resume_check_detects_an_injected_bug(bug: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = Cuts(kind)
    bug(monkeypatch)
    with pytest.raises((AssertionError, EngineError)):
        cuts.check_each(cuts.at_steps[5::4])
