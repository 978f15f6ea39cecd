"""Test the statistics of a turn on the page: cache, first miss, speed, receipts, reasoning, prefill while typing."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage

pytestmark = pytest.mark.slow


def test_draft_is_prefilled_while_typing_unless_switched_off(chat: RecordedPage) -> None:
    asked: list[dict[str, Any]] = []
    chat.page.on("websocket", lambda socket: socket.on("framesent", lambda text: asked.append(json.loads(text))))
    chat.reload()
    said = "Please tell me a long story about a lighthouse keeper and the sea"
    chat.page.locator("#composer").press_sequentially(said)
    sign = chat.page.locator(".cache-badge")
    sign.wait_for()
    warm = int(sign.get_attribute("data-cached") or 0)
    assert warm > 0
    chat.until(f"document.querySelector('#composer').value === {json.dumps(said)}")
    _wait_for_prewarm_of(chat, asked, said)
    chat.page.keyboard.press("Enter")
    usage = chat.wait_end(0)["usage"]
    ahead = [frame for frame in chat.received if frame["type"] == "prompt.prewarmed" and frame["status"] == "done"]
    assert usage["input_tokens_details"]["cached_tokens"] >= ahead[-1]["warm_tokens"] - 16
    assert sign.count() == 0

    chat.page.click("[aria-label=Settings]")
    chat.page.uncheck("text=Process the prompt while typing")
    chat.page.keyboard.press("Escape")
    before = len(asked)
    chat.ask("And now something short")
    assert "prompt.prewarm" not in [frame["type"] for frame in asked[before:]]
    chat.reload()
    chat.page.click("[aria-label=Settings]")
    assert not chat.page.is_checked("text=Process the prompt while typing")


def test_cache_indicator_fits_on_a_phone(open_page: Any) -> None:
    chat: RecordedPage = open_page(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    chat.ask("Hello")
    chat.page.fill("#composer", "And what")
    chat.page.wait_for_selector(".cache-badge")
    send = chat.page.locator("[aria-label=Send]").bounding_box()
    assert send and send["x"] + send["width"] < 390
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_stop_shows_a_receipt_and_the_reply_can_be_continued(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    chat.say("Tell me a story about a wizard")
    chat.until("document.querySelector('.answer .prose')?.textContent.length > 40")
    chat.page.keyboard.press("Escape")
    stopped = chat.wait_end(0)
    receipt = next(frame["receipt"] for frame in chat.received if "receipt" in frame)
    receipt_text = chat.page.locator("[data-stat=receipt]").inner_text()
    assert f"{receipt['tokens_after_stop']} token" in receipt_text
    assert f"{receipt['pages_freed']} page" in receipt_text
    text = stopped["output"][0]["content"][0]["text"]

    chat.page.click("text=Continue")
    chat.until(f"document.querySelector('.answer .prose')?.textContent.length > {len(text) + 20}")
    chat.page.keyboard.press("Escape")
    longer = chat.wait_end(1)
    on = longer["output"][0]["content"][0]["text"]
    assert on.startswith(text.rstrip("\ufffd")) and len(on) > len(text)
    assert chat.page.locator(".answer .version-position").inner_text() == "2/2"
    usage = longer["usage"]
    assert usage["input_tokens"] > stopped["usage"]["input_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] >= usage["input_tokens"] - 16
    chat.page.click("[aria-label='Previous version']")
    assert len(chat.answers()[0]) < len(on)


def test_cache_bar_explains_the_first_miss(chat: RecordedPage) -> None:
    reasons = {
        "never_computed": "new text",
        "diverged": "the text differs from there",
        "evicted": "its place in the cache was needed for other texts",
    }
    # new text without prefill while typing: otherwise all of it may be cached, without any miss
    chat.page.evaluate("localStorage['chatcache.draftAhead'] = 'false'")
    chat.reload()
    for text in (f"My name is {secrets.token_hex(8)}.", "What is my name?", "What is the weather?"):
        usage = chat.ask(text)["usage"]
        frame = [
            frame for frame in chat.received if frame["type"] == "response.progress" and frame["phase"] == "decode"
        ][-1]
        miss = frame["miss"]
        assert (chat.figure("cached"), chat.figure("computed")) == (
            usage["input_tokens_details"]["cached_tokens"],
            usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"],
        )
        words = chat.page.locator(".stat-miss").last.inner_text()
        assert words == f"computed from token {miss['at_token']}: {reasons[miss['reason']]}"
    assert len(chat.page.locator(".stat-miss").all()) == 3


def test_speed_and_time_to_first_token_are_shown(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    chat.say("Tell me a story about a fox")
    chat.until("document.querySelector('.answer .prose')?.textContent.length > 40")
    chat.page.wait_for_timeout(300)  # a speed needs a minimum duration
    chat.page.keyboard.press("Escape")
    chat.wait_end(0)
    assert re.fullmatch(r"\d+ ms|\d+\.\d s", chat.page.locator("[data-stat=first]").inner_text())
    assert float(chat.page.locator("[data-stat=speed]").inner_text()) > 0


def test_figures_of_an_answer_are_the_same_after_a_reload(chat: RecordedPage) -> None:
    def figures() -> list[str]:
        chat.page.wait_for_selector("[data-stat=first]")
        texts: list[str] = chat.page.locator("[data-stat]").all_inner_texts()
        return texts

    chat.ask("Tell me a story about a fox")
    before = figures()
    chat.reload()
    assert figures() == before


def test_reasoning_is_folded_with_its_length(browser: Any, server: str) -> None:
    """The frames of a reasoning model come from the test."""
    chat = RecordedPage(browser.new_context(), server)
    chat.page.route_web_socket(re.compile("/v1/responses"), _think("Let me see. It is a **fox**.", "A fox.", tokens=9))
    chat.page.add_init_script("localStorage['chatcache.sampling'] = JSON.stringify({reasoningTokens: 20})")
    chat.page.goto(server)
    chat.connected()
    chat.say("What is it?")
    chat.page.wait_for_selector(".answer[data-status=done]")
    thought = chat.page.locator(".reasoning")
    assert thought.locator("summary").inner_text() == "Reasoning, 9 tokens of at most 20 tokens"
    assert not thought.locator(".reasoning-text").is_visible()
    chat.until("document.querySelector('.answer .prose')?.innerText === 'A fox.'")  # the renderer loads with the text
    thought.locator("summary").press("Enter")
    chat.page.wait_for_selector(".reasoning-text .prose strong:has-text('fox')")
    assert thought.locator(".reasoning-text").inner_text() == "Let me see. It is a fox."
    assert chat.problems() == []
    chat.context.close()


def _wait_for_prewarm_of(chat: RecordedPage, asked: list[dict[str, Any]], said: str) -> None:
    """Wait until the server has prefilled the whole draft."""
    for _ in range(1200):
        sent = [frame["input"][0]["content"] for frame in asked if frame["type"] == "prompt.prewarm"]
        answered = [frame for frame in chat.received if frame["type"] == "prompt.prewarmed"]
        if said in sent and len(answered) == len(sent):
            return
        chat.page.wait_for_timeout(50)
    raise AssertionError("the draft was not prefilled")


def _think(thought: str, text: str, tokens: int) -> Any:
    """Route handler: a server that sends reasoning before the reply."""

    def serve(link: Any) -> None:
        limits = {"max_frame_bytes": 1 << 20, "max_n": 8, "max_beam_width": 8}
        session = {"model": "m", "max_model_len": 99, "limits": limits}
        link.send(json.dumps({"type": "session.created", "session": session}))

        def answer(message: str) -> None:
            asked = json.loads(message)
            if asked["type"] != "response.create":
                return
            response = {"id": "resp_1", "status": "in_progress", "conversation": None, "input_item_ids": ["msg_1"]}
            thinking = {"output_index": 0, "item": {"id": "rs_2", "type": "reasoning", "candidate": 0}}
            saying = {"output_index": 1, "item": {"id": "msg_2", "type": "message", "candidate": 0}}
            usage = {"input_tokens": 5, "output_tokens": 14, "output_tokens_details": {"reasoning_tokens": tokens}}
            frames: list[dict[str, Any]] = [{"type": "response.created", "response": response}]
            frames += [{"type": "response.output_item.added", **thinking}]
            frames += [
                {"type": "response.reasoning_text.delta", "output_index": 0, "delta": word + " "}
                for word in thought.split()
            ]
            frames += [{"type": "response.reasoning_text.done", "output_index": 0, "text": thought}]
            frames += [{"type": "response.output_item.done", **thinking}]
            frames += [{"type": "response.output_item.added", **saying}]
            frames += [{"type": "response.output_text.done", "output_index": 1, "text": text}]
            frames += [{"type": "response.output_item.done", **saying}]
            frames += [{"type": "response.completed", "response": response | {"status": "completed", "usage": usage}}]
            for frame in frames:
                link.send(json.dumps(frame | {"stream_id": asked["stream_id"]}))

        link.on_message(answer)

    return serve
