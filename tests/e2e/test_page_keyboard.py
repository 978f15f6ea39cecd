"""Test a whole visit by keyboard: start, ask, stop, pick, switch, search, rename, delete, undo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage
from tests.e2e.rest_client import create_conversation

pytestmark = pytest.mark.slow

FOCUSED = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"


def test_all_actions_work_by_keyboard(chat: RecordedPage, endless: None) -> None:
    page = chat.page
    chat.reload()
    chat.keep_toasts()
    chat.until("document.activeElement.id === 'composer'")

    page.keyboard.type("Tell me a story about an owl")
    _reach(chat, "More answers")
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+Escape")
    page.keyboard.press("Enter")
    chat.until(
        "[...document.querySelectorAll('.card .prose')].filter(card => card.textContent.length > 20).length === 2"
    )
    page.keyboard.press("Escape")
    assert chat.wait_end(0)["status"] == "cancelled"

    page.keyboard.press("Alt+2")
    place = page.locator(".answer .version-position")
    assert place.inner_text() == "2/2"
    chat.until("document.querySelector('#status').textContent === 'Picked answer 2.'")
    page.keyboard.press("Alt+ArrowLeft")
    assert place.inner_text() == "1/2"
    _reach(chat, "Next version", back=True)
    page.keyboard.press("Enter")
    assert place.inner_text() == "2/2"

    page.keyboard.press("Alt+Shift+3")
    page.wait_for_selector("#tab-branches[aria-selected=true]")
    page.keyboard.press("Escape")
    page.wait_for_selector(".side-panel", state="detached")
    page.keyboard.press("Control+/")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")

    _reach(chat, "Menu of ", back=True)
    page.keyboard.press("Enter")
    page.wait_for_selector(".menu:popover-open")
    page.keyboard.type("r")  # Rename
    page.keyboard.press("Enter")
    chat.until(f"({FOCUSED}) === 'New title'")
    page.keyboard.press("Control+a")
    page.keyboard.type("The owl")
    page.keyboard.press("Enter")
    title = page.locator(".conversation-row >> text=The owl")
    title.wait_for()
    chat.until(f"({FOCUSED}).startsWith('The owl')")
    page.keyboard.press("Delete")
    title.wait_for(state="detached")
    _reach(chat, "Undo", back=True)
    page.keyboard.press("Enter")
    title.wait_for()

    page.keyboard.press("Control+k")
    chat.until("document.activeElement.id === 'find'")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector(".empty-state")
    _reach(chat, "Light theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_focus_is_kept_among_many_messages(chat: RecordedPage, server: str) -> None:
    """Tab moves through a mostly virtual thread; each focused element is visible on the screen."""
    made = create_conversation(server, ["Hi", "Hello there, [a link](https://example.com)."] * 60)
    chat.page.evaluate("hash => location.hash = hash", made)
    chat.page.wait_for_selector(".row")
    chat.page.focus("#composer")
    stops: list[Any] = []
    for _ in range(40):
        chat.page.keyboard.press("Shift+Tab")
        stops.append(
            chat.page.evaluate(
                """(() => {
                  const row = document.activeElement.closest('.row');
                  const at = document.activeElement.getBoundingClientRect();
                  return row && [Number(row.ariaPosInSet), at.top >= 0 && at.bottom <= innerHeight];
                })()"""
            )
        )
    rows = [stop for stop in stops if stop]
    assert len(rows) > 30
    assert all(seen for _, seen in rows)
    places = [place for place, _ in rows]
    assert places == sorted(places, reverse=True) and places[0] == 120 and places[-1] < 115

    held = chat.page.evaluate_handle("document.activeElement")
    chat.page.mouse.move(640, 300)
    for _ in range(8):
        chat.page.mouse.wheel(0, -700)
        chat.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    chat.until(f"Number(document.querySelector('.row:nth-child(3)').ariaPosInSet) < {places[-1] - 30}")
    assert held.evaluate("element => element === document.activeElement"), "removed while it had the focus"


def _reach(chat: RecordedPage, label: str, back: bool = False) -> None:
    """Press Tab until the label of the focused element starts with `label`."""
    for _ in range(150):
        chat.page.keyboard.press("Shift+Tab" if back else "Tab")
        if str(chat.page.evaluate(FOCUSED)).startswith(label):
            return
    raise AssertionError(f"Tab does not reach {label!r}")
