"""Test writing while an answer is written: steer with Enter, queue with Alt+Enter."""

from __future__ import annotations

import pytest

from tests.e2e.recorded_page import RecordedPage

pytestmark = pytest.mark.slow

WRITTEN = "(document.querySelector('.answer .prose')?.textContent.length ?? 0)"


def test_message_sent_during_an_answer_stops_it_and_keeps_its_tokens(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    chat.say("Tell me a story about a dragon")
    chat.until(f"{WRITTEN} > 60")
    chat.page.fill("#composer", "Now about a cat")
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".answer >> nth=1")
    chat.until("document.querySelectorAll('.answer .prose')[1]?.textContent.length > 20")
    assert chat.said() == ["Tell me a story about a dragon", "Now about a cat"]
    steered = chat.page.locator(".ending", has_text="Stopped by your next message")
    assert steered.count() == 1
    chat.page.keyboard.press("Escape")
    chat.wait_end(1)
    first, second = chat.ends()
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    used = first["usage"]
    assert cached >= used["input_tokens"] + used["output_tokens"] - 1, "pages of the stopped answer are reused"
    chat.reload()
    steered.wait_for()
    assert chat.page.locator(".ending").all_inner_texts()[1].startswith("Stopped."), "the second one was not steered"


def test_queued_messages_are_in_the_message_box_after_a_reload(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    chat.say("Tell me a story about an owl")
    chat.until(f"{WRITTEN} > 20")
    for text in ("the second", "the third"):
        chat.page.fill("#composer", text)
        chat.page.keyboard.press("Alt+Enter")
    chat.page.fill("#composer", "the fourth")
    chat.reload()
    chat.page.wait_for_selector("[aria-label=Stop]")  # the answer continues
    assert chat.page.input_value("#composer") == "the second\n\nthe third\n\nthe fourth"
    assert chat.page.locator(".queued-text").count() == 0
    chat.page.keyboard.press("Escape")
    chat.wait_end(0)
    chat.page.wait_for_timeout(300)  # time to send a message that was not asked for
    assert [frame["type"] for frame in chat.sent].count("response.create") == 1


def test_queued_messages_follow_and_can_be_taken_back(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    chat.say("Tell me a story about an owl")
    chat.until(f"{WRITTEN} > 20")
    for text in ("the second", "the third"):
        chat.page.fill("#composer", text)
        chat.page.keyboard.press("Alt+Enter")
    chips = chat.page.locator(".queued-text")
    assert chips.all_inner_texts() == ["the second", "the third"]
    chat.page.locator("[aria-label='Remove from the queue']").last.click()
    assert chat.page.locator("#composer").input_value() == "the third"
    chat.page.fill("#composer", "")
    chat.page.keyboard.press("Escape")
    chat.wait_end(0)
    assert chips.all_inner_texts() == ["the second"], "a stop does not send what waits"
    chat.page.click("text=Send the first")
    chat.page.wait_for_selector(".answer >> nth=1")
    assert chat.said()[-1] == "the second"
    chat.page.keyboard.press("Escape")
    chat.wait_end(1)
