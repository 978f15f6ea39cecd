"""Tenants on one engine: what they share, what stays private, and what each is charged."""

from __future__ import annotations

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine.stats import MAX_REMEMBERED_NAMESPACES
from chatcache.errors import InvalidRequestError
from chatcache.types.events import EngineEvent, Started
from chatcache.types.request import ForkPoint, GenerateRequest, SamplingParams
from chatcache.types.stats import ExplainQuery
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

VOCAB = 64
PUBLIC = tuple(i % 60 + 1 for i in range(40))


def engine(num_pages: int = 512) -> Engine:
    return Engine(FakeRunner(fake_capacity(num_pages), VOCAB), fake_model_info(VOCAB), EngineConfig())


def request(request_id: str, namespace: str, own: tuple[int, ...], num_public_tokens: int = 40) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        prompt=(*PUBLIC, *own),
        params=SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True),
        namespace=namespace,
        num_public_tokens=num_public_tokens,
    )


def drain(engine: Engine) -> list[EngineEvent]:
    events: list[EngineEvent] = []
    while engine.has_work():
        events += engine.step()
        engine.cache.check()
    return events


def cached(events: list[EngineEvent]) -> dict[str, int]:
    return {event.request_id: event.num_cached_tokens for event in events if isinstance(event, Started)}


def test_a_public_system_prompt_is_computed_once_for_all_tenants() -> None:
    eng = engine()
    eng.add(request("a", "tenant:a", (7,) * 30))
    drain(eng)
    eng.add(request("b", "tenant:b", (7,) * 30))
    eng.add(request("a2", "tenant:a", (7,) * 30))
    eng.add(request("c", "tenant:c", (7,) * 30, num_public_tokens=0))
    assert cached(drain(eng)) == {"b": 32, "a2": 69, "c": 0}


def test_tenants_arriving_together_compute_the_system_prompt_once() -> None:
    eng = engine()
    for name in "abc":
        eng.add(request(name, f"tenant:{name}", (ord(name) - 90,) * 30))
    assert cached(drain(eng)) == {"a": 0, "b": 32, "c": 32}


def test_a_live_fork_beyond_the_public_prefix_is_private() -> None:
    """The fork starts from a public prompt that is being computed, and adds private tokens."""
    runner = FakeRunner(fake_capacity(), VOCAB)
    eng = Engine(runner, fake_model_info(VOCAB), EngineConfig(max_num_batched_tokens=20))
    eng.add(request("a", "tenant:a", (7,) * 30))
    eng.step()
    secret = (*PUBLIC[:20], *(9,) * 30)
    fork = GenerateRequest(
        request_id="b",
        prompt=secret,
        params=SamplingParams(max_tokens=5),
        namespace="tenant:a",
        fork_of=ForkPoint("a"),
    )
    eng.add(fork)
    drain(eng)
    explanation = eng.cache.explain(ExplainQuery((*secret, 1), "tenant:b", num_public_tokens=40))
    assert explanation.num_cached_tokens == 20, "the beginning of the system prompt, and not a word after it"


@pytest.mark.parametrize("num_public_tokens", [-1, 44])
def test_more_public_tokens_than_the_prompt_raise(num_public_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match=rf"between 0 and the prompt's 43 tokens, got {num_public_tokens}"):
        engine().add(request("a", "tenant:a", (1, 2, 3), num_public_tokens))


def test_explain_does_not_run_the_prompt() -> None:
    eng = engine()
    eng.add(request("a", "tenant:a", (7,) * 30))
    drain(eng)
    before = eng.health()
    explanation = eng.cache.explain(ExplainQuery((*PUBLIC, *(7,) * 20, 8, 8), "tenant:a", 40))
    assert (explanation.reason, explanation.at_token, explanation.num_cached_tokens) == ("diverged", 60, 60)
    assert explanation.diverged_tokens[:10] == (7,) * 10 and [page.public for page in explanation.pages] == [
        True,
        True,
        False,
        False,
    ]
    assert eng.cache.explain(ExplainQuery((*PUBLIC, 7, 7), "tenant:b", 40)).reason == "never_computed", (
        "no word of another tenant"
    )
    assert eng.cache.explain(ExplainQuery((*PUBLIC, 7, 7), "tenant:b", 40, operator=True)).reason == "other_namespace"
    assert eng.health() == before
    with pytest.raises(InvalidRequestError, match="prompt"):
        eng.cache.explain(ExplainQuery(()))
    with pytest.raises(InvalidRequestError, match="num_public_tokens"):
        eng.cache.explain(ExplainQuery((1, 2), num_public_tokens=3))


def test_recent_namespaces_are_bounded() -> None:
    eng = engine()
    eng.add(request("a", "tenant:a", (7,) * 30))
    drain(eng)
    for number in range(MAX_REMEMBERED_NAMESPACES):
        eng.add(request("b", f"tenant:{number}", ()))
        eng.abort("b")
        eng.step()
    assert eng.cache.explain(ExplainQuery((*PUBLIC, 7, 7), "tenant:b", 40, operator=True)).reason == "never_computed"
