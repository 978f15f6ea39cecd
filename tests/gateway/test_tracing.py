"""OpenTelemetry spans, as a receiver decodes them: names, attributes, parents, errors, and no content."""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from websockets.sync.client import connect

from chatcache.config import ServerConfig
from chatcache.gateway.tracing import open_tracer
from tests.gateway.scripted import ScriptedServer, scripted
from tests.gateway.serving import MODEL, PAGE_SIZE, Server, failing_after, post_bytes, slowed

SECRET = "zebra-7131"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": f"{SECRET} please"}]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


class Receiver:
    """An OTLP endpoint over HTTP."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.bodies: list[bytes] = []
        self.arrived = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                receiver.bodies.append(body)
                receiver.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever)
    thread.start()
    yield receiver
    receiver.server.shutdown()
    thread.join()
    receiver.server.server_close()


@pytest.fixture(scope="module")
def module_server(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        running = contextlib.ExitStack()
        server = running.enter_context(scripted(tmp_path_factory.mktemp("db"), "hermes"))
    with running:
        yield server


@pytest.fixture
def sent(server: ScriptedServer, receiver: Receiver) -> Iterator[Any]:
    """Return a function that returns the spans of this test."""
    tracer = server.gateway.metrics.tracer
    assert tracer is not None
    tracer._provider.force_flush()
    receiver.requests.clear()

    def spans(number: int = 1) -> list[Span]:
        server.wait_idle()
        for _ in range(1000):
            tracer._provider.force_flush()
            if len(receiver.spans()) >= number:
                break
            threading.Event().wait(0.05)
        assert len(receiver.spans()) == number
        return receiver.spans()

    yield spans
    assert not any(SECRET.encode() in body or b"please" in body for body in receiver.bodies)


def attributes_of(span: Span) -> dict[str, Any]:
    def value(each: Any) -> Any:
        kind = each.WhichOneof("value")
        if kind == "array_value":
            return [value(item) for item in each.array_value.values]
        return getattr(each, kind)

    return {each.key: value(each.value) for each in span.attributes}


def test_chat_span_has_the_conventions_names_and_the_requests_parent(server: ScriptedServer, sent: Any) -> None:
    server.say("Fine.")
    body = {"messages": USER, "temperature": 0.5, "max_tokens": 40, "seed": 3, "top_p": 0.9}
    server.request("POST", CHAT, body)
    status, _, answer = server.request("POST", CHAT, body, {"traceparent": PARENT})
    assert status == 200
    _, span = sent(2)
    found, usage = attributes_of(span), answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert span.name == f"chat {MODEL}" and span.kind == Span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    seconds = found.pop("gen_ai.response.time_to_first_chunk")
    assert 0 < seconds <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert [event.name for event in span.events] == ["gen_ai.first_token"]
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "chatcache",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.output.type": "text",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": cached,
        "gen_ai.usage.cache_creation.input_tokens": usage["prompt_tokens"] - cached,
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.reasoning.output_tokens": 0,
        "server.address": "127.0.0.1",
    }
    assert cached >= usage["prompt_tokens"] - PAGE_SIZE and span.status.code == Status.STATUS_CODE_UNSET


def test_resource_names_the_service_and_its_version(server: ScriptedServer, receiver: Receiver, sent: Any) -> None:
    server.say("Fine.")
    server.request("POST", CHAT, {"messages": USER})
    sent()
    resource = receiver.requests[0].resource_spans[0].resource
    found = {each.key: each.value.string_value for each in resource.attributes}
    assert found["service.name"] == "chatcache" and found["service.version"]
    assert found["deployment.environment.name"] == "test"


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"messages": USER, "stream": True, "tools": TOOLS}, "chat"),
        ("/v1/messages", {"messages": USER, "max_tokens": 300, "tools": [
            {"name": "clock", "input_schema": {"type": "object"}}]}, "chat"),
        ("/v1/responses", {"input": SECRET, "tools": TOOLS}, "chat"),
        ("/api/chat", {"messages": USER, "tools": TOOLS}, "chat"),
        ("/v1/completions", {"prompt": SECRET, "stream": True, "max_tokens": 300}, "text_completion"),
        ("/api/generate", {"prompt": SECRET, "raw": True}, "text_completion"),
    ],
)  # fmt: skip
def test_every_api_records_one_span(
    server: ScriptedServer, sent: Any, path: str, body: dict[str, Any], name: str
) -> None:
    server.say(CALL)
    server.stream(path, **body)
    (span,) = sent()
    reason = "tool_calls" if name == "chat" else "stop"
    assert span.name == f"{name} {MODEL}" and attributes_of(span)["gen_ai.response.finish_reasons"] == [reason]


def test_responses_of_a_websocket_are_children_of_its_handshake(server: ScriptedServer, sent: Any) -> None:
    server.say("Fine.")
    url = f"ws://127.0.0.1:{server.port}/v1/responses"
    with connect(url, additional_headers={"traceparent": PARENT}) as socket:
        socket.send(json.dumps({"type": "response.create", "input": SECRET}))
        while "response.completed" not in str(socket.recv(60)):
            pass
        (span,) = sent()
    assert span.trace_id.hex() == PARENT.split("-")[1]
    assert attributes_of(span)["gen_ai.conversation.id"].startswith("conv_")


def test_refused_request_has_an_error_type_and_no_message(server: ScriptedServer, sent: Any) -> None:
    wrong = {"messages": USER, "temperature": 9}
    assert server.request("POST", CHAT, wrong, {"traceparent": PARENT})[0] == 400
    assert server.request("POST", CHAT, {"messages": USER, "model": SECRET})[0] == 404
    assert server.request("GET", "/v1/models/none")[0] == 404  # generates nothing
    first, second = sent(2)
    assert first.name == f"chat {MODEL}" and first.status.code == Status.STATUS_CODE_ERROR
    assert attributes_of(first)["error.type"] == "invalid_value" and not first.status.message
    assert attributes_of(first)["http.response.status_code"] == 400
    assert first.parent_span_id.hex() == PARENT.split("-")[2]
    assert attributes_of(second)["error.type"] == "model_not_found"


def test_failed_and_abandoned_generations_have_an_error_type(server: ScriptedServer, sent: Any) -> None:
    server.say("A rather long answer that does not end by itself. " * 20)
    with failing_after(server, 6):
        server.request("POST", CHAT, {"messages": USER})
    with slowed(server, 0.01):
        body = json.dumps({"messages": USER, "stream": True}).encode()
        with server.connect() as connection:
            connection.sendall(post_bytes(server.port, CHAT, body))
            assert connection.recv(65536)
        server.wait_idle()
    failed, left = sent(2)
    assert attributes_of(failed)["error.type"] == "engine_error"
    assert attributes_of(left)["error.type"] == "client_disconnected"
    assert {failed.status.code, left.status.code} == {Status.STATUS_CODE_ERROR}


def test_unsampled_parent_records_nothing(server: ScriptedServer, sent: Any) -> None:
    server.say("Fine.")
    assert server.request("POST", CHAT, {"messages": USER}, {"traceparent": f"{PARENT[:-1]}0"})[0] == 200
    server.say("Fine.")
    assert server.request("POST", CHAT, {"messages": USER}, {"traceparent": "nonsense"})[0] == 200
    (span,) = sent()
    assert not span.parent_span_id


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
    ids=str,
)
def test_open_tracer_without_a_usable_endpoint_returns_none(environment: dict[str, str]) -> None:
    assert open_tracer(lambda: MODEL, environment) is None


def test_server_without_an_endpoint_imports_no_opentelemetry_and_wraps_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, chatcache.gateway.app, chatcache.gateway.tracing as tracing\n"
        "assert tracing.open_tracer(lambda: '', {}) is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    with Server(ServerConfig(db=str(tmp_path / "c.db"))) as server:
        server.wait_ready()
        assert server.gateway.metrics.tracer is None


@pytest.mark.slow
def test_server_with_an_unreachable_endpoint_serves_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    with scripted(tmp_path, "hermes") as server:
        server.say("Fine.")
        assert server.request("POST", CHAT, {"messages": USER})[0] == 200
        server.wait_idle()
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 20  # its exporter would try for longer


def test_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert open_tracer(lambda: MODEL, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    assert "chatcache[otel]" in caplog.text
