"""Generated titles: computed from the cache, not part of the conversation, never overwriting."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatcache.config import EngineConfig, ServerConfig
from chatcache.conversations import titles
from chatcache.gateway.api import conversations as conversation_titles
from chatcache.types.request import MAX_PRIORITY, GenerateRequest
from tests.gateway.described import Described
from tests.gateway.scripted import ScriptedServer, scripted
from tests.gateway.serving import PAGE_SIZE, Server, hurry, slowed, tiny_tokenizer, wait_until
from tests.gateway.test_rest import converse

LONG = {"ignore_eos": True, "max_output_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """A server whose model replies with a given text."""
    with scripted(tmp_path_factory.mktemp("speaking"), "hermes") as server:
        yield server
        server.wait_idle()


@pytest.fixture
def useful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash model writes noise: let anything pass for a title."""
    monkeypatch.setattr(conversation_titles, "clean_title", lambda text: "From the model")


def head(server: Server, conversation: str) -> dict[str, Any]:
    found: dict[str, Any] = server.request("GET", f"/v1/conversations/{conversation}")[2]
    return found


def name(server: Server, conversation: str, **body: object) -> tuple[int, dict[str, str], Any]:
    return server.request("POST", f"/v1/conversations/{conversation}/title", body or None)


def test_title_prompt_takes_the_history_from_the_cache(server: Server, useful: None) -> None:
    """All tokens of two turns are cached except those of the last page; nothing is stored."""
    first = converse(server, "Tell me something long", instructions="Be kind", **LONG)
    second = converse(server, "And on", previous_response_id=first["id"], instructions="Be kind", **LONG)
    conversation = second["conversation"]["id"]
    items = server.request("GET", f"/v1/conversations/{conversation}/items?branches=all")[2]["data"]
    document = Described(server.request("GET", "/openapi.json")[2])
    status, _, answer = name(server, conversation)
    document.check("POST", f"/v1/conversations/{conversation}/title", status, answer)
    history = second["usage"]["total_tokens"]
    usage = answer["usage"]
    assert status == 200 and answer["generated"] and answer["title"] == "From the model"
    assert usage["input_tokens_details"]["cached_tokens"] >= (history - 1) // PAGE_SIZE * PAGE_SIZE
    question = len(tiny_tokenizer().encode(titles.TITLE.question))
    assert usage["input_tokens"] - history <= question + 24  # the template
    assert usage["output_tokens"] <= titles.TITLE.max_tokens
    assert head(server, conversation) == answer["conversation"]
    assert server.request("GET", f"/v1/conversations/{conversation}/items?branches=all")[2]["data"] == items
    third = converse(server, "Still there?", conversation=conversation, instructions="Be kind", **LONG)
    assert third["usage"]["input_tokens_details"]["cached_tokens"] >= (history - 1) // PAGE_SIZE * PAGE_SIZE


def test_title_that_is_empty_changes_nothing(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation_titles, "clean_title", lambda text: "")
    conversation = converse(server, "My own words", **LONG)["conversation"]["id"]
    before = head(server, conversation)
    status, _, answer = name(server, conversation)
    assert status == 200 and not answer["generated"] and answer["title"] == before["title"] == "My own words"
    assert head(server, conversation) == before


def test_title_does_not_replace_one_that_was_set_meanwhile(server: Server, useful: None) -> None:
    conversation = converse(server, "Hello", **LONG)["conversation"]["id"]
    path = f"/v1/conversations/{conversation}"
    answers: list[Any] = []
    with slowed(server, 0.25):
        asking = threading.Thread(target=lambda: answers.append(name(server, conversation)[2]))
        asking.start()
        wait_until(lambda: server.num_pages_in_use() > 0, "the title to be under way")
        assert server.post(path, title="Mine")[0] == 200
        hurry(server)
        asking.join()
    assert not answers[0]["generated"] and answers[0]["title"] == "Mine" == head(server, conversation)["title"]


def test_title_is_stored_after_other_changes_meanwhile(server: Server, useful: None) -> None:
    """The title is stored although the conversation grows and gets metadata meanwhile."""
    first = converse(server, "Hello", **LONG)
    conversation = first["conversation"]["id"]
    answers: list[Any] = []
    with slowed(server, 0.25):
        asking = threading.Thread(target=lambda: answers.append(name(server, conversation)))
        asking.start()
        wait_until(lambda: server.num_pages_in_use() > 0, "the title to be under way")
        for number in range(5):
            server.post(f"/v1/conversations/{conversation}", metadata={"n": str(number)})
        hurry(server)
        converse(server, "More", previous_response_id=first["id"], ignore_eos=True)
        asking.join()
    assert answers[0][0] == 200 and answers[0][2]["generated"]
    assert head(server, conversation)["title"] == "From the model"
    assert head(server, conversation)["metadata"] == {"n": "4"}


def test_title_of_an_invalid_request_is_refused(server: Server, useful: None) -> None:
    conversation = converse(server, "Hello", **LONG)["conversation"]["id"]
    rev = head(server, conversation)["rev"]
    status, headers, answer = name(server, conversation, rev=rev + 1)
    assert status == 409 and headers["x-should-retry"] == "false"
    assert answer["error"]["code"] == "stale_revision" and answer["error"]["conversation"]["rev"] == rev
    assert name(server, conversation, rev=rev)[0] == 200
    assert name(server, "conv_x")[0] == 404
    assert name(server, conversation, model="another")[0] == 404
    assert name(server, conversation, rev="x")[0] == 400
    empty = server.post("/v1/conversations")[2]["id"]
    asked = server.post("/v1/conversations", items=[{"role": "user", "content": "Anybody?"}])[2]["id"]
    for silent in (empty, asked):
        status, _, answer = name(server, silent)
        assert status == 400 and answer["error"]["code"] == "nothing_said"


def test_title_of_a_disconnected_client_is_cancelled(server: Server, useful: None) -> None:
    conversation = converse(server, "Hello", **LONG)["conversation"]["id"]
    with slowed(server, 0.05):
        with server.connect() as connection:
            path = f"/v1/conversations/{conversation}/title"
            connection.sendall(f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n".encode())
            wait_until(lambda: server.num_pages_in_use() > 0, "the title to be under way")
        server.wait_idle()
    assert head(server, conversation)["title"] == "Hello"


def test_title_runs_after_requests_of_higher_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, useful: None
) -> None:
    seen: list[GenerateRequest] = []
    with Server(
        ServerConfig(db=str(tmp_path / "c.db")), engine_config=EngineConfig(scheduling_policy="priority")
    ) as server:
        server.wait_ready()
        conversation = converse(server, "Hello", **LONG)["conversation"]["id"]
        submit = server.engine.submit

        async def noted(request: GenerateRequest) -> None:
            seen.append(request)
            await submit(request)

        monkeypatch.setattr(server.engine, "submit", noted)
        assert name(server, conversation)[0] == 200
        server.wait_idle()
    (request,) = seen
    assert request.priority == MAX_PRIORITY and request.conversation_id == conversation
    assert json.loads(json.dumps(request.namespace)) == ""


TOOLS = [{"type": "function", "name": "find", "parameters": {"type": "object", "properties": {}}}]


@pytest.mark.parametrize(
    ("reply_text", "title"),
    [
        ('**Title:** "A trip to Rome."\nBecause they ask about it.', "A trip to Rome"),
        ("<think>\nA title, hm.\n</think>\n\nA trip to Rome", "A trip to Rome"),
        ("<think>\nA title should be", None),
        ('<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>', None),
        ("...", None),
        ("", None),
    ],
)
def test_reply_of_the_model_becomes_the_title(reply_text: str, title: str | None, speaking: ScriptedServer) -> None:
    """The model replies token by token, with reasoning and calls; tools keep the cache valid."""
    speaking.say("Which city?")
    response = converse(speaking, "Plan a trip", tools=TOOLS, instructions="Be brief", max_output_tokens=40)
    conversation, history = response["conversation"]["id"], response["usage"]["total_tokens"]
    speaking.say(reply_text)
    status, _, answer = name(speaking, conversation)
    assert status == 200 and answer["generated"] == (title is not None)
    assert answer["title"] == head(speaking, conversation)["title"] == (title or "Plan a trip")
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] >= (history - 1) // PAGE_SIZE * PAGE_SIZE
