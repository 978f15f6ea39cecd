"""SSE parsers of clients: their own code where it is installed, else an implementation of their rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import httpx_sse
from openai._streaming import SSEDecoder

from tests.contracts.node_clients import run

# A parser: from the chunks of a socket to the payloads that the client receives.
Reader = Callable[[list[bytes]], list[Any]]


def openai_python(pieces: list[bytes]) -> list[Any]:
    """openai-python: its decoder, and the processing of its `Stream` class."""
    found: list[Any] = []
    for event in SSEDecoder().iter_bytes(iter(pieces)):
        if event.data.startswith("[DONE]"):
            break
        found.append(event.json())
    return found


def httpx_sse_library(pieces: list[bytes]) -> list[Any]:
    """httpx-sse, for a response with these bytes."""
    response = httpx.Response(
        200,
        headers={"content-type": "text/event-stream"},
        content=iter(pieces),
        request=httpx.Request("GET", "http://server"),
    )
    events = httpx_sse.EventSource(response).iter_sse()
    return [json.loads(event.data) for event in events if event.data != "[DONE]"]


def vllm_bench(pieces: list[bytes]) -> list[Any]:
    """The rules of `vllm bench serve`: each read is stripped, events end with a blank LF line, one `data: ` each.

    The rest after the last event counts as an event if it is complete.
    """
    found: list[Any] = []
    buffer = ""
    for piece in pieces:
        buffer += piece.strip().decode()
        messages: list[str] = []
        while "\n\n" in buffer:
            message, buffer = buffer.split("\n\n", 1)
            messages.append(message.strip())
        if buffer.startswith("data: ") and _is_whole(buffer.removeprefix("data: ").strip()):
            messages.append(buffer.strip())
            buffer = ""
        for message in messages:
            if not message or message.startswith(":"):
                continue
            payload = message.removeprefix("data: ")
            if payload != "[DONE]":
                found.append(json.loads(payload))
    return found


def _is_whole(payload: str) -> bool:
    try:
        json.loads(payload)
    except ValueError:
        return payload == "[DONE]"
    return True


def eventsource_parser(pieces: list[bytes]) -> list[Any]:
    """npm eventsource-parser, used by the AI SDK and most JavaScript clients; in steps of the first chunk's size."""
    received = run("parser.mjs", str(len(pieces[0])), stdin=b"".join(pieces))
    assert received["errors"] == []
    return [json.loads(event["data"]) for event in received["events"] if event["data"] != "[DONE]"]


READERS: dict[str, Reader] = {
    "openai-python": openai_python,
    "httpx-sse": httpx_sse_library,
    "vllm-bench": vllm_bench,
    "eventsource-parser": eventsource_parser,
}


def by_event(body: bytes) -> list[bytes]:
    """Return one chunk per event or comment, as a socket delivers them during generation."""
    pieces = [piece + b"\n\n" for piece in body.split(b"\n\n")]
    return pieces[:-1] if pieces[-1] == b"\n\n" else pieces


def in_steps(body: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(body), size):
        yield body[at : at + size]
