"""How clients read a stream: their own parsers where they can be had, their rules where not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import httpx_sse
from openai._streaming import SSEDecoder

from tests.contracts.node_clients import run

# From the pieces a socket delivered to the payloads a client gets out of them.
Reader = Callable[[list[bytes]], list[Any]]


def openai_python(pieces: list[bytes]) -> list[Any]:
    """openai-python: its decoder, and what its `Stream` does with each event."""
    found: list[Any] = []
    for event in SSEDecoder().iter_bytes(iter(pieces)):
        if event.data.startswith("[DONE]"):
            break
        found.append(event.json())
    return found


def httpx_sse_library(pieces: list[bytes]) -> list[Any]:
    """httpx-sse, over a response with these bytes."""
    response = httpx.Response(
        200,
        headers={"content-type": "text/event-stream"},
        content=iter(pieces),
        request=httpx.Request("GET", "http://server"),
    )
    events = httpx_sse.EventSource(response).iter_sse()
    return [json.loads(event.data) for event in events if event.data != "[DONE]"]


def vllm_bench(pieces: list[bytes]) -> list[Any]:
    """The rules of `vllm bench serve`: every read is stripped, events end with a blank LF line, one `data: ` each.

    What remains is an event of its own if it is a whole one.
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
    """npm eventsource-parser, as the AI SDK and most JavaScript clients use it; in steps of the first piece's size."""
    heard = run("parser.mjs", str(len(pieces[0])), stdin=b"".join(pieces))
    assert heard["errors"] == []
    return [json.loads(event["data"]) for event in heard["events"] if event["data"] != "[DONE]"]


READERS: dict[str, Reader] = {
    "openai-python": openai_python,
    "httpx-sse": httpx_sse_library,
    "vllm-bench": vllm_bench,
    "eventsource-parser": eventsource_parser,
}


def by_event(body: bytes) -> list[bytes]:
    """One read per event, or comment: as a socket delivers them while tokens come one by one."""
    pieces = [piece + b"\n\n" for piece in body.split(b"\n\n")]
    return pieces[:-1] if pieces[-1] == b"\n\n" else pieces


def in_steps(body: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(body), size):
        yield body[at : at + size]
