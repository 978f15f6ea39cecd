"""Seeded fuzz of the WebSocket's messages: valid ones, changed a little. Each gets an answer or a close with a reason.

Never a 1011 (the server failed), never a connection that just ends, nothing in the error log, no page left in use.
"""

from __future__ import annotations

import json
import logging

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.gateway.frames import Frame, ask
from tests.gateway.mutator import Mutator
from tests.gateway.serving import Server

CLOSES = (4400, 4429, 1009, 1013)
ID = "resp_0123456789abcdef"
CREATE: Frame = {
    "type": "response.create",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    "max_output_tokens": 2,
    "n": 2,
    "temperature": 0.5,
    "stop": ["x"],
    "metadata": {"a": "b"},
    "stream_id": "lane",
}
VALID: list[Frame] = [
    CREATE,
    {"type": "response.create", "response": {"input": "Hi", "max_output_tokens": 1}},
    {"type": "response.create", "input": "Hi", "max_output_tokens": 2, "beam_width": 2, "stream_beams": True},
    {"type": "response.create", "input": "Hi", "max_output_tokens": 1, "instructions": "Be short.", "store": False},
    {"type": "response.create", "input": "Hi", "previous_response_id": ID, "fork_at": 1},
    {"type": "response.create", "input": "Hi", "conversation": {"id": "conv_x"}, "previous_item_id": "root"},
    {"type": "response.create", "input": "Hi", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 1},
    {"type": "response.create", "input": "Hi", "generate": False},
    {"type": "response.create", "input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": {}}]},
    {"type": "response.cancel", "response_id": ID},
    {"type": "response.drop", "response_id": ID, "candidate": 1},
    {"type": "response.steer", "previous_response_id": ID, "input": "More"},
    {"type": "response.resume", "response_id": ID, "starting_after": 3},
    {"type": "response.ack", "response_id": ID, "sequence_number": 3},
    {"type": "conversation.subscribe", "conversation": "conv_x"},
    {"type": "prompt.prewarm", "previous_item_id": "msg_x", "input": "Hi"},
]


def _is_open_after(socket: ClientConnection, message: bytes | str, number: int) -> bool:
    """Send it and a probe behind it; read until the probe is refused, or the connection closed for a known reason."""
    try:
        socket.send(message)
        socket.send(json.dumps({"type": "no.such.thing", "stream_id": f"probe{number}"}))
        while not _answers(json.loads(socket.recv(timeout=60)), number, message):
            pass
    except ConnectionClosed:
        assert socket.close_code in CLOSES, (message, socket.close_code, socket.close_reason)
        return False
    return True


def _answers(frame: Frame, number: int, message: bytes | str) -> bool:
    """Whether this frame refuses the probe. No frame may be a fault of the server's."""
    assert frame["type"] != "response.failed", (message, frame)
    assert "Traceback" not in str(frame), (message, frame)
    if frame["type"] != "error":
        return False
    assert 400 <= frame["status"] < 500 or frame["status"] == 503, (message, frame)
    assert set(frame["error"]) == {"message", "type", "param", "code"}
    return frame.get("stream_id") == f"probe{number}"


def _fuzz(server: Server, seed: int, num_messages: int) -> None:
    mutator, number = Mutator(seed, VALID), 0
    url, protocols = f"ws://127.0.0.1:{server.port}/v1/responses", [["chatcache.v1"], None]
    while number < num_messages:
        with connect(url, max_size=None, subprotocols=protocols[number % 2]) as socket:  # type: ignore[arg-type]
            is_open = True
            while is_open and number < num_messages:
                number += 1
                is_open = _is_open_after(socket, mutator.message(), number)


def _check(server: Server, caplog: pytest.LogCaptureFixture, seed: int, num_messages: int) -> None:
    _fuzz(server, seed, num_messages)
    with connect(f"ws://127.0.0.1:{server.port}/v1/responses") as socket:
        assert ask(socket, input="still here")["output"]
    server.wait_idle()
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_mutated_messages_get_an_error_or_a_close(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    _check(server, caplog, seed=6, num_messages=250)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_mutated_messages_get_an_error_or_a_close_for_long(
    server: Server, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    _check(server, caplog, seed=seed, num_messages=5_000)
