"""The process of clients: open streams, keep all bytes, and evaluate them afterwards.

Linux only: CPU time and memory of the server are read from /proc.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop
from numpy.typing import NDArray

from chatcache.bench.report import percentiles
from loadtest.gateway.ticks import NUM_TICKS, TickTimes

MAX_TOKENS = 20_000
MAX_OPENING = 64
PROMPT = "Tell me about the tide, please."
LATENCY_PERCENTILES = (50, 90, 99, 99.9)
Int64s = NDArray[np.int64]
_TOKEN = re.compile(rb" t([0-9a-f]{4})")
_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


# -- requests -----------------------------------------------------------------------------------------------------


def _post(path: str, body: dict[str, object], port: int) -> tuple[bytes, bytes]:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data, b""


def chat(port: int) -> tuple[bytes, bytes]:
    """Return the request for a streamed chat completion; as every entry of `TRANSPORTS`."""
    messages = [{"role": "user", "content": PROMPT}]
    return _post("/v1/chat/completions", {"messages": messages, "stream": True, "max_tokens": MAX_TOKENS}, port)


def responses(port: int) -> tuple[bytes, bytes]:
    """Return the request for a streamed response; as every entry of `TRANSPORTS`."""
    body: dict[str, object] = {"input": PROMPT, "stream": True, "store": False, "max_output_tokens": MAX_TOKENS}
    return _post("/v1/responses", body, port)


def websocket(port: int) -> tuple[bytes, bytes]:
    """Return the bytes of a WebSocket handshake, and of the first message after it."""
    handshake = (
        f"GET /v1/responses HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        f"sec-websocket-version: 13\r\nsec-websocket-key: {base64.b64encode(bytes(16)).decode()}\r\n\r\n"
    ).encode()
    body = {
        "type": "response.create",
        "input": PROMPT,
        "store": False,
        "ignore_eos": True,
        "max_output_tokens": MAX_TOKENS,
    }
    text = json.dumps(body).encode()
    assert 125 < len(text) < 1 << 16
    return handshake, b"\x81\xfe" + len(text).to_bytes(2, "big") + bytes(4) + text  # masked with zeros


TRANSPORTS: dict[str, Callable[[int], tuple[bytes, bytes]]] = {
    "chat": chat,
    "responses": responses,
    "websocket": websocket,
}
"""By name: from the server's port, the bytes to send at once, and those to send after the server's first answer."""


# -- evaluation ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """CPU time and memory of a process since its start.

    `waited_s`: ready to run while its core ran something else.
    """

    cpu_s: float
    user_s: float
    waited_s: float
    rss_bytes: int

    @staticmethod
    def of(pid: int) -> ProcessUsage:
        ran_ns = waited_ns = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            ran, waited, _ = (task / "schedstat").read_text().split()
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return ProcessUsage(ran_ns * 1e-9, int(fields[11]) / _CLOCK_TICKS_PER_S, waited_ns * 1e-9, rss)


@dataclass(slots=True)
class Arrivals:
    """The bytes that one stream received, in pieces, and the time of each (monotonic, ns)."""

    pieces: list[bytes]
    at_ns: list[int]

    def tokens(self) -> tuple[Int64s, Int64s]:
        """Return (tick modulo NUM_TICKS, arrival time) of each token, in order."""
        ends = np.cumsum([len(piece) for piece in self.pieces])
        found = [(int(match[1], 16), match.end()) for match in _TOKEN.finditer(b"".join(self.pieces))]
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        ticks, at = np.array(found, np.int64).T
        arrivals: Int64s = np.array(self.at_ns, np.int64)[np.searchsorted(ends, at)]
        return ticks, arrivals


def latencies_ms(streams: list[Arrivals], tick_at_ns: Int64s, start_ns: int, end_ns: int) -> NDArray[np.float64]:
    """Return the time from emission to receipt of each token received in the given window.

    Raises: ValueError if a stream repeated a token.
    """
    latencies: list[NDArray[np.float64]] = []
    for stream in streams:
        ticks, arrived = stream.tokens()
        inside = (arrived >= start_ns) & (arrived < end_ns)
        ticks, arrived = ticks[inside] % NUM_TICKS, arrived[inside]
        if np.any(np.diff(ticks) <= 0):
            raise ValueError("a stream repeated a token")
        latencies.append((arrived - tick_at_ns[ticks]) / 1e6)
    return np.concatenate(latencies) if latencies else np.empty(0)


def count_reads(streams: list[Arrivals], start_ns: int, end_ns: int) -> tuple[int, int]:
    """Return the numbers of socket reads and of bytes received from `start_ns` until `end_ns`."""
    sizes = [
        len(piece)
        for stream in streams
        for piece, at_ns in zip(stream.pieces, stream.at_ns, strict=True)
        if start_ns <= at_ns < end_ns
    ]
    return len(sizes), sum(sizes)


# -- streams ------------------------------------------------------------------------------------------------------


class _Reader(asyncio.Protocol):
    """Opens one stream and records all received bytes with their arrival times."""

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
        ping = data.find(b"\x89\x04")  # of a WebSocket; everything else is ASCII except lengths
        if ping >= 0 and self._is_socket and self.transport is not None:
            self.transport.write(b"\x8a\x84" + bytes(4) + data[ping + 2 : ping + 6])
        if not self.started.done() and b" t" in data:
            self.started.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.started.done():
            received = b"".join(self.arrivals.pieces)[:500]
            self.started.set_exception(ConnectionError(f"closed before its first token: {received!r}"))


async def _open(port: int, request: tuple[bytes, bytes], slots: asyncio.Semaphore) -> _Reader:
    async with slots:
        loop = asyncio.get_running_loop()
        _, reader = await loop.create_connection(lambda: _Reader(request), "127.0.0.1", port)
        await asyncio.wait_for(reader.started, 60)
        return reader


async def _measure(args: dict[str, Any]) -> dict[str, Any]:
    pid, ticks = int(args["pid"]), TickTimes(Path(args["ticks"]))
    request, slots = TRANSPORTS[args["transport"]](args["port"]), asyncio.Semaphore(MAX_OPENING)
    warm = await asyncio.gather(*(_open(args["port"], request, slots) for _ in range(MAX_OPENING)))
    rss_before = ProcessUsage.of(pid).rss_bytes
    opening = time.monotonic()
    rest = (_open(args["port"], request, slots) for _ in range(args["streams"] - len(warm)))
    readers = [*warm, *await asyncio.gather(*rest)]
    opening_s = time.monotonic() - opening
    await asyncio.sleep(args["settle_s"])
    before, own_start_s, start_ns = ProcessUsage.of(pid), time.process_time(), time.monotonic_ns()
    await asyncio.sleep(args["window_s"])
    after, own_s, end_ns = ProcessUsage.of(pid), time.process_time() - own_start_s, time.monotonic_ns()
    for reader in readers:
        assert reader.transport is not None
        reader.transport.abort()
    arrivals = [reader.arrivals for reader in readers]
    latencies = latencies_ms(arrivals, ticks.at_ns, start_ns, end_ns)
    num_reads, num_bytes = count_reads(arrivals, start_ns, end_ns)
    window_s, num_tokens, cpu_s = (end_ns - start_ns) * 1e-9, len(latencies), after.cpu_s - before.cpu_s
    return {
        "streams": len(readers),
        "window_s": round(window_s, 3),
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / window_s, 1),
        "cpu_us_per_token": round(cpu_s / num_tokens * 1e6, 3),
        "user_us_per_token": round((after.user_s - before.user_s) / num_tokens * 1e6, 3),
        "core_share": round(cpu_s / window_s, 4),
        "waited_share": round((after.waited_s - before.waited_s) / window_s, 4),
        "latency_ms": percentiles(cast(list[float], latencies), LATENCY_PERCENTILES, digits=3),
        "bytes_per_token": round(num_bytes / num_tokens, 1),
        "reads_per_token": round(num_reads / num_tokens, 3),
        "rss_per_stream_kib": round((before.rss_bytes - rss_before) / (len(readers) - len(warm)) / 1024, 1),
        "opening_s": round(opening_s, 2),
        "client_core_share": round(own_s / window_s, 4),
    }


def main() -> int:
    """Run the measurement that the command line describes as JSON; print the result as JSON."""
    args = json.loads(sys.argv[1])
    os.sched_setaffinity(0, {args["core"]})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(_measure(args))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
