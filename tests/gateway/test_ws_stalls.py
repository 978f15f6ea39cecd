"""Clients that stop reading or vanish: bounded memory, freed pages, no effect on others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import ClientConnection, connect

from chatcache.config import ServerConfig
from chatcache.gateway import uvicorn_limits as http
from tests.gateway.frames import LONG, Frame, ask, receive, send, text_of, until_end
from tests.gateway.serving import Server, slowed, wait_until

NUM_STALLED = 200
NUM_HEAVY = 20
NUM_LIVE = 20
# A frame of a kilobyte, so that what is not read soon fills all buffers on the way.
HEAVY: Frame = {"include": ["message.output_text.logprobs"], "top_logprobs": 10, "max_output_tokens": 100}


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("db")
    config = ServerConfig(db=str(path / "chat.db"), disconnect_grace_period_s=0.2)
    with Server(config, num_pages=32_768) as server:
        yield server.wait_ready()


def stalled_client(port: int, body: Frame) -> socket.socket:
    """Open a raw WebSocket with a 4 KiB receive buffer that reads only the handshake."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(60)
    raw.connect(("127.0.0.1", port))
    key = base64.b64encode(os.urandom(16)).decode()
    raw.sendall(
        f"GET /v1/responses HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        f"sec-websocket-key: {key}\r\nsec-websocket-version: 13\r\n\r\n".encode()
    )
    while not raw.recv(1, socket.MSG_PEEK):
        pass
    data = json.dumps({"type": "response.create", **body}).encode()
    mask = os.urandom(4)
    masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
    raw.sendall(b"\x81" + struct.pack(">BH", 0x80 | 126, len(data)) + mask + masked)
    return raw


def rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def num_readers(server: Server) -> int:
    return sum(run.log.num_readers for run in server.gateway.responses.running())


@pytest.mark.slow
def test_stalled_readers_do_not_affect_live_readers(server: Server, url: str) -> None:
    """Goal G5, shortened: stalled readers cost little and can resume."""
    body = {**LONG, "max_output_tokens": 40, "seed": 3}
    with connect(url) as alone:
        expected = text_of(ask(alone, **body))
    texts: list[str] = []

    def live() -> None:
        with connect(url, max_queue=None) as connection:
            texts.append(text_of(ask(connection, **body)))

    before = rss_bytes()
    with contextlib.ExitStack() as stack:
        stalled = [
            stack.enter_context(
                contextlib.closing(stalled_client(server.port, {**body, **HEAVY} if number < NUM_HEAVY else body))
            )
            for number in range(NUM_STALLED)
        ]
        threads = [threading.Thread(target=live) for _ in range(NUM_LIVE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        grown = rss_bytes() - before
        wait_until(lambda: not server.gateway.responses.running(), "all responses to end", timeout_s=60)
        assert texts == [expected] * NUM_LIVE
        assert grown < 64 * 2**20, f"{grown / 2**20:.0f} MiB"
        ended = server.gateway.responses.num_ended_bytes
        assert ended < 32 * 2**20, f"{ended / 2**20:.0f} MiB of logs"
        wait_until(lambda: num_sockets(server) == len(stalled), "the live clients to be gone")
    wait_until(lambda: num_sockets(server) == 0, "all to go")
    found = server.call(responses_of(server))
    assert len(found) >= NUM_STALLED
    with connect(url, subprotocols=["chatcache.v1"], max_queue=None) as page:  # type: ignore[list-item]
        for response_id in random.Random(1).sample(found, 5):
            send(page, "response.resume", response_id=response_id)
            assert text_of(until_end(page)[-1]["response"]).startswith(expected.rstrip("\ufffd"))  # heavy ones go on


@pytest.mark.slow
def test_stalled_reader_is_disconnected_and_can_resume(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "STALL_TIMEOUT_S", 0.5)
    body = {**LONG, **HEAVY, "max_output_tokens": 200, "top_logprobs": 20, "n": 6}
    with contextlib.closing(stalled_client(server.port, body)):
        wait_until(lambda: num_sockets(server) == 1, "the client to be there")
        wait_until(lambda: num_sockets(server) == 0, "the client to be given up", timeout_s=60)
        wait_until(lambda: not server.gateway.responses.running(), "its response to end", timeout_s=60)
    (response_id,) = server.call(responses_of(server))[-1:]
    with connect(url, subprotocols=["chatcache.v1"], max_size=None, max_queue=None) as page:  # type: ignore[list-item]
        send(page, "response.resume", response_id=response_id)
        assert len(until_end(page)[-1]["response"]["output"]) == 6


async def responses_of(server: Server) -> list[str]:
    return list(server.gateway.responses._ended)


def num_sockets(server: Server) -> int:
    text = server.request("GET", "/metrics")[2]
    line = next(line for line in text.splitlines() if line.startswith("chatcache_ws_connections"))
    return int(float(line.split()[-1]))


def leave(connection: ClientConnection, how: str) -> None:
    raw = connection.socket
    if how == "rst":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
    elif how == "fin":
        raw.shutdown(socket.SHUT_RDWR)
    elif how == "half":
        raw.shutdown(socket.SHUT_WR)
    else:
        connection.close()


@pytest.mark.parametrize("how", ["close", "fin", "half", "rst"])
@pytest.mark.parametrize("store", [True, False])
def test_clients_disconnecting_at_every_phase_leave_no_trace(server: Server, url: str, how: str, store: bool) -> None:
    """Goal G4 for WebSockets, at the size of a test.

    Clients disconnect while queued, prefilling, decoding or forked; a reference request is unaffected.
    """
    draws = random.Random(f"{how}{store}")
    reference: list[str] = []
    prompt = {**LONG, "max_output_tokens": 60, "seed": 5}
    with connect(url) as alone:
        expected = text_of(ask(alone, **prompt))

    def sing() -> None:
        with connect(url) as connection:
            reference.append(text_of(ask(connection, **prompt)))

    with slowed(server, 0.005):
        thread = threading.Thread(target=sing)
        thread.start()
        for number in range(12):
            with contextlib.suppress(Exception), connect(url, close_timeout=0.1, max_queue=None) as connection:
                text = "A long prompt to be read. " * (12 if number % 3 == 0 else 1)
                send(connection, **{**LONG, "max_output_tokens": 150}, n=draws.choice([1, 4]), input=text, store=store)
                for _ in range(draws.choice([0, 1, 2, 8, 15])):
                    receive(connection)
                leave(connection, how)
        thread.join(60)
    server.wait_idle()
    assert reference == [expected]
    wait_until(lambda: num_sockets(server) == 0, "every socket to be noticed gone")
    wait_until(lambda: not server.gateway.responses.running(), "the last response to be stored")
    wait_until(lambda: not server.call(leftovers()), "its task to end")


async def leftovers() -> list[str]:
    """Return the names of response tasks that still exist."""
    names = [task.get_name() for task in asyncio.all_tasks()]
    return [name for name in names if name.startswith("resp_")]
