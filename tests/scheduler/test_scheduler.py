"""The contents of step plans: chunking, matching, preemption, forks and rows."""

from __future__ import annotations

import pytest

from chatcache.errors import EngineError
from chatcache.kv_cache.stats import check_invariants
from chatcache.scheduler.queue import MAX_PREEMPTIONS, PREEMPTIONS_BEFORE_PROTECTION
from chatcache.scheduler.request import LiveRequest
from chatcache.types.actions import Extend, Fork, Release, Reorder
from tests.scheduler.driver import FakeStrategy, SchedulerDriver, drawn, rows


def test_plan_long_prompt_is_chunked_and_sampled_once() -> None:
    driver = SchedulerDriver(budget=10)
    driver.add(range(1, 26))
    steps = [driver.step() for _ in range(3)]
    assert [rows(step) for step in steps] == [[("r0", 0, 0, 10)], [("r0", 0, 10, 10)], [("r0", 0, 20, 5)]]
    assert [len(drawn(step)) for step in steps] == [0, 0, 1]
    assert [step.plan.rows.tokens.tolist() for step in steps] == [
        list(range(1, 11)),
        list(range(11, 21)),
        list(range(21, 26)),
    ]
    assert steps[2].plan.draws.position.tolist() == [25]


def test_plan_decode_step_contains_only_changes() -> None:
    driver = SchedulerDriver()
    driver.add(range(1, 7))
    first, second, third, fourth = (driver.decode() for _ in range(4))
    assert first.plan.updates[:, 1].tolist() == [0, 1]
    assert [len(step.plan.updates) for step in (second, third, fourth)] == [0, 0, 1]
    assert fourth.plan.rows.tokens.tolist() == [5] and fourth.plan.rows.start.tolist() == [8]


def test_plan_long_prompt_leaves_budget_for_decoding_branches() -> None:
    driver = SchedulerDriver(budget=8)
    driver.add([40, 41, 42])
    driver.decode()
    younger = driver.add([50, 51])
    driver.decode()
    driver.scheduler.waiting.push(old := LiveRequest("old", range(1, 31), "", FakeStrategy(), -1))
    assert rows(driver.decode()) == [("old", 0, 0, 6), ("r0", 0, 4, 1), ("r1", 0, 2, 1)]
    assert rows(driver.decode()) == [("old", 0, 6, 6), ("r0", 0, 5, 1), ("r1", 0, 3, 1)]
    assert driver.scheduler.running[0] is old and driver.scheduler.running[-1] is younger


def test_plan_cached_prefix_is_not_computed_again() -> None:
    driver = SchedulerDriver()
    first = driver.add(range(1, 20))
    driver.decode()
    driver.scheduler.finish(first)
    second = driver.add([*range(1, 20), 30, 31])
    assert rows(driver.step()) == [("r1", 0, 19, 2)]
    assert second.num_cached_tokens == 19 and first.num_cached_tokens == 0


def test_plan_equal_prompt_waits_for_the_running_prefill() -> None:
    driver = SchedulerDriver(budget=10)
    driver.add(range(1, 19))
    duplicate = driver.add([*range(1, 19), 30])
    other = driver.add([50, 51])
    assert rows(driver.step()) == [("r0", 0, 0, 8), ("r2", 0, 0, 2)], "the other request is not blocked"
    driver.scheduler.apply(other, [Extend(0, 5)])
    assert rows(driver.step()) == [("r0", 0, 8, 9), ("r2", 0, 2, 1)]
    driver.scheduler.apply(other, [Extend(0, 5)])
    assert duplicate.num_cached_tokens is None
    step = driver.step()
    assert duplicate.num_cached_tokens == 16
    assert rows(step) == [("r0", 0, 17, 1), ("r1", 0, 16, 3), ("r2", 0, 3, 1)]


def test_preempted_request_restarts_on_its_cached_pages() -> None:
    driver = SchedulerDriver(num_pages=8)
    old, new = driver.add(range(1, 9)), driver.add(range(50, 58))
    driver.step()
    for request in (old, new):
        driver.scheduler.apply(request, [Extend(0, 5)])
    while not driver.scheduler.num_preemptions:
        driver.decode()
    assert driver.scheduler.running == [old] and list(driver.scheduler.waiting) == [new]
    assert new.leader.table is None and new.num_preemptions == 1
    num_tokens = new.leader.num_tokens
    driver.scheduler.finish(old)
    (row,) = rows(driver.decode())
    assert row[0] == "r1" and row[2] > 8 and row[2] + row[3] == num_tokens


def test_protected_request_is_preempted_after_all_others() -> None:
    driver = SchedulerDriver(num_pages=13)
    first, protected, last = (driver.add(range(k, k + 11)) for k in (1, 20, 40))
    protected.num_preemptions = PREEMPTIONS_BEFORE_PROTECTION
    while driver.scheduler.num_preemptions < 2:
        driver.decode()
        if driver.scheduler.num_preemptions == 1:
            assert driver.scheduler.running == [first, protected] and last.num_preemptions == 1
    assert driver.scheduler.running == [first] and protected.num_preemptions == PREEMPTIONS_BEFORE_PROTECTION + 1


def test_request_starts_after_a_protected_one_if_its_tokens_fit() -> None:
    driver = SchedulerDriver(num_pages=20)
    protected = driver.add(range(1, 12))
    protected.num_preemptions = PREEMPTIONS_BEFORE_PROTECTION
    driver.decode()
    other = driver.add(range(20, 31))
    driver.decode()
    assert driver.scheduler.running == [protected, other]


def test_request_preempted_to_the_limit_starts_only_as_the_first() -> None:
    driver = SchedulerDriver(num_pages=40)
    older, worn, younger = (driver.add(range(k, k + 5)) for k in (1, 20, 40))
    worn.num_preemptions = MAX_PREEMPTIONS
    driver.decode()
    assert driver.scheduler.running == [older, younger], "the others are not blocked"
    driver.scheduler.finish(older)
    driver.decode()
    assert driver.scheduler.running == [worn, younger]
    driver.scheduler.waiting.push(urgent := LiveRequest("urgent", range(60, 65), "", FakeStrategy(), 9, priority=-1))
    last = driver.add(range(70, 75))
    driver.decode()
    assert driver.scheduler.running == [worn, younger, last] and list(driver.scheduler.waiting) == [urgent]


def test_restarted_request_shares_the_same_pages_again() -> None:
    """Eight branches of a 21-token prompt without prefix caching, so that only forking again can share pages."""
    driver = SchedulerDriver(caching=False, budget=512)
    request = driver.add(range(1, 22), max_branches=8)
    driver.step()
    driver.scheduler.apply(request, [*(Fork(0, i, 30 + i) for i in range(1, 8)), Extend(0, 30)])
    for _ in range(4):
        driver.decode()
    before = driver.kv.pool.num_in_use
    assert before == 5 + 8 * 2
    driver.scheduler._preempt(request)
    assert driver.kv.pool.num_in_use == 0
    assert rows(driver.decode()) == [("r0", 0, 0, 26)]
    step = driver.step()
    assert rows(step) == [("r0", 0, 26, 1), *(("r0", i, 21, 5) for i in range(1, 8))]
    assert len(step.plan.forks) == 7 and len(step.plan.copies) == 7
    assert driver.kv.pool.num_in_use == before


def test_preempted_branches_choose_the_closest_fork_source() -> None:
    driver = SchedulerDriver(caching=False)
    request = driver.add(range(1, 6), max_branches=4)
    driver.step()
    driver.scheduler.apply(request, [Fork(0, 1, 31), Extend(0, 30)])
    for _ in range(8):
        driver.decode()
    driver.step()
    driver.scheduler.apply(request, [Fork(0, 2, 40), Extend(0, 41), Fork(1, 3, 42), Extend(1, 43)])
    driver.scheduler._preempt(request)
    partners = {
        branch.id: branch.fork_source.id if branch.fork_source else None for branch in request.branches.values()
    }
    assert partners == {0: None, 1: 0, 2: 0, 3: 1}
    assert [branch.num_shared_tokens for branch in request.branches.values()] == [0, 5, 14, 14]


def test_lockstep_branches_are_sampled_in_the_same_step() -> None:
    driver = SchedulerDriver(budget=8, num_slots=16)
    older = driver.add([1, 2], max_branches=6)
    beams = driver.add([50, 51, 52], max_branches=3, lockstep=True)
    driver.step()
    driver.scheduler.apply(older, [*(Fork(0, i, 30 + i) for i in range(1, 6)), Extend(0, 30)])
    driver.scheduler.apply(beams, [Fork(0, 1, 60), Fork(0, 2, 61), Extend(0, 62)])
    step = driver.decode()
    assert [row[0] for row in rows(step)] == ["r0"] * 6, "two tokens of the budget are left for three branches"
    driver.scheduler.finish(older)
    step = driver.decode()
    assert [row[:2] for row in rows(step)] == [("r1", 0), ("r1", 1), ("r1", 2)] and len(drawn(step)) == 3


def test_request_starts_only_with_rows_for_all_branches() -> None:
    driver = SchedulerDriver(num_slots=4)
    driver.add([1, 2], max_branches=2)
    driver.add([50, 51], max_branches=3)
    driver.add([60, 61], max_branches=1)
    assert [row[0] for row in rows(driver.step())] == ["r0"], (
        "first come, first served: the third request waits for the second"
    )


def test_first_child_of_a_released_branch_gets_its_row() -> None:
    driver = SchedulerDriver()
    request = driver.add([1, 2, 3], max_branches=3)
    driver.step()
    slot = request.leader.slot
    driver.scheduler.apply(request, [Fork(0, 1, 7), Fork(0, 2, 8), Release(0)])
    assert request.branches[1].slot == slot != request.branches[2].slot
    step = driver.step()
    assert step.plan.forks.tolist() == [[slot, request.branches[2].slot, 1]]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([Fork(0, 0, 7)], "already exists"),
        ([Extend(3, 7)], "was not sampled"),
        ([Extend(0, 7), Extend(0, 8)], "was not sampled"),
        ([Extend(0, 7), Fork(0, 1, 8)], "was not sampled"),
        ([Release(1)], "does not exist"),
        ([Fork(0, 1, 7), Fork(0, 2, 7), Fork(0, 3, 7), Extend(0, 7)], "at most 3"),
        ([Fork(0, 1, 7)], "left without a next token"),
        ([Reorder((0, 1), (0, 0), (7, 8))], "does not exist"),
    ],
)
def test_invalid_actions_raise_and_leave_no_pages_or_rows(actions: list[Fork | Extend | Release], message: str) -> None:
    driver = SchedulerDriver()
    request = driver.add([1, 2, 3], max_branches=3)
    driver.step()
    with pytest.raises(EngineError, match=message):
        driver.scheduler.apply(request, actions)
    driver.scheduler.finish(request, discard=True)
    check_invariants(driver.kv, [])
    assert driver.kv.pool.num_in_use == 0
    assert driver.scheduler._rows.num_used == driver.scheduler._rows.num_reserved == 0
