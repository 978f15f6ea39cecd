"""Test that malicious text stays text: in messages, streams, titles, system prompts and search results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage
from tests.e2e.rest_client import call, create_conversation

pytestmark = pytest.mark.slow

CORPUS: list[str] = json.loads((Path(__file__).parents[2] / "web" / "test" / "corpus.json").read_text())
REL = "noopener noreferrer nofollow"
# Active elements: none of them may come from a text. KaTeX and highlight.js create their own nodes.
FOUND = """(() => {
  const active = 'script, img, iframe, object, embed, form, input, button, style, base, meta, link, video, svg, math';
  const ours = '.katex, .code-bar';
  const found = [];
  for (const place of document.querySelectorAll('.prose, .user-text, .conversation-title, .branch-label, .top-title'))
    for (const node of place.querySelectorAll(active)) if (!node.closest(ours)) found.push(node.outerHTML);
  for (const node of document.querySelectorAll('*')) {
    if (node.getAttributeNames().some(name => /^on|^srcdoc$|^formaction$/i.test(name))) found.push(node.outerHTML);
    if (node.matches('.prose [style]') && !node.closest('.katex')) found.push(node.outerHTML);
    if (node.matches('.prose [id]')) found.push(node.outerHTML);
  }
  for (const script of document.scripts) if (!script.src.startsWith(location.origin)) found.push(script.outerHTML);
  return [...found, ...(window.__xss === undefined ? [] : ['it ran'])];
})()"""
LINKS = "[...document.querySelectorAll('.prose a')].map(link => [link.protocol, link.rel, link.target])"


def test_stored_malicious_text_stays_text(open_page: Any, server: str) -> None:
    """A conversation with every text as user and assistant message; title and system prompt are such texts too."""
    texts = [text for text in CORPUS for _ in range(2)]
    halves = [texts[: len(texts) // 4 * 2], texts[len(texts) // 4 * 2 :]]
    for half in halves:  # each short enough to be in the document completely
        made = create_conversation(server, half[:78], title=half[0], metadata={"system": half[1]})
        chat: RecordedPage = open_page(f"/#{made}")
        chat.page.wait_for_selector(".answer .prose >> nth=37", state="attached")
        _look(chat)
        chat.page.keyboard.press("Alt+Shift+3")
        chat.page.wait_for_selector(".branch-label >> nth=10", state="attached")
        chat.page.keyboard.press("Control+,")
        chat.page.wait_for_selector("#system")
        _look(chat)


def test_malicious_titles_and_search_results_stay_text(open_page: Any, server: str) -> None:
    titles = [text for text in CORPUS if len(text) <= 200]
    made = [create_conversation(server, [f"tripwire {title}", title], title=title) for title in titles]
    chat: RecordedPage = open_page()
    chat.page.wait_for_selector(".conversation-row >> nth=20", state="attached")
    _look(chat)
    for words in ("tripwire", "<img", "<script>", "onerror="):
        with chat.page.expect_response(re.compile(r"/v1/conversations\?.*query=")):
            chat.page.fill("#find", words)
        chat.page.wait_for_selector(".list-scroll[aria-busy=false] .search-hit", state="attached")
        _look(chat)
    for conversation in made:
        call(server, "DELETE", f"/v1/conversations/{conversation}")


def test_streamed_malicious_text_stays_text(browser: Any, server: str) -> None:
    """The frames of the reply come from the test, piece by piece."""
    chat = RecordedPage(browser.new_context(), server)
    chat.page.route_web_socket(re.compile("/v1/responses"), _say("\n\n".join(CORPUS)))
    chat.page.goto(server)
    chat.connected()
    chat.say("\n\n".join(CORPUS))
    chat.page.wait_for_selector(".answer[data-status=done]")
    _look(chat)
    links = chat.page.evaluate(LINKS)
    assert len(links) > 5
    assert {tuple(link) for link in links} == {("https:", REL, "_blank")}
    chips = chat.page.locator("a.image-chip").evaluate_all("chips => chips.map(chip => [chip.href, chip.textContent])")
    assert ["https://evil.example/a.png", 'x" onerror="window.__xss=1\nevil.example/a.png'] in chips
    assert chat.problems() == []
    chat.context.close()


def _look(chat: RecordedPage) -> None:
    """Check that no element is active after code and formulas have been rendered."""
    chat.until("document.querySelector('.math') === null")
    chat.page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    assert chat.page.evaluate(FOUND) == []
    assert chat.page.locator(".user-text *").count() == 0


def _say(text: str) -> Any:
    """Route handler: a server that answers every message with `text`, a few characters at a time."""

    def serve(link: Any) -> None:
        limits = {"max_frame_bytes": 1 << 20, "max_n": 8, "max_beam_width": 8}
        session = {"model": "<img src=x onerror=window.__xss=1>", "max_model_len": 99, "limits": limits}
        link.send(json.dumps({"type": "session.created", "session": session}))

        def answer(message: str) -> None:
            frame = json.loads(message)
            if frame["type"] != "response.create":
                return
            response = {"id": "resp_1", "status": "in_progress", "conversation": None, "input_item_ids": ["msg_1"]}
            item = {"output_index": 0, "item": {"id": "msg_2", "finish_reason": "stop"}}
            frames: list[dict[str, Any]] = [{"type": "response.created", "response": response}]
            frames += [{"type": "response.output_item.added", **item}]
            pieces = [text[start : start + 9] for start in range(0, len(text), 9)]
            frames += [{"type": "response.output_text.delta", "output_index": 0, "delta": piece} for piece in pieces]
            frames += [{"type": "response.output_text.done", "output_index": 0, "text": text}]
            frames += [{"type": "response.output_item.done", **item}]
            frames += [{"type": "response.completed", "response": response | {"status": "completed", "usage": None}}]
            for outgoing in frames:
                link.send(json.dumps(outgoing | {"stream_id": frame["stream_id"]}))

        link.on_message(answer)

    return serve
