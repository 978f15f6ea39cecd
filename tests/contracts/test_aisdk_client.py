"""Test Vercel's AI SDK, which validates every chunk, against the real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.agents import agent_server, tool_call
from tests.contracts.node_clients import FOLDER, run
from tests.gateway.serving import PAGE_SIZE, Server

pytestmark = [pytest.mark.slow, pytest.mark.client("AI SDK")]

APIS = ("chat", "responses")


def answer(prompt: str) -> str:
    if "as JSON" in prompt:
        return json.dumps({"city": "Bern"})
    if "sunny-in-Bern" in prompt:
        return "It is sunny."
    return f"<think>\nI should look.\n</think>\n\nLet me look.\n{tool_call('weather', {'city': 'Bern'})}"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with agent_server(tmp_path_factory.mktemp("db"), answer) as server:
        found: dict[str, Any] = run("aisdk_cases.mjs", url=server.url)
        server.wait_idle()
    return found


@pytest.mark.parametrize("api", APIS)
def test_tool_steps_end_with_the_answer(results: dict[str, Any], api: str) -> None:
    found = results[api]["tools"]
    assert found["text"] == "It is sunny." and found["streamed"].endswith(found["text"]) and found["errors"] == []
    assert found["calls"] == [["weather", {"city": "Bern"}]]
    assert found["reasoning"] == ["I should look."] * 2  # of Responses, the SDK reads summaries only
    first, second = found["usages"]
    assert second["cachedInputTokens"] >= first["inputTokens"] - PAGE_SIZE


@pytest.mark.parametrize("api", APIS)
def test_object_follows_its_schema(results: dict[str, Any], api: str) -> None:
    assert results[api]["objects"] == {key: {"city": "Bern"} for key in ("whole", "last", "streamed")}


@pytest.mark.refused("400 `unsupported_parameter`: only text and file parts are supported")
@pytest.mark.parametrize("api", APIS)
def test_image_input(results: dict[str, Any], api: str) -> None:
    found = results[api]["refused"]
    assert (
        found["isCallError"] and found["status"] == 400 and "only text and file parts are supported" in found["message"]
    )


def test_stream_equals_the_whole_answer(server: Server) -> None:
    received = run("aisdk.mjs", url=server.url)
    assert received["errors"] == []
    assert received["stream"]["text"] == received["whole"]["text"]
    assert received["stream"]["finish"] == received["whole"]["finish"] in ("stop", "length")
    usage = received["stream"]["usage"]
    assert usage["inputTokens"] > 0 and usage["outputTokens"] == received["whole"]["usage"]["outputTokens"]
    assert usage["inputTokens"] - PAGE_SIZE <= usage["cachedInputTokens"] <= usage["inputTokens"]


def test_default_provider_refers_to_stored_items(tmp_path: Path) -> None:
    if not (FOLDER / "node_modules" / "@ai-sdk" / "openai").is_dir():
        pytest.skip("@ai-sdk/openai is not installed: make clients")
    call = f"<think>Add.</think>Let me add.\n{tool_call('add', {'a': 40, 'b': 2})}"
    with agent_server(tmp_path, lambda prompt: "It is 42." if "sum-42" in prompt else call) as server:
        received = run("aisdk_openai.mjs", url=server.url)
        server.wait_idle()
    assert received["text"] == "It is 42."
    assert received["items"][1].count("item_reference") == 2  # the reasoning and the message
    first, second = received["usages"]
    assert second["cachedInputTokens"] >= first["inputTokens"]
