"""Host and Origin checks, API keys, body size, and the error envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from chatcache.config import ServerConfig
from tests.gateway.frames import LONG, receive, send, until_end
from tests.gateway.serving import Server, post_bytes, read_all, slowed, split_response

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
KEYS = ("sk-first", "sk-second")


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path: Path = tmp_path_factory.mktemp("locked")
    config = ServerConfig(
        db=str(path / "chat.db"),
        api_keys=KEYS,
        allowed_hosts=("chat.example",),
        cors_origins=("https://app.example",),
        max_body_bytes=2000,
    )
    with Server(config) as server:
        yield server.wait_ready()


def is_envelope(answer: Any) -> bool:
    return set(answer["error"]) == {"message", "type", "param", "code"} and isinstance(answer["error"]["code"], str)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/nope", None, 404),
        ("POST", "/nope", {}, 404),
        ("GET", "/v1/nope/deeper", None, 404),
        ("GET", CHAT, None, 405),
        ("DELETE", "/v1/models", None, 405),
        ("PUT", "/v1/conversations/conv_x", None, 405),
        ("PUT", "/version", None, 405),
        ("POST", "/openapi.json", {}, 405),
        ("PUT", "/nope.js", None, 404),
        ("GET", "/v1/conversations/", None, 404),
        ("GET", "/v1/models/other/model", None, 404),
        ("GET", "/v1/conversations/conv_x", None, 404),
        ("GET", "/v1/conversations?limit=0", None, 400),
        ("GET", "/v1/conversations?limit=101", None, 400),
        ("GET", "/assets/../../config.py", None, 404),
        ("GET", "/theme.py", None, 404),
    ],
)
def test_error_responses_share_one_envelope(server: Server, method: str, path: str, body: object, status: int) -> None:
    got, headers, answer = server.request(method, path, body)
    assert got == status and is_envelope(answer)
    assert headers["x-request-id"].startswith("req_")
    assert status != 405 or "allow" in headers


def test_request_id_is_accepted_if_printable(server: Server) -> None:
    assert server.request("GET", "/livez", headers={"x-request-id": "mine-1"})[1]["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 129, "é"):
        assert server.request("GET", "/livez", headers={"x-request-id": bad})[1]["x-request-id"].startswith("req_")


def test_body_of_another_media_type_is_rejected(server: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        status, _, answer = server.request("POST", CHAT, BODY, {"content-type": kind})
        assert status == 415 and is_envelope(answer)
    assert server.request("POST", CHAT, BODY, {"content-type": "application/json; charset=utf-8"})[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:80", "10.0.0.9"]
)
def test_foreign_host_is_rejected(server: Server, host: str) -> None:
    status, _, answer = server.request("GET", "/v1/models", headers={"host": host})
    assert status == 403 and answer["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1", "[::1]:8000", "LOCALHOST"])
def test_loopback_host_is_accepted(server: Server, host: str) -> None:
    assert server.request("GET", "/v1/models", headers={"host": host})[0] == 200


def test_foreign_origin_is_rejected(server: Server) -> None:
    own = f"http://127.0.0.1:{server.port}"
    assert server.request("POST", CHAT, BODY, {"origin": own})[0] == 200
    others = (f"http://127.0.0.1:{server.port + 1}", "http://localhost", "http://[", f"http://[::1:{server.port}")
    for origin in ("https://evil.example", "null", "", *others):
        status, _, answer = server.request("POST", CHAT, BODY, {"origin": origin})
        assert status == 403 and answer["error"]["code"] == "origin_not_allowed", origin


def test_public_bind_accepts_addresses_but_no_host_names(tmp_path: Path) -> None:
    with Server(ServerConfig(db=str(tmp_path / "c.db"), host="0.0.0.0")) as server:
        assert server.request("GET", "/livez", headers={"host": "192.168.1.7:8000"})[0] == 200
        assert server.request("GET", "/livez", headers={"host": "rebound.example"})[0] == 403


def test_api_key_is_required(locked: Server) -> None:
    for path in ("/v1/models", "/metrics", "/v1/conversations", "/tokenize", "/nope"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEYS[0]}, {"authorization": "Bearer"}):
            status, got, answer = locked.request("GET", path, headers=headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
            assert got["www-authenticate"] == "Bearer" and got["x-request-id"]
    for key in KEYS:
        assert locked.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})[0] == 200
    for path in ("/", "/livez", "/readyz", "/health", "/version"):
        assert locked.request("GET", path)[0] == 200
    assert (
        locked.request("GET", "/v1/models", headers={"host": "chat.example", "authorization": f"Bearer {KEYS[0]}"})[0]
        == 200
    )


def test_tenant_cannot_read_another_tenants_data(locked: Server) -> None:
    url = f"ws://127.0.0.1:{locked.port}/v1/responses"
    with connect(url, additional_headers={"authorization": f"Bearer {KEYS[0]}"}) as socket:
        socket.send(json.dumps({"type": "response.create", "input": "secret " * 10, "max_output_tokens": 4}))
        while (frame := json.loads(socket.recv()))["type"] not in ("response.completed", "response.incomplete"):
            pass
    conversation = frame["response"]["conversation"]["id"]
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in KEYS)
    assert locked.request("GET", f"/v1/conversations/{conversation}/items", headers=mine)[0] == 200
    for path in (f"/v1/conversations/{conversation}", f"/v1/conversations/{conversation}/items"):
        assert locked.request("GET", path, headers=theirs)[0] == 404
    assert locked.request("DELETE", f"/v1/conversations/{conversation}", headers=theirs)[0] == 404
    assert locked.request("GET", "/v1/conversations", headers=theirs)[2]["data"] == []
    # Nor do their prompts hit each other's pages.
    body = {"messages": [{"role": "user", "content": "secret " * 10}], "max_tokens": 1}
    cached = [
        locked.request("POST", CHAT, body, headers)[2]["usage"]["prompt_tokens_details"]["cached_tokens"]
        for headers in (theirs, mine)
    ]
    assert cached[0] == 0 and cached[1] > 0


def test_tenant_cannot_stop_another_tenants_response(locked: Server) -> None:
    url = f"ws://127.0.0.1:{locked.port}/v1/responses"
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in KEYS)
    with (
        slowed(locked, 0.005),
        connect(url, additional_headers=mine) as owner,
        connect(url, additional_headers=theirs) as stranger,
    ):
        send(owner, **{**LONG, "max_output_tokens": 100})
        response_id = receive(owner)["response"]["id"]
        send(stranger, "response.cancel", response_id=response_id)
        assert receive(stranger)["error"]["code"] == "not_found"
        assert until_end(owner)[-1]["response"]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer nope"}, 401),
        ({"Authorization": f"Bearer {KEYS[0]}", "Origin": "https://evil.example"}, 403),
    ],
)
def test_refused_websocket_handshake_states_the_reason(locked: Server, headers: dict[str, str], status: int) -> None:
    with (
        pytest.raises(InvalidStatus) as caught,
        connect(f"ws://127.0.0.1:{locked.port}/v1/responses", additional_headers=headers),
    ):
        pass
    response = caught.value.response
    assert response.status_code == status
    assert is_envelope(json.loads(response.body or b"{}"))
    assert response.headers["x-request-id"]


def test_api_key_is_accepted_as_a_websocket_subprotocol(locked: Server) -> None:
    offered = ["chatcache.v1", f"openai-insecure-api-key.{KEYS[1]}"]
    with connect(f"ws://127.0.0.1:{locked.port}/v1/responses", subprotocols=offered) as socket:  # type: ignore[arg-type]
        assert socket.subprotocol == "chatcache.v1"


def test_cors_allows_listed_origins_only(locked: Server) -> None:
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    status, headers, _ = locked.request("OPTIONS", CHAT, headers=preflight)
    assert status == 200 and headers["access-control-allow-origin"] == "https://app.example"
    status, headers, _ = locked.request("OPTIONS", CHAT, headers={**preflight, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in headers


def test_cors_allows_the_headers_of_browser_sdks(locked: Server) -> None:
    wanted = "authorization,content-type,x-stainless-lang,x-stainless-retry-count,x-stainless-timeout"
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    status, headers, _ = locked.request(
        "OPTIONS", CHAT, headers={**preflight, "access-control-request-headers": wanted}
    )
    assert status == 200 and headers["access-control-allow-headers"] == wanted


def test_cors_lets_a_page_read_the_error_of_a_body_that_is_too_large(locked: Server) -> None:
    given = {"authorization": f"Bearer {KEYS[0]}", "origin": "https://app.example"}
    status, headers, _ = locked.request("POST", CHAT, raw=b" " * 2001, headers=given)
    assert status == 413 and headers["access-control-allow-origin"] == "https://app.example"
    assert headers["x-request-id"] and "x-request-id" in headers["access-control-expose-headers"]


def test_body_limit_counts_bytes_while_reading(locked: Server) -> None:
    key = {"authorization": f"Bearer {KEYS[0]}"}
    status, _, answer = locked.request("POST", CHAT, raw=b" " * 2001, headers=key)
    assert status == 413 and is_envelope(answer)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEYS[0]}\r\n"
        "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    with locked.connect() as connection:
        connection.sendall(head.encode() + b"400\r\n" + b" " * 1024 + b"\r\n" + b"400\r\n" + b" " * 1024 + b"\r\n")
        status, _, answer = split_response(read_all(connection))
    assert status == 413 and is_envelope(answer)


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    two = post_bytes(server.port, CHAT, json.dumps(BODY).encode()).replace(b"connection: close\r\n", b"")
    with server.connect() as connection:
        connection.sendall(two + post_bytes(server.port, "/v1/completions", b'{"prompt":"x","max_tokens":1}'))
        data = read_all(connection)
    assert data.count(b"HTTP/1.1 200 OK") == 2
    assert data.index(b"chat.completion") < data.index(b"text_completion")
