"""Test opencode, unchanged, against a server with a scripted model: tool call, its result, second turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.agents import MAX_NEW_TOKENS, AgentServer, agent_server, executable, run_json, tool_call
from tests.gateway.serving import MODEL

pytestmark = pytest.mark.slow

CALL = tool_call("bash", {"command": "echo sum-$((40+2))", "description": "Adds"})


def answer(prompt: str) -> str:
    if "<tools>" not in prompt:
        return "A title"
    turn = prompt.rpartition("What is the sum?")[2]
    if "And now?" in turn:
        return "Still the same."
    return "It is done." if "sum-42" in turn else CALL


def opencode(server: AgentServer, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": "x"},
        "models": {"hash": {"id": MODEL, "name": "hash", "tool_call": True}},
    }
    config = {"provider": {"local": provider}, "model": "local/hash", "autoupdate": False, "share": "disabled"}
    (folder / "opencode.json").write_text(json.dumps(config))
    return run_json([executable("opencode", "opencode"), "run", "--format", "json", *arguments], folder)


def texts(events: list[dict[str, Any]]) -> list[str]:
    return [event["part"]["text"] for event in events if event["type"] == "text"]


def test_opencode_calls_a_tool_and_continues_with_its_prefix_cached(tmp_path: Path) -> None:
    with agent_server(tmp_path, answer) as server:
        first = opencode(server, tmp_path, "What is the sum?")
        assert texts(first) == ["It is done."]
        (tool,) = (event["part"]["state"] for event in first if event["type"] == "tool_use")
        assert (tool["status"], tool["output"]) == ("completed", "sum-42\n")
        # The request for a title runs at the same time as the first turn.
        called, resulted = (at for at, (prompt, _) in enumerate(server.prompts) if len(prompt) > MAX_NEW_TOKENS * 10)
        server.check_only_new_were_computed(called, resulted)
        second = opencode(server, tmp_path, "--continue", "And now?")
        assert texts(second) == ["Still the same."]
        server.check_only_new_were_computed(resulted, len(server.prompts) - 1)
        usages = [event["part"]["tokens"] for event in (*first, *second) if event["type"] == "step_finish"]
        assert [usage["input"] + usage["cache"]["read"] for usage in usages] == [
            len(server.prompts[at][0]) for at in (called, resulted, -1)
        ]
        assert usages[1]["cache"]["read"] >= len(server.prompts[called][0])
        assert usages[2]["cache"]["read"] >= len(server.prompts[resulted][0])
        server.wait_idle()
