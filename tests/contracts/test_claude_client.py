"""Test Claude Code, unchanged, against a server with a scripted model: tool call, its result, second turn."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.agents import MAX_NEW_TOKENS, AgentServer, agent_server, executable, run_json, tool_call
from tests.gateway.serving import MODEL, slowed, wait_until

pytestmark = pytest.mark.slow

CALL = "I will add.\n" + tool_call("Bash", {"command": "echo sum-$((40+2))", "description": "Adds"})


SUMMARY = "They added two numbers."


def answer(prompt: str) -> str:
    if SUMMARY in prompt:
        return "Ready."
    if "<summary>" in prompt.rpartition("<|im_start|>user")[2]:
        return f"<summary>{SUMMARY}</summary>"
    turn = prompt.rpartition("What is the sum?")[2]
    if "And now?" in turn:
        return "Still the same."
    return "It is done." if "sum-42" in turn else CALL


def command(*arguments: str) -> list[str]:
    options = ("--model", MODEL, "--allowedTools", "Bash", "--output-format", "stream-json", "--verbose")
    return [executable("claude", "claude"), "-p", *arguments, *options]


def environment(server: AgentServer) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_API_KEY": "unused",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def claude(server: AgentServer, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    return run_json(command(*arguments), folder, **environment(server))


def content(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the blocks of a type in the messages that the agent reports."""
    messages = [event["message"] for event in events if event["type"] in ("assistant", "user")]
    return [block for message in messages for block in message["content"] if block["type"] == kind]


def cached(events: list[dict[str, Any]]) -> list[int]:
    """Return the cached tokens of the prompts, in order, as the agent reports them."""
    usages = {
        event["message"]["id"]: event["message"]["usage"]["cache_read_input_tokens"]
        for event in events
        if event["type"] == "assistant"
    }
    return list(usages.values())


def test_claude_code_calls_a_tool_and_continues_with_its_prefix_cached(tmp_path: Path) -> None:
    with agent_server(tmp_path, answer) as server:
        first = claude(server, tmp_path, "What is the sum?")
        assert [call["input"]["command"] for call in content(first, "tool_use")] == ["echo sum-$((40+2))"]
        assert [result["content"] for result in content(first, "tool_result")] == ["sum-42"]
        assert (first[-1]["result"], first[-1]["is_error"]) == ("It is done.", False)
        server.check_only_new_were_computed(0, 1)
        second = claude(server, tmp_path, "--continue", "And now?")
        assert (second[-1]["result"], len(server.prompts)) == ("Still the same.", 3)
        server.check_only_new_were_computed(1, 2)
        assert cached(first)[1] >= len(server.prompts[0][0]) and cached(second)[0] >= len(server.prompts[1][0])
        server.wait_idle()


def test_claude_code_compacts_with_its_prefix_cached(tmp_path: Path) -> None:
    with agent_server(tmp_path, answer) as server:
        claude(server, tmp_path, "What is the sum?")
        claude(server, tmp_path, "--continue", "/compact")
        assert len(server.prompts) == 3
        # The request for the summary is new text of the last turn.
        history, compacted = (server.prompts[at][0] for at in (1, 2))
        num_common = next(at for at, pair in enumerate(zip(history, compacted, strict=False)) if pair[0] != pair[1])
        assert server.num_computed(2) < len(compacted) - num_common + MAX_NEW_TOKENS < num_common // 4
        after = claude(server, tmp_path, "--continue", "What else?")
        assert after[-1]["result"] == "Ready."
        server.wait_idle()


def test_interrupted_claude_code_frees_its_pages(tmp_path: Path) -> None:
    with agent_server(tmp_path, lambda prompt: "Adding. " * 2_000) as server, slowed(server, 0.01):
        process = subprocess.Popen(
            command("What is the sum?"),
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **environment(server)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        wait_until(lambda: server.num_pages_in_use() > 0, "running")
        process.send_signal(signal.SIGINT)
        server.wait_idle()
        process.wait(60)
