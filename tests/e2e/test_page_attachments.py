"""Test files in messages: chosen, dropped and pasted; their cost, the cache, cards after a reload, narrow screens."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page_checks import find_beyond
from tests.e2e.recorded_page import RecordedPage
from tests.support.pdfs import pdf_of

pytestmark = pytest.mark.slow

NOTES = "\n".join(f"{number}. The dragon of hill {number} sleeps until noon." for number in range(1, 25))
PASTE = """text => {
  const data = new DataTransfer();
  data.setData('text/plain', text);
  const event = new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true});
  return document.querySelector('#composer').dispatchEvent(event);
}"""


def choose(chat: RecordedPage, *files: Path) -> None:
    """Attach files with the button, and wait until they are read."""
    with chat.page.expect_file_chooser() as chooser:
        chat.page.click("[aria-label='Attach files']")
    chooser.value.set_files(list(files))
    wait_for_chips(chat, len(files))


def wait_for_chips(chat: RecordedPage, count: int) -> None:
    chat.until(f"document.querySelectorAll('.attachment-ready, .attachment-failed').length === {count}")


def chips(chat: RecordedPage) -> list[str]:
    texts: list[str] = chat.page.locator(".attachment").all_inner_texts()
    return [" ".join(text.split()) for text in texts]


def tokens_of(chat: RecordedPage) -> int:
    return int(chat.page.locator(".attachment-cost b").first.get_attribute("data-tokens"))


def test_file_in_a_second_chat_is_served_from_the_cache(chat: RecordedPage, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    text = f"{secrets.token_hex(8)}\n{NOTES}"  # no other run has computed it
    notes.write_text(text)
    choose(chat, notes)
    num_tokens = tokens_of(chat)
    assert num_tokens > 200 and chips(chat)[0].startswith("notes.txt") and "in the cache" not in chips(chat)[0]
    chat.ask("Which dragon sleeps?")
    assert chat.said() == ["Which dragon sleeps?"] and chat.page.locator(".attachment").count() == 0
    card = chat.page.locator(".file-card")
    assert "notes.txt" in card.inner_text() and "from the cache" not in card.inner_text()

    chat.page.keyboard.press("Control+Shift+O")
    chat.page.wait_for_selector(".empty-state")
    choose(chat, notes)
    assert tokens_of(chat) == num_tokens and "in the cache" in chips(chat)[0]
    response = chat.ask("Who wakes it?")
    assert "from the cache" in card.inner_text()
    assert response["usage"]["input_tokens_details"]["cached_tokens"] >= num_tokens * 3 // 4
    assert chat.figure("cached") == response["usage"]["input_tokens_details"]["cached_tokens"]

    chat.reload()
    chat.page.wait_for_selector(".file-card")
    assert chat.said() == ["Who wakes it?"] and text[:40] not in chat.page.locator(".user-message").inner_text()
    card.locator("summary").press("Enter")
    assert card.locator("pre").inner_text() == text
    chat.page.focus("#composer")
    chat.page.keyboard.press("ArrowUp")
    assert chat.page.locator("[aria-label='Edit message']").input_value() == "Who wakes it?"
    chat.page.keyboard.press("Escape")


def test_dropped_and_pasted_files_are_attached_and_removed_by_key(chat: RecordedPage) -> None:
    files = [("notes.txt", b"Buy milk."), ("report.pdf", pdf_of(["First", "Second"])), ("photo.png", b"\x89PNG\0")]
    chat.expected_errors += 1  # the refused picture
    address = chat.page.url
    assert chat.drop(".thread", files) == [False, "attach", False], "the browser does not open the files"
    wait_for_chips(chat, 3)
    assert chat.page.url == address and chat.page.locator(".toast").count() == 0
    notes, report, photo = chips(chat)
    assert notes.startswith("notes.txt 9 bytes, ") and notes.endswith(" tokens")
    assert report.startswith("report.pdf 2 pages, ")
    assert photo.endswith("photo.png is a binary file; only text files and PDFs are read")
    assert "photo.png is a binary file" in chat.page.locator("#status").inner_text()

    chat.page.focus("[aria-label='Remove photo.png']")
    chat.page.keyboard.press("Enter")
    assert chat.page.evaluate("document.activeElement.ariaLabel") == "Remove report.pdf"
    chat.page.keyboard.press("Enter")
    chat.page.keyboard.press("Enter")
    assert chat.page.evaluate("document.activeElement.id") == "composer" and chips(chat) == []

    text = "word " * 1200
    assert chat.page.evaluate(PASTE, "short") is True, "a short paste is left to the browser"
    assert chat.page.evaluate(PASTE, text) is False
    wait_for_chips(chat, 1)
    assert chips(chat)[0].startswith("Pasted text.txt") and chat.page.locator("#composer").input_value() == ""
    chat.page.click("text=Insert as text")
    assert chips(chat) == [] and chat.page.locator("#composer").input_value() == text
    chat.page.fill("#composer", "")


def test_files_fit_a_narrow_screen_in_any_direction_and_theme(open_page: Any) -> None:
    chat = open_page(viewport={"width": 320, "height": 640}, color_scheme="dark")
    name = "ملاحظات طويلة جدا عن التنين الذي ينام حتى الظهر.txt"
    chat.expected_errors += 1  # the refused picture
    chat.drop(".thread", [(name, "ينام التنين.".encode()), ("a-very-long-name-of-a-picture" * 4 + ".png", b"\0")])
    wait_for_chips(chat, 2)
    assert find_beyond(chat.page) == []
    first = chat.page.locator(".attachment-name").first
    assert first.evaluate("element => getComputedStyle(element).direction") == "rtl"
    chat.ask("متى؟")
    chat.page.click(".file-card summary")
    chat.page.wait_for_selector(".file-card pre")
    assert find_beyond(chat.page) == []


def test_cached_files_of_a_message_wrap_on_a_phone(open_page: Any) -> None:
    chat = open_page(viewport={"width": 360, "height": 740})
    files = [("notes-of-the-meeting-of-last-monday.txt", NOTES.encode()), ("names.txt", b"dragon " * 40)]
    for _ in range(2):  # in the second chat from the cache
        chat.page.keyboard.press("Control+Shift+O")
        chat.page.wait_for_selector(".empty-state")
        chat.drop(".thread", files)
        wait_for_chips(chat, 2)
        chat.ask("Which dragon sleeps?")
    assert "from the cache" in chat.page.locator(".file-card").first.inner_text()
    assert find_beyond(chat.page) == []


def test_file_that_is_too_long_for_the_model_is_not_sent(chat: RecordedPage) -> None:
    chat.drop(".thread", [("long.txt", b"dragon " * 4000)])
    wait_for_chips(chat, 1)
    warning = chat.page.locator(".attachment-warning")
    assert "Too long for the model: the files have" in warning.inner_text()
    chat.page.fill("#composer", "What does it say?")
    chat.page.press("#composer", "Enter")
    send = chat.page.locator("button.send")
    assert send.is_disabled() and chat.said() == [] and chat.page.input_value("#composer") == "What does it say?"
    chat.page.click("[aria-label='Remove long.txt']")
    assert warning.count() == 0 and send.is_enabled()
