"""Run a plan: processes, clients and faults concurrently, then the final checks, then the report."""

from __future__ import annotations

import asyncio
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.checker import Checker, Violation
from tests.chaos.client import Client
from tests.chaos.fault_injector import FaultInjector
from tests.chaos.final_checks import epilogue
from tests.chaos.history import History, entries_of
from tests.chaos.plan import Plan
from tests.chaos.processes import Rig

STALLERS = 99  # number of the client whose replies are never read
END_TIMEOUT_S = 240.0
MOST_SHOWN = 12


async def run_plan(plan: Plan, folder: Path, *, step_s: float = 0.01) -> list[Violation]:
    """Run a plan and return the violations; the history stays in the folder."""
    history = History(folder / "history.jsonl")
    rig = Rig(folder, plan.num_gateways, plan.num_workers, plan.store, step_s=step_s)
    try:
        await rig.start()
        for server in rig.servers:
            await server.wait_ready()
        await _live(plan, rig, history)
        await epilogue(rig, history)
    finally:
        await rig.close()
        history.close()
    checker = Checker(entries_of(history.path))
    print("checked: " + ", ".join(f"{count} {what}" for what, count in checker.num_checked().items()), flush=True)
    violations = checker.violations()
    for violation in violations:  # pytest shortens what an assertion compares
        print(f"{violation.rule} at {violation.t:.1f} s: {violation.what}", flush=True)
    return violations


async def _live(plan: Plan, rig: Rig, history: History) -> None:
    stop = asyncio.Event()
    ports = [gateway.port for gateway in rig.gateways]
    clients = [
        Client(number, ports, history, random.Random(f"chaos/{plan.seed}/client/{number}"), stop)
        for number in range(plan.num_clients)
    ]
    stallers = Client(STALLERS, ports, history, random.Random(f"chaos/{plan.seed}/stallers"), stop)
    fault_injector = FaultInjector(rig, history, stallers)
    living = [asyncio.create_task(client.run()) for client in clients]
    began_s = history.now_s
    doing: list[asyncio.Task[None]] = []
    try:
        for fault in plan.faults:
            await _until(history, began_s + fault.at_s, living)
            doing.append(asyncio.create_task(fault_injector.inject(fault)))
        await _until(history, began_s + plan.length_s, living)
        await asyncio.gather(*doing)
        for server in rig.servers:
            fault_injector.restart_if_ended(server)
            server.set_clock(0)
        stop.set()
        async with asyncio.timeout(END_TIMEOUT_S):
            await asyncio.gather(*living)
    except TimeoutError:
        fault_injector.problems.append("clients have not finished long after the last fault")
    finally:
        for task in (*living, *doing):
            task.cancel()
        await asyncio.gather(*living, *doing, return_exceptions=True)
    history.note("ledger", gateway="the run", problems=fault_injector.problems)


async def _until(history: History, at_s: float, living: Sequence[asyncio.Task[None]]) -> None:
    """Wait until a time of the plan; a client that fails ends the run at once."""
    while history.now_s < at_s:
        await asyncio.sleep(min(0.1, max(0.0, at_s - history.now_s)))
        for task in living:
            if task.done():
                task.result()


def replay_command(plan: Plan, minutes: float, history: Path, violation: Violation) -> str:
    """Return the command that repeats the run up to this violation."""
    begun = [entry for entry in entries_of(history) if entry["kind"] == "fault" and entry["phase"] == "begin"]
    num_steps = max((entry["step"] + 1 for entry in begun if entry["t"] <= violation.t), default=0)
    command = ["python", "-m", "tests.chaos", "--minutes", f"{minutes:g}", "--seed", str(plan.seed)]
    command += ["--store", plan.store, "--workers", str(plan.num_workers), "--clients", str(plan.num_clients)]
    command += ["--until-step", str(num_steps)]
    return shlex.join(command)


def report(plan: Plan, minutes: float, folder: Path, violations: Sequence[Violation]) -> int:
    """Print the result and return the exit code."""
    history = folder / "history.jsonl"
    if not violations:
        print(f"seed {plan.seed}: no violations")
        return 0
    for violation in violations[:MOST_SHOWN]:
        print(f"{violation.rule} at {violation.t:.1f} s: {violation.what}", file=sys.stderr)
        print(f"    repeat: {replay_command(plan, minutes, history, violation)}", file=sys.stderr)
    print(f"seed {plan.seed}: {len(violations)} violations; the history: {history}", file=sys.stderr)
    return 1
