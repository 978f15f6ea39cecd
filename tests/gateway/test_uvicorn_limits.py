"""Limits of heads, trailers, pipelining, stalled readers, connections and descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState
from websockets.asyncio.client import connect

from chatcache.gateway import uvicorn_limits
from chatcache.gateway.uvicorn_limits import MAX_HEAD_BYTES, MAX_PIPELINED, BoundedHttp, BoundedWebSocket
from tests.engine_process.engines import until

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n"


async def echo_length(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body (/fields: header names; /early: before the body)."""
    num_bytes, more = 0, scope["path"] != "/early"
    pause_s = 0.6 if scope["path"] == "/slow" else 0.0
    while more:
        message = await receive()
        num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
    await asyncio.sleep(pause_s)
    body = str(num_bytes).encode() if scope["path"] != "/fields" else b" ".join(name for name, _ in scope["headers"])
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    config = uvicorn.Config(echo_length, http=BoundedHttp, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: BoundedHttp(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return int(head.split()[1]), await reader.readexactly(int(length.split()[1]))


async def test_head_at_the_limit_and_longer_body_are_accepted(port: int) -> None:
    """One connection is used, so that body bytes counted as head bytes would be noticed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for filling, length in ((10, 0), (MAX_HEAD_BYTES - 100, 3), (10, 4 * MAX_HEAD_BYTES), (MAX_HEAD_BYTES - 100, 3)):
        writer.write(HEAD % length + b"X: " + b"x" * filling + b"\r\n\r\n" + b"b" * length)
        assert await answer(reader) == (200, b"%d" % length)
    writer.close()


async def test_head_over_the_limit_is_refused_with_431(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % 0 + b"\r\n")
    assert await answer(reader) == (200, b"0")
    writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES)
    status, body = await answer(reader)
    assert status == 431 and b"request_head_too_large" in body
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("body", [b"", b"b" * 10])
@pytest.mark.parametrize("earlier", [False, True])
async def test_head_over_the_limit_in_one_write_is_refused_once(port: int, body: bytes, earlier: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if earlier:
        writer.write(HEAD % 0 + b"\r\n")
        assert await answer(reader) == (200, b"0")
    writer.write(HEAD % len(body) + b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n" + body)
    status, text = await answer(reader)
    assert status == 431 and b"request_head_too_large" in text
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("begun", [b"", b"GET / HT", HEAD % 0 + b"\r\nGET / HT"], ids=["silent", "first", "second"])
async def test_incomplete_head_is_closed_after_the_timeout(
    port: int, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(uvicorn_limits, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    async with asyncio.timeout(60):
        rest = await reader.read()
    assert rest.count(b"200 OK") == begun.count(b"Host")
    writer.close()


async def test_slow_body_is_not_subject_to_the_head_timeout(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_limits, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % 2 + b"\r\na")
    await asyncio.sleep(0.4)
    writer.write(b"b")
    assert await answer(reader) == (200, b"2")
    writer.close()


async def test_empty_line_after_a_body_does_not_start_the_head_timeout(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some clients send an empty line after a body."""
    monkeypatch.setattr(uvicorn_limits, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab")
    await asyncio.sleep(0.1)
    writer.write(b"\r\n")
    assert await answer(reader) == (200, b"2")
    writer.close()


CHUNKED = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"


async def test_trailers_are_not_added_to_the_headers(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(CHUNKED % b"/fields" + b"0\r\nHost: b\r\nAuthorization: Bearer x\r\n\r\n")
        assert await answer(reader) == (200, b"host transfer-encoding")
    writer.close()


@pytest.mark.parametrize(
    ("begun", "more"),
    [(b"0\r\n", b"X: y\r\n"), (b"0\r\nX: ", b"y"), (b"2;", b"x"), (b"", b"0")],
    ids=["many fields", "one field", "extension", "length"],
)
async def test_trailers_and_chunk_headers_over_the_limit_are_refused(port: int, begun: bytes, more: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CHUNKED % b"/" + begun)
    reply = asyncio.create_task(reader.read())
    for _ in range(16):  # 1 MiB, of which only a few reads are accepted
        if not reply.done():
            writer.write(more * (MAX_HEAD_BYTES // len(more)))
            with contextlib.suppress(ConnectionError):
                await writer.drain()
    with contextlib.suppress(ConnectionError):  # the answer may be lost after a reset
        async with asyncio.timeout(60):
            assert b"invalid_request_error" in await reply
    writer.close()


async def test_small_chunks_of_a_long_body_are_accepted(port: int) -> None:
    """Chunk headers exceed the head limit in total, but never at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    num_pieces = MAX_HEAD_BYTES // 8
    writer.write(CHUNKED % b"/" + b"1;a=b;c=d\r\nx\r\n" * num_pieces + b"0\r\n\r\n")
    assert await answer(reader) == (200, b"%d" % (num_pieces + 2))
    writer.close()


async def test_pipelined_requests_over_the_limit_close_the_connection(port: int) -> None:
    slow = b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(slow + (HEAD % 1 + b"\r\nx") * MAX_PIPELINED)
    assert [await answer(reader) for _ in range(MAX_PIPELINED + 1)] == [(200, b"0")] + [(200, b"1")] * MAX_PIPELINED
    writer.write(slow + (HEAD % 1 + b"\r\nx") * (MAX_PIPELINED + 1))
    async with asyncio.timeout(60):
        assert await reader.read(1) == b""  # the first request gets no answer meant for another one
    writer.close()


async def test_websocket_upgrade_during_an_answer_is_refused(flood: tuple[Flood, int]) -> None:
    """The handshake would bypass the limits on stalled readers."""
    upgrade = (
        b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    _, port = flood
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % 0 + b"\r\n" + upgrade)
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            assert await reader.read(1) == b""
    writer.close()


@pytest.mark.parametrize("rest", [b"b", b"bc", b"bcGET / HT"], ids=["part", "all", "next"])
async def test_unread_body_is_not_awaited_after_the_timeout(
    port: int, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    monkeypatch.setattr(uvicorn_limits, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\na")
    assert await answer(reader) == (200, b"0")
    writer.write(rest)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


async def test_body_sent_after_its_answer_is_followed_by_the_next_request(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\na")
        assert await answer(reader) == (200, b"0")
        writer.write(b"bc" + HEAD % 1 + b"\r\nx")
        assert await answer(reader) == (200, b"1")
    writer.close()


BIG = b"x" * (16 << 20)  # more than the socket buffers of both sides hold


class Flood:
    """Application that sends more than the socket buffers hold; `left` is set on disconnect."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.state = ServerState()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "bytes": BIG})
        else:
            length = (b"content-length", str(len(BIG)).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [length]})
            await send({"type": "http.response.body", "body": BIG})
        while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
            pass
        self.left.set()


@pytest.fixture
async def flood(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Flood, int]]:
    monkeypatch.setattr(uvicorn_limits, "STALL_TIMEOUT_S", 0.5)
    app = Flood()
    config = uvicorn.Config(app, http=BoundedHttp, ws=BoundedWebSocket, lifespan="off", log_config=None)
    config.load()
    server = await asyncio.get_running_loop().create_server(lambda: BoundedHttp(config, app.state, {}), "127.0.0.1", 0)
    async with server:
        yield app, server.sockets[0].getsockname()[1]


async def test_http_client_that_stops_reading_is_disconnected(flood: tuple[Flood, int]) -> None:
    app, port = flood
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(60):
            await app.left.wait()
            while app.state.connections:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.05)


async def test_websocket_client_that_stops_reading_is_disconnected(flood: tuple[Flood, int]) -> None:
    app, port = flood
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        async with asyncio.timeout(60):
            await app.left.wait()


async def test_slow_reader_receives_everything(flood: tuple[Flood, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes longer than the stall timeout."""
    monkeypatch.setattr(uvicorn_limits, "STALL_TIMEOUT_S", 2.0)
    _, port = flood
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    for _ in range(16):
        await asyncio.sleep(0.15)
        assert len(await reader.readexactly(1 << 20)) == 1 << 20
    writer.close()
    async with connect(f"ws://127.0.0.1:{port}", max_size=None) as client:
        assert await client.recv() == BIG


async def test_connections_over_the_limit_are_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_limits, "max_connections", lambda: 3)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for reader, writer in idle:  # all are accepted after this
        writer.write(HEAD % 1 + b"\r\nx")
        assert await answer(reader) == (200, b"1")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        writer.write(HEAD % 1 + b"\r\nx")
        assert await reader.read() == b""  # refused
    writer.close()
    idle[0][1].write(HEAD % 2 + b"\r\nxx")
    assert await answer(idle[0][0]) == (200, b"2")
    for _, writer in idle:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    await until(lambda: is_served(port))


async def is_served(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(HEAD % 1 + b"\r\nx")
        return bool(await reader.read(1))
    except ConnectionError:
        return False
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("most", "num_free"), [(20_000, 128), (1024, 128), (256, 128), (64, 32), (resource.RLIM_INFINITY, 128)]
)
def test_max_connections_leaves_descriptors_to_the_server(
    most: int, num_free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    most = sys.maxsize if most == resource.RLIM_INFINITY else most
    assert most - uvicorn_limits.max_connections() == num_free


@pytest.mark.slow
def test_raise_fd_limit_raises_the_soft_limit_to_the_hard_limit() -> None:
    script = (
        "import resource; from chatcache.gateway.uvicorn_limits import raise_fd_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200)); raise_fd_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(200, 200)"
