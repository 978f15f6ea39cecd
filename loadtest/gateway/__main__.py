"""`python -m loadtest.gateway`: each wire through the gateway and through the bare loop, side by side."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.gateway.figures import cpu_name
from loadtest.gateway.ticks import settings
from loadtest.gateway.wires import WIRES

MAX_CPU_US = 10.0
MAX_P99_MS = 20.0
RESULTS = Path(__file__).resolve().parent.parent / "results"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gateway", description="What the gateway costs per token.")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=10.0, help="tokens per second and stream")
    parser.add_argument(
        "--phases", type=int, default=20, help="ticks a stream's period is divided into; 1: all streams in every step"
    )
    parser.add_argument("--window", type=float, default=10.0, help="seconds that are measured")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds between the last stream's start and them")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--wires", nargs="+", choices=tuple(WIRES), default=list(WIRES))
    parser.add_argument("--skip-bare", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        console.print("[red]Needs two cores: one for the gateway, one for the engine's clock and the clients.")
        return 2
    rows: list[dict[str, Any]] = []
    for _ in range(args.repeat):
        for wire in args.wires:
            for what in ("gateway",) if args.skip_bare else ("bare", "gateway"):
                rows.append({"what": what, "wire": wire, **_run(what, wire, args, cores)})
                console.print_json(json.dumps(rows[-1]), indent=None)
    _print(console, rows)
    document = {
        "cpu": cpu_name(),
        "cores": len(cores),
        "python": platform.python_version(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "asked": {key: value for key, value in vars(args).items() if key != "out"},
        "goals": {"cpu_us_per_token": MAX_CPU_US, "p99_ms": MAX_P99_MS},
        "runs": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"gateway-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    console.print(path)
    return 0


def _run(what: str, wire: str, args: argparse.Namespace, cores: list[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ticks = Path(folder) / "ticks"
        environment = {**os.environ, **settings(ticks, args.rate, args.phases)}
        with _served(what, folder, cores[0], environment) as (pid, port):
            asked = {
                "pid": pid, "port": port, "ticks": str(ticks), "wire": wire, "core": cores[-1],
                "streams": args.streams, "settle_s": args.settle, "window_s": args.window,
            }  # fmt: skip
            command = [sys.executable, "-m", "loadtest.gateway.readers", json.dumps(asked)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            result: dict[str, Any] = json.loads(done.stdout)
            return result


@contextlib.contextmanager
def _served(what: str, folder: str, core: int, environment: dict[str, str]) -> Iterator[tuple[int, int]]:
    """A process under test: (its id, its port). What it said is shown if anything fails."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    arguments = [what, "--port", str(port), "--core", str(core), "--db", str(Path(folder) / "chat.db")]
    said = Path(folder) / "said"
    with said.open("wb") as log:
        command = [sys.executable, "-m", "loadtest.gateway.served", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait_ready(f"http://127.0.0.1:{port}/readyz" if what == "gateway" else None, port)
        yield process.pid, port
    except BaseException:
        sys.stderr.write(said.read_text()[-4000:])
        raise
    finally:
        process.kill()
        process.wait(30)


def _wait_ready(url: str | None, port: int) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            if url is not None:
                urllib.request.urlopen(url, timeout=5).close()
            else:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def _print(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="The gateway beside a bare uvicorn write loop (the median run of each)")
    for heading in ("wire", "", "us/token", "user", "x bare", "p50 ms", "p99 ms", "KiB/stream", "waited", "client"):
        table.add_column(heading, justify="right")
    for wire in dict.fromkeys(row["wire"] for row in rows):
        bare = None
        for what in ("bare", "gateway"):
            mine = sorted(
                (row for row in rows if (row["wire"], row["what"]) == (wire, what)),
                key=lambda row: float(row["cpu_us_per_token"]),
            )
            if not mine:
                continue
            row = mine[len(mine) // 2]
            bare = row["cpu_us_per_token"] if what == "bare" else bare
            table.add_row(
                wire,
                what,
                f"{row['cpu_us_per_token']:.1f}",
                f"{row['user_us_per_token']:.1f}",
                f"{row['cpu_us_per_token'] / bare:.2f}" if bare else "",
                f"{row['latency_ms']['p50']:.2f}",
                f"{row['latency_ms']['p99']:.2f}",
                f"{row['rss_per_stream_kib']}",
                f"{row['waited_share']:.1%}",
                f"{row['client_core_share']:.0%}",
            )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
