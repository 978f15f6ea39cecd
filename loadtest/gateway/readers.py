"""A process of clients: `python -m loadtest.gateway.readers JSON`. Reads as fast as it can and thinks afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

from loadtest.gateway.figures import Arrivals, Spent, latencies_ms, spread, volume
from loadtest.gateway.ticks import Ticks
from loadtest.gateway.wires import WIRES

_OPEN_AT_ONCE = 64


class _Reader(asyncio.Protocol):
    """Keeps what arrives, with the time."""

    def __init__(self, request: tuple[bytes, bytes]) -> None:
        self._first, self._second = request
        self._is_socket = bool(self._second)
        self.arrivals = Arrivals([], [])
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._first)

    def data_received(self, data: bytes) -> None:
        self.arrivals.at_ns.append(time.monotonic_ns())
        self.arrivals.pieces.append(data)
        if self._second and self.transport is not None:
            self.transport.write(self._second)
            self._second = b""
        ping = data.find(b"\x89\x04")  # a WebSocket's; all else that comes is ASCII but for lengths
        if ping >= 0 and self._is_socket and self.transport is not None:
            self.transport.write(b"\x8a\x84" + bytes(4) + data[ping + 2 : ping + 6])
        if not self.started.done() and b" t" in data:
            self.started.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.started.done():
            said = b"".join(self.arrivals.pieces)[:500]
            self.started.set_exception(ConnectionError(f"closed before its first token: {said!r}"))


async def _open(port: int, request: tuple[bytes, bytes], gate: asyncio.Semaphore) -> _Reader:
    async with gate:
        loop = asyncio.get_running_loop()
        _, reader = await loop.create_connection(lambda: _Reader(request), "127.0.0.1", port)
        await asyncio.wait_for(reader.started, 60)
        return reader


async def _measure(args: dict[str, Any]) -> dict[str, Any]:
    pid, ticks = int(args["pid"]), Ticks(Path(args["ticks"]))
    request, gate = WIRES[args["wire"]](args["port"]), asyncio.Semaphore(_OPEN_AT_ONCE)
    warm = await asyncio.gather(*(_open(args["port"], request, gate) for _ in range(_OPEN_AT_ONCE)))
    rss_before = Spent.of(pid).rss_bytes
    begun_s = time.monotonic()
    readers = [*warm, *await asyncio.gather(
        *(_open(args["port"], request, gate) for _ in range(args["streams"] - _OPEN_AT_ONCE))
    )]  # fmt: skip
    opening_s = time.monotonic() - begun_s
    await asyncio.sleep(args["settle_s"])
    before, mine, begun_ns = Spent.of(pid), time.process_time(), time.monotonic_ns()
    rss_open = before.rss_bytes
    await asyncio.sleep(args["window_s"])
    after, my_s, ended_ns = Spent.of(pid), time.process_time() - mine, time.monotonic_ns()
    for reader in readers:
        assert reader.transport is not None
        reader.transport.abort()
    arrived = latencies_ms([reader.arrivals for reader in readers], ticks.at_ns, begun_ns, ended_ns)
    window_s = (ended_ns - begun_ns) * 1e-9
    num_tokens, cpu_s = len(arrived), after.cpu_s - before.cpu_s
    num_reads, num_bytes = volume([reader.arrivals for reader in readers], begun_ns, ended_ns)
    return {
        "streams": len(readers),
        "window_s": round(window_s, 3),
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / window_s, 1),
        "cpu_us_per_token": round(cpu_s / num_tokens * 1e6, 3),
        "user_us_per_token": round((after.user_s - before.user_s) / num_tokens * 1e6, 3),
        "core_share": round(cpu_s / window_s, 4),
        "waited_share": round((after.waited_s - before.waited_s) / window_s, 4),
        "latency_ms": spread(np.asarray(arrived)),
        "bytes_per_token": round(num_bytes / num_tokens, 1),
        "reads_per_token": round(num_reads / num_tokens, 3),
        "rss_per_stream_kib": round((rss_open - rss_before) / (len(readers) - len(warm)) / 1024, 1),
        "opening_s": round(opening_s, 2),
        "client_core_share": round(my_s / window_s, 4),
    }


def main() -> int:
    args = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {args["core"]})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(_measure(args))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
