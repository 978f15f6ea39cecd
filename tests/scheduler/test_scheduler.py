"""What the scheduler puts into a plan, step by step."""

from __future__ import annotations

import pytest

from chatcache.errors import EngineError
from chatcache.kv_cache.stats import check_invariants
from chatcache.scheduler.request import LiveRequest
from chatcache.types.actions import Extend, Fork, Release
from tests.scheduler.sched_driver import Bench, Plain, drawn, rows


def test_a_long_prompt_is_computed_in_chunks_and_drawn_once() -> None:
    bench = Bench(budget=10)
    bench.add(range(1, 26))
    steps = [bench.step() for _ in range(3)]
    assert [rows(step) for step in steps] == [[("r0", 0, 0, 10)], [("r0", 0, 10, 10)], [("r0", 0, 20, 5)]]
    assert [len(drawn(step)) for step in steps] == [0, 0, 1]
    assert [step.plan.rows.tokens.tolist() for step in steps] == [
        list(range(1, 11)),
        list(range(11, 21)),
        list(range(21, 26)),
    ]
    assert steps[2].plan.draws.position.tolist() == [25]


def test_a_decode_step_carries_only_news() -> None:
    bench = Bench()
    bench.add(range(1, 7))
    first, second, third, fourth = (bench.decode() for _ in range(4))
    assert first.plan.updates[:, 1].tolist() == [0, 1]
    assert [len(step.plan.updates) for step in (second, third, fourth)] == [0, 0, 1]
    assert fourth.plan.rows.tokens.tolist() == [5] and fourth.plan.rows.start.tolist() == [8]


def test_a_long_prompt_leaves_room_for_those_who_decode() -> None:
    bench = Bench(budget=8)
    bench.add([40, 41, 42])
    bench.decode()
    younger = bench.add([50, 51])
    bench.decode()
    bench.scheduler.waiting.push(old := LiveRequest("old", range(1, 31), "", Plain(), -1))
    assert rows(bench.decode()) == [("old", 0, 0, 6), ("r0", 0, 4, 1), ("r1", 0, 2, 1)]
    assert rows(bench.decode()) == [("old", 0, 6, 6), ("r0", 0, 5, 1), ("r1", 0, 3, 1)]
    assert bench.scheduler.running[0] is old and bench.scheduler.running[-1] is younger


def test_a_prefix_that_is_cached_is_not_computed_again() -> None:
    bench = Bench()
    first = bench.add(range(1, 20))
    bench.decode()
    bench.scheduler.finish(first)
    second = bench.add([*range(1, 20), 30, 31])
    assert rows(bench.step()) == [("r1", 0, 19, 2)]
    assert second.num_cached_tokens == 19 and first.num_cached_tokens == 0


def test_twins_wait_a_step_rather_than_compute_twice() -> None:
    bench = Bench(budget=10)
    bench.add(range(1, 19))
    twin = bench.add([*range(1, 19), 30])
    stranger = bench.add([50, 51])
    assert rows(bench.step()) == [("r0", 0, 0, 10)]
    assert rows(bench.step()) == [("r0", 0, 10, 8), ("r2", 0, 0, 2)], "the stranger is not held up"
    for leader in (bench.scheduler.running[0].leader, stranger.leader):
        bench.scheduler.apply(leader.request, [Extend(0, 5)])
    step = bench.step()
    assert twin.num_cached_tokens == 16
    assert ("r1", 0, 16, 3) in rows(step)


def test_the_newest_gives_way_and_starts_over_with_what_survives() -> None:
    bench = Bench(num_pages=8)
    old, new = bench.add(range(1, 9)), bench.add(range(50, 58))
    bench.step()
    for request in (old, new):
        bench.scheduler.apply(request, [Extend(0, 5)])
    while not bench.scheduler.num_preemptions:
        bench.decode()
    assert bench.scheduler.running == [old] and list(bench.scheduler.waiting) == [new]
    assert new.leader.table is None and new.num_preemptions == 1
    num_tokens = new.leader.num_tokens
    bench.scheduler.finish(old)
    (row,) = rows(bench.decode())
    assert row[0] == "r1" and row[2] > 8 and row[2] + row[3] == num_tokens


def test_a_restarted_request_shares_what_it_shared_before() -> None:
    """Eight branches after a 21-token prompt, without the prefix cache: only forking again can share."""
    bench = Bench(caching=False, budget=512)
    request = bench.add(range(1, 22), max_branches=8)
    bench.step()
    bench.scheduler.apply(request, [*(Fork(0, i, 30 + i) for i in range(1, 8)), Extend(0, 30)])
    for _ in range(4):
        bench.decode()
    before = bench.kv.pool.num_in_use
    assert before == 5 + 8 * 2
    bench.scheduler._preempt(request)
    assert bench.kv.pool.num_in_use == 0
    assert rows(bench.decode()) == [("r0", 0, 0, 26)]
    step = bench.step()
    assert rows(step) == [("r0", 0, 26, 1), *(("r0", i, 21, 5) for i in range(1, 8))]
    assert len(step.plan.forks) == 7 and len(step.plan.copies) == 7
    assert bench.kv.pool.num_in_use == before


def test_branches_restart_from_their_closest_relative() -> None:
    bench = Bench(caching=False)
    request = bench.add(range(1, 6), max_branches=4)
    bench.step()
    bench.scheduler.apply(request, [Fork(0, 1, 31), Extend(0, 30)])
    for _ in range(8):
        bench.decode()
    bench.step()
    bench.scheduler.apply(request, [Fork(0, 2, 40), Extend(0, 41), Fork(1, 3, 42), Extend(1, 43)])
    bench.scheduler._preempt(request)
    partners = {
        branch.id: branch.fork_source.id if branch.fork_source else None for branch in request.branches.values()
    }
    assert partners == {0: None, 1: 0, 2: 0, 3: 1}
    assert [branch.num_shared_tokens for branch in request.branches.values()] == [0, 5, 14, 14]


def test_lockstep_branches_are_drawn_together_or_not_at_all() -> None:
    bench = Bench(budget=8, num_slots=16)
    older = bench.add([1, 2], max_branches=6)
    beams = bench.add([50, 51, 52], max_branches=3, lockstep=True)
    bench.step()
    bench.scheduler.apply(older, [*(Fork(0, i, 30 + i) for i in range(1, 6)), Extend(0, 30)])
    bench.scheduler.apply(beams, [Fork(0, 1, 60), Fork(0, 2, 61), Extend(0, 62)])
    step = bench.decode()
    assert [row[0] for row in rows(step)] == ["r0"] * 6, "two tokens are left, three branches want one each"
    bench.scheduler.finish(older)
    step = bench.decode()
    assert [row[:2] for row in rows(step)] == [("r1", 0), ("r1", 1), ("r1", 2)] and len(drawn(step)) == 3


def test_a_gang_starts_only_when_all_its_branches_have_slots() -> None:
    bench = Bench(num_slots=4)
    bench.add([1, 2], max_branches=2)
    bench.add([50, 51], max_branches=3)
    bench.add([60, 61], max_branches=1)
    assert [row[0] for row in rows(bench.step())] == ["r0"], "first come, first served: the third waits its turn"


def test_the_first_child_of_a_retired_branch_inherits_its_row() -> None:
    bench = Bench()
    request = bench.add([1, 2, 3], max_branches=3)
    bench.step()
    slot = request.leader.slot
    bench.scheduler.apply(request, [Fork(0, 1, 7), Fork(0, 2, 8), Release(0)])
    assert request.branches[1].slot == slot != request.branches[2].slot
    step = bench.step()
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
    ],
)
def test_broken_strategies_are_named_and_leave_nothing_behind(
    actions: list[Fork | Extend | Release], message: str
) -> None:
    bench = Bench()
    request = bench.add([1, 2, 3], max_branches=3)
    bench.step()
    with pytest.raises(EngineError, match=message):
        bench.scheduler.apply(request, actions)
    bench.scheduler.finish(request, discard=True)
    check_invariants(bench.kv, [])
    assert bench.kv.pool.num_in_use == 0 and bench.scheduler._rows.num_free == 8
    assert bench.scheduler._rows.num_reserved == 0 and bench.scheduler._num_branches == 0
