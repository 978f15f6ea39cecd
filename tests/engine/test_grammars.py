"""Constrained requests: with others, preempted, failing, and while their grammar compiles."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from chatcache.config import EngineConfig
from chatcache.decoding.grammar.compiler import GrammarChecker
from chatcache.decoding.grammar.state import GrammarState
from chatcache.engine.engine import Engine
from chatcache.errors import InvalidRequestError, OverloadedError, RateLimitError
from chatcache.types.events import CandidateDone, EngineEvent, Failed, Finished, Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams, StructuredOutputs
from tests.decoding.toy_vocab import CONTROL, EOS, PIECES, VOCAB_SIZE, text_of
from tests.engine.driver import drain
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

REGEX = StructuredOutputs(regex="(ab|[0-9]{2}|é)+x")
SCHEMA = StructuredOutputs(
    json=json.dumps({"type": "object", "properties": {"a": {"enum": [1, 22, "b"]}}, "required": ["a"]})
)


def engine(num_pages: int = 512, **settings: Any) -> Engine:
    runner = FakeRunner(fake_capacity(num_pages, page_size=4, num_host_pages=64), VOCAB_SIZE, eos=EOS)
    config = EngineConfig(strict=True, **settings)
    return Engine(runner, fake_model_info(VOCAB_SIZE, (EOS,)), config, PIECES, special_ids=(EOS, CONTROL))


def request(name: str, params: Params, length: int = 6) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt=tuple(range(len(name), len(name) + length)), params=params)


def outputs(events: Sequence[EngineEvent], name: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Tokens) and event.request_id == name:
            found.setdefault(event.index, []).extend(event.token_ids)
    return found


def terminal(events: Sequence[EngineEvent], name: str) -> EngineEvent:
    (last,) = [e for e in events if e.request_id == name and isinstance(e, Finished | Failed)]
    return last


MIXED: dict[str, Params] = {
    "n8": SamplingParams(n=8, seed=1, max_tokens=30, structured_outputs=REGEX),
    "json": SamplingParams(n=2, seed=2, max_tokens=60, structured_outputs=SCHEMA),
    "beams": BeamSearchParams(beam_width=4, max_tokens=24, structured_outputs=REGEX),
    "distinct": SamplingParams(n=4, seed=3, distinct=True, max_tokens=24, structured_outputs=REGEX),
    "best": SamplingParams(n=1, best_of=3, seed=4, max_tokens=24, structured_outputs=REGEX),
    "plain": SamplingParams(n=2, seed=5, max_tokens=40, ignore_eos=True),
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=REGEX),
}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.slow
def test_preempted_constrained_requests_equal_the_unlimited_pool(preemption: str) -> None:
    """The grammar state belongs to the strategy: neither swap nor recompute changes it."""
    roomy, tight = engine(), engine(num_pages=68, preemption_mode=preemption)
    events: list[list[EngineEvent]] = []
    for each in (roomy, tight):
        for name, params in MIXED.items():
            each.add(request(name, params))
        events.append(drain(each))
    assert roomy.health().num_preemptions == 0 and tight.health().num_preemptions > 0
    for name, params in MIXED.items():
        assert isinstance(terminal(events[1], name), Finished)
        assert outputs(events[0], name) == outputs(events[1], name)
        dones = [e for e in events[1] if isinstance(e, CandidateDone) and e.request_id == name]
        complete = [text_of(outputs(events[1], name)[e.index]).decode() for e in dones if e.finish_reason == "stop"]
        if params.structured_outputs is REGEX:
            assert all(re.fullmatch(REGEX.regex or "", text) for text in complete)
        elif params.structured_outputs is SCHEMA:
            assert all(json.loads(text)["a"] in (1, 22, "b") for text in complete)


@pytest.mark.parametrize("kind", [RuntimeError, type("Panic", (BaseException,), {})])
def test_a_grammar_error_fails_its_request_only(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = engine()
    names = {f"r{i}": SamplingParams(n=2, seed=i, max_tokens=12, structured_outputs=REGEX) for i in range(3)}
    for name, params in names.items():
        healthy.add(request(name, params))
    want = drain(healthy)

    step = GrammarState._step
    calls: list[int] = []

    def faulty(self: GrammarState, tokens: list[int]) -> None:
        calls.append(1)
        if len(calls) == 12:  # in about the third step of one request
            raise kind("injected")
        step(self, tokens)

    eng = engine()
    monkeypatch.setattr(GrammarState, "_step", faulty)
    for name, params in names.items():
        eng.add(request(name, params))
    events = drain(eng)
    failed = [event for event in events if isinstance(event, Failed)]
    assert len(failed) == 1 and failed[0].status == 500
    assert "injected" not in failed[0].message
    for name in names:
        if name != failed[0].request_id:
            assert outputs(events, name) == outputs(want, name)


def test_other_requests_decode_while_a_grammar_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(GrammarChecker, "check", lambda *_: "" if gate.wait(30) else "?")
    eng = engine(max_queued_requests=3)
    eng.add(request("slow", MIXED["n8"]))
    eng.add(request("plain", MIXED["plain"]))
    assert eng.is_compiling_grammar("slow") and not eng.is_compiling_grammar("plain")
    events: list[EngineEvent] = []
    for _ in range(60):
        events += eng.step()
        eng.cache.check()
    assert isinstance(terminal(events, "plain"), Finished)
    assert eng.is_compiling_grammar("slow") and eng.health().num_waiting == 1 and eng.has_work()
    for name in ("b", "c"):
        eng.add(request(name, MIXED["json"]))
    with pytest.raises(OverloadedError):
        eng.add(request("d", MIXED["plain"]))
    eng.abort("b")
    gate.set()
    events += drain(eng)
    cancelled = terminal(events, "b")
    assert isinstance(cancelled, Finished) and cancelled.cancelled
    assert isinstance(terminal(events, "slow"), Finished) and isinstance(terminal(events, "c"), Finished)
    assert not eng.is_compiling_grammar("slow")


def test_an_invalid_grammar_fails_its_request_as_invalid() -> None:
    eng = engine()
    eng.add(request("bad", SamplingParams(structured_outputs=StructuredOutputs(regex="a(?=b)"))))
    eng.add(request("good", MIXED["greedy"]))
    events = drain(eng)
    failure = terminal(events, "bad")
    assert isinstance(failure, Failed) and failure.seq == 1
    assert (failure.status, failure.param, failure.code) == (400, "structured_outputs", "invalid_constraint")
    assert isinstance(terminal(events, "good"), Finished)


def test_add_of_an_obviously_invalid_grammar_raises() -> None:
    eng = engine()
    with pytest.raises(InvalidRequestError, match="is not JSON"):
        eng.add(request("bad", SamplingParams(structured_outputs=StructuredOutputs(json="{"))))
    with pytest.raises(InvalidRequestError, match="exactly one of"):
        eng.add(request("bad", BeamSearchParams(structured_outputs=StructuredOutputs())))
    plain = Engine(FakeRunner(fake_capacity(), VOCAB_SIZE), fake_model_info(VOCAB_SIZE), EngineConfig())
    with pytest.raises(InvalidRequestError, match="need a model with a tokenizer"):
        plain.add(request("bad", MIXED["greedy"]))
    assert not eng.has_work() and not plain.has_work()


def test_a_cached_grammar_is_not_waited_for() -> None:
    eng = engine()
    eng.add(request("first", MIXED["greedy"]))
    drain(eng)
    eng.add(request("second", MIXED["greedy"]))
    assert not eng.is_compiling_grammar("second")
    assert isinstance(terminal(drain(eng), "second"), Finished)


def test_an_unneeded_grammar_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, checked = threading.Event(), list[str]()

    def check(_: GrammarChecker, grammar: str) -> str:
        checked.append(grammar)
        return "" if gate.wait(30) else "?"

    def choosing(*texts: str) -> SamplingParams:
        return SamplingParams(structured_outputs=StructuredOutputs(choice=texts))

    monkeypatch.setattr(GrammarChecker, "check", check)
    eng = engine()
    eng.add(request("first", choosing("a")))
    for at in range(5):
        eng.add(request(f"gone{at}", choosing("b", "a" * (at + 1))))
    for name in ("leaves", "stays", "comes back"):
        eng.add(request(name, choosing("c", "ab")))
    for name in ("first", *(f"gone{at}" for at in range(5)), "leaves"):
        eng.abort(name)
    eng.add(request("again", choosing("b", "a")))  # what was taken out of the queue can be asked for again
    gate.set()
    events = drain(eng)
    for name in ("stays", "comes back", "again"):
        finished = terminal(events, name)
        assert isinstance(finished, Finished) and not finished.cancelled
    assert len(checked) <= 3  # the one under way, and the two that are still wanted


def test_requests_waiting_for_a_grammar_count_in_their_tenants_share(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(GrammarChecker, "check", lambda *_: "" if gate.wait(30) else "?")

    def add(name: str, tenant: str) -> None:
        params = SamplingParams(structured_outputs=StructuredOutputs(choice=("a", "ab")))
        eng.add(GenerateRequest(request_id=name, prompt=(1, 2), params=params, namespace=tenant))

    eng = engine(max_queued_requests=4)
    for at in range(2):
        add(f"mine{at}", "a")
    with pytest.raises(RateLimitError):
        add("mine2", "a")
    add("theirs", "b")
    gate.set()
    assert isinstance(terminal(drain(eng), "theirs"), Finished)
    add("mine2", "a")


def test_many_grammars_of_a_tenant_do_not_delay_another_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, checked = threading.Event(), list[str]()

    def check(_: GrammarChecker, grammar: str) -> str:
        checked.append(grammar)
        return "" if gate.wait(30) else "?"

    def add(name: str, tenant: str, *texts: str) -> None:
        params = SamplingParams(structured_outputs=StructuredOutputs(choice=texts))
        eng.add(GenerateRequest(request_id=name, prompt=(1, 2), params=params, namespace=tenant))

    monkeypatch.setattr(GrammarChecker, "check", check)
    eng = engine()
    for at in range(8):
        add(f"many{at}", "a", "a" * (at + 1))
    add("two", "b", "ab")
    add("three", "b", "abab")
    gate.set()
    events = drain(eng)
    assert all(isinstance(terminal(events, name), Finished) for name in ("many7", "two", "three"))
    order = [re.search(r'CHOICE: "(.*)"', grammar)[1] for grammar in checked]  # type: ignore[index]
    assert len(order) == 10 and order.index("ab") <= 2 and order.index("abab") <= 4
    assert [text for text in order if "b" not in text] == ["a" * (at + 1) for at in range(8)]
