"""The Responses WebSocket: event order, numbering, concurrent streams, cancel and trees."""

from __future__ import annotations

from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.gateway.frames import LONG, TERMINAL, Frame, ask, items_of, receive, send, text_of, until_end
from tests.gateway.serving import MODEL, PAGE_SIZE, Server, hurry, slowed, wait_until


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("nested", [False, True])
def test_websocket_events_are_ordered_and_numbered(socket: ClientConnection, n: int, nested: bool) -> None:
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


def test_websocket_reply_equals_chat_completions(server: Server, socket: ClientConnection) -> None:
    response = ask(socket, input="Hello", seed=5, instructions="Be brief.", max_output_tokens=20)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = server.post("/v1/chat/completions", messages=messages, seed=5, max_tokens=20, ignore_eos=True)[2]
    assert text_of(response) == chat["choices"][0]["message"]["content"]


def test_turns_forks_and_regenerations_reuse_cached_history(server: Server, socket: ClientConnection) -> None:
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


def test_input_items_accept_every_role(server: Server, socket: ClientConnection) -> None:
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


def test_unstored_response_is_not_found_elsewhere(server: Server, socket: ClientConnection) -> None:
    before = server.request("GET", "/v1/conversations")[2]["data"]
    response = ask(socket, input="Hello", store=False)
    assert response["conversation"] is None and response["store"] is False
    assert server.request("GET", "/v1/conversations")[2]["data"] == before
    status, _, answer = server.post("/v1/responses", input="x", previous_response_id=response["id"])
    assert (status, answer["error"]["code"]) == (404, "previous_response_not_found")
    assert ask(socket, input="x", previous_response_id=response["id"])["conversation"] is not None


def test_beam_search_returns_the_best_first(socket: ClientConnection) -> None:
    response = ask(socket, input="Hello", beam_width=4, n=2)
    assert len(response["output"]) == 2 and response["beam_width"] == 4


def test_logprobs_are_returned_on_request(socket: ClientConnection) -> None:
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
    assert last["receipt"]["pages_freed"] > 0 and last["receipt"]["tokens_after_stop"] >= 0
    assert [item["finish_reason"] for item in last["response"]["output"]] == ["cancelled"] * 3
    server.wait_idle()
    stored = items_of(server, last["response"])
    assert stored[last["response"]["output"][2]["id"]]["content"][0]["text"] == text_of(last["response"], 2)
    later = ask(socket, input="Go on", previous_response_id=response_id)
    assert later["usage"]["input_tokens_details"]["cached_tokens"] > PAGE_SIZE
    send(socket, "response.cancel", response_id=response_id)
    assert receive(socket)["error"]["code"] == "not_found"


def test_streams_run_concurrently_and_each_in_order(server: Server, socket: ClientConnection) -> None:
    with slowed(server, 0.02):
        send(socket, **{**LONG, "max_output_tokens": 600}, stream_id="slow")
        send(socket, **{**LONG, "max_output_tokens": 5}, stream_id="quick")
        send(socket, **{**LONG, "max_output_tokens": 5}, stream_id="slow")
        ends: list[str] = []
        while len(ends) < 3:
            frame = receive(socket)
            if frame["type"] == "response.created":
                assert frame["stream_id"] != "slow" or "slow" in ends or ends.count("slow") == 0
            if frame["type"] in TERMINAL:
                ends.append(frame["stream_id"])
                hurry(server)
    assert ends == ["quick", "slow", "slow"]


def test_default_stream_answers_in_order_without_a_stream_id(socket: ClientConnection) -> None:
    for text in ("one", "two"):
        send(socket, input=text, max_output_tokens=3, ignore_eos=True)
    first, second = until_end(socket), until_end(socket)
    assert "stream_id" not in first[0]
    assert first[-1]["response"]["id"] != second[0]["response"]["id"] == second[-1]["response"]["id"]


def test_extended_websocket_receives_progress_and_conversations(page: ClientConnection) -> None:
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


def test_disconnect_ends_the_response_and_stores_its_text(server: Server, url: str) -> None:
    with slowed(server, 0.02):
        with connect(url) as connection:
            send(connection, **LONG)
            conversation = receive(connection)["response"]["conversation"]["id"]
            while receive(connection)["type"] != "response.output_text.delta":
                pass
        server.wait_idle()
    path = f"/v1/conversations/{conversation}/items?branches=all"
    wait_until(lambda: len(server.request("GET", path)[2]["data"]) == 2, "the partial answer to be stored")
    answer = server.request("GET", path)[2]["data"][1]
    assert (answer["status"], answer["finish_reason"]) == ("incomplete", "cancelled")
