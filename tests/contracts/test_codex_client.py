"""Test OpenAI's Codex, unchanged, against a server with a scripted model: tool call, its result, second turn."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.agents import AgentServer, agent_server, executable, run_json, start, tool_call
from tests.gateway.serving import MODEL, slowed, wait_until

pytestmark = pytest.mark.slow

CALL = tool_call("exec_command", {"cmd": "echo sum-$((40+2))"})
CONFIG = """
model = "{model}"
model_provider = "local"
approval_policy = "never"
sandbox_mode = "danger-full-access"
{extra}
[model_providers.local]
name = "{name}"
base_url = "{url}/v1"
wire_api = "responses"
supports_websockets = {websockets}
"""


def answer(prompt: str) -> str:
    turn = prompt.rpartition("What is the sum?")[2]
    if "And now?" in turn:
        return "Still the same."
    return "It is done." if "sum-42" in turn else CALL


@pytest.fixture
def server(tmp_path: Path) -> Iterator[AgentServer]:
    with agent_server(tmp_path, answer) as running:
        yield running
        running.wait_idle()


def command(
    server: AgentServer, folder: Path, *arguments: str, websockets: bool, name: str = "local", extra: str = ""
) -> list[str]:
    """Configure Codex in the folder and return its command."""
    flag = str(websockets).lower()
    config = CONFIG.format(model=MODEL, url=server.url, name=name, websockets=flag, extra=extra)
    (folder / "config.toml").write_text(config)
    return [executable("codex", "codex"), "exec", "--json", "--skip-git-repo-check", *arguments]


def codex(server: AgentServer, folder: Path, *arguments: str, **options: Any) -> list[dict[str, Any]]:
    return run_json(command(server, folder, *arguments, **options), folder, CODEX_HOME=str(folder))


def messages(events: list[dict[str, Any]]) -> list[str]:
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item["text"] for item in items if item["type"] == "agent_message"]


@pytest.mark.parametrize("websockets", [False, True], ids=["http", "websocket"])
def test_codex_calls_a_tool_and_continues_with_its_prefix_cached(
    server: AgentServer, tmp_path: Path, websockets: bool
) -> None:
    first = codex(server, tmp_path, "What is the sum?", websockets=websockets)
    assert messages(first) == ["It is done."]
    (run,) = (
        event["item"]
        for event in first
        if event["type"] == "item.completed" and event["item"]["type"] == "command_execution"
    )
    assert (run["aggregated_output"], run["exit_code"]) == ("sum-42\n", 0)
    called, resulted = len(server.prompts) - 2, len(server.prompts) - 1
    assert called == websockets  # over WebSocket, a request without generation comes first
    server.check_only_new_were_computed(called, resulted)
    usage = first[-1]["usage"]
    num_input = sum(len(prompt) for prompt, _ in server.prompts[called:])
    assert usage["input_tokens"] == num_input
    computed = sum(server.num_computed(at) for at in (called, resulted))
    # The last token of each reply is generated, but not computed.
    assert computed == num_input - usage["cached_input_tokens"] + usage["output_tokens"] - 2

    second = codex(server, tmp_path, "resume", "--last", "And now?", websockets=websockets)
    assert messages(second) == ["Still the same."]
    assert second[-1]["usage"]["cached_input_tokens"] > len(server.prompts[resulted][0])
    server.check_only_new_were_computed(resulted, len(server.prompts) - 1)


@pytest.mark.parametrize("websockets", [False, True], ids=["http", "websocket"])
@pytest.mark.parametrize("name", ["local", "OpenAI"])
def test_codex_compacts_a_long_conversation_and_goes_on(tmp_path: Path, name: str, websockets: bool) -> None:
    """A provider named OpenAI compacts on the server; for others, Codex asks the model for a summary itself."""

    def answer(prompt: str) -> str:
        if "SUMMARY-7" in prompt:
            return "It is done."
        commands = ("seq 1 1000", "echo on")
        num_results = prompt.count("<tool_response>\n")
        return tool_call("exec_command", {"cmd": commands[num_results]}) if num_results < 2 else "SUMMARY-7"

    with agent_server(tmp_path, answer) as server:
        limit = "model_auto_compact_token_limit = 33000"
        events = codex(server, tmp_path, "Count.", websockets=websockets, name=name, extra=limit)
        assert messages(events) == ["It is done."]
        lengths = [len(prompt) for prompt, _ in server.prompts]
        assert max(lengths) > 33_000 > lengths[-1]
        if name == "OpenAI":  # otherwise the request for a summary has no tools, hence another prefix
            server.check_only_new_were_computed(len(lengths) - 3, len(lengths) - 2)
        server.wait_idle()


@pytest.mark.parametrize("websockets", [False, True], ids=["http", "websocket"])
def test_interrupted_codex_leaves_nothing_running(tmp_path: Path, websockets: bool) -> None:
    with agent_server(tmp_path, lambda prompt: "word " * 5000) as server, slowed(server, 0.05):
        arguments = command(server, tmp_path, "Tell me a long story.", websockets=websockets)
        with start(arguments, tmp_path, CODEX_HOME=str(tmp_path)) as agent:
            try:
                wait_until(lambda: len(server.prompts) > websockets and server.num_computed(-1) > 100, "a reply")
                agent.send_signal(signal.SIGINT)
                agent.communicate(timeout=60)
            finally:
                agent.kill()
        server.wait_idle()  # its whole reply would take minutes
