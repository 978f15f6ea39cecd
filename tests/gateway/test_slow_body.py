"""Stalled request bodies over a real socket: 408 in the envelope, the connection closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from chatcache.config import ServerConfig
from chatcache.gateway.middleware import BodyLimitMiddleware
from tests.gateway.described import Described
from tests.gateway.serving import Server, post_bytes, read_all, split_response
from tests.support.virtual_time import run_in_virtual_time

CHAT = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
TIMEOUT_S = 0.4


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = ServerConfig(db=str(tmp_path_factory.mktemp("db") / "c.db"), body_timeout_s=TIMEOUT_S)
    with Server(config) as server:
        yield server.wait_ready()


@pytest.mark.parametrize("num_bytes", [0, 1, len(BODY) - 1])
def test_stalled_body_gets_408(hasty: Server, num_bytes: int) -> None:
    with hasty.connect() as connection:
        connection.sendall(post_bytes(hasty.port, CHAT, BODY)[: num_bytes - len(BODY)])
        status, headers, answer = split_response(read_all(connection))
    assert status == 408 and headers["connection"] == "close"
    assert answer["error"]["code"] == "request_timeout" and str(num_bytes) in answer["error"]["message"]
    Described(hasty.request("GET", "/openapi.json")[2]).check("POST", CHAT, status, answer)


def test_trickling_body_gets_408(hasty: Server) -> None:
    """Without a long pause, but also without an end."""
    with hasty.connect() as connection:
        connection.sendall(post_bytes(hasty.port, CHAT, b"x" * 100_000)[:-100_000])
        connection.settimeout(TIMEOUT_S / 8)
        data: bytes | None = None
        while data is None:
            try:
                data = connection.recv(4096)
            except TimeoutError:
                with contextlib.suppress(ConnectionError):  # it may have hung up: its answer is there to be read
                    connection.sendall(b" ")
        connection.settimeout(60)
        assert split_response(data + read_all(connection))[0] == 408


def test_slow_body_within_the_limit_is_answered(hasty: Server) -> None:
    whole = post_bytes(hasty.port, CHAT, BODY)
    for _ in range(20):
        began_s = time.monotonic()
        with hasty.connect() as connection:
            for at in range(0, len(whole), len(whole) // 3):
                time.sleep(TIMEOUT_S / 8)
                connection.sendall(whole[at : at + len(whole) // 3])
            took_s = time.monotonic() - began_s
            status = split_response(read_all(connection))[0]
        if took_s < 0.75 * TIMEOUT_S and status == 200:  # else it may be this machine that was slow
            return
    pytest.fail("a body within the limit was refused each time, or the machine is too busy to send one in time")


def test_body_timeout_does_not_limit_the_response(hasty: Server) -> None:
    """Waiting for a disconnect is not waiting for the body."""
    hasty.runner.delay_s = TIMEOUT_S / 8
    try:
        for stream in (False, True):
            body = {**json.loads(BODY), "max_tokens": 16, "ignore_eos": True, "stream": stream}
            status, _, answer = hasty.request("POST", CHAT, body)
            assert status == 200 and ("[DONE]" in answer) == stream
    finally:
        hasty.runner.delay_s = 0.0


def test_body_timeout_excludes_server_time_between_reads() -> None:
    """An import writes to the store while it reads the body."""
    chunks = iter([{"type": "http.request", "body": b"x", "more_body": more} for more in (True, True, True, False)])

    async def receive() -> Message:
        await asyncio.sleep(0.001)
        return next(chunks)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for more in (True, True, True, False):
            assert (await receive())["more_body"] == more
            await asyncio.sleep(0.1)  # storing it

    async def send(message: Message) -> None:
        raise AssertionError(message)

    limited = BodyLimitMiddleware(app, 100, timeout_s=0.05)
    run_in_virtual_time(limited({"type": "http", "path": "/", "headers": []}, receive, send))
    assert next(chunks, None) is None


def test_server_answers_after_stalled_bodies(hasty: Server) -> None:
    assert hasty.request("POST", CHAT, raw=BODY)[0] == 200


def test_body_timeout_default_is_30_seconds(tmp_path: Path) -> None:
    assert ServerConfig().body_timeout_s == 30
