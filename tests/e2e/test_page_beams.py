"""Test beam search on the page: the tree grows, common text is final, open text is a preview (ghost)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.recorded_page import ANSWER_TOKENS, PICTURES, RecordedPage, pass_endless

pytestmark = pytest.mark.slow

WIDTH = 4


@pytest.fixture
def searching(open_page: Callable[..., RecordedPage]) -> RecordedPage:
    """A page with four beams selected."""
    chat = open_page()
    chat.page.evaluate(
        "settings => localStorage['chatcache.sampling'] = JSON.stringify(settings)",
        {"search": "beam", "n": WIDTH, "maxTokens": ANSWER_TOKENS},
    )
    return chat


def test_beam_tree_grows_during_the_search_and_contains_the_answers(searching: RecordedPage, picture: Any) -> None:
    chat = searching
    chat.page.route_web_socket(re.compile("/v1/responses"), pass_endless)
    chat.reload()
    chat.page.keyboard.press("Alt+Shift+2")
    chat.page.wait_for_selector(".empty-panel >> text=Watch beam search")
    chat.say("Tell me a story about a dragon")
    chat.page.wait_for_selector(f".beam-row >> nth={WIDTH - 1}")
    chat.until("document.querySelector('.answer-beams .ghost')?.textContent.length > 0")
    width = _tree_width(chat)
    chat.until(f"document.querySelector('.beam-tree').clientWidth > {width} + 100")
    chat.until("Number(document.querySelector('[data-stat=agreed]').textContent) > 3")
    if PICTURES:
        chat.until("Number(document.querySelector('[data-stat=agreed]').textContent) > 40")
    picture(chat.page, "beams")
    asked = next(frame for frame in reversed(chat.sent) if frame["type"] == "response.create")
    assert (asked["beam_width"], asked["stream_beams"]) == (WIDTH, True)
    chat.page.click("button[aria-label=Stop]")
    chat.wait_end(0)
    chat.page.wait_for_selector(".side-summary >> text=Stopped")

    frames = [frame for frame in chat.received if frame["type"] == "response.beam"]
    texts, parents = _tree(frames)
    live = frames[-1]["live"]
    agreed = _shared([_path(node, parents) for node in live])
    trunk = texts[agreed[-1]].replace("\n", "⏎")
    ends = "[...document.querySelectorAll('.beam-open > text')].map(text => text.textContent)"
    for node in live:  # rendered a moment later; only the end of long text
        rest = texts[node][len(texts[agreed[-1]]) :].replace("\n", "⏎")
        chat.until(f"{ends}.some(text => text && {json.dumps(rest)}.endsWith(text))")
    chat.page.evaluate("document.querySelector('.beam-scroll').scrollLeft = 0")
    chat.until(f"{json.dumps(trunk)}.startsWith(document.querySelector('.beam-agreed > text')?.textContent ?? '?')")
    said = re.sub(r"<\|\w+\|>", "", trunk)  # an endless reply may contain special tokens
    assert _squeeze(said) == _squeeze(chat.page.locator(".card .prose").first.inner_text())


@pytest.mark.parametrize("is_late", [False, True])
def test_common_text_is_final_and_the_best_beam_a_ghost(searching: RecordedPage, is_late: bool) -> None:
    """The frames come from the test, step by step. The renderer may load after the text."""
    chat = searching
    script = Script()
    asked: list[Any] = []
    if is_late:
        chat.page.route(re.compile("/assets/renderer-"), lambda route: asked.append(route))
    chat.page.route_web_socket(re.compile("/v1/responses"), script.serve)
    chat.reload()
    chat.page.keyboard.press("Alt+Shift+2")
    chat.say("Hello")
    chat.until("document.querySelector('.answer-beams .pending') !== null")
    script.beams([(1, 0, "Once", -0.1), (2, 0, "There", -0.4)], [1, 2])
    chat.page.wait_for_selector(".ghost >> text=Once")
    chat.page.wait_for_selector("[data-stat=agreed] >> text=0")

    script.beams([(3, 1, " upon", -0.2), (4, 1, " more", -0.9)], [3, 4])
    script.add_text("Once")
    if is_late:
        chat.page.wait_for_selector("[data-stat=agreed] >> text=1")
        asked.pop().continue_()
    chat.until(f"{_GHOST} === ' upon'")
    solid = "document.querySelector('.answer-beams .prose').cloneNode(true)"
    assert _without_ghost(chat, solid) == "Once"
    chat.page.wait_for_selector("[data-stat=agreed] >> text=1")

    script.beams([(5, 4, " we", -1.0), (6, 4, " they", -3.5)], [5, 6])
    script.add_text(" more")
    chat.until(f"{_GHOST} === ' we'")
    assert _without_ghost(chat, solid) == "Once more"
    chat.page.wait_for_selector("[data-stat=agreed] >> text=2")
    assert chat.page.evaluate(_KINDS) == {
        "Once more": "agreed",
        " we": "open",
        " they": "open",
        " upon": "dropped",
        "There": "dropped",
    }
    rows = chat.page.locator(".beam-row")
    assert rows.nth(0).locator(".beam-score").inner_text().startswith("the best")
    assert rows.nth(1).locator(".beam-score").inner_text().startswith("12 times less likely than the best")
    rows.nth(1).focus()  # highlights its path in the tree
    chat.page.wait_for_selector(".beam-piece.beam-highlighted >> text=they")
    assert rows.nth(1).text_content() == "Beam 2they12 times less likely than the best · 31.1% per token"

    script.beams([(7, 5, " play", -1.2)], [7])  # the other one has ended
    chat.page.wait_for_selector("[data-stat=open] >> text=1")
    script.end(["Once more we", "Once more they"])
    chat.page.wait_for_selector(".card >> nth=1")
    chat.page.wait_for_selector(".side-summary >> text=Found")
    chat.page.wait_for_selector("[data-stat=agreed] >> text=2")  # of the kept beams, not of the last open ones
    assert rows.locator(".beam-text").all_text_contents() == ["we", "they"]
    assert chat.page.locator(".ghost").count() == 0
    chat.page.click(".beam-row >> nth=1")
    assert chat.answers() == ["Once more they"]
    assert chat.page.locator(".beam-row").nth(1).get_attribute("aria-current") == "true"


def test_page_without_the_panel_shows_the_search_and_offers_the_tree(searching: RecordedPage) -> None:
    chat = searching
    chat.page.route_web_socket(re.compile("/v1/responses"), pass_endless)
    chat.reload()
    chat.say("Tell me a story about an owl")
    chat.page.click("text=Watch the tree")
    chat.page.wait_for_selector(".beam-tree")
    chat.page.click("button[aria-label=Stop]")
    chat.wait_end(0)
    assert chat.page.locator(".card").count() == WIDTH


class Script:
    """A server with one response, whose frames the test sends."""

    def __init__(self) -> None:
        self._link: Any = None
        self._lane: dict[str, str] = {}

    def serve(self, link: Any) -> None:
        self._link = link
        limits = {"max_frame_bytes": 1 << 20, "max_n": 8, "max_beam_width": 8}
        self._send(type="session.created", session={"model": "m", "max_model_len": 99, "limits": limits})
        link.on_message(self._answer)

    def beams(self, nodes: list[tuple[int, int, str, float]], live: list[int]) -> None:
        node_objects = [dict(zip(("id", "parent", "text", "score"), node, strict=True)) for node in nodes]
        self._send(type="response.beam", response_id="resp_1", nodes=node_objects, live=live)

    def add_text(self, delta: str) -> None:
        for index in range(2):
            self._send(type="response.output_text.delta", output_index=index, delta=delta)

    def end(self, texts: list[str]) -> None:
        for index, text in enumerate(texts):
            item = {"id": f"msg_{index + 2}", "type": "message", "finish_reason": "stop"}
            self._send(type="response.output_text.done", output_index=index, text=text)
            self._send(type="response.output_item.done", output_index=index, item=item)
        self._send(type="response.completed", response=_response("completed"))

    def _answer(self, message: str) -> None:
        frame = json.loads(message)
        if frame["type"] != "response.create":
            return
        self._lane = {"stream_id": frame["stream_id"]}
        self._send(type="response.created", response=_response("in_progress"))

    def _send(self, **frame: Any) -> None:
        self._link.send(json.dumps(frame | self._lane))


_KINDS = """Object.fromEntries([...document.querySelectorAll('.beam-piece')].map(piece => [
    piece.querySelector('text').textContent, /beam-(agreed|open|dropped)/.exec(piece.getAttribute('class'))[1]]))"""


_GHOST = "document.querySelector('.answer-beams .ghost')?.textContent"


def _response(status: str) -> dict[str, Any]:
    return {"id": "resp_1", "status": status, "conversation": None, "input_item_ids": ["msg_1"], "usage": None}


def _tree(frames: list[dict[str, Any]]) -> tuple[dict[int, str], dict[int, int]]:
    """Return the text from the root to each node, and the parent of each node."""
    texts: dict[int, str] = {0: ""}
    parents: dict[int, int] = {}
    for node in (node for frame in frames for node in frame["nodes"]):
        texts[node["id"]] = texts[node["parent"]] + node["text"]
        parents[node["id"]] = node["parent"]
    return texts, parents


def _path(node: int, parents: dict[int, int]) -> list[int]:
    path = []
    while node:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _shared(paths: list[list[int]]) -> list[int]:
    return [steps[0] for steps in zip(*paths, strict=False) if len(set(steps)) == 1]


def _tree_width(chat: RecordedPage) -> int:
    return int(chat.page.evaluate("document.querySelector('.beam-tree').clientWidth"))


def _without_ghost(chat: RecordedPage, element: str) -> str:
    script = f"(prose => (prose.querySelector('.ghost').remove(), prose.textContent.trim()))({element})"
    return str(chat.page.evaluate(script))


def _squeeze(text: str) -> str:
    return "".join(re.findall(r"\w", text))
