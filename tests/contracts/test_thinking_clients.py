"""Reasoning controls as the clients send them: openai, anthropic, langchain and ollama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from anthropic.types import MessageParam
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import SecretStr

from tests.gateway.scripted import ScriptedRunner, ScriptedServer, scripted_with
from tests.gateway.serving import MODEL
from tests.tokenizer.thinking_templates import thinking_tokenizer

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How many?"}]
ASKED: list[MessageParam] = [{"role": "user", "content": "How many?"}]
REPLY = "Let me count.</think>Six."


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_with(tmp_path_factory.mktemp("db"), thinking_tokenizer("qwen3.6")) as server:
        yield server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def messages(server: ScriptedServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


def draw_at_random(server: ScriptedServer) -> None:
    assert isinstance(server.runner, ScriptedRunner)
    server.runner.say([])


@pytest.mark.client("openai (Python)")
def test_openai_chat_effort_none_has_no_reasoning_and_other_levels_have(
    client: openai.OpenAI, server: ScriptedServer
) -> None:
    server.say("Six.")
    quiet = client.chat.completions.create(model=MODEL, messages=USER, reasoning_effort="none")
    assert quiet.choices[0].message.content == "Six." and quiet.usage is not None
    assert quiet.usage.completion_tokens_details is not None
    assert quiet.usage.completion_tokens_details.reasoning_tokens == 0
    server.say(REPLY)
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=USER, reasoning_effort="high")
    assert raw.headers["x-chatcache-ignored"] == "reasoning_effort"  # this template has a switch, but no levels
    message = raw.parse().choices[0].message
    assert message.content == "Six." and (message.model_extra or {})["reasoning"] == "Let me count."


@pytest.mark.client("openai (Python)")
def test_openai_chat_extra_body_limits_and_switches_reasoning(client: openai.OpenAI, server: ScriptedServer) -> None:
    draw_at_random(server)
    extra = {"thinking_token_budget": 30, "chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True}
    stream = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_tokens=60,
        seed=3,  # with some seeds, the model ends its reasoning at once
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert any((delta.model_extra or {}).get("reasoning_content") for delta in deltas)
    assert any(delta.content for delta in deltas)
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) <= 46
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=USER, extra_body={"chat_template_kwargs": {"messages": []}}
        )
    assert caught.value.param == "chat_template_kwargs.messages"


@pytest.mark.client("openai (Python)")
def test_openai_responses_effort_reaches_the_model(client: openai.OpenAI, server: ScriptedServer) -> None:
    server.say(REPLY)
    first = client.responses.create(model=MODEL, input="How many?", reasoning={"effort": "medium", "summary": "auto"})
    assert [item.type for item in first.output] == ["reasoning", "message"] and first.output_text == "Six."
    assert first.usage is not None and first.usage.output_tokens_details.reasoning_tokens > 0
    server.say("Six.")
    quiet = client.responses.create(model=MODEL, input="How many?", reasoning={"effort": "none"})
    assert [item.type for item in quiet.output] == ["message"]
    assert quiet.reasoning is not None and quiet.reasoning.effort == "none"
    unknown: Any = {"effort": "extreme"}
    with pytest.raises(openai.BadRequestError, match="none, minimal, low, medium, high, xhigh, max"):
        client.responses.create(model=MODEL, input="x", reasoning=unknown)


@pytest.mark.client("anthropic (Python)")
def test_anthropic_thinking_is_streamed_limited_and_sent_back(
    messages: anthropic.Anthropic, server: ScriptedServer
) -> None:
    server.say(REPLY)
    with messages.messages.stream(
        model=MODEL, messages=ASKED, max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert {"thinking", "signature", "text"} <= set(kinds)
    assert [block.type for block in final.content] == ["thinking", "text"]
    history: list[MessageParam] = [*ASKED, {"role": "assistant", "content": final.content}, *ASKED]
    server.say("Six.")
    second = messages.messages.create(model=MODEL, messages=history, max_tokens=50, thinking={"type": "disabled"})
    assert [block.type for block in second.content] == ["text"]
    draw_at_random(server)
    limited = messages.messages.create(
        model=MODEL,
        messages=ASKED,
        max_tokens=60,
        thinking={"type": "enabled", "budget_tokens": 30},
        extra_body={"temperature": 0},  # sampled, the reply may end at once
    )
    details: Any = limited.usage.output_tokens_details
    assert 0 < details.thinking_tokens <= 46


@pytest.mark.client("anthropic (Python)")
def test_anthropic_prefilled_answer_is_continued(messages: anthropic.Anthropic, server: ScriptedServer) -> None:
    server.say(" 6}")
    message = messages.messages.create(
        model=MODEL, messages=[*ASKED, {"role": "assistant", "content": '{"count":'}], max_tokens=50
    )
    assert [block.text for block in message.content if block.type == "text"] == [" 6}"]


@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}])
@pytest.mark.client("langchain-openai")
def test_langchain_effort_none_has_no_reasoning(server: ScriptedServer, fields: dict[str, Any]) -> None:
    server.say("Six.")
    chat = ChatOpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key=SecretStr("unused"), max_retries=0, **fields)
    answer = chat.invoke("How many?")
    assert isinstance(answer, AIMessage) and answer.text == "Six." and answer.usage_metadata is not None
    assert answer.usage_metadata["output_token_details"]["reasoning"] == 0


@pytest.mark.client("ollama (Python)")
def test_ollama_think_switches_reasoning(server: ScriptedServer) -> None:
    asked = [{"role": "user", "content": "How many?"}]
    with ollama.Client(host=server.url, trust_env=False) as client:
        server.say(REPLY)
        loud = client.chat(model=MODEL, messages=asked, think=True)
        assert (loud.message.thinking, loud.message.content) == ("Let me count.", "Six.")
        server.say("Six.")
        quiet = client.chat(model=MODEL, messages=asked, think=False)
        assert (quiet.message.thinking, quiet.message.content) == (None, "Six.")
