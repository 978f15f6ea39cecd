"""Asynchronous scheduling: when a step can be planned ahead, its contents, and which of its rows stay valid."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from chatcache.kv_cache.page_hash import CacheScope
from chatcache.scheduler.batch import Step
from chatcache.scheduler.request import LiveRequest
from chatcache.types.actions import DrawSpec, Extend, Fork, Release
from chatcache.types.plan import PENDING_TOKEN
from chatcache.types.request import ForkPoint
from tests.scheduler.driver import FakeStrategy, P, SchedulerDriver


def start_decoding(driver: SchedulerDriver, *prompts: list[int], max_branches: int = 1) -> list[LiveRequest]:
    """Start requests and bring them to where they run start_decoding."""
    requests = [driver.add(prompt, max_branches) for prompt in prompts]
    for token in (41, 42):
        driver.decode(token, audit=False)
    return requests


def planned(driver: SchedulerDriver) -> Step:
    step = driver.scheduler.plan()
    assert step is not None
    return step


def plan_next(driver: SchedulerDriver, step: Step) -> Step:
    """Commit `step` and plan the next one ahead."""
    assert driver.scheduler.can_schedule_ahead(step)
    driver.scheduler.commit(driver.scheduler.drop_finished_rows(step))
    following = driver.scheduler.plan_ahead()
    assert following is not None
    return following


def extend_all(driver: SchedulerDriver, step: Step, token: int) -> None:
    for branch in step.decode_branches:
        driver.scheduler.apply(branch.request, [Extend(branch.id, token)])


def num_cached(driver: SchedulerDriver, tokens: list[int]) -> int:
    return driver.kv.match(driver.kv.hash_pages([*tokens, 99], CacheScope())).num_tokens


def test_plan_ahead_equals_steps_planned_after_results() -> None:
    ahead, synchronous = SchedulerDriver(), SchedulerDriver()
    prompts = [[1, 2], [11, 12, 13], [21]]
    start_decoding(ahead, *prompts)
    start_decoding(synchronous, *prompts)
    step = planned(ahead)
    for token in range(50, 62):
        expected = synchronous.decode(token, audit=False)
        assert step.plan.step == expected.plan.step
        for name in ("slot", "start", "num_tokens"):
            assert getattr(step.plan.rows, name).tolist() == getattr(expected.plan.rows, name).tolist()
        assert step.plan.updates.tolist() == expected.plan.updates.tolist()
        assert step.plan.draws.position.tolist() == expected.plan.draws.position.tolist()
        following = plan_next(ahead, step)
        assert following.plan.rows.tokens.tolist() == [PENDING_TOKEN] * 3
        extend_all(ahead, step, token)
        ahead.scheduler.reconcile(step, step.plan.rows.tokens * 0 + token)
        ahead.check()
        step = following


def test_plan_ahead_commits_no_token_before_its_result() -> None:
    driver = SchedulerDriver()
    (request,) = start_decoding(driver, [1, 2])
    step = planned(driver)
    following = plan_next(driver, step)
    extend_all(driver, step, 43)
    driver.check()
    table = request.leader.table
    assert table is not None and (table.num_tokens, request.leader.num_tokens) == (4, 5)
    driver.scheduler.finish(request)
    assert request.num_computed_tokens == 4 and driver.kv.pool.num_in_use == 0
    assert driver.scheduler.drop_finished_rows(following).decode_branches == []
    assert not driver.scheduler.can_schedule_ahead(following)
    driver.scheduler.commit(driver.scheduler.drop_finished_rows(following))
    assert list(driver.scheduler.idle_violations()) == []


def test_plan_ahead_continues_while_branches_rest() -> None:
    """Six branches of which two decode in each step: their tokens are pending, or known for those that rested."""
    driver = SchedulerDriver()
    order = iter([[0, 1], [1, 2], [3, 4], [5, 0], [1, 2], [3, 4], [5, 0], [0, 1], [2, 3]])
    requests = start_decoding(driver, *([number * 10 + 1] for number in range(6)))
    driver.scheduler._decode_batch._choose_branches = lambda branches: next(order)
    step, token, last = planned(driver), 50, dict.fromkeys(requests, 42)
    for _ in range(8):
        following = plan_next(driver, step)
        pending = {branch.request for branch in step.decode_branches}
        assert following.plan.rows.tokens.tolist() == [
            PENDING_TOKEN if branch.request in pending else last[branch.request] for branch in following.decode_branches
        ]
        assert len(following.plan.rows.slot) == 2 and following.plan.draws.row.tolist() == [0, 1]
        extend_all(driver, step, token)
        driver.scheduler.reconcile(step, step.plan.rows.tokens * 0 + token)
        assert driver.scheduler._decode_batch.num_branches == 6, "no branch lost its row"
        last |= dict.fromkeys(pending, token)
        step, token = driver.scheduler.drop_finished_rows(following), token + 1
        assert step.kept_draws is None
    driver.check()
    assert [request.leader.num_tokens for request in requests] == [3 + n for n in (4, 4, 2, 2, 2, 2)]


def test_drop_finished_rows_removes_ended_branches() -> None:
    driver = SchedulerDriver()
    requests = start_decoding(driver, [1, 2], [11, 12], [21, 22], [31, 32])
    step = planned(driver)
    following = plan_next(driver, step)
    driver.scheduler.apply(requests[1], [Release(0)])
    driver.scheduler.finish(requests[1])
    for request in (requests[0], requests[2], requests[3]):
        driver.scheduler.apply(request, [Extend(0, 43)])
    driver.scheduler.finish(requests[3])
    current = driver.scheduler.drop_finished_rows(following)
    assert [branch.request for branch in current.decode_branches] == [requests[0], requests[2]]
    assert current.kept_draws is not None and current.kept_draws.tolist() == [0, 2]
    assert current.plan.draws.row.tolist() == [0, 1]
    assert current.plan.draws.position.tolist() == following.plan.draws.position[[0, 2]].tolist()
    last = plan_next(driver, following)
    assert [branch.request for branch in last.decode_branches] == [requests[0], requests[2]]
    extend_all(driver, last, 44)
    driver.check()


def test_reconcile_removes_branches_with_another_token() -> None:
    driver = SchedulerDriver()
    requests = start_decoding(driver, [1, 2], [11, 12])
    step = planned(driver)
    following = plan_next(driver, step)
    extend_all(driver, step, 43)
    driver.scheduler.reconcile(step, np.array([43, 50], np.int32))
    assert [request.leader.in_decode_batch for request in requests] == [True, False]
    assert not driver.scheduler.can_schedule_ahead(following)
    current = driver.scheduler.drop_finished_rows(following)
    assert [branch.request for branch in current.decode_branches] == [requests[0]]
    driver.scheduler.commit(current)
    driver.scheduler.apply(requests[0], [Extend(0, 44)])
    step = planned(driver)
    assert step.branches() == [requests[1].leader, requests[0].leader]
    assert (step.plan.rows.start.tolist(), step.plan.rows.tokens.tolist()) == ([4, 5], [43, 44])


def test_branch_that_left_the_batch_loses_its_planned_row() -> None:
    driver = SchedulerDriver()
    (request,) = start_decoding(driver, [1, 2, 3, 4, 5, 6], max_branches=2)
    step = planned(driver)
    assert step.plan.rows.start.tolist() == [P + 3]
    following = plan_next(driver, step)  # its page is full now: a fork shares no partly filled page
    driver.scheduler.apply(request, [Fork(0, 1, 9), Extend(0, 43)])
    assert [branch.in_decode_batch for branch in request.branches.values()] == [True, False]
    assert driver.scheduler.drop_finished_rows(following).decode_branches == []
    request.branches.pop(1)  # without the fork, only the row shows that the branch was not sampled
    driver.scheduler._decode_batch.unbatched_requests.clear()
    assert not driver.scheduler._decode_batch.can_schedule_ahead()


def draw_of_width_two(driver: SchedulerDriver, request: LiveRequest) -> None:
    driver.scheduler._decode_batch._draws.width[0] = 2


def waiting_request(driver: SchedulerDriver, request: LiveRequest) -> None:
    driver.add([71])


def waiting_fork(driver: SchedulerDriver, request: LiveRequest) -> None:
    other = LiveRequest("f", [1, 2, 41, 7], "", FakeStrategy(), 99, fork_of=ForkPoint(request.request_id, 0))
    driver.scheduler.add(other)


def no_page_left(driver: SchedulerDriver, request: LiveRequest) -> None:
    assert driver.kv.pool.allocate(driver.kv.pool.num_free)


def branch_outside_the_batch(driver: SchedulerDriver, request: LiveRequest) -> None:
    driver.scheduler._decode_batch.remove(request.leader)


def budget_too_small(driver: SchedulerDriver, request: LiveRequest) -> None:
    driver.scheduler.max_num_batched_tokens = 0


def row_to_be_copied(driver: SchedulerDriver, request: LiveRequest) -> None:
    driver.scheduler._rows.fork(request.leader.slot, 1)


@pytest.mark.parametrize(
    "obstacle",
    [
        draw_of_width_two,
        waiting_request,
        waiting_fork,
        no_page_left,
        branch_outside_the_batch,
        budget_too_small,
        row_to_be_copied,
    ],
    ids=lambda h: h.__name__,
)
def test_can_schedule_ahead_is_false_while(obstacle: Callable[[SchedulerDriver, LiveRequest], None]) -> None:
    driver = SchedulerDriver()
    (request,) = start_decoding(driver, [1, 2])
    step = planned(driver)
    assert step.plan.rows.start.tolist() == [P - 1], "this step fills its page"
    assert driver.scheduler.can_schedule_ahead(step)
    obstacle(driver, request)
    assert not driver.scheduler.can_schedule_ahead(step)


def test_can_schedule_ahead_is_false_after_a_prefill() -> None:
    driver = SchedulerDriver()
    driver.add([1, 2])
    assert not driver.scheduler.can_schedule_ahead(planned(driver))


def test_can_schedule_ahead_ignores_requests_that_cannot_start() -> None:
    driver = SchedulerDriver(num_slots=1)
    start_decoding(driver, [1, 2])
    driver.add([71])
    assert driver.scheduler.can_schedule_ahead(planned(driver))


def test_abort_steps_discards_the_step_planned_ahead() -> None:
    driver = SchedulerDriver()
    requests = start_decoding(driver, [1, 2], [11, 12])
    step = planned(driver)
    following = plan_next(driver, step)
    assert len(following.plan.updates) == 2 and num_cached(driver, [1, 2, 41, 42]) == P, (
        "published before the result was seen"
    )
    assert driver.scheduler.abort_steps(step, following) == requests
    assert num_cached(driver, [1, 2, 41, 42]) == num_cached(driver, [11, 12, 41, 42]) == 0
    assert driver.kv.pool.num_in_use == 0 and list(driver.scheduler.idle_violations()) == []


def test_plan_ahead_never_asks_for_draws_again() -> None:
    driver = SchedulerDriver()
    (request,) = start_decoding(driver, [1, 2])
    step = planned(driver)
    request.strategy.draws = lambda branch: (DrawSpec(),) * 9  # type: ignore[method-assign]
    for token in range(50, 60):
        following = plan_next(driver, step)
        extend_all(driver, step, token)
        step = following
    assert request.leader.num_tokens == 14


def test_a_step_that_computes_part_of_a_prompt_is_followed() -> None:
    ahead, synchronous = SchedulerDriver(budget=8), SchedulerDriver(budget=8)
    for driver in (ahead, synchronous):
        start_decoding(driver, [1, 2])
        driver.add(list(range(100, 130)))
    step, num_followed = planned(ahead), 0
    for token in range(50, 57):
        expected = synchronous.step(audit=False)
        assert step.plan.step == expected.plan.step
        for name in ("slot", "start", "num_tokens"):
            assert getattr(step.plan.rows, name).tolist() == getattr(expected.plan.rows, name).tolist()
        assert step.plan.updates.tolist() == expected.plan.updates.tolist()
        assert step.plan.draws.position.tolist() == expected.plan.draws.position.tolist()
        following = None
        if ahead.scheduler.can_schedule_ahead(step):
            following, num_followed = plan_next(ahead, step), num_followed + 1
            assert following.plan.rows.tokens[-1] == PENDING_TOKEN
        else:
            ahead.scheduler.commit(step)
        for driver, one in ((ahead, step), (synchronous, expected)):
            for branch in [row.branch for row in one.drawn] + one.decode_branches:
                driver.scheduler.apply(branch.request, [Extend(branch.id, token)])
        step = following or planned(ahead)
    assert num_followed >= 4, "all but the step that completes the prompt, and those without draws to enter the batch"
    ahead.check()


@pytest.mark.parametrize("num_tokens", [4, 5, 6, 7])
def test_the_last_token_of_a_preempted_branch_is_not_computed_ahead_of_its_siblings_actions(num_tokens: int) -> None:
    """Those actions would move it to the decode batch, to compute that token again."""
    driver = SchedulerDriver(budget=3, caching=False)
    request = driver.add([1, 2], max_branches=2)
    driver.step(audit=False)
    driver.scheduler.apply(request, [Fork(0, 1, 31), Extend(0, 41)])
    for token in range(50, 50 + num_tokens):
        driver.decode(token, audit=False)
    driver.scheduler.restart_all()
    step, num_followed = planned(driver), 0
    for token in range(60, 72):
        following = None
        if driver.scheduler.can_schedule_ahead(step):
            following, num_followed = plan_next(driver, step), num_followed + 1
        else:
            driver.scheduler.commit(driver.scheduler.drop_finished_rows(step))
        branches = [row.branch.id for row in step.drawn] + [branch.id for branch in step.decode_branches]
        if branches:
            driver.scheduler.apply(request, [Extend(branch, token) for branch in branches])
        if following is not None:
            driver.scheduler.reconcile(step, np.full(len(step.plan.draws.row), token, np.int32))
        step = following or planned(driver)
    assert num_followed and [branch.in_decode_batch for branch in request.branches.values()] == [True, True]
    driver.check()


def test_prompt_rows_of_an_ended_request_are_dropped() -> None:
    driver = SchedulerDriver(budget=8)
    (request,) = start_decoding(driver, [1, 2])
    prompt = driver.add(list(range(100, 113)))
    step = planned(driver)
    following = plan_next(driver, step)
    assert [branch.request for branch in following.branches()] == [prompt, request] and following.drawn
    extend_all(driver, step, 43)
    driver.scheduler.finish(prompt)
    current = driver.scheduler.drop_finished_rows(following)
    assert (current.branches(), current.drawn) == ([request.leader], [])
    assert current.kept_draws is not None and current.kept_draws.tolist() == [1]
    assert current.plan.draws.row.tolist() == [0] and current.plan.rows.tokens.tolist() == [PENDING_TOKEN]
    driver.scheduler.commit(current)
    extend_all(driver, current, 44)
    driver.check()


def test_prompts_are_not_computed_ahead_without_free_pages() -> None:
    driver = SchedulerDriver(budget=8)
    prompt = driver.add(list(range(100, 130)))
    step = planned(driver)
    assert driver.scheduler.can_schedule_ahead(step)
    assert driver.kv.pool.allocate(driver.kv.pool.num_free)
    driver.scheduler.commit(step)
    assert driver.scheduler.plan_ahead() is None and driver.scheduler.num_steps == 1
    assert prompt.num_preemptions == 0
