"""DecodeBatch branches: who is one and for how long, what is put off for them, and that it is never forgotten."""

from __future__ import annotations

import pytest

from chatcache.kv_cache.page_hash import CacheScope
from chatcache.scheduler.request import LiveRequest
from chatcache.types.actions import DrawSpec, Extend, Fork, Release
from tests.scheduler.sched_driver import Bench, P, Plain, drawn, rows


def num_cached(bench: Bench, tokens: list[int]) -> int:
    return bench.kv.match(bench.kv.hash_pages([*tokens, 99], CacheScope())).num_tokens


class Asked(Plain):
    """Counts how often it is asked what to draw."""

    def __init__(self, *, steady: bool = True) -> None:
        super().__init__()
        self.has_fixed_draws = steady
        self.num_asked = 0

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        self.num_asked += 1
        return (DrawSpec(seed=7, top_k=3),)


@pytest.mark.parametrize(("steady", "most"), [(True, 2), (False, 20)])
def test_a_steady_strategy_is_not_asked_again(steady: bool, most: int) -> None:
    bench, strategy = Bench(), Asked(steady=steady)
    request = LiveRequest("r", [1, 2], "", strategy, 0)
    bench.scheduler.add(request)
    steps = [bench.decode(audit=False) for _ in range(20)]
    assert strategy.num_asked == most
    assert request.leader.in_decode_batch == steady
    for step in steps:
        assert step.plan.draws.seed.tolist() == [7] and step.plan.draws.top_k.tolist() == [3]
    assert [step.plan.draws.position.tolist() for step in steps] == [[2 + index] for index in range(20)]
    assert [step.plan.rows.start.tolist() for step in steps[1:]] == [[2 + index] for index in range(19)]


def test_an_edit_is_asked_for_every_time() -> None:
    bench, strategy = Bench(), Plain()
    masked = (DrawSpec(top_k=1), DrawSpec(top_k=2))
    strategy.draws = lambda branch: masked  # type: ignore[method-assign]
    request = LiveRequest("r", [1, 2], "", strategy, 0)
    bench.scheduler.add(request)
    step = [bench.decode() for _ in range(3)][-1]
    assert not request.leader.in_decode_batch and step.plan.draws.top_k.tolist() == [1, 2]


def test_the_table_hears_of_a_page_when_it_is_full() -> None:
    bench = Bench()
    request = bench.add([1, 2])
    for token in (3, 4, 5):
        bench.decode(token, audit=False)
    table = request.leader.table
    assert table is not None and request.leader.in_decode_batch
    assert (table.num_tokens, request.leader.num_tokens) == (2, 5)
    assert num_cached(bench, [1, 2, 3, 4]) == 0, "its fourth cell is written, and nobody has planned since"
    step = bench.decode(6, audit=False)
    assert table.num_tokens == P and num_cached(bench, [1, 2, 3, 4]) == P
    assert step.plan.updates.tolist() == [[request.leader.slot, 1, table.own_pages[1]]]
    bench.check()
    assert table.num_tokens == 5


def test_who_leaves_leaves_nothing_behind() -> None:
    bench = Bench()
    request = bench.add([1, 2])
    for token in (3, 4, 5, 6, 7):
        bench.decode(token, audit=False)
    bench.scheduler.finish(request)
    assert request.num_computed_tokens == 6
    assert num_cached(bench, [1, 2, 3, 4, 5, 6, 7]) == 6, "the seventh token was drawn, and never computed"
    assert bench.kv.pool.num_in_use == 0 and not bench.scheduler._decode_batch.unbatched_requests


def test_a_fault_takes_what_was_put_off_with_it() -> None:
    bench = Bench()
    request, other = bench.add([1, 2]), bench.add([50, 51])
    for token in (3, 4, 5, 6, 7):
        bench.decode(token, audit=False)
    step = bench.scheduler.plan()
    assert step is not None
    bench.scheduler.commit(step, [request])
    bench.scheduler.finish(request, discard=True)
    assert num_cached(bench, [1, 2, 3, 4, 5, 6, 7]) == 0
    bench.check()
    assert other.leader.table is not None and other.leader.table.num_tokens == 7


def test_of_an_abandoned_step_nothing_is_kept() -> None:
    bench = Bench()
    requests = {bench.add([1, 2]), bench.add([50, 51])}
    for token in (3, 4, 5, 6, 7):
        bench.decode(token, audit=False)
    step = bench.scheduler.plan()
    assert step is not None and len(step.decode_rows.branches) == 2
    assert set(bench.scheduler.abort_steps(step)) == requests
    assert bench.kv.pool.num_in_use == 0 and num_cached(bench, [1, 2, 3, 4]) == 0
    assert list(bench.scheduler.idle_violations()) == []


def test_a_steady_branch_can_be_forked_and_all_go_on() -> None:
    bench = Bench()
    request = bench.add([1, 2], max_branches=3)
    for token in (3, 4, 5):
        bench.decode(token, audit=False)
    bench.step(audit=False)
    assert request.leader.in_decode_batch
    bench.scheduler.apply(request, [Fork(0, 1, 7), Fork(0, 2, 8), Extend(0, 9)])
    assert [branch.in_decode_batch for branch in request.branches.values()] == [False] * 3, "they share their tail"
    step = bench.decode(6)
    assert len(step.plan.copies) == 2 and len(step.plan.rows.slot) == 3
    assert [branch.in_decode_batch for branch in request.branches.values()] == [True] * 3
    assert [branch.id for branch in bench.decode(audit=False).decode_rows.branches] == [0, 1, 2]
    bench.step(audit=False)
    bench.scheduler.apply(request, [Extend(0, 4), Release(1), Extend(2, 4)])
    assert [branch.id for branch in bench.decode(audit=False).decode_rows.branches] == [0, 2]


def test_rows_stand_in_turn_whoever_came_and_went() -> None:
    bench = Bench(num_slots=8)
    requests = [bench.add([10 * number + 1]) for number in range(6)]
    bench.decode()
    bench.scheduler.finish(requests[1])
    bench.scheduler.finish(requests[4])
    late = [bench.add([71]), bench.add([81])]
    bench.decode()
    step = bench.decode()
    assert [branch.request for branch in step.decode_rows.branches] == [requests[i] for i in (0, 2, 3, 5)] + late
    starts, slots = step.plan.rows.start.tolist(), step.plan.rows.slot.tolist()
    assert starts == [2, 2, 2, 2, 1, 1] or starts == [3, 3, 3, 3, 2, 2]
    assert slots == [branch.slot for branch in step.decode_rows.branches]


def test_nobody_is_steady_while_the_budget_is_tight() -> None:
    bench = Bench(budget=3)
    requests = [bench.add([10 * number + 1]) for number in range(5)]
    for _ in range(4):
        bench.decode()
    step = bench.decode()
    assert [row[0] for row in rows(step)] == ["r0", "r1", "r2"], "the oldest first"
    bench.scheduler.finish(requests[0])
    bench.scheduler.finish(requests[1])
    for _ in range(3):
        step = bench.decode()
    assert len(step.decode_rows.branches) == 3


def test_who_was_drawn_and_not_extended_computes_nothing() -> None:
    bench = Bench()
    request, other = bench.add([1, 2]), bench.add([50, 51])
    bench.decode()
    bench.decode()
    bench.step()
    bench.scheduler.apply(other, [Extend(0, 5)])
    step = bench.step()
    assert [branch.request for branch in drawn(step)] == [other]
    bench.scheduler.apply(other, [Extend(0, 5)])
    bench.scheduler.apply(request, [Extend(0, 6)])
    assert {branch.request for branch in drawn(bench.step())} == {request, other}


def test_when_pages_run_out_the_newest_gives_way() -> None:
    bench = Bench(num_pages=6)
    old, new = bench.add([1, 2]), bench.add([50, 51])
    while not bench.scheduler.num_preemptions:
        bench.decode(audit=False)
    assert bench.scheduler.running == [old] and old.num_preemptions == 0
    assert not new.leader.in_decode_batch and new.num_batched == 0
    num_tokens = new.leader.num_tokens
    bench.check()
    bench.scheduler.finish(old)
    assert rows(bench.decode())[0][:2] == ("r1", 0) and new.leader.num_tokens == num_tokens + 1
