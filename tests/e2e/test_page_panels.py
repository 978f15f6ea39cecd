"""Test the right panel: tabs and shortcuts, candidates, the branch map, the page map."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage

pytestmark = pytest.mark.slow

SIDE = ".side-panel"
MAP = re.compile("/v1/cache/map")
TABS = {"Candidates": "candidates", "Beams": "beams", "Branches": "branches", "KV pages": "pages"}


def test_one_panel_is_open_at_a_time_and_remembered(chat: RecordedPage) -> None:
    page = chat.page
    assert page.locator(SIDE).count() == 0
    for number, name in enumerate(TABS, start=1):
        page.click(f".panel-buttons [aria-label='{name}']")
        assert _shown_tab(chat) == name
        page.click("[aria-label='Close the panel']")
        assert page.locator(SIDE).count() == 0
        page.keyboard.press(f"Alt+Shift+{number}")
        assert _shown_tab(chat) == name
        page.keyboard.press(f"Alt+Shift+{number}")
        assert page.locator(SIDE).count() == 0
    page.keyboard.press("Control+.")
    assert _shown_tab(chat) == "KV pages"
    page.focus("#tab-pages")
    page.keyboard.press("ArrowRight")
    assert _shown_tab(chat) == "Candidates"
    assert page.evaluate("document.activeElement.id") == "tab-candidates"
    page.click("#tab-branches")
    chat.reload()
    page.wait_for_selector(SIDE)
    assert _shown_tab(chat) == "Branches"
    page.keyboard.press("Control+,")
    assert page.locator(SIDE).count() == 0, "settings are shown together with another panel"
    page.keyboard.press("Escape")
    page.keyboard.press("Control+.")
    page.keyboard.press("Escape")
    chat.reload()
    page.wait_for_selector("#composer")
    assert page.locator(SIDE).count() == 0


def test_empty_panel_explains_itself_and_its_button_works(chat: RecordedPage) -> None:
    page = chat.page
    page.click(".panel-buttons [aria-label=Candidates]")
    page.click("text=Try 4 answers")
    assert page.locator(".answer-count").inner_text() == "4 answers"
    assert page.evaluate("document.activeElement.id") == "composer"
    page.click("#tab-beams")
    page.click("text=Try 4 beams")
    assert page.locator(".answer-count").inner_text() == "4 beams"
    page.click("#tab-branches")
    page.wait_for_selector(".empty-panel >> text=Every message can branch")


def test_candidates_are_compared_and_picked_in_the_panel(chat: RecordedPage) -> None:
    page = chat.page
    for _ in range(2):
        page.click("[aria-label='More answers']")
    page.click(".panel-buttons [aria-label=Candidates]")
    chat.ask("Tell me a story about a dragon")
    texts = page.locator(".card .prose").all_inner_texts()
    assert page.locator(".version").count() == 3
    page.click(".version >> nth=2")
    assert chat.answers() == [texts[2]]
    assert page.locator(".version[aria-current=true] .card-number").inner_text() == "3"
    for _ in range(2):
        page.click("[aria-label='Fewer answers']")
    chat.ask("Thank you")
    page.click(".version >> nth=1")  # of an earlier turn: the panel shows the latest turn with several
    assert chat.answers() == [texts[1]]


def test_branch_map_shows_every_message_and_opens_it(chat: RecordedPage) -> None:
    page = chat.page
    page.keyboard.press("Alt+Shift+3")
    chat.ask("What is 2 + 3?")
    chat.ask("Thank you")
    page.click(".tool-regenerate >> nth=0")
    chat.wait_end(2)
    page.focus("#composer")
    page.keyboard.press("ArrowUp")
    page.fill("[aria-label='Edit message']", "What is 4 + 4?")
    page.keyboard.press("Enter")
    chat.wait_end(3)
    spots = page.locator(".map-node")
    chat.until("document.querySelectorAll('.map-node').length === 7")
    assert page.locator("[data-stat=branches]").inner_text() == "3"
    assert page.locator(".map-node-on-path").count() == 2
    items = page.evaluate(
        "fetch(`v1/conversations/${location.hash.slice(1)}/items?branches=all`).then(reply => reply.json())"
    )["data"]
    assert spots.count() == len(items)

    thanks = page.locator(".map-node-user[aria-label*='Thank you']")
    with page.expect_response(_kept) as kept:
        thanks.click()
    assert chat.said() == ["What is 2 + 3?", "Thank you"]
    assert page.locator(".map-node-on-path").count() == 4
    assert page.locator(".branch-preview").inner_text().startswith("You\n")
    shown = next(item["id"] for item in items if item["parent_id"] == _id_of(items, "Thank you"))
    assert kept.value.json()["active_leaf"] == shown

    page.focus(".branch-graph")
    page.keyboard.press("ArrowUp")  # the first answer
    page.keyboard.press("ArrowRight")  # its other version
    assert len(chat.said()) == 1
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert chat.said() == ["What is 4 + 4?"]
    with page.expect_response(_kept):
        page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.getAttribute('class')") == "branch-graph"
    at = page.locator(".branch-graph").get_attribute("aria-activedescendant")
    assert "2 + 3" in (page.locator(f"[id='{at}']").get_attribute("aria-label") or "")


def test_branch_map_of_a_thousand_messages_renders_the_visible_part(chat: RecordedPage) -> None:
    """Each tenth of 500 questions has two answers: only the visible nodes are drawn, and any node is reachable."""
    _open_long(chat, num_turns=500)
    chat.page.keyboard.press("Alt+Shift+3")
    chat.page.wait_for_selector(".map-node-current")
    assert chat.page.locator("[data-stat=messages]").inner_text() == "1050"
    assert chat.page.locator("[data-stat=branches]").inner_text() == "51"
    assert chat.page.locator(".map-node").count() < 120
    chat.page.focus(".branch-graph")
    chat.page.keyboard.press("Home")
    chat.page.wait_for_selector(".map-node-current[aria-label^='You: question 0']")
    chat.until("document.querySelector('.user-text')?.textContent === 'question 0'")
    chat.until("document.querySelector('.user-text').getBoundingClientRect().top < 400")
    chat.page.keyboard.press("End")
    chat.page.wait_for_selector(".map-node-current[aria-label*='answer 499']")


def test_page_map_shows_counts_of_every_state_and_updates(chat: RecordedPage) -> None:
    """With maps from the test, drawing, counts and table agree, and a hidden tab sends no requests."""
    map_1, map_2 = "ssaapio" + "f" * 93, "sssspio" + "f" * 93
    held: list[Any] = []  # requests that wait for the test
    page = chat.page
    page.clock.install()
    chat.reload()
    page.route(MAP, lambda route: held.append(route))
    page.keyboard.press("Alt+Shift+4")
    _until_held(chat, held)
    held.pop().fulfill(body=_map_of(map_1))
    page.wait_for_selector("[data-count=shared] >> text=2")
    counts = {"shared": 2, "active": 2, "pinned": 1, "idle": 1, "other": 1, "free": 93}
    assert {name: _count(chat, name) for name in counts} == counts
    drawn = {name: page.locator(f".kv-page-map .page-{name}").get_attribute("d") or "" for name in counts}
    assert {name: path.count("M") for name, path in drawn.items()} == counts
    _until_held(chat, held)
    held.pop().fulfill(body=_map_of(map_2))
    page.wait_for_selector("[data-count=shared] >> text=4")
    assert (page.locator(".page-changed").get_attribute("d") or "").count("M") == 2

    _until_held(chat, held)
    page.click("#tab-branches")
    page.wait_for_selector("#tab-branches[aria-selected=true]")
    with page.expect_response(MAP):
        held.pop().fulfill(body=_map_of(map_1))
    page.clock.run_for(60_000)
    chat.until("document.querySelector('.kv-page-map') === null")
    assert held == [], "requested while the tab is hidden"


def test_page_map_shows_shared_pages_of_four_candidates(chat: RecordedPage, endless: None, picture: Any) -> None:
    """With the real map, four running candidates share the pages of the prompt; afterwards all pages are idle."""
    page = chat.page
    chat.reload()
    for _ in range(3):
        page.click("[aria-label='More answers']")
    page.keyboard.press("Alt+Shift+4")
    chat.say("Tell me a long story about a dragon, a robot and an owl who wanted to know how the sea was made")
    counted = "Number(document.querySelector('[data-count={}]').textContent)"
    chat.until(f"document.querySelector('[data-count=active]') && {counted.format('active')} >= 4")
    assert _count(chat, "shared") > 0
    picture(page, "pages")
    page.click("button[aria-label=Stop]")
    chat.wait_end(0)
    chat.until(f"{counted.format('active')} + {counted.format('shared')} === 0")
    assert _count(chat, "idle") > 0
    page_map = page.evaluate(_GET, "v1/cache/map")
    assert _count(chat, "idle") == page_map["cells"].count("i")
    assert _count(chat, "idle") + _count(chat, "free") == len(page_map["cells"]) == page_map["num_pages"]


def test_page_map_shows_the_text_of_a_page_and_the_branches_that_use_it(chat: RecordedPage) -> None:
    page = chat.page
    chat.ask("Tell me a story about a fox, an owl and a robot who lived by the sea and talked about pages all day")
    page.click("[aria-label='Edit as a new branch']")
    page.keyboard.type(" and all night")
    page.keyboard.press("Enter")
    chat.wait_end(1)
    leaves = [ended["output"][0]["id"] for ended in chat.ends()]
    expected: dict[int, tuple[str, list[str]]] = {}  # by place in the map: the longest text, and the branches
    for number, leaf in enumerate(leaves, 1):
        asked = {"previous_item_id": leaf, "input": [{"role": "user", "content": "?"}], "page_texts": True}
        for each in page.request.post(f"{chat.server}/v1/cache/explain", data=asked).json()["pages"]:
            if each["map_index"] is not None:
                text, branches = expected.get(each["map_index"], ("", []))
                longest = max(text, each["text"], key=len)
                expected[each["map_index"]] = (longest, [*branches, f"Branch {number}"])
    assert any(len(branches) == 2 for _, branches in expected.values()), "the prompt is shared"
    assert any(len(branches) == 1 for _, branches in expected.values()), "the answers are not"
    page.keyboard.press("Alt+Shift+4")
    page.wait_for_selector("[role=slider]")
    chat.until(f"document.querySelector('[role=slider]').ariaValueMax === '{len(expected)}'")

    def shown() -> tuple[str, list[str]]:
        return page.locator(".page-text").text_content() or "", page.locator(".page-holders .link").all_inner_texts()

    page.focus("[role=slider]")
    page.wait_for_selector(".page-text")
    seen = []
    for place in range(1, len(expected) + 1):
        page.wait_for_selector(f"[role=slider][aria-valuenow='{place}']")
        seen.append(shown())
        page.keyboard.press("ArrowRight")
    assert seen == [expected[place] for place in sorted(expected)]

    box = page.locator(".kv-page-map").bounding_box()
    columns, rows = (int(size) // 10 for size in (page.get_attribute(".kv-page-map", "viewBox") or "").split()[2:])
    assert box
    for place in sorted(expected)[:3]:
        x = box["x"] + box["width"] * (place % columns + 0.5) / columns
        y = box["y"] + box["height"] * (place // columns + 0.5) / rows
        page.mouse.move(x, y)
        page.wait_for_selector(f"[role=slider][aria-valuenow='{sorted(expected).index(place) + 1}']")
        assert shown() == expected[place]
    page.click(".page-holders .link >> nth=0")
    chat.until("document.querySelector('.user-message .version-position')?.innerText === '1/2'")


def test_panel_covers_the_thread_on_a_phone(open_page: Callable[..., RecordedPage]) -> None:
    phone = {"width": 390, "height": 844}
    chat = open_page(viewport=phone, device_scale_factor=2, is_mobile=True, has_touch=True)
    page = chat.page
    chat.ask("What is 2 + 3?")
    page.tap("[aria-label=Panel]")
    page.wait_for_selector(f"{SIDE} [role=tab]")
    box = page.locator(SIDE).bounding_box()
    assert box == {"x": 0, "y": 0, **phone}
    for tab in TABS.values():
        page.tap(f"#tab-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
    page.tap("#tab-branches")
    with chat.appears(".row-highlight .user-text"):  # shows the message
        page.tap(".map-node >> nth=0")
    page.wait_for_selector(SIDE, state="detached")
    chat.reload()
    page.wait_for_selector(".user-message")
    assert page.locator(SIDE).count() == 0, "a visit must not start with a panel over the thread"


def test_page_map_of_four_thousand_cells_is_six_paths(chat: RecordedPage) -> None:
    cells = "sapiof" * 683
    chat.page.route(MAP, lambda route: route.fulfill(body=_map_of(cells, 8)))
    chat.page.keyboard.press("Alt+Shift+4")
    chat.page.wait_for_selector("text=One cell represents 8 pages")
    assert chat.page.locator(".kv-page-map *").count() == 6
    box = chat.page.locator(".kv-page-map").bounding_box()
    assert box and box["height"] < 1.2 * box["width"]


def _until_held(chat: RecordedPage, held: list[Any]) -> None:
    for _ in range(1200):
        if held:
            return
        chat.page.wait_for_timeout(50)
    raise AssertionError("the page map was not requested")


def _shown_tab(chat: RecordedPage) -> str:
    chat.page.wait_for_selector(f"{SIDE} [role=tab]")
    tabs: list[str] = chat.page.locator("[role=tab][aria-selected=true]").all_inner_texts()
    assert len(tabs) == 1
    return tabs[0]


def _kept(reply: Any) -> bool:
    return bool(re.search("/v1/conversations/conv_[^/]+$", reply.url) and reply.request.method == "POST")


def _id_of(items: list[dict[str, Any]], text: str) -> str:
    return str(next(item["id"] for item in items if item["content"][0]["text"] == text))


def _map_of(cells: str, per_cell: int = 1) -> str:
    num_pages = per_cell * len(cells)
    return json.dumps({"page_size": 16, "num_pages": num_pages, "pages_per_cell": per_cell, "cells": cells})


def _count(chat: RecordedPage, name: str) -> int:
    return int(chat.page.locator(f"[data-count={name}]").inner_text().replace(",", ""))


def _open_long(chat: RecordedPage, num_turns: int) -> None:
    """Store a conversation with two answers to every tenth question, and open it."""
    items = []
    for turn in range(num_turns):
        items += [{"role": "user", "content": f"question {turn}"}, {"role": "assistant", "content": f"answer {turn}"}]
    conversation = _post(chat, "v1/conversations", {"items": items, "title": "Long"})["id"]
    listed = chat.page.evaluate(_GET, f"v1/conversations/{conversation}/items?branches=all")["data"]
    for item in [item for item in listed if item["role"] == "user"][::10]:
        other = {"items": [{"role": "assistant", "content": "another"}], "parent_id": item["id"]}
        _post(chat, f"v1/conversations/{conversation}/items", other)
    _post(chat, f"v1/conversations/{conversation}", {"active_leaf": listed[-1]["id"]})
    chat.page.goto(f"{chat.server}/#{conversation}")
    chat.reload()
    chat.page.wait_for_selector(".row")


_GET = "path => fetch(path).then(reply => reply.json())"
_POST = """([path, body]) => fetch(path, {method: "POST", body: JSON.stringify(body),
    headers: {"content-type": "application/json"}}).then(reply => reply.json())"""


def _post(chat: RecordedPage, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = chat.page.evaluate(_POST, [path, body])
    assert "error" not in answer, answer
    return answer


def test_branch_list_counts_tokens_marks_compares_and_deletes_branches(chat: RecordedPage) -> None:
    page = chat.page
    chat.ask("Tell me a story about a fox")
    chat.ask("And then?")
    page.click("[aria-label='Regenerate'] >> nth=-1")
    chat.wait_end(2)
    page.click(".panel-buttons [aria-label=Branches]")
    rows = page.locator(".branch-row")
    page.wait_for_selector(".branch-row >> nth=1 >> [data-tokens=own]")
    conversation = page.evaluate("location.hash.slice(1).split('/')[0]")
    leaves = [chat.ends()[index]["output"][0] for index in (1, 2)]
    for row, leaf in zip(rows.all(), leaves, strict=True):
        assert leaf["content"][0]["text"].replace("\n", " ")[:20] in row.locator(".branch-open").inner_text()
        asked = {"previous_item_id": leaf["id"], "input": [{"role": "user", "content": "?"}]}
        reply = page.request.post(f"{chat.server}/v1/cache/explain", data=asked).json()
        *shared, own = reply["messages"][:-1]
        shown = [int(row.locator(f"[data-tokens={kind}]").inner_text()) for kind in ("shared", "own", "cold")]
        cold = sum(each["tokens"] - each["cached_tokens"] for each in (*shared, own))
        assert shown == [sum(each["tokens"] for each in shared), own["tokens"], cold]

    page.click("[aria-label='Compare Branch 1']")
    page.click("[aria-label='Compare Branch 2']")
    assert page.locator(".branch-compared .differences").count() == 2
    page.click("[aria-label='Rename Branch 2']")
    page.keyboard.type("The second")
    page.keyboard.press("Enter")
    page.click("[aria-label='Star The second']")
    page.wait_for_selector("[aria-label='Star The second'][aria-pressed=true]")
    assert "The second" in rows.first.inner_text(), "the star moves it to the top"
    chat.until("document.querySelectorAll('.branch-row').length === 2")
    chat.reload()
    page.wait_for_selector("[aria-label='Star The second'][aria-pressed=true]")

    page.click("[aria-label='Delete The second']")
    page.click("text=Delete 1 message")
    chat.until("document.querySelectorAll('.branch-row').length === 0")
    path = f"{chat.server}/v1/conversations/{conversation}/items?branches=all"
    chat.page.wait_for_selector("text=Branch deleted.")
    assert [each["id"] for each in page.request.get(path).json()["data"]][-1] == leaves[0]["id"]
    assert page.locator(".answer").count() == 2
