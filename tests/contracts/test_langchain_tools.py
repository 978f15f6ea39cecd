"""Test tools of langchain-openai against the real server with a scripted model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.messages.ai import add_ai_message_chunks
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.gateway.scripted import ScriptedServer, hermes_server
from tests.gateway.serving import MODEL, PAGE_SIZE

pytestmark = pytest.mark.client("langchain-openai")

SAID = (
    "One moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)
ASKED: list[BaseMessage] = [HumanMessage("Weather in Zürich and Bern?")]


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


model = hermes_server


@pytest.fixture
def chat(model: ScriptedServer) -> Iterator[ChatOpenAI]:
    yield ChatOpenAI(
        model=MODEL,
        base_url=f"{model.url}/v1",
        api_key=SecretStr("unused"),
        max_completion_tokens=300,
        max_retries=0,
        stream_usage=True,
    )
    model.wait_idle()


def cities(message: AIMessage | AIMessageChunk) -> list[str]:
    assert {call["name"] for call in message.tool_calls} == {"weather"}
    assert not message.invalid_tool_calls
    return [call["args"]["city"] for call in message.tool_calls]


def test_agent_turn_calls_the_tool_and_hits_the_cache(chat: ChatOpenAI, model: ScriptedServer) -> None:
    """Call, run, answer: the second prompt contains the pages of the first."""
    with_tools = chat.bind_tools([weather])
    model.say(SAID)
    called = with_tools.invoke(ASKED)
    assert isinstance(called, AIMessage) and cities(called) == ["Zürich", "Bern"]
    results: list[BaseMessage] = [weather.invoke(call) for call in called.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    model.say("Sunny in both.")
    answer = with_tools.invoke([*ASKED, called, *results])
    assert isinstance(answer, AIMessage) and answer.content == "Sunny in both."
    assert called.usage_metadata is not None and answer.usage_metadata is not None
    cached = answer.usage_metadata["input_token_details"]["cache_read"]
    assert cached >= called.usage_metadata["total_tokens"] - PAGE_SIZE


def test_streamed_calls_join_to_the_whole_ones(chat: ChatOpenAI, model: ScriptedServer) -> None:
    with_tools = chat.bind_tools([weather])
    model.say(SAID)
    first, *rest = [chunk for chunk in with_tools.stream(ASKED) if isinstance(chunk, AIMessageChunk)]
    whole = add_ai_message_chunks(first, *rest)
    assert cities(whole) == ["Zürich", "Bern"]
    assert whole.response_metadata["finish_reason"] == "tool_calls"
