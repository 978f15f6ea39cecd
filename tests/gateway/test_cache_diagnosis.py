"""Prompt cache diagnosis in OpenAI's and Anthropic's dialects, through their clients' types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.gateway.keyed import keyed
from tests.gateway.scripted import ScriptedServer, hermes_server
from tests.gateway.serving import MODEL

module_server = hermes_server

SYSTEM = "You are kind and patient, and answer in one sentence."
FIRST = {"role": "user", "content": "What is a lighthouse?"}
TOOLS: list[dict[str, Any]] = [{"name": "clock", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[httpx.Client]:
    server.say("A tower with a light.")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, server: ScriptedServer, **fields: Any) -> dict[str, Any]:
    server.say("A tower with a light.")
    body = {"max_tokens": 50, "system": SYSTEM, "messages": [FIRST], **fields}
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    return message


def evict_all(server: ScriptedServer) -> None:
    server.wait_idle()
    assert server.inner is not None and server.inner.cache.reset_prefix_cache()


def next_turn(message: dict[str, Any], first: dict[str, str] = FIRST) -> list[dict[str, Any]]:
    return [first, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": "And a buoy?"}]


def test_message_that_continues_the_previous_prompt_has_null(client: httpx.Client, server: ScriptedServer) -> None:
    assert "diagnostics" not in ask(client, server)
    first = ask(client, server, diagnostics={"previous_message_id": None})
    assert first["diagnostics"] is None
    second = ask(client, server, messages=next_turn(first), diagnostics={"previous_message_id": first["id"]})
    assert second["diagnostics"] is None


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"system": "You are rude."}, "system_changed"),
        ({"tools": TOOLS}, "tools_changed"),
        ({"messages": [{"role": "user", "content": "What is a buoy?"}]}, "messages_changed"),
    ],
)
def test_message_names_what_changed(
    client: httpx.Client, server: ScriptedServer, change: dict[str, Any], kind: str
) -> None:
    first = ask(client, server, diagnostics={})
    second = ask(client, server, **change, diagnostics={"previous_message_id": first["id"]})
    reason, lookup = second["diagnostics"]["cache_miss_reason"], second["diagnostics"]["lookup"]
    assert reason["type"] == kind
    num_first = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
    assert 0 < reason["cache_missed_input_tokens"] <= num_first
    assert lookup["cached_tokens"] == second["usage"]["cache_read_input_tokens"]
    assert lookup["miss"]["reason"] in ("diverged", "never_computed")
    assert lookup["miss"]["at_token"] == lookup["cached_tokens"]


def test_stream_has_the_diagnosis_in_its_first_event(client: httpx.Client, server: ScriptedServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as sdk:
        server.say("A tower with a light.")
        asked: Any = {"model": MODEL, "max_tokens": 50, "messages": [FIRST]}
        first = sdk.messages.create(**asked, system=SYSTEM, diagnostics={"previous_message_id": None})
        server.say("A tower with a light.")
        with sdk.messages.stream(**asked, diagnostics={"previous_message_id": first.id}) as stream:
            begun = next(event for event in stream if event.type == "message_start")
            message = stream.get_final_message()
    for found in (begun.message.diagnostics, message.diagnostics):
        assert found is not None and found.cache_miss_reason is not None
        assert found.cache_miss_reason.type == "system_changed"


def test_evicted_pages_are_unavailable_with_the_reason(client: httpx.Client, server: ScriptedServer) -> None:
    first = ask(client, server, diagnostics={})
    evict_all(server)
    second = ask(client, server, messages=next_turn(first), diagnostics={"previous_message_id": first["id"]})
    found = second["diagnostics"]
    assert found["cache_miss_reason"] == {"type": "unavailable"}
    assert found["lookup"]["cached_tokens"] == 0 and found["lookup"]["miss"]["at_token"] == 0


def test_prompts_of_other_owners_are_not_found(tmp_path: Path) -> None:
    with keyed(tmp_path) as keys:
        body = {"max_tokens": 2, "messages": [FIRST], "diagnostics": {}}
        first = keys.server.request("POST", "/v1/messages", body, keys.ann.bearer)[2]
        for key in (keys.bob, keys.other):
            body["diagnostics"] = {"previous_message_id": first["id"]}
            found = keys.server.request("POST", "/v1/messages", body, key.bearer)[2]["diagnostics"]
            assert found["cache_miss_reason"] == {"type": "previous_message_not_found"}
        stored = {"input": "Hi", "max_output_tokens": 2}
        response = keys.server.request("POST", "/v1/responses", stored, keys.ann.bearer)[2]
        stored["prompt_cache_options"] = {"comparison_response_id": response["id"]}
        answer = keys.server.request("POST", "/v1/responses", stored, keys.bob.bearer)[2]
        assert answer["prompt_cache_diagnostics"]["type"] == "comparison_response_not_found"


@pytest.fixture
def sdk(server: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def respond(sdk: openai.OpenAI, server: ScriptedServer, **fields: Any) -> Response:
    server.say("A tower with a light.")
    asked = {"model": MODEL, "input": "What is a lighthouse?", "instructions": SYSTEM, "max_output_tokens": 50}
    response = sdk.responses.create(**{**asked, **fields})
    assert isinstance(response, Response)
    return response


def test_response_that_continues_the_compared_one_is_a_cache_hit(sdk: openai.OpenAI, server: ScriptedServer) -> None:
    first = respond(sdk, server)
    assert first.prompt_cache_diagnostics is None
    options = {"comparison_response_id": first.id, "mode": "implicit", "ttl": "30m"}
    second = respond(sdk, server, input="And a buoy?", previous_response_id=first.id, prompt_cache_options=options)
    found = second.prompt_cache_diagnostics
    assert found is not None and found.type == "cache_hit" and (found.model_extra or {})["lookup"]["cached_tokens"] > 0
    assert not (second.model_extra or {}).get("ignored")
    assert sdk.responses.retrieve(second.id).prompt_cache_diagnostics == found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"instructions": "Be rude."}, "input_changed"),
        ({"input": "What is a buoy?"}, "input_changed"),
        ({"tools": [{"type": "function", "name": "clock", "parameters": {"type": "object"}}]}, "tools_changed"),
    ],
    ids=str,
)
def test_response_names_what_changed(
    sdk: openai.OpenAI, server: ScriptedServer, change: dict[str, Any], reason: str
) -> None:
    first = respond(sdk, server)
    second = respond(sdk, server, **change, prompt_cache_options={"comparison_response_id": first.id})
    found = second.prompt_cache_diagnostics
    assert found is not None and found.type == "cache_miss" and found.reason == reason
    assert first.usage is not None
    assert found.cache_missed_tokens + (found.comparison_reusable_tokens or 0) == first.usage.input_tokens


def test_unknown_and_evicted_comparisons(sdk: openai.OpenAI, server: ScriptedServer) -> None:
    unknown = respond(sdk, server, prompt_cache_options={"comparison_response_id": "resp_none"})
    assert unknown.prompt_cache_diagnostics is not None
    assert unknown.prompt_cache_diagnostics.type == "comparison_response_not_found"
    evict_all(server)
    again = respond(sdk, server, prompt_cache_options={"comparison_response_id": unknown.id})
    assert again.prompt_cache_diagnostics is not None and again.prompt_cache_diagnostics.type == "unavailable"


@pytest.mark.parametrize("generate", [None, False, True])
def test_prewarming_computes_the_prompt_without_a_reply(
    sdk: openai.OpenAI, server: ScriptedServer, generate: bool | None
) -> None:
    body: dict[str, Any] = {"input": f"What is a dam? {generate}", "extra_body": {"generate": generate}}
    warm = respond(sdk, server, **body, prompt_cache_options={"prewarm": True})
    assert (warm.status, warm.output) == ("completed", []) and not (warm.model_extra or {}).get("ignored")
    assert warm.usage is not None and warm.usage.output_tokens == 0
    again = respond(sdk, server, input=body["input"], prompt_cache_options={"prewarm": False})
    assert again.output_text and not (again.model_extra or {}).get("ignored")
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 0
    after = respond(sdk, server, input="And a weir?", previous_response_id=warm.id)
    assert after.usage is not None and after.usage.input_tokens > warm.usage.input_tokens
