"""Compressed answers: JSON above a size, if the client accepts gzip; never streams or other types."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Mapping

import pytest

from chatcache.gateway.app import MIN_COMPRESSED_BYTES
from tests.gateway.serving import Server

GZIP = {"accept-encoding": "br, gzip"}
STREAM = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def path(server: Server) -> str:
    """Path of a conversation's items, more than a KiB of JSON."""
    items = [{"role": "user", "content": "hello there"}] * 20
    _, _, created = server.post("/v1/conversations", items=items)
    return f"/v1/conversations/{created['id']}/items"


def fetch(server: Server, path: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[dict[str, str], bytes]:
    """Return the headers and the body as sent."""
    lines = {"host": "localhost", "connection": "close", "content-type": "application/json", **headers}
    lines["content-length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    answer_head, _, answer = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(": ", 1) for line in answer_head.decode().split("\r\n")[1:])
    return fields, answer


def test_large_json_answer_is_compressed_if_the_client_accepts_it(server: Server, path: str) -> None:
    plain_headers, plain = fetch(server, path, {})
    headers, compressed = fetch(server, path, GZIP)
    assert "content-encoding" not in plain_headers and len(plain) > MIN_COMPRESSED_BYTES
    assert headers["content-encoding"] == "gzip" and int(headers["content-length"]) == len(compressed) < len(plain) / 2
    assert gzip.decompress(compressed) == plain
    for found in (plain_headers, headers):
        assert "accept-encoding" in found["vary"] and found["x-request-id"]


@pytest.mark.parametrize(
    ("accepted", "is_compressed"), [("gzip;q=0", 0), ("br, GZIP ; q=0.0, x", 0), ("gzip;q=0.5", 1)]
)
def test_excluded_gzip_is_not_used(server: Server, path: str, accepted: str, is_compressed: int) -> None:
    assert ("content-encoding" in fetch(server, path, {"accept-encoding": accepted})[0]) == is_compressed


def test_small_answers_and_errors_are_not_compressed(server: Server) -> None:
    for path in ("/version", "/v1/conversations/conv_unknown"):
        headers, body = fetch(server, path, GZIP)
        assert "content-encoding" not in headers and json.loads(body)


def test_text_and_lines_are_not_compressed(server: Server, path: str) -> None:
    for name in ("/metrics", "/v1/conversations/export"):
        headers, body = fetch(server, name, GZIP)
        assert "content-encoding" not in headers and len(body) > MIN_COMPRESSED_BYTES


def test_stream_is_sent_uncompressed_event_by_event(server: Server) -> None:
    headers, body = fetch(server, "/v1/chat/completions", GZIP, json.dumps(STREAM).encode())
    assert "content-encoding" not in headers and headers["content-type"].startswith("text/event-stream")
    assert body.count(b"data: ") > 50 and b"[DONE]" in body
