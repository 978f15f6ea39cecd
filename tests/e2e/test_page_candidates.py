"""Test dropping a candidate during generation: its pages are released, the other candidates continue."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage, stores_active_leaf

pytestmark = pytest.mark.slow


def test_dropped_candidate_ends_at_once_and_shows_its_receipt(chat: RecordedPage, endless: None) -> None:
    page = chat.page
    chat.reload()
    for _ in range(2):
        page.click("[aria-label='More answers']")
    chat.say("Tell me a story about a dragon")
    cards = "[...document.querySelectorAll('.card .prose')]"
    chat.until(f"{cards}.length === 3 && {cards}.every(card => card.textContent.length > 20)")
    page.click("[aria-label='Drop answer 1']")
    gone = page.locator(".card").nth(0)
    gone.locator("[data-dropped]").wait_for()
    assert gone.locator(".card-state").inner_text() == "dropped"
    frame = next(frame for frame in chat.received if frame["type"] == "response.dropped")
    assert frame["candidate"] == 0
    assert frame["receipt"]["pages_freed"] >= 1
    assert f"{frame['receipt']['pages_freed']} page" in gone.locator("[data-dropped]").inner_text()
    assert chat.ends() == [], "the other candidates continue"
    assert page.locator("[aria-label='Drop answer 1']").count() == 0

    before = _lengths(chat)
    chat.until(
        "(before => [...document.querySelectorAll('.card .prose')].slice(1)"
        f".every((card, i) => card.textContent.length > before[i + 1]))({before})"
    )
    assert _lengths(chat)[0] == before[0], "the dropped candidate got more text"

    page.locator(".card").nth(1).locator(".card-pick").focus()
    page.keyboard.press("Alt+Delete")
    page.locator(".card").nth(1).locator("[data-dropped]").wait_for()
    page.keyboard.press("Alt+3")
    with page.expect_response(stores_active_leaf):
        page.keyboard.press("Escape")
        ended = chat.wait_end(0)
    by_candidate = {item["candidate"]: item for item in ended["output"]}
    assert [by_candidate[index]["finish_reason"] for index in range(3)] == ["cancelled"] * 3
    page.wait_for_selector(".answer")
    assert page.locator(".answer .version-position").inner_text() == "3/3"
    chat.reload()
    page.wait_for_selector(".answer")
    assert page.locator(".answer .version-position").inner_text() == "3/3"


def test_beams_cannot_be_dropped(chat: RecordedPage) -> None:
    chat.page.click("[aria-label=Settings]")
    chat.page.click("button:text('Beam search')")
    chat.say("What is the capital of France?")
    chat.page.wait_for_selector(".card")
    assert chat.page.locator(".card-drop").count() == 0
    chat.wait_end(0)


def test_candidates_show_their_differences_alone_in_pairs_and_by_probability(chat: RecordedPage) -> None:
    page = chat.page
    for _ in range(2):
        page.click("[aria-label='More answers']")
    ended = chat.ask("Tell me a story about a dragon")
    by_candidate = {item.get("candidate", 0): item for item in ended["output"]}
    texts = [by_candidate[index]["content"][0]["text"] for index in range(3)]
    page.click("button:text('Differences')")
    common = page.locator(".candidates-common").evaluate_all("all => all.map(each => each.lastChild.textContent)")
    rests = page.locator(".differences").all_text_contents()
    assert [("".join(common) + rest.replace("(no further text)", "")) for rest in rests] == texts
    assert all(text.startswith("".join(common)) for text in texts)
    assert page.locator(".differences mark").count() > 0
    page.click("[aria-label='Compare answer 3']")
    page.click("[aria-label='Compare answer 1']")
    assert page.locator(".card-number").all_inner_texts() == ["3", "1"]
    page.click("[aria-label='Widen answer 1']")
    assert page.locator(".card-number").all_inner_texts() == ["1"]
    assert page.locator(".card .prose").count() == 1, "one answer alone is shown as usual"
    page.click("button:text('Show all 3')")
    page.click("button:text('Sort by probability')")
    page.wait_for_selector(".card-likelihood >> nth=2")
    means = []
    for index in range(3):
        path = f"items/{by_candidate[index]['id']}/tokens?top=0"
        scored = page.evaluate(
            "path => fetch(`v1/conversations/${location.hash.slice(1)}/${path}`).then(reply => reply.json())", path
        )["data"]
        means.append(sum(each["token"]["logprob"] for each in scored) / len(scored))
    order = sorted(range(3), key=lambda index: -means[index])
    assert page.locator(".card-number").all_inner_texts() == [str(index + 1) for index in order]


def _lengths(chat: RecordedPage) -> list[int]:
    lengths: Any = chat.page.evaluate(
        "[...document.querySelectorAll('.card .prose')].map(card => card.textContent.length)"
    )
    return list(lengths)
