"""Division of the pages among requests, and the share of unused page space."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine.stats import USAGE_INTERVAL_S, PageUsageCache
from chatcache.errors import ContextLengthError
from chatcache.types.events import Tokens
from chatcache.types.request import GenerateRequest, SamplingParams
from chatcache.types.stats import PageAccounts
from tests.engine.generated_workloads import workloads
from tests.engine.workloads import Workload
from tests.kv_cache.slot_oracle import check_slots
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info


def expected_charges(engine: Engine) -> dict[str, float]:
    """Oracle: split each page equally among the requests whose tables contain it."""
    held = {
        request.request_id: {page for table in request.tables() for page in table.pages()}
        for request in engine.scheduler.running
    }
    return {
        name: sum(1 / sum(page in others for others in held.values()) for page in pages) for name, pages in held.items()
    }


def check_accounts(engine: Engine) -> PageAccounts:
    accounts, num_in_use = engine.cache.page_accounts(), engine.health().num_pages_in_use
    assert accounts.requests == pytest.approx(expected_charges(engine))
    for ledger in (accounts.requests, accounts.conversations, accounts.namespaces):
        assert sum(ledger.values()) == pytest.approx(num_in_use)
    assert accounts.num_pages_in_use == num_in_use
    return accounts


def check_usage(engine: Engine) -> None:
    """Compare the slot usage with a count of all slots."""
    scheduler = engine.scheduler
    usage, num_kept_free = engine.cache.stats(), scheduler.waiting.num_pages_kept_free()
    check_slots(scheduler.kv, scheduler.tables(), usage, num_kept_free)


def test_page_usage_shows_the_pages_that_admission_keeps_free() -> None:
    """Two requests decode on a pool of 12 pages; a third one fits the free pages, but not those left to it."""
    engine = chat_engine(num_pages=13)
    for name, first in (("a", 1), ("b", 100)):
        engine.add(request(name, tuple(range(first, first + 64))))
    engine.step(), engine.step()
    engine.add(request("c", tuple(range(200, 230))))
    engine.step()
    slots = engine.cache.stats().slots
    assert engine.health().num_waiting == 1 and engine.health().slots == slots
    assert (slots.kept_free, slots.free) == (2 * 16, 0), "a page for each running branch, of which none has room left"
    assert slots.token == 2 * 66 and slots.empty == 2 * 14
    check_usage(engine)


def with_conversations(workload: Workload) -> Workload:
    arrivals = tuple(
        replace(a, request=msgspec.structs.replace(a.request, conversation_id=("", "chat 1", "chat 2")[i % 3]))
        for i, a in enumerate(workload.arrivals)
    )
    return replace(workload, arrivals=arrivals)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
@pytest.mark.slow
def test_page_accounts_in_every_step_add_up_to_the_pages_in_use(workload: Workload) -> None:
    engine, _ = with_conversations(workload).engine()
    for arrival in with_conversations(workload).arrivals:
        try:
            engine.add(arrival.request)
        except ContextLengthError:
            continue
    step = 0
    while engine.has_work():
        check_accounts(engine)
        check_usage(engine)
        engine.step()
        step += 1
        for arrival in workload.arrivals:
            if arrival.cancelled_at == step:
                engine.abort(arrival.request.request_id)
    assert check_accounts(engine).requests == {}


def chat_engine(num_pages: int = 4096) -> Engine:
    capacity = fake_capacity(num_pages, page_size=16, num_slots=256)
    return Engine(FakeRunner(capacity, 512), fake_model_info(512), EngineConfig())


def request(name: str, prompt: tuple[int, ...], n: int = 1, max_tokens: int = 40, **fields: Any) -> GenerateRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, seed=len(name))
    return GenerateRequest(request_id=name, prompt=prompt, params=params, **fields)


def test_page_accounts_of_two_sharing_requests_are_half_each() -> None:
    engine = chat_engine()
    prompt = tuple(range(1, 65))
    engine.add(request("a", prompt, conversation_id="one", namespace="t"))
    engine.step()
    engine.add(request("b", (*prompt, 9), n=4, conversation_id="two", namespace="t"))
    engine.step()
    accounts = check_accounts(engine)
    assert accounts.requests == {"a": 4 / 2 + 1, "b": 4 / 2 + 1}, "four shared pages and a tail of its own each"
    engine.step()
    accounts = check_accounts(engine)
    assert accounts.requests == {"a": 3.0, "b": 6.0} and accounts.conversations == {"one": 3.0, "two": 6.0}
    assert accounts.namespaces == {"t": 9.0} and accounts.page_bytes == 16 * 8


def test_health_usage_equals_stats_and_is_refreshed_once_a_second() -> None:
    engine = chat_engine()
    engine.add(request("a", tuple(range(1, 65)), n=4))
    engine.step(), engine.step()
    now = 100.0
    gauge = PageUsageCache(engine.scheduler, lambda: now)
    first = gauge.read()
    assert first == engine.cache.stats() and first.num_shared == 4
    engine.cancel_candidate("a", 3)
    now += USAGE_INTERVAL_S / 2
    assert gauge.read() is first
    now += USAGE_INTERVAL_S / 2
    assert gauge.read() == engine.cache.stats() != first


@pytest.mark.parametrize("is_aborted", [False, True])
def test_health_usage_returns_to_zero_with_the_last_request(is_aborted: bool) -> None:
    """An idle engine sends no health report after that of its last step."""
    engine = chat_engine()
    engine.add(request("a", tuple(range(1, 65)), n=4))
    engine.step(), engine.step()
    slots = engine.health().slots
    assert slots.token > 0 and slots.kept_free > 0 and slots.waste > 0
    if is_aborted:
        engine.abort("a")
    while engine.has_work():
        engine.step()
    health = engine.health()
    assert (health.num_pages_in_use, health.num_pages_shared) == (0, 0)
    assert (health.slots.token, health.slots.kept_free, health.slots.waste) == (0, 0, 0.0)


@pytest.mark.slow
def test_page_usage_of_a_chat_load_wastes_under_four_percent() -> None:
    """Twelve conversations of three turns run concurrently.

    Prompts have 200-1500 new tokens in the first turn, replies 50-300. Every fifth turn samples 2-4 candidates and
    continues with one of them.
    """
    rng = np.random.default_rng(4)
    engine = chat_engine()
    turns = {f"chat {number}": 0 for number in range(12)}
    texts: dict[str, tuple[int, ...]] = dict.fromkeys(turns, ())
    starts = {name: int(rng.integers(0, 200)) for name in turns}
    wastes: list[float] = []

    def send(name: str) -> None:
        turns[name] += 1
        num_new = int(rng.integers(200, 1500)) if turns[name] == 1 else int(rng.integers(10, 200))
        texts[name] += tuple(rng.integers(1, 512, num_new).tolist())
        n = int(rng.integers(2, 5)) if rng.random() < 0.2 else 1
        engine.add(request(name, texts[name], n, int(rng.integers(50, 301)), conversation_id=name, namespace=name))

    step = 0
    while engine.has_work() or any(turn == 0 for turn in turns.values()):
        for name in [name for name, start in starts.items() if start == step]:
            send(name)
        for event in engine.step():
            if isinstance(event, Tokens) and event.index == 0:
                texts[event.request_id] += event.token_ids
        usage = engine.cache.stats()
        if usage.num_in_use:
            wastes.append(usage.slots.waste)
        for name in turns:
            if 0 < turns[name] < 3 and name not in engine._requests:
                send(name)
        step += 1
    print(f"waste over {len(wastes)} steps: mean {np.mean(wastes):.2%}, most {max(wastes):.2%}")
    assert len(wastes) > 500 and np.mean(wastes) < 0.04
