"""Test settings per conversation, named system prompts, defaults of new chats and the list of shortcuts."""

from __future__ import annotations

import re
import secrets
from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage

pytestmark = pytest.mark.slow

KEPT = re.compile("/v1/conversations/conv_")
LONG = "Always answer with a rhyme. 🎵" * 40  # over the 512 characters of one metadata value, and over 1,000


def sent(chat: RecordedPage, frames: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last `response.create` that the page sent."""
    return [frame for frame in frames if frame["type"] == "response.create"][-1]


def record(chat: RecordedPage) -> list[dict[str, Any]]:
    """Record the frames that the page sends after its next load."""
    import json

    frames: list[dict[str, Any]] = []
    chat.page.on("websocket", lambda socket: socket.on("framesent", lambda text: frames.append(json.loads(text))))
    chat.reload()
    return frames


def slide(chat: RecordedPage, label: str, value: str) -> None:
    chat.page.locator(f".slider:has-text('{label}') input").fill(value)


def test_settings_belong_to_their_conversation(chat: RecordedPage) -> None:
    frames = record(chat)
    chat.page.keyboard.press("Control+,")
    slide(chat, "Temperature", "0.35")
    chat.page.fill("#system", "Be brief.")
    chat.ask("Hello")
    first = chat.page.evaluate("location.hash.slice(1)")
    assert sent(chat, frames)["temperature"] == 0.35 and sent(chat, frames)["instructions"] == "Be brief."
    chat.page.keyboard.press("Control+Shift+O")
    chat.page.wait_for_selector(".empty-state")
    assert chat.page.input_value("#system") == ""
    chat.page.click("button:text('Beam search')")
    chat.ask("Hello")
    assert sent(chat, frames)["beam_width"] == 2 and "instructions" not in sent(chat, frames)
    with chat.page.expect_response(KEPT):
        slide(chat, "Beams", "3")  # changed after the first turn, stored too
    for _ in range(2):
        chat.page.click(f"[data-id={first}] .conversation-open")
        chat.page.wait_for_selector("[aria-label='System prompt'] >> nth=0")
        chat.until("document.querySelector('#system')?.value === 'Be brief.'")
        assert chat.page.locator(".slider:has-text('Temperature') output").inner_text() == "0.35"
        chat.page.go_back()
        chat.until("document.querySelector('.slider output')?.textContent === '3'")
        chat.reload()  # the second round reads from the server
        chat.page.wait_for_selector(".card, .answer")
        chat.page.keyboard.press("Control+,")
    metadata = chat.page.request.get(f"{chat.server}/v1/conversations/{first}").json()["metadata"]
    assert metadata["system"] == "Be brief."
    head = chat.page.request.get(f"{chat.server}/v1/conversations/{first}").json()
    chat.page.click(f"[data-id={first}] .conversation-open")
    chat.until("document.querySelector('#system')?.value === 'Be brief.'")
    assert chat.page.request.get(f"{chat.server}/v1/conversations/{first}").json()["rev"] == head["rev"], (
        "opening a conversation must not change it"
    )


def test_further_parameters_are_sent_stored_and_checked(chat: RecordedPage) -> None:
    frames = record(chat)
    chat.page.keyboard.press("Control+,")
    chat.page.click("text=More parameters")
    for wrong in ("many", "0", "1001", "-1", "1.5"):
        chat.page.get_by_label("Top-k").fill(wrong)
        chat.page.get_by_label("Top-k").press("Tab")
        chat.page.wait_for_selector("text=Top-k is a whole number from 1 to 1,000, or empty.")
    chat.page.get_by_label("Top-k").fill("40")
    chat.page.get_by_label("Top-k").press("Tab")
    chat.page.wait_for_selector("text=Top-k is a whole number", state="detached")
    for label, value in (("Min-p", "0.05"), ("Presence", "0.5"), ("Frequency", "-0.5"), ("Repetition", "1.1")):
        slide(chat, label, value)
    chat.page.get_by_label("Texts that end an answer").fill("END\n\nSTOP\nEND")
    chat.ask("Hello")
    expected = {
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "stop": ["END", "STOP"],
    }
    assert {name: sent(chat, frames).get(name) for name in expected} == expected
    chat.reload()
    chat.page.wait_for_selector(".answer")
    chat.ask("And now?")
    assert {name: sent(chat, frames).get(name) for name in expected} == expected
    chat.page.keyboard.press("Control+,")
    chat.page.click("text=More parameters")
    chat.page.get_by_label("Texts that end an answer").fill("\n".join(f"stop {at}" for at in range(17)))
    chat.page.wait_for_selector("text=Only the first 16 of these texts are used.")


def test_fields_of_more_parameters_are_as_far_apart_as_the_others(chat: RecordedPage) -> None:
    page = chat.page
    page.keyboard.press("Control+,")
    page.click("text=More parameters")
    page.click("text=Rare parameters")
    gaps = page.evaluate(
        """[...document.querySelectorAll('aside .field, aside .more-settings > .check')].map(field => {
          const next = field.nextElementSibling;
          return next && Math.round(next.getBoundingClientRect().top - field.getBoundingClientRect().bottom);
        }).filter(gap => gap !== null)"""
    )
    assert len(gaps) > 15 and set(gaps) == {20}


def test_rare_parameters_are_checked_sent_and_stored(chat: RecordedPage) -> None:
    """The bias alone decides the answer: of the two tokens that are allowed, one is ruled out."""
    frames = record(chat)
    chat.page.keyboard.press("Control+,")
    chat.page.click("text=Rare parameters")
    token, bias = chat.page.get_by_label("Token", exact=True), chat.page.get_by_label("Bias", exact=True)
    for wrong in ("", "101", "-100.5", "much"):
        token.fill("x")
        bias.fill(wrong)
        bias.press("Enter")
        chat.page.wait_for_selector("text=A bias is a number from -100 to 100.")
    chat.expected_errors += 1  # a browser logs the refused request
    token.fill("#99999999")
    bias.fill("5")
    bias.press("Enter")
    chat.page.wait_for_selector("text=token ids must be between 0 and")
    chosen = _token(chat, "x")
    other = _token(chat, "q")
    token.fill(f"#{other}")
    bias.fill("-100")
    bias.press("Enter")
    chat.page.wait_for_selector(".token-biases >> text=-100")
    token.fill("q")  # the same token: its bias is replaced
    bias.fill("-99.5")
    bias.press("Enter")
    chat.page.wait_for_selector(".token-biases >> text=-99.5")
    assert chat.page.locator(".token-biases code").all_inner_texts() == ['"q"']

    allowed = chat.page.get_by_label("Allowed tokens, by id")
    allowed.fill(f"{chosen} x")
    chat.page.wait_for_selector("text=“x” is not a token id")
    allowed.fill(f"{chosen}, {other}")
    chat.page.get_by_label("Texts that answers must not contain").fill("zebra\n\nlion")
    least = chat.page.get_by_label("Min output tokens")
    least.fill("49")
    least.press("Tab")
    chat.page.wait_for_selector("text=More than the max output tokens (48).")
    least.fill("3")
    least.press("Tab")
    chat.page.get_by_label("Max reasoning tokens").fill("40")
    chat.page.get_by_label("Go on after the end that the model chooses").check()
    chat.page.get_by_label("Max output tokens").fill("6")
    chat.page.get_by_label("Max output tokens").press("Tab")
    chat.ask("Hello")
    expected = {
        "logit_bias": {str(other): -99.5},
        "allowed_token_ids": [chosen, other],
        "bad_words": ["zebra", "lion"],
        "min_tokens": 3,
        "thinking_token_budget": 40,
        "ignore_eos": True,
    }
    assert {name: sent(chat, frames).get(name) for name in expected} == expected
    assert chat.answers() == ["x" * 6]
    chat.reload()
    chat.page.wait_for_selector(".answer")
    chat.page.keyboard.press("Control+,")
    chat.page.click("text=Rare parameters")
    chat.page.click("[aria-label='Remove the bias of q']")
    chat.ask("And now?")
    assert "logit_bias" not in sent(chat, frames) and sent(chat, frames)["bad_words"] == ["zebra", "lion"]


def test_details_of_the_beam_search_are_sent(chat: RecordedPage) -> None:
    frames = record(chat)
    chat.page.keyboard.press("Control+,")
    chat.page.click("button:text('Beam search')")
    chat.page.click("text=Rare parameters")
    slide(chat, "Beams", "4")
    slide(chat, "Beam groups", "3")
    chat.page.wait_for_selector("text=4 beams cannot form 3 equal groups.")
    slide(chat, "Beam groups", "2")
    slide(chat, "Diversity penalty", "2.5")
    slide(chat, "Length penalty", "-0.5")
    chat.page.click("button:text('Never')")
    chat.ask("Tell me a story about a cat")
    expected = {"num_beam_groups": 2, "diversity_penalty": 2.5, "length_penalty": -0.5, "early_stopping": "never"}
    assert {name: sent(chat, frames).get(name) for name in expected} == expected


def _token(chat: RecordedPage, text: str) -> int:
    """Return the id of a text that is one token."""
    data = {"prompt": text, "add_special_tokens": False}
    tokens = chat.page.request.post(f"{chat.server}/tokenize", data=data).json()["tokens"]
    assert len(tokens) == 1
    return int(tokens[0])


def test_answers_match_the_schema_of_the_settings(chat: RecordedPage) -> None:
    chat.page.keyboard.press("Control+,")
    chat.page.click("text=More parameters")
    field = chat.page.get_by_label("JSON schema of answers")
    field.fill('{"enum": ["left", "right"]')
    chat.page.wait_for_selector("text=This is not JSON")
    field.fill('["left"]')
    chat.page.wait_for_selector("text=A schema is an object")
    field.fill('{"enum": ["left", "right"]}')
    chat.page.wait_for_selector("text=Answers match this schema.")
    chat.ask("Which way?")
    chat.reload()
    chat.page.wait_for_selector(".answer")
    chat.ask("And now?")  # stored with the conversation
    assert set(chat.answers()) <= {'"left"', '"right"'} and len(chat.answers()) == 2
    spoken = chat.page.locator(".answer [role=status]")
    chat.until("document.querySelectorAll('.answer [role=status]')[1]?.textContent === 'Matches the schema'")
    assert spoken.first.text_content() == "", "an answer that ended before the reload is not announced"
    chat.reload()
    chat.page.wait_for_selector(".answer >> nth=1 >> [data-schema=matches]")
    chat.page.wait_for_selector(".answer >> nth=0 >> [data-schema=matches]")
    assert spoken.all_text_contents() == ["", ""]


def test_a_growing_answer_shows_whether_it_matches_its_schema(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    chat.page.keyboard.press("Control+,")
    chat.page.click("text=More parameters")
    schema = '{"type": "object", "properties": {"text": {"type": "string", "minLength": 9000}}, "required": ["text"]}'
    chat.page.get_by_label("JSON schema of answers").fill(schema)
    chat.say("Tell me a story.")
    chat.page.wait_for_selector("[data-schema=incomplete]")
    chat.page.click("button[aria-label=Stop]")
    chat.page.wait_for_selector("text=Does not match the schema. The JSON ends before it is complete.")


def test_new_chats_start_with_the_chosen_defaults(chat: RecordedPage) -> None:
    frames = record(chat)
    chat.page.keyboard.press("Control+,")
    slide(chat, "Temperature", "1.5")
    assert chat.page.locator("text=These settings apply to this conversation only.").count() == 1
    chat.page.click("text=Use as default for new chats")
    chat.page.wait_for_selector("text=These settings are the default for new chats.")
    chat.reload()
    chat.ask("Hello")
    assert sent(chat, frames)["temperature"] == 1.5


def test_disabled_buttons_look_disabled(chat: RecordedPage) -> None:
    chat.page.keyboard.press("Control+,")
    button = chat.page.locator("button:text('Use as default for new chats')")
    opacity = "button => [button.disabled, Number(getComputedStyle(button).opacity)]"
    assert button.evaluate(opacity) == [True, 0.4]
    chat.page.click("[aria-label='More answers']")
    chat.page.wait_for_selector("button:text('Use as default for new chats'):enabled")
    assert button.evaluate(opacity) == [False, 1]


def test_system_prompts_are_named_edited_and_deleted(chat: RecordedPage) -> None:
    frames = record(chat)
    chat.page.keyboard.press("Control+,")
    chat.page.click("text=New prompt…")
    chat.page.fill(".prompt-form [name=name]", "Plain")
    chat.page.fill(".prompt-form [name=text]", "Be a poet.")
    chat.page.click("button:text('Save')")
    chat.page.wait_for_selector("text=A prompt named Plain already exists.")
    chat.page.fill(".prompt-form [name=name]", "Poet")
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".segments [aria-pressed=true] >> text=Poet")
    chat.reload()
    chat.page.select_option(".chip-select select", label="Poet")
    chat.ask("Hello")
    assert sent(chat, frames)["instructions"] == "Be a poet."
    chat.page.keyboard.press("Control+,")
    chat.page.click("text=Edit “Poet”")
    chat.page.fill(".prompt-form [name=text]", LONG)
    with chat.page.expect_response(KEPT):
        chat.page.click("button:text('Save')")
    chat.reload()
    chat.page.wait_for_selector(".answer")
    chat.ask("And now?")
    assert sent(chat, frames)["instructions"] == LONG, "joined from several metadata values"
    chat.page.keyboard.press("Control+,")
    chat.keep_toasts()
    chat.page.click("text=Delete prompt")
    assert chat.page.locator(".segments >> text=Poet").count() == 0
    assert chat.page.input_value("#system") == LONG  # the conversation keeps its prompt
    chat.page.click("text=Undo")
    chat.page.wait_for_selector(".segments [aria-pressed=true] >> text=Poet")


def test_one_of_two_system_prompts_with_the_same_text_is_chosen(chat: RecordedPage) -> None:
    chat.page.keyboard.press("Control+,")
    chat.page.click(".segments >> text=Brief")
    chat.page.click("text=New prompt…")
    chat.page.fill(".prompt-form [name=name]", "Mine")
    chat.page.fill(".prompt-form [name=text]", "Be brief.")
    chat.page.keyboard.press("Tab")
    chat.page.click(".prompt-form button:text('Save')")
    chosen = chat.page.locator("[aria-label=Settings] fieldset:first-of-type [aria-pressed=true]")
    select = "document.querySelector('.chip-select select').selectedOptions[0].text"
    for name in ("Mine", "Brief", "Mine"):
        chat.page.click(f".segments >> text={name}")
        chat.until(f"{select} === '{name}'")
        assert chosen.all_inner_texts() == [name]
    assert chat.page.locator("text=Edit “Mine”").count() == 1


def test_list_of_shortcuts_matches_the_keys(chat: RecordedPage) -> None:
    chat.page.keyboard.press("Control+/")
    dialog = chat.page.locator("dialog[open]")
    dialog.wait_for()
    assert dialog.locator("dt").count() == dialog.locator("dd").count() > 12
    assert chat.page.evaluate("document.querySelector('dialog').contains(document.activeElement)")
    chat.page.keyboard.press("Escape")
    # removed from the document, not only closed: the page handles the close event later
    chat.page.locator("dialog[aria-label='Keyboard shortcuts']").wait_for(state="detached")
    chat.page.keyboard.press("Control+/")
    dialog.wait_for()
    chat.page.keyboard.press("Control+/")
    dialog.wait_for(state="detached")


def test_cache_state_of_conversations_is_described(chat: RecordedPage) -> None:
    """A conversation that was just generated is warm; one created over REST was never computed and is cold."""
    chat.ask(f"My name is {secrets.token_hex(8)}, tell me about the sea")
    warm = chat.page.evaluate("location.hash.slice(1)")
    items = [{"role": "user", "content": secrets.token_hex(200)}, {"role": "assistant", "content": "I see."}]
    cold = chat.page.request.post(f"{chat.server}/v1/conversations", data={"items": items}).json()["id"]
    chat.reload()
    chat.page.wait_for_selector(f"[data-id={warm}] .dot-warm")
    chat.page.wait_for_selector(f"[data-id={cold}] .dot-cold")
    words = chat.page.get_attribute(f"[data-id={warm}] .dot-warm", "aria-label") or ""
    assert re.fullmatch(r"Cached: \d+ of \d+ tokens", words)
    chat.page.click(f"[data-id={warm}] .conversation-menu")
    assert chat.page.locator(".menu:popover-open .menu-note").inner_text() == words
    chat.page.keyboard.press("Escape")
    chat.page.hover(f"[data-id={cold}]")
    chat.page.click(f"[data-id={cold}] .conversation-menu")
    assert chat.page.locator(".menu:popover-open .menu-note").inner_text().startswith("Hardly cached: ")
