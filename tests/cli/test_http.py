"""Request heads that are too long or never end, bodies with more beside them, requests that do not wait, answers that
nobody takes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState
from websockets.asyncio.client import connect

from chatcache.gateway import uvicorn_limits as http
from chatcache.gateway.uvicorn_limits import MAX_HEAD_BYTES, MAX_PIPELINED, BoundedHttp, BoundedWebSocket
from tests.engine_process.engines import until

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n"


async def echo_length(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body, or the names of the fields in the head; at /early before there is a body."""
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


async def test_heads_up_to_the_limit_and_bodies_beyond_it(port: int) -> None:
    """On one connection, so that what a body sends is never counted as a head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for filling, length in ((10, 0), (MAX_HEAD_BYTES - 100, 3), (10, 4 * MAX_HEAD_BYTES), (MAX_HEAD_BYTES - 100, 3)):
        writer.write(HEAD % length + b"X: " + b"x" * filling + b"\r\n\r\n" + b"b" * length)
        assert await answer(reader) == (200, b"%d" % length)
    writer.close()


async def test_a_head_without_end_is_refused(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % 0 + b"\r\n")
    assert await answer(reader) == (200, b"0")
    writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES)
    status, body = await answer(reader)
    assert status == 431 and b"request_head_too_large" in body
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("begun", [b"", b"GET / HT", HEAD % 0 + b"\r\nGET / HT"], ids=["silent", "first", "second"])
async def test_a_head_that_stops_is_hung_up_on(port: int, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begun)
    async with asyncio.timeout(60):
        rest = await reader.read()
    assert rest.count(b"200 OK") == begun.count(b"Host")
    writer.close()


async def test_a_slow_answer_outlives_the_deadline_for_heads(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % 2 + b"\r\na")
    await asyncio.sleep(0.4)
    writer.write(b"b")
    assert await answer(reader) == (200, b"2")
    writer.close()


async def test_stray_bytes_do_not_end_a_slow_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some clients send an empty line behind a body."""
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab")
    await asyncio.sleep(0.1)
    writer.write(b"\r\n")
    assert await answer(reader) == (200, b"2")
    writer.close()


CHUNKED = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n"


async def test_fields_behind_a_body_are_not_of_its_head(port: int) -> None:
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
async def test_what_is_beside_a_body_has_an_end(port: int, begun: bytes, more: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(CHUNKED % b"/" + begun)
    told = asyncio.create_task(reader.read())
    for _ in range(16):  # a MiB, and no more than a few reads of it are taken
        if not told.done():
            writer.write(more * (MAX_HEAD_BYTES // len(more)))
            with contextlib.suppress(ConnectionError):
                await writer.drain()
    with contextlib.suppress(ConnectionError):  # its answer may be lost behind what we still sent
        async with asyncio.timeout(60):
            assert b"invalid_request_error" in await told
    writer.close()


async def test_pieces_of_a_body_may_be_small(port: int) -> None:
    """More beside them than a head may be long, but never at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    num_pieces = MAX_HEAD_BYTES // 8
    writer.write(CHUNKED % b"/" + b"1;a=b;c=d\r\nx\r\n" * num_pieces + b"0\r\n\r\n")
    assert await answer(reader) == (200, b"%d" % (num_pieces + 2))
    writer.close()


async def test_requests_that_wait_for_others_are_counted(port: int) -> None:
    slow = b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(slow + (HEAD % 1 + b"\r\nx") * MAX_PIPELINED)
    assert [await answer(reader) for _ in range(MAX_PIPELINED + 1)] == [(200, b"0")] + [(200, b"1")] * MAX_PIPELINED
    writer.write(slow + (HEAD % 1 + b"\r\nx") * (MAX_PIPELINED + 1))
    async with asyncio.timeout(60):
        assert await reader.read(1) == b""  # no answer to another request in the place of the first one's
    writer.close()


async def test_no_websocket_opens_amid_an_answer(flood: tuple[Flood, int]) -> None:
    """It would be written into the socket, with no regard to whether that is read, and when it ends."""
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
async def test_what_is_left_of_a_body_is_not_waited_for(
    port: int, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\na")
    assert await answer(reader) == (200, b"0")
    writer.write(rest)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()


async def test_a_body_behind_its_answer_is_followed_by_the_next_request(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\na")
        assert await answer(reader) == (200, b"0")
        writer.write(b"bc" + HEAD % 1 + b"\r\nx")
        assert await answer(reader) == (200, b"1")
    writer.close()


BIG = b"x" * (16 << 20)  # more than two kernels hold for a connection


class Flood:
    """Answers with more than a connection holds; a WebSocket's end sets `left`."""

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
    monkeypatch.setattr(http, "STALL_TIMEOUT_S", 0.5)
    app = Flood()
    config = uvicorn.Config(app, http=BoundedHttp, ws=BoundedWebSocket, lifespan="off", log_config=None)
    config.load()
    server = await asyncio.get_running_loop().create_server(lambda: BoundedHttp(config, app.state, {}), "127.0.0.1", 0)
    async with server:
        yield app, server.sockets[0].getsockname()[1]


async def test_a_reader_that_takes_nothing_is_cut_off(flood: tuple[Flood, int]) -> None:
    app, port = flood
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(60):
            await app.left.wait()
            while app.state.connections:  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.05)


async def test_a_websocket_that_takes_nothing_is_cut_off(flood: tuple[Flood, int]) -> None:
    app, port = flood
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        async with asyncio.timeout(60):
            await app.left.wait()


async def test_a_slow_reader_gets_it_all(flood: tuple[Flood, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than a stalled one would have lived."""
    monkeypatch.setattr(http, "STALL_TIMEOUT_S", 2.0)
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


async def test_connections_leave_descriptors_to_the_server(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "max_connections", lambda: 3)
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for reader, writer in idle:  # each is there by now
        writer.write(HEAD % 1 + b"\r\nx")
        assert await answer(reader) == (200, b"1")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        writer.write(HEAD % 1 + b"\r\nx")
        assert await reader.read() == b""  # turned away
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
