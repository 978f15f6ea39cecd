"""The decode batch: which branches are in it, what is committed late for them, and that nothing is lost."""

from __future__ import annotations

import pytest

from chatcache.errors import EngineError
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import CacheScope
from chatcache.scheduler.preemption import RECOMPUTE, SWAP, CostModel
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.actions import DrawSpec, Extend, Fork, Release, Reorder
from tests.scheduler.driver import FakeStrategy, P, SchedulerDriver, drawn, rows


def num_cached(driver: SchedulerDriver, tokens: list[int]) -> int:
    return driver.kv.match(driver.kv.hash_pages([*tokens, 99], CacheScope())).num_tokens


class CountingStrategy(FakeStrategy):
    """A strategy that counts the calls of `draws`."""

    def __init__(self, *, has_fixed_draws: bool = True) -> None:
        super().__init__()
        self.has_fixed_draws = has_fixed_draws
        self.num_calls = 0

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        self.num_calls += 1
        return (DrawSpec(seed=7, top_k=3),)


@pytest.mark.parametrize(("is_fixed", "num_calls"), [(True, 2), (False, 20)])
def test_strategy_with_fixed_draws_is_not_asked_again(is_fixed: bool, num_calls: int) -> None:
    driver, strategy = SchedulerDriver(), CountingStrategy(has_fixed_draws=is_fixed)
    request = LiveRequest("r", [1, 2], "", strategy, 0)
    driver.scheduler.add(request)
    steps = [driver.decode(audit=False) for _ in range(20)]
    assert strategy.num_calls == num_calls
    assert request.leader.in_decode_batch == is_fixed
    assert driver.scheduler._decode_batch.unbatched_requests == (set() if is_fixed else {request})
    for step in steps:
        assert step.plan.draws.seed.tolist() == [7] and step.plan.draws.top_k.tolist() == [3]
    assert [step.plan.draws.position.tolist() for step in steps] == [[2 + index] for index in range(20)]
    assert [step.plan.rows.start.tolist() for step in steps[1:]] == [[2 + index] for index in range(19)]


def test_strategy_with_several_draws_stays_outside_the_batch() -> None:
    driver, strategy = SchedulerDriver(), FakeStrategy()
    masked = (DrawSpec(top_k=1), DrawSpec(top_k=2))
    strategy.draws = lambda branch: masked  # type: ignore[method-assign]
    request = LiveRequest("r", [1, 2], "", strategy, 0)
    driver.scheduler.add(request)
    step = [driver.decode() for _ in range(3)][-1]
    assert not request.leader.in_decode_batch and step.plan.draws.top_k.tolist() == [1, 2]


def test_table_is_updated_when_its_page_is_full() -> None:
    driver = SchedulerDriver()
    request = driver.add([1, 2])
    for token in (3, 4, 5):
        driver.decode(token, audit=False)
    table = request.leader.table
    assert table is not None and request.leader.in_decode_batch
    assert (table.num_tokens, request.leader.num_tokens) == (2, 5)
    assert num_cached(driver, [1, 2, 3, 4]) == 0, "the fourth cell is written, but no step was planned since"
    step = driver.decode(6, audit=False)
    assert table.num_tokens == P and num_cached(driver, [1, 2, 3, 4]) == P
    assert step.plan.updates.tolist() == [[request.leader.slot, 1, table.own_pages[1]]]
    driver.check()
    assert table.num_tokens == 5


def test_finish_commits_the_tokens_of_a_batched_branch() -> None:
    driver = SchedulerDriver()
    request = driver.add([1, 2])
    for token in (3, 4, 5, 6, 7):
        driver.decode(token, audit=False)
    driver.scheduler.finish(request)
    assert request.num_computed_tokens == 6
    assert num_cached(driver, [1, 2, 3, 4, 5, 6, 7]) == 6, "the seventh token was sampled but never computed"
    assert driver.kv.pool.num_in_use == 0 and not driver.scheduler._decode_batch.unbatched_requests


def test_finish_with_discard_publishes_no_pending_tokens() -> None:
    driver = SchedulerDriver()
    request, other = driver.add([1, 2]), driver.add([50, 51])
    for token in (3, 4, 5, 6, 7):
        driver.decode(token, audit=False)
    step = driver.scheduler.plan()
    assert step is not None
    driver.scheduler.commit(step, [request])
    driver.scheduler.finish(request, discard=True)
    assert num_cached(driver, [1, 2, 3, 4, 5, 6, 7]) == 0
    driver.check()
    assert other.leader.table is not None and other.leader.table.num_tokens == 7


def test_abort_steps_keeps_nothing_of_the_step() -> None:
    driver = SchedulerDriver()
    requests = {driver.add([1, 2]), driver.add([50, 51])}
    for token in (3, 4, 5, 6, 7):
        driver.decode(token, audit=False)
    step = driver.scheduler.plan()
    assert step is not None and len(step.decode_branches) == 2
    assert set(driver.scheduler.abort_steps(step)) == requests
    assert driver.kv.pool.num_in_use == 0 and num_cached(driver, [1, 2, 3, 4]) == 0
    assert list(driver.scheduler.idle_violations()) == []


def test_fork_of_a_batched_branch_returns_to_the_batch() -> None:
    driver = SchedulerDriver()
    request = driver.add([1, 2], max_branches=3)
    for token in (3, 4, 5):
        driver.decode(token, audit=False)
    driver.step(audit=False)
    assert request.leader.in_decode_batch
    driver.scheduler.apply(request, [Fork(0, 1, 7), Fork(0, 2, 8), Extend(0, 9)])
    assert [branch.in_decode_batch for branch in request.branches.values()] == [False] * 3, "they share their last page"
    step = driver.decode(6)
    assert len(step.plan.copies) == 2 and len(step.plan.rows.slot) == 3
    assert [branch.in_decode_batch for branch in request.branches.values()] == [True] * 3
    assert [branch.id for branch in driver.decode(audit=False).decode_branches] == [0, 1, 2]
    driver.step(audit=False)
    driver.scheduler.apply(request, [Extend(0, 4), Release(1), Extend(2, 4)])
    assert [branch.id for branch in driver.decode(audit=False).decode_branches] == [0, 2]


def test_rows_stay_in_service_order_after_removals() -> None:
    driver = SchedulerDriver(num_slots=8)
    requests = [driver.add([10 * number + 1]) for number in range(6)]
    driver.decode()
    driver.scheduler.finish(requests[1])
    driver.scheduler.finish(requests[4])
    late = [driver.add([71]), driver.add([81])]
    driver.decode()
    step = driver.decode()
    assert [branch.request for branch in step.decode_branches] == [requests[i] for i in (0, 2, 3, 5)] + late
    starts, slots = step.plan.rows.start.tolist(), step.plan.rows.slot.tolist()
    assert starts == [2, 2, 2, 2, 1, 1] or starts == [3, 3, 3, 3, 2, 2]
    assert slots == [branch.slot for branch in step.decode_branches]


def test_batch_is_unused_while_the_budget_is_too_small() -> None:
    driver = SchedulerDriver(budget=3)
    requests = [driver.add([10 * number + 1]) for number in range(5)]
    for _ in range(4):
        driver.decode()
    step = driver.decode()
    assert [row[0] for row in rows(step)] == ["r0", "r1", "r2"], "the oldest first"
    driver.scheduler.finish(requests[0])
    driver.scheduler.finish(requests[1])
    for _ in range(3):
        step = driver.decode()
    assert len(step.decode_branches) == 3


def test_branch_not_extended_after_sampling_computes_nothing() -> None:
    driver = SchedulerDriver()
    request, other = driver.add([1, 2]), driver.add([50, 51])
    driver.decode()
    driver.decode()
    driver.step()
    driver.scheduler.apply(other, [Extend(0, 5)])
    step = driver.step()
    assert [branch.request for branch in drawn(step)] == [other]
    driver.scheduler.apply(other, [Extend(0, 5)])
    driver.scheduler.apply(request, [Extend(0, 6)])
    assert {branch.request for branch in drawn(driver.step())} == {request, other}


def test_newest_request_is_preempted_when_pages_run_out() -> None:
    driver = SchedulerDriver(num_pages=6)
    old, new = driver.add([1, 2]), driver.add([50, 51])
    while not driver.scheduler.num_preemptions:
        driver.decode(audit=False)
    assert driver.scheduler.running == [old] and old.num_preemptions == 0
    assert not new.leader.in_decode_batch and new.num_batched == 0
    num_tokens = new.leader.num_tokens
    driver.check()
    driver.scheduler.finish(old)
    assert rows(driver.decode())[0][:2] == ("r1", 0) and new.leader.num_tokens == num_tokens + 1


class WideStrategy(FakeStrategy):
    """A strategy that draws two tokens of each branch, as a beam search does."""

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        return (DrawSpec(width=2, temperature=0.0),)


def reordered_in_the_batch(driver: SchedulerDriver) -> LiveRequest:
    """Run a request of two branches until one of them becomes a copy of the other; a prompt before it is computed."""
    driver.add(list(range(100, 140)))
    request = LiveRequest("w", [1, 2], "", WideStrategy(2, lockstep=True), 99)
    driver.scheduler.add(request)
    driver.step(audit=False)
    driver.scheduler.apply(request, [Fork(0, 1, 8), Extend(0, 41)])
    driver.step(audit=False)
    driver.scheduler.apply(request, [Reorder((1, 0), (0, 0), (9, 42))])
    assert [branch.in_decode_batch for branch in request.branches.values()] == [True, True]
    return request


@pytest.mark.parametrize("audit", [False, True])
def test_reordered_branches_stay_in_the_batch_and_one_gets_a_copy_of_the_last_page(audit: bool) -> None:
    """An audit in between finds both branches on one page."""
    driver = SchedulerDriver(budget=8)
    request = reordered_in_the_batch(driver)
    num_in_use = driver.kv.pool.num_in_use
    if audit:
        driver.check()
        assert driver.kv.pool.num_in_use == num_in_use - 1
    step = driver.step(audit=False)
    first, second = request.tables()
    assert step.decode_branches == list(request.branches.values())
    assert step.plan.rows.tokens[-2:].tolist() == [42, 9] and step.plan.rows.start[-2:].tolist() == [3, 3]
    assert step.plan.forks.tolist() == [], "they share no full page"
    copied = {tuple(pair) for pair in step.plan.copies.tolist()}
    assert copied in ({(second.own_pages[-1], first.own_pages[-1])}, {(first.own_pages[-1], second.own_pages[-1])})
    assert request.num_copied_pages == driver.scheduler.num_page_copies == 2, "one when the branch was created"
    driver.scheduler.apply(request, [Extend(0, 5), Extend(1, 6)])
    step = driver.step()
    assert step.plan.rows.tokens[-2:].tolist() == [5, 6] and len(step.plan.copies) == 0
    assert num_cached(driver, [1, 2, 41, 42]) == num_cached(driver, [1, 2, 41, 9]) == P


@pytest.mark.parametrize("mode", [SWAP, RECOMPUTE])
def test_pages_to_be_copied_are_neither_swapped_out_nor_cached_when_their_request_is_preempted(mode: str) -> None:
    driver = SchedulerDriver(budget=8)
    driver.kv = KVCache(64, P, "digest", num_host_pages=16)
    driver.scheduler = Scheduler(driver.kv, num_slots=8, max_num_batched_tokens=8, cost=CostModel(mode))
    request = reordered_in_the_batch(driver)
    assert driver.kv.pool.allocate(driver.kv.pool.num_free - 1)
    step = driver.scheduler.plan()  # the last page goes to the fork, and none is left for the prompt
    assert step is not None and request.num_preemptions == 1
    targets = step.plan.copies[:, 1].tolist()
    assert not set(step.plan.swaps_out[:, 0].tolist()) & set(targets) and len(set(targets)) == len(targets)
    assert num_cached(driver, [1, 2, 41]) == 0


def test_reordered_branches_share_full_pages() -> None:
    driver = SchedulerDriver(budget=8)
    request = reordered_in_the_batch(driver)
    branches = list(request.branches.values())
    driver.step(audit=False)
    driver.scheduler.apply(request, [Reorder((1, 0), (0, 0), (8, 7))])  # their page is full
    assert list(request.branches.items()) == [(0, branches[0]), (1, branches[1])]
    step = driver.step()
    assert step.decode_branches == branches and step.plan.rows.tokens[-2:].tolist() == [7, 8]
    assert step.plan.forks.tolist() == [[branches[0].slot, branches[1].slot, 1]] and len(step.plan.copies) == 0
    driver.scheduler.apply(request, [Reorder((0, 1), (1, 1), (5, 6))])
    step = driver.step()
    assert step.decode_branches == branches and step.plan.rows.tokens[-2:].tolist() == [5, 6]
    assert len(step.plan.forks) == 0 and len(step.plan.copies) == 1, "they share the full page already"
    assert branches[0].tokens().tolist() == [1, 2, 41, 42, 8, 5]
    with pytest.raises(EngineError, match="was not sampled"):
        driver.scheduler.apply(request, [Reorder((1, 0), (1, 1), (6, 5))])  # the parent before its child
    driver.scheduler.finish(request)
    assert num_cached(driver, [1, 2, 41, 42, 8, 5]) == 6
