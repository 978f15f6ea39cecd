"""The step behind another: when it can be planned, what it says, and whose rows count in the end."""

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
from tests.scheduler.sched_driver import Bench, P, Plain


def steadily(bench: Bench, *prompts: list[int], max_branches: int = 1) -> list[LiveRequest]:
    """Start requests and bring them to where they run steadily."""
    requests = [bench.add(prompt, max_branches) for prompt in prompts]
    for token in (41, 42):
        bench.decode(token, audit=False)
    return requests


def planned(bench: Bench) -> Step:
    step = bench.scheduler.plan()
    assert step is not None
    return step


def follow(bench: Bench, step: Step) -> Step:
    """Note `step` and plan the one behind it."""
    assert bench.scheduler.can_schedule_ahead(step)
    bench.scheduler.commit(bench.scheduler.drop_finished_rows(step))
    return bench.scheduler.plan_ahead()


def extend_all(bench: Bench, step: Step, token: int) -> None:
    for branch in step.decode_rows.branches:
        bench.scheduler.apply(branch.request, [Extend(branch.id, token)])


def num_cached(bench: Bench, tokens: list[int]) -> int:
    return bench.kv.match(bench.kv.hash_pages([*tokens, 99], CacheScope())).num_tokens


def test_steps_behind_one_another_are_those_that_would_have_been_planned() -> None:
    behind, alone = Bench(), Bench()
    prompts = [[1, 2], [11, 12, 13], [21]]
    steadily(behind, *prompts)
    steadily(alone, *prompts)
    step = planned(behind)
    for token in range(50, 62):
        expected = alone.decode(token, audit=False)
        assert step.plan.step == expected.plan.step
        for name in ("slot", "start", "num_tokens"):
            assert getattr(step.plan.rows, name).tolist() == getattr(expected.plan.rows, name).tolist()
        assert step.plan.updates.tolist() == expected.plan.updates.tolist()
        assert step.plan.draws.position.tolist() == expected.plan.draws.position.tolist()
        following = follow(behind, step)
        assert following.plan.rows.tokens.tolist() == [PENDING_TOKEN] * 3
        extend_all(behind, step, token)
        behind.scheduler.reconcile(step, step.plan.rows.tokens * 0 + token)
        behind.check()
        step = following


def test_what_is_on_the_device_is_not_told_before_it_was_seen() -> None:
    bench = Bench()
    (request,) = steadily(bench, [1, 2])
    step = planned(bench)
    following = follow(bench, step)
    extend_all(bench, step, 43)
    bench.check()
    table = request.leader.table
    assert table is not None and (table.num_tokens, request.leader.num_tokens) == (4, 5)
    bench.scheduler.finish(request)
    assert request.num_computed_tokens == 4 and bench.kv.pool.num_in_use == 0
    assert bench.scheduler.drop_finished_rows(following).decode_rows.branches == []
    assert not bench.scheduler.can_schedule_ahead(following)
    bench.scheduler.commit(bench.scheduler.drop_finished_rows(following))
    assert list(bench.scheduler.idle_violations()) == []


def test_rows_of_the_departed_do_not_count() -> None:
    bench = Bench()
    requests = steadily(bench, [1, 2], [11, 12], [21, 22], [31, 32])
    step = planned(bench)
    following = follow(bench, step)
    bench.scheduler.apply(requests[1], [Release(0)])
    bench.scheduler.finish(requests[1])
    for request in (requests[0], requests[2], requests[3]):
        bench.scheduler.apply(request, [Extend(0, 43)])
    bench.scheduler.finish(requests[3])
    current = bench.scheduler.drop_finished_rows(following)
    assert [branch.request for branch in current.decode_rows.branches] == [requests[0], requests[2]]
    assert current.kept_draws is not None and current.kept_draws.tolist() == [0, 2]
    assert current.plan.draws.row.tolist() == [0, 1]
    assert current.plan.draws.position.tolist() == following.plan.draws.position[[0, 2]].tolist()
    last = follow(bench, following)
    assert [branch.request for branch in last.decode_rows.branches] == [requests[0], requests[2]]
    extend_all(bench, last, 44)
    bench.check()


def test_who_takes_another_token_than_was_drawn_computes_it_himself() -> None:
    bench = Bench()
    requests = steadily(bench, [1, 2], [11, 12])
    step = planned(bench)
    following = follow(bench, step)
    extend_all(bench, step, 43)
    bench.scheduler.reconcile(step, np.array([43, 50], np.int32))
    assert [request.leader.in_decode_batch for request in requests] == [True, False]
    assert not bench.scheduler.can_schedule_ahead(following)
    current = bench.scheduler.drop_finished_rows(following)
    assert [branch.request for branch in current.decode_rows.branches] == [requests[0]]
    bench.scheduler.commit(current)
    bench.scheduler.apply(requests[0], [Extend(0, 44)])
    step = planned(bench)
    assert step.branches() == [requests[1].leader, requests[0].leader]
    assert (step.plan.rows.start.tolist(), step.plan.rows.tokens.tolist()) == ([4, 5], [43, 44])


def test_who_left_and_came_back_has_no_row_that_counts() -> None:
    bench = Bench()
    (request,) = steadily(bench, [1, 2, 3, 4, 5, 6], max_branches=2)
    step = planned(bench)
    assert step.plan.rows.start.tolist() == [P + 3]
    following = follow(bench, step)  # its page is full now: nothing of it is shared by a fork
    bench.scheduler.apply(request, [Fork(0, 1, 9), Extend(0, 43)])
    assert [branch.in_decode_batch for branch in request.branches.values()] == [True, False]
    assert bench.scheduler.drop_finished_rows(following).decode_rows.branches == []
    request.branches.pop(1)  # as if it had none: then nothing but the row says that the branch was not drawn
    bench.scheduler._decode_batch.unbatched_requests.clear()
    assert not bench.scheduler._decode_batch.can_schedule_ahead()


def wide(bench: Bench, request: LiveRequest) -> None:
    bench.scheduler._decode_batch._draws.width[0] = 2


def newcomer(bench: Bench, request: LiveRequest) -> None:
    bench.add([71])


def fork_of_it(bench: Bench, request: LiveRequest) -> None:
    other = LiveRequest("f", [1, 2, 41, 7], "", Plain(), 99, fork_of=ForkPoint(request.request_id, 0))
    bench.scheduler.add(other)


def no_page_left(bench: Bench, request: LiveRequest) -> None:
    assert bench.kv.pool.allocate(bench.kv.pool.num_free)


def unsettled(bench: Bench, request: LiveRequest) -> None:
    bench.scheduler._decode_batch.remove(request.leader)


def tight(bench: Bench, request: LiveRequest) -> None:
    bench.scheduler.max_num_batched_tokens = 0


def row_to_be_copied(bench: Bench, request: LiveRequest) -> None:
    bench.scheduler._rows.fork(request.leader.slot, 1)


@pytest.mark.parametrize(
    "hindrance",
    [wide, newcomer, fork_of_it, no_page_left, unsettled, tight, row_to_be_copied],
    ids=lambda h: h.__name__,
)
def test_nothing_is_planned_behind_a_step_while(hindrance: Callable[[Bench, LiveRequest], None]) -> None:
    bench = Bench()
    (request,) = steadily(bench, [1, 2])
    step = planned(bench)
    assert step.plan.rows.start.tolist() == [P - 1], "its page will be full"
    assert bench.scheduler.can_schedule_ahead(step)
    hindrance(bench, request)
    assert not bench.scheduler.can_schedule_ahead(step)


def test_nothing_is_planned_behind_a_prompt() -> None:
    bench = Bench()
    bench.add([1, 2])
    assert not bench.scheduler.can_schedule_ahead(planned(bench))


def test_whoever_waits_in_vain_holds_up_nobody() -> None:
    bench = Bench(num_slots=1)
    steadily(bench, [1, 2])
    bench.add([71])
    assert bench.scheduler.can_schedule_ahead(planned(bench))


def test_a_failed_step_takes_what_was_built_on_it_along() -> None:
    bench = Bench()
    requests = steadily(bench, [1, 2], [11, 12])
    step = planned(bench)
    following = follow(bench, step)
    assert len(following.plan.updates) == 2 and num_cached(bench, [1, 2, 41, 42]) == P, "named before it was seen"
    assert bench.scheduler.abort_steps(step, following) == requests
    assert num_cached(bench, [1, 2, 41, 42]) == num_cached(bench, [11, 12, 41, 42]) == 0
    assert bench.kv.pool.num_in_use == 0 and list(bench.scheduler.idle_violations()) == []


def test_draws_are_asked_for_once() -> None:
    bench = Bench()
    (request,) = steadily(bench, [1, 2])
    step = planned(bench)
    request.strategy.draws = lambda branch: (DrawSpec(),) * 9  # type: ignore[method-assign]
    for token in range(50, 60):
        following = follow(bench, step)
        extend_all(bench, step, token)
        step = following
    assert request.leader.num_tokens == 14
