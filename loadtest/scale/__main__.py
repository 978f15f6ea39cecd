"""`python -m loadtest.scale simulate`: compare rules that choose a worker, and write the report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from loadtest.open_loop.traces import read_trace
from loadtest.scale import report
from loadtest.scale.runs import Run, num_cores, plan, run_all
from loadtest.scale.traffic import SCENARIOS

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "results" / "scale"


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SCENARIOS:
            raise argparse.ArgumentTypeError(f"{name}: choose among {', '.join(SCENARIOS)}")
    return names


def _counts(text: str) -> list[int]:
    counts = [int(each) for each in text.split(",")]
    if not all(2 <= count <= 10_000 for count in counts):
        raise argparse.ArgumentTypeError("from 2 to 10000 workers")
    return counts


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.scale", description="Simulate clusters of workers.")
    simulate = parser.add_subparsers(dest="command", required=True).add_parser(
        "simulate", help="compare rules that choose a worker", description="Compare rules that choose a worker."
    )
    simulate.add_argument("--only", type=_names, default=list(SCENARIOS), help="scenarios, separated by commas")
    simulate.add_argument("--workers", type=_counts, default=[100], help="numbers of workers, separated by commas")
    simulate.add_argument("--seeds", type=_positive, default=5, help="runs of each rule, with different traffic")
    simulate.add_argument("--trace", type=Path, help="JSON lines with block hashes: one more scenario")
    simulate.add_argument(
        "--quick", action="store_true", help="a tenth of the workers, a quarter of the time, one seed"
    )
    simulate.add_argument("--processes", type=_positive, default=num_cores())
    simulate.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the report")
    args = parser.parse_args(argv)
    if args.trace is not None:
        try:
            if not any(turn.block_ids for turns in read_trace(args.trace) for turn in turns):
                parser.error(f"--trace: {args.trace} has no block hashes")
        except (OSError, ValueError) as error:
            parser.error(f"--trace: {error}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, print it, and write the report."""
    args = _arguments(argv)
    counts, num_seeds = args.workers, args.seeds
    if args.quick:
        counts, num_seeds = [max(2, count // 10) for count in counts], 1
    runs = plan(args.only, counts, num_seeds, args.quick, args.trace)
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, speed_estimate_period=600, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task("", total=sum(run.weight for run in runs))

        def advance(run: Run) -> None:
            progress.update(task, advance=run.weight, description=f"{run.scenario.name}, {run.scenario.num_workers}")

        rows = run_all(runs, args.processes, advance)
    print(report.summary(rows))
    options = [
        *([f"--only '{','.join(args.only)}'"] if args.only != list(SCENARIOS) else []),
        *([f"--workers {','.join(map(str, args.workers))}"] if args.workers != [100] else []),
        *([f"--seeds {args.seeds}"] if args.seeds != 5 else []),
        *([f"--trace {args.trace.name}"] if args.trace is not None else []),
        *(["--quick"] if args.quick else []),
    ]
    print(report.write(rows, args.out, num_seeds, "".join(f" {option}" for option in options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
