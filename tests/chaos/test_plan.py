"""Test that a plan depends on its seed alone and that a shorter plan is a prefix of a longer one."""

from __future__ import annotations

import itertools

import pytest

from tests.chaos.__main__ import main
from tests.chaos.plan import ENGINE_FAULTS, GATEWAY_FAULTS, REDIS_FAULTS, WORKER_FAULTS, make_plan


def test_plan_depends_on_the_seed() -> None:
    assert make_plan(7, 10) == make_plan(7, 10)
    assert len({make_plan(seed, 1).faults for seed in range(20)}) == 20
    assert {make_plan(seed, 1).store for seed in range(20)} == {"sqlite", "redis"}
    assert {make_plan(seed, 1, "redis").num_gateways for seed in range(20)} == {1, 2}
    assert {make_plan(seed, 1, "sqlite").num_gateways for seed in range(20)} == {1}


def test_shorter_plan_is_a_prefix_of_the_longer_one() -> None:
    long, short = make_plan(3, 10), make_plan(3, 1)
    assert short.faults == long.faults[: len(short.faults)]
    cut = long.up_to(5)
    assert cut.faults == long.faults[:5] and cut.length_s == long.faults[5].at_s
    assert long.up_to(None) == long.up_to(10_000) == long


def test_plan_has_a_fault_every_few_seconds_and_all_kinds() -> None:
    plan = make_plan(1, 60, "redis")
    times = [fault.at_s for fault in plan.faults]
    assert max(b - a for a, b in itertools.pairwise(times)) <= 6.1 and times[-1] < 3600
    assert {fault.name for fault in plan.faults} == set(GATEWAY_FAULTS | ENGINE_FAULTS | REDIS_FAULTS)
    assert all(str(fault) for fault in plan.faults)
    assert not {fault.name for fault in make_plan(1, 60, "sqlite").faults} & set(REDIS_FAULTS)
    plan = make_plan(1, 60, num_workers=3)
    assert plan.store == "redis" and plan.num_gateways == 2
    assert {fault.name for fault in plan.faults} == set(GATEWAY_FAULTS | ENGINE_FAULTS | REDIS_FAULTS | WORKER_FAULTS)
    assert {fault.target for fault in plan.faults if fault.name == "kill_worker"} == {0, 1, 2}


def test_command_help_lists_the_options_of_a_repeated_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(
        f"  {name} " in text for name in ("--minutes", "--seed", "--store", "--clients", "--until-step", "--out")
    )
