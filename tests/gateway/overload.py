"""Overload a server for minutes: `python -m tests.gateway.overload --minutes 5 --seed 1`.

A real `chatcache serve` process tree runs a model that takes a fixed time per step. Ten tenants each send one request
after another; another tenant sends requests at ten times the engine's rate without waiting for answers. The run fails
if the queue overflows, a refusal is not a 429 or 503 with `retry-after`, or memory grows. It prints the times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chatcache.bench.report import Figure, compare, figure_table, percentiles
from chatcache.cli.server import run_server
from chatcache.config import EngineConfig, ServerConfig
from chatcache.engine.engine import Engine
from chatcache.tokenizer.tokenizer import Tokenizer
from tests.gateway.keyed import give
from tests.gateway.serving import MAX_MODEL_LEN, parse_head, tiny_tokenizer
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_model_info

NUM_SLOTS, MAX_QUEUED = 8, 64
STEP_S = 0.05
NUM_OUTPUT = 24
NUM_TENANTS = 10
OVERLOAD = 10
REQUESTS_PER_S = NUM_SLOTS / (NUM_OUTPUT * STEP_S)
MAX_GROWTH_MIB = 32.0
START_TIMEOUT_S = 120.0
ENGINE = "tests.gateway.overload:build_engine"


def build_engine(config: EngineConfig, progress: Callable[[float, str], None]) -> Engine:
    words = tiny_tokenizer()
    eos = words.eos_token_ids
    runner = FakeRunner(fake_capacity(2048, 4, max_model_len=MAX_MODEL_LEN), words.vocab_size, eos[0], delay_s=STEP_S)
    model_info = fake_model_info(words.vocab_size, eos, MAX_MODEL_LEN)
    return Engine(runner, model_info, config, words.token_bytes, special_ids=words.special_ids)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    return tiny_tokenizer()


def serve(db: str, port: int) -> int:
    engine = EngineConfig(
        model="steady", max_num_seqs=NUM_SLOTS, max_queued_requests=MAX_QUEUED, max_model_len=MAX_MODEL_LEN
    )
    server = ServerConfig(port=port, db=db, log_level="warning")
    return run_server(engine, server, build_engine=ENGINE, load=load_tokenizer)


@dataclass
class LoadReport:
    """Measurements of one phase, in order. Times are seconds."""

    statuses: Counter[int] = field(default_factory=Counter)
    refusal_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    livez_s: list[float] = field(default_factory=list)
    num_queued: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_tokens: int = 0
    tokens_per_s: float = 0.0


class Load:
    """Clients of one server."""

    def __init__(self, port: int, keys: Sequence[str], rng: random.Random) -> None:
        self.port, self.keys, self.rng = port, keys, rng
        self.report = LoadReport()

    async def send_chat(self, key: str, *, num_tokens: int = NUM_OUTPUT, record_first_token: bool = False) -> int:
        """Send one streamed chat, check a refusal, and return the status."""
        text = " ".join(str(self.rng.random()) for _ in range(3))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": num_tokens, "ignore_eos": True}
        data = json.dumps({**body, "stream": True}).encode()
        start_s = time.monotonic()
        status, headers, reader, writer = await self._send("POST", "/v1/chat/completions", data, key)
        try:
            self.report.statuses[status] += 1
            if status != 200:
                await reader.read()
                self.report.refusal_s.append(time.monotonic() - start_s)
                if status not in (429, 503) or "retry-after" not in headers:
                    self.report.problems.append(f"{status} {headers}")
                return status
            while line := await reader.readline():
                has_text = b'"content":' in line and b'"content":""' not in line
                if has_text and record_first_token:
                    self.report.first_token_s.append(time.monotonic() - start_s)
                    record_first_token = False
                self.report.num_tokens += has_text
            return status
        finally:
            writer.close()

    async def run_closed_loop(self, key: str, until_s: float) -> None:
        """Send one request after another."""
        while time.monotonic() < until_s:
            if await self.send_chat(key, record_first_token=True) != 200:
                await asyncio.sleep(1)  # the value of `retry-after`

    async def run_open_loop(self, key: str, until_s: float, requests_per_s: float) -> None:
        """Send requests at random times, without waiting for answers."""
        running: set[asyncio.Task[int]] = set()
        due_s = time.monotonic()
        while time.monotonic() < until_s:
            due_s += self.rng.expovariate(requests_per_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            task = asyncio.create_task(self.send_chat(key))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def watch_server(self, pids: Sequence[int], until_s: float) -> None:
        """Record the latency of `/livez`, the length of the queue and the memory of the processes."""
        while time.monotonic() < until_s:
            start_s = time.monotonic()
            _, _, reader, writer = await self._send("GET", "/livez", b"", "")
            await reader.read()
            self.report.livez_s.append(time.monotonic() - start_s)
            writer.close()
            _, _, reader, writer = await self._send("GET", "/readyz", b"", self.keys[0])
            self.report.num_queued.append(json.loads(await reader.read()).get("num_waiting", -1))
            writer.close()
            self.report.resident_bytes.append(sum(map(resident_bytes, pids)))
            await asyncio.sleep(0.2)

    async def _send(
        self, method: str, path: str, data: bytes, key: str
    ) -> tuple[int, dict[str, str], asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = f"host: 127.0.0.1:{self.port}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        lines += f"authorization: Bearer {key}\r\n" if key else ""
        writer.write(f"{method} {path} HTTP/1.1\r\n{lines}content-length: {len(data)}\r\n\r\n".encode() + data)
        head = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n")
        return *parse_head(head), reader, writer

    async def wait_ready(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                try:
                    status, _, _, writer = await self._send("GET", "/readyz", b"", "")
                except OSError:
                    status = 0
                else:
                    writer.close()
                if status == 200:
                    return
                await asyncio.sleep(0.2)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def child_pids(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def run_phase(
    load: Load, pid: int, length_s: float, *, requests_per_s: float = 0.0, num_busy: int = 0
) -> LoadReport:
    """Run the closed loops of the tenants, `num_busy` more, and an open loop if it has a rate."""
    load.report = report = LoadReport()
    start_s = time.monotonic()
    until_s = start_s + length_s
    clients = [load.run_closed_loop(key, until_s) for key in load.keys[1:]]
    clients += [load.run_closed_loop(load.keys[0], until_s) for _ in range(num_busy)]
    clients += [load.run_open_loop(load.keys[0], until_s, requests_per_s)] if requests_per_s else []
    watching = asyncio.create_task(load.watch_server([pid, *child_pids(pid)], until_s))
    await asyncio.gather(*clients)
    report.tokens_per_s = report.num_tokens / (time.monotonic() - start_s)
    await watching
    print(f"{length_s:.0f} s: {dict(report.statuses)}, {report.tokens_per_s:.1f} tokens/s", flush=True)
    return report


async def measure(port: int, keys: Sequence[str], pid: int, minutes: float, seed: int) -> list[str]:
    """Run the phases, print the figures, and return the problems."""
    load = Load(port, keys, random.Random(seed))
    await load.wait_ready()
    short_s = min(30.0, 10 * minutes)
    alone = await run_phase(load, pid, short_s)
    peak = await run_phase(load, pid, short_s, num_busy=NUM_SLOTS)
    overload = await run_phase(load, pid, minutes * 60, requests_per_s=OVERLOAD * REQUESTS_PER_S)
    figures = overload_figures(alone, peak, overload)
    print(figure_table(figures))
    problems = overload.problems[:5] + [figure.line() for figure in figures if figure.met is False]
    return problems if overload.refusal_s else [*problems, "no request was refused"]


def overload_figures(alone: LoadReport, peak: LoadReport, overload: LoadReport) -> list[Figure]:
    """Return the figures of the overload phase, next to limits and the other phases."""
    settled = len(overload.resident_bytes) // 5  # the first fifth fills caches
    growth_mib = (max(overload.resident_bytes[settled:]) - overload.resident_bytes[settled]) / 2**20
    latencies = {"refusal": overload.refusal_s, "/livez": overload.livez_s}
    spreads = {name: percentiles(values, (50, 99), scale=1e3) for name, values in latencies.items()}
    waits = [percentiles(phase.first_token_s, (95,)).get("p95", float("nan")) for phase in (overload, alone)]
    return [
        compare("longest queue", max(overload.num_queued), "requests", MAX_QUEUED, "limit", "<= 1.00"),
        compare("growth of memory after the first fifth", growth_mib, "MiB", MAX_GROWTH_MIB, "limit", "<= 1.00"),
        *(
            Figure(f"{name}, {point}", value, "ms")
            for name, spread in spreads.items()
            for point, value in spread.items()
        ),
        compare("tokens, overloaded", overload.tokens_per_s, "tokens/s", peak.tokens_per_s, "peak"),
        compare("first token of the other tenants, p95", waits[0], "s", waits[1], "without overload"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], int(args.serve[1]))
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        db = str(Path(folder) / "chat.db")
        names = ("flood", *(f"tenant{number}" for number in range(NUM_TENANTS)))
        keys = [give(ServerConfig(db=db), name).key for name in names]
        command = [sys.executable, "-m", "tests.gateway.overload", "--serve", db, str(port)]
        server = subprocess.Popen(command)
        try:
            problems = asyncio.run(measure(port, keys, server.pid, args.minutes, args.seed))
        finally:
            server.terminate()
            server.wait()
    for line in problems:
        print(f"problem: {line}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
