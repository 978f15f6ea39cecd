"""The report of a request's start, compared with `explain` just before."""

from __future__ import annotations

import random

import pytest

from chatcache.engine.engine import Engine
from chatcache.types.events import EngineEvent, Started, StartReport
from chatcache.types.request import ForkPoint, SamplingParams
from chatcache.types.stats import ExplainQuery, Explanation
from tests.engine.driver import VOCAB, drain, engine, output, request
from tests.support.fake_runner import FakeRunner, fake_capacity


def report(events: list[EngineEvent], name: str = "a") -> StartReport | None:
    return next(event.report for event in events if isinstance(event, Started) and event.request_id == name)


def started(eng: Engine, name: str) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while not any(isinstance(event, Started) and event.request_id == name for event in events):
        events += eng.step()
        eng.cache.check()
    return events


@pytest.mark.parametrize("num_pages", [30, 200])
def test_start_report_equals_the_explanation_before(num_pages: int) -> None:
    eng = engine(FakeRunner(fake_capacity(num_pages, 4), VOCAB))
    draws = random.Random(num_pages)
    prompts = [tuple(draws.randrange(1, 4) for _ in range(50)) for _ in range(3)]
    reasons, num_copied = set(), 0
    for number in range(60):
        prompt = draws.choice(prompts)[: draws.randrange(2, 50)] + (draws.randrange(1, 4),) * draws.randrange(3)
        reported: Explanation = eng.cache.explain(ExplainQuery(prompt))
        before = eng.health().num_page_copies
        name = f"r{number}"
        eng.add(request(name, prompt=prompt, params=SamplingParams(n=3, seed=1, max_tokens=4), explain=True))
        got = report(started(eng, name), name)
        assert got is not None and got.num_copied_pages == eng.health().num_page_copies - before
        if got.miss is None:
            assert reported.reason == ""
        else:
            assert (got.miss.reason, got.miss.at_token, got.miss.detail, got.miss.page_size) == (
                reported.reason, reported.at_token, reported.detail, 4
            )  # fmt: skip
        reasons.add(reported.reason)
        num_copied += got.num_copied_pages
        drain(eng)
    assert reasons >= {"", "never_computed", "diverged"} and num_copied > 5
    assert ("evicted" in reasons) == (num_pages == 30)


def test_start_report_is_absent_without_explain() -> None:
    eng = engine()
    eng.add(request("a"))
    eng.add(request("b", explain=True))
    events = drain(eng)
    assert report(events, "a") is None and report(events, "b") is not None


@pytest.mark.parametrize("num_more", [0, 1, 5])
def test_start_report_of_a_fork_names_where_it_differs(num_more: int) -> None:
    eng = engine(FakeRunner(fake_capacity(200, 4), VOCAB))
    eng.add(request("a", 21, params=SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)))
    events = started(eng, "a")
    for _ in range(7):
        events += eng.step()
    said = output(events)
    prompt = (*request("a", 21).prompt, *said[:6], *(63,) * num_more)
    eng.add(request("b", prompt=prompt, fork_of=ForkPoint("a"), explain=True))
    got = report(started(eng, "b"), "b")
    assert got is not None
    num_shared = 21 + 6 if num_more else 21 + 5
    if num_more < 2:
        assert got.miss is None
    else:
        assert got.miss is not None and (got.miss.reason, got.miss.at_token) == ("never_computed", num_shared)
    assert got.num_copied_pages == 1, "it shares a page in its middle"


def test_start_report_after_a_preemption_is_of_the_first_start() -> None:
    eng = engine(FakeRunner(fake_capacity(22, 4), VOCAB), max_num_batched_tokens=16)
    for name in "abc":
        tokens = tuple(ord(name) - 90 + i % 3 for i in range(30))
        params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        eng.add(request(name, prompt=tokens, params=params, explain=True))
    events = drain(eng)
    assert eng.health().num_preemptions
    for name in "abc":
        got = report(events, name)
        assert (
            got is not None and got.miss is not None and (got.miss.reason, got.miss.at_token) == ("never_computed", 0)
        )
