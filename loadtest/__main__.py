"""`python -m loadtest`: parse, run with a progress bar, print, write."""

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
from rich.table import Table

from loadtest.client import Turn
from loadtest.report import plot, summarise, write_json
from loadtest.runner import run
from loadtest.scenario import Scenario


def _bounded(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}, got {value}")
        return value

    return parse


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description="Multi-turn chats over a shared system prompt."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="server, without /v1")
    parser.add_argument("--users", type=_bounded(1, 4096), default=16)
    parser.add_argument("--turns", type=_bounded(1, 1000), default=5)
    parser.add_argument("--max-tokens", type=_bounded(1, 100_000), default=64)
    parser.add_argument("--system-words", type=_bounded(1, 100_000), default=120)
    parser.add_argument("--seed", type=int, default=None, help="default: the time, so that no run warms the next")
    parser.add_argument("--api-key", default=None)
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the JSON and the PNG")
    return parser.parse_args(argv)


def _print(console: Console, summary: dict[str, Any]) -> None:
    table = Table(title="What the users felt")
    for column in ("", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    for name, key in (
        ("TTFT ms", "ttft_ms"),
        ("  first turn", "ttft_first_turn_ms"),
        ("  later turns", "ttft_later_turns_ms"),
        ("ITL ms", "itl_ms"),
        ("TPOT ms", "tpot_ms"),
    ):
        table.add_row(name, *(f"{summary[key].get(f'p{p}', float('nan')):.1f}" for p in (50, 90, 99)))
    console.print(table)
    console.print(
        f"{summary['turns']} turns ({summary['failed']} failed) in {summary['wall_s']:.1f} s: "
        f"{summary['requests_per_s']} requests/s, [bold]{summary['output_tokens_per_s']} output tokens/s[/], "
        f"[bold]{summary['cached_share']:.1%}[/] of {summary['prompt_tokens']} prompt tokens from cache "
        f"({summary['cached_share_after_first_turn']:.1%} after the first turn)"
    )
    for error in summary["errors"]:
        console.print(f"[red]{error}", markup=True, highlight=False)


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every turn succeeded, 1 when some failed, 2 when the server could not be reached."""
    args = _arguments(argv)
    seed = int(time.time()) if args.seed is None else args.seed
    scenario = Scenario(args.users, args.turns, args.max_tokens, args.system_words, seed)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tokens = 0
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("turns", total=scenario.users * scenario.turns)

            def on_turn(turn: Turn) -> None:
                nonlocal tokens
                tokens += turn.completion_tokens
                progress.update(task, advance=1, description=f"turns, {tokens} tokens")

            turns, wall_s = asyncio.run(run(scenario, args.url, args.api_key, on_turn))
    except httpx.HTTPError as error:
        console.print(f"[red]{args.url} does not answer: {error}. Is `make serve` running?")
        return 2
    summary = summarise(turns, wall_s)
    _print(console, summary)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"chats-{time.strftime('%Y%m%d-%H%M%S')}"
    write_json(stem.with_suffix(".json"), scenario, args.url, summary, turns)
    plot(stem.with_suffix(".png"), turns, summary)
    console.print(f"{stem}.json  {stem}.png")
    return 1 if summary["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
