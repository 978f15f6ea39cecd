"""`python -m loadtest`: run chats or open-loop load against servers, print a summary, write JSON and a plot.

Without `--rate` or `--trace` it runs closed-loop chats. `python -m loadtest plot` draws stored open-loop runs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.chats import Scenario, run_chats
from loadtest.client import Turn
from loadtest.open_loop.command import add_arguments, check_arguments, plot_main, run_open_loop
from loadtest.report import plot, summarise, summary_text, write_report


def _bounded(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}, got {value}")
        return value

    return parse


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest",
        description="Multi-turn chats over a shared system prompt; with --rate or --trace, open-loop load. "
        "`python -m loadtest plot` draws stored open-loop runs.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server, without /v1")
    parser.add_argument("--users", type=_bounded(1, 4096), default=16)
    parser.add_argument("--turns", type=_bounded(1, 1000), help="of each chat (default: 5; open loop: 1)")
    parser.add_argument("--max-tokens", type=_bounded(1, 100_000), default=64)
    parser.add_argument("--system-words", type=_bounded(1, 100_000), default=120)
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="seed of the texts; by default the time",
    )
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--out", type=Path, help="folder for JSON and figure (bench-out; open loop: loadtest/results)")
    add_arguments(parser)
    args = parser.parse_args(argv)
    check_arguments(args, parser)
    return args


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every turn succeeded, 1 if some failed, 2 if the server could not be reached."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["plot"]:
        return plot_main(argv[1:])
    args = _arguments(argv)
    return run_open_loop(args) if args.rate or args.trace else _run_chats(args)


def _run_chats(args: argparse.Namespace) -> int:
    seed = int(time.time()) if args.seed is None else args.seed
    scenario = Scenario(args.users, args.turns or 5, args.max_tokens, args.system_words, seed)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    num_tokens = 0
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("turns", total=scenario.users * scenario.turns)

            def on_turn(turn: Turn) -> None:
                nonlocal num_tokens
                num_tokens += turn.completion_tokens
                progress.update(task, advance=1, description=f"turns, {num_tokens} tokens")

            turns, wall_s = asyncio.run(run_chats(scenario, args.url, args.api_key, on_turn))
    except httpx.HTTPError as error:
        console.print(f"[red]{args.url} does not answer: {error}. Is `make serve` running?")
        return 2
    summary = summarise(turns, wall_s)
    print(summary_text(summary))
    stem = (args.out or Path("bench-out")) / f"chats-{time.strftime('%Y%m%d-%H%M%S')}"
    write_report(stem.with_suffix(".json"), scenario, args.url, summary, turns)
    plot(stem.with_suffix(".png"), turns, summary)
    print(f"{stem}.json\n{stem}.png")
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
