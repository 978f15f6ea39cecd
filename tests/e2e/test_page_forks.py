"""Test forks inside a reply: inspect a token, see its alternatives, branch there. The API is the oracle."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.page_checks import SCREENS, find_beyond
from tests.e2e.recorded_page import RecordedPage

pytestmark = pytest.mark.slow

PAGE_TOKENS = 16
STORY = "Tell me a story about a fox"


def test_tokens_and_a_new_chat_have_icons_of_their_own(chat: RecordedPage) -> None:
    chat.ask("Hello")
    chat.page.click("[aria-label='Actions for the answer']")
    chat.page.wait_for_selector(".menu:popover-open")
    buttons = ("[aria-label='Show tokens'] svg", ".menu:popover-open [data-label='Branch into a new chat'] svg")
    tokens, new_chat = (chat.page.locator(button).inner_html() for button in buttons)
    assert "<path" in tokens and tokens != new_chat


def test_alternatives_at_the_end_of_an_answer_fit_a_small_phone(open_page: Any) -> None:
    """The head shows the text before the token, which is cut off."""
    chat: RecordedPage = open_page(**SCREENS[320])
    chat.ask(STORY)
    chat.page.tap("[aria-label='Show tokens']")
    tokens = chat.page.locator(".token")
    tokens.first.wait_for()
    for at in (tokens.count() // 2, tokens.count() - 3):
        tokens.nth(at).tap()
        chat.page.wait_for_selector(".choice")
        assert find_beyond(chat.page) == []
        chat.page.tap(".alternatives [aria-label=Close]")


def test_click_on_a_word_shows_alternatives_and_one_becomes_a_branch(chat: RecordedPage) -> None:
    chat.ask(STORY)
    item = _last_item(chat)
    whole = item["content"][0]["text"]
    word, at = _word_in_the_middle(whole)
    _click_word(chat, word, whole)
    popover = chat.page.get_by_role("dialog", name="Alternatives at this token")
    popover.locator(".choice").first.wait_for()

    token = next(each for each in _tokens(chat, item) if each["start"] is not None and at < each["end"])
    assert popover.locator("mark").inner_text() == _visible(whole[token["start"] : token["end"]])
    inspected = _get(chat, f"/items/{item['id']}/tokens/{token['index']}?top=8")
    shares = popover.locator(".choice-share").all_inner_texts()
    assert shares[: len(inspected["alternatives"])] == [
        _percent(each["probability"]) for each in inspected["alternatives"]
    ]
    assert popover.locator(".choice[aria-current=true]").count() == 1
    assert [float(bar.get_attribute("width")) for bar in popover.locator("rect").all()][: len(shares)] == pytest.approx(
        [max(0.5, each["probability"] * 100) for each in inspected["alternatives"]]
        + [max(0.5, inspected["token"]["probability"] * 100)] * (len(shares) - len(inspected["alternatives"])),
        abs=1e-6,
    )

    chosen = next(
        each for each in inspected["alternatives"] if each["id"] != inspected["token"]["id"] and not each["ends"]
    )
    popover.locator(".choice:not([aria-current=true]):enabled").first.click()
    branch = chat.wait_end(1)
    text = branch["output"][0]["content"][0]["text"]
    assert text.startswith(whole[: token["start"]] + chosen["text"].replace("\ufffd", ""))
    assert text != whole
    assert popover.count() == 0
    assert chat.page.locator(".answer .version-position").inner_text() == "2/2"
    created = next(frame for frame in chat.received if frame["type"] == "response.created" and _is(frame, branch))
    assert created["response"]["input_item_ids"] == []
    stored = {each["id"]: each for each in _get(chat, "/items?branches=all")["data"]}
    assert stored[branch["output"][0]["id"]]["parent_id"] == stored[item["id"]]["parent_id"]

    chat.page.click("[aria-label='Previous version']")
    assert _squeeze(chat.answers()[0]) == _squeeze(whole)
    chat.reload()
    chat.page.wait_for_selector(".answer .version-position")
    assert chat.page.locator(".answer .version-position").inner_text().endswith("/2")


def test_fork_chip_shows_the_counts_of_the_server(chat: RecordedPage) -> None:
    chat.ask(STORY)
    item = _last_item(chat)
    begun = chat.ends()[-1]["usage"]["input_tokens"]
    shown = [each["index"] for each in _tokens(chat, item) if each["start"] is not None]
    # inside a page that the original reply keeps: that page is copied
    index = next(each for each in shown[4:] if (begun + each - 1) % PAGE_TOKENS == 5)
    chat.page.click("[aria-label='Show tokens']")
    with chat.page.expect_response(re.compile(f"/tokens/{index}\\?")) as looked:
        # not by the pointer: on a busy machine the line may move below it
        chat.page.locator(".token").nth(shown.index(index)).evaluate("token => token.click()")
    chat.page.locator(".choice:not([aria-current=true]):enabled").first.click()
    chat.wait_end(1)
    progress = [frame for frame in chat.received if frame["type"] == "response.progress"][-1]
    assert looked.value.json()["usage"]["copied_pages"] + progress["copied_pages"] == 1
    assert progress["cached_tokens"] == begun + index, "all tokens before the fork are cached"
    assert progress["input_tokens"] - progress["cached_tokens"] == 1, "only the chosen token is computed"
    chip = chat.page.locator(".fork-chip")
    assert chip.inner_text() == "1 page copied, 0 tokens computed"
    assert f"after token {index}" in (chip.get_attribute("title") or "")


def test_forks_work_by_keyboard_alone(chat: RecordedPage) -> None:
    page = chat.page
    chat.ask(STORY)
    whole = _last_item(chat)["content"][0]["text"]
    page.keyboard.press("Alt+b")
    page.wait_for_selector(".token")
    assert "".join(page.locator(".token").all_text_contents()).replace("↵", "") == whole
    tokens = page.locator(".token")
    chat.until("document.activeElement.className === 'token'")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert tokens.evaluate_all("all => all.indexOf(document.activeElement)") == 3
    page.keyboard.press("End")
    assert tokens.evaluate_all("all => all.indexOf(document.activeElement)") == tokens.count() - 1
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    below = tokens.evaluate_all(
        "all => document.activeElement.getBoundingClientRect().top - all[0].getBoundingClientRect().top"
    )
    assert below > 0 or len(whole) < 60
    page.keyboard.press("Home")
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    chat.until("document.activeElement.className === 'choice'")
    page.keyboard.press("ArrowRight")  # the next token
    chat.until("document.activeElement.className === 'choice'")
    page.keyboard.press("Escape")
    assert tokens.evaluate_all("all => all.indexOf(document.activeElement)") == 6
    page.keyboard.press("Enter")
    chat.until("document.activeElement.className === 'choice'")
    if page.evaluate("document.activeElement.getAttribute('aria-current')") == "true":
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    chat.wait_end(1)
    assert page.locator(".answer .version-position").inner_text() == "2/2"
    page.keyboard.press("Alt+b")
    page.wait_for_selector(".token")
    page.keyboard.press("Escape")
    assert page.locator(".token").count() == 0
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Show tokens"


def test_confidence_view_colours_tokens_walks_doubts_and_forks_inline(chat: RecordedPage) -> None:
    page = chat.page
    chat.ask(STORY)
    item = _last_item(chat)
    scored = _get(chat, f"/items/{item['id']}/tokens?top=4")["data"]
    shown = [each for each in scored if each["start"] is not None and each["end"] > each["start"]]
    limits = (0.9, 0.5, 0.25, 0.1)
    levels = [sum(each["token"]["probability"] < limit for limit in limits) for each in shown]
    page.keyboard.press("Alt+b")
    page.wait_for_selector(".token[data-doubt]")
    assert page.locator(".token").evaluate_all("all => all.map(each => Number(each.dataset.doubt))") == levels
    doubts = [at for at, level in enumerate(levels) if level >= 2]
    assert doubts, "the small model is unsure somewhere"
    focused = "[...document.querySelectorAll('.token')].indexOf(document.activeElement)"
    first = next((at for at in doubts if at > 0), doubts[0])
    page.keyboard.press("d")
    assert page.evaluate(focused) == first
    page.keyboard.press("Shift+D")
    page.keyboard.press("d")
    assert page.evaluate(focused) == first
    head = page.locator(".confidence-count")
    assert head.inner_text() == f"Doubt {doubts.index(first) + 1} of {len(doubts)}"
    page.click("[aria-label='Next doubt']")
    assert page.evaluate(focused) == doubts[(doubts.index(first) + 1) % len(doubts)]
    at = page.evaluate(focused)
    others = [each for each in shown[at]["alternatives"] if each["id"] != shown[at]["token"]["id"]]
    choices = page.locator(".confidence-choice")
    assert choices.locator(".hint").all_inner_texts() == [_percent(each["probability"]) for each in others]
    chosen = next(place for place, each in enumerate(others) if not each["ends"])
    choices.nth(chosen).click()
    chat.wait_end(1)
    assert page.locator(".answer .version-position").inner_text() == "2/2"
    text = _last_item(chat)["content"][0]["text"]
    assert text.startswith(item["content"][0]["text"][: shown[at]["start"]])
    assert chat.sent[-1]["fork_with"] == others[chosen]["id"]


def test_words_inside_markdown_map_to_their_tokens(chat: RecordedPage) -> None:
    chat.ask("Make a table of animals and their sounds")
    item = _last_item(chat)
    whole = item["content"][0]["text"]
    # the reply has a length limit: the last cell may be empty
    cell = chat.page.locator(".prose td", has_text=re.compile(r"\w")).last
    word = re.findall(r"\w+", cell.inner_text())[0]
    cell.scroll_into_view_if_needed()
    _click_word(chat, word, whole, last=True)
    mark = chat.page.locator(".alternatives mark")
    mark.wait_for()
    at = [match.start() for match in re.finditer(rf"\b{word}\b", whole)][-1]
    token = next(each for each in _tokens(chat, item) if each["start"] is not None and at < each["end"])
    assert mark.inner_text() == _visible(whole[token["start"] : token["end"]])
    chat.page.keyboard.press("Escape")
    assert chat.page.locator(".alternatives").count() == 0


def test_click_outside_words_or_with_the_switch_off_does_nothing(chat: RecordedPage) -> None:
    chat.ask(STORY)
    whole = _last_item(chat)["content"][0]["text"]
    word, _ = _word_in_the_middle(whole)
    chat.page.click("[aria-label=Settings]")
    chat.page.uncheck("text=Clicking a word")
    chat.page.keyboard.press("Escape")
    _click_word(chat, word, whole)
    assert not [url for url in chat.asked if "/tokens" in url]
    assert chat.page.locator(".alternatives").count() == 0


def _get(chat: RecordedPage, path: str) -> Any:
    """Request a path below the shown conversation."""
    return chat.page.evaluate(
        "path => fetch(`v1/conversations/${location.hash.slice(1)}${path}`).then(reply => reply.json())", path
    )


def _last_item(chat: RecordedPage) -> dict[str, Any]:
    item: dict[str, Any] = _get(chat, f"/items/{chat.ends()[-1]['output'][0]['id']}")
    return item


def _tokens(chat: RecordedPage, item: dict[str, Any]) -> list[dict[str, Any]]:
    tokens: list[dict[str, Any]] = _get(chat, f"/items/{item['id']}/tokens")["data"]
    return tokens


def _word_in_the_middle(text: str) -> tuple[str, int]:
    """Return a word that occurs once, and its position."""
    words = [match for match in re.finditer(r"\w{3,}", text) if len(re.findall(rf"\b{match[0]}\b", text)) == 1]
    match = words[len(words) // 2]
    return match[0], match.start()


def _click_word(chat: RecordedPage, word: str, whole: str, last: bool = False) -> None:
    """Click the middle of a word as it is rendered."""
    box = chat.page.evaluate(
        """async ([word, last]) => {
            const root = [...document.querySelectorAll('.answer .prose')].at(-1);
            const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
            let found = null;
            for (let node = walker.nextNode(); node; node = walker.nextNode()) {
                for (const match of node.textContent.matchAll(new RegExp(`\\\\b${word}\\\\b`, 'g'))) {
                    if (found && !last) continue;
                    found = document.createRange();
                    found.setStart(node, match.index);
                    found.setEnd(node, match.index + word.length);
                }
            }
            const frame = () => new Promise(done => requestAnimationFrame(done));
            let still = 0;
            for (let seen = found.getBoundingClientRect(); still < 3; still++) {
                await frame();
                const now = found.getBoundingClientRect();
                if (now.x !== seen.x || now.y !== seen.y) still = -1;
                seen = now;
            }
            const {x, y, width, height} = found.getBoundingClientRect();
            return {x: x + width / 2, y: y + height / 2};
        }""",
        [word, last],
    )
    assert word in whole
    chat.page.mouse.click(box["x"], box["y"])


def _percent(share: float) -> str:
    if share >= 0.0995:
        return f"{int(share * 100 + 0.5)} %"
    return f"{share * 100:.1f} %" if share >= 0.00095 else "< 0.1 %"


def _visible(text: str) -> str:
    stripped = text.strip(" ")
    before, after = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
    return ("·" * before + stripped + "·" * after).replace("\n", "↵")


def _is(frame: dict[str, Any], response: dict[str, Any]) -> bool:
    return bool(frame["response"]["id"] == response["id"])


def _squeeze(text: str) -> str:
    return "".join(re.findall(r"\w", text))
