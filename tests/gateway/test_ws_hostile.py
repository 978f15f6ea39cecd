"""The Responses WebSocket under bad requests, bad frames, stalled readers and a failing store."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from chatcache.config import ServerConfig
from chatcache.gateway.websocket import streams as lanes
from chatcache.storage.sqlite import SqliteStore
from tests.gateway.frames import LONG, Frame, ask, receive, send, until_end
from tests.gateway.responding import PATH
from tests.gateway.serving import Server, slowed, wait_until


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({}, "input", 400),
        ({"input": ""}, None, 200),
        ({"input": 5}, "input", 400),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].tool_call_id", 400),
        ({"input": [{"type": "function_call_output", "role": "user"}]}, "input[0].call_id", 400),
        ({"input": "x", "n": 0}, "n", 400),
        ({"input": "x", "n": 65}, "n", 400),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", 400),
        ({"input": "x", "temperature": 3}, "temperature", 400),
        ({"input": "x", "top_logprobs": 21}, "top_logprobs", 400),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs", 400),
        ({"input": "x", "model": "nope"}, "model", 404),
        ({"input": "x", "previous_response_id": "resp_x"}, "previous_response_id", 404),
        ({"input": "x", "previous_item_id": "msg_x"}, "previous_item_id", 404),
        ({"input": "x", "previous_item_id": "root"}, "previous_item_id", 400),
        ({"input": "x", "conversation": "conv_x"}, "conversation", 404),
        ({"input": "x", "conversation": {"id": ""}}, "conversation.id", 400),
        ({"input": "x", "background": True}, "background", 400),
        ({"input": "x", "generate": 0}, "generate", 400),
        ({"input": "x", "tools": [{}]}, "tools", 400),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", 400),
        ({"input": "x", "stream_id": 5}, "stream_id", 400),
        ({"input": "x", "metadata": {str(n): "x" for n in range(17)}}, "metadata", 400),
        ({"type": "response.steer"}, "previous_response_id", 400),
        ({"type": "response.resume", "response_id": "resp_x"}, "type", 400),
        ({"type": "response.ack", "response_id": "resp_x", "sequence_number": 1}, "type", 400),
        ({"type": "response.drop", "response_id": "resp_x", "candidate": 0}, "type", 400),
        ({"type": "conversation.subscribe"}, "type", 400),
        ({"type": "prompt.prewarm", "input": "x"}, "type", 400),
        ({"type": "response.cancel"}, "response_id", 400),
        ({"type": "response.cancel", "response_id": "resp_x"}, "response_id", 404),
        ({"type": None}, "type", 400),
        ({"type": [None]}, "type", 400),
        ({"type": {}}, "type", 400),
        ({"response": 5}, "response", 400),
    ],
)
def test_invalid_request_gets_one_error_and_keeps_the_socket(
    server: Server, socket: ClientConnection, fields: Frame, param: str | None, status: int
) -> None:
    stored = len(server.request("GET", "/v1/conversations?limit=100")[2]["data"])
    socket.send(json.dumps({"type": "response.create", "max_output_tokens": 2, **fields}))
    if status != 200:
        frame = receive(socket)
        assert frame["type"] == "error" and frame["status"] == status
        assert set(frame["error"]) == {"message", "type", "param", "code"}
        assert param is None or frame["error"]["param"] == param
        assert len(server.request("GET", "/v1/conversations?limit=100")[2]["data"]) == stored
    else:
        until_end(socket)
    assert ask(socket, input="still here")["output"]


@pytest.mark.parametrize(
    "data", ["", "{", "[]", '{"type":"a","type":"b"}', '{"a":NaN}', '{"a":"\\ud800"}', b"\x00\x01", b"{}"]
)
def test_frame_that_is_not_strict_json_closes_4400(url: str, data: str | bytes) -> None:
    with connect(url) as connection:
        connection.send(data)
        assert receive(connection)["error"]["code"] == "invalid_json"
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(timeout=60)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 4400


def test_oversized_frame_closes_1009(url: str) -> None:
    with connect(url) as connection:
        connection.send("x" * (ServerConfig().max_frame_bytes + 1))
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(timeout=60)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009


@pytest.mark.slow
def test_streams_and_their_queues_are_bounded(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.02):
        for number in range(40):
            send(socket, **LONG, stream_id=f"lane{number}")
        errors: list[Frame] = []
        while not errors:
            frame = receive(socket)
            errors += [frame] if frame["type"] == "error" else []
        assert errors[0]["status"] == 503 and errors[0]["error"]["param"] == "stream_id"


def test_frame_flood_closes_only_its_own_socket(server: Server, url: str) -> None:
    def flood() -> None:
        with connect(url, max_queue=None) as connection:
            for number in range(5_000):
                send(connection, "response.cancel", response_id=f"resp_{number}")
            while True:
                assert receive(connection)["status"] in (404, 429)  # the last one gives the reason for closing

    with connect(url, max_queue=None) as calm:
        with pytest.raises(ConnectionClosed) as caught:
            flood()
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 4429
        assert ask(calm, input="Hello")["output"]


@pytest.mark.parametrize("lane", ["x" * 129, "é" * 100_000, 5, ["a"], {"a": "b"}, ""])
def test_invalid_stream_id_is_rejected(socket: ClientConnection, lane: object) -> None:
    send(socket, input="x", stream_id=lane)
    error = receive(socket)
    assert error["error"]["param"] == "stream_id" and len(str(error)) < 1000
    assert ask(socket, input="still here", stream_id="é" * 128)["output"]


def test_concurrent_resumes_are_bounded(
    server: Server, page: ClientConnection, socket: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_RESUMED", 2)
    with slowed(server, 0.02):
        ids = []
        for lane in "abc":
            send(socket, **LONG, stream_id=lane)
            ids.append(until(socket, "response.created")["response"]["id"])
        for response_id in [*ids, *ids]:
            send(page, "response.resume", response_id=response_id, starting_after=0)
        errors = [until(page, "error") for _ in range(4)]
        assert [error["status"] for error in errors] == [503, 400, 400, 503]
        for response_id in ids:
            send(page, "response.cancel", response_id=response_id)
        assert {until(page, "response.incomplete")["response"]["id"] for _ in range(2)} == set(ids[:2])


def until(socket: ClientConnection, kind: str) -> Frame:
    while (frame := receive(socket))["type"] != kind:
        pass
    return frame


def test_repeated_prewarm_runs_one_at_a_time(server: Server, page: ClientConnection) -> None:
    for number in range(300):
        send(page, "prompt.prewarm", input="All that I ever wanted to say. " * 5 + "x" * number)
    send(page, "conversation.subscribe")
    until(page, "conversation.subscribed")  # all of them have been read
    assert ask(page, input="still here")["output"]


def test_plain_http_on_the_websocket_path_gets_an_error(server: Server) -> None:
    status, _, answer = server.request("GET", "/v1/responses")
    assert status in (404, 405, 426) and answer["error"]["code"]


def test_stalled_reader_blocks_no_other_connection(server: Server, url: str) -> None:
    """Frames stay in the log; the engine and other connections continue."""
    with connect(url, max_queue=1) as stalled, connect(url) as other:
        send(stalled, **{**LONG, "max_output_tokens": 300}, n=3)
        assert len(ask(other, input="Hello")["output"]) == 1
        wait_until(lambda: server.num_pages_in_use() == 0, "the stalled reader's generation to end")
        frames = until_end(stalled)
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))


@pytest.mark.slow
def test_deleted_conversation_fails_its_running_response_once(
    server: Server, socket: ClientConnection, caplog: pytest.LogCaptureFixture
) -> None:
    """One terminal event, and no error in the log."""
    with slowed(server, 0.01):
        send(socket, **LONG)
        frames = [receive(socket)]
        while frames[-1]["type"] != "response.output_text.delta":
            frames.append(receive(socket))
        path = f"/v1/conversations/{frames[0]['response']['conversation']['id']}"
        assert server.request("DELETE", path)[0] == 200
        last = until_end(socket)[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "not_found"
    assert server.request("GET", path)[0] == 404
    assert ask(socket, input="still here")["output"]
    gc.collect()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class FullDisk(SqliteStore):
    """A store that rejects every write."""

    async def create(self, *_: object, **__: object) -> None:
        raise OSError("disk full: /secret/path")


def test_store_failure_at_the_start_stops_the_generation(tmp_path: Path) -> None:
    with Server(ServerConfig(), store=FullDisk(tmp_path / "c.db")) as server:
        server.wait_ready()
        with connect(f"ws://127.0.0.1:{server.port}/v1/responses") as socket:
            send(socket, **LONG)
            frame = receive(socket)
            assert frame["type"] == "error" and frame["status"] == 500
            assert "secret" not in json.dumps(frame)
            assert ask(socket, input="x", store=False)["output"]
        server.wait_idle()


def test_disconnected_client_logs_no_error(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """One send finds the client gone; its earlier frames are still handled."""
    arrived = [{"type": "conversation.subscribe"}, {"type": "no.such.thing"}, {"type": "response.cancel"}, "{"]
    sent: list[Any] = []

    async def talk() -> None:
        frames = iter(arrived)

        async def receive() -> Message:
            await asyncio.sleep(0.02)  # answers are sent meanwhile
            frame = next(frames, None) if sent else {"type": "websocket.connect"}
            if frame is None or "websocket.connect" in str(frame):
                return {"type": "websocket.connect"} if frame else {"type": "websocket.disconnect", "code": 1006}
            return {"type": "websocket.receive", "text": frame if isinstance(frame, str) else json.dumps(frame)}

        async def send(message: Message) -> None:
            sent.append(message["type"])
            if len(sent) > 2:  # accepted, session.created
                raise ConnectionResetError

        headers = [(b"host", b"127.0.0.1")]
        scope = {"type": "websocket", "path": PATH, "headers": headers, "subprotocols": ["chatcache.v1"]}
        app = server._uvicorn.config.loaded_app
        await app({**scope, "query_string": b"", "scheme": "ws", "server": None, "state": {}}, receive, send)

    server.call(talk())
    assert sent == ["websocket.accept", "websocket.send", "websocket.send"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
