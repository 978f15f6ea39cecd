"""Test the saved prompts of the server: their dialog, and `/name` in the message box during an answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.recorded_page import RecordedPage
from tests.e2e.rest_client import call

pytestmark = pytest.mark.slow

# A slow machine: what the page does after the next frame, or after the 35 ms that end the wait for it, is late.
DRAW_LATE = """() => {
  const plain = window.setTimeout;
  window.setTimeout = (run, delay, ...more) => plain(run, delay === 35 ? 2000 : delay, ...more);
  window.requestAnimationFrame = run => plain(run, 2000);
}"""


@pytest.fixture(autouse=True)
def empty_library(server: str) -> Iterator[None]:
    """Delete the prompts of other tests and of this one: they share the server."""
    _clear(server)
    yield
    _clear(server)


def _clear(server: str) -> None:
    for prompt in call(server, "GET", "/v1/prompts")["data"]:
        call(server, "DELETE", f"/v1/prompts/{prompt['name']}")


def _stored(chat: RecordedPage) -> dict[str, str]:
    return {prompt["name"]: prompt["text"] for prompt in call(chat.server, "GET", "/v1/prompts")["data"]}


def _fill(chat: RecordedPage, **fields: str) -> None:
    for name, value in fields.items():
        chat.page.fill(f"dialog [name={name}]", value)
    chat.page.click("dialog button[type=submit]")


def test_saved_prompts_are_created_edited_and_deleted_on_the_server(chat: RecordedPage) -> None:
    page = chat.page
    page.keyboard.press("Control+k")
    page.wait_for_selector("[role=combobox]")
    page.keyboard.type("saved prompts")
    page.keyboard.press("Enter")
    page.click("dialog >> text=New prompt")
    _fill(chat, name="Not a name", text="Into {{language}}:")
    page.wait_for_selector("dialog [name=name]:invalid")
    _fill(chat, name="translate")
    page.wait_for_selector(".saved-prompt-list >> text=/translate")
    assert _stored(chat) == {"translate": "Into {{language}}:"}

    page.click("dialog >> text=New prompt")
    with page.expect_response(lambda reply: reply.status == 409):
        _fill(chat, name="translate", text="Another " * 40)
    assert "translate" in page.inner_text("dialog [role=alert]")
    _fill(chat, name="fix")
    page.wait_for_selector(".saved-prompt-list >> text=/fix")
    width, shown = page.evaluate("(box => [box.scrollWidth, box.clientWidth])(document.querySelector('dialog'))")
    assert width == shown, "a long text makes the dialog scroll sideways"

    page.click(".saved-prompt-list li:has-text('/fix') >> text=Edit")
    _fill(chat, name="mend", text="Mend this:")
    page.wait_for_selector(".saved-prompt-list >> text=/mend")
    assert _stored(chat) == {"mend": "Mend this:", "translate": "Into {{language}}:"}
    page.click(".saved-prompt-list li:has-text('/mend') >> text=Delete")
    page.wait_for_selector("dialog >> text=was deleted for all users")
    assert list(_stored(chat)) == ["translate"]
    page.click("dialog >> text=Undo")
    page.wait_for_selector(".saved-prompt-list >> text=/mend")
    assert _stored(chat)["mend"] == "Mend this:"
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


def test_prompt_with_variables_is_filled_by_key_during_an_answer(chat: RecordedPage, endless: None) -> None:
    text = "Tell me a story about {{animal}} and {{place}}"
    call(chat.server, "POST", "/v1/prompts", {"name": "story", "text": text})
    page = chat.page
    chat.reload()
    chat.say("Tell me a story about a dragon")
    chat.until("document.querySelector('.answer .prose')?.textContent.length > 20")
    page.keyboard.type("/st")
    page.wait_for_selector("#prompt-options [aria-selected=true]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#prompt-options", state="detached")
    page.keyboard.press("Control+a")
    page.keyboard.type("/")
    page.wait_for_selector("#prompt-options >> text=/story")
    assert page.get_attribute("#composer", "aria-activedescendant") == "prompt-option-0"
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.keyboard.type("a cat")
    page.keyboard.press("Enter")  # the second value is missing
    chat.until("document.activeElement.name === 'place'")
    page.keyboard.type("a moon")
    page.evaluate(DRAW_LATE)
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog", state="detached")
    assert page.input_value("#composer") == "Tell me a story about a cat and a moon"
    assert page.evaluate("document.activeElement.id") == "composer"
    assert page.get_attribute(".answer", "data-status") == "streaming" and len(chat.said()) == 1
    page.keyboard.press("Escape")
    chat.wait_end(0)
