"""The Responses WebSocket: order, numbering, lanes, cancel, trees; and what a hostile client gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from chatcache.chat.store_sqlite import SqliteStore
from chatcache.config import ServerConfig
from tests.gateway.serving import MAX_MODEL_LEN, MODEL, PAGE_SIZE, Server, slowed, wait_until

Frame = dict[str, Any]
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")
LONG: Frame = {"input": "Hi", "max_output_tokens": 900, "ignore_eos": True}


@pytest.fixture
def url(server: Server) -> str:
    return f"ws://127.0.0.1:{server.port}/v1/responses"


@pytest.fixture
def socket(url: str) -> Iterator[ClientConnection]:
    with connect(url, max_size=None) as connection:
        yield connection


@pytest.fixture
def page(url: str) -> Iterator[ClientConnection]:
    """As the browser connects."""
    with connect(url, subprotocols=["chatcache.v1"]) as connection:  # type: ignore[list-item]
        assert json.loads(connection.recv())["type"] == "session.created"
        yield connection


def send(socket: ClientConnection, kind: str = "response.create", **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def receive(socket: ClientConnection) -> Frame:
    data = socket.recv(timeout=20)
    assert isinstance(data, str) and data.isascii()
    frame: Frame = json.loads(data)
    return frame


def until_end(socket: ClientConnection, first: Frame | None = None) -> list[Frame]:
    """Frames up to the terminal one."""
    frames = [first] if first else []
    while not frames or frames[-1]["type"] not in TERMINAL:
        frames.append(receive(socket))
    return frames


def ask(socket: ClientConnection, **fields: Any) -> Frame:
    """One whole response object."""
    send(socket, **{"max_output_tokens": 8, "ignore_eos": True, **fields})
    frames = until_end(socket)
    assert frames[-1]["type"] in ("response.completed", "response.incomplete"), frames[-1]
    response: Frame = frames[-1]["response"]
    return response


def text_of(response: Frame, index: int = 0) -> str:
    text: str = response["output"][index]["content"][0]["text"]
    return text


def items_of(server: Server, response: Frame) -> dict[str, Frame]:
    data = server.request("GET", f"/v1/conversations/{response['conversation']['id']}/items")[2]["data"]
    return {item["id"]: item for item in data}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_event_order_and_numbers(socket: ClientConnection, n: int, nested: bool) -> None:
    fields = {"model": MODEL, "input": "Hello", "n": n, "max_output_tokens": 30, "seed": 1}
    send(socket, **({"response": fields} if nested else dict[str, Any](fields)))
    frames = until_end(socket)
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
    kinds = [frame["type"] for frame in frames]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    added = ["response.output_item.added", "response.content_part.added"]
    assert kinds[2 : 2 + 2 * n] == added * n
    assert [frame["output_index"] for frame in frames[2 : 2 + 2 * n : 2]] == list(range(n))
    final = frames[-1]["response"]
    for index in range(n):
        mine = [frame for frame in frames if frame.get("output_index") == index]
        body = [frame["type"] for frame in mine]
        assert body[-3:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
        assert set(body[2:-3]) == {"response.output_text.delta"}
        text = "".join(frame["delta"] for frame in mine if frame["type"] == "response.output_text.delta")
        assert text == mine[-3]["text"] == mine[-2]["part"]["text"] == text_of(final, index)
        assert mine[-1]["item"] == final["output"][index]
    assert final["usage"]["output_tokens"] <= 30 * n
    assert frames[0]["response"]["id"] == final["id"] and frames[0]["response"]["output"] == []


def test_same_answer_as_the_stateless_route(server: Server, socket: ClientConnection) -> None:
    response = ask(socket, input="Hello", seed=5, instructions="Be brief.", max_output_tokens=20)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = server.post("/v1/chat/completions", messages=messages, seed=5, max_tokens=20, ignore_eos=True)[2]
    assert text_of(response) == chat["choices"][0]["message"]["content"]


def test_turns_forks_and_regenerations_hit_their_history(server: Server, socket: ClientConnection) -> None:
    system = {"instructions": "Be brief and kind. " * 4}
    first = ask(socket, input="Hello", n=2, **system)
    used = first["usage"]["input_tokens"]

    def cached(response: Frame) -> int:
        tokens: int = response["usage"]["input_tokens_details"]["cached_tokens"]
        return tokens

    second = ask(socket, input="And then?", previous_response_id=first["id"], **system)
    assert used + 8 - PAGE_SIZE <= cached(second) <= used + 8
    picked = ask(socket, input="And then?", previous_item_id=first["output"][1]["id"], **system)
    assert used + 8 - PAGE_SIZE <= cached(picked) <= used + 8
    again = ask(socket, previous_item_id=first["input_item_ids"][-1], **system)
    assert cached(again) >= used - PAGE_SIZE
    onward = ask(socket, input="Now?", conversation=first["conversation"]["id"], **system)
    edited = ask(socket, input="Bonjour", conversation=first["conversation"], previous_item_id="root", **system)
    fresh = ask(socket, input="Other instructions", previous_response_id=first["id"], instructions="Shout!")
    assert cached(fresh) < used

    items = items_of(server, first)
    named = {"first": first, "second": second, "again": again, "onward": onward, "edited": edited}
    parent = {name: items[response["output"][0]["id"]]["parent_id"] for name, response in named.items()}
    assert parent["again"] == parent["first"] == first["input_item_ids"][0]
    assert items[parent["second"]]["parent_id"] == first["output"][0]["id"]
    assert items[picked["input_item_ids"][0]]["parent_id"] == first["output"][1]["id"]
    assert items[parent["onward"]]["parent_id"] == again["output"][0]["id"]  # the active leaf
    assert items[parent["edited"]]["parent_id"] is None
    assert items[first["output"][1]["id"]]["usage"] == first["usage"]
    assert items[first["output"][1]["id"]]["index"] == 1


def test_input_items_and_roles(server: Server, socket: ClientConnection) -> None:
    response = ask(
        socket,
        input=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
            {"type": "message", "role": "user", "content": "Again"},
        ],
    )
    items = items_of(server, response)
    assert [items[each]["role"] for each in response["input_item_ids"]] == ["system", "user", "assistant", "user"]
    assert ask(socket, input="More", previous_response_id=response["id"])["usage"]["input_tokens"] > 0


def test_not_stored_means_not_there(server: Server, socket: ClientConnection) -> None:
    before = server.request("GET", "/v1/conversations")[2]["data"]
    response = ask(socket, input="Hello", store=False)
    assert response["conversation"] is None and response["store"] is False
    assert server.request("GET", "/v1/conversations")[2]["data"] == before
    send(socket, input="x", previous_response_id=response["id"])
    assert receive(socket)["error"]["code"] == "previous_response_not_found"


def test_beams_return_the_best_first(socket: ClientConnection) -> None:
    response = ask(socket, input="Hello", beam_width=4, n=2)
    assert len(response["output"]) == 2 and response["beam_width"] == 4


def test_logprobs_on_request(socket: ClientConnection) -> None:
    response = ask(socket, input="Hello", include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 8 and all(len(entry["top_logprobs"]) == 2 for entry in logprobs)


def test_cancel_ends_with_a_receipt(server: Server, socket: ClientConnection, url: str) -> None:
    with slowed(server, 0.01):
        send(socket, **LONG, n=3)
        response_id = receive(socket)["response"]["id"]
        while receive(socket)["type"] != "response.output_text.delta":
            pass
        with connect(url) as other:  # from any connection
            send(other, "response.cancel", response_id=response_id)
            last = until_end(socket)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "cancelled"
    assert last["response"]["incomplete_details"] == {"reason": "cancelled"}
    assert last["receipt"]["pages_freed"] > 0 and last["receipt"]["tokens_after_stop"] <= 2 * 3
    assert [item["finish_reason"] for item in last["response"]["output"]] == ["cancelled"] * 3
    server.wait_idle()
    stored = items_of(server, last["response"])
    assert stored[last["response"]["output"][2]["id"]]["content"][0]["text"] == text_of(last["response"], 2)
    later = ask(socket, input="Go on", previous_response_id=response_id)
    assert later["usage"]["input_tokens_details"]["cached_tokens"] > PAGE_SIZE
    send(socket, "response.cancel", response_id=response_id)
    assert receive(socket)["error"]["code"] == "not_found"


def test_lanes_run_side_by_side_and_each_in_order(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.005):
        send(socket, **{**LONG, "max_output_tokens": 60}, stream_id="slow")
        send(socket, **{**LONG, "max_output_tokens": 5}, stream_id="quick")
        send(socket, **{**LONG, "max_output_tokens": 5}, stream_id="slow")
        ends: list[str] = []
        while len(ends) < 3:
            frame = receive(socket)
            if frame["type"] == "response.created":
                assert frame["stream_id"] != "slow" or "slow" in ends or ends.count("slow") == 0
            if frame["type"] in TERMINAL:
                ends.append(frame["stream_id"])
    assert ends == ["quick", "slow", "slow"]


def test_default_lane_answers_in_order_without_a_stream_id(socket: ClientConnection) -> None:
    for text in ("one", "two"):
        send(socket, input=text, max_output_tokens=3, ignore_eos=True)
    first, second = until_end(socket), until_end(socket)
    assert "stream_id" not in first[0]
    assert first[-1]["response"]["id"] != second[0]["response"]["id"] == second[-1]["response"]["id"]


def test_the_page_gets_progress_and_conversations(page: ClientConnection) -> None:
    send(page, input="Hello", max_output_tokens=3, ignore_eos=True)
    frames = until_end(page)
    notes = [frame for frame in frames if "sequence_number" not in frame]
    assert [note["type"] for note in notes] == [
        "response.progress", "conversation.updated", "response.progress", "conversation.updated",
    ]  # fmt: skip
    assert (notes[0]["phase"], notes[2]["phase"]) == ("queued", "decode")
    assert notes[2]["input_tokens"] == frames[-1]["response"]["usage"]["input_tokens"]
    assert notes[1]["conversation"]["title"] == "Hello"
    assert notes[3]["conversation"]["active_leaf"] == frames[-1]["response"]["output"][0]["id"]


def test_leaving_ends_and_keeps_what_was_said(server: Server, url: str) -> None:
    with slowed(server, 0.01), connect(url) as connection:
        send(connection, **LONG)
        conversation = receive(connection)["response"]["conversation"]["id"]
        while receive(connection)["type"] != "response.output_text.delta":
            pass
    server.wait_idle()
    path = f"/v1/conversations/{conversation}/items"
    wait_until(lambda: len(server.request("GET", path)[2]["data"]) == 2, "the partial answer to be stored")
    assert server.request("GET", path)[2]["data"][1]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({}, "input", 400),
        ({"input": ""}, None, 200),
        ({"input": 5}, "input", 400),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", 400),
        ({"input": [{"type": "function_call_output", "role": "user"}]}, "input[0].type", 400),
        ({"input": "x", "n": 0}, "n", 400),
        ({"input": "x", "n": 65}, "n", 400),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", 400),
        ({"input": "x", "max_output_tokens": MAX_MODEL_LEN}, "max_output_tokens", 400),
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
        ({"input": "x", "generate": False}, "generate", 400),
        ({"input": "x", "tools": [{}]}, "tools", 400),
        ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text", 400),
        ({"input": "x", "stream_id": 5}, "stream_id", 400),
        ({"input": "x", "metadata": {str(n): "x" for n in range(17)}}, "metadata", 400),
        ({"type": "response.steer"}, "type", 400),
        ({"type": "response.cancel"}, "response_id", 400),
        ({"type": "response.cancel", "response_id": "resp_x"}, "response_id", 404),
        ({"type": None}, "type", 400),
        ({"response": 5}, "response", 400),
    ],
)
def test_bad_requests_are_one_error_and_the_socket_lives(
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
def test_frames_that_are_not_strict_json_close_4400(url: str, data: str | bytes) -> None:
    with connect(url) as connection:
        connection.send(data)
        assert receive(connection)["error"]["code"] == "invalid_json"
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(timeout=10)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 4400


def test_too_big_frames_close_1009(url: str) -> None:
    with connect(url) as connection:
        connection.send("x" * (ServerConfig().max_frame_bytes + 1))
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(timeout=10)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009


def test_lanes_and_queues_are_bounded(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.02):
        for number in range(40):
            send(socket, **{**LONG, "max_output_tokens": 20}, stream_id=f"lane{number}")
        errors: list[Frame] = []
        while not errors:
            frame = receive(socket)
            errors += [frame] if frame["type"] == "error" else []
        assert errors[0]["status"] == 503 and errors[0]["error"]["param"] == "stream_id"


def test_plain_http_on_the_socket_path_is_told_so(server: Server) -> None:
    status, _, answer = server.request("GET", "/v1/responses")
    assert status in (404, 405, 426) and answer["error"]["code"]


def test_a_reader_that_stalls_stops_nobody(server: Server, url: str) -> None:
    """Frames wait in the log; the engine and the other connections go on."""
    with connect(url, max_queue=1) as stalled, connect(url) as other:
        send(stalled, **{**LONG, "max_output_tokens": 300}, n=3)
        assert len(ask(other, input="Hello")["output"]) == 1
        wait_until(lambda: server.num_pages_in_use() == 0, "the stalled reader's generation to end")
        frames = until_end(stalled)
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))


class FullDisk(SqliteStore):
    """Refuses every write."""

    async def create(self, *_: object) -> None:
        raise OSError("disk full: /secret/path")


def test_a_store_that_fails_ends_the_generation_too(tmp_path: Path) -> None:
    with Server(ServerConfig(), store=FullDisk(tmp_path / "c.db")) as server:
        server.wait_ready()
        with connect(f"ws://127.0.0.1:{server.port}/v1/responses") as socket:
            send(socket, **LONG)
            frame = receive(socket)
            assert frame["type"] == "error" and frame["status"] == 500
            assert "secret" not in json.dumps(frame)
            assert ask(socket, input="x", store=False)["output"]
        server.wait_idle()
