"""Random faults of two gateways, two workers and their Redis; `-m long` runs ten minutes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.chaos import processes
from tests.chaos.checker import Violation
from tests.chaos.plan import Fault, make_plan
from tests.chaos.runner import run_plan
from tests.cli.test_workers import FORGETFUL_JOURNAL

FORGETFUL = f"""
import sys
from tests.chaos.server_process import main
{FORGETFUL_JOURNAL}
sys.exit(main(*sys.argv[1:]))
"""


async def kill_workers(num_kills: int, folder: Path) -> list[Violation]:
    """Kill one of two workers under clients, then the other one, and so on."""
    faults = tuple(Fault(step, 1.5 + 8.0 * step, "kill_worker", step % 2, 0.0) for step in range(num_kills))
    plan = dataclasses.replace(make_plan(1, 0.1, num_workers=2), faults=faults, length_s=8.0 * num_kills - 2.0)
    return await run_plan(plan, folder)


@pytest.mark.slow
async def test_killed_worker_under_clients_causes_no_violation(tmp_path: Path) -> None:
    assert await kill_workers(1, tmp_path) == []


async def kill_primaries(num_kills: int, folder: Path) -> list[Violation]:
    """Kill the Redis primary several times under clients."""
    plan = make_plan(1, 0.1, "sentinel", num_workers=2)
    faults = tuple(Fault(step, 3.0 + 25.0 * step, "kill_primary", 0, 6.0) for step in range(num_kills))
    plan = dataclasses.replace(plan, faults=faults, length_s=25.0 * num_kills + 5.0)
    return await run_plan(plan, folder)


@pytest.mark.slow
async def test_killed_primary_under_clients_causes_no_violation(tmp_path: Path) -> None:
    assert await kill_primaries(1, tmp_path) == []


@pytest.mark.slow
async def test_gateway_that_forgets_a_token_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kill may hit a worker without a request that has tokens."""
    monkeypatch.setattr(processes, "PROGRAM", ("-c", FORGETFUL))
    assert {"foreign", "text"} & {violation.rule for violation in await kill_workers(3, tmp_path)}


@pytest.mark.long
@pytest.mark.parametrize("seed", [1])
async def test_ten_minutes_of_faults_cause_no_violation(seed: int, tmp_path: Path) -> None:
    assert await run_plan(make_plan(seed, 10, num_workers=2), tmp_path) == []


@pytest.mark.long
async def test_twenty_killed_primaries_lose_nothing(tmp_path: Path) -> None:
    assert await kill_primaries(20, tmp_path) == []
