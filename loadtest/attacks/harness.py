"""The attacked server, the requests of another tenant, and the figures of one attack.

All processes share the processors of the machine. Therefore the attacking process has the lowest priority and does
little itself, and a request that the engine takes no part in ("read") shows what the gateway alone makes of the attack.

    idle | attack begins, settle | attacked | attack ends, settle | idle

The idle times before and after are one baseline. A p99 of few requests is one of the worst samples, so attacks on the
engine are measured `ENGINE_FACTOR` times as long. They begin `ENGINE_SETTLE_FACTOR` times as long before: alone, their
first requests compute most of their tokens, so that they end, which is the work of the gateway, while other clients are
measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from chatcache.bench.report import Figure, compare, percentiles

MAX_P99_RATIO = 2.0
MAX_GROWTH_MIB = 64.0
ENGINE_FACTOR = 4
ENGINE_SETTLE_FACTOR = 3
_START_TIMEOUT_S = 120.0
_PAUSE_S = 0.02
_STREAM_TOKENS = 200
_MAX_WAIT_S = 120.0

Run = Callable[["Target"], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Target:
    """A running server. The attacker and the victim belong to different tenants."""

    port: int
    pid: int
    attacker_key: str
    victim_key: str

    def client(self, key: str) -> httpx.AsyncClient:
        """Return an HTTP client of a tenant without limits on connections or on the time of a request."""
        return httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"authorization": f"Bearer {key}"},
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    def attacker(self) -> httpx.AsyncClient:
        return self.client(self.attacker_key)

    def rss_mib(self) -> float:
        """Return the resident memory of the gateway process."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_s(self) -> float:
        """Return the CPU time that the gateway process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    `run`, a function of a module, attacks until its process is killed. `run_load`, if the attack has the engine compute
    a lot: the same requests without what makes them expensive for the gateway. All clients share the engine with them,
    so that others are also compared with what they notice of this load.
    """

    name: str
    summary: str
    run: Run
    run_load: Run | None = None


@dataclass(slots=True)
class VictimTimes:
    """Seconds that the requests of the victim took, and what part of a processor the gateway used meanwhile."""

    responses_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    reads_s: list[float] = field(default_factory=list)
    gateway_cpu: float = 0.0

    def __add__(self, other: VictimTimes) -> VictimTimes:
        """Return the times of two measurements of the same length."""
        return VictimTimes(
            self.responses_s + other.responses_s,
            self.gaps_s + other.gaps_s,
            self.reads_s + other.reads_s,
            (self.gateway_cpu + other.gateway_cpu) / 2,
        )

    def p99_ms(self) -> dict[str, float]:
        """Return the 99th percentile by kind of request."""
        return {kind: percentiles(each, (99,), scale=1000.0)["p99"] for kind, each in self.by_kind().items() if each}

    def by_kind(self) -> dict[str, list[float]]:
        """Return the seconds by kind of request."""
        return {"response": self.responses_s, "token gap": self.gaps_s, "read": self.reads_s}


@contextlib.contextmanager
def running_server() -> Iterator[Target]:
    """Start `chatcache serve` with the demo model and one key each for the attacker and the victim."""
    with tempfile.TemporaryDirectory() as folder:
        database = str(Path(folder) / "chat.db")
        keys = [_create_key(tenant, database) for tenant in ("attacker", "victim")]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port: int = probe.getsockname()[1]
        command = [sys.executable, "-m", "chatcache", "serve", "--port", str(port), "--db", database]
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder, env=_environment())
        try:
            _wait_ready(f"http://127.0.0.1:{port}/readyz", process)
            yield Target(port, process.pid, *keys)
        except BaseException:
            sys.stderr.write(log.read_text(errors="replace")[-4000:])
            raise
        finally:
            process.terminate()
            process.wait(60)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _create_key(tenant: str, database: str) -> str:
    command = [sys.executable, "-m", "chatcache", "keys", "create", "--tenant", tenant, "--db", database, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=_environment())
    key: str = json.loads(done.stdout)["key"]
    return key


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            if time.monotonic() > deadline_s or process.poll() is not None:
                raise
            time.sleep(0.1)


async def measure_victim(target: Target, seconds: float) -> VictimTimes:
    """Send short responses, one stream after another and reads as the victim, for `seconds`.

    Raises: TimeoutError if a request has not ended `_MAX_WAIT_S` later.
    """
    times, start_s, cpu_s = VictimTimes(), time.monotonic(), target.cpu_s()
    async with asyncio.timeout(seconds + _MAX_WAIT_S), target.client(target.victim_key) as http:
        await asyncio.gather(*(send(http, times, start_s + seconds) for send in (_respond, _stream, _read)))
    times.gateway_cpu = (target.cpu_s() - cpu_s) / (time.monotonic() - start_s)
    return times


async def _respond(http: httpx.AsyncClient, times: VictimTimes, deadline_s: float) -> None:
    while time.monotonic() < deadline_s:
        start_s = time.perf_counter()
        response = await http.post(
            "/v1/responses", json={"input": f"hi {secrets.token_hex(2)}", "max_output_tokens": 2}
        )
        response.raise_for_status()
        times.responses_s.append(time.perf_counter() - start_s)
        await asyncio.sleep(_PAUSE_S)


async def _read(http: httpx.AsyncClient, times: VictimTimes, deadline_s: float) -> None:
    while time.monotonic() < deadline_s:
        start_s = time.perf_counter()
        (await http.get("/v1/models")).raise_for_status()
        times.reads_s.append(time.perf_counter() - start_s)
        await asyncio.sleep(_PAUSE_S)


async def _stream(http: httpx.AsyncClient, times: VictimTimes, deadline_s: float) -> None:
    body = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": _STREAM_TOKENS,
    }
    while time.monotonic() < deadline_s:
        last_s: float | None = None
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now_s = time.perf_counter()
                if last_s is not None:
                    times.gaps_s.append(now_s - last_s)
                last_s = now_s


async def measure_attack(attack: Attack, target: Target, seconds: float, settle_s: float) -> list[Figure]:
    """Return the figures of `latency_figures`, and the memory after the attack next to that before."""
    await measure_victim(target, settle_s)  # warm caches before memory and latency are read
    rss_before = target.rss_mib()
    num_seconds, begin_s = seconds, settle_s
    if attack.run_load is not None:
        num_seconds, begin_s = ENGINE_FACTOR * seconds, ENGINE_SETTLE_FACTOR * settle_s
    before = await measure_victim(target, num_seconds / 2)
    loaded: VictimTimes | None = None
    if attack.run_load is not None:
        loaded = await _measure_during(attack.run_load, target, seconds, begin_s)
        await asyncio.sleep(settle_s)
    attacked = await _measure_during(attack.run, target, num_seconds, begin_s)
    await asyncio.sleep(settle_s)
    rss_after = target.rss_mib()
    idle = before + await measure_victim(target, num_seconds / 2)
    growth = max(0.0, rss_after - rss_before)
    name = f"{attack.name}: memory growth ({rss_before:.0f} to {rss_after:.0f} MiB)"
    memory = compare(name, growth, "MiB", MAX_GROWTH_MIB, "limit", "<= 1")
    return [*latency_figures(attack.name, idle, loaded, attacked), memory]


def latency_figures(name: str, idle: VictimTimes, loaded: VictimTimes | None, attacked: VictimTimes) -> list[Figure]:
    """Return the victim's p99, and the CPU time of the gateway, next to those without the attack.

    With `loaded`, they are also compared with the times during the load without the attack.
    """
    goal, idle_ms, figures = f"<= {MAX_P99_RATIO:g}", idle.p99_ms(), list[Figure]()
    num_measured = {kind: len(values) for kind, values in attacked.by_kind().items()}
    for kind, value in attacked.p99_ms().items():
        title = f"{name}: p99 of a {kind} ({num_measured[kind]})"
        figures.append(compare(title, value, "ms", idle_ms[kind], "idle", goal))
        if loaded is not None:
            figures.append(compare(title, value, "ms", loaded.p99_ms()[kind], "same load", goal))
    base, against = (idle, "idle") if loaded is None else (loaded, "same load")
    figures.append(
        compare(f"{name}: processors used by the gateway", attacked.gateway_cpu, "", base.gateway_cpu, against)
    )
    return figures


async def _measure_during(run: Run, target: Target, seconds: float, begin_s: float) -> VictimTimes:
    """Measure the victim from `begin_s` on while another process runs."""
    with _running(run, target):
        await asyncio.sleep(begin_s)
        return await measure_victim(target, seconds)


@contextlib.contextmanager
def _running(run: Run, target: Target) -> Iterator[None]:
    """Run an attack meanwhile, in a process of its own.

    It has the lowest priority, as if it ran on another machine: what counts is the work of the server.
    Raises: RuntimeError if the attack ended by itself.
    """
    process = multiprocessing.get_context("spawn").Process(target=_run_nice, args=(run, target))
    process.start()
    try:
        yield
        if process.exitcode is not None:
            raise RuntimeError(f"the attack ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _run_nice(run: Run, target: Target) -> None:
    os.nice(19)
    asyncio.run(run(target))


async def repeat(
    connections: int, send: Callable[[httpx.AsyncClient, int], Coroutine[Any, Any, None]], target: Target
) -> None:
    """Call `send(client, number of the connection)` again and again on each of several connections of the attacker."""

    async def one(http: httpx.AsyncClient, number: int) -> None:
        while True:
            await send(http, number)

    async with target.attacker() as http, asyncio.TaskGroup() as group:
        for number in range(connections):
            group.create_task(one(http, number))
