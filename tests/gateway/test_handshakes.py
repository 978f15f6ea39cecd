"""Invalid request heads get an error in the envelope, end the connection and log no error."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from chatcache.config import ServerConfig
from tests.gateway.serving import Server, parse_head, plain_settings, read_all

UPGRADE = (
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: %b\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n%b\r\n"
)
HEADS: dict[str, tuple[bytes, int]] = {
    "not http": (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
    "a path that is none": (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "a header that is none": (b"GET /livez HTTP/1.1\r\nHost: localhost\r\na[]: b\r\n\r\n", 400),
}
SOCKETS: dict[str, tuple[bytes, bytes, bytes, int]] = {
    "a body": (b"/v1/responses", b"13", b"Content-Length: 3\r\n", 400),
    "a body in chunks": (b"/v1/responses", b"13", b"Transfer-Encoding: chunked\r\n", 400),
    "a long header": (b"/v1/responses", b"13", b"X-A: " + b"a" * 9000 + b"\r\n", 431),
    "many headers": (b"/v1/responses", b"13", b"X-A: a\r\n" * 200, 431),
    "a long path": (b"/v1/responses?" + b"a" * 9000, b"13", b"", 414),
    "another version": (b"/v1/responses", b"12", b"", 400),
    "no such socket": (b"/v1/models", b"13", b"", 404),
    "a foreign page": (b"/v1/responses", b"13", b"Origin: https://evil.example\r\n", 403),
}
HEADS |= {
    name: (b"GET %b HTTP/1.1\r\nHost: localhost\r\n" % path + UPGRADE % (version, more), status)
    for name, (path, version, more, status) in SOCKETS.items()
}


def check(server: Server, head: bytes, status: int, timeout_s: float = 60.0) -> None:
    with server.connect() as connection:
        connection.settimeout(timeout_s)
        connection.sendall(head)
        answered, _, body = read_all(connection).partition(b"\r\n\r\n")
    reported, headers = parse_head(answered)
    assert reported == status
    assert headers["content-type"] == "application/json"
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("name", HEADS)
def test_invalid_request_head_gets_an_error_and_ends_the_connection(
    server: Server, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    check(server, *HEADS[name])
    check_log(caplog)


def test_handshake_checks_fail_on_unmodified_uvicorn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stock(app: object, config: ServerConfig) -> uvicorn.Config:
        settings = plain_settings(app, config)
        settings.http, settings.ws = HttpToolsProtocol, WebSocketsSansIOProtocol
        return settings

    with Server(ServerConfig(db=str(tmp_path / "chat.db")), settings=stock) as server:
        server.wait_ready()
        with pytest.raises(AssertionError, match="text/plain"):
            check(server, *HEADS["not http"])
        with pytest.raises(TimeoutError):
            check(server, *HEADS["a body"], timeout_s=0.5)
        check_log(caplog)
        check(server, *HEADS["a foreign page"])
        with pytest.raises(AssertionError, match="without completing handshake"):
            check_log(caplog)
