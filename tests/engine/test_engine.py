"""The engine's contract: events, aborts, and cached prefixes."""

from __future__ import annotations

import pytest

from chatcache.errors import InvalidRequestError
from chatcache.types.events import CandidateDone, Finished, Started, Tokens
from chatcache.types.request import BeamSearchParams, SamplingParams
from tests.engine.driver import drain, engine, output, request


def test_step_emits_the_events_of_a_request_in_order() -> None:
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


def test_the_next_turn_finds_the_whole_history_cached() -> None:
    eng = engine()
    eng.add(request(params=SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)))
    first = request().prompt + tuple(output(drain(eng)))
    eng.add(request("b", prompt=(*first, 7, 8, 9)))
    started = drain(eng)[0]
    assert isinstance(started, Started)
    assert started.num_cached_tokens == len(first) - 1, "all but the last token drawn, which was never computed"


def test_namespaces_do_not_share_pages() -> None:
    eng = engine()
    eng.add(request(namespace="tenant:a"))
    drain(eng)
    eng.add(request("b", namespace="tenant:b"))
    eng.add(request("c", namespace="tenant:a"))
    cached = {event.request_id: event.num_cached_tokens for event in drain(eng) if isinstance(event, Started)}
    assert cached == {"b": 0, "c": 19}


def test_prefix_caching_disabled_or_reset_finds_nothing() -> None:
    for eng, expected in ((engine(enable_prefix_caching=False), 0), (engine(), 19)):
        for name in ("a", "b"):
            eng.add(request(name))
            events = drain(eng)
        assert isinstance(events[0], Started) and events[0].num_cached_tokens == expected
    assert eng.health().num_pages_idle > 0
    eng.add(request("c"))
    eng.step()
    assert not eng.cache.reset_prefix_cache(), "not while a request runs"
    drain(eng)
    assert eng.cache.reset_prefix_cache() and eng.health().num_pages_idle == 0


def test_eight_candidates_hold_the_prompt_pages_once() -> None:
    eng = engine()
    eng.add(request(num_tokens=1000, params=SamplingParams(n=8, max_tokens=12, seed=1, ignore_eos=True)))
    eng.step()
    assert eng.cache.num_pages_held("a") == 63
    eng.step()
    usage = eng.cache.stats()
    assert usage.num_shared == 62, "1,000 = 62 * 16 + 8"
    assert usage.num_in_use == eng.cache.num_pages_held("a") == 62 + 8
    assert eng.health().num_page_copies == 7
    events = drain(eng)
    assert len({tuple(output(events, index=index)) for index in range(8)}) == 8
    assert isinstance(events[-1], Finished) and events[-1].num_cached_tokens == 0, "own pages are not cached ones"


def test_a_candidate_does_not_depend_on_other_candidates_or_requests() -> None:
    eng = engine()
    eng.add(request(params=SamplingParams(n=1, max_tokens=8, seed=5, ignore_eos=True)))
    single = output(drain(eng))
    busy = engine(max_num_batched_tokens=16)
    busy.add(request(params=SamplingParams(n=4, max_tokens=8, seed=5, ignore_eos=True)))
    for name in "bcd":
        busy.add(request(name, num_tokens=33, params=BeamSearchParams(beam_width=3, max_tokens=9)))
    assert output(drain(busy)) == single


def test_unseeded_requests_differ_and_repeat_on_an_equal_engine() -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def outputs(seed: int) -> list[list[int]]:
        eng = engine(seed=seed)
        for name in ("a", "b"):
            eng.add(request(name, params=params))
        events = drain(eng)
        return [output(events, name) for name in ("a", "b")]

    assert outputs(0) == outputs(0) != outputs(1)
    assert outputs(0)[0] != outputs(0)[1]


def test_abort_frees_the_pages_at_once() -> None:
    eng = engine()
    eng.add(request(num_tokens=100, params=SamplingParams(n=4, max_tokens=50, ignore_eos=True)))
    for _ in range(3):
        eng.step()
    held = eng.cache.num_pages_held("a")
    eng.abort("a")
    assert eng.health().num_pages_in_use == 0
    (last,) = eng.step()
    assert isinstance(last, Finished) and last.cancelled and last.num_pages_freed == held == 6 + 4
    assert not eng.has_work()
    eng.abort("a")
    eng.abort("never seen")
    assert eng.step() == []


def test_abort_of_a_waiting_request_ends_it() -> None:
    eng = engine(max_num_seqs=1)
    eng.add(request("a"))
    eng.add(request("b"))
    eng.step()
    eng.abort("b")
    events = [event for event in drain(eng) if event.request_id == "b"]
    assert events == [Finished("b", 1, 20, 0, 0, cancelled=True)]


def test_health_counts_requests_pages_and_tokens() -> None:
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


def test_best_of_samples_more_branches_than_it_returns() -> None:
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
    with pytest.raises(InvalidRequestError, match=r"best_of must be at most 4 \(max_num_seqs\), got 5") as caught:
        eng.add(request(params=SamplingParams(n=2, best_of=5)))
    assert caught.value.param == "best_of"
