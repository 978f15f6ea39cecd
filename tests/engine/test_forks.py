"""Forks of a reply that is still streaming: its pages are shared and copied only on write."""

from __future__ import annotations

from typing import Any

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import PageHashChain
from chatcache.types.events import EngineEvent, Finished, Started, Tokens
from chatcache.types.request import BeamSearchParams, ForkPoint, GenerateRequest, Params, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB, PAGE = 64, 16
PROMPT = tuple(range(1, 22))  # one page and five tokens


def engine(num_pages: int = 200, **settings: Any) -> Engine:
    runner = FakeRunner(fake_capacity(num_pages, PAGE), VOCAB)
    return Engine(runner, fake_model_info(VOCAB), EngineConfig(**({"strict": True} | settings)))


def ask(name: str, prompt: tuple[int, ...], params: Params | None = None, **fields: Any) -> GenerateRequest:
    params = params or SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt=prompt, params=params, **fields)


def steps(eng: Engine, count: int = 1000) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    for _ in range(count):
        if not eng.has_work():
            break
        events += eng.step()
        eng.cache.check()
    return events


def output(events: list[EngineEvent], name: str, index: int = 0) -> tuple[int, ...]:
    parts = [e.token_ids for e in events if isinstance(e, Tokens) and (e.request_id, e.index) == (name, index)]
    return tuple(token for part in parts for token in part)


def cached(events: list[EngineEvent], name: str) -> int:
    return next(e.num_cached_tokens for e in events if isinstance(e, Started) and e.request_id == name)


def computed(events: list[EngineEvent], name: str) -> int:
    return next(e.num_computed_tokens for e in events if isinstance(e, Finished) and e.request_id == name)


def alone(request: GenerateRequest) -> tuple[int, ...]:
    eng = engine()
    eng.add(request)
    return output(steps(eng), request.request_id)


def test_a_fork_within_a_page_computes_only_the_tokens_that_differ() -> None:
    eng = engine()
    eng.add(source := ask("source", PROMPT))
    events = steps(eng, 7)
    said = output(events, "source")
    assert len(said) == 7, "six of them computed: 27 tokens, in the middle of a page"
    prompt = (*PROMPT, *said[:6], 50, 51, 52)
    eng.add(fork := ask("fork", prompt, fork_of=ForkPoint("source")))
    assert eng.health().num_page_copies == 0
    events += steps(eng, 1)
    assert eng.health().num_page_copies == 1, "both write in this step; the first to do so copies the tail"
    events += steps(eng)
    assert cached(events, "fork") == 27
    assert computed(events, "fork") == 3 + 39
    assert output(events, "source") == alone(source) and output(events, "fork") == alone(fork)


def test_a_fork_at_a_page_boundary_copies_no_page() -> None:
    eng = engine()
    eng.add(ask("source", PROMPT))
    events = steps(eng, 12)
    said = output(events, "source")
    assert len(PROMPT) + len(said) == 33, "32 of them computed"
    eng.add(ask("fork", (*PROMPT, *said[:11], 50), fork_of=ForkPoint("source")))
    events += steps(eng)
    assert cached(events, "fork") == 32 and eng.health().num_page_copies == 0


def test_a_fork_hashes_no_page_again(monkeypatch: pytest.MonkeyPatch) -> None:
    eng = engine()
    eng.add(ask("source", PROMPT))
    said = output(steps(eng, 7), "source")
    named: list[object] = []
    original = KVCache.hash_pages

    def chain(self: KVCache, *args: Any, **options: Any) -> PageHashChain:
        named.append(args)
        return original(self, *args, **options)

    monkeypatch.setattr(KVCache, "hash_pages", chain)
    eng.add(ask("fork", (*PROMPT, *said[:6], 50), fork_of=ForkPoint("source")))
    eng.step()
    assert not named
    eng.add(ask("other", (*PROMPT, 50)))
    eng.step()
    assert named


def test_an_edited_message_shares_pages_up_to_the_edit() -> None:
    eng = engine()
    eng.add(ask("source", PROMPT))
    events = steps(eng, 20)
    said = output(events, "source")
    edited = (*PROMPT, *said[:4], 50, 51)
    eng.add(fork := ask("fork", edited, fork_of=ForkPoint("source")))
    events += steps(eng)
    assert cached(events, "fork") == 25 and output(events, "fork") == alone(fork)


def test_a_fork_of_any_candidate_shares_its_pages() -> None:
    eng = engine()
    eng.add(ask("source", PROMPT, SamplingParams(n=3, max_tokens=40, seed=1, ignore_eos=True)))
    events = steps(eng, 8)
    for index in range(3):
        prompt = (*PROMPT, *output(events, "source", index)[:7], 50)
        eng.add(fork := ask(f"fork{index}", prompt, fork_of=ForkPoint("source", index)))
        events += steps(eng, 3)
        assert cached(events, fork.request_id) == 28
    events += steps(eng)
    for index in range(3):
        prompt = (*PROMPT, *output(events, "source", index)[:7], 50)
        assert output(events, f"fork{index}") == alone(ask(f"fork{index}", prompt))


def test_a_fork_of_a_beam_search_shares_the_best_matching_live_beam() -> None:
    eng = engine()
    eng.add(ask("source", PROMPT, BeamSearchParams(beam_width=3, max_tokens=30, ignore_eos=True)))
    events = steps(eng, 8)
    beam = next(iter(eng.scheduler.running[0].branches.values()))
    tokens = tuple(beam.tokens().tolist())
    eng.add(fork := ask("fork", (*tokens, 50), fork_of=ForkPoint("source")))
    events += steps(eng)
    assert cached(events, "fork") == len(tokens) - 1 and output(events, "fork") == alone(fork)


@pytest.mark.parametrize(
    ("point", "namespace", "settings", "expected"),
    [
        (ForkPoint("source"), "", {}, 27),
        (ForkPoint("unknown"), "", {}, 16),
        (ForkPoint("source", 9), "", {}, 27),
        (ForkPoint("source"), "other", {}, 0),
        (ForkPoint("source"), "", {"enable_prefix_caching": False}, 0),
        (None, "", {}, 16),
    ],
)
def test_a_wrong_fork_hint_is_ignored(
    point: ForkPoint | None, namespace: str, settings: dict[str, Any], expected: int
) -> None:
    eng = engine(**settings)
    eng.add(ask("source", PROMPT))
    events = steps(eng, 7)
    prompt = (*PROMPT, *output(events, "source")[:6], 50)
    eng.add(fork := ask("fork", prompt, namespace=namespace, fork_of=point))
    events += steps(eng)
    assert cached(events, "fork") == expected
    assert output(events, "fork") == alone(fork)


def test_a_fork_with_another_beginning_shares_nothing() -> None:
    eng = engine()
    eng.add(ask("source", PROMPT))
    events = steps(eng, 5)
    eng.add(fork := ask("fork", (60, *PROMPT), fork_of=ForkPoint("source")))
    events += steps(eng)
    assert cached(events, "fork") == 0 and output(events, "fork") == alone(fork)


def test_a_fork_that_is_fully_cached_computes_the_last_token() -> None:
    eng = engine()
    eng.add(ask("source", PROMPT))
    events = steps(eng, 5)
    eng.add(fork := ask("fork", (*PROMPT, *output(events, "source")[:2]), fork_of=ForkPoint("source")))
    events += steps(eng)
    assert cached(events, "fork") == len(PROMPT) + 1 and output(events, "fork") == alone(fork)


def test_source_and_fork_ending_in_any_order_free_all_pages() -> None:
    for ended in ("source", "fork"):
        eng = engine()
        eng.add(source := ask("source", PROMPT))
        events = steps(eng, 7)
        eng.add(fork := ask("fork", (*PROMPT, *output(events, "source")[:6], 50), fork_of=ForkPoint("source")))
        events += steps(eng, 2)
        eng.abort(ended)
        eng.cache.check()
        events += steps(eng)
        rest = fork if ended == "source" else source
        assert output(events, rest.request_id) == alone(rest)


def test_a_hundred_forks_copy_no_page_until_they_write() -> None:
    """Each fork shares the source's pages; there is at most one copy per writer."""
    eng = engine(num_pages=400)
    eng.add(ask("source", PROMPT * 40, SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)))
    events = steps(eng, 7)
    said = output(events, "source")
    before = eng.health().num_pages_in_use
    for number in range(100):
        few = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        prompt = (*PROMPT * 40, *said[:6])
        eng.add(ask(f"fork{number}", (*prompt, number % 60), few, fork_of=ForkPoint("source")))
    eng.step()
    assert eng.health().num_running == 101
    assert eng.health().num_pages_in_use <= before + 100, "a tail each, and nothing else"
    assert eng.health().num_page_copies <= 100


@pytest.mark.parametrize(("salt", "num_cached"), [("a", 30), ("b", 0), ("", 0)])
def test_a_running_branch_is_forked_with_the_same_salt_only(salt: str, num_cached: int) -> None:
    eng = engine()
    eng.add(ask("source", PROMPT, cache_salt="a"))
    begun = steps(eng, 10)
    prompt = (*PROMPT, *output(begun, "source"))
    assert len(prompt) == 31
    eng.add(ask("fork", prompt, fork_of=ForkPoint("source"), cache_salt=salt))
    assert cached(steps(eng), "fork") == num_cached
    assert eng.scheduler.num_live_forks == (salt == "a")
