"""All views of the page, for checks such as axe that must cover each of them in both themes.

A new view is one more entry: its name, and the actions that open it from a page with one answered question.
"""

from __future__ import annotations

import contextlib
import re
import urllib.error
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.e2e.recorded_page import RecordedPage, pass_endless
from tests.e2e.rest_client import call, create_conversation, create_conversation_with_call

EVERYTHING = """# A heading

Words with **weight**, *stress*, ~~regret~~, `code`, [a link](https://example.com) and $e^{i\\pi} + 1 = 0$.

- a list
  1. in a list
- [x] a task

> A quotation
> of two lines

| left | right |
|:-----|------:|
| 1 | 2 |

```python
def share(page: int) -> str:
    return f"page {page}"  # a comment
```

```svg
<svg viewBox="0 0 1 1"><circle r="1" /></svg>
```

![a picture](https://example.com/picture.png)

$$
\\int_0^1 x^2 \\, dx = \\frac{1}{3}
$$

$$\\wrong{$$
"""


@dataclass(frozen=True, slots=True)
class View:
    """Name of a view and the actions that open it; wait for `settled` before checking it."""

    name: str
    go: Callable[[RecordedPage], None]
    settled: str


def _everything(chat: RecordedPage) -> None:
    chat.page.keyboard.press("Escape")
    made = create_conversation(chat.server, ["Show me all you can draw", EVERYTHING], title="Everything")
    chat.page.evaluate("hash => location.hash = hash", made)


def _tool_calls(chat: RecordedPage) -> None:
    chat.page.keyboard.press("Escape")  # closes the form of the prompt
    chat.page.wait_for_selector("dialog", state="detached")
    chat.page.evaluate("hash => location.hash = hash", create_conversation_with_call(chat.server))
    chat.page.click(".tool-call summary >> nth=0")


def _is_phone(chat: RecordedPage) -> bool:
    return bool(chat.page.viewport_size["width"] < 800)


def _press(*keys: str) -> Callable[[RecordedPage], None]:
    def go(chat: RecordedPage) -> None:
        for key in keys:
            chat.page.keyboard.press(key)

    return go


def _candidates(chat: RecordedPage) -> None:
    chat.page.click("[aria-label='More answers']")
    chat.ask("Tell me a story about a robot")


def _search(chat: RecordedPage) -> None:
    chat.page.click("#tab-beams")
    chat.page.click("text=Try 4 beams")
    if _is_phone(chat):  # the panel covers the message box
        chat.page.click("[aria-label='Close the panel']")
    chat.ask("Tell me a story about a cat")
    if _is_phone(chat):
        chat.page.click("[aria-label=Panel]")


def _click(*selectors: str) -> Callable[[RecordedPage], None]:
    def go(chat: RecordedPage) -> None:
        for selector in selectors:
            chat.page.click(selector)

    return go


def _edit(chat: RecordedPage) -> None:
    chat.page.focus("#composer")
    chat.page.keyboard.press("ArrowUp")


def _palette(chat: RecordedPage) -> None:
    _press("Escape", "Control+k")(chat)
    chat.page.wait_for_selector("[role=combobox]")
    chat.page.keyboard.type("co")


def _compare_branches(chat: RecordedPage) -> None:
    for number in (1, 2):
        chat.page.click(f"[aria-label='Compare Branch {number}']")


def _page_text(chat: RecordedPage) -> None:
    chat.page.focus("[role=slider]")


def _find(chat: RecordedPage) -> None:
    chat.page.keyboard.press("Control+f")
    chat.page.fill("[aria-label='Find in this conversation']", "list")


def _search_conversations(chat: RecordedPage) -> None:
    chat.page.keyboard.press("Control+Shift+F")
    chat.page.fill("#find", "robot")


def _menu(chat: RecordedPage) -> None:
    if _is_phone(chat):  # the list is closed there
        chat.page.click("[aria-label='Show the list']")
    chat.page.click(".conversation-row-current .conversation-menu")


def _delete(chat: RecordedPage) -> None:
    chat.keep_toasts()
    chat.page.fill("#find", "")
    chat.page.focus(".conversation-row-current .conversation-open")
    chat.page.keyboard.press("Delete")


def _inside(chat: RecordedPage) -> None:
    chat.page.locator(".token").nth(2).click()


def _settings(chat: RecordedPage) -> None:
    _press("Control+,")(chat)
    chat.page.click("text=More parameters")
    chat.page.click("text=Rare parameters")
    chat.page.fill("[aria-label=Token]", "hello")
    chat.page.fill("[aria-label=Bias]", "5")
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".token-biases li")


def _administration(chat: RecordedPage) -> None:
    _press("Escape", "Control+,")(chat)
    chat.page.click("button:text('Administration')")


def _saved_prompts(chat: RecordedPage) -> None:
    with contextlib.suppress(urllib.error.HTTPError):  # stored by an earlier run on this server
        call(chat.server, "POST", "/v1/prompts", {"name": "translate", "text": "Into {{language}}:"})
    _press("Escape", "Control+k")(chat)
    chat.page.wait_for_selector("[role=combobox]")
    chat.page.keyboard.type("saved prompts")
    chat.page.keyboard.press("Enter")


def _prompt_menu(chat: RecordedPage) -> None:
    chat.page.keyboard.press("Escape")
    chat.page.wait_for_selector("dialog", state="detached")
    chat.page.fill("#composer", "/tr")


def _compared(chat: RecordedPage) -> None:
    seen = len(chat.ends())
    chat.page.keyboard.type("Be brief.")
    chat.page.click("form[aria-label='Compare settings'] button:text('Generate')")
    chat.wait_end(seen)


def _attach(chat: RecordedPage) -> None:
    chat.expected_errors += 1  # the refused picture
    chat.drop(".thread", [("notes.txt", b"Buy bread."), ("photo.png", b"\0")])
    chat.page.wait_for_selector(".attachment-ready")


def _file_card(chat: RecordedPage) -> None:
    chat.ask("What is to be done?")
    chat.page.click(".file-card summary")


def _edit_answer(chat: RecordedPage) -> None:
    chat.page.click(".answer .tool-more >> nth=-1")
    chat.page.click(".menu:popover-open >> text=Edit")


def _running(chat: RecordedPage) -> None:
    chat.page.route_web_socket(re.compile("/v1/responses"), pass_endless)
    chat.reload()
    chat.say("Tell me a story about an owl")
    chat.page.wait_for_selector(".answer[aria-busy=true] .prose:not(:empty)")
    chat.page.fill("#composer", "And then?")
    chat.page.click("[aria-label=Queue]")
    chat.page.fill("#composer", "Be brief.")


VIEWS: tuple[View, ...] = (
    View("answer", lambda chat: None, ".answer-foot .stats"),
    View("confidence", _click("[aria-label='Show tokens'] >> nth=-1"), ".confidence-choice"),
    View("alternatives", _inside, ".choice"),
    View(
        "answer menu",
        _click(".alternatives [aria-label=Close]", ".answer .tool-more >> nth=-1"),
        ".menu:popover-open",
    ),
    View("compare form", _click(".menu:popover-open >> text=Compare settings…"), "form[aria-label='Compare settings']"),
    View("compared answers", _compared, ".compared-answers .card-settings >> nth=1"),
    View("editor", _edit, "[aria-label='Edit message']"),
    View("candidates", _candidates, ".card-pick >> nth=1"),
    View("differences", _click("button:text('Differences')"), ".differences >> nth=1"),
    View("candidates panel", _press("Escape", "Alt+Shift+1"), ".side-panel [role=tab]"),
    View("beams panel", _press("Alt+Shift+2"), "#tab-beams[aria-selected=true]"),
    View("branches panel", _press("Alt+Shift+3"), "#tab-branches[aria-selected=true]"),
    View("compared branches", _compare_branches, ".branch-compared .differences >> nth=1"),
    View("pages panel", _press("Alt+Shift+4"), "#tab-pages[aria-selected=true]"),
    View("text of a page", _page_text, ".page-text"),
    View("beam tree", _search, ".beam-row >> nth=3"),
    View("settings", _settings, "aside[aria-label=Settings]"),
    View("shortcuts", _press("Escape", "Control+/"), "dialog[open]"),
    View("palette", _palette, "[role=group][aria-label=Messages] [role=option]"),
    View("administration", _administration, ".admin-table"),
    View("saved prompts", _saved_prompts, ".saved-prompt-list li"),
    View("saved prompt form", _click("dialog >> text=Edit"), "dialog form"),
    View("prompt menu", _prompt_menu, "#prompt-options >> text=/translate"),
    View("prompt variables", _press("Enter"), "dialog textarea"),
    View("tool calls", _tool_calls, ".tool-call[open] section >> nth=1"),
    View("everything", _everything, ".katex >> nth=1"),
    View("find", _find, ".find-count >> text=of"),
    View("preview", _click(".code-preview"), ".code iframe"),
    View("menu", _menu, ".menu:popover-open"),
    View("rename", _click(".menu:popover-open >> text=Rename"), "[aria-label='New title']"),
    View("finds", _search_conversations, ".search-hit mark"),
    View("toast", _delete, "text=Undo"),
    View("start", _click(".toasts [aria-label=Dismiss]", ".new-chat"), ".empty-state"),
    View("attachments", _attach, ".attachment-failed"),
    View("file card", _file_card, ".file-card pre"),
    View("answer editor", _edit_answer, "[aria-label='Edit answer']"),
    View("running answer", _running, ".queued-text"),
)


def watch(chat: RecordedPage, view: View) -> Any:
    """Open a view and wait until it is complete."""
    view.go(chat)
    chat.page.wait_for_selector(view.settled)
    return chat.page
