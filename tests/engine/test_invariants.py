"""The idle check: runs when due, costs little, and counts or raises violations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine.invariants import MAX_PAGES_PER_CHECK
from chatcache.kv_cache.pool import ChildIndex, InvariantError, PagePool
from chatcache.types.events import Finished
from chatcache.types.request import GenerateRequest, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info


def engine(*, strict: bool = False, num_pages: int = 64) -> Engine:
    runner = FakeRunner(fake_capacity(num_pages, num_host_pages=32), 64)
    eng = Engine(runner, fake_model_info(64), EngineConfig(strict=strict))
    eng._invariant_checker._strict = strict  # in tests all are, unless they say otherwise
    return eng


def serve(eng: Engine, name: str = "a") -> bool:
    """Run a request; return whether it finished."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    eng.add(GenerateRequest(request_id=name, prompt=tuple(range(1, 40)), params=params))
    finished = False
    while eng.has_work():
        finished |= any(isinstance(event, Finished) for event in eng.step())
    return finished


def test_check_runs_once_whenever_the_engine_becomes_idle() -> None:
    eng = engine()
    eng.step()
    assert eng.health().num_self_checks == 0, "nothing has run yet"
    for count in range(1, 4):
        serve(eng)
        assert eng.health().num_self_checks == count
        eng.step()
        assert eng.health().num_self_checks == count, "nothing has run since"
    assert eng.health().num_broken_invariants == 0


def leaked_page(eng: Engine) -> None:
    eng.scheduler.kv.pool.allocate(1)


def idle_page_that_cannot_be_found(eng: Engine) -> None:
    pool = eng.scheduler.kv.pool
    del pool._index[next(iter(pool._index))]


def idle_page_without_owner(eng: Engine) -> None:
    pool = eng.scheduler.kv.pool
    pool._content[next(iter(pool._idle))] = None


def child_without_a_parent(eng: Engine) -> None:
    pool = eng.scheduler.kv.pool
    pool._children = ChildIndex()


def empty_page_that_is_held(eng: Engine) -> None:
    pool = eng.scheduler.kv.pool
    pool.refs[pool._blank[0]] = 1


def leaked_host_page(eng: Engine) -> None:
    host = eng.scheduler.kv.host
    assert host is not None
    host.pool.allocate(1)


def leaked_slot(eng: Engine) -> None:
    eng.scheduler._rows.acquire()


def reservation_never_released(eng: Engine) -> None:
    eng.scheduler._rows.num_reserved += 1


BREAKAGES: list[Callable[[Engine], None]] = [
    leaked_page,
    idle_page_that_cannot_be_found,
    idle_page_without_owner,
    child_without_a_parent,
    empty_page_that_is_held,
    leaked_host_page,
    leaked_slot,
    reservation_never_released,
]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_check_of_a_broken_invariant_counts_and_logs_it(
    breakage: Callable[[Engine], None], caplog: pytest.LogCaptureFixture
) -> None:
    eng = engine()
    serve(eng)
    breakage(eng)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    eng.add(GenerateRequest(request_id="b", prompt=(50, 51), params=params))
    while eng.has_work():
        eng.step()
    assert eng.health().num_broken_invariants > 0
    assert "broken invariant" in caplog.text


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_check_of_a_strict_engine_raises(breakage: Callable[[Engine], None]) -> None:
    eng = engine(strict=True)
    serve(eng)
    breakage(eng)
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    eng.add(GenerateRequest(request_id="b", prompt=(50, 51), params=params))
    eng.step()
    with pytest.raises(InvariantError):
        eng.step()


def test_check_of_a_large_pool_covers_it_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    num_pages = 5 * MAX_PAGES_PER_CHECK
    eng = engine(num_pages=num_pages)
    looked_at: list[int] = []
    original = PagePool.idle_violations

    def broken_when_idle(self: PagePool, first: int, count: int) -> object:
        if self is eng.scheduler.kv.pool:
            looked_at.extend(range(max(first, 1), min(first + count, self.num_pages)))
        return original(self, first, count)

    monkeypatch.setattr(PagePool, "idle_violations", broken_when_idle)
    serve(eng)
    assert len(looked_at) <= MAX_PAGES_PER_CHECK
    for _ in range(7):
        serve(eng)
    assert set(looked_at) == set(range(1, num_pages))
