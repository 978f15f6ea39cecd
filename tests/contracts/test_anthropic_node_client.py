"""Test npm `@anthropic-ai/sdk` against the real server with a scripted model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contracts.node_clients import run
from tests.gateway.scripted import ScriptedServer, hermes_server
from tests.gateway.serving import PAGE_SIZE, failing_after, slowed

pytestmark = [pytest.mark.slow, pytest.mark.client("anthropic (TypeScript)")]

CALL = (
    "<think>\nI should look.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city":  "Z\\u00fcrich"}}\n</tool_call>'
)
LONG = "A rather long answer that does not end by itself while the client reads it. " * 3


module_server = hermes_server


def play(server: ScriptedServer, scenario: str, *arguments: str) -> Any:
    return run("anthropic.mjs", scenario, *arguments, url=server.url)


def num_prompt_tokens(message: dict[str, Any]) -> int:
    usage = message["usage"]
    return sum(usage[name] for name in usage if name.endswith("input_tokens"))


def test_call_and_result_compute_only_new_tokens(server: ScriptedServer) -> None:
    server.say(CALL)
    first = play(server, "whole")
    message = first["message"]
    assert first["id"].startswith("req_") and message["stop_reason"] == "tool_use"
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][-1]["input"] == {"city": "Zürich"}
    server.say("Sunny.")
    second = play(server, "answered", json.dumps(message))["message"]
    assert second["content"][0]["text"] == "Sunny."
    history = num_prompt_tokens(message) + message["usage"]["output_tokens"]
    assert history - PAGE_SIZE <= second["usage"]["cache_read_input_tokens"] <= history
    assert play(server, "counted")["input_tokens"] == num_prompt_tokens(message)


def test_stream_accumulates_the_whole_message(server: ScriptedServer) -> None:
    server.say(CALL)
    streamed = play(server, "streamed")
    assert (streamed["thinking"], streamed["text"]) == ("I should look.", "One moment.")
    assert streamed["json"] == '{"city":  "Z\\u00fcrich"}'
    assert streamed["kinds"][0] == "message_start" and streamed["kinds"][-1] == "message_stop"
    message = streamed["message"]
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][-1]["input"] == {"city": "Zürich"} and message["stop_reason"] == "tool_use"


@pytest.mark.refused("images, an unknown model: 400 or 404 with the reason")
def test_refusals_raise_the_classes_of_the_client(server: ScriptedServer) -> None:
    image, missing = play(server, "refused")
    assert image["kind"] == "bad" and "blocks of type 'image'" in image["message"] and image["id"].startswith("req_")
    assert missing["kind"] == "missing" and "not_found_error" in missing["message"]


def test_leaving_the_stream_cancels_the_generation(server: ScriptedServer) -> None:
    server.say(LONG)
    with slowed(server, 0.01):
        assert play(server, "left")
        server.wait_idle()


def test_failure_in_a_stream_raises(server: ScriptedServer) -> None:
    server.say(LONG)
    with failing_after(server, 6):
        received = play(server, "failing")
    assert received["text"] and received["isError"] and "secret" not in received["message"]
