"""JSON logs: one object per line, request ids, and no prompt or answer text."""

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

KEY = "sk-logged-secret-123"
PROMPT = "canarium ovatum"


@pytest.fixture(scope="module")
def logged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the log lines of a server at level debug that handled good and bad requests."""
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
        messages = [{"role": "user", "content": PROMPT}]
        named = {"x-request-id": "mine-1"}
        client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4}, headers=named)
        client.post("/v1/responses", json={"input": PROMPT, "instructions": PROMPT, "max_output_tokens": 4})
        client.post("/v1/chat/completions", json={"messages": [{"role": PROMPT, "content": PROMPT}]})
        client.post("/v1/chat/completions", content=b'{"' + PROMPT.encode())
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": PROMPT * 100}]})
        client.get("/v1/models", headers={"authorization": f"Bearer {KEY}x"})
        client.get(f"/{PROMPT.replace(' ', '-')}", params={"q": PROMPT})
        client.get("/v1/conversations", params={"query": PROMPT})
    with connect(
        server.url.replace("http", "ws") + "/v1/responses",
        additional_headers=headers,
        subprotocols=[Subprotocol("chatcache.v1")],
    ) as socket:
        socket.recv()
        for frame in ({"type": "response.create", "input": PROMPT, "max_output_tokens": 2}, {"type": PROMPT}):
            socket.send(json.dumps(frame))
        for _ in range(4):
            socket.recv(timeout=60)


@pytest.mark.slow
def test_json_log_lines_are_objects_with_common_fields(logged: list[dict[str, Any]]) -> None:
    assert {line["process"] for line in logged} == {"gateway", "engine"}
    for line in logged:
        assert {"time", "level", "logger", "process", "message"} <= set(line)


def test_json_log_has_id_route_and_status_of_requests(logged: list[dict[str, Any]]) -> None:
    mine = [line for line in logged if line.get("request_id") == "mine-1"]
    assert [(line["route"], line["status"]) for line in mine if "status" in line] == [("/v1/chat/completions", 200)]
    statuses = [line["status"] for line in logged if "status" in line]
    assert {200, 400, 401, 404, 101} <= set(statuses)


def test_json_log_contains_no_prompt_and_no_key(logged: list[dict[str, Any]]) -> None:
    text = json.dumps(logged)
    assert PROMPT not in text and PROMPT.replace(" ", "-") not in text and KEY not in text
    assert PROMPT.split()[0] not in text


@pytest.mark.slow
def test_json_log_reports_a_port_in_use(folder: Path, tmp_path: Path) -> None:
    with _json_server(folder, tmp_path) as first:
        first.saw('"message": "ready')  # while it loads, it may answer too late to be found
        port = first.url.rpartition(":")[2]
        with _json_server(folder, tmp_path, "--port", port) as second:
            assert second.wait() == 1
            (line,) = [json.loads(line) for line in second.output.splitlines()]
            assert (
                line["level"] == "critical"
                and f":{port}: a chatcache server already serves tiny-llama on this port" in line["message"]
            )
            assert f"for example --port {int(port) + 1}" in line["message"]


def _json_server(folder: Path, cwd: Path, *more: str) -> Any:
    return serving(folder, cwd, "--log-format", "json", *more)


def test_json_formatter_writes_an_exception_in_one_line() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("engine"))
    log = logging.Logger("some.module")
    log.addHandler(handler)
    token = REQUEST_ID.set("req_7")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it failed: %d", 3, extra={"fields": {"route": "/x"}})
    finally:
        REQUEST_ID.reset(token)
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["message"], entry["request_id"], entry["route"]) == ("it failed: 3", "req_7", "/x")
    assert entry["error"].endswith("ValueError: two\nlines") and entry["process"] == "engine"


def test_log_writer_logs_complete_lines() -> None:
    stream = io.StringIO()
    log = logging.Logger("banner")
    log.addHandler(logging.StreamHandler(stream))
    lines = LogWriter(log)
    for piece in ("  one", " line\n\n", "another\nunfinished"):
        lines.write(piece)
    assert stream.getvalue() == "one line\nanother\n"
