"""Test tools of the official clients with the demo model itself, as `make serve` serves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import MessageParam, ToolParam
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel, SecretStr

from chatcache.config import EngineConfig, ServerConfig
from chatcache.factory import build_engine, load_tokenizer
from tests.contracts import node_clients
from tests.gateway.serving import MODEL, Server

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(dtype="float32", attention_backend="reference", device="cpu", kv_memory_bytes=16 * 2**20)
PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {"location": {"type": "string", "description": "City and country, for example Bogotá, Colombia"}},
    "required": ["location"],
    "additionalProperties": False,
}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get current temperature for a given location.",
        "parameters": PARAMETERS,
        "strict": True,
    },
}
ADD: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
FLAT: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Get current temperature for a given location.",
    "parameters": PARAMETERS,
    "strict": True,
}
GREEDY = {"temperature": 0}  # a field that this client lacks
FORECAST = '{"temperature": 18, "condition": "sunny"}'
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather like in Lisbon today?"}]
ENVIRONMENT = Path(sys.prefix) / "frameworks"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    tokenizer = load_tokenizer(CONFIG)
    config = ServerConfig(db=str(tmp_path_factory.mktemp("db") / "chat.db"))
    server = Server(
        config, load_tokenizer=lambda: tokenizer, tokenizer=tokenizer, build_engine=lambda: build_engine(CONFIG)
    )
    with server:
        yield server.wait_ready()
        server.wait_idle()


@pytest.fixture(scope="module")
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def called(message: Any) -> list[tuple[str, dict[str, Any]]]:
    """The names and arguments of the calls of a chat message."""
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_chat_calls_the_function_and_uses_its_result(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], temperature=0)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and not message.content
    assert called(message) == [("get_weather", {"location": "Lisbon"})] and message.tool_calls is not None
    said: Any = message.model_dump(exclude_none=True)
    history = [*ASKED, said, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": FORECAST}]
    second = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], temperature=0)
    text = second.choices[0].message.content
    assert second.choices[0].finish_reason == "stop" and text is not None
    assert all(word in text for word in ("Lisbon", "sunny", "18"))
    assert first.usage is not None and second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens // 16 * 16


def test_chat_chooses_the_function_and_copies_numbers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is 1234 + 567?"}],
        tools=[WEATHER, ADD],
        temperature=0,
    )
    assert called(answer.choices[0].message) == [("add", {"a": 1234, "b": 567})]


def test_question_without_a_function_is_answered_in_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        tools=[WEATHER, ADD],
        temperature=0,
    )
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.tool_calls is None
    assert "Paris" in (answer.choices[0].message.content or "")


def test_streamed_call_equals_the_whole_one(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED, tools=[WEATHER], temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert called(final.choices[0].message) == [("get_weather", {"location": "Lisbon"})]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_forced_call_is_held_by_its_schema(client: openai.OpenAI, choice: Any, temperature: float) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello!"}],
        tools=[WEATHER, ADD] if choice == "required" else [ADD],
        tool_choice=choice,
        temperature=temperature,
        seed=3,
        max_tokens=400,
    )
    message = answer.choices[0].message
    if answer.choices[0].finish_reason != "length":  # a hot model may write numbers without end
        for name, arguments in called(message):
            assert set(arguments) == ({"location"} if name == "get_weather" else {"a", "b"})
    assert message.tool_calls is not None and message.tool_calls[0].type == "function"
    assert message.tool_calls[0].function.name in ("get_weather", "add")


def test_responses_call_the_function_and_continue_with_its_result(client: openai.OpenAI) -> None:
    asked = "What is the weather like in Oslo?"
    with client.responses.stream(model=MODEL, input=asked, tools=[FLAT], temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        first = stream.get_final_response()
    [call] = first.output
    assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == (
        "get_weather",
        {"location": "Oslo"},
    )
    assert "".join(deltas) == call.arguments and len(deltas) > 3
    second = client.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "cloudy"}],
        tools=[FLAT],
        temperature=0,
    )
    assert "cloudy" in second.output_text and "Oslo" in second.output_text


def test_anthropic_client_gets_a_tool_use_and_an_answer(demo: Server) -> None:
    tools: list[ToolParam] = [
        {
            "name": "get_weather",
            "description": "Get the current weather in a given location",
            "input_schema": {
                "type": "object",
                "properties": {"location": {"type": "string"}},
                "required": ["location"],
            },
        }
    ]
    asked: list[MessageParam] = [{"role": "user", "content": "What's the weather like in San Francisco?"}]
    with anthropic.Anthropic(base_url=demo.url, api_key="unused", max_retries=0) as client:
        first = client.messages.create(model=MODEL, max_tokens=200, messages=asked, tools=tools, extra_body=GREEDY)
        [call] = first.content
        assert first.stop_reason == "tool_use" and call.type == "tool_use"
        assert (call.name, call.input) == ("get_weather", {"location": "San Francisco"})
        result: MessageParam = {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "15 degrees"}],
        }
        with client.messages.stream(
            model=MODEL,
            max_tokens=200,
            messages=[*asked, {"role": "assistant", "content": first.content}, result],
            tools=tools,
            extra_body=GREEDY,
        ) as stream:
            text = stream.get_final_text()
        forced = client.messages.create(
            model=MODEL, max_tokens=200, messages=asked, tools=tools, extra_body=GREEDY, tool_choice={"type": "any"}
        )
    assert "15" in text and "San Francisco" in text
    assert forced.stop_reason == "tool_use"


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"It is sunny in {city}."


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@pytest.fixture
def chat(demo: Server) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=f"{demo.url}/v1", api_key=SecretStr("unused"), max_retries=0, temperature=0)


def test_langchain_runs_a_bound_tool(chat: ChatOpenAI) -> None:
    asked: list[BaseMessage] = [HumanMessage("What is the weather in Madrid?")]
    bound = chat.bind_tools([get_weather])
    first = bound.invoke(asked)
    assert isinstance(first, AIMessage)
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("get_weather", {"city": "Madrid"})]
    answer = bound.invoke([*asked, first, get_weather.invoke(first.tool_calls[0])])
    assert "sunny in Madrid" in str(answer.content)
    begin, *rest = [chunk for chunk in bound.stream(asked) if isinstance(chunk, AIMessageChunk)]
    assert add_ai_message_chunks(begin, *rest).tool_calls[0]["args"] == {"city": "Madrid"}


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_extracts_structured_output(chat: ChatOpenAI, method: Any) -> None:
    person = chat.with_structured_output(Person, method=method).invoke("Extract: Olivia is 36 years old.")
    assert isinstance(person, Person)
    if method == "function_calling":
        assert person == Person(name="Olivia", age=36)


@pytest.fixture(scope="module")
def frameworks(demo: Server) -> dict[str, Any]:
    """The results of `frameworks/demo_tools.py`: openai-agents and instructor."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        pytest.skip("openai-agents and instructor are not installed: make clients")
    script = Path(__file__).resolve().parent / "frameworks" / "demo_tools.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"SERVER": demo.url, "MODEL": MODEL, "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([str(python), str(script)], env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents_run_a_function_tool(frameworks: dict[str, Any], api: str) -> None:
    result = frameworks["agents"][api]
    assert result["called_with"] == ["Vienna"]
    assert "sunny" in result["answer"] and "Vienna" in result["answer"]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor_gets_a_valid_object(frameworks: dict[str, Any], mode: str) -> None:
    assert frameworks["instructor"][mode] == {"name": "Jason", "age": 25}


def test_ai_sdk_runs_a_tool(demo: Server) -> None:
    if not (node_clients.FOLDER / "node_modules" / "@ai-sdk" / "openai").is_dir():
        pytest.skip("@ai-sdk/openai is not installed: make clients")
    received = node_clients.run("aisdk_openai.mjs", "Calculate 40 + 2.", url=demo.url)
    assert len(received["usages"]) == 2 and "42" in received["text"]
