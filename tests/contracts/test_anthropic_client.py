"""Test the official `anthropic` client against the real server with a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic.types import MessageParam, ToolParam

from tests.gateway.scripted import ScriptedServer, hermes_server
from tests.gateway.serving import MODEL, PAGE_SIZE, failing_after

pytestmark = [pytest.mark.slow, pytest.mark.client("anthropic (Python)")]

TOOLS: list[ToolParam] = [
    {
        "name": "weather",
        "description": "How it is",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "cache_control": {"type": "ephemeral"},
    }
]
USER: list[MessageParam] = [{"role": "user", "content": "Weather in Zürich?"}]
CALL = (
    "<think>\nI should look.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city":  "Z\\u00fcrich"}}\n</tool_call>'
)


module_server = hermes_server


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


def test_models_are_listed_with_their_times(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type, model.display_name, model.created_at.year >= 2026) == (MODEL, "model", MODEL, True)
    assert client.models.retrieve(MODEL) == model
    assert (model.lifecycle, model.max_input_tokens) == ("active", 4096)
    assert set(model.model_dump(exclude_none=True)) >= {
        name for name, field in type(model).model_fields.items() if field.is_required()
    }


def num_prompt_tokens(usage: anthropic.types.Usage) -> int:
    written, read = usage.cache_creation_input_tokens, usage.cache_read_input_tokens
    return usage.input_tokens + (written or 0) + (read or 0)


def test_call_and_result_compute_only_new_tokens(client: anthropic.Anthropic, server: ScriptedServer) -> None:
    server.say(CALL)
    first = client.messages.create(model=MODEL, max_tokens=300, messages=USER, tools=TOOLS)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    call = first.content[-1]
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Zürich"})
    assert first.stop_reason == "tool_use" and first._request_id is not None
    server.say("Sunny.")
    second = client.messages.create(
        model=MODEL,
        max_tokens=300,
        tools=TOOLS,
        messages=[
            *USER,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
        ],
    )
    assert second.stop_reason == "end_turn" and second.content[0].type == "text"
    assert second.content[0].text == "Sunny."
    history = num_prompt_tokens(first.usage) + first.usage.output_tokens
    assert history - PAGE_SIZE <= (second.usage.cache_read_input_tokens or 0) <= history


def test_stream_helper_accumulates_the_whole_message(client: anthropic.Anthropic, server: ScriptedServer) -> None:
    server.say(CALL)
    seen: dict[str, str] = {"thinking": "", "text": "", "input_json": ""}
    with client.messages.stream(model=MODEL, max_tokens=300, messages=USER, tools=TOOLS) as stream:
        for event in stream:
            if event.type == "thinking":
                seen["thinking"] += event.thinking
            elif event.type == "text":
                seen["text"] += event.text
            elif event.type == "input_json":
                seen["input_json"] += event.partial_json
        streamed = stream.get_final_message()
    assert seen == {
        "thinking": "I should look.",
        "text": "One moment.",
        "input_json": '{"city":  "Z\\u00fcrich"}',
    }
    server.say(CALL)
    whole = client.messages.create(model=MODEL, max_tokens=300, messages=USER, tools=TOOLS)
    assert without_ids(streamed.content) == without_ids(whole.content)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert num_prompt_tokens(streamed.usage) == num_prompt_tokens(whole.usage)


def without_ids(blocks: Any) -> list[dict[str, Any]]:
    return [block.model_dump(exclude={"id"}, exclude_none=True) for block in blocks]


async def test_async_client_streams_text(server: ScriptedServer) -> None:
    server.say("Hello there, dear reader.")
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="unused", max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=50, messages=USER, stop_sequences=[" reader"]) as stream,
    ):
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Hello there, dear"
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", " reader")


def test_beta_client_with_the_options_of_an_agent(client: anthropic.Anthropic, server: ScriptedServer) -> None:
    server.say("Fine.")
    response = client.beta.messages.with_raw_response.create(
        model=MODEL,
        max_tokens=20_000,
        timeout=60,
        betas=["context-management-2025-06-27"],
        system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        tools=[*TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
        messages=[{"role": "user", "content": "Hi"}],
    )
    assert response.parse().stop_reason == "end_turn"
    ignored = response.headers["x-chatcache-ignored"].split(", ")
    assert {"context_management.edits", "tools.web_search_20250305", "anthropic-beta"} <= {*ignored}
    assert int(response.headers["x-chatcache-max-tokens"]) < 20_000


def test_tool_runner_calls_the_function_and_ends(client: anthropic.Anthropic, server: ScriptedServer) -> None:
    """The runner asks the server to hold the history, and sends all of it when the server does not."""
    cities: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return how it is.

        Args:
            city: where
        """
        cities.append(city)
        server.say("Sunny there.")
        return "sunny"

    server.say(CALL)
    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=300, tools=[weather], messages=[*USER])  # type: ignore[list-item]
    final = runner.until_done()
    assert cities == ["Zürich"] and final.content[0].type == "text" and final.content[0].text == "Sunny there."


class Answer(pydantic.BaseModel):
    ok: bool


def test_parsed_message_has_the_type_of_its_schema(client: anthropic.Anthropic, server: ScriptedServer) -> None:
    server.say("Certainly not JSON")
    message = client.messages.parse(model=MODEL, max_tokens=300, messages=USER, output_format=Answer)
    assert isinstance(message.parsed_output, Answer)


def test_count_tokens_is_the_length_of_the_prompt(client: anthropic.Anthropic, server: ScriptedServer) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=USER, tools=TOOLS, system="Be kind.")
    server.say("Yes")
    message = client.messages.create(model=MODEL, max_tokens=9, messages=USER, tools=TOOLS, system="Be kind.")
    assert count.input_tokens == num_prompt_tokens(message.usage)


@pytest.mark.refused("images, an unknown model, a prompt beyond the context: 400 or 404 with the reason")
def test_refusals_raise_the_classes_of_the_client(client: anthropic.Anthropic) -> None:
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="blocks of type 'image' are not supported") as refused:
        client.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": [image]}])
    assert refused.value.request_id is not None and refused.value.request_id.startswith("req_")
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(model="claude-opus-5-5", max_tokens=9, messages=USER)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "x " * 5000}])


def test_failure_in_a_stream_raises(client: anthropic.Anthropic, server: ScriptedServer) -> None:
    server.say("A rather long answer that the engine never finishes, because it fails. " * 3)
    with (
        failing_after(server, 6),
        pytest.raises(anthropic.APIStatusError) as failed,
        client.messages.stream(model=MODEL, max_tokens=200, messages=USER) as stream,
    ):
        stream.until_done()
    assert "api_error" in str(failed.value) and "secret" not in str(failed.value)
