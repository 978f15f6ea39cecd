"""Test the framing of every streaming route with the parsers of real clients, and with injected deviations.

Events arrive one by one, all in one read, or cut anywhere, with and without comments in between.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from chatcache.config import ServerConfig
from tests.contracts.node_clients import run
from tests.contracts.sse_readers import READERS, by_event, in_steps
from tests.gateway.serving import MODEL, Server, slowed

pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "Hello, how are you?"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "n": 2, "max_tokens": 12, "seed": 1, "stream_options": {"include_usage": True}},
    COMPLETIONS: {"prompt": "Hello", "n": 2, "max_tokens": 12, "seed": 1, "stream_options": {"include_usage": True}},
    RESPONSES: {"input": "Hello", "n": 2, "max_output_tokens": 12, "seed": 1},
}
STEPS = (1, 7, 1 << 20)
COMMENT = re.compile(rb"(?m)^: [^\n]*\n\n?")


@pytest.fixture(scope="module")
def pinging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that sends a comment every 50 ms without events."""
    path: Path = tmp_path_factory.mktemp("pinging")
    with Server(ServerConfig(db=str(path / "chat.db"), sse_keep_alive_interval_s=0.05)) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def quiet_bodies(module_server: Server) -> dict[str, bytes]:
    return {route: module_server.stream(route, **body)[1] for route, body in BODIES.items()}


@pytest.fixture(scope="module")
def pinged_bodies(pinging: Server) -> dict[str, bytes]:
    with slowed(pinging, 0.12):
        return {route: pinging.stream(route, **{**body, "n": 1})[1] for route, body in BODIES.items()}


def payloads(body: bytes) -> list[Any]:
    """Return the payloads of a stream, read line by line."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def readable_by(route: str) -> list[str]:
    """Return the parsers for a route: the bench client reads only the two routes without event names."""
    return [name for name in READERS if name != "vllm-bench" or route != RESPONSES]


@pytest.mark.parametrize("route", BODIES)
def test_every_parser_reads_every_event(quiet_bodies: dict[str, bytes], route: str) -> None:
    body = quiet_bodies[route]
    expected = payloads(body)
    assert len(expected) > 12 and b"\r" not in body and not COMMENT.search(body)
    for name in readable_by(route):
        cuts = [by_event(body), [body]]
        if name != "vllm-bench":  # it cannot read events that are cut anywhere
            cuts += [list(in_steps(body, step)) for step in STEPS]
        for pieces in cuts:
            assert READERS[name](pieces) == expected, (name, len(pieces))


@pytest.mark.parametrize("route", BODIES)
def test_comments_do_not_change_the_payloads(pinged_bodies: dict[str, bytes], route: str) -> None:
    """Only the bench client loses data after a comment in its own chunk; its users disable comments."""
    body = pinged_bodies[route]
    assert len(COMMENT.findall(body)) >= 5
    for name in readable_by(route):
        if name != "vllm-bench":
            for step in STEPS:
                assert READERS[name](list(in_steps(body, step))) == payloads(body), (name, step)


@pytest.mark.parametrize("route", BODIES)
def test_stream_has_only_the_expected_fields(
    quiet_bodies: dict[str, bytes], pinged_bodies: dict[str, bytes], route: str
) -> None:
    """No ids and no retry; event names only where OpenAI has them, and there a comment does not end an event."""
    for body in (quiet_bodies[route], pinged_bodies[route]):
        fields = {line.partition(b":")[0] for line in COMMENT.sub(b"", body).split(b"\n")} - {b""}
        assert fields == ({b"data", b"event"} if route == RESPONSES else {b"data"})
    comments = set(COMMENT.findall(pinged_bodies[route]))
    assert comments == ({b": keep-alive\n"} if route == RESPONSES else {b": keep-alive\n\n"})


def test_resumed_response_has_the_same_framing(module_server: Server, quiet_bodies: dict[str, bytes]) -> None:
    events = payloads(quiet_bodies[RESPONSES])
    response_id = events[0]["response"]["id"]
    with module_server.connect() as connection:
        path = f"/v1/responses/{response_id}?stream=true&starting_after=4"
        connection.sendall(f"GET {path} HTTP/1.0\r\nhost: 127.0.0.1:{module_server.port}\r\n\r\n".encode())
        data = b""
        while part := connection.recv(65536):
            data += part
    body = data.partition(b"\r\n\r\n")[2]
    assert READERS["openai-python"]([body]) == READERS["httpx-sse"]([body]) == events[5:]


DEVIATIONS: dict[str, Callable[[bytes], bytes]] = {
    "CRLF": lambda body: body.replace(b"\n", b"\r\n"),
    "ids": lambda body: re.sub(rb"(?m)^data: ", rb"id: 7\ndata: ", body),
    "ids and comments": lambda body: re.sub(rb"(?m)^data: ", rb": ping\n\nid: 7\ndata: ", body),
    "retry": lambda body: b"retry: 3000\n\n" + body,
    "a named ping with data": lambda body: b"event: ping\ndata: {}\n\n" + body,
    "comments alone": lambda body: body.replace(b"\n\n", b"\n\n: ping\n\n", 1),
    "a torn event": lambda body: body.replace(b"\n\n", b"\n", 1),
}


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_injected_deviation_is_found(quiet_bodies: dict[str, bytes], deviation: str) -> None:
    """Negative control: each deviation changes the result of a parser."""
    body = quiet_bodies[CHAT]
    bent = DEVIATIONS[deviation](body)
    broken = []
    for name in ("openai-python", "httpx-sse", "vllm-bench"):
        for pieces in (by_event(bent), [bent]):
            try:
                received = READERS[name](pieces)
            except (ValueError, AssertionError):
                received = []
            if received != payloads(body):
                broken.append(name)
    assert broken


def test_python_client_reads_a_stream_with_comments(pinging: Server) -> None:
    endless = {"ignore_eos": True}
    with slowed(pinging, 0.12), openai.OpenAI(base_url=f"{pinging.url}/v1", api_key="x", max_retries=0) as client:
        chat = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=5, stream=True, extra_body=endless
        )
        assert {chunk.object for chunk in chat} == {"chat.completion.chunk"}
        events = list(
            client.responses.create(model=MODEL, input="Hi", max_output_tokens=5, stream=True, extra_body=endless)
        )
        assert [event.sequence_number for event in events] == list(range(len(events)))
        created = events[0]
        assert created.type == "response.created"
        again = client.responses.retrieve(created.response.id, stream=True, starting_after=2)
        assert [event.sequence_number for event in again] == list(range(3, len(events)))


def test_javascript_client_reads_a_stream_with_comments(pinging: Server) -> None:
    with slowed(pinging, 0.06):
        received = run("openai.mjs", "streamed", "responses", url=pinging.url)
    assert received["streamed"]["text"] and received["streamed"]["finish"]
    assert received["responses"]["text"] == received["responses"]["whole"]
