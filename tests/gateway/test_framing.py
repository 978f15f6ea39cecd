"""The exact bytes of a stream, read from a raw socket: each rule here is one that a real client depends on."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from chatcache.config import ServerConfig
from tests.gateway.serving import MODEL, Server, failing_after, parse_head, post_bytes, read_all, slowed, unchunk

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello, how are you?"}]


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Check the framing to the byte; return the payloads."""
    assert b"\r" not in body
    assert body.isascii()
    frames = body.split(b"\n\n")
    assert frames.pop() == b""
    assert frames.pop() == b"data: [DONE]"
    for frame in frames:
        assert re.fullmatch(rb"data: \{.*\}", frame), frame  # one data line: no id, event, retry or comment lines
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_stream(server: Server, n: int, include_usage: bool) -> None:
    headers, body = server.stream(
        CHAT, messages=USER, n=n, max_tokens=30, seed=1, stream_options={"include_usage": include_usage}
    )
    chunks = events_of(body)
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache, no-transform"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"]

    assert {frozenset((chunk["id"], chunk["created"], chunk["model"])) for chunk in chunks} == {
        frozenset((chunks[0]["id"], chunks[0]["created"], MODEL))
    }
    for index in range(n):
        assert chunks[index]["choices"] == [
            {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ]
    rest = chunks[n:]
    if include_usage:
        last = rest.pop()
        assert last["choices"] == []
        usage = last["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in rest)
    finishes = [chunk["choices"][0] for chunk in rest if chunk["choices"][0]["finish_reason"]]
    assert sorted(choice["index"] for choice in finishes) == list(range(n))
    assert all(choice["delta"] == {} for choice in finishes)
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)
    for index in range(n):
        mine = [chunk["choices"][0] for chunk in rest if chunk["choices"][0]["index"] == index]
        assert mine[-1]["finish_reason"] and not any(choice["finish_reason"] for choice in mine[:-1])


def test_completion_stream(server: Server) -> None:
    _, body = server.stream("/v1/completions", prompt=["one", "two"], n=2, max_tokens=8, seed=1, echo=True)
    chunks = events_of(body)
    assert [chunk["choices"][0]["index"] for chunk in chunks[:4]] == [0, 1, 2, 3]
    assert [chunk["choices"][0]["text"] for chunk in chunks[:4]] == ["one", "one", "two", "two"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    ends = sorted(c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"])
    assert ends == [0, 1, 2, 3]


def test_the_role_comes_with_the_first_token_and_the_connection_ends(server: Server) -> None:
    """Time to first chunk must be time to first token, and nothing lingers after [DONE]."""
    with slowed(server, 0.15), server.connect() as connection:
        body = json.dumps({"messages": USER, "stream": True, "max_tokens": 1, "ignore_eos": True}).encode()
        started_s = time.monotonic()
        connection.sendall(post_bytes(server.port, CHAT, body))
        data = connection.recv(65536)
        while b"data: " not in data:
            data += connection.recv(65536)
        assert time.monotonic() - started_s >= 0.15
        data += read_all(connection)
    assert unchunk(data.partition(b"\r\n\r\n")[2]).endswith(b"data: [DONE]\n\n")


def test_characters_and_tokens_are_never_torn(server: Server) -> None:
    _, body = server.stream(CHAT, messages=USER, max_tokens=200, seed=5, ignore_eos=True, return_token_ids=True)
    chunks = events_of(body)
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    whole = server.post(CHAT, messages=USER, max_tokens=200, seed=5, ignore_eos=True, return_token_ids=True)[2]
    assert text == whole["choices"][0]["message"]["content"]
    assert ids == whole["choices"][0]["token_ids"] and len(ids) == 200
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_a_fault_behind_the_first_byte_is_one_error_event(module_server: Server) -> None:
    """The envelope, no exception text, no [DONE], and the stream ends."""
    server = module_server
    with failing_after(server, 6):
        _, body = server.stream(CHAT, messages=USER, max_tokens=100, ignore_eos=True)
    last = body.split(b"\n\n")[-2]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert b"secret" not in body and b"[DONE]" not in body
    server.wait_idle()
    assert server.post(CHAT, messages=USER, max_tokens=2)[0] == 200


def test_keep_alive_comments_come_when_idle(tmp_path: Path) -> None:
    """And only then: test_gateway_sse_pace."""
    config = ServerConfig(db=str(tmp_path / "chat.db"), sse_keep_alive_interval_s=0.1)
    with Server(config) as server:
        server.wait_ready()
        with slowed(server, 0.35):
            _, body = server.stream(CHAT, messages=USER, max_tokens=3, ignore_eos=True)
        assert b": keep-alive\n\n" in body
        assert events_of(body.replace(b": keep-alive\n\n", b""))


def test_non_streamed_body_is_plain_json(server: Server) -> None:
    with server.connect() as connection:
        body = json.dumps({"messages": USER, "max_tokens": 3}).encode()
        connection.sendall(post_bytes(server.port, CHAT, body))
        head, _, rest = read_all(connection).partition(b"\r\n\r\n")
    status, headers = parse_head(head)
    assert status == 200 and headers["content-type"] == "application/json"
    assert rest.isascii() and json.loads(rest)["object"] == "chat.completion"
