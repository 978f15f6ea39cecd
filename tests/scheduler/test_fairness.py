"""Virtual token counters: charges, namespaces that return, deleted counters. Decode shares: who decodes in a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatcache.scheduler import fairness
from chatcache.scheduler.fairness import (
    ABSENT_STEPS,
    INPUT_WEIGHT,
    MAX_DELAY,
    MIN_DECODE_BRANCHES,
    OUTPUT_WEIGHT,
    DecodeShares,
    VirtualTokenCounter,
)
from chatcache.scheduler.preemption import CostModel
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.scheduler.speed import DecodeSpeed
from tests.scheduler.driver import FakeStrategy, SchedulerDriver


def test_charges_are_weighted_by_kind_of_token() -> None:
    counters = VirtualTokenCounter()
    counters.charge_input("a", 100)
    counters.charge_output("a", 7)
    assert counters["a"] == 100 * INPUT_WEIGHT + 7 * OUTPUT_WEIGHT and counters["b"] == 0


def test_namespace_that_returns_is_raised_to_the_smallest_waiting_counter() -> None:
    counters = VirtualTokenCounter()
    for name, amount in (("a", 500), ("b", 300), ("c", 900)):
        counters.charge_input(name, amount)
    counters.on_namespace_queued("d", {"a", "b", "c"})
    assert counters["d"] == 300
    counters.on_namespace_queued("c", {"a", "b"})
    assert counters["c"] == 900, "never lowered"


def test_first_namespace_in_an_empty_queue_gets_the_counter_of_the_last() -> None:
    counters = VirtualTokenCounter()
    counters.charge_input("a", 500)
    counters.charge_input("b", 300)
    counters.on_namespace_drained("b")
    counters.on_namespace_drained("a")
    counters.charge_output("a", 10)  # its running request continues
    counters.on_namespace_queued("c", ())
    assert counters["c"] == 500 + 10 * OUTPUT_WEIGHT


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.integers(1, 50)), max_size=120))
def test_deleting_absent_counters_changes_no_order(operations: list[tuple[str, int, int]]) -> None:
    complete, trimmed = VirtualTokenCounter(), VirtualTokenCounter()
    trimmed._max_counters = 1
    fairness_limit, fairness.MAX_REMEMBERED = fairness.MAX_REMEMBERED, 1
    try:
        waiting: dict[str, None] = {}
        for name, operation, amount in operations:
            for counters in (complete, trimmed):
                if operation == 0 and name not in waiting:
                    counters.on_namespace_queued(name, waiting)
                elif operation == 1 and name in waiting and len(waiting) > 1:
                    counters.on_namespace_drained(name)
                elif operation >= 2 and name in waiting:
                    counters.charge_output(name, amount)
            if operation == 0:
                waiting[name] = None
            elif operation == 1 and len(waiting) > 1:
                waiting.pop(name, None)
            assert all(complete[name] == trimmed[name] for name in waiting)
    finally:
        fairness.MAX_REMEMBERED = fairness_limit


def measured(fixed_s: float, branch_s: float) -> DecodeSpeed:
    speed = DecodeSpeed()
    for num_branches in (1, 64):
        speed.record(num_branches, num_branches, fixed_s + num_branches * branch_s)
    return speed


def branches_of(*counts: int, lockstep: bool = False) -> list[Branch]:
    """Return the branches of one request for each namespace, with so many branches each."""
    branches: list[Branch] = []
    for number, count in enumerate(counts):
        request = LiveRequest(f"r{number}", [1], f"n{number}", FakeStrategy(count, lockstep and number > 0), number)
        for _ in range(1, count):
            branch = request.leader.fork(len(request.branches), 5)
            request.branches[branch.id] = branch
        request.num_batched = count
        branches += request.branches.values()
    return branches


def run_steps(shares: DecodeShares, branches: list[Branch], num_steps: int) -> list[list[Branch]]:
    chosen = [shares.choose(branches) for _ in range(num_steps)]
    return [[branches[index] for index in (range(len(branches)) if each is None else each)] for each in chosen]


@pytest.mark.parametrize(
    ("speed", "counts"),
    [
        (DecodeSpeed(), (1, 200)),  # nothing was measured yet
        (measured(0.01, 0.0), (1, 200)),  # a branch costs nothing
        (measured(1.0, 0.0025), (1, 200)),  # a step of 201 branches takes 1.5 times as long as one of one branch
        (measured(0.0, 1.0), (200,)),
        (measured(0.0, 1.0), (20, 20, 20)),
        (measured(0.0, 1.0), (1, MIN_DECODE_BRANCHES)),
    ],
)
def test_all_branches_decode_where_no_namespace_is_delayed_by_more_than_its_share(
    speed: DecodeSpeed, counts: tuple[int, ...]
) -> None:
    assert DecodeShares(speed).choose(branches_of(*counts)) is None


@pytest.mark.parametrize("counts", [(2, 128), (128, 2), (10, 100, 90), (1, 1, 1, 500)])
def test_further_namespaces_lengthen_a_step_by_half_of_the_time_of_the_smallest_alone(counts: tuple[int, ...]) -> None:
    fixed_s, branch_s = 0.020, 0.001
    branches = branches_of(*counts)
    smallest = min(counts)
    for step in run_steps(DecodeShares(measured(fixed_s, branch_s), min_branches=1), branches, 50):
        step_s = fixed_s + len(step) * branch_s
        alone_s = fixed_s + smallest * branch_s
        max_s = alone_s * (1 + MAX_DELAY * (len(counts) - 1))
        assert max_s - branch_s * len(counts) < step_s <= max_s + 1e-9
        own = [branch for branch in step if branch.request.num_batched == smallest]
        assert len(own) == smallest * counts.count(smallest), "those of the smallest never rest"
        assert step == sorted(step, key=branches.index)


def test_branches_that_rest_take_turns() -> None:
    branches = branches_of(2, 100)
    steps = run_steps(DecodeShares(measured(0.0, 1.0)), branches, 50)
    share = MIN_DECODE_BRANCHES
    assert {len(step) for step in steps} == {2 + share}
    decoded = [sum(branch in step for step in steps) for branch in branches[2:]]
    assert max(decoded) - min(decoded) <= 1 and sum(decoded) == 50 * share


def test_turns_continue_when_branches_come_and_go() -> None:
    shares, branches = DecodeShares(measured(0.0, 1.0), min_branches=1), branches_of(1, 6)
    assert [step[1].ordinal for step in run_steps(shares, branches, 3)] == [0, 1, 2]
    assert [step[1].ordinal for step in run_steps(shares, branches[:4] + branches[5:], 3)] == [4, 5, 0]


def test_lockstep_branches_decode_together_and_no_more_than_their_share() -> None:
    branches = branches_of(1, 40, lockstep=True)
    steps = run_steps(DecodeShares(measured(0.0, 1.0)), branches, 60)
    assert {len(step) for step in steps} == {1, 41}
    assert sum(len(step) - 1 for step in steps) == pytest.approx(60 * MIN_DECODE_BRANCHES, abs=40)


def test_lockstep_branches_that_are_alone_decode_in_every_step() -> None:
    """They wait for no share of a namespace that has just left."""
    branches, shares = branches_of(1, 10, lockstep=True), DecodeShares(measured(0.0, 1.0))
    run_steps(shares, branches, 1)
    assert [len(step) for step in run_steps(shares, branches[1:], ABSENT_STEPS + 1)] == [10] * (ABSENT_STEPS + 1)


def test_lockstep_branches_decode_with_those_outside_the_batch_and_leave_the_share_to_others() -> None:
    branches = branches_of(1, 40, lockstep=True)
    beams = branches[1].request
    beams.num_batched -= 1
    other = LiveRequest("other", [1], beams.namespace, FakeStrategy(10), 2)
    for _ in range(9):
        child = other.leader.fork(len(other.branches), 5)
        other.branches[child.id] = child
    shares = DecodeShares(measured(0.0, 1.0))
    steps = run_steps(shares, [*branches[:-1], *other.branches.values()], 10)
    assert {len(step) for step in steps} == {1 + 39 + MIN_DECODE_BRANCHES}
    assert {sum(branch in step for step in steps) for branch in other.branches.values()} == {MIN_DECODE_BRANCHES}
    beams.num_batched += 1
    rest = run_steps(shares, [*branches, *other.branches.values()], 20)
    assert max(map(len, rest)) <= 1 + 40 + MIN_DECODE_BRANCHES
    assert sum(len(step) - 1 for step in rest) <= 20 * MIN_DECODE_BRANCHES + 40


def test_namespace_without_branches_keeps_its_share_for_some_steps() -> None:
    branches, shares = branches_of(1, 40), DecodeShares(measured(0.0, 1.0))
    run_steps(shares, branches, 1)
    steps = run_steps(shares, branches[1:], ABSENT_STEPS - 1)
    steps += run_steps(shares, branches, 1)  # it returns, and leaves again
    steps += run_steps(shares, branches[1:], ABSENT_STEPS)
    assert {len(step) for step in steps} == {MIN_DECODE_BRANCHES, MIN_DECODE_BRANCHES + 1}
    assert [len(step) for step in run_steps(shares, branches[1:], 2)] == [40, 40]


def test_namespaces_without_branches_give_others_no_larger_share() -> None:
    branches, shares = branches_of(1, 1, 1, 1, 40), DecodeShares(measured(0.0, 1.0))
    run_steps(shares, branches, 1)
    assert {len(step) for step in run_steps(shares, [branches[0], *branches[4:]], 3)} == {1 + MIN_DECODE_BRANCHES}


def test_request_that_starts_has_a_share_before_its_first_branch_decodes() -> None:
    branches, shares = branches_of(1, 40), DecodeShares(measured(0.0, 1.0))
    assert len(run_steps(shares, branches[1:], 1)[0]) == 40
    for num_steps in (1, 2):  # its prompt ends with its only token, and the next one starts
        shares.record_start(branches[0].request.namespace)
        steps = run_steps(shares, branches[1:], num_steps)
        assert [len(step) for step in steps] == [MIN_DECODE_BRANCHES, 40][:num_steps]


def test_scheduler_shares_the_step_in_which_a_request_of_another_namespace_starts() -> None:
    driver = SchedulerDriver(num_slots=8)
    cost = CostModel()
    cost.decode.record(1, 1, 1.0)
    cost.decode.record(64, 64, 64.0)
    driver.scheduler = Scheduler(
        driver.kv, num_slots=8, max_num_batched_tokens=64, cost=cost, counters=VirtualTokenCounter()
    )
    for number in range(6):
        driver.add([10 * number + 1, 2])
    assert [len(driver.decode().decode_branches) for _ in range(3)] == [0, 6, 6]
    driver.scheduler.add(LiveRequest("other", [1, 2], "other", FakeStrategy(), 6))
    step = driver.decode()
    assert [row.branch.request.request_id for row in step.drawn] == ["other"]
    assert len(step.decode_branches) == MIN_DECODE_BRANCHES


def test_namespace_decodes_with_all_branches_after_a_larger_one_has_ended() -> None:
    branches, shares = branches_of(6, 40), DecodeShares(measured(0.0, 1.0))
    run_steps(shares, branches, 1)
    assert shares.choose(branches[:6]) is None


def test_namespace_that_returns_owes_no_turns() -> None:
    beams, others = branches_of(1, 40, lockstep=True), branches_of(1, 1, 9)
    shares = DecodeShares(measured(0.0, 1.0))
    assert [len(step) for step in run_steps(shares, beams, 2)] == [41, 1]
    run_steps(shares, [others[0], *others[2:]], 1)  # without the namespace of the beams
    assert len(run_steps(shares, beams, 1)[0]) == 41
