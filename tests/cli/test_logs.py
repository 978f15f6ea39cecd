"""Logs for a collector: every line an object, requests by their id, and nothing of what anybody said."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from chatcache.logs import REQUEST_ID, JsonFormatter, LogWriter
from tests.cli.servers import Server, serving

KEY = "sk-logged-canary-123"
CANARY = "canarium ovatum"


@pytest.fixture(scope="module")
def logged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All that a server logs, at its most talkative, while good and bad requests come and go."""
    options = ("--log-format", "json", "--log-level", "debug", "--api-key", KEY, "--max-model-len", "128")
    with serving(folder, tmp_path_factory.mktemp("cwd"), *options) as server:
        server.saw('"message": "ready')
        _use(server)
        server.signal()
        assert server.wait() == 0
    return [json.loads(line) for line in server.output.splitlines()]


def _use(server: Server) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        messages = [{"role": "user", "content": CANARY}]
        named = {"x-request-id": "mine-1"}
        client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4}, headers=named)
        client.post("/v1/responses", json={"input": CANARY, "instructions": CANARY, "max_output_tokens": 4})
        client.post("/v1/chat/completions", json={"messages": [{"role": CANARY, "content": CANARY}]})
        client.post("/v1/chat/completions", content=b'{"' + CANARY.encode())
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": CANARY * 100}]})
        client.get("/v1/models", headers={"authorization": f"Bearer {KEY}x"})
        client.get(f"/{CANARY.replace(' ', '-')}", params={"q": CANARY})
        client.get("/v1/conversations", params={"query": CANARY})
    with connect(
        server.url.replace("http", "ws") + "/v1/responses",
        additional_headers=headers,
        subprotocols=[Subprotocol("chatcache.v1")],
    ) as socket:
        socket.recv()
        for frame in ({"type": "response.create", "input": CANARY, "max_output_tokens": 2}, {"type": CANARY}):
            socket.send(json.dumps(frame))
        for _ in range(4):
            socket.recv(timeout=60)


def test_every_line_is_an_object_of_either_process(logged: list[dict[str, Any]]) -> None:
    assert {line["process"] for line in logged} == {"gateway", "engine"}
    for line in logged:
        assert {"time", "level", "logger", "process", "message"} <= set(line)


def test_requests_are_told_by_id_route_and_status(logged: list[dict[str, Any]]) -> None:
    mine = [line for line in logged if line.get("request_id") == "mine-1"]
    assert [(line["route"], line["status"]) for line in mine if "status" in line] == [("/v1/chat/completions", 200)]
    statuses = [line["status"] for line in logged if "status" in line]
    assert {200, 400, 401, 404, 101} <= set(statuses)


def test_nothing_that_was_said_is_logged(logged: list[dict[str, Any]]) -> None:
    text = json.dumps(logged)
    assert CANARY not in text and CANARY.replace(" ", "-") not in text and KEY not in text
    assert CANARY.split()[0] not in text


def test_an_address_that_is_taken_is_told_in_the_same_form(folder: Path, tmp_path: Path) -> None:
    with _json_server(folder, tmp_path) as first:
        first.saw("Listening on")
        port = first.url.rpartition(":")[2]
        with _json_server(folder, tmp_path, "--port", port) as second:
            assert second.wait() == 1
            (line,) = [json.loads(line) for line in second.output.splitlines()]
            assert line["level"] == "critical" and f":{port}: a chatcache serves tiny-llama there" in line["message"]
            assert f"--port {int(port) + 1} for another" in line["message"]


def _json_server(folder: Path, cwd: Path, *more: str) -> Any:
    return serving(folder, cwd, "--log-format", "json", *more)


def test_an_error_is_one_line_with_its_traceback_and_fields() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("engine"))
    log = logging.Logger("some.room")
    log.addHandler(handler)
    token = REQUEST_ID.set("req_7")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it failed: %d", 3, extra={"fields": {"route": "/x"}})
    finally:
        REQUEST_ID.reset(token)
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert (told["message"], told["request_id"], told["route"]) == ("it failed: 3", "req_7", "/x")
    assert told["error"].endswith("ValueError: two\nlines") and told["process"] == "engine"


def test_what_would_print_is_logged_line_by_line() -> None:
    stream = io.StringIO()
    log = logging.Logger("banner")
    log.addHandler(logging.StreamHandler(stream))
    lines = LogWriter(log)
    for piece in ("  one", " line\n\n", "another\nunfinished"):
        lines.write(piece)
    assert stream.getvalue() == "one line\nanother\n"
