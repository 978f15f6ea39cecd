"""Test calls, results and reasoning as items of responses and conversations, with the real `openai` client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import FunctionToolParam

from tests.contracts.test_openai_tools import ARGUMENTS, CALLS, FLAT, client
from tests.gateway.described import Described
from tests.gateway.scripted import ScriptedServer, hermes_server
from tests.gateway.serving import MODEL, slowed

pytestmark = pytest.mark.client("openai (Python)")

__all__ = ["client"]

module_server = hermes_server

KINDS = ["reasoning", "message", "function_call", "function_call"]


def called(client: openai.OpenAI, server: ScriptedServer, tools: list[FunctionToolParam] = FLAT) -> Any:
    server.say(CALLS)
    return client.responses.create(model=MODEL, input="Weather?", tools=tools, max_output_tokens=300)


@pytest.mark.slow
def test_conversation_lists_calls_and_results(client: openai.OpenAI, server: ScriptedServer) -> None:
    first = called(client, server)
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    place: dict[str, Any] = {"previous_response_id": first.id, "input": results, "tools": FLAT}
    counted = client.responses.input_tokens.count(model=MODEL, **place)
    server.say("Sunny.")
    second = client.responses.create(model=MODEL, **place)
    assert second.usage is not None and second.usage.input_tokens == counted.input_tokens
    assert second.conversation is not None
    conversation = second.conversation.id
    items = list(client.conversations.items.list(conversation, order="asc"))
    assert [item.type for item in items] == ["message", *KINDS, *["function_call_output"] * 2, "message"]
    described = Described(server.request("GET", "/openapi.json")[2])
    for limit in (1, 3):
        pages = client.conversations.items.list(conversation, order="asc", limit=limit)
        assert [item.to_dict() for item in pages] == [item.to_dict() for item in items]
    path = f"/v1/conversations/{conversation}/items"
    for query in ("?order=asc", "?branches=all"):
        described.check("GET", path, 200, server.request("GET", path + query)[2])
    for item in items:
        assert item.id is not None
        assert client.conversations.items.retrieve(item.id, conversation_id=conversation) == item
        described.check("GET", f"{path}/{item.id}", 200, server.request("GET", f"{path}/{item.id}")[2])
    for item, call in zip(items[5:7], calls, strict=True):
        assert item.type == "function_call_output" and item.call_id == call.call_id and item.output == "sunny"
    listed = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.to_dict() for item in listed] == [item.to_dict() for item in items[5:7]]
    # Any of a reply's items identifies the reply.
    gone = items[2].id
    assert gone is not None
    client.conversations.items.delete(gone, conversation_id=conversation)
    left = list(client.conversations.items.list(conversation, order="asc"))
    assert [item.type for item in left] == ["message", "function_call_output", "function_call_output", "message"]


def test_calls_can_be_added_to_a_conversation(client: openai.OpenAI, server: ScriptedServer) -> None:
    call: Any = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"}
    answer: Any = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
    conversation = client.conversations.create(items=[{"role": "user", "content": "What time?"}, call])
    added = client.conversations.items.create(conversation.id, items=[answer])
    assert [item.type for item in added.data] == ["function_call_output"]
    items = list(client.conversations.items.list(conversation.id, order="asc"))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    server.say("Noon.")
    said = client.responses.create(model=MODEL, conversation=conversation.id, tools=FLAT)
    assert said.output_text == "Noon."
    server.say("Noon.")
    alone = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "What time?"}, call, answer], tools=FLAT
    )
    assert said.usage is not None and alone.usage is not None
    assert said.usage.input_tokens == alone.usage.input_tokens


@pytest.mark.slow
def test_growing_call_is_shown_up_to_its_current_end(client: openai.OpenAI, server: ScriptedServer) -> None:
    whole = called(client, server)
    described = Described(server.request("GET", "/openapi.json")[2])
    server.say(CALLS)
    seen: list[list[str]] = []
    with slowed(server, 0.02):
        begun = client.responses.create(
            model=MODEL, input="Weather?", tools=FLAT, max_output_tokens=300, background=True
        )
        while (answer := server.request("GET", f"/v1/responses/{begun.id}")[2])["status"] == "in_progress":
            described.check("GET", "/v1/responses/x", 200, answer)
            seen.append([item["type"] for item in answer["output"]])
            for item, final in zip(answer["output"], whole.output, strict=False):
                for name in ("text", "arguments"):
                    parts = item.get("content", [item])
                    so_far = parts[0].get(name, "") if parts else ""
                    wholes = final.to_dict().get("content") or [final.to_dict()]
                    assert wholes[0].get(name, "").startswith(so_far)
    assert all(kinds == KINDS[: len(kinds)] for kinds in seen) and KINDS[:3] in seen
    ended = client.responses.retrieve(begun.id)
    assert [json.loads(item.arguments) for item in ended.output if item.type == "function_call"] == [
        json.loads(text) for text in ARGUMENTS
    ]


@pytest.mark.parametrize("tools", [FLAT, FLAT[:1]])
def test_tools_are_part_of_the_token_count(
    client: openai.OpenAI, server: ScriptedServer, tools: list[FunctionToolParam]
) -> None:
    first = called(client, server, tools)
    counted = client.responses.input_tokens.count(model=MODEL, input="Weather?", tools=tools)
    assert first.usage.input_tokens == counted.input_tokens
    assert counted.input_tokens > client.responses.input_tokens.count(model=MODEL, input="Weather?").input_tokens
