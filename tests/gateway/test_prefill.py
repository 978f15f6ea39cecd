"""Replies that begin with a text of the client: `continue_final_message` of the Responses API."""

from __future__ import annotations

from typing import Any

import pytest
from websockets.sync.client import ClientConnection

from tests.gateway.frames import Frame, ask, items_of, receive, send, text_of, until_end
from tests.gateway.serving import PAGE_SIZE, Server


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_reply_with_given_start_contains_it_and_is_one_message(server: Server, socket: ClientConnection) -> None:
    send(
        socket,
        input=[user("Name a colour"), assistant("It is bl")],
        continue_final_message=True,
        max_output_tokens=6,
        ignore_eos=True,
        temperature=0,
    )
    frames = until_end(socket)
    response = frames[-1]["response"]
    text = text_of(response)
    assert text.startswith("It is bl") and len(text) > len("It is bl")
    deltas = "".join(each["delta"] for each in frames if each["type"] == "response.output_text.delta")
    assert deltas == text
    assert response["usage"]["output_tokens"] == 6
    items = list(items_of(server, response).values())
    assert [(item["role"], item["content"][0]["text"]) for item in items] == [
        ("user", "Name a colour"),
        ("assistant", text),
    ]
    assert items[1]["num_tokens"] > 6, "the tokens of the start belong to the message"
    # the next turn finds the whole reply in the cache
    after = ask(socket, input="And?", previous_response_id=response["id"])
    history = response["usage"]["input_tokens"] + response["usage"]["output_tokens"]
    assert after["usage"]["input_tokens_details"]["cached_tokens"] >= history - PAGE_SIZE
    # and it can be forked at every token
    tokens = server.request("GET", f"/v1/conversations/{response['conversation']['id']}/items/{items[1]['id']}/tokens")
    assert len(tokens[2]["data"]) == items[1]["num_tokens"]
    fork = ask(socket, previous_item_id=items[1]["id"], fork_at=2)
    assert text.startswith(text_of(fork)[:2])


def test_reply_with_given_start_equals_the_chat_completion(server: Server, socket: ClientConnection) -> None:
    fields: dict[str, Any] = {"continue_final_message": True, "temperature": 0, "ignore_eos": True}
    messages = [user("Tell me a story"), assistant("Once upon a")]
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=12, **fields)[2]
    response = ask(socket, input=messages, max_output_tokens=12, **fields)
    assert text_of(response) == "Once upon a" + chat["choices"][0]["message"]["content"]


def test_new_answer_with_given_start_is_a_sibling(server: Server, socket: ClientConnection) -> None:
    first = ask(socket, input="Hello")
    asked = first["input_item_ids"][0]
    second = ask(
        socket, input=[assistant("Well,")], previous_item_id=asked, continue_final_message=True, n=2, temperature=1
    )
    assert [text_of(second, index).startswith("Well,") for index in range(2)] == [True, True]
    items = items_of(server, first)
    assert [item["parent_id"] for item in items.values()] == [None, asked, asked, asked]
    assert second["input_item_ids"] == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [user("a")]}, "continue_final_message"),
        ({"input": "a"}, "continue_final_message"),
        ({"input": []}, "continue_final_message"),
        ({"input": [user("a"), assistant("")]}, "continue_final_message"),
        ({"input": [assistant("b")]}, "input"),
    ],
)
def test_start_that_is_no_text_of_an_assistant_returns_400(socket: ClientConnection, fields: Frame, param: str) -> None:
    send(socket, continue_final_message=True, **fields)
    error = receive(socket)
    assert (error["type"], error["error"]["param"]) == ("error", param), error


def test_start_together_with_a_fork_returns_400(socket: ClientConnection) -> None:
    first = ask(socket, input="Hello")
    item = first["output"][0]["id"]
    send(socket, input=[assistant("x")], previous_item_id=item, fork_at=2, continue_final_message=True)
    error = receive(socket)
    assert (error["type"], error["error"]["param"]) == ("error", "fork_at"), error
