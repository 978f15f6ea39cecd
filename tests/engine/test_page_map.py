"""The page map of a running engine, compared with counting over the pool and the branches."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from chatcache.engine.engine import Engine
from chatcache.engine.stats import MAX_TIME_SHARE, PageMapCache
from chatcache.errors import ContextLengthError
from chatcache.kv_cache.page_table import PageTable
from chatcache.types.request import SamplingParams
from tests.engine.driver import drain, engine, request
from tests.engine.generated_workloads import workloads
from tests.engine.workloads import Workload
from tests.kv_cache.page_map_oracle import KeyOwners, check_map


def tables_of(engine: Engine) -> list[PageTable]:
    return [table for request in engine.scheduler.running for table in request.tables()]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(workloads())
@pytest.mark.slow
def test_page_map_in_every_step_equals_the_pool(workload: Workload) -> None:
    engine, _ = workload.engine()
    kv = engine.scheduler.kv
    namespaces = sorted({arrival.request.namespace for arrival in workload.arrivals})
    key_owners = KeyOwners(kv, namespaces)
    for arrival in workload.arrivals:
        try:
            engine.add(arrival.request)
        except ContextLengthError:
            continue
    while engine.has_work():
        engine.step()
        check_map(kv, key_owners, tables_of(engine), namespaces)
        letters = Counter(PageMapCache(engine.scheduler).read(None).cells)
        assert letters["a"] + letters["s"] == kv.pool.num_in_use, "every held page is some branch's"
        assert letters["i"] == kv.pool.num_idle and letters.total() == kv.pool.num_usable


def test_page_map_of_candidates_shows_a_shared_then_idle_prompt() -> None:
    one = engine(page_size=4)
    one.cache._page_map = PageMapCache(one.scheduler, lambda: 0.0)  # never old
    one.add(request(num_tokens=20, params=SamplingParams(n=3, max_tokens=9, ignore_eos=True), namespace="t"))
    for _ in range(4):
        one.step()
    mine, theirs = one.cache.page_map("t"), one.cache.page_map("u")
    size, num_shared = mine.page_size, 20 // mine.page_size
    assert mine == one.cache.page_map(operator=True) and mine.num_pages == one.health().num_pages
    letters = Counter(mine.cells)
    assert letters["s"] >= num_shared and letters["a"] >= 3 and size > 1
    assert set(theirs.cells) == {"o", "f"} and theirs.cells.count("o") == letters["a"] + letters["s"] + letters["i"]
    drain(one)
    assert set(one.cache.page_map("t").cells) == {"i", "f"}
    assert set(one.cache.page_map("u").cells) == {"o", "f"}


def test_page_map_readers_share_one_map_within_the_time_share() -> None:
    one = engine()
    now_s = [100.0]

    def clock() -> float:
        now_s[0] += 0.5  # a look takes half a second
        return now_s[0]

    gauge = PageMapCache(one.scheduler, clock)
    empty = gauge.read(None)
    one.add(request(params=SamplingParams(max_tokens=50, ignore_eos=True)))
    one.step()
    assert [gauge.read(name) for name in (None, "", "x")] == [empty] * 3
    now_s[0] += 0.5 / MAX_TIME_SHARE - 5
    assert gauge.read(None) == empty
    now_s[0] += 5
    assert gauge.read(None) != empty
    one.abort("a")
    drain(one)


@pytest.mark.parametrize("namespace", ["", "x"])
def test_page_map_read_changes_nothing(namespace: str) -> None:
    one, other = engine(), engine()
    for each in (one, other):
        each.add(request(params=SamplingParams(n=2, seed=4, max_tokens=30, ignore_eos=True)))
    events, looked = [], []
    while one.has_work():
        events += one.step()
        looked += other.step()
        other.cache._page_map = PageMapCache(other.scheduler)
        other.cache.page_map(namespace)
    assert looked == events
    other.cache.check()
    assert other.scheduler.kv.pool._blank == one.scheduler.kv.pool._blank
    assert list(other.scheduler.kv.pool._idle) == list(one.scheduler.kv.pool._idle)
