"""Test an answer next to one to the same message with other settings, which the conversation does not keep."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage

pytestmark = pytest.mark.slow


def _creates(chat: RecordedPage) -> list[dict[str, Any]]:
    return [frame for frame in chat.sent if frame["type"] == "response.create"]


def _open_form(chat: RecordedPage) -> None:
    chat.page.click("[aria-label='Actions for the answer']")
    chat.page.click(".menu:popover-open >> text=Compare settings…")
    chat.page.wait_for_selector("form[aria-label='Compare settings']")


def _settings(chat: RecordedPage) -> list[list[str]]:
    cards = chat.page.locator(".compared-answers .card")
    return [cards.nth(place).locator(".card-settings li").all_inner_texts() for place in range(cards.count())]


def test_answer_with_other_settings_is_shown_next_to_the_first(chat: RecordedPage) -> None:
    page = chat.page
    chat.ask("Tell me a story about a dragon")
    first = chat.answers()[0]
    conversation = page.evaluate("location.hash.slice(1)")
    head = page.request.get(f"{chat.server}/v1/conversations/{conversation}").json()
    _open_form(chat)
    page.keyboard.type("Talk like a pirate.")  # the form has the focus
    form = page.locator("form[aria-label='Compare settings']")
    form.locator("input[type=range]").fill("1.5")
    form.locator("button:text('Generate')").click()
    second = chat.wait_end(1)
    sent = _creates(chat)[-1]
    assert (sent["instructions"], sent["temperature"], sent["input"]) == ("Talk like a pirate.", 1.5, [])
    page.wait_for_selector(".compared-answers .card >> nth=1")
    assert _settings(chat) == [
        ["No system prompt", "Temperature 0.8"],
        ["System prompt: Talk like a pirate.", "Temperature 1.5"],
    ]
    page.wait_for_selector(".compared-answers .differences >> nth=1")
    page.click(".compared-answers button:text('Differences')")
    texts = page.locator(".compared-answers .prose").all_inner_texts()
    assert texts[0] == first and second["output"][0]["content"][0]["text"].strip().startswith(texts[1][:10])

    chat.page.keyboard.press("Alt+1")
    page.wait_for_selector(".answer")
    assert chat.answers() == [first]
    assert page.locator(".answer .version-position").inner_text() == "1/2"
    kept = page.request.get(f"{chat.server}/v1/conversations/{conversation}").json()
    assert kept["metadata"] == head["metadata"], "the settings of the second answer are not the conversation's"
    chat.ask("Thank you")
    sent = _creates(chat)[-1]
    assert sent["temperature"] == 0.8 and "instructions" not in sent


def test_versions_are_compared_with_their_stored_settings_after_a_reload(chat: RecordedPage) -> None:
    page = chat.page
    chat.ask("Which way?")
    _open_form(chat)
    page.get_by_label("JSON schema of answers").fill('{"enum": ["left"]}')
    page.locator("form[aria-label='Compare settings'] button:text('Generate')").click()
    chat.wait_end(1)
    page.wait_for_selector(".compared-answers [data-schema=matches]")
    chat.reload()
    page.wait_for_selector(".answer")
    assert page.locator(".compared-answers").count() == 0
    page.click("[aria-label='Actions for the answer']")
    page.click(".menu:popover-open >> text=Compare with version")
    page.wait_for_selector(".card-settings li >> nth=1")
    assert _settings(chat) == [["No schema"], ['Schema {"enum":["left"]}']]
    page.click("button:text('Show one')")
    page.wait_for_selector(".answer")


def test_comparison_is_started_by_key_and_from_the_palette(chat: RecordedPage) -> None:
    page = chat.page
    form = "form[aria-label='Compare settings']"
    page.keyboard.press("Alt+c")  # no answer yet
    chat.ask("Which way?")
    assert page.locator(form).count() == 0
    page.keyboard.press("Alt+c")
    page.wait_for_selector(form)
    page.keyboard.press("Escape")
    page.wait_for_selector(form, state="detached")
    page.keyboard.press("Control+k")
    page.wait_for_selector("[role=combobox]")
    page.keyboard.type("compare settings")
    page.keyboard.press("Enter")
    page.wait_for_selector(form)
    page.keyboard.type("Be brief.")  # the form has the focus
    assert page.get_by_label("System prompt", exact=True).last.input_value() == "Be brief."
    page.keyboard.press("Escape")
    page.keyboard.press("Control+/")
    page.wait_for_selector("dialog >> text=Compare settings of the last answer…")


def test_running_comparison_is_stopped_and_its_form_is_left_by_key(chat: RecordedPage, endless: None) -> None:
    page = chat.page
    chat.reload()
    chat.say("Tell me a story about a dragon")
    chat.until("document.querySelector('.answer .prose')?.textContent.length > 20")
    page.keyboard.press("Escape")
    chat.wait_end(0)
    _open_form(chat)
    page.keyboard.press("Escape")
    page.wait_for_selector("form[aria-label='Compare settings']", state="detached")
    assert page.evaluate("document.activeElement.id") == "composer"
    _open_form(chat)
    page.keyboard.type("Be brief.")
    page.locator("form[aria-label='Compare settings'] button:text('Generate')").click()
    cards = "[...document.querySelectorAll('.compared-answers .card')]"
    chat.until(f"{cards}[1]?.querySelector('.prose')?.textContent.length > 20")
    assert page.locator(".compared-answers .card").nth(1).get_attribute("data-status") == "streaming"
    assert _settings(chat) == [["No system prompt"], ["System prompt: Be brief."]]
    assert page.locator(".compared-answers .differences").count() == 0, "not while a text grows"
    page.keyboard.press("Escape")
    chat.wait_end(1)
    page.wait_for_selector(".compared-answers .differences >> nth=1")
