"""`python -m loadtest.gateway`: measure each transport in the gateway and in a bare loop."""

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

from chatcache.bench.report import cpu_name, format_table, utc_timestamp, write_json
from loadtest.gateway.clients import TRANSPORTS
from loadtest.gateway.ticks import clock_environment

MAX_CPU_US = 10.0
MAX_P99_MS = 20.0
RESULTS = Path(__file__).resolve().parent.parent / "results"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gateway", description="Measure the cost of the gateway per token."
    )
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=10.0, help="tokens per second and stream")
    parser.add_argument(
        "--phases", type=int, default=20, help="steps between two tokens of a stream; 1: all streams emit in every step"
    )
    parser.add_argument("--window", type=float, default=10.0, help="length of the measurement in seconds")
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds between the last stream's start and the measurement"
    )
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--transports", nargs="+", choices=tuple(TRANSPORTS), default=list(TRANSPORTS))
    parser.add_argument("--skip-bare", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return 0, or 2 on a machine with a single core."""
    args = _arguments(argv)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("Needs two cores: one for the gateway, one for the clock engine and the clients.")
        return 2
    runs: list[dict[str, Any]] = []
    for _ in range(args.repeat):
        for transport in args.transports:
            for server in ("gateway",) if args.skip_bare else ("bare", "gateway"):
                runs.append({"server": server, "transport": transport, **_run(server, transport, args, cores)})
                print(json.dumps(runs[-1]), flush=True)
    print(runs_table(runs))
    document = {
        "cpu": cpu_name(),
        "cores": len(cores),
        "python": platform.python_version(),
        "at": utc_timestamp(),
        "options": {key: value for key, value in vars(args).items() if key != "out"},
        "goals": {"cpu_us_per_token": MAX_CPU_US, "p99_ms": MAX_P99_MS},
        "runs": runs,
    }
    path = args.out / f"gateway-{time.strftime('%Y%m%d-%H%M%S')}.json"
    write_json(path, document)
    print(path)
    return 0


def _run(server: str, transport: str, args: argparse.Namespace, cores: list[int]) -> dict[str, Any]:
    """Start the server and a process of clients, and return what the clients measured."""
    with tempfile.TemporaryDirectory() as folder:
        ticks = Path(folder) / "ticks"
        environment = {**os.environ, **clock_environment(ticks, args.rate, args.phases)}
        with _running_server(server, folder, cores[0], environment) as (pid, port):
            options = {
                "pid": pid, "port": port, "ticks": str(ticks), "transport": transport, "core": cores[-1],
                "streams": args.streams, "settle_s": args.settle, "window_s": args.window,
            }  # fmt: skip
            command = [sys.executable, "-m", "loadtest.gateway.clients", json.dumps(options)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            result: dict[str, Any] = json.loads(done.stdout)
            return result


@contextlib.contextmanager
def _running_server(server: str, folder: str, core: int, environment: dict[str, str]) -> Iterator[tuple[int, int]]:
    """Yield the process id and the port of a server; its output is printed if anything fails."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    arguments = [server, "--port", str(port), "--core", str(core), "--db", str(Path(folder) / "chat.db")]
    log = Path(folder) / "server.log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "loadtest.gateway.servers", *arguments]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        _wait_ready(f"http://127.0.0.1:{port}/readyz" if server == "gateway" else None, port)
        yield process.pid, port
    except BaseException:
        sys.stderr.write(log.read_text()[-4000:])
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


def runs_table(runs: list[dict[str, Any]]) -> str:
    """Return a row for the median run of each transport and server."""
    headers = (
        "transport",
        "server",
        "us/token",
        "user",
        "x bare",
        "p50 ms",
        "p99 ms",
        "KiB/stream",
        "waited",
        "client",
    )
    medians: dict[tuple[str, str], dict[str, Any]] = {}
    for key in sorted({(run["transport"], run["server"]) for run in runs}):  # "bare" before "gateway"
        group = [run for run in runs if (run["transport"], run["server"]) == key]
        medians[key] = sorted(group, key=lambda run: float(run["cpu_us_per_token"]))[len(group) // 2]
    rows = []
    for (transport, server), run in medians.items():
        bare = medians.get((transport, "bare"))
        row = (
            transport,
            server,
            f"{run['cpu_us_per_token']:.1f}",
            f"{run['user_us_per_token']:.1f}",
            f"{run['cpu_us_per_token'] / bare['cpu_us_per_token']:.2f}" if bare else "",
            f"{run['latency_ms']['p50']:.2f}",
            f"{run['latency_ms']['p99']:.2f}",
            f"{run['rss_per_stream_kib']}",
            f"{run['waited_share']:.1%}",
            f"{run['client_core_share']:.0%}",
        )
        rows.append(row)
    return format_table(headers, rows, "<<>>>>>>>>")


if __name__ == "__main__":
    sys.exit(main())
