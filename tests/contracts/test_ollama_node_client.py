"""Test npm `ollama` against the real server with a scripted model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contracts.node_clients import FOLDER, run
from tests.gateway.scripted import ScriptedServer, hermes_server
from tests.gateway.serving import MODEL, PAGE_SIZE, slowed

pytestmark = [pytest.mark.slow, pytest.mark.client("ollama (Node)")]

CALL = (
    "<think>\nI should look.\n</think>\n\nOne moment.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city":  "Z\\u00fcrich"}}\n</tool_call>'
)

module_server = hermes_server


def play(server: ScriptedServer, scenario: str, *arguments: str) -> Any:
    if not (FOLDER / "node_modules" / "ollama").is_dir():
        pytest.skip("npm ollama is not installed: make clients")
    return run("ollama.mjs", scenario, *arguments, url=server.url)


def test_call_and_result_compute_only_new_tokens(server: ScriptedServer) -> None:
    """The client keeps the id of the call, by which the server restores the arguments as they were generated."""
    server.say(CALL)
    first = play(server, "whole")
    assert first["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich"}
    server.say("Sunny.")
    second = play(server, "answered", json.dumps(first["message"]))
    assert second["message"]["content"] == "Sunny."
    history = first["prompt_eval_count"] + first["eval_count"]
    assert history - PAGE_SIZE <= second["prompt_cached_count"] <= history


def test_stream_joins_to_the_whole_answer(server: ScriptedServer) -> None:
    server.say(CALL)
    *parts, last = play(server, "streamed")
    assert "".join(part["message"].get("thinking", "") for part in parts) == "I should look."
    assert "".join(part["message"]["content"] for part in parts) == "One moment."
    calls = [call["function"]["name"] for part in parts for call in part["message"].get("tool_calls", ())]
    assert calls == ["weather"] and last["done_reason"] == "stop" and last["eval_count"] > len(parts)


def test_generate_streams_to_its_limit(server: ScriptedServer) -> None:
    server.say("One two three four five.")
    *parts, last = play(server, "generated")
    assert "".join(part["response"] for part in parts) and last["done_reason"] == "length" and last["eval_count"] == 3


def test_schema_constrains_the_answer(server: ScriptedServer) -> None:
    server.say('{"city": "Bern"}')
    assert json.loads(play(server, "constrained")["message"]["content"]) == {"city": "Bern"}


def test_model_is_listed_shown_and_loaded(server: ScriptedServer) -> None:
    found = play(server, "server")
    assert found["list"]["models"][0]["model"] == found["ps"]["models"][0]["model"] == MODEL
    assert found["show"]["model_info"]["chatcache.context_length"] == 4096


def test_aborting_a_stream_cancels_the_generation(server: ScriptedServer) -> None:
    server.say("A rather long answer that does not end by itself. " * 20)
    with slowed(server, 0.01):
        assert play(server, "left")
        server.wait_idle()


def test_embeddings_are_normalised(server: ScriptedServer) -> None:
    found = play(server, "embedded")
    assert all(sum(value * value for value in each) == pytest.approx(1.0) for each in found["both"]["embeddings"])
    assert found["one"]["embedding"] == found["both"]["embeddings"][1]


@pytest.mark.refused("400: this server reads text only; 404: this server has one model, chosen when it starts")
def test_images_and_pull_are_refused(server: ScriptedServer) -> None:
    images, pull = play(server, "refused")
    assert images["status"] == 400 and "reads text only" in images["message"]
    assert pull["status"] == 404 and "one model, chosen when it starts" in pull["message"]
