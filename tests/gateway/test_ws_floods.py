"""Floods of minimal or large WebSocket frames: the sender is disconnected, others are not delayed."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame as Frames
from websockets.frames import Opcode
from websockets.sync.client import ClientConnection, connect

from chatcache.config import ServerConfig
from chatcache.gateway import uvicorn_limits as http
from chatcache.gateway.limits import admission
from chatcache.gateway.responses.run import LiveResponse
from chatcache.gateway.websocket import streams as lanes
from chatcache.gateway.websocket.connection import RATE_LIMITED
from tests.gateway.frames import LONG, Frame, ask, receive
from tests.gateway.keyed import give
from tests.gateway.responding import counted, num_tasks
from tests.gateway.serving import Server, slowed, wait_until
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
    """Return the code of the close frame; pongs, and pings that a slow test gets, are skipped."""
    data = b""
    while part := connection.recv(65536):
        data += part
    while data:
        kind, length = data[0], data[1]
        if kind == 0x88:
            code: int = struct.unpack(">H", data[2:4])[0]
            return code
        assert kind in (PING, PONG)
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


def create_frame(stream: str, num_bytes: int = 0, **fields: object) -> str:
    return json.dumps({"type": "response.create", "stream_id": stream, **LONG, "x": "a" * num_bytes, **fields})


def error_and_close_code(connection: ClientConnection) -> tuple[Frame, int | None]:
    """Return the last error frame and the code that closed the connection."""
    errors: list[Frame] = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            frame = receive(connection)
            errors += [frame] if frame["type"] == "error" else []
    return errors[-1], connection.protocol.close_code


def test_bytes_queued_on_one_websocket_are_limited(
    server: Server, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_QUEUED_BYTES", 30_000)
    with slowed(server, 0.02):
        for stream in "ab":
            socket.send(create_frame(stream))
        for _ in range(2):
            socket.send(create_frame("a", 10_000))
        wait_until(lambda: server.gateway.socket_limiter.num_bytes("") > 20_000, "two frames to wait")
        assert server.gateway.socket_limiter.num_bytes("") < 30_000
        socket.send(create_frame("b", 10_000))
        error, code = error_and_close_code(socket)
    assert (error["status"], error["error"]["code"], code) == (429, "rate_limit_exceeded", RATE_LIMITED)
    assert "30000 bytes" in error["error"]["message"]
    wait_until(lambda: server.gateway.socket_limiter.num_bytes("") == 0, "the frames to be forgotten")


def test_bytes_queued_by_one_owner_are_limited_over_all_websockets(
    server: Server, socket: ClientConnection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stays open, and frames are accepted again once others have started."""
    monkeypatch.setattr(admission, "MAX_OWNER_FRAME_BYTES", 20_000)
    with slowed(server, 0.02), connect(url) as other:
        socket.send(create_frame("a"))
        socket.send(create_frame("a", 15_000))
        wait_until(lambda: server.gateway.socket_limiter.num_bytes("") > 15_000, "a frame to wait")
        other.send(create_frame("b", 10_000))
        frame = receive(other)
        assert (frame["status"], frame["error"]["code"]) == (429, "rate_limit_exceeded") and frame["stream_id"] == "b"
        socket.close()
        wait_until(lambda: server.gateway.socket_limiter.num_bytes("") == 0, "the frame to be forgotten")
        other.send(create_frame("b", 10_000, max_output_tokens=2))
        assert receive(other)["type"] == "response.created"


def test_waiting_response_create_keeps_its_bytes_only_and_a_running_one_no_unknown_fields(
    server: Server, socket: ClientConnection
) -> None:
    unknown: list[list[int]] = [[]] * 10_000
    wait_until(lambda: not server.gateway.responses.running(), "responses of earlier tests to be stored")
    with slowed(server, 0.02):
        for _ in range(2):
            socket.send(create_frame("a", x=unknown, instructions="Be kind."))
        wait_until(lambda: server.gateway.socket_limiter.num_bytes("") > 20_000, "the second to wait")
        wait_until(lambda: bool(server.gateway.responses.running()), "the first to run")
        (run,) = server.gateway.responses.running()
        assert isinstance(run, LiveResponse)
        expected = {"instructions": "Be kind.", "stream_id": "a", "max_output_tokens": 900, "ignore_eos": True}
        assert dict(run._options.settings) == expected
        assert server.gateway.socket_limiter.num_bytes("") < 2 * len(create_frame("a", x=unknown))


def masked(text: str) -> bytes:
    data = text.encode()
    return bytes((0x81, 0x80 | 127)) + struct.pack(">Q", len(data)) + b"\0\0\0\0" + data


def test_messages_after_the_close_are_skipped_and_the_closing_handshake_completes(
    server: Server, raw: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_QUEUED_BYTES", 30_000)
    sizes: list[tuple[Opcode, int]] = []
    receive_frame = http.StrictWebSocketProtocol.recv_frame

    def record(self: http.StrictWebSocketProtocol, frame: Frames) -> None:
        sizes.append((frame.opcode, len(frame.data)))
        receive_frame(self, frame)

    monkeypatch.setattr(http.StrictWebSocketProtocol, "recv_frame", record)
    wait_until(lambda: not server.gateway.responses.running(), "responses of earlier tests to be stored")
    with slowed(server, 0.02):
        raw.sendall(masked(create_frame("a", 20_000)))
        wait_until(lambda: bool(server.gateway.responses.running()), "the first to run")
        raw.sendall(masked(create_frame("a", 20_000)) * 2)
        large = masked(create_frame("a", 900_000))
        raw.sendall(large[:300_000])
        received = b""
        while b"too many bytes wait" not in received:
            received += raw.recv(65536)
        num_before = len(sizes)
        raw.sendall(large[300_000:] + large * 3)
        raw.sendall(frame(PING, b"?") + bytes((0x88, 0x82)) + b"\0\0\0\0" + struct.pack(">H", RATE_LIMITED))
        while raw.recv(65536):
            pass  # the server ends the connection at once, not after a timeout
    after = [each for each in sizes[num_before:] if each[0] is not Opcode.PING]
    assert after == [(Opcode.TEXT, size) for _, size in after[:-1]] + [(Opcode.CLOSE, 2)]
    assert len(after) == 5 and max(size for _, size in after) < 300_100, "the rest of the payloads is not kept"
    assert max(size for _, size in after[1:4]) <= 4096


def test_messages_of_one_segment_are_parsed_when_the_earlier_ones_are_taken(
    server: Server, raw: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would need far more memory in a queue of messages than as bytes that are not read."""
    lengths: list[int] = []
    put = http.BoundedWebSocket.send_receive_event_to_app

    def record(self: http.BoundedWebSocket) -> None:
        lengths.append(self.queue.qsize())
        put(self)

    monkeypatch.setattr(http.BoundedWebSocket, "send_receive_event_to_app", record)
    message = masked('{"type":"response.cancel","response_id":"resp_x"}')
    raw.sendall(message * 200)
    received = b""
    while received.count(b"response_id") < 200:
        received += raw.recv(65536)
    assert len(lengths) == 200 and max(lengths) <= 4096 // len(message) < 100


def test_number_of_websockets_of_one_owner_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other owners are not affected."""
    monkeypatch.setattr(admission, "MAX_OWNER_SOCKETS", 2)
    config = ServerConfig(db=str(tmp_path / "chat.db"))
    ann, bob = give(config, "a"), give(config, "b")
    with Server(config) as server:
        server.wait_ready()
        url = f"ws://127.0.0.1:{server.port}/v1/responses"
        with connect(url, additional_headers=ann.bearer) as first, connect(url, additional_headers=ann.bearer):
            with pytest.raises(InvalidStatus) as refused, connect(url, additional_headers=ann.bearer):
                pass
            assert refused.value.response.status_code == 429
            assert json.loads(refused.value.response.body)["error"]["code"] == "rate_limit_exceeded"
            with connect(url, additional_headers=bob.bearer) as other:
                assert ask(other, input="Hello")["output"]
            first.close()
            wait_until(lambda: server.gateway.socket_limiter.num_sockets(ann.record.owner) == 1, "the first to end")
            with connect(url, additional_headers=ann.bearer) as again:
                assert ask(again, input="Hello")["output"]


def test_frames_on_all_websockets_of_one_owner_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection does not start anew, and other owners are not affected."""
    monkeypatch.setattr(admission, "MAX_OWNER_FRAMES_PER_S", 1)
    monkeypatch.setattr(admission, "SECOND_NS", 3600 * 10**9)  # no further frame while this test runs
    monkeypatch.setattr(admission, "MAX_OWNER_FRAME_BURST", 20)
    config = ServerConfig(db=str(tmp_path / "chat.db"))
    ann, bob = give(config, "a"), give(config, "b")
    with Server(config) as server, contextlib.ExitStack() as open_sockets:
        server.wait_ready()
        url = f"ws://127.0.0.1:{server.port}/v1/responses"
        sockets = [open_sockets.enter_context(connect(url, additional_headers=ann.bearer)) for _ in range(4)]
        calm = open_sockets.enter_context(connect(url, additional_headers=bob.bearer))
        for number in range(20):
            sockets[number % 3].send("{}")
            assert receive(sockets[number % 3])["type"] == "error"  # it has no type
        again = open_sockets.enter_context(connect(url, additional_headers=ann.bearer))
        for each in (sockets[3], again):
            each.send("{}")
            each.send("{}")
            refused = [receive(each)]
            with contextlib.suppress(ConnectionClosed):
                refused.append(receive(each))
            error = refused[-1]["error"]
            assert error["code"] == "rate_limit_exceeded" and "1 frames a second in all, 20 at once" in error["message"]
            with pytest.raises(ConnectionClosed) as closed:
                each.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == RATE_LIMITED
        assert ask(calm, input="Hello")["output"]
