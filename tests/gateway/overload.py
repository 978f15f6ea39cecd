"""Ten times what the server can do, for minutes: `python -m tests.gateway.overload --minutes 5 --seed 1`.

A real `chatcache serve` process tree over a model that takes a fixed time per step. Ten tenants ask one thing after
another; one more sends requests at ten times the engine's rate, whether they are answered or not. Fails where the queue
overflows, a refusal is no 429 or 503 with `retry-after`, or memory grows; the times are printed.
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

from chatcache.cli.server import run_server
from chatcache.config import EngineConfig, ServerConfig
from chatcache.engine.engine import Engine
from chatcache.tokenizer.tokenizer import Tokenizer
from tests.gateway.keyed import give
from tests.gateway.serving import MAX_MODEL_LEN, parse_head, tiny_tokenizer
from tests.support.fake_runner import FakeRunner, fake_capacity, fake_facts

SLOTS, MOST = 8, 64
STEP_S = 0.05
NUM_OUTPUT = 24
NUM_POLITE = 10
OVERLOAD = 10
REQUESTS_PER_S = SLOTS / (NUM_OUTPUT * STEP_S)
MOST_GROWTH_BYTES = 32 * 2**20
PATIENCE_S = 120.0
ENGINE = "tests.gateway.overload:build_engine"


def build_engine(config: EngineConfig, progress: Callable[[float, str], None]) -> Engine:
    words = tiny_tokenizer()
    eos = words.eos_token_ids
    runner = FakeRunner(fake_capacity(2048, 4, max_model_len=MAX_MODEL_LEN), words.vocab_size, eos[0], delay_s=STEP_S)
    facts = fake_facts(words.vocab_size, eos, MAX_MODEL_LEN)
    return Engine(runner, facts, config, words.token_bytes, special_ids=words.special_ids)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    return tiny_tokenizer()


def serve(db: str, port: int) -> int:
    engine = EngineConfig(model="steady", max_num_seqs=SLOTS, max_queued_requests=MOST, max_model_len=MAX_MODEL_LEN)
    server = ServerConfig(port=port, db=db, log_level="warning")
    return run_server(engine, server, build_engine=ENGINE, load=load_tokenizer)


@dataclass
class Report:
    """What was seen, in order. Times are seconds."""

    statuses: Counter[int] = field(default_factory=Counter)
    refusals_s: list[float] = field(default_factory=list)
    polite_s: list[float] = field(default_factory=list)
    livez_s: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def tokens_per_s(self) -> float:
        return self.num_tokens / (time.monotonic() - self.began_s)


class Load:
    """Clients of one server."""

    def __init__(self, port: int, keys: Sequence[str], rng: random.Random) -> None:
        self.port, self.keys, self.rng = port, keys, rng
        self.report = Report()

    async def ask(self, key: str, *, num_tokens: int = NUM_OUTPUT, is_polite: bool = False) -> int:
        """One streamed chat; a refusal is looked at."""
        text = " ".join(str(self.rng.random()) for _ in range(3))
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": num_tokens, "ignore_eos": True}
        data = json.dumps({**body, "stream": True}).encode()
        began_s = time.monotonic()
        status, headers, reader, writer = await self._send("POST", "/v1/chat/completions", data, key)
        try:
            self.report.statuses[status] += 1
            if status != 200:
                await reader.read()
                self.report.refusals_s.append(time.monotonic() - began_s)
                if status not in (429, 503) or "retry-after" not in headers:
                    self.report.wrong.append(f"{status} {headers}")
                return status
            while line := await reader.readline():
                has_text = b'"content":' in line and b'"content":""' not in line
                if has_text and is_polite:
                    self.report.polite_s.append(time.monotonic() - began_s)
                    is_polite = False
                self.report.num_tokens += has_text
            return status
        finally:
            writer.close()

    async def politely(self, key: str, until_s: float) -> None:
        while time.monotonic() < until_s:
            if await self.ask(key, is_polite=True) != 200:
                await asyncio.sleep(1)  # as it was told

    async def flood(self, key: str, until_s: float, per_s: float) -> None:
        """Open loop: nobody waits for anybody."""
        under_way: set[asyncio.Task[int]] = set()
        due_s = time.monotonic()
        while time.monotonic() < until_s:
            due_s += self.rng.expovariate(per_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            task = asyncio.create_task(self.ask(key))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)

    async def watch(self, pids: Sequence[int], until_s: float) -> None:
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            _, _, reader, writer = await self._send("GET", "/livez", b"", "")
            await reader.read()
            self.report.livez_s.append(time.monotonic() - began_s)
            writer.close()
            _, _, reader, writer = await self._send("GET", "/readyz", b"", self.keys[0])
            self.report.waiting.append(json.loads(await reader.read()).get("num_waiting", -1))
            writer.close()
            self.report.resident_bytes.append(sum(map(resident, pids)))
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
        async with asyncio.timeout(PATIENCE_S):
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


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else float("nan")


async def drive(port: int, keys: Sequence[str], pid: int, minutes: float, seed: int) -> list[str]:
    """Run the load; return what was wrong."""
    load = Load(port, keys, random.Random(seed))
    await load.wait_ready()
    short_s = min(30.0, 10 * minutes)

    async def phase(length_s: float, per_s: float, num_busy: int = 0) -> Report:
        load.report = Report()
        until_s = time.monotonic() + length_s
        clients = [load.politely(key, until_s) for key in keys[1:]]
        clients += [load.politely(keys[0], until_s) for _ in range(num_busy)]
        clients += [load.flood(keys[0], until_s, per_s)] if per_s else []
        watching = asyncio.create_task(load.watch([pid, *children(pid)], until_s))
        await asyncio.gather(*clients)
        rate = load.report.tokens_per_s()
        await watching
        print(f"{length_s:.0f} s: {dict(load.report.statuses)}, {rate:.1f} tokens/s", flush=True)
        load.report.num_tokens = int(rate * 1000)
        return load.report

    alone = await phase(short_s, 0)
    peak = await phase(short_s, 0, num_busy=SLOTS)
    beside = await phase(minutes * 60, OVERLOAD * REQUESTS_PER_S)
    settled = len(beside.resident_bytes) // 5  # what is made once, by the first of everything
    growth = max(beside.resident_bytes[settled:]) - beside.resident_bytes[settled]
    print(f"queue: at most {max(beside.waiting)} of {MOST}")
    for name, values in (("refusals", beside.refusals_s), ("/livez", beside.livez_s)):
        print(f"{name}: p50 {percentile(values, 0.5) * 1e3:.1f} ms, p99 {percentile(values, 0.99) * 1e3:.1f} ms")
    print(f"resident memory: +{growth / 2**20:.1f} MiB after the first fifth")
    print(f"goodput: {beside.num_tokens / peak.num_tokens:.0%} of the peak")
    waits = percentile(alone.polite_s, 0.95), percentile(beside.polite_s, 0.95)
    print(f"first token of the others, p95: {waits[0]:.2f} s without the flood, {waits[1]:.2f} s beside it")
    wrong = beside.wrong[:5]
    wrong += [f"{max(beside.waiting)} were waiting"] if max(beside.waiting) > MOST else []
    wrong += [f"memory grew by {growth} bytes"] if growth > MOST_GROWTH_BYTES else []
    wrong += ["nobody was refused"] if not beside.refusals_s else []
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", nargs=2)
    asked = parser.parse_args()
    if asked.serve:
        return serve(asked.serve[0], int(asked.serve[1]))
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        db = str(Path(folder) / "chat.db")
        keys = [give(ServerConfig(db=db), name).key for name in ("flood", *(f"t{at}" for at in range(NUM_POLITE)))]
        command = [sys.executable, "-m", "tests.gateway.overload", "--serve", db, str(port)]
        server = subprocess.Popen(command)
        try:
            wrong = asyncio.run(drive(port, keys, server.pid, asked.minutes, asked.seed))
        finally:
            server.terminate()
            server.wait()
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
