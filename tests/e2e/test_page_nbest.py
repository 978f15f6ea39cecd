"""Test several replies to one prompt: they stream together, one is picked and continued."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.recorded_page import PICTURES, RecordedPage

pytestmark = pytest.mark.slow

ENOUGH = 180 if PICTURES else 60  # characters in every card


def test_candidates_stream_together_and_the_picked_one_is_continued(
    chat: RecordedPage, endless: None, picture: Any
) -> None:
    chat.reload()
    for _ in range(3):
        chat.page.click("[aria-label='More answers']")
    chat.say("Tell me a story about a dragon")
    cards = "[...document.querySelectorAll('.card .prose')]"
    chat.until(f"{cards}.length === 4 && {cards}.every(card => card.textContent.length > {ENOUGH})")
    picture(chat.page, "nbest")
    chat.page.keyboard.press("Escape")
    chat.wait_end(0)
    deltas = [frame["output_index"] for frame in chat.received if frame["type"] == "response.output_text.delta"]
    assert set(deltas) == {0, 1, 2, 3}
    assert deltas.index(3) < len(deltas) - 1 - deltas[::-1].index(0), "candidate 3 began only after candidate 0 ended"
    texts = chat.page.locator(".card .prose").all_inner_texts()
    assert all(texts) and len(set(texts)) > 1

    chat.page.keyboard.press("Alt+3")
    assert chat.answers() == [texts[2]]
    assert chat.page.locator(".answer .version-position").inner_text() == "3/4"
    for _ in range(3):
        chat.page.click("[aria-label='Fewer answers']")
    chat.say("Thank you")
    chat.until("document.querySelectorAll('.answer .prose')[1]?.textContent.length > 20")
    chat.page.keyboard.press("Escape")
    chat.wait_end(1)
    picked = next(frame["item"]["id"] for frame in chat.received if _is_item(frame, 2))
    items = chat.page.evaluate(
        "fetch(`v1/conversations/${location.hash.slice(1)}/items?branches=all`).then(reply => reply.json())"
    )
    thanks = next(item for item in items["data"] if item["content"][0]["text"] == "Thank you")
    assert thanks["parent_id"] == picked

    chat.reload()
    chat.page.wait_for_selector(".answer >> nth=1")
    assert chat.answers()[0] == texts[2]


def test_click_picks_a_candidate_and_compare_shows_all_again(chat: RecordedPage) -> None:
    chat.page.click(".starter >> text=Four stories")
    chat.wait_end(0)
    texts = chat.page.locator(".card .prose").all_inner_texts()
    chat.page.click(".card-pick >> nth=1")
    assert chat.answers() == [texts[1]]
    chat.page.click("text=Compare 4")
    assert chat.page.locator(".card .prose").all_inner_texts() == texts
    assert "card-current" in (chat.page.locator(".card >> nth=1").get_attribute("class") or "")


def test_beam_search_shows_its_best_beams(chat: RecordedPage) -> None:
    chat.page.click("[aria-label=Settings]")
    chat.page.click("button:text('Beam search')")
    chat.ask("What is the capital of France?")
    assert chat.page.locator(".card").count() == 2
    assert "2 beams" in chat.page.locator(".candidates-title").inner_text()
    assert all(chat.page.locator(".card .prose").all_inner_texts())


def _is_item(frame: dict[str, Any], index: int) -> bool:
    return bool(frame["type"] == "response.output_item.added" and frame["output_index"] == index)
