"""Forks inside replies: finished or still growing, answered anew or going on. Greedy replies are their own oracle."""

from __future__ import annotations

from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.gateway.frames import LONG, TERMINAL, Frame, ask, items_of, receive, send, text_of, until_end
from tests.gateway.serving import PAGE_SIZE, Server, held, hurry, slowed
from tests.gateway.test_tenants import ONE, TWO, shared

__all__ = ["shared"]

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
SYSTEM = "Be brief and exact."


def begin(socket: ClientConnection, num_deltas: int, **fields: Any) -> tuple[Frame, list[str]]:
    """Start a long reply and read until it has said something; return the response and the ids of its messages."""
    send(socket, **{**LONG, **GREEDY, **fields})
    response: Frame = receive(socket)["response"]
    items: list[str] = []
    while num_deltas:
        frame = receive(socket)
        if frame["type"] == "response.output_item.added":
            items.append(frame["item"]["id"])
        num_deltas -= frame["type"] == "response.output_text.delta"
    return response, items


def cached(response: Frame) -> int:
    tokens: int = response["usage"]["input_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.parametrize("by", ["response", "message"])
def test_a_growing_reply_is_forked_as_far_as_it_goes(server: Server, url: str, by: str) -> None:
    with slowed(server, 0.05), connect(url) as growing, connect(url) as forking:
        origin, items = begin(growing, 12, n=2, instructions=SYSTEM, max_output_tokens=200)
        place = {"previous_response_id": origin["id"]} if by == "response" else {"previous_item_id": items[1]}
        fork = ask(forking, **place, **GREEDY, instructions=SYSTEM, input="Stop. Why?", max_output_tokens=10)
        hurry(server)
        whole = until_end(growing)[-1]["response"]
    index = 0 if by == "response" else 1
    stored = items_of(server, fork)
    conversation = server.request("GET", f"/v1/conversations/{fork['conversation']['id']}")[2]
    assert conversation["active_leaf"] == fork["output"][0]["id"], "who goes on elsewhere is not called back"
    stump = stored[fork["forked_item_id"]]
    said = stump["content"][0]["text"]
    assert said and text_of(whole, index).startswith(said) and said != text_of(whole, index)
    assert (stump["status"], stump["finish_reason"], stump["index"]) == ("incomplete", "fork", index)
    history = whole["usage"]["input_tokens"] + stump["num_tokens"]
    assert cached(fork) >= history, "to the last token, full pages or not"
    assert stump["parent_id"] == stored[whole["output"][index]["id"]]["parent_id"]
    assert stored[fork["input_item_ids"][0]]["parent_id"] == stump["id"]
    assert [item["id"] for item in whole["output"]] == [item["id"] for item in whole["output"] if item["id"] in stored]
    # The stored fork is the prompt that was computed: asked again from the tree, the answer and its pages are the same.
    with connect(url) as socket:
        again = ask(
            socket,
            previous_item_id=stump["id"],
            **GREEDY,
            instructions=SYSTEM,
            input="Stop. Why?",
            max_output_tokens=10,
        )
        assert text_of(again) == text_of(fork)
        assert again["usage"]["input_tokens"] == fork["usage"]["input_tokens"]
        assert cached(again) >= fork["usage"]["input_tokens"] - PAGE_SIZE
        # And the response itself is continued after what it said in the end.
        after = ask(socket, previous_response_id=whole["id"], instructions=SYSTEM, input="Go on")
    assert stored[whole["output"][0]["id"]]["id"] == items_of(server, after)[after["input_item_ids"][0]]["parent_id"]


@pytest.mark.parametrize("fork_at", [None, 5])
def test_fork_growing_reply_without_input_continues_it(server: Server, url: str, fork_at: int | None) -> None:
    with slowed(server, 0.05), connect(url) as growing, connect(url) as forking:
        origin, _ = begin(growing, 12, max_output_tokens=400)
        place = {"previous_response_id": origin["id"]} | ({} if fork_at is None else {"fork_at": fork_at})
        send(forking, **place, **GREEDY, max_output_tokens=60)
        frames = [receive(forking)]
        hurry(server)
        frames = until_end(forking, frames[0])
        whole = until_end(growing)[-1]["response"]
    fork = frames[-1]["response"]
    assert fork["status"] == "incomplete" and fork["usage"]["output_tokens"] == 60
    said, all_said = text_of(fork), text_of(whole)
    assert all_said.startswith(said.rstrip("\ufffd")), "greedy from the same tokens is the same reply"
    streamed = "".join(frame["delta"] for frame in frames if frame["type"] == "response.output_text.delta")
    assert streamed == said
    stored = items_of(server, fork)
    assert stored[fork["output"][0]["id"]]["parent_id"] == stored[whole["output"][0]["id"]]["parent_id"]
    assert fork["forked_item_id"] is None and fork["input_item_ids"] == []
    assert fork["parent_item_id"] == whole["parent_item_id"] == whole["input_item_ids"][-1]


def test_a_finished_reply_is_forked_at_any_token(server: Server, socket: ClientConnection) -> None:
    origin = ask(socket, input="Hello", **GREEDY, instructions=SYSTEM, max_output_tokens=24)
    item_id, whole = origin["output"][0]["id"], text_of(origin)
    for fork_at in (1, 7, 23, 24):
        place = {"previous_item_id": item_id, "fork_at": fork_at}
        on = ask(socket, **place, **GREEDY, max_output_tokens=27 - fork_at)
        assert text_of(on).startswith(whole.rstrip("\ufffd"))
        assert on["usage"]["input_tokens"] <= origin["usage"]["input_tokens"] + fork_at
        assert cached(on) >= on["usage"]["input_tokens"] - PAGE_SIZE
        asked = ask(socket, **place, **GREEDY, instructions=SYSTEM, input="Why?", max_output_tokens=4)
        stored = items_of(server, asked)
        parent = stored[stored[asked["input_item_ids"][0]]["parent_id"]]
        assert parent["id"] == (asked["forked_item_id"] if fork_at < 24 else item_id)
        assert whole.startswith(parent["content"][0]["text"])
        assert fork_at - 3 <= parent["num_tokens"] <= fork_at
        assert cached(asked) >= on["usage"]["input_tokens"] - PAGE_SIZE


def test_what_went_on_is_a_reply_like_any_other(server: Server, socket: ClientConnection) -> None:
    origin = ask(socket, input="Hello", **GREEDY, max_output_tokens=12)
    place = {"previous_item_id": origin["output"][0]["id"], "fork_at": 6}
    on = ask(socket, **place, n=2, seed=4, temperature=1, ignore_eos=True, max_output_tokens=9)
    assert text_of(on, 0) != text_of(on, 1)
    history = origin["usage"]["input_tokens"] + 6 + 9
    after = ask(socket, previous_item_id=on["output"][1]["id"], input="Then?")
    assert history - PAGE_SIZE - 3 <= cached(after) <= history
    further = ask(socket, previous_item_id=on["output"][1]["id"], fork_at=10, **GREEDY, max_output_tokens=3)
    assert text_of(further).startswith(text_of(on, 1)[:3])
    stored = items_of(server, further)
    assert len({stored[each["output"][0]["id"]]["parent_id"] for each in (origin, on, further)}) == 1


def test_stop_strings_are_sought_in_what_is_new(socket: ClientConnection) -> None:
    origin = ask(socket, input="Hello", **GREEDY, max_output_tokens=24)
    old, new = text_of(origin)[:2], text_of(origin)
    place = {"previous_item_id": origin["output"][0]["id"], "fork_at": 20}
    on = ask(socket, **place, **GREEDY, stop=[old], max_output_tokens=4)
    assert text_of(on).startswith(new[: len(new) // 2])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"fork_at": 0}, "fork_at"),
        ({"fork_at": "1"}, "fork_at"),
        ({"fork_at": 9}, "fork_at"),
        ({"fork_at": 2, "instructions": "Other."}, "instructions"),
    ],
)
def test_bad_forks_of_a_reply(socket: ClientConnection, fields: Frame, param: str) -> None:
    origin = ask(socket, input="Hello", **GREEDY)
    send(socket, previous_item_id=origin["output"][0]["id"], **fields)
    error = receive(socket)["error"]
    assert error["param"] == param and param in error["message"]


def test_forks_of_nothing(server: Server, socket: ClientConnection, url: str) -> None:
    origin = ask(socket, input=[{"role": "assistant", "content": "Welcome"}, {"role": "user", "content": "Hi"}])
    for place in ({"previous_item_id": origin["input_item_ids"][0]}, {"previous_item_id": origin["input_item_ids"][1]}):
        send(socket, **place, fork_at=1)
        assert receive(socket)["error"]["param"] == "fork_at"
    send(socket, input="x", fork_at=1)
    assert receive(socket)["error"]["param"] == "fork_at"
    with held(server) as let_go, connect(url) as other:
        send(other, **LONG)
        waiting = receive(other)["response"]
        send(socket, previous_response_id=waiting["id"], input="x")
        error = receive(socket)["error"]
        let_go()
        send(other, "response.cancel", response_id=waiting["id"])
        until_end(other)
    assert (error["code"], error["param"]) == ("nothing_to_fork", "previous_response_id")


def test_fork_running_response_of_another_tenant_returns_404(shared: Server) -> None:
    url = f"ws://127.0.0.1:{shared.port}/v1/responses"
    with (
        slowed(shared, 0.01),
        connect(url, additional_headers=ONE) as mine,
        connect(url, additional_headers=TWO) as other,
    ):
        response, items = begin(mine, 3)
        for place in ({"previous_response_id": response["id"]}, {"previous_item_id": items[0]}):
            for more in ({}, {"input": "x"}, {"fork_at": 1}, {"fork_at": 10**6}):
                send(other, **place, **more)
                frame = receive(other)
                assert (frame["type"], frame["status"]) == ("error", 404)
        send(mine, "response.cancel", response_id=response["id"])
        assert until_end(mine)[-1]["type"] in TERMINAL
