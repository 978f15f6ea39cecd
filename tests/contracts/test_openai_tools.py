"""Test the real `openai` client with functions and reasoning, against the real server with a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import FunctionToolParam, ResponseInputParam

from tests.gateway.scripted import ScriptedServer, hermes_server
from tests.gateway.serving import MODEL, PAGE_SIZE

pytestmark = pytest.mark.client("openai (Python)")

PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[ChatCompletionToolParam] = [
    {"type": "function", "function": {"name": "weather", "description": "How it is", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock"}},
]
FLAT: list[FunctionToolParam] = [
    {"type": "function", "name": "weather", "description": "How it is", "parameters": PARAMETERS, "strict": False},
    {"type": "function", "name": "clock", "parameters": None, "strict": False},
]
USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Weather in Zürich?"}]
CALLS = (
    "<think>\nI should look.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city":  "Z\\u00fcrich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = ['{"city":  "Z\\u00fcrich"}', "{}"]


module_server = hermes_server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, list):
        return [_without(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: _without(each, names) for name, each in value.items() if name not in names}


def dumped(message: Any) -> ChatCompletionMessageParam:
    value: ChatCompletionMessageParam = message.model_dump(exclude_none=True)
    return value


def test_chat_calls_as_history_hit_the_cache(client: openai.OpenAI, server: ScriptedServer) -> None:
    server.say(CALLS)
    first = client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, max_tokens=300)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "One moment."
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"] == "I should look."
    assert first.usage is not None and first.usage.completion_tokens_details is not None
    thought = first.usage.completion_tokens_details.reasoning_tokens or 0
    assert 5 < thought < first.usage.completion_tokens
    calls = choice.message.tool_calls
    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls if call.type == "function"] == [
        *zip(("weather", "clock"), ARGUMENTS, strict=True)
    ]
    assert len({call.id for call in calls}) == 2
    server.say("Sunny, at noon.")
    second = client.chat.completions.create(
        model=MODEL,
        tools=TOOLS,
        max_tokens=30,
        messages=[
            *USER,
            dumped(choice.message),
            {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"},
            {"role": "tool", "tool_call_id": calls[1].id, "content": [{"type": "text", "text": "12:00"}]},
        ],
    )
    assert second.choices[0].message.content == "Sunny, at noon." and second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.tool_calls is None
    history = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert history - PAGE_SIZE <= (second.usage.prompt_tokens_details.cached_tokens or 0) <= history


def test_streamed_chat_joins_to_the_whole_one(client: openai.OpenAI, server: ScriptedServer) -> None:
    server.say(CALLS)
    reasoning: list[str] = []
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=TOOLS, max_tokens=300) as stream:
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                reasoning.append((event.chunk.choices[0].delta.model_extra or {}).get("reasoning_content", ""))
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert "".join(reasoning) == "I should look." and message.content == "One moment."
    assert message.tool_calls is not None and len(reasoning) > 5
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        *zip(("weather", "clock"), ARGUMENTS, strict=True)
    ]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_call_follows_its_schema(client: openai.OpenAI, server: ScriptedServer, choice: Any) -> None:
    server.say(CALLS.replace('"city":', '"town":'))  # violates the schema
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, tools=TOOLS[:1], tool_choice=choice, seed=5, max_tokens=1500
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None and calls[0].type == "function" and calls[0].function.name == "weather"
    assert calls[0].function.arguments.startswith('{"city"')
    if answer.choices[0].finish_reason == "tool_calls":
        assert set(json.loads(calls[0].function.arguments)) == {"city"}


def test_responses_call_is_answered_and_continued(client: openai.OpenAI, server: ScriptedServer) -> None:
    server.say(CALLS)
    seen: list[str] = []
    arguments = ""
    with client.responses.stream(model=MODEL, input="Weather?", tools=FLAT, max_output_tokens=300) as stream:
        for event in stream:
            seen.append(event.type)
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
        first = stream.get_final_response()
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output_text == "One moment." and arguments == "".join(ARGUMENTS)
    thought = first.output[0]
    assert thought.type == "reasoning" and thought.content is not None and thought.content[0].text == "I should look."
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, call.arguments, call.status) for call in calls] == [
        ("weather", ARGUMENTS[0], "completed"),
        ("clock", ARGUMENTS[1], "completed"),
    ]
    assert first.usage is not None and first.usage.output_tokens_details.reasoning_tokens > 5
    order = [name for at, name in enumerate(seen) if at == 0 or seen[at - 1] != name]
    assert order == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added", "response.reasoning_text.delta"),
        *("response.reasoning_text.done", "response.content_part.done", "response.output_item.done"),
        *("response.output_item.added", "response.content_part.added", "response.output_text.delta"),
        *("response.output_item.added", "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", "response.output_item.done"),
        *("response.output_item.added", "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", "response.output_item.done"),
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    stored = client.responses.retrieve(first.id)
    parsed = {"parsed", "parsed_arguments"}  # added by the client
    assert [_without(item.model_dump(), parsed) for item in stored.output] == [
        _without(item.model_dump(), parsed) for item in first.output
    ]
    results: ResponseInputParam = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls
    ]
    server.say("Sunny.")
    second = client.responses.create(model=MODEL, previous_response_id=first.id, input=results, tools=FLAT)
    assert second.output_text == "Sunny."
    history = first.usage.total_tokens
    assert second.usage is not None
    assert history - PAGE_SIZE <= second.usage.input_tokens_details.cached_tokens <= history
    server.say("It is.")
    third = client.responses.create(model=MODEL, previous_response_id=second.id, input="Nice", tools=FLAT)
    assert third.usage is not None
    assert second.usage.total_tokens - PAGE_SIZE <= third.usage.input_tokens_details.cached_tokens


def test_responses_sent_again_as_input_hit_the_cache(client: openai.OpenAI, server: ScriptedServer) -> None:
    server.say(CALLS)
    first = client.responses.create(model=MODEL, input="Weather?", tools=FLAT, store=False, max_output_tokens=300)
    calls = [item for item in first.output if item.type == "function_call"]
    history: Any = [
        {"role": "user", "content": "Weather?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        *({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls),
    ]
    server.say("Sunny.")
    second = client.responses.create(model=MODEL, input=history, tools=FLAT, store=False)
    assert second.output_text == "Sunny." and first.usage is not None and second.usage is not None
    assert first.usage.total_tokens - PAGE_SIZE <= second.usage.input_tokens_details.cached_tokens


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}, {"type": "namespace", "tools": []}]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": FLAT * 70}, "tools"),
        ({"tools": [*FLAT, FLAT[0]]}, "tools"),
        ({"tools": [{**FLAT[0], "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tools": [{**FLAT[0], "parameters": {"x": "y" * 70_000}}]}, "tools[0].parameters"),
        ({"tools": FLAT, "tool_choice": "always"}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "name": "nope"}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"tools": FLAT, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tools"),
        ({"tools": [{**FLAT[0], "strict": True, "parameters": {"type": "object", "properties": 5}}]}, "tools"),
    ],
)
def test_invalid_field_is_refused_by_name(client: openai.OpenAI, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={"model": MODEL, "input": "Hi", **body}, cast_to=object)
    assert caught.value.param == param
    assert param.split("[")[0].split(".")[0] in caught.value.message
