"""Floods of minimal WebSocket frames: the sender is disconnected, others are not delayed."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from websockets.sync.client import connect

from chatcache.gateway import uvicorn_limits as http
from chatcache.gateway.websocket.connection import RATE_LIMITED
from tests.gateway.frames import ask
from tests.gateway.responding import counted, num_tasks
from tests.gateway.serving import Server, wait_until
from tests.gateway.test_thousand import _handshake

PING, PONG, PIECE, FIRST_PIECE = 0x89, 0x8A, 0x00, 0x01


def frame(kind: int, data: bytes = b"") -> bytes:
    return bytes((kind, 0x80 | len(data))) + b"\0\0\0\0" + data


@pytest.fixture
def raw(server: Server) -> Iterator[socket.socket]:
    with server.connect() as connection:
        connection.sendall(_handshake(server.port))
        assert connection.recv(65536).startswith(b"HTTP/1.1 101 ")
        yield connection


def close_code(connection: socket.socket) -> int:
    """Return the code of the close frame; pongs before it are skipped."""
    data = b""
    while part := connection.recv(65536):
        data += part
    while data:
        kind, length = data[0], data[1]
        if kind == 0x88:
            code: int = struct.unpack(">H", data[2:4])[0]
            return code
        assert kind == PONG
        data = data[2 + length :]
    raise AssertionError("it ended without a word")


@pytest.mark.parametrize("kind", [PING, PONG, PIECE])
def test_websocket_frame_flood_is_closed(server: Server, url: str, raw: socket.socket, kind: int) -> None:
    idle = num_tasks(server)
    raw.sendall(frame(FIRST_PIECE) if kind == PIECE else b"")
    with connect(url) as calm:
        raw.sendall(frame(kind) * int(http.MAX_FRAME_BURST + 2_000))
        assert ask(calm, input="Hello")["output"]
    assert close_code(raw) == RATE_LIMITED
    wait_until(lambda: counted(server, "chatcache_ws_connections") == 0, "it to be gone")
    wait_until(lambda: num_tasks(server) < idle, "what served it to end")


def test_message_with_too_many_fragments_is_closed(
    server: Server, raw: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly they arrive."""
    monkeypatch.setattr(http, "MAX_FRAGMENTS", 100)
    raw.sendall(frame(FIRST_PIECE, b"{") + frame(PIECE, b" ") * 99)
    raw.sendall(frame(PIECE) * 2)
    assert close_code(raw) == RATE_LIMITED


def test_message_with_many_fragments_is_accepted(server: Server, url: str) -> None:
    with connect(url) as connection:
        text = '{"type":"response.create","input":"Hello","max_output_tokens":2,"ignore_eos":true}'
        connection.send(iter(text))
        for _ in range(100):
            connection.ping()
        assert '"response.created"' in str(connection.recv(timeout=60))
        assert ask(connection, input="and on")["output"]
