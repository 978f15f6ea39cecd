"""A tenant may use half of the queue; beyond that it gets 429."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from chatcache.engine import admission as intake
from chatcache.engine.engine import Engine
from chatcache.errors import ChatcacheError, OverloadedError, RateLimitError
from chatcache.types.request import SamplingParams
from tests.engine.driver import engine, request

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
MOST, MOST_TOKENS = 12, 300


def ask(eng: Engine, tenant: str, number: int, num_tokens: int = 4) -> ChatcacheError | None:
    """Add a request; return the error with which it was rejected, if any."""
    name = f"{tenant}-{number}"
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    try:
        eng.add(replace(request(name, num_tokens=num_tokens, params=params), namespace=tenant))
    except ChatcacheError as error:
        return error
    return None


def waiting(eng: Engine) -> Counter[str]:
    return Counter(each.namespace for each in eng.scheduler.waiting)


def waiting_tokens(eng: Engine) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in eng.scheduler.waiting:
        total[each.namespace] += each.num_prompt_tokens
    return total


def test_a_tenant_is_rejected_at_half_of_the_queue_and_all_at_the_whole() -> None:
    eng = engine(max_queued_requests=4)
    assert [ask(eng, "one", number) for number in range(2)] == [None, None]
    beyond = ask(eng, "one", 2)
    assert isinstance(beyond, RateLimitError) and beyond.status == 429 and "of this tenant" in beyond.message
    assert [ask(eng, "two", number) for number in range(2)] == [None, None]
    full = ask(eng, "three", 0)
    assert isinstance(full, OverloadedError) and full.status == 503
    eng.abort("one-0")
    assert ask(eng, "three", 0) is None, "what an abort leaves is free"
    eng.step()
    assert ask(eng, "one", 2) is None


def test_tenant_share_counts_tokens_and_admits_one_long_request() -> None:
    eng = engine(max_queued_tokens=200)
    assert ask(eng, "one", 0, 150) is None
    beyond = ask(eng, "one", 1, 1)
    assert isinstance(beyond, RateLimitError) and "150 prompt tokens of this tenant" in beyond.message
    assert ask(eng, "two", 0, 50) is None
    assert isinstance(ask(eng, "three", 0, 1), OverloadedError)


def test_tenant_share_without_namespaces_is_unlimited() -> None:
    eng = engine(max_queued_requests=4)
    assert [ask(eng, "", number) for number in range(4)] == [None] * 4
    assert isinstance(ask(eng, "", 4), OverloadedError)


def flood(seed: int) -> None:
    """Three tenants send random requests, with steps and aborts in between.

    Raises: AssertionError if a share or the queue overflows, a request is rejected without reason, or counts are wrong.
    """
    rng = np.random.default_rng(seed)
    eng = engine(max_queued_requests=MOST, max_queued_tokens=MOST_TOKENS, max_num_seqs=3)
    alive: list[str] = []
    for number in range(400):
        act = rng.integers(10)
        if act == 0:
            eng.step()
        elif act == 1 and alive:
            eng.abort(alive.pop(int(rng.integers(len(alive)))))
        else:
            tenant, num_tokens = "abc"[rng.integers(3)], int(rng.integers(1, 60))
            mine, tokens, total = waiting(eng)[tenant], waiting_tokens(eng), len(eng.scheduler.waiting)
            has_share = mine < MOST // 2 and (not mine or tokens[tenant] + num_tokens <= MOST_TOKENS // 2)
            has_room = total < MOST and (not total or tokens.total() + num_tokens <= MOST_TOKENS)
            error = ask(eng, tenant, number, num_tokens)
            expected = RateLimitError if not has_share else OverloadedError if not has_room else type(None)
            assert type(error) is expected, f"{error!r} for a tenant with {mine} of {total} waiting"
            if error is None:
                alive.append(f"{tenant}-{number}")
        assert len(eng.scheduler.waiting) <= MOST and max(waiting(eng).values(), default=0) <= MOST // 2
        assert {name: eng.scheduler.waiting.namespace_size(name) for name in "abc"} == {
            name: (waiting(eng)[name], waiting_tokens(eng)[name]) for name in "abc"
        }


def test_tenant_shares_hold_under_random_requests() -> None:
    for turn in range(5):
        flood(SEED + turn)


def test_tenant_share_check_without_shares_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "check_tenant_share", lambda *_: None)
    with pytest.raises(AssertionError, match=r"(None|OverloadedError\(.*\)) for a tenant with"):
        flood(SEED)
