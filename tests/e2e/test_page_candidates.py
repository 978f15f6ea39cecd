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


def _lengths(chat: RecordedPage) -> list[int]:
    lengths: Any = chat.page.evaluate(
        "[...document.querySelectorAll('.card .prose')].map(card => card.textContent.length)"
    )
    return list(lengths)
