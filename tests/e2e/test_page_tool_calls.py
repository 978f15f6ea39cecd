"""Test the cards of function calls: of stored conversations with their results, and in the middle of an answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage, endless_create
from tests.e2e.rest_client import call, create_conversation_with_call

pytestmark = pytest.mark.slow

CALL = {
    "id": "fc_1_0",
    "type": "function_call",
    "call_id": "call_1",
    "name": "search",
    "arguments": '{"query": "cats"}',
}


def _parts(chat: RecordedPage) -> list[str]:
    texts: list[str] = chat.page.locator(".tool-call pre").all_inner_texts()
    return [re.sub(r"\s", "", text) for text in texts]


def _pass_with_call(link: Any) -> None:
    """Route handler: the real server with endless replies, each of which calls a function at its beginning."""
    upstream = link.connect_to_server()
    link.on_message(lambda message: upstream.send(endless_create(message)))

    def receive(message: str) -> None:
        link.send(message)
        frame = json.loads(message)
        if frame["type"] == "response.created":
            done = {"type": "response.output_item.done", "output_index": 9, "item": {**CALL, "candidate": 0}}
            link.send(json.dumps({**done, "stream_id": frame["stream_id"]}))

    upstream.on_message(receive)


def test_stored_calls_are_shown_with_the_results_of_their_branch(chat: RecordedPage) -> None:
    page = chat.page
    made = create_conversation_with_call(chat.server)
    page.evaluate("hash => location.hash = hash", made)
    page.wait_for_selector(".tool-call >> nth=1")
    assert page.locator(".tool-call summary b").all_inner_texts() == ["weather", "time"]
    assert page.locator(".tool-call summary .hint").all_inner_texts() == ["result", "no result"]
    page.click(".tool-call summary >> nth=0")
    assert _parts(chat)[:2] == ['{"city":"Rome"}', '{"degrees":21}']
    assert chat.answers()[-1] == "It is warm."

    items = call(chat.server, "GET", f"/v1/conversations/{made}/items?branches=all")["data"]
    output = {"type": "function_call_output", "call_id": "call_1", "output": "unknown"}
    answer = {"role": "assistant", "content": "Who can say?"}
    body = {"items": [output, answer], "parent_id": items[1]["id"]}
    call(chat.server, "POST", f"/v1/conversations/{made}/items", body)
    page.wait_for_selector(".answer .version-position:text('2/2')")
    page.wait_for_selector(".tool-call[open] pre:text('unknown')")
    page.click("[aria-label='Previous version']")
    page.wait_for_selector(".tool-call[open] pre:text('21')")


def test_call_is_shown_while_its_answer_grows(chat: RecordedPage) -> None:
    page = chat.page
    page.route_web_socket(re.compile("/v1/responses"), _pass_with_call)
    chat.reload()
    chat.say("Tell me a story about a dragon")
    page.click(".tool-call summary:has-text('search')")
    assert _parts(chat) == ['{"query":"cats"}']
    grown = "document.querySelector('.answer .prose').textContent.length"
    before = page.evaluate(grown)
    chat.until(f"{grown} > {before}")
    assert page.get_attribute(".answer", "data-status") == "streaming"
    assert page.locator(".tool-call[open]").count() == 1, "the card stays open while text arrives"
    page.keyboard.press("Escape")
    chat.wait_end(0)
