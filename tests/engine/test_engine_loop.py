"""The loop's promises: events, refusals, faults, cancels, and what is found again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from chatcache.config import EngineConfig
from chatcache.decode.actions import Advance, Candidates, DrawSpec, Extend, Retire
from chatcache.decode.factory import make_strategy
from chatcache.engine.engine import Engine
from chatcache.engine.fake import FakeRunner, fake_capacity, fake_facts
from chatcache.errors import ChatcacheError, ContextTooLong, InvalidRequest, Overloaded
from chatcache.sched.plan import StepPlan, StepResult
from chatcache.types import (
    BeamSearchParams,
    CandidateDone,
    EngineEvent,
    Failed,
    Finished,
    GenerateRequest,
    Params,
    SamplingParams,
    Started,
    Tokens,
)

VOCAB = 64


def engine(runner: FakeRunner | None = None, **settings: Any) -> Engine:
    factory = settings.pop("make_strategy", None)
    runner = runner or FakeRunner(fake_capacity(), VOCAB)
    extra = {"make_strategy": factory} if factory else {}
    return Engine(runner, fake_facts(VOCAB), EngineConfig(**settings), **extra)


def request(
    request_id: str = "a", num_tokens: int = 20, params: Params | None = None, **fields: Any
) -> GenerateRequest:
    prompt = fields.pop("prompt", tuple(i % (VOCAB - 1) + 1 for i in range(num_tokens)))
    params = params or SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=request_id, prompt=prompt, params=params, **fields)


def drain(engine: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    for _ in range(1000):
        if not engine.has_work():
            return events
        events += engine.step()
        engine.check()
    raise AssertionError("the engine stalls")


def output(events: list[EngineEvent], request_id: str = "a", index: int = 0) -> list[int]:
    parts = [e for e in events if isinstance(e, Tokens) and (e.request_id, e.index) == (request_id, index)]
    return [token for part in parts for token in part.token_ids]


def test_the_events_of_one_request() -> None:
    eng = engine()
    eng.add(request())
    events = drain(eng)
    assert [type(event) for event in events] == [Started, *[Tokens] * 5, CandidateDone, Finished]
    assert [event.seq for event in events] == list(range(1, 9))
    assert events[0] == Started("a", 1, 20, 0)
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.num_prompt_tokens, last.num_output_tokens, last.num_computed_tokens) == (20, 5, 24)
    assert not last.cancelled and not eng.has_work() and eng.step() == []


def test_the_next_turn_finds_the_whole_history() -> None:
    eng = engine()
    eng.add(request(params=SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)))
    first = request().prompt + tuple(output(drain(eng)))
    eng.add(request("b", prompt=(*first, 7, 8, 9)))
    started = drain(eng)[0]
    assert isinstance(started, Started)
    assert started.num_cached_tokens == len(first) - 1, "all but the last token drawn, which was never computed"


def test_namespaces_do_not_share() -> None:
    eng = engine()
    eng.add(request(namespace="tenant:a"))
    drain(eng)
    eng.add(request("b", namespace="tenant:b"))
    eng.add(request("c", namespace="tenant:a"))
    cached = {event.request_id: event.num_cached_tokens for event in drain(eng) if isinstance(event, Started)}
    assert cached == {"b": 0, "c": 19}


def test_prefix_caching_can_be_switched_off_and_reset() -> None:
    for eng, expected in ((engine(enable_prefix_caching=False), 0), (engine(), 19)):
        for name in ("a", "b"):
            eng.add(request(name))
            events = drain(eng)
        assert isinstance(events[0], Started) and events[0].num_cached_tokens == expected
    assert eng.health().num_pages_idle > 0
    eng.add(request("c"))
    eng.step()
    assert not eng.reset_prefix_cache(), "not while somebody runs"
    drain(eng)
    assert eng.reset_prefix_cache() and eng.health().num_pages_idle == 0


def test_eight_candidates_hold_the_prompt_once() -> None:
    eng = engine()
    eng.add(request(num_tokens=1000, params=SamplingParams(n=8, max_tokens=12, seed=1, ignore_eos=True)))
    eng.step()
    assert eng.num_pages_held("a") == 63
    eng.step()
    usage = eng.stats()
    assert usage.num_shared == 62, "1,000 = 62 * 16 + 8"
    assert usage.num_in_use == eng.num_pages_held("a") == 62 + 8
    assert eng.health().num_page_copies == 7
    events = drain(eng)
    assert len({tuple(output(events, index=index)) for index in range(8)}) == 8
    assert isinstance(events[-1], Finished) and events[-1].num_cached_tokens == 0, "own pages are not cached ones"


def test_a_candidate_does_not_depend_on_its_siblings_or_neighbours() -> None:
    eng = engine()
    eng.add(request(params=SamplingParams(n=1, max_tokens=8, seed=5, ignore_eos=True)))
    single = output(drain(eng))
    busy = engine(max_num_batched_tokens=16)
    busy.add(request(params=SamplingParams(n=4, max_tokens=8, seed=5, ignore_eos=True)))
    for name in "bcd":
        busy.add(request(name, num_tokens=33, params=BeamSearchParams(beam_width=3, max_tokens=9)))
    assert output(drain(busy)) == single


def test_unseeded_requests_differ_but_repeat_on_an_equal_engine() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def outputs(seed: int) -> list[list[int]]:
        eng = engine(seed=seed)
        for name in ("a", "b"):
            eng.add(request(name, params=params))
        events = drain(eng)
        return [output(events, name) for name in ("a", "b")]

    assert outputs(0) == outputs(0) != outputs(1)
    assert outputs(0)[0] != outputs(0)[1]


def test_cancel_gives_the_pages_back_at_once() -> None:
    eng = engine()
    eng.add(request(num_tokens=100, params=SamplingParams(n=4, max_tokens=50, ignore_eos=True)))
    for _ in range(3):
        eng.step()
    held = eng.num_pages_held("a")
    eng.abort("a")
    assert eng.health().num_pages_in_use == 0
    (last,) = eng.step()
    assert isinstance(last, Finished) and last.cancelled and last.num_pages_freed == held == 6 + 4
    assert not eng.has_work()
    eng.abort("a")
    eng.abort("never seen")
    assert eng.step() == []


def test_a_waiting_request_can_be_cancelled() -> None:
    eng = engine(max_num_seqs=1)
    eng.add(request("a"))
    eng.add(request("b"))
    eng.step()
    eng.abort("b")
    events = [event for event in drain(eng) if event.request_id == "b"]
    assert events == [Finished("b", 1, 20, 0, 0, cancelled=True)]


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (request(prompt=()), InvalidRequest, "empty"),
        (request(prompt=(1, VOCAB)), InvalidRequest, f"between 0 and {VOCAB - 1}, got {VOCAB}"),
        (request(prompt=(-1,)), InvalidRequest, "got -1"),
        (request(num_tokens=4096), ContextTooLong, "4096 tokens.*allows 4095"),
        (request(params=SamplingParams(max_tokens=4090)), ContextTooLong, "20 tokens.*4090.*4110.*4096"),
        (request(params=SamplingParams(temperature=-1.0)), InvalidRequest, "temperature"),
        (request(params=SamplingParams(n=17)), InvalidRequest, "n must be at most 16"),
        (request(params=BeamSearchParams(beam_width=17)), InvalidRequest, "beam_width must be at most 16"),
        (request(""), InvalidRequest, "request_id"),
        (request(params=SamplingParams(n=16, max_tokens=1000)), ContextTooLong, "in 16 branches may need 1009 pages"),
    ],
)
def test_what_is_refused_at_the_door(bad: GenerateRequest, error: type[ChatcacheError], words: str) -> None:
    eng = engine(max_num_seqs=16)
    with pytest.raises(error, match=words):
        eng.add(bad)
    assert not eng.has_work()


def test_a_number_in_the_refusal_can_be_used() -> None:
    eng = engine(FakeRunner(fake_capacity(num_pages=12), VOCAB))
    with pytest.raises(ContextTooLong, match=r"KV memory has 11, enough for max_tokens 97"):
        eng.add(request(num_tokens=80, params=SamplingParams(max_tokens=200)))
    eng.add(request(num_tokens=80, params=SamplingParams(max_tokens=97, ignore_eos=True)))
    assert isinstance(drain(eng)[-1], Finished)


@pytest.mark.parametrize(("num_pages", "expected"), [(12, 97), (512, 256 - 80)])
def test_max_tokens_none_means_all_that_context_and_pool_allow(num_pages: int, expected: int) -> None:
    eng = engine(FakeRunner(fake_capacity(num_pages=num_pages), VOCAB), max_model_len=256)
    eng.add(request(num_tokens=80, params=SamplingParams(max_tokens=None, ignore_eos=True)))
    last = drain(eng)[-1]
    assert isinstance(last, Finished) and last.num_output_tokens == expected


def test_an_active_id_is_refused_and_a_finished_one_welcome() -> None:
    eng = engine()
    eng.add(request())
    with pytest.raises(InvalidRequest, match="already active"):
        eng.add(request())
    drain(eng)
    eng.add(request())
    assert next(event.seq for event in drain(eng)) == 1


def test_the_queue_is_bounded() -> None:
    eng = engine(max_num_waiting=2)
    eng.add(request("a"))
    eng.add(request("b"))
    with pytest.raises(Overloaded, match="2 requests"):
        eng.add(request("c"))
    eng.step()
    eng.add(request("c"))
    assert sum(isinstance(event, Finished) for event in drain(eng)) == 3


def test_a_fault_ends_its_request_only_and_its_pages_are_not_found() -> None:
    runner = FakeRunner(fake_capacity(), VOCAB, faulty_token=63)
    eng = engine(runner)
    eng.add(request("bad", prompt=(*range(30, 60), 63)))
    eng.add(request("good"))
    events = drain(eng)
    assert [event for event in events if event.request_id == "bad"] == [Failed("bad", 1, "the logits are not finite")]
    assert isinstance(events[-1], Finished)
    eng.add(request("again", prompt=(*range(30, 60), 50)))
    assert [e.num_cached_tokens for e in drain(eng) if isinstance(e, Started)] == [0]


class Crashing(FakeRunner):
    """Raises in step `crash_at`, after having spoilt every page of that step."""

    crash_at = 3

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == self.crash_at:
            for page in plan.updates[:, 2].tolist():
                self.cells[page] = 0
            raise RuntimeError("secret details")
        return super().execute(plan)


def test_a_crashing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    eng = engine(Crashing(fake_capacity(), VOCAB), max_num_batched_tokens=40)
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


def test_requests_without_a_row_survive_a_crashing_step() -> None:
    eng = engine(Crashing(fake_capacity(), VOCAB), max_num_batched_tokens=8)
    eng.add(request("a", num_tokens=40))
    eng.add(request("b", prompt=tuple(range(30, 50))))
    events = drain(eng)
    ends = {event.request_id: type(event) for event in events if isinstance(event, Finished | Failed)}
    assert ends == {"a": Failed, "b": Finished}
    reference = engine()
    reference.add(request("b", prompt=tuple(range(30, 50))))
    assert output(events, "b") == output(drain(reference), "b")


class Odd:
    """A strategy that misbehaves in the way its name says, after two tokens."""

    max_branches = 1
    lockstep = False
    steady = False

    def __init__(self, oddity: str) -> None:
        self.oddity = oddity
        self.num_tokens = 0

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        if self.num_tokens == 2 and self.oddity == "raises in draws":
            raise ZeroDivisionError
        return () if self.num_tokens == 2 and self.oddity == "draws nothing" else (DrawSpec(),)

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
                return Advance((Retire(0),), ())
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
def test_a_misbehaving_strategy_ends_its_request_only(oddity: str) -> None:
    def factory(request: GenerateRequest, *args: Any, **settings: Any) -> Any:
        return Odd(oddity) if request.request_id == "odd" else make_strategy(request, *args, **settings)

    eng = engine(make_strategy=factory)
    eng.add(request("odd"))
    eng.add(request("good", num_tokens=35))
    events = drain(eng)
    ends = {event.request_id: type(event) for event in events if isinstance(event, Finished | Failed)}
    assert ends == {"odd": Failed, "good": Finished}
    assert eng.health().num_pages_in_use == 0


def test_health_counts() -> None:
    eng = engine(served_model_name="tiny")
    for name in ("a", "b"):
        eng.add(request(name))
    assert eng.health().num_waiting == 2
    eng.step()
    assert (eng.health().num_running, eng.health().num_waiting) == (1, 1), "twins: one waits a step"
    drain(eng)
    health = eng.health()
    assert (health.model, health.ready, health.num_pages, health.page_size) == ("tiny", True, 511, 16)
    assert (health.num_prompt_tokens, health.num_cached_tokens, health.num_output_tokens) == (40, 16, 10)


def test_best_of_draws_more_branches_than_it_returns() -> None:
    eng = engine(max_num_seqs=4)
    eng.add(request(params=SamplingParams(n=2, best_of=4, max_tokens=3, ignore_eos=True, seed=5)))
    events = eng.step()
    assert len(eng.scheduler.running[0].branches) == 4
    assert not [event for event in events if isinstance(event, Tokens)]
    events += drain(eng)
    end = events[-1]
    assert isinstance(end, Finished) and end.num_output_tokens == 2 * 3
    assert end.num_computed_tokens == 20 + 4 * 2
    scores = [event.score for event in events if isinstance(event, CandidateDone)]
    assert scores == sorted(scores, reverse=True) and len(scores) == 2
    with pytest.raises(InvalidRequest, match="best_of must be at most 4 on this server, got 5") as caught:
        eng.add(request(params=SamplingParams(n=2, best_of=5)))
    assert caught.value.param == "best_of"
