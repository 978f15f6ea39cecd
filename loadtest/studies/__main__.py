"""`python -m loadtest.studies`: reproduce the figures of the vLLM paper and write a report."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chatcache.bench.report import format_number
from loadtest.open_loop.traces import read_trace
from loadtest.studies import batching, kernels, local_user, memory, rates, recorded, sharing, tails
from loadtest.studies.cost import COSTS, OPT_13B, open_cost
from loadtest.studies.machine import chip_name
from loadtest.studies.report import run_facts, save, write_markdown
from loadtest.studies.results import Context, StudyResult, num_cores

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "results" / "studies"


@dataclass(frozen=True, slots=True)
class Study:
    """A study and about how many seconds it takes, in a full and in a quick run."""

    run: Callable[[Context], StudyResult]
    full_s: float
    quick_s: float


STUDIES: dict[str, Study] = {
    "paging_or_scheduling": Study(batching.run_paging_or_scheduling, 210, 15),
    "lengths_apart": Study(batching.run_lengths_apart, 15, 1),
    "fig18a": Study(kernels.run_fig18a, 40, 5),
    "chunks": Study(batching.run_chunks, 130, 8),
    "local_user": Study(local_user.run_local_user, 50, 8),
    "fig18b": Study(batching.run_page_sizes, 90, 8),
    "fig19": Study(kernels.run_fig19, 110, 8),
    "tails": Study(tails.run_tails, 3, 1),
    "fig2": Study(memory.run_fig2, 20, 7),
    "fig12": Study(rates.run_fig12, 130, 7),
    "fig13": Study(memory.run_fig13, 50, 9),
    "fig14": Study(rates.run_fig14, 70, 4),
    "fig15": Study(sharing.run_fig15, 50, 7),
    "fig16": Study(rates.run_fig16, 20, 4),
    "fig17": Study(rates.run_fig17, 40, 8),
    "trace": Study(recorded.run_trace, 60, 15),
}
"""In the order of the report."""


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.studies", description="Reproduce the figures of the vLLM paper and write a report."
    )
    parser.add_argument("--only", default="", help=f"studies, separated by commas: {', '.join(STUDIES)}")
    parser.add_argument("--quick", action="store_true", help="shorter traces, fewer points: 2 instead of 20 minutes")
    parser.add_argument(
        "--trace",
        type=Path,
        help="recorded requests (Azure CSV, or JSON lines with block hashes): adds the study `trace`",
    )
    parser.add_argument("--cost", default=OPT_13B.name, help=f"step cost: {', '.join(COSTS)} or a JSON file")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the report; other studies in it stay")
    parser.add_argument("--processes", type=int, default=num_cores(), help="processes of the simulations")
    parser.add_argument("--device", default="cpu", help="device of the real studies: cpu or cuda")
    parser.add_argument("--note", action="append", default=[], help="remark on this run for the head of the report")
    args = parser.parse_args(argv)
    args.only = args.only.split(",") if args.only else [name for name in STUDIES if name != "trace" or args.trace]
    if "trace" in args.only and args.trace is None:
        parser.error("the study `trace` needs --trace FILE")
    for name in args.only:
        if name not in STUDIES:
            parser.error(f"--only {name}: choose among {', '.join(STUDIES)}")
    try:
        args.cost = open_cost(args.cost)
    except (OSError, ValueError) as error:
        parser.error(f"--cost: {error}")
    try:
        if args.trace is not None:
            read_trace(args.trace)
    except (OSError, ValueError) as error:
        parser.error(f"--trace: {error}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the studies one after the other and write the report after each."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    args = _arguments(argv)
    chosen = {name: STUDIES[name] for name in STUDIES if name in args.only}
    weights = {name: study.quick_s if args.quick else study.full_s for name, study in chosen.items()}
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    context = Context(
        quick=args.quick, cost=args.cost, trace=args.trace, device=args.device, num_processes=args.processes
    )
    path, console, began_s = args.out / "studies.md", Console(stderr=True), time.perf_counter()
    bar = Progress(*columns, console=console, speed_estimate_period=600, disable=not console.is_terminal)
    with bar as progress, context.resources():
        task = progress.add_task("", total=sum(weights.values()))
        for number, (name, study) in enumerate(chosen.items()):
            progress.update(task, description=name)
            if not console.is_terminal:  # a log gets one line per study instead of the bar
                done_s, left_s = (sum(list(weights.values())[part]) for part in (slice(number), slice(number, None)))
                left_s *= (time.perf_counter() - began_s) / done_s if done_s else 1.0
                console.print(
                    f"[{number + 1}/{len(chosen)}] {name}; about {left_s:.0f} s left for all", highlight=False
                )
            context.advance = lambda share, name=name: progress.advance(task, share * weights[name])  # type: ignore[misc]
            start = time.perf_counter()
            result = study.run(context)
            options = f" --trace {args.trace.name}" if name == "trace" else ""
            options += f" --device {args.device}" if args.device != "cpu" else ""
            seconds = time.perf_counter() - start
            save(result, args.out, run_facts(seconds, args.quick, args.note, options, chip_name(args.device)))
            path = write_markdown(args.out)
            for row in result.rows:
                paper = "" if row.published is None else f"  published {row.published}"
                text = f"{name}: {row.quantity}: {format_number(row.ours)} {row.unit}{paper}"
                console.print(text, soft_wrap=True, highlight=False)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
