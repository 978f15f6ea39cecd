"""The OpenAPI document against responses with reasoning and function calls."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.gateway.described import Described
from tests.gateway.scripted import ScriptedServer, hermes_server

PARAMETERS = {"type": "object", "properties": {"in": {"type": "string"}}}
FLAT = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
NESTED = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"in": "Oslo"}}\n</tool_call>'
REPLY = f"<think>hm</think>Look.\n{CALL}"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "tools": NESTED, "max_tokens": 200}
ASKED: dict[str, Any] = {"input": "Weather?", "tools": FLAT, "max_output_tokens": 200}


hermes = hermes_server


@pytest.fixture(scope="module")
def described(hermes: ScriptedServer) -> Described:
    return Described(hermes.request("GET", "/openapi.json")[2])


def test_chat_completions_with_reasoning_and_calls_are_as_described(
    hermes: ScriptedServer, described: Described
) -> None:
    hermes.say(REPLY)
    status, _, answer = hermes.post("/v1/chat/completions", **CHAT)
    described.check("POST", "/v1/chat/completions", status, answer)
    assert answer["choices"][0]["message"]["tool_calls"] and answer["choices"][0]["finish_reason"] == "tool_calls"
    hermes.say(REPLY)
    deltas = []
    for event in re.findall(rb"data: (\{.*)\n\n", hermes.stream("/v1/chat/completions", **CHAT)[1]):
        described.check_event("POST", "/v1/chat/completions", json.loads(event))
        deltas += [choice["delta"] for choice in json.loads(event)["choices"]]
    assert {"role", "content", "reasoning_content", "tool_calls"} <= {name for delta in deltas for name in delta}


def test_responses_and_items_with_reasoning_and_calls_are_as_described(
    hermes: ScriptedServer, described: Described
) -> None:
    hermes.say(REPLY)
    status, _, answer = hermes.post("/v1/responses", **ASKED)
    described.check("POST", "/v1/responses", status, answer)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    hermes.say("Cold.")
    output = {"type": "function_call_output", "call_id": answer["output"][2]["call_id"], "output": "-3"}
    status, _, last = hermes.post("/v1/responses", input=[output], previous_response_id=answer["id"], tools=FLAT)
    described.check("POST", "/v1/responses", status, last)
    conversation = f"/v1/conversations/{last['conversation']['id']}"
    paths = [f"/v1/responses/{each['id']}{more}" for each in (answer, last) for more in ("", "/input_items")]
    paths += [f"{conversation}/items", f"{conversation}/items?branches=all", conversation]
    paths += [f"{conversation}/items/{item['id']}" for item in answer["output"]]
    for path in paths:
        status, _, found = hermes.request("GET", path)
        assert status == 200, (path, found)
        described.check("GET", path, status, found)
    status, _, explained = hermes.post("/v1/cache/explain", input="And now?", previous_response_id=last["id"])
    described.check("POST", "/v1/cache/explain", status, explained)


@pytest.mark.parametrize(
    ("fields", "delta"),
    [({}, "reasoning_text.delta"), ({"reasoning": {"summary": "auto"}}, "reasoning_summary_text.delta")],
)
def test_events_with_reasoning_and_calls_are_as_described(
    hermes: ScriptedServer, described: Described, fields: dict[str, Any], delta: str
) -> None:
    hermes.say(REPLY)
    kinds = set()
    for event in re.findall(rb"data: (\{.*)\n\n", hermes.stream("/v1/responses", **ASKED, **fields)[1]):
        described.check_event("POST", "/v1/responses", json.loads(event))
        kinds.add(json.loads(event)["type"])
    assert {f"response.{delta}", "response.function_call_arguments.done", "response.completed"} <= kinds
