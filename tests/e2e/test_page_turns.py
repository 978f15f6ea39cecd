"""Test turns on the page: stream, cache, stop, regenerate, edit, reload."""

from __future__ import annotations

import re

import pytest

from tests.e2e.recorded_page import RecordedPage, stores_active_leaf
from tests.e2e.rest_client import call

PAGE_TOKENS = 16

FULL = "This chat is full. Start a new chat, or edit an earlier message."


def test_second_turn_hits_the_cache_and_a_reload_keeps_both(chat: RecordedPage) -> None:
    first = chat.ask("My name is Ada.")["usage"]
    second = chat.ask("What is my name?")["usage"]
    history = first["input_tokens"] + first["output_tokens"]
    assert second["input_tokens_details"]["cached_tokens"] > history - PAGE_TOKENS
    assert chat.figure("cached") == second["input_tokens_details"]["cached_tokens"]
    assert chat.figure("cached") + chat.figure("computed") == second["input_tokens"]
    meter = chat.page.locator(".meter-text").inner_text()
    assert meter.split(" / ")[0] == str(second["input_tokens"] + second["output_tokens"])
    said, answers = chat.said(), chat.answers()
    shown = chat.page.locator(".stats").last.inner_text()
    assert said == ["My name is Ada.", "What is my name?"]
    assert len(answers) == 2 and all(answers)
    assert chat.page.locator(".conversation-row-current .conversation-title").inner_text() != ""

    chat.reload()
    chat.page.wait_for_selector(".answer >> nth=1")
    assert (chat.said(), chat.answers()) == (said, answers)
    assert chat.figure("cached") == second["input_tokens_details"]["cached_tokens"]
    again = chat.page.locator(".stats").last.inner_text()
    assert _words(again) == _words(shown), "time to first token, speed and the reason of a miss are kept"


@pytest.mark.slow
def test_refused_message_returns_to_the_message_box_and_survives_a_reload(chat: RecordedPage) -> None:
    text = ("word " * 9000).strip()  # more than the context
    chat.say(text)
    notice = chat.page.locator(".full-notice")
    notice.wait_for()
    assert notice.get_attribute("role") == "alert"
    assert "9009 tokens; this model's maximum context length is 2048 tokens. Your message" in notice.inner_text()
    assert notice.inner_text().endswith("Your message is in the message box again.")
    for reloaded in (False, True):
        if reloaded:
            chat.reload()
        chat.page.wait_for_selector(".empty-state")
        assert (chat.page.input_value("#composer"), chat.said()) == (text, [])
    chat.ask("Hello")
    assert chat.said() == ["Hello"] and notice.count() == 0
    chat.reload()
    chat.page.wait_for_selector(".answer")
    assert chat.page.input_value("#composer") == ""


SEND_AND_WRITE = """text => {
  document.querySelector('[aria-label=Send]').click();
  const box = document.querySelector('#composer');
  box.value = text;
  box.dispatchEvent(new InputEvent('input', {bubbles: true}));
}"""


@pytest.mark.slow
def test_failed_turn_is_no_version_of_the_next_message(chat: RecordedPage) -> None:
    chat.page.fill("#composer", "word " * 9000)  # more than the context
    chat.page.wait_for_selector("button[aria-label=Send]:enabled")
    chat.page.evaluate(SEND_AND_WRITE, "Hello")  # so that the refused message does not return to the message box
    refusal = chat.page.locator(".ending-error")
    assert "9009 tokens; this model's maximum context length is 2048 tokens" in refusal.locator("span").inner_text()
    assert refusal.locator("button").all_inner_texts() == ["Edit"], "the same message would be refused again"
    refusal.locator("button").click()
    assert chat.page.input_value("[aria-label='Edit message']") == ("word " * 9000).strip()
    chat.page.keyboard.press("Escape")
    chat.until("document.activeElement.id === 'composer'")  # not lost with the editor
    chat.ask("Hello")
    conversation = chat.page.evaluate("location.hash.slice(1)")
    call(chat.server, "POST", f"/v1/conversations/{conversation}", {"title": "Renamed elsewhere"})
    chat.page.wait_for_selector("h1:text('Renamed elsewhere')")
    chat.page.wait_for_timeout(500)  # the messages are read again
    assert chat.page.locator(".version-position").count() == 0
    assert [text.split()[0] for text in chat.said()] == ["word", "Hello"]
    assert refusal.count() == 1
    chat.reload()
    chat.page.wait_for_selector(".answer")
    assert chat.said() == ["Hello"] and chat.page.locator(".version-position").count() == 0


@pytest.mark.slow
def test_full_chat_after_a_reload_says_why_nothing_is_sent_and_what_works(chat: RecordedPage) -> None:
    page = chat.page
    whole = {"maxTokens": 60, "ignoreEos": True, "seed": 7}  # more than the context has left
    page.evaluate("value => { localStorage['chatcache.sampling'] = JSON.stringify(value); }", whole)
    chat.reload()
    assert chat.ask("word " * 2000)["status"] == "incomplete"
    for reloaded in (False, True):
        if reloaded:
            chat.reload()
        page.wait_for_selector(f".full-notice >> text={FULL}")
        page.fill("#composer", "More")
        send = page.locator("[aria-label=Send]")
        assert send.is_disabled() and send.get_attribute("title") == FULL
        page.press("#composer", "Enter")
        chat.until(f"document.querySelector('#status').textContent === '{FULL}'")
        assert page.locator(".ending button").count() == 0, "Continue cannot work"
    sent = len(chat.sent)
    page.fill("#composer", "")
    page.keyboard.press("ArrowUp")
    page.fill("[aria-label='Edit message']", "Hello")
    page.keyboard.press("Enter")
    chat.wait_end(1)
    assert [frame["type"] for frame in chat.sent[sent:]].count("response.create") == 1, (
        "the refused message was not sent"
    )
    assert chat.said() == ["Hello"] and page.locator(".full-notice").count() == 0
    page.click("[aria-label='Previous version']")
    page.fill("#composer", "Hello again")
    page.click(".full-notice button:text('New chat')")
    page.wait_for_selector(".empty-state")
    assert page.input_value("#composer") == "Hello again"
    page.click("[aria-label=Send]")
    chat.wait_end(2)


@pytest.mark.slow
def test_text_streams_in_pieces_and_is_shown_exactly(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    chat.say("Tell me a story about a fox")
    chat.until("document.querySelector('.answer .prose')?.textContent.length > 100")
    chat.page.keyboard.press("Escape")
    chat.wait_end(0)
    deltas = [frame["delta"] for frame in chat.received if frame["type"] == "response.output_text.delta"]
    done = next(frame["text"] for frame in chat.received if frame["type"] == "response.output_text.done")
    assert len(deltas) > 1
    assert "".join(deltas) == done
    assert _squeeze(chat.answers()[0]) == _squeeze(done)


@pytest.mark.slow
def test_escape_stops_and_keeps_the_text(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    chat.say("Tell me a story about a wizard")
    chat.until("document.querySelector('.answer .prose')?.textContent.length > 20")
    chat.page.keyboard.press("Escape")
    ended = chat.wait_end(0)
    assert ended["status"] == "cancelled"
    assert chat.page.locator(".answer[data-status=stopped]").count() == 1
    text = chat.answers()[0]
    assert len(text) > 20
    chat.reload()
    chat.page.wait_for_selector(".answer[data-status=stopped]")
    assert chat.answers()[0] == text
    assert chat.page.locator("[data-stat=receipt]").count() == 1


@pytest.mark.slow
def test_regenerate_adds_a_version_and_a_reload_keeps_the_shown_one(chat: RecordedPage) -> None:
    chat.ask("Tell me a story about a cat")
    first = chat.answers()[0]
    chat.page.click(".tool-regenerate")
    chat.wait_end(1)
    place = chat.page.locator(".answer .version-position")
    assert place.inner_text() == "2/2"
    with chat.page.expect_response(stores_active_leaf):
        chat.page.click("[aria-label='Previous version']")
    assert place.inner_text() == "1/2"
    assert chat.answers() == [first]
    chat.reload()
    chat.page.wait_for_selector(".answer .version-position")
    assert place.inner_text() == "1/2"
    assert chat.answers() == [first]


@pytest.mark.slow
def test_edit_adds_a_branch_and_both_branches_stay(chat: RecordedPage) -> None:
    chat.ask("What is 2 + 3?")
    before = chat.answers()
    chat.page.focus("#composer")
    chat.page.keyboard.press("ArrowUp")
    editor = chat.page.locator("[aria-label='Edit message']")
    assert editor.input_value() == "What is 2 + 3?"
    editor.fill("What is 4 + 4?")
    chat.page.keyboard.press("Enter")
    chat.wait_end(1)
    assert chat.said() == ["What is 4 + 4?"]
    assert chat.page.locator(".user-message .version-position").inner_text() == "2/2"
    chat.page.click(".user-message [aria-label='Previous version']")
    assert (chat.said(), chat.answers()) == (["What is 2 + 3?"], before)


def _words(statistics: str) -> list[str]:
    """The names of the figures, without their values."""
    return re.findall(r"[a-z/]+", statistics)


def _squeeze(text: str) -> str:
    """Letters and digits only, which markdown and line breaks do not change."""
    return "".join(re.findall(r"\w", text))
