"""Test changes of messages on the page: edit and continue an answer, delete with undo, branch into a new chat."""

from __future__ import annotations

import pytest

from tests.e2e.recorded_page import RecordedPage
from tests.e2e.rest_client import create_conversation

pytestmark = pytest.mark.slow


def choose(chat: RecordedPage, menu: str, entry: str) -> None:
    chat.page.locator(f"button[aria-label='{menu}']").last.click()
    chat.page.click(f"[role=menuitem][data-label='{entry}']")


def test_answer_is_edited_continued_and_begun(chat: RecordedPage) -> None:
    chat.ask("What is 2 + 3?")
    before = chat.answers()
    choose(chat, "Actions for the answer", "Edit")
    editor = chat.page.locator("[aria-label='Edit answer']")
    assert editor.input_value() != ""
    editor.fill("The answer is six")
    chat.page.click("button:text-is('Save')")
    chat.page.wait_for_selector(".answer .version-position:text('2/2')")
    assert chat.answers() == ["The answer is six"]
    tokens = chat.page.locator("[aria-label='Show tokens']")
    assert tokens.is_disabled(), "the tokens of a text that a user wrote are not stored"
    assert tokens.get_attribute("title") == "The tokens of this answer are not stored: it was imported or edited."
    # without a change there is no other version
    choose(chat, "Actions for the answer", "Edit")
    chat.page.click("button:text-is('Save')")
    editor.wait_for(state="detached")
    assert chat.page.locator(".answer .version-position").inner_text() == "2/2"
    # Esc leaves the editor, its text is kept, and the focus is in the message box
    choose(chat, "Actions for the answer", "Edit")
    editor.fill("The answer is seven")
    chat.page.keyboard.press("Escape")
    chat.until("document.activeElement.id === 'composer'")
    assert chat.answers() == ["The answer is six"]
    choose(chat, "Actions for the answer", "Edit")
    assert editor.input_value() == "The answer is seven"
    chat.page.click("button:text-is('Cancel')")

    choose(chat, "Actions for the answer", "Edit")
    editor.fill("Once upon a")
    chat.page.keyboard.press("Enter")
    chat.wait_end(1)
    assert chat.answers()[0].startswith("Once upon a")
    choose(chat, "Actions for your message", "Begin an answer…")
    chat.page.locator("[aria-label='Beginning of the answer']").fill("Well, my")
    chat.page.keyboard.press("Enter")
    chat.wait_end(2)
    assert chat.answers()[0].startswith("Well, my")
    begun = chat.answers()
    chat.reload()
    chat.page.wait_for_selector(".answer .version-position:text('4/4')")
    assert chat.answers() == begun
    for _ in range(3):
        chat.page.click(".answer [aria-label='Previous version']")
    assert chat.answers() == before


def test_deleted_message_leaves_what_followed_and_branches_are_copied(chat: RecordedPage) -> None:
    chat.ask("My name is Ada.")
    chat.ask("What is my name?")
    said, answers = chat.said(), chat.answers()
    chat.keep_toasts()
    chat.page.locator("button[aria-label='Actions for your message']").first.click()
    chat.page.click("[role=menuitem][data-label='Delete']")
    assert (chat.said(), chat.answers()) == (said[1:], answers)
    chat.page.click(".toast >> text=Undo")
    assert (chat.said(), chat.answers()) == (said, answers)
    chat.page.locator("button[aria-label='Actions for the answer']").first.click()
    chat.page.click("[role=menuitem][data-label='Delete']")
    assert chat.answers() == answers[1:]
    # the next message waits for the deletion
    chat.ask("Hello!")
    assert chat.said() == [*said, "Hello!"] and chat.answers()[0] == answers[1]
    kept = chat.said(), chat.answers()
    chat.reload()
    chat.page.wait_for_selector(".answer >> nth=1")
    assert (chat.said(), chat.answers()) == kept

    first = chat.page.url
    chat.page.locator("button[aria-label='Actions for the answer']").first.click()
    chat.page.click("[role=menuitem][data-label='Branch into a new chat']")
    chat.until("document.querySelectorAll('.answer').length === 1")
    assert chat.page.url != first and chat.answers() == kept[1][:1]
    assert chat.page.locator(".conversation-row-current").inner_text().startswith("Branch of")


def test_shared_link_is_read_without_the_page_until_it_ends(chat: RecordedPage) -> None:
    chat.ask("My name is Ada.")
    chat.keep_toasts()
    row = ".conversation-row-current"
    chat.page.locator(f"{row} .conversation-menu").click()
    with chat.page.expect_response(lambda response: response.url.endswith("/share")) as made:
        chat.page.click("[role=menuitem][data-label='Share a link']")
    link = chat.server + made.value.json()["path"]
    chat.page.wait_for_selector(".toast >> text=/Link copied|Link:/")
    size = chat.page.viewport_size
    chat.page.set_viewport_size({"width": 390, "height": 844})
    width = chat.page.evaluate("document.querySelector('.toast').getBoundingClientRect().width")
    assert 390 / 2 < width < 390, "as wide as its text, up to the width of the screen"
    chat.page.set_viewport_size(size)
    page = chat.page.context.new_page()
    page.goto(link)
    assert page.locator("article").count() == 2 and "My name is Ada." in page.inner_text("main")
    assert page.evaluate("getComputedStyle(document.querySelector('.user')).paddingLeft") == "16px"  # the style applies
    page.close()
    chat.page.locator(f"{row} .conversation-menu").click()
    assert chat.page.locator("[role=menuitem][data-label='Copy the shared link']").count() == 1
    with chat.page.expect_response(lambda response: response.request.method == "DELETE"):
        chat.page.click("[role=menuitem][data-label='Stop sharing']")
    assert chat.page.request.get(link).status == 404


def test_find_goes_to_hits_on_all_branches(chat: RecordedPage) -> None:
    chat.ask("A zebra here")
    chat.page.focus("#composer")
    chat.page.keyboard.press("ArrowUp")
    chat.page.locator("[aria-label='Edit message']").fill("Another animal")
    chat.page.keyboard.press("Enter")
    chat.wait_end(1)
    assert chat.said() == ["Another animal"]
    chat.page.keyboard.press("Control+f")
    box = chat.page.locator("[aria-label='Find in this conversation']")
    box.fill("ZEBRA")
    count = chat.page.locator(".find-count")
    chat.page.wait_for_selector(".find-count:text('on another branch')")
    assert count.inner_text().startswith("1 of ")
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".user-text:text('A zebra here')")
    chat.until("(CSS.highlights.get('found')?.size ?? 0) > 0")
    chat.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert box.evaluate("box => box === document.activeElement"), "the next Enter goes to the next hit"
    box.fill("no such words")
    chat.page.wait_for_selector(".find-count:text('none')")
    chat.page.keyboard.press("Escape")
    chat.until("document.activeElement.id === 'composer'")
    assert chat.page.locator(".find").count() == 0


def test_find_shows_the_first_hit_and_enter_goes_to_the_second(chat: RecordedPage) -> None:
    texts = ["A kiwi", *("Long text. " * 300 for _ in range(3)), "Two kiwis", "Many kiwis"]
    made = create_conversation(chat.server, texts)
    chat.page.evaluate("hash => location.hash = hash", made)
    chat.page.wait_for_selector("text=Many kiwis")
    chat.page.keyboard.press("Control+f")
    chat.until("document.activeElement.ariaLabel === 'Find in this conversation'")
    count = chat.page.locator(".find-count")
    seen = []
    for key in ("k", "Enter", "Enter", "Enter"):
        if key == "k":
            chat.page.keyboard.type("kiwi")
            chat.page.wait_for_selector("text=A kiwi")  # scrolled to
        else:
            chat.page.keyboard.press(key)
        chat.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        seen.append(count.inner_text())
    assert seen == ["1 of 3", "2 of 3", "3 of 3", "1 of 3"]
    assert chat.page.evaluate("document.activeElement.ariaLabel") == "Find in this conversation"
