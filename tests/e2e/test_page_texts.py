"""Test texts on the page: drafts, keys in texts, right-to-left, folding, selecting, paper."""

from __future__ import annotations

import re

import pytest

from tests.e2e.recorded_page import RecordedPage
from tests.e2e.rest_client import create_conversation

pytestmark = pytest.mark.slow


CODE = (
    ("swift", "let x = 1"),
    ("kotlin", "val x = 1"),
    ("php", "$x = 1;"),
    ("ruby", "def x = 1"),
    ("lua", "local x = 1"),
    ("dockerfile", "FROM scratch"),
)


def show(chat: RecordedPage, *texts: str) -> str:
    """Create and open a conversation; return its id."""
    made = create_conversation(chat.server, texts)
    chat.page.evaluate("hash => location.hash = hash", made)
    chat.page.wait_for_selector(".user-text")
    return made


def test_alt_keys_in_a_written_text_do_not_leave_it(chat: RecordedPage) -> None:
    show(chat, "One")
    chat.ask("Two")
    chat.page.click(".tool-regenerate")
    chat.wait_end(1)
    address = chat.page.url
    chat.page.focus("#composer")
    chat.page.keyboard.type("some words")
    for keys in ("Alt+ArrowUp", "Alt+ArrowDown", "Alt+ArrowLeft", "Alt+b"):
        chat.page.keyboard.press(keys)
    assert chat.page.url == address
    assert chat.page.locator(".answer .version-position").inner_text() == "2/2"
    assert chat.page.locator(".tool-tokens[aria-pressed=true]").count() == 0
    chat.page.fill("#composer", "")
    chat.page.keyboard.press("Alt+ArrowLeft")
    assert chat.page.locator(".answer .version-position").inner_text() == "1/2"


def test_draft_stays_with_its_conversation_and_survives_a_reload(chat: RecordedPage) -> None:
    first = show(chat, "The first")
    chat.page.fill("#composer", "to the first")
    show(chat, "The second")
    chat.until("document.querySelector('#composer').value === ''")
    chat.page.fill("#composer", "to the second")
    chat.reload()
    chat.until("document.querySelector('#composer').value === 'to the second'")
    chat.page.evaluate("hash => location.hash = hash", first)
    chat.until("document.querySelector('#composer').value === 'to the first'")


def test_right_to_left_text_has_its_direction(chat: RecordedPage) -> None:
    arabic = "مرحبا، كيف حالك؟"
    show(chat, arabic, f"{arabic}\n\nPlain English.\n\n- {arabic}")
    chat.page.wait_for_selector(".answer .prose p")
    directions = chat.page.evaluate(
        "[...document.querySelectorAll('.user-text, .prose p, .prose ul')].map(e => getComputedStyle(e).direction)"
    )
    assert directions == ["rtl", "rtl", "ltr", "rtl"]
    chat.page.fill("#composer", arabic)
    assert chat.page.evaluate("getComputedStyle(document.querySelector('#composer')).direction") == "rtl"


def test_long_message_is_folded(chat: RecordedPage) -> None:
    text = "\n".join(f"line {number}" for number in range(400))
    show(chat, text)
    message = chat.page.locator(".user-text")
    assert message.bounding_box()["height"] < 900 and "line 399" not in message.inner_text()
    chat.page.click("text=Show all")
    assert "line 399" in message.inner_text()
    chat.page.click("text=Show less")
    assert "line 399" not in message.inner_text()


def test_double_click_selects_a_word_and_opens_no_alternatives(chat: RecordedPage) -> None:
    chat.ask("Tell me a story about a fox")
    word = chat.page.locator(".answer .prose p").first
    word.dblclick(position={"x": 30, "y": 12})
    assert chat.page.evaluate("getSelection().toString().trim()") != ""
    chat.page.wait_for_timeout(600)
    assert chat.page.locator(".choice").count() == 0
    chat.page.evaluate("getSelection().removeAllRanges()")
    word.click(position={"x": 30, "y": 12})
    chat.page.wait_for_selector(".choice")


SLOW_DRAWING = """
const now = performance.now.bind(performance);
let calls = 0;
performance.now = () => now() + 10 * ++calls; // every drawing takes 10 ms more
window.pauses = [];
const plain = window.setTimeout;
window.setTimeout = (run, delay, ...more) => {
  if (!Number.isInteger(delay ?? 0)) pauses.push(delay); // of the drawings: all others have whole numbers
  return plain(run, delay, ...more);
};
"""


def test_slow_drawings_are_followed_by_short_pauses(chat: RecordedPage) -> None:
    chat.page.add_init_script(SLOW_DRAWING)
    chat.reload()
    chat.ask("Tell me a story about a fox")
    assert [pause for pause in chat.page.evaluate("pauses") if pause > 28] == []


def test_footnotes_and_languages_are_drawn(chat: RecordedPage) -> None:
    show(
        chat,
        "Show me",
        "One[^a].\n\n[^a]: The *note*\n\n" + "\n\n".join(f"```{name}\n{code}\n```" for name, code in CODE),
    )
    chat.page.wait_for_selector(".footnotes em:text('note')")
    assert "[^a]" not in chat.page.inner_text(".answer")
    chat.page.wait_for_selector(f".code >> nth={len(CODE) - 1} >> span[class^=hljs]")
    for number, (name, _) in enumerate(CODE):
        assert chat.page.locator(".code").nth(number).locator("span[class^=hljs]").count(), name


def test_printing_a_long_conversation_prints_all_of_it(chat: RecordedPage) -> None:
    texts = [f"message {number} " + "word " * 60 for number in range(120)]
    show(chat, *texts)
    paper = chat.page.pdf()
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) >= 12
    chat.page.emulate_media(media="print")
    assert not chat.page.locator("#composer").is_visible()
