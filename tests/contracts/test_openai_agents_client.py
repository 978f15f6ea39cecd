"""Test openai-agents against the real server with a scripted model, in its own environment."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contracts.agents import agent_server, tool_call
from tests.contracts.environments import run_in
from tests.gateway.serving import PAGE_SIZE

pytestmark = [pytest.mark.slow, pytest.mark.client("openai-agents")]


def answer(prompt: str) -> str:
    asked = prompt.rpartition("<|im_start|>user")[2]
    if "sunny-in-" in asked:
        return "It is sunny."
    if "Weather" in asked:
        return "Let me look.\n" + tool_call("weather", {"city": "Bern"})
    if "You are the specialist" in prompt:
        return "Special."
    if "specialist" in asked:
        return tool_call("transfer_to_specialist", {})
    return json.dumps({"city": "Bern", "people": 7}) if "as JSON" in asked else "Hello to you."


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with agent_server(tmp_path_factory.mktemp("db"), answer) as server:
        found = run_in("frameworks", "run_agents.py", server.url)
        server.wait_idle()
    return found


TOOL_ITEMS = ["message_output_item", "tool_call_item", "tool_call_output_item", "message_output_item"]


@pytest.mark.parametrize("api", ["tool", "chat_tool"], ids=["responses", "chat_completions"])
def test_function_tool_is_called_and_answered(results: dict[str, Any], api: str) -> None:
    found = results[api]
    assert found["output"] == "It is sunny." and found["items"] == TOOL_ITEMS
    assert found["cached"][1] >= found["inputs"][0]  # the second request repeats the first one's prompt and reply


def test_streamed_run_joins_to_its_output(results: dict[str, Any]) -> None:
    found = results["streamed"]
    assert found["deltas"] == "Let me look.It is sunny." and found["items"] == TOOL_ITEMS


def test_streamed_chat_completions_run_joins_to_its_output(results: dict[str, Any]) -> None:
    assert results["chat_streamed"]["deltas"] == results["chat_streamed"]["output"] == "Hello to you."


def test_output_type_is_parsed_by_both_apis(results: dict[str, Any]) -> None:
    assert results["structured"] == [{"city": "Bern", "people": 7}] * 2


def test_handoff_runs_the_other_agent(results: dict[str, Any]) -> None:
    found = results["handoff"]
    assert (found["output"], found["last"]) == ("Special.", "Specialist")
    assert found["items"] == ["handoff_call_item", "handoff_output_item", "message_output_item"]


@pytest.mark.parametrize("kept", ["session", "previous"], ids=["session", "previous_response_id"])
def test_second_run_continues_the_first_from_the_cache(results: dict[str, Any], kept: str) -> None:
    first, second = results[kept]
    assert second["output"] == "Hello to you."
    assert second["inputs"][0] > first["inputs"][0] and second["cached"][0] >= first["inputs"][0] - PAGE_SIZE


def test_reasoning_effort_and_verbosity_are_accepted(results: dict[str, Any]) -> None:
    assert results["effort"]["output"] == "Hello to you."


def test_hosted_tool_is_skipped_and_the_run_continues(results: dict[str, Any]) -> None:
    assert results["hosted"]["output"] == "Hello to you."


@pytest.mark.refused("400 `unsupported_parameter`: only text and file parts are supported")
def test_image_input(results: dict[str, Any]) -> None:
    assert results["image"]["code"] == "unsupported_parameter"
    assert "only text and file parts are supported" in results["image"]["message"]
