"""Helpers for the Responses WebSocket."""

from __future__ import annotations

import json
from typing import Any

from websockets.sync.client import ClientConnection

from tests.gateway.serving import Server

Frame = dict[str, Any]
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")
LONG: Frame = {"input": "Hi", "max_output_tokens": 900, "ignore_eos": True}


def send(socket: ClientConnection, kind: str = "response.create", **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def receive(socket: ClientConnection) -> Frame:
    data = socket.recv(timeout=60)
    assert isinstance(data, str) and data.isascii()
    frame: Frame = json.loads(data)
    return frame


def until_end(socket: ClientConnection, first: Frame | None = None) -> list[Frame]:
    """Read frames to the terminal one."""
    frames = [first] if first else []
    while not frames or frames[-1]["type"] not in TERMINAL:
        frames.append(receive(socket))
    return frames


def ask(socket: ClientConnection, **fields: Any) -> Frame:
    """Run one response and return its object."""
    send(socket, **{"max_output_tokens": 8, "ignore_eos": True, **fields})
    frames = until_end(socket)
    assert frames[-1]["type"] in ("response.completed", "response.incomplete"), frames[-1]
    response: Frame = frames[-1]["response"]
    return response


def text_of(response: Frame, index: int = 0) -> str:
    text: str = response["output"][index]["content"][0]["text"]
    return text


def items_of(server: Server, response: Frame) -> dict[str, Frame]:
    data = server.request("GET", f"/v1/conversations/{response['conversation']['id']}/items?branches=all")[2]["data"]
    return {item["id"]: item for item in data}
