"""A plan is its seed's: the same again, and the beginning of a longer one."""

from __future__ import annotations

import itertools

from tests.chaos.plan import FAULTS, REDIS_FAULTS, make_plan


def test_a_seed_gives_one_plan_and_others_give_others() -> None:
    assert make_plan(7, 10) == make_plan(7, 10)
    assert len({make_plan(seed, 1).faults for seed in range(20)}) == 20
    assert {make_plan(seed, 1).store for seed in range(20)} == {"sqlite", "redis"}
    assert {make_plan(seed, 1, "redis").num_gateways for seed in range(20)} == {1, 2}
    assert {make_plan(seed, 1, "sqlite").num_gateways for seed in range(20)} == {1}


def test_a_shorter_run_begins_as_the_longer_one() -> None:
    long, short = make_plan(3, 10), make_plan(3, 1)
    assert short.faults == long.faults[: len(short.faults)]
    cut = long.up_to(5)
    assert cut.faults == long.faults[:5] and cut.length_s == long.faults[5].at_s
    assert long.up_to(None) == long.up_to(10_000) == long


def test_something_happens_every_few_seconds_and_everything_does() -> None:
    plan = make_plan(1, 60, "redis")
    times = [fault.at_s for fault in plan.faults]
    assert max(b - a for a, b in itertools.pairwise(times)) <= 6.1 and times[-1] < 3600
    assert {fault.name for fault in plan.faults} == set(FAULTS | REDIS_FAULTS)
    assert all(str(fault) for fault in plan.faults)
    assert not {fault.name for fault in make_plan(1, 60, "sqlite").faults} & set(REDIS_FAULTS)
