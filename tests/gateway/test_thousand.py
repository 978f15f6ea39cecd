"""Goal G4: a thousand clients disconnect at every moment and leave no trace.

All ways to disconnect x all transports x all request phases: no page, task or socket remains, and the text of a
reference client is unchanged.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from chatcache.config import EngineConfig, ServerConfig
from chatcache.gateway import uvicorn_limits as http
from tests.gateway.responding import counted, num_running, num_tasks
from tests.gateway.serving import Server, post_bytes, wait_until

pytestmark = pytest.mark.slow

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
WAYS = ("fin", "rst", "stall")
WIRES = ("chat", "chat stream", "response", "response stream", "socket")
PHASES = ("queued", "prefill", "decode", "forked")
EVERY = tuple(itertools.product(WAYS, WIRES, PHASES))
AT_ONCE = 30
SONG: dict[str, Any] = {
    "max_tokens": 60,
    "ignore_eos": True,
    "seed": 5,
    "messages": [{"role": "user", "content": "Sing"}],
}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a few slots for thirty requests and chunked prefill."""
    config = ServerConfig(db=str(tmp_path_factory.mktemp("db") / "c.db"), disconnect_grace_period_s=0.2)
    engine_config = EngineConfig(max_num_seqs=12, max_num_batched_tokens=64)
    with Server(config, engine_config=engine_config) as server:
        # The first stream starts what runs as long as the server is there.
        server.wait_ready().stream(RESPONSES, input="Hi", max_output_tokens=1)
        server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # handed on to every connection
        yield server


class Cut:
    """A raw client with a 4 KiB receive buffer."""

    def __init__(self, server: Server, way: str, wire: str, phase: str, origin: str, draws: random.Random) -> None:
        self._server, self._way, self._wire, self._phase = server, way, wire, phase
        self._origin, self._draws = origin, draws

    def _bytes(self) -> bytes:
        text = "word " * 120 if self._phase == "prefill" else "Hi"
        more = {"ignore_eos": True, "n": self._draws.choice((1, 4)), "stream": "stream" in self._wire}
        place = {"previous_item_id": self._origin, "fork_at": self._draws.choice((1, 5, 20))}
        place = place if self._phase == "forked" else {}
        if self._wire.startswith("chat"):
            return self._post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 150, **more})
        body = {"input": text, "max_output_tokens": 150, "store": self._draws.random() < 0.5, **more, **place}
        if self._wire == "socket":
            return _framed(json.dumps({"type": "response.create", **body}).encode())
        return self._post(RESPONSES, body)

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        return post_bytes(self._server.port, path, json.dumps(body).encode())

    async def live(self, until: asyncio.Event) -> None:
        """Ask, wait for the moment, and go."""
        loop = asyncio.get_running_loop()
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        try:
            await loop.sock_connect(raw, ("127.0.0.1", self._server.port))
            if self._wire == "socket":
                await loop.sock_sendall(raw, _handshake(self._server.port))
                assert (await loop.sock_recv(raw, 600)).startswith(b"HTTP/1.1 101 ")
            await loop.sock_sendall(raw, self._bytes())
            if self._phase in ("decode", "forked") and self._wire not in ("chat", "response"):
                for _ in range(self._draws.choice((2, 4))):
                    await loop.sock_recv(raw, 600)
            await asyncio.sleep(self._draws.choice((0.0, 0.02, 0.1)))
            if self._way == "stall":
                await until.wait()
        finally:
            if self._way == "rst":
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw.close()


def _handshake(port: int) -> bytes:
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET {RESPONSES} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        f"sec-websocket-key: {key}\r\nsec-websocket-version: 13\r\n\r\n"
    ).encode()


def _framed(data: bytes) -> bytes:
    mask = os.urandom(4)
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
    return b"\x81" + struct.pack(">BH", 0x80 | 126, len(data)) + mask + masked


async def _batch(server: Server, batch: list[tuple[str, str, str]], origin: str, draws: random.Random) -> None:
    until = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        stalled = [group.create_task(Cut(server, *each, origin, draws).live(until)) for each in batch]
        others = [task for task, each in zip(stalled, batch, strict=True) if each[0] != "stall"]
        if others:
            await asyncio.wait(others)
        until.set()


def _sing(server: Server) -> str:
    text: str = server.post(CHAT, **SONG)[2]["choices"][0]["message"]["content"]
    return text


def _cut(server: Server, num_clients: int, seed: int) -> None:
    draws = random.Random(seed)
    expected = _sing(server)
    origin = server.post(RESPONSES, input="Hello", max_output_tokens=30, ignore_eos=True)[2]["output"][0]["id"]
    idle = num_tasks(server)
    every = list(itertools.islice(itertools.cycle(EVERY), num_clients))
    draws.shuffle(every)
    songs: list[str] = []

    async def all_of_them() -> None:
        going_on = True

        async def sing() -> None:
            while going_on:
                songs.append(await asyncio.to_thread(_sing, server))

        singer = asyncio.create_task(sing())
        for at in range(0, len(every), AT_ONCE):
            await _batch(server, every[at : at + AT_ONCE], origin, draws)
        going_on = False
        await singer

    server.runner.delay_s = 0.001
    try:
        asyncio.run(all_of_them())
    finally:
        server.runner.delay_s = 0.0
    assert set(songs) == {expected}
    wait_until(lambda: num_running(server) == 0, "every response to end", timeout_s=60)
    server.wait_idle()
    wait_until(lambda: counted(server, "chatcache_ws_connections") == 0, "every socket to be noticed gone")
    wait_until(lambda: num_tasks(server) <= idle, "every task to end")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_TIMEOUT_S", 1.0)


def test_clients_disconnected_in_every_way_leave_no_trace(busy: Server) -> None:
    _cut(busy, 2 * len(EVERY), seed=4)


@pytest.mark.long
def test_thousand_disconnected_clients_leave_no_trace(busy: Server) -> None:
    _cut(busy, 17 * len(EVERY), seed=5)
