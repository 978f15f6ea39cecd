"""Run random faults against real processes: `python -m tests.chaos --minutes 10 --seed N`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.plan import NUM_CLIENTS, make_plan
from tests.chaos.runner import report, run_plan


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=("sqlite", "redis", "sentinel"), help="default: drawn from the seed")
    parser.add_argument("--workers", type=int, default=0, help="two gateways and this many workers on a Redis")
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    parser.add_argument("--until-step", type=int, metavar="K", help="only the faults before step K")
    parser.add_argument("--out", type=Path, help="folder for the history and the output of the processes")
    args = parser.parse_args(argv)
    plan = make_plan(args.seed, args.minutes, args.store, args.clients, args.workers).up_to(args.until_step)
    servers = f"{plan.num_gateways} gateway(s) and {plan.num_workers} worker(s)"
    print(f"seed {plan.seed}: {servers} on {plan.store}, {plan.num_clients} clients")
    for fault in plan.faults:
        print(f"  {fault}")
    folder = args.out or Path(tempfile.mkdtemp(prefix=f"chaos-{plan.seed}-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--out {folder}: the folder is not empty")
    violations = asyncio.run(run_plan(plan, folder))
    return report(plan, args.minutes, folder, violations)


if __name__ == "__main__":
    sys.exit(main())
