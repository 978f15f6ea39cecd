"""The open-loop part of `python -m loadtest`: runs each rate on each server, and `python -m loadtest plot`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from chatcache.bench.report import cpu_name, utc_timestamp, write_json
from loadtest.lengths import open_lengths
from loadtest.open_loop.generator import LoadGenerator, RequestResult
from loadtest.open_loop.report import (
    LatencyLimits,
    Run,
    load_runs,
    plot,
    run_notes,
    runs_table,
    summarise,
    write_requests,
)
from loadtest.open_loop.server import Server, ServerError, ServerOptions, connect
from loadtest.open_loop.traces import read_trace
from loadtest.open_loop.workload import LengthLimits, Plan, Turns, plan_poisson, plan_trace, scale_to_rate

RESULTS = Path(__file__).resolve().parents[1] / "results"
NUM_WARMUP_REQUESTS = 4
DEFAULT_LENGTHS = "sharegpt"

Result = TypeVar("Result")


# -- the command line ---------------------------------------------------------------------------------------------


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def _not_negative(text: str) -> float:
    return 0.0 if text.strip("0.") == "" else positive(text)


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _rates(text: str) -> list[float]:
    return [positive(each) for each in text.split(",")]


def _named_server(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not (name and separator and url.startswith(("http://", "https://"))):
        raise argparse.ArgumentTypeError(f"must be NAME=URL, got {text}")
    return name, url


def _token_ids(text: str) -> range:
    low, _, high = text.partition("-")
    ids = range(int(low), int(high) + 1)
    if len(ids) < 2:
        raise argparse.ArgumentTypeError(f"must be LOW-HIGH, got {text}")
    return ids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of open-loop load."""
    group = parser.add_argument_group("open loop", "requests are sent at times drawn in advance, to /v1/completions")
    add = group.add_argument
    add("--rate", type=_rates, metavar="R[,R...]", help="requests per second, Poisson; several rates make a curve")
    add("--trace", type=Path, help="recorded requests: Azure's CSV or Mooncake's JSON lines; --rate scales their times")
    add("--time-scale", type=positive, help="multiply the times of a trace (default: 1)")
    add("--duration", type=positive, default=60.0, help="seconds of arrivals for each rate and server (default: 60)")
    add("--lengths", metavar="sharegpt|alpaca|FILE", help=f"lengths of Poisson requests (default: {DEFAULT_LENGTHS})")
    add("--length-scale", type=positive, default=1.0, help="multiply all lengths, and the blocks of a trace")
    add("--max-prompt-tokens", type=_positive_int, help="cut longer prompts")
    add("--max-output-tokens", type=_positive_int, help="cut longer replies")
    add(
        "--think-time", type=_not_negative, default=0.0, help="mean pause before each later turn of --turns, in seconds"
    )
    add("--server", type=_named_server, action="append", metavar="NAME=URL", help="repeat to compare servers in turns")
    add("--model", help="model to name in requests (default: the first that the server lists)")
    add("--prompts", choices=("auto", "ids", "text"), default="auto", help="send token ids or text of as many tokens")
    add("--token-ids", type=_token_ids, default=range(200, 1000), metavar="LOW-HIGH", help="ids of random prompts")
    add("--tokenizer", type=Path, help="tokenizer.json, for a server that takes text only and has no /tokenize")
    add("--ttft-limit", type=positive, help="goodput: longest time to first token, in seconds")
    add("--itl-limit", type=positive, help="goodput: longest mean time between the tokens of a reply, in seconds")
    add("--lag-limit", type=positive, default=0.05, help="warn if requests are sent later than planned by more (p99)")
    add("--timeout", type=positive, default=600.0, help="seconds until a request counts as failed")
    add("--max-in-flight", type=_positive_int, help="fail requests beyond so many open ones (default: open files)")
    add("--repeat", type=_positive_int, default=1, help="runs of each rate and server, in turns")


def check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse options that have no effect together."""
    if args.trace and (args.lengths or args.turns):
        parser.error("--trace has lengths and turns of its own: omit --lengths and --turns")
    if args.time_scale and (args.rate or not args.trace):
        parser.error("--time-scale needs a --trace and no --rate, which scales the times of the trace, too")
    if args.think_time and (args.turns or 1) < 2:
        parser.error("--think-time needs --turns of at least 2")


# -- plans --------------------------------------------------------------------------------------------------------


def make_planner(args: argparse.Namespace, seed: int) -> tuple[list[float], Callable[[float, int], Plan]]:
    """Return the rates and a function that plans the run of a rate, given the number of the repetition.

    Raises: ValueError or OSError if the lengths or the trace cannot be read.
    """
    limits = LengthLimits(args.length_scale, args.max_prompt_tokens, args.max_output_tokens)

    def name(rate: float, repeat: int) -> str:  # other prompts in each run, so that no run finds those of another
        return f"{seed}/{rate:g}/{repeat}"

    if args.trace is None:
        lengths, turns = open_lengths(args.lengths or DEFAULT_LENGTHS), Turns(args.turns or 1, args.think_time)
        return args.rate, lambda rate, repeat: plan_poisson(
            rate, args.duration, lengths, limits, turns, name(rate, repeat)
        )
    trace = read_trace(args.trace)
    if not args.rate:
        scale = args.time_scale or 1.0
        plan = plan_trace(trace, scale, args.duration, limits, name(0, 0))
        return [plan.rate], lambda rate, repeat: plan_trace(trace, scale, args.duration, limits, name(rate, repeat))
    scales = {rate: scale_to_rate(trace, rate, args.duration) for rate in args.rate}
    return args.rate, lambda rate, repeat: plan_trace(trace, scales[rate], args.duration, limits, name(rate, repeat))


# -- runs ---------------------------------------------------------------------------------------------------------


def run_open_loop(args: argparse.Namespace) -> int:
    """Run all rates on all servers; return 0, or 1 if requests failed, or 2 if a server or file cannot be used."""
    console = Console(stderr=True)
    seed = int(time.time()) if args.seed is None else args.seed
    named = args.server or [("server", args.url)]
    limits = LatencyLimits(args.ttft_limit, args.itl_limit)
    try:
        rates, plan = make_planner(args, seed)
        servers = run_async(_connect_all(args, named))
    except (ServerError, ValueError, OSError) as error:
        console.print(f"[red]{error}")
        return 2
    order = [
        (plan(rate, repeat), rate, repeat, server)
        for repeat in range(args.repeat)
        for number, rate in enumerate(rates)
        for server in (servers if (number + repeat) % 2 == 0 else servers[::-1])
    ]
    runs: list[tuple[Run, list[RequestResult]]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=sum(each.window_s for each, *_ in order))
        for planned, rate, repeat, server in order:
            progress.update(task, description=f"{server.name} at {rate:g}/s")
            step_s = planned.window_s / max(planned.num_requests, 1)
            generator = LoadGenerator(
                server,
                planned,
                timeout_s=args.timeout,
                max_in_flight=args.max_in_flight,
                on_result=lambda _, step_s=step_s: progress.advance(task, step_s),  # type: ignore[misc]
            )
            results, wall_s = run_async(generator.run())
            summary = summarise(results, planned.window_s, wall_s, limits, args.lag_limit)
            facts = {"server": server.name, "rate": rate, "repeat": repeat, "max_in_flight": generator.max_in_flight}
            runs.append((facts | {"requests_cut": planned.num_cut} | summary, results))
            for note in run_notes(runs[-1][0]):
                progress.console.print(note, markup=False, highlight=False)
    _report(args, servers, [run for run, _ in runs], runs, seed)
    return 1 if any(run["failed"] for run, _ in runs) else 0


def run_async(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on uvloop where it is installed: its timers and sockets delay the sending of requests less."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


async def _connect_all(args: argparse.Namespace, named: list[tuple[str, str]]) -> list[Server]:
    """Probe all servers, and warm each up by a few requests of both kinds of work."""
    options = ServerOptions("", "", args.model, args.api_key, args.prompts, args.token_ids, args.tokenizer)
    servers = [await connect(replace(options, name=name, url=url)) for name, url in named]
    for server in servers:
        limits = LengthLimits(1.0, args.max_prompt_tokens, args.max_output_tokens)
        lengths = open_lengths("alpaca")
        warmup = plan_poisson(NUM_WARMUP_REQUESTS, 1.0, lengths, limits, Turns(), f"warm-up {time.time()}")
        await LoadGenerator(server, warmup, timeout_s=args.timeout).run()
    return servers


def _report(
    args: argparse.Namespace,
    servers: list[Server],
    runs: list[Run],
    with_results: list[tuple[Run, list[RequestResult]]],
    seed: int,
) -> None:
    """Print the table, and write JSON, CSV and figure."""
    print(runs_table(runs))
    unused = "api_key", "out", "url", "server", "users", "max_tokens", "system_words"
    options = {key: str(value) for key, value in vars(args).items() if key not in unused and value is not None}
    document = {
        "kind": "open-loop",
        "at": utc_timestamp(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "options": options,
        "seed": seed,
        "servers": [
            {
                "name": server.name,
                "model": server.model,
                "token_ids": server.takes_token_ids,
                "ignore_eos": server.takes_ignore_eos,
            }
            for server in servers
        ],
        "runs": runs,
    }
    stem = (args.out or RESULTS) / f"open-loop-{time.strftime('%Y%m%d-%H%M%S')}"
    write_json(stem.with_suffix(".json"), document)
    write_requests(stem.with_suffix(".csv"), with_results)
    figures = plot(runs, stem, _title(args))
    print("\n".join(map(str, (stem.with_suffix(".json"), stem.with_suffix(".csv"), *figures))))


def _title(args: argparse.Namespace) -> str:
    poisson = f"{args.lengths or DEFAULT_LENGTHS} lengths, Poisson arrivals"
    source = f"trace {args.trace.stem}" if args.trace else poisson
    scale = f", lengths x {args.length_scale:g}" if args.length_scale != 1 else ""
    return f"{source}{scale}, {args.duration:g} s per rate"


# -- plot ---------------------------------------------------------------------------------------------------------


def plot_main(argv: list[str]) -> int:
    """`python -m loadtest plot`: draw the runs of several JSON files in one figure; return 0, or 2 for a bad file."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest plot", description="Draw the runs of open-loop load tests in one figure."
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSON files of `python -m loadtest --rate`")
    parser.add_argument("--out", type=Path, default=Path("open-loop.svg"), help="the figure, as SVG and as PNG")
    parser.add_argument("--title", default="")
    args = parser.parse_args(argv)
    try:
        runs = load_runs(args.results)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(runs_table(runs))
    print("\n".join(map(str, plot(runs, args.out, args.title))))
    return 0
