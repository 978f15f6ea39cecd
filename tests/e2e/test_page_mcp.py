"""Tools of an MCP server in the page: confirmed, declined, allowed; everything but the model is real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from chatcache.config import McpServer, ServerConfig
from tests.e2e.conftest import BUILT_PAGE
from tests.e2e.page_checks import find_problems
from tests.e2e.recorded_page import RecordedPage
from tests.e2e.requirements import require
from tests.gateway.scripted import ScriptedServer, scripted_server
from tests.support.mcp_server import ToolServer, tools
from tests.tokenizer.families import tokenizer_of

__all__ = ["tools"]

pytest.importorskip("mcp", reason="needs pip install 'chatcache[mcp]'")
pytestmark = pytest.mark.slow

ACTIONS = ".tool-call-actions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tools: ToolServer) -> Iterator[ScriptedServer]:
    """A server whose model says what the test scripts."""
    require(BUILT_PAGE.is_file(), "the built page", "make web")
    configured = McpServer(name="desk", url=tools.url, tools=("add", "note", "wait"), allow=("wait",))
    config = ServerConfig(db=str(tmp_path_factory.mktemp("db") / "chat.db"), mcp_servers=(configured,))
    with scripted_server(config, tokenizer_of("hermes")) as running:
        running.wait_ready()
        assert isinstance(running, ScriptedServer)
        yield running


@pytest.fixture
def server(model: ScriptedServer, tools: ToolServer) -> str:
    """Address of the scripted server, in place of the one with the demo model."""
    tools.calls.clear()
    tools.release.clear()
    return model.url


@pytest.fixture
def chat(open_page: Any) -> RecordedPage:
    """A page with the tools switched on in a new conversation."""
    page: RecordedPage = open_page(reduced_motion="reduce")
    page.page.evaluate(
        "() => { localStorage['chatcache.sampling'] = '{}'; localStorage['chatcache.titles'] = 'false';"
        " localStorage['chatcache.draftAhead'] = 'false' }"
    )
    page.reload()
    page.page.keyboard.press("Control+,")
    page.page.check(".tool-server input")
    page.page.click("[aria-label='Close settings']")
    return page


def calling(*calls: tuple[str, dict[str, object]]) -> str:
    texts = [json.dumps({"name": f"desk.{name}", "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def hints(chat: RecordedPage) -> list[str]:
    shown: list[str] = chat.page.locator(".tool-call summary .hint").all_inner_texts()
    return shown


def test_tool_runs_after_confirmation_and_the_answer_continues(
    chat: RecordedPage, model: ScriptedServer, tools: ToolServer
) -> None:
    page = chat.page
    model.say(f"I add.\n{calling(('add', {'a': 2, 'b': 3}))}")
    chat.ask("What is 2 + 3?")
    page.wait_for_selector(ACTIONS)
    assert hints(chat) == ["not run yet"] and tools.calls == []
    assert page.locator(".tool-call[open] pre").inner_text().split() == ["{", '"a":', "2,", '"b":', "3", "}"]
    assert find_problems(page) == []
    model.say("It is five.")
    page.click(f"{ACTIONS} :text-is('Run')")
    chat.wait_end(1)
    assert tools.calls == [("add", {"a": 2, "b": 3})]
    assert chat.answers()[-1] == "It is five."
    assert hints(chat)[0].startswith("result, ")
    sent = [frame for frame in chat.sent if frame["type"] == "response.create"][-1]
    assert [item["output"] for item in sent["input"]] == ["5"]
    before = hints(chat)
    chat.reload()
    page.wait_for_selector(".tool-call")
    assert hints(chat) == before and chat.answers()[-1] == "It is five."
    page.keyboard.press("Control+,")
    page.wait_for_selector(".tool-server input:checked")


def test_call_waits_after_a_reload_and_can_be_declined(
    chat: RecordedPage, model: ScriptedServer, tools: ToolServer
) -> None:
    page = chat.page
    model.say(calling(("note", {"text": "secret"})))
    chat.ask("Write it down")
    page.wait_for_selector(ACTIONS)
    chat.reload()
    page.wait_for_selector(ACTIONS)
    model.say("As you like.")
    page.click(f"{ACTIONS} :text-is('Decline')")
    chat.wait_end(1)
    assert chat.answers()[-1] == "As you like." and tools.calls == []
    page.click(".tool-call summary")
    assert page.locator(".tool-call pre").last.inner_text() == "The user declined this call."


def test_allowed_tool_runs_by_itself_next_to_one_that_waits(
    chat: RecordedPage, model: ScriptedServer, tools: ToolServer
) -> None:
    page = chat.page
    model.say(calling(("wait", {}), ("add", {"a": 1, "b": 1})))
    chat.ask("Wait, and add")
    page.wait_for_selector(f"{ACTIONS} :text-is('Stop')")
    assert hints(chat) == ["running", "not run yet"]
    page.click(f"{ACTIONS} :text-is('Run')")
    page.wait_for_selector(".tool-call .hint:text('result')")
    assert hints(chat)[0] == "running", "the answer waits for both"
    model.say("Done.")
    tools.release.set()
    chat.wait_end(1)
    assert chat.answers()[-1] == "Done."
    assert [hint.partition(",")[0] for hint in hints(chat)] == ["result", "result"]
