"""Test the conversation list on the page: dates, pins, titles, search, undo, files, activity."""

from __future__ import annotations

import json
import re
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage

pytestmark = pytest.mark.slow

DAY_S = 24 * 60 * 60
PATCHED = re.compile("/v1/conversations/conv_")


def make(chat: RecordedPage, *texts: str, title: str | None = None) -> str:
    """Create a conversation over REST with alternating user and assistant messages."""
    items = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    body = {"items": items} | ({"title": title} if title else {})
    reply = chat.page.request.post(f"{chat.server}/v1/conversations", data=body)
    assert reply.ok, reply.text()
    return str(reply.json()["id"])


def menu(chat: RecordedPage, title: str, entry: str) -> None:
    """Choose an entry of a conversation's menu."""
    chat.page.click(f"[aria-label='Menu of {title}']")
    chat.page.click(f".menu:popover-open >> text={entry}")


def row(chat: RecordedPage, title: str) -> Any:
    return chat.page.locator(".conversation-row", has=chat.page.get_by_text(title, exact=True))


def group_of(chat: RecordedPage, title: str) -> str:
    return str(chat.page.locator("section", has=chat.page.get_by_text(title, exact=True)).locator("h2").inner_text())


def test_conversation_is_renamed_in_place_and_deleted_with_undo(chat: RecordedPage) -> None:
    chat.ask("Hello")
    name = f"Greetings {secrets.token_hex(4)}"
    chat.page.locator(".conversation-row-current .conversation-menu").click()
    chat.until("document.activeElement.dataset.label === 'Rename'")  # the menu's first entry has the focus
    chat.page.keyboard.press("Enter")
    chat.page.fill("[aria-label='New title']", name)
    with chat.page.expect_response(PATCHED):
        chat.page.keyboard.press("Enter")
    chat.reload()
    row(chat, name).wait_for()
    chat.until(f"document.title === '{name} · chatcache'")
    chat.keep_toasts()
    menu(chat, name, "Delete")
    assert row(chat, name).count() == 0
    chat.page.wait_for_selector(".empty-state")
    chat.page.click("text=Undo")
    row(chat, name).wait_for()
    chat.page.wait_for_selector(".answer")
    conversation = chat.page.evaluate("location.hash.slice(1)")
    menu(chat, name, "Delete")
    row(chat, name).wait_for(state="detached")
    chat.page.goto(f"{chat.server}/?left")  # leaving the page confirms the deletion
    path = f"{chat.server}/v1/conversations/{conversation}"
    for _ in range(1200):
        if chat.page.request.get(path).status == 404:
            return
        chat.page.wait_for_timeout(50)
    raise AssertionError("the conversation is still there")


def test_cancelled_or_refused_rename_changes_nothing(chat: RecordedPage) -> None:
    name = f"Old name {secrets.token_hex(4)}"
    make(chat, "Hello", "Hi", title=name)
    chat.reload()
    row(chat, name).locator(".conversation-open").focus()
    chat.page.keyboard.press("F2")
    chat.page.fill("[aria-label='New title']", "Something else")
    chat.page.keyboard.press("Escape")
    row(chat, name).wait_for()
    chat.until("document.activeElement.classList.contains('conversation-open')")
    chat.expected_errors = 1
    chat.page.route(PATCHED, lambda route: route.fulfill(status=500, json={"error": {"message": "No disk."}}))
    chat.page.keyboard.press("F2")
    chat.page.fill("[aria-label='New title']", "Something else")
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".toast >> text=Not renamed. No disk.")
    row(chat, name).wait_for()


def test_pinned_conversations_are_first_and_others_by_date(chat: RecordedPage) -> None:
    """The clock of the page is moved; stored times are not."""
    old, new = (f"{word} {secrets.token_hex(4)}" for word in ("Older", "Newer"))
    make(chat, "Hello", "Hi", title=old)
    make(chat, "Hello", "Hi", title=new)
    chat.reload()
    row(chat, new).wait_for()
    assert group_of(chat, old) == group_of(chat, new) == "Today"
    with chat.page.expect_response(PATCHED):
        menu(chat, old, "Pin")
    chat.until(
        f"[...document.querySelectorAll('.list-heading')].some(group => group.textContent === 'Pinned' && "
        f"group.nextElementSibling.textContent.includes('{old}'))"
    )
    for days, name in ((1, "Yesterday"), (4, "Last 7 days"), (20, "Last 30 days")):
        chat.page.clock.set_fixed_time(time.time() + days * DAY_S)
        chat.reload()
        row(chat, new).wait_for()
        assert (group_of(chat, old), group_of(chat, new)) == ("Pinned", name)
    with chat.page.expect_response(PATCHED):
        menu(chat, old, "Unpin")
    chat.until(
        f"![...document.querySelectorAll('.list-heading')].some(group => group.textContent === 'Pinned' && "
        f"group.nextElementSibling.textContent.includes('{old}'))"
    )


def test_search_result_is_marked_and_opens_its_message_on_its_branch(chat: RecordedPage) -> None:
    """The message is far up, on an inactive branch, and its words follow an emoji and an accent."""
    word = f"Zebra{secrets.token_hex(3)}"
    lines = [f"Line {number}" for number in range(40)]
    conversation = make(
        chat,
        *lines[:2],
        f"🦓 Où est le {word}?",
        "There.",
        *lines[4:],
        title="About animals",
    )
    first = chat.page.request.get(f"{chat.server}/v1/conversations/{conversation}/items?branches=all").json()["data"][0]
    other = {"items": [{"role": "user", "content": "Another way"}], "parent_id": first["id"]}
    chat.page.request.post(f"{chat.server}/v1/conversations/{conversation}/items", data=other)
    chat.page.keyboard.press("Control+Shift+F")
    chat.page.keyboard.insert_text(f"ou {word.lower()[:8]}")  # at once: no search for a part of it
    hit = chat.page.locator(".search-hit")
    hit.wait_for()
    assert hit.locator("mark").all_inner_texts() == ["Où", word]
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(f".user-text >> text={word}")
    chat.until(f"""(() => {{
        const said = [...document.querySelectorAll('.user-text')].find(each => each.textContent.includes('{word}'));
        const box = said?.getBoundingClientRect();
        return box && box.top >= 0 && box.bottom <= innerHeight;
    }})()""")
    assert "Another way" not in chat.said()
    chat.page.fill("#find", secrets.token_hex(8))
    chat.page.wait_for_selector("text=No results in titles")
    chat.page.focus("#find")
    chat.page.keyboard.press("Escape")
    row(chat, "About animals").first.wait_for()


def test_search_result_in_a_short_conversation_shows_no_jump_button(chat: RecordedPage) -> None:
    word = f"Heron{secrets.token_hex(3)}"
    make(chat, f"Where is the {word}?", "There.", title="Birds")
    chat.page.keyboard.press("Control+Shift+F")
    chat.page.keyboard.insert_text(word)
    with chat.appears(".row-highlight"):
        chat.page.click(".search-hit")
    chat.page.wait_for_timeout(300)  # of the scrolling
    assert chat.page.locator("[aria-label='Jump to the latest']").count() == 0


def test_current_row_is_marked_in_forced_colours(chat: RecordedPage) -> None:
    chat.ask("Hello")
    chat.page.emulate_media(forced_colors="active")
    outlines = "[...document.querySelectorAll('.conversation-row')].map(row => getComputedStyle(row).outlineStyle)"
    assert chat.page.evaluate(outlines).count("solid") == 1


def test_menu_works_by_keyboard(chat: RecordedPage) -> None:
    name = f"Keys {secrets.token_hex(4)}"
    make(chat, "Hello", "Hi", title=name)
    chat.reload()
    row(chat, name).locator(".conversation-open").focus()
    chat.page.keyboard.press("Tab")
    chat.page.keyboard.press("ArrowDown")
    focused = "document.activeElement.dataset.label"
    chat.until(f"{focused} === 'Rename'")
    for key, label in (
        ("ArrowUp", "Delete"),
        ("ArrowDown", "Rename"),
        ("End", "Delete"),
        ("Home", "Rename"),
        ("e", "Export as JSON"),
    ):
        chat.page.keyboard.press(key)
        assert chat.page.evaluate(focused) == label
    chat.page.keyboard.press("Escape")
    assert chat.page.locator(".menu:popover-open").count() == 0
    assert chat.page.evaluate("document.activeElement.getAttribute('aria-label')") == f"Menu of {name}"
    chat.page.keyboard.press("Enter")
    chat.until(f"{focused} === 'Rename'")
    chat.page.keyboard.press("d")
    chat.page.keyboard.press("Enter")
    chat.until("document.querySelector('.toasts').textContent.includes('deleted')")
    assert row(chat, name).count() == 0


def test_conversation_is_exported_and_imported_by_picker_and_drop(chat: RecordedPage, tmp_path: Path) -> None:
    name = f"Travels: to {secrets.token_hex(4)}"
    conversation = make(chat, "Where to?", "To the sea.", title=name)
    chat.reload()
    row(chat, name).wait_for()
    files: dict[str, Path] = {}
    for entry, ending in (("Export as JSON", "json"), ("Export as Markdown", "md")):
        with chat.page.expect_download() as download:
            menu(chat, name, entry)
        assert download.value.suggested_filename == f"{name.replace(':', '')}.{ending}"
        files[ending] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[ending])
    assert "To the sea." in files["md"].read_text()
    exported = json.loads(files["json"].read_text())
    assert exported["conversation"]["id"] == conversation and len(exported["items"]) == 2

    chat.page.request.delete(f"{chat.server}/v1/conversations/{conversation}")
    row(chat, name).wait_for(state="detached")  # by a notification of the server
    with chat.page.expect_file_chooser() as chooser:
        chat.page.click("[aria-label='Import and export']")
        chat.page.click("text=Import from files…")
    chooser.value.set_files(files["json"])
    chat.page.wait_for_selector(".toast >> text=Conversations: 1 imported.")
    chat.page.wait_for_selector(".answer .prose >> text=To the sea.")
    assert (chat.said(), chat.answers()) == (["Where to?"], ["To the sea."])

    for content, message in ((files["json"].read_text(), "1 already here"), ("{]", "was not imported")):
        chat.expected_errors += content == "{]"
        handle = chat.page.evaluate_handle(
            "([text]) => { const data = new DataTransfer(); data.items.add(new File([text], 'a.json')); return data; }",
            [content],
        )
        chat.page.dispatch_event(".sidebar", "dragover", {"dataTransfer": handle})
        chat.page.wait_for_selector("[data-zone=import].drop-zone-over")
        chat.page.dispatch_event(".sidebar", "drop", {"dataTransfer": handle})
        chat.page.wait_for_selector(f".toast >> text={message}")
        assert chat.page.locator(".drop-zone").count() == 0


def test_refused_files_are_named_in_plain_words_with_their_buttons_in_line(chat: RecordedPage) -> None:
    chat.keep_toasts()
    chat.expected_errors += 3
    for name, text in (("note.txt", "Hello"), ("a-list-of-things.json", "{}"), ("b.json", "[1")):
        chat.drop(".sidebar", [(name, text.encode())])
        chat.page.wait_for_selector(f".toast >> text={name} was not imported: it is not a conversation export.")
    ends = chat.page.evaluate(
        "[...document.querySelectorAll('.toast')].map(toast => toast.getBoundingClientRect().right"
        " - toast.querySelector('[aria-label=Dismiss]').getBoundingClientRect().right)"
    )
    assert len(ends) == 3 and all(0 < end < 12 for end in ends)


def test_several_replies_are_generated_at_once(chat: RecordedPage, endless: None) -> None:
    """A dot marks each running reply, and one that ended unseen until it is opened."""
    chat.reload()
    chat.say("Tell me a story about a fox")
    chat.until("document.querySelector('.answer .prose')?.textContent.length > 20")
    first = chat.page.evaluate("location.hash.slice(1)")
    chat.page.keyboard.press("Control+Shift+O")
    chat.say("Tell me a story about a cat")
    chat.until("document.querySelectorAll('.dot-live').length === 2")
    assert chat.page.locator(".dot-live").first.get_attribute("aria-label") == "answer in progress"
    running = next(frame["response"]["id"] for frame in chat.received if frame["type"] == "response.created")
    chat.page.request.post(f"{chat.server}/v1/responses/{running}/cancel")
    chat.page.wait_for_selector(f"[data-id={first}] .dot-unseen")
    chat.page.click("button[aria-label=Stop]")
    chat.until("document.querySelectorAll('.dot-live').length === 0")
    chat.page.click(f"[data-id={first}] .conversation-open")
    chat.page.wait_for_selector(".answer[data-status=stopped]")
    assert chat.said() == ["Tell me a story about a fox"]
    assert chat.page.locator(f"[data-id={first}] .dot-unseen").count() == 0


def test_model_names_a_new_conversation_once(chat: RecordedPage) -> None:
    """The title comes from the test; the request for it is real."""
    asked = _named(chat)
    _let_it_name(chat)
    chat.ask("My name is Ada.")
    row(chat, "By the model").first.wait_for()
    chat.ask("What is my name?")
    assert asked == [chat.page.evaluate("location.hash.slice(1)")]


def test_long_model_title_is_ignored(chat: RecordedPage) -> None:
    """A model that answers with more than a title leaves the first line of the conversation as its title."""
    asked = _named(chat, title=None)
    _let_it_name(chat)
    question = f"My name is {secrets.token_hex(4)}."
    with chat.page.expect_response(re.compile("/title$")):
        chat.ask(question)
    row(chat, question).wait_for()
    assert asked == [chat.page.evaluate("location.hash.slice(1)")]


def test_title_set_by_the_user_is_kept(chat: RecordedPage, endless: None) -> None:
    asked = _named(chat)
    chat.reload()
    chat.say("My name is Ada.")
    chat.page.wait_for_selector(".conversation-row-current")
    path = f"{chat.server}/v1/conversations/{chat.page.evaluate('location.hash.slice(1)')}"
    mine = f"Mine {secrets.token_hex(4)}"
    assert chat.page.request.post(path, data={"title": mine}).ok
    row(chat, mine).wait_for()
    chat.page.click("button[aria-label=Stop]")
    chat.wait_end(0)
    chat.page.wait_for_selector(".answer[data-status=stopped]")
    assert asked == [] and row(chat, mine).count() == 1


def _let_it_name(chat: RecordedPage) -> None:
    """Enable titles, which are off by default for the demo model."""
    chat.page.evaluate("localStorage['chatcache.titles'] = 'true'")
    chat.reload()


def _named(chat: RecordedPage, title: str | None = "By the model") -> list[str]:
    """Answer title requests with a title, or with none; return the growing list of their conversations."""
    asked: list[str] = []

    def name(route: Any) -> None:
        asked.append(route.request.url.split("/")[-2])
        head = chat.page.request.get(f"{chat.server}/v1/conversations/{asked[-1]}").json()
        assert json.loads(route.request.post_data)["rev"] == head["rev"]
        named = {"title": title, "rev": head["rev"] + 1} if title else {}
        route.fulfill(json={"conversation": head | named, "generated": title is not None})

    chat.page.route(re.compile("/title$"), name)
    return asked
