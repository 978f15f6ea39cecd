"""Helpers for the Responses API over HTTP, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

from tests.gateway.serving import Server, post_bytes, wait_until
from tests.gateway.test_disconnect import close_hard

Json = dict[str, Any]
PATH = "/v1/responses"
LONG: Json = {"input": "Hi", "max_output_tokens": 900, "ignore_eos": True}


def num_tasks(server: Server) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return server.call(count())


def num_running(server: Server) -> int:
    async def count() -> int:
        return len(server.gateway.responses.running())

    return server.call(count())


def running_id(server: Server) -> str:
    async def first() -> str:
        return server.gateway.responses.running()[0].id

    return server.call(first())


def counted(server: Server, name: str, key: dict[str, str] | None = None) -> int:
    """Return a counter's value, 0 if it does not exist."""
    text = server.request("GET", "/metrics", headers=key)[2]
    found = re.findall(rf"^{re.escape(name)} (.*)$", text, re.M)
    return int(float(found[0])) if found else 0


def disconnects(server: Server) -> int:
    return counted(server, "chatcache_client_disconnects_total")


def begin(server: Server, body: Json) -> socket.socket:
    connection = server.connect()
    connection.sendall(post_bytes(server.port, PATH, json.dumps(body).encode()))
    wait_until(lambda: num_running(server) == 1, "the response to be under way")
    return connection


def leave(connection: socket.socket, how: str) -> None:
    if how == "half":
        connection.shutdown(socket.SHUT_WR)
    elif how == "rst":
        close_hard(connection)
    else:
        connection.close()


@contextlib.contextmanager
def occupied(server: Server) -> Iterator[None]:
    """Keep the engine busy with another request, so that new requests wait."""
    with server.connect() as connection:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 900, "ignore_eos": True, "stream": True}
        connection.sendall(post_bytes(server.port, "/v1/chat/completions", json.dumps(body).encode()))
        assert connection.recv(64)
        yield


def so_far(server: Server, response_id: str) -> str:
    output = server.request("GET", f"{PATH}/{response_id}")[2].get("output")
    return output[0]["content"][0]["text"] if output else ""


class Events:
    """An SSE stream on its own socket; leaving the block resets the connection."""

    def __init__(self, server: Server, path: str, body: Json | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._connection.connect()
        self._socket = self._connection.sock
        data = None if body is None else json.dumps(body)
        self._connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        close_hard(self._socket)
        self._answer.close()
        self._connection.close()

    def next(self) -> Json | None:
        """Return the next event, or None at the end of the stream."""
        name = b""
        while line := self._answer.readline():
            if line.startswith(b"event: "):
                name = line[7:].strip()
            elif line.startswith(b"data: "):
                event: Json = json.loads(line[6:])
                assert event["type"].encode() == name and self._answer.readline() == b"\n"
                return event
        return None

    def __iter__(self) -> Iterator[Json]:
        while (event := self.next()) is not None:
            yield event
