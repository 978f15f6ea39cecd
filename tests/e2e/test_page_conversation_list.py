"""The list of conversations in the browser: days, pins, names, search, undo, files, and what it tells of each."""

from __future__ import annotations

import json
import re
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recorded_page import Watched

pytestmark = pytest.mark.slow

DAY_S = 24 * 60 * 60
PATCHED = re.compile("/v1/conversations/conv_")


def make(chat: Watched, *texts: str, title: str | None = None) -> str:
    """A conversation made over REST: user and assistant in turn."""
    items = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    body = {"items": items} | ({"title": title} if title else {})
    reply = chat.page.request.post(f"{chat.server}/v1/conversations", data=body)
    assert reply.ok, reply.text()
    return str(reply.json()["id"])


def menu(chat: Watched, title: str, entry: str) -> None:
    """Use the menu of a conversation."""
    chat.page.click(f"[aria-label='Menu of {title}']")
    chat.page.click(f".menu:popover-open >> text={entry}")


def row(chat: Watched, title: str) -> Any:
    return chat.page.locator(".conversation-row", has=chat.page.get_by_text(title, exact=True))


def group_of(chat: Watched, title: str) -> str:
    return str(chat.page.locator("section", has=chat.page.get_by_text(title, exact=True)).locator("h2").inner_text())


def test_renamed_in_place_and_deleted_with_undo(chat: Watched) -> None:
    chat.ask("Hello")
    name = f"Greetings {secrets.token_hex(4)}"
    chat.page.locator(".conversation-row-current .conversation-menu").click()
    chat.page.keyboard.press("Enter")  # the menu's first entry has the focus
    chat.page.fill("[aria-label='New title']", name)
    with chat.page.expect_response(PATCHED):
        chat.page.keyboard.press("Enter")
    chat.reload()
    row(chat, name).wait_for()
    assert chat.page.title() == f"{name} · chatcache"
    chat.unhurried()
    menu(chat, name, "Delete")
    assert row(chat, name).count() == 0
    chat.page.wait_for_selector(".empty-state")
    chat.page.click("text=Undo")
    row(chat, name).wait_for()
    chat.page.wait_for_selector(".answer")
    conversation = chat.page.evaluate("location.hash.slice(1)")
    menu(chat, name, "Delete")
    row(chat, name).wait_for(state="detached")
    chat.page.goto(f"{chat.server}/?left")  # who leaves meant it
    path = f"{chat.server}/v1/conversations/{conversation}"
    for _ in range(1200):
        if chat.page.request.get(path).status == 404:
            return
        chat.page.wait_for_timeout(50)
    raise AssertionError("the conversation is still there")


def test_rename_that_is_given_up_or_refused_changes_nothing(chat: Watched) -> None:
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


def test_pinned_stand_on_top_and_the_rest_by_day(chat: Watched) -> None:
    """Days are the reader's: the clock of the page is moved, what is stored is not."""
    old, new = (f"{word} {secrets.token_hex(4)}" for word in ("Older", "Newer"))
    make(chat, "Hello", "Hi", title=old)
    make(chat, "Hello", "Hi", title=new)
    chat.reload()
    row(chat, new).wait_for()
    assert group_of(chat, old) == group_of(chat, new) == "Today"
    with chat.page.expect_response(PATCHED):
        menu(chat, old, "Pin")
    chat.until(f"document.querySelector('.list-heading + .list-items')?.textContent.includes('{old}')")
    assert group_of(chat, old) == "Pinned"
    for days, name in ((1, "Yesterday"), (4, "Last 7 days"), (20, "Last 30 days")):
        chat.page.clock.set_fixed_time(time.time() + days * DAY_S)
        chat.reload()
        row(chat, new).wait_for()
        assert (group_of(chat, old), group_of(chat, new)) == ("Pinned", name)
    with chat.page.expect_response(PATCHED):
        menu(chat, old, "Unpin")
    chat.until(
        f"![...document.querySelectorAll('.list-heading')].some(day => day.textContent === 'Pinned' && "
        f"day.nextElementSibling.textContent.includes('{old}'))"
    )


def test_a_hit_is_marked_and_opens_at_its_message_on_its_branch(chat: Watched) -> None:
    """The message is far up, on a branch that is not the active one, its words behind an emoji and an accent."""
    word = f"Zebra{secrets.token_hex(3)}"
    talk = [f"Line {number}" for number in range(40)]
    conversation = make(chat, *talk[:2], f"🦓 Où est le {word}?", "There.", *talk[4:], title="About animals")
    first = chat.page.request.get(f"{chat.server}/v1/conversations/{conversation}/items?branches=all").json()["data"][0]
    other = {"items": [{"role": "user", "content": "Another way"}], "parent_id": first["id"]}
    chat.page.request.post(f"{chat.server}/v1/conversations/{conversation}/items", data=other)
    chat.page.keyboard.press("Control+k")
    chat.page.keyboard.insert_text(f"ou {word.lower()[:8]}")  # at once: nobody looks for a part of it
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


def test_the_menu_is_the_keyboards(chat: Watched) -> None:
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


def test_exported_and_imported_by_picker_and_drop(chat: Watched, tmp_path: Path) -> None:
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
    row(chat, name).wait_for(state="detached")  # told by the server
    with chat.page.expect_file_chooser() as chooser:
        chat.page.click("[aria-label='Import and export']")
        chat.page.click("text=Import from files…")
    chooser.value.set_files(files["json"])
    chat.page.wait_for_selector(".toast >> text=Conversations: 1 imported.")
    chat.page.wait_for_selector(".answer .prose >> text=To the sea.")
    assert (chat.said(), chat.answers()) == (["Where to?"], ["To the sea."])

    for content, told in ((files["json"].read_text(), "1 already here"), ("{]", "was not imported")):
        chat.expected_errors += content == "{]"
        handle = chat.page.evaluate_handle(
            "([text]) => { const data = new DataTransfer(); data.items.add(new File([text], 'a.json')); return data; }",
            [content],
        )
        chat.page.dispatch_event("body", "dragover", {"dataTransfer": handle})
        chat.page.wait_for_selector(".drop-zone")
        chat.page.dispatch_event("body", "drop", {"dataTransfer": handle})
        chat.page.wait_for_selector(f".toast >> text={told}")
        assert chat.page.locator(".drop-zone").count() == 0


def test_several_answers_are_written_at_once(chat: Watched, endless: None) -> None:
    """A dot for each that is being written; the one that ended out of sight is marked until it is looked at."""
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


def test_the_model_names_a_new_conversation_once(chat: Watched) -> None:
    """The model's words are the test's; what is asked is real."""
    asked = _named(chat)
    _let_it_name(chat)
    chat.ask("My name is Ada.")
    row(chat, "By the model").first.wait_for()
    chat.ask("What is my name?")
    assert asked == [chat.page.evaluate("location.hash.slice(1)")]


def test_a_model_that_goes_on_talking_names_nothing(chat: Watched) -> None:
    """The demo model answers the request for a title as it answers anything: the first line stays."""
    _let_it_name(chat)
    question = f"My name is {secrets.token_hex(4)}."
    with chat.page.expect_response(re.compile("/title$")) as named:
        chat.ask(question)
    assert not named.value.json()["generated"]
    row(chat, question).wait_for()


def test_a_name_that_somebody_gave_stays(chat: Watched, endless: None) -> None:
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


def _let_it_name(chat: Watched) -> None:
    """Left alone, the demonstration model is not asked for names."""
    chat.page.evaluate("localStorage['chatcache.titles'] = 'true'")
    chat.reload()


def _named(chat: Watched) -> list[str]:
    """Answer requests for a title; the list of conversations they were for grows."""
    asked: list[str] = []

    def name(route: Any) -> None:
        asked.append(route.request.url.split("/")[-2])
        head = chat.page.request.get(f"{chat.server}/v1/conversations/{asked[-1]}").json()
        assert json.loads(route.request.post_data)["rev"] == head["rev"]
        route.fulfill(json={"conversation": head | {"title": "By the model", "rev": head["rev"] + 1}})

    chat.page.route(re.compile("/title$"), name)
    return asked
