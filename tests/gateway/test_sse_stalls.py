"""SSE clients that stop reading.

Their memory is bounded, they are disconnected after a timeout, and other clients are unaffected.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache.config import ServerConfig
from chatcache.gateway import uvicorn_limits as http
from tests.gateway.serving import Server, post_bytes, read_all, slowed, wait_until

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
DONE = b"data: [DONE]"
NUM_STALLED = 200
NUM_HEAVY = 40
NUM_LIVE = 20
USER = [{"role": "user", "content": "Hi"}]
LIVE = {"messages": USER, "max_tokens": 40, "ignore_eos": True, "seed": 3}
# Two kilobytes a token: more than all buffers on the way hold.
HEAVY = {"messages": USER, "max_tokens": 200, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
HEAVY_RESPONSE = {"input": "Hi", "max_output_tokens": 400, "ignore_eos": True, "top_logprobs": 20,
                  "include": ["message.output_text.logprobs"]}  # fmt: skip


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("db")
    config = ServerConfig(db=str(path / "chat.db"), disconnect_grace_period_s=0.2, sse_keep_alive_interval_s=0)
    with Server(config, num_pages=32_768) as server:
        server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # handed on to every connection
        yield server.wait_ready()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_TIMEOUT_S", 1.0)


def stalled_client(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A client whose kernel takes 4 KiB and whose owner reads nothing."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(60)
    raw.connect(("127.0.0.1", server.port))
    raw.sendall(post_bytes(server.port, path, json.dumps({**body, "stream": True}).encode()))
    return raw


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def num_left(server: Server) -> float:
    """Clients that went before the end."""
    return float(server.gateway.metrics.disconnects._value.get())


def events(body: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def said(body: bytes) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in events(body))


@pytest.mark.slow
def test_sse_with_200_stalled_clients_serves_20_live_clients(server: Server) -> None:
    """A shorter run of G5."""
    expected = said(server.stream(CHAT, **LIVE)[1])
    texts: list[str] = []
    rss_before = rss_bytes()
    with contextlib.ExitStack() as stack:
        stalled = [
            stack.enter_context(contextlib.closing(stalled_client(server, CHAT, HEAVY if number < NUM_HEAVY else LIVE)))
            for number in range(NUM_STALLED)
        ]
        threads = [
            threading.Thread(target=lambda: texts.append(said(server.stream(CHAT, **LIVE)[1]))) for _ in range(NUM_LIVE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        grown = rss_bytes() - rss_before
        assert texts == [expected] * NUM_LIVE
        assert grown < 64 * 2**20, f"{grown / 2**20:.0f} MiB"
        wait_until(lambda: not server._uvicorn.server_state.connections, "the stalled to be given up", timeout_s=60)
        wait_until(lambda: server.num_pages_in_use() == 0, "their pages to come back")
        # The heavy streams were cut off; the other streams fit the socket buffers and are read from there.
        bodies = [read_all(raw) for raw in stalled]
        assert [DONE in body for body in bodies] == [False] * NUM_HEAVY + [True] * (NUM_STALLED - NUM_HEAVY)


def test_sse_stream_not_read_by_client_is_aborted(server: Server) -> None:
    """The generation takes several seconds; the stall timeout is one second."""
    left_before = num_left(server)
    body = {**HEAVY, "n": 8, "max_tokens": 900}
    with slowed(server, 0.01), contextlib.closing(stalled_client(server, CHAT, body)):
        wait_until(lambda: server.num_pages_in_use() > 0, "it to begin")
        wait_until(lambda: num_left(server) - left_before == 1, "the stalled to be given up", timeout_s=60)
        wait_until(lambda: server.num_pages_in_use() == 0, "its pages to come back")


def test_a_stored_response_outlives_its_stalled_reader(server: Server) -> None:
    """Its log can be followed from wherever that reader got to."""
    with contextlib.closing(stalled_client(server, RESPONSES, HEAVY_RESPONSE)) as raw:
        data = b""
        while (found := re.search(rb'"id":"(resp_[^"]+)"', data)) is None:
            data += raw.recv(4096)
        response_id = found[1].decode()
        wait_until(lambda: not server.gateway.responses.running(), "the response to end", timeout_s=60)
    status, _, text = server.request("GET", f"/v1/responses/{response_id}?stream=true&starting_after=1")
    assert status == 200
    rest = events(text.encode())
    assert [event["sequence_number"] for event in rest] == list(range(2, 2 + len(rest)))
    deltas = "".join(event["delta"] for event in rest if event["type"] == "response.output_text.delta")
    assert rest[-1]["type"] in ("response.completed", "response.incomplete")
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == deltas
