"""`python -m loadtest.studies`: reproduce the figures of the vLLM paper and write a report."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chatcache.bench.report import format_number
from loadtest.studies import batching, memory, rates, sharing
from loadtest.studies.cost import COSTS, OPT_13B, open_cost
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
    "fig2": Study(memory.run_fig2, 20, 8),
    "fig12": Study(rates.run_fig12, 150, 35),
    "fig13": Study(memory.run_fig13, 50, 20),
    "fig14": Study(rates.run_fig14, 60, 15),
    "fig15": Study(sharing.run_fig15, 40, 20),
    "fig16": Study(rates.run_fig16, 20, 10),
    "fig17": Study(rates.run_fig17, 40, 15),
    "fig18b": Study(batching.run_page_sizes, 20, 6),
    "paging_or_scheduling": Study(batching.run_paging_or_scheduling, 60, 20),
    "lengths_apart": Study(batching.run_lengths_apart, 15, 5),
    "chunks": Study(batching.run_chunks, 15, 5),
    "local_user": Study(batching.run_local_user, 2, 2),
    "tails": Study(sharing.run_tails, 5, 2),
}


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.studies", description=__doc__)
    parser.add_argument("--only", default=",".join(STUDIES), help=f"studies, by name: {','.join(STUDIES)}")
    parser.add_argument("--quick", action="store_true", help="shorter traces, fewer points: 2 instead of 20 minutes")
    parser.add_argument("--trace", type=Path, help="file with lengths of recorded requests for the rate curves")
    parser.add_argument("--cost", default=OPT_13B.name, help=f"step cost: {', '.join(COSTS)} or a JSON file")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the report; other studies in it stay")
    parser.add_argument("--processes", type=int, default=num_cores(), help="processes of the simulations")
    parser.add_argument("--device", default="cpu", help="device of the real studies: cpu or cuda")
    parser.add_argument("--note", action="append", default=[], help="remark on this run for the head of the report")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    for name in args.only:
        if name not in STUDIES:
            parser.error(f"--only {name}: choose among {', '.join(STUDIES)}")
    try:
        args.cost = open_cost(args.cost)
    except (OSError, ValueError) as error:
        parser.error(f"--cost: {error}")
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
    path = args.out / "studies.md"
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as progress, context.processes():
        task = progress.add_task("", total=sum(weights.values()))
        for name, study in chosen.items():
            progress.update(task, description=name)
            context.advance = lambda share, name=name: progress.advance(task, share * weights[name])  # type: ignore[misc]
            start = time.perf_counter()
            result = study.run(context)
            save(result, args.out, run_facts(time.perf_counter() - start, args.quick, args.note))
            path = write_markdown(args.out, list(STUDIES))
            for row in result.rows:
                paper = "" if row.published is None else f"  published {row.published}"
                progress.console.print(f"{name}: {row.quantity}: {format_number(row.ours)} {row.unit}{paper}")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
