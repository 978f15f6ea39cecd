"""Test the page with a keyboard only: a whole visit on every screen, the place of the focus, the command palette."""

from __future__ import annotations

import re
import secrets
from typing import Any

import pytest

from tests.e2e.page_checks import SCREENS
from tests.e2e.recorded_page import RecordedPage, pass_endless
from tests.e2e.rest_client import create_conversation

pytestmark = pytest.mark.slow

FOCUSED = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
IN_MENU = "document.activeElement.closest('.menu:popover-open') !== null"  # a moment after the menu is shown


# What is wrong with the place of the focus: it is lost, outside the screen, or its mark has too little contrast.
FOCUS_PROBLEM = """() => {
  const element = document.activeElement;
  if (element === document.body) return 'on the body';
  const box = element.getBoundingClientRect();
  if (box.bottom <= 0 || box.top >= innerHeight || box.right <= 0 || box.left >= innerWidth) return 'off the screen';
  const context = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const parsed = colour => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const luminance = colour => parsed(colour).slice(0, 3).map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const form = element.id === 'composer' ? element.closest('form') : null;  // marked by its border
  const marked = form ?? (element.matches('.row') ? element.firstElementChild : element);
  const style = getComputedStyle(marked);
  if (!form && (style.outlineStyle === 'none' || parseFloat(style.outlineWidth) < 2)) return 'no outline';
  let behind = marked.parentElement;
  while (behind && parsed(getComputedStyle(behind).backgroundColor)[3] < 255) behind = behind.parentElement;
  const [dark, light] = [form ? style.borderTopColor : style.outlineColor, getComputedStyle(behind).backgroundColor]
    .map(luminance).sort((one, other) => one - other);
  return (light + 0.05) / (dark + 0.05) >= 3 ? null : 'contrast below 3';
}"""


class Keys:
    """A visitor with a keyboard only. After every step the focus must be visible in both themes."""

    def __init__(self, chat: RecordedPage) -> None:
        self.chat = chat
        self.is_touch = chat.page.evaluate("matchMedia('(pointer: coarse)').matches")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.chat.page.keyboard.press(key)

    def type(self, text: str) -> None:
        self.chat.page.keyboard.type(text)

    def reach(self, label: str, back: bool = False) -> None:
        """Press Tab until the focused element has this label, and check its mark."""
        _reach(self.chat, label, back)
        self.check(label)

    def check(self, step: str) -> None:
        for scheme in ("dark", "light"):
            self.chat.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            # the focus moves with the drawing that follows a key
            self.chat.until(
                "!document.activeElement?.matches('body') && !document.activeElement?.closest('[aria-busy=true]:empty')"
            )
            problem = self.chat.page.evaluate(FOCUS_PROBLEM)
            assert problem is None, f"after {step}, {scheme}: {problem}"

    def write(self, text: str) -> None:
        """Replace the text of the message box."""
        self.press("Shift+Escape", "Control+a")
        self.type(text)

    def send(self, text: str, button: str = "Send", key: str = "Enter") -> None:
        """Send a message: on a touch screen Return inserts a new line."""
        self.write(text)
        if self.is_touch:
            self.reach(button)
        self.press("Enter" if self.is_touch else key)
        self.check(button)

    def stop(self) -> None:
        seen = len(self.chat.ends())
        self.press("Escape")
        assert self.chat.wait_end(seen)["status"] == "cancelled"
        self.check("Stop")


@pytest.mark.parametrize("width", list(SCREENS))
def test_all_actions_work_by_keyboard(width: int, open_page: Any) -> None:
    chat: RecordedPage = open_page(**SCREENS[width])
    page = chat.page
    page.route_web_socket(re.compile("/v1/responses"), pass_endless)
    chat.reload()
    chat.keep_toasts()
    keys = Keys(chat)

    # send, steer, queue, stop
    keys.press("Control+Shift+O")
    keys.send("Tell me a story about an owl")
    chat.until("document.querySelector('.answer .prose')?.textContent.length > 20")
    keys.send("Be brief", "Stop the answer and send")
    page.wait_for_selector(".answer >> nth=1")
    chat.until("[...document.querySelectorAll('.answer .prose')].at(1)?.textContent.length > 20")
    keys.send("And then?", "Queue", "Alt+Enter")
    page.wait_for_selector(".queued-text >> text=And then?")
    keys.stop()
    keys.press("Shift+Escape")
    keys.reach("Remove from the queue", back=True)
    keys.press("Enter")
    page.wait_for_selector(".queued-text", state="detached")
    keys.check("Remove from the queue")

    # edit, versions
    keys.write("")
    keys.press("Delete", "ArrowUp")
    chat.until(f"({FOCUSED}) === 'Edit message'")
    keys.check("Edit")
    keys.press("Escape")
    page.wait_for_selector("[aria-label='Edit message']", state="detached")
    keys.check("Escape in the editor")
    keys.press("Shift+Escape", "ArrowUp", "Control+a")
    keys.type("Be long")
    if keys.is_touch:
        keys.reach("Send")
    keys.press("Enter")
    chat.until("[...document.querySelectorAll('.answer .prose')].at(1)?.textContent.length > 20")
    keys.stop()
    page.wait_for_selector(".user-message .version-position >> text=2/2")
    keys.press("Shift+Escape")
    keys.reach("Previous version", back=True)
    keys.press("Enter")
    page.wait_for_selector(".user-message .version-position >> text=1/2")
    keys.check("Previous version")

    # find, palette, settings, panel, shortcuts
    keys.press("Control+f")
    chat.until(f"({FOCUSED}) === 'Find in this conversation'")
    keys.type("owl")
    page.wait_for_selector(".find-count >> text=1 of")
    keys.check("Find")
    keys.press("Enter", "Escape")
    page.wait_for_selector(".find", state="detached")
    keys.check("closing Find")
    keys.press("Control+k")
    page.wait_for_selector("[role=combobox]")
    keys.type("theme")
    keys.check("the palette")
    keys.press("Escape")
    page.wait_for_selector("[role=combobox]", state="detached")
    keys.check("closing the palette")
    keys.press("Control+,")
    page.wait_for_selector("aside[aria-label=Settings]")
    keys.reach("Beam search")
    keys.press("Escape")
    page.wait_for_selector("aside[aria-label=Settings]", state="detached")
    keys.check("closing the settings")
    keys.press("Alt+Shift+3" if width > 800 else "Control+.")
    page.wait_for_selector("#tab-branches[aria-selected=true]")
    keys.reach("Branches")
    keys.press("Escape")
    page.wait_for_selector(".side-panel", state="detached")
    keys.check("closing the panel")
    keys.press("Control+/")
    page.wait_for_selector("dialog[open]")
    keys.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    keys.check("closing the shortcuts")

    # candidates
    keys.press("Shift+Escape")
    keys.reach("More answers")
    keys.press("Enter")
    keys.send("Tell me a story about a robot")
    chat.until(
        "[...document.querySelectorAll('.card .prose')].filter(each => each.textContent.length > 20).length === 2"
    )
    keys.stop()
    keys.press("Alt+2")
    page.wait_for_selector(".answer .version-position >> text=2/2")
    chat.until("document.querySelector('#status').textContent === 'Picked answer 2.'")
    keys.check("picking")
    keys.press("Alt+ArrowLeft")
    page.wait_for_selector(".answer .version-position >> text=1/2")

    # branch, rename, delete, undo
    owl = page.evaluate("location.hash")
    keys.press("Shift+Escape")
    keys.reach("Actions for the answer", back=True)
    keys.press("Enter")
    chat.until(IN_MENU)
    keys.check("the menu")
    keys.type("b")
    keys.press("Enter")
    chat.until(f"!location.hash.startsWith('{owl}')")
    page.wait_for_selector(".answer-foot")
    keys.check("Branch into a new chat")
    if width < 800:
        keys.press("Control+Shift+S")
        page.wait_for_selector(".app-sidebar")
        keys.check("the list")
    keys.press("Control+Shift+F", "ArrowDown")
    chat.until("document.activeElement.className === 'conversation-open'")
    keys.press("F2")
    chat.until(f"({FOCUSED}) === 'New title'")
    keys.check("Rename")
    keys.press("Control+a")
    keys.type("The owl")
    keys.press("Enter")
    title = page.locator(".conversation-row >> text=The owl")
    title.wait_for()
    chat.until(f"({FOCUSED}).startsWith('The owl')")
    keys.check("renaming")
    keys.press("Delete")
    title.wait_for(state="detached")
    keys.check("Delete")
    keys.reach("Undo")
    keys.press("Enter")
    title.wait_for()
    keys.check("Undo")
    keys.press("Control+Shift+Backspace")
    title.wait_for(state="detached")
    keys.check("deleting the shown chat")
    keys.press("Control+Shift+O")
    page.wait_for_selector(".empty-state")
    keys.check("New chat")


ROW = "document.activeElement.closest('.row')?.querySelector('.user-text, .prose')?.textContent.trim()"


def _act(chat: RecordedPage, button: str, letter: str = "") -> None:
    """Press a button of a message; with `letter` then the entry of its menu."""
    chat.page.focus(button)
    chat.page.keyboard.press("Enter")
    if letter:
        chat.until(IN_MENU)
        chat.page.keyboard.type(letter)
        chat.page.keyboard.press("Enter")


def test_focus_stays_in_the_thread_when_the_focused_message_goes(chat: RecordedPage) -> None:
    page = chat.page
    chat.keep_toasts()
    made = create_conversation(chat.server, ["First question", "First answer", "Second question", "Second answer"])
    page.evaluate("hash => location.hash = hash", made)
    page.wait_for_selector("text=Second answer")

    _act(chat, "[aria-label=Regenerate] >> nth=-1")
    chat.until("document.activeElement.closest('.row')?.matches(':last-child')")
    chat.wait_end(0)
    chat.until(f"({FOCUSED}) === 'Regenerate'")
    assert page.locator(".version-position").inner_text() == "2/2"
    _act(chat, "[aria-label='Previous version']")
    page.wait_for_selector("text=Second answer")
    chat.until(f"({ROW}).includes('Second answer')")
    page.keyboard.press("Tab")
    chat.until(f"({FOCUSED}) === 'Next version'")

    _act(chat, ".user-message .tool-more >> nth=-1", "d")
    page.wait_for_selector("text=Second question", state="detached")
    chat.until(f"({ROW}).includes('Second answer')")  # what follows has its place
    _act(chat, ".toast button >> text=Undo")
    page.wait_for_selector("text=Second question")
    chat.until(f"({ROW}) === 'Second question'")
    _act(chat, ".row:last-child .tool-more", "d")
    page.wait_for_selector(".version-position", state="detached")
    chat.until("document.activeElement.closest('.row')?.matches(':last-child')")  # the other version
    for left in ("Second question", "First answer", "First question"):
        _act(chat, ".row:last-child .tool-more", "d")
        chat.until(f"({ROW}) === '{left}'")
    _act(chat, ".row:last-child .tool-more", "d")
    chat.until("document.activeElement.id === 'composer'")


def test_focus_stays_in_the_list_when_the_focused_conversation_is_deleted(chat: RecordedPage) -> None:
    page = chat.page
    for title in ("Below", "Above"):
        made = create_conversation(chat.server, ["Hello", "Hello."], title=title)
        page.wait_for_selector(f"[data-id={made}]")
    page.focus(".conversation-open:has-text('Above')")
    page.keyboard.press("Delete")
    chat.until(f"({FOCUSED}).startsWith('Below')")


def test_control_z_restores_a_deleted_conversation_with_the_focus(chat: RecordedPage) -> None:
    page = chat.page
    chat.keep_toasts()
    title = f"Kept {secrets.token_hex(4)}"
    made = create_conversation(chat.server, ["Hello", "Hello."], title=title)
    opener = f"[data-id={made}] .conversation-open"
    page.click(opener)
    page.wait_for_selector(".answer")
    for undo in ("Control+z", "Enter"):
        page.focus(opener)
        page.keyboard.press("Delete")
        page.wait_for_selector(opener, state="detached")
        if undo == "Enter":
            page.focus(".toast button >> text=Undo")
        else:
            page.fill("#composer", "Text")
            page.keyboard.press(undo)  # belongs to the text
            assert page.locator(opener).count() == 0
            page.focus(".new-chat")
        page.keyboard.press(undo)
        page.wait_for_selector(opener)
        chat.until(f"({FOCUSED}).startsWith('{title}')")
        assert page.locator(".toast").count() == 0
        page.wait_for_selector(".answer")


def test_control_z_in_the_empty_message_box_restores_the_deleted_conversation(chat: RecordedPage) -> None:
    page = chat.page
    chat.keep_toasts()
    made = create_conversation(chat.server, ["Hello", "Hello."])
    page.evaluate("hash => location.hash = hash", made)
    page.wait_for_selector(".answer")
    page.keyboard.press("Control+Shift+Backspace")
    page.wait_for_selector(".empty-state")
    chat.until("document.activeElement.id === 'composer'")
    page.keyboard.press("Control+z")
    page.wait_for_selector(".answer")
    assert page.evaluate("location.hash.slice(1)") == made


def test_toast_with_an_action_stays_while_it_has_the_focus(chat: RecordedPage) -> None:
    page = chat.page
    page.clock.install()
    chat.reload()
    made = create_conversation(chat.server, ["Hello", "Hello."])
    page.evaluate("hash => location.hash = hash", made)
    page.wait_for_selector(".answer")
    page.keyboard.press("Control+Shift+Backspace")
    undo = page.locator(".toast button >> text=Undo")
    undo.focus()
    page.clock.run_for(60_000)
    undo.click()
    page.wait_for_selector(".answer")


def test_escape_closes_only_the_top_layer(chat: RecordedPage) -> None:
    page = chat.page
    page.keyboard.press("Alt+Shift+4")
    page.wait_for_selector("#tab-pages[aria-selected=true]")
    page.keyboard.press("Control+/")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert page.locator("#tab-pages[aria-selected=true]").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_selector(".side-panel", state="detached")

    page.click("[aria-label=Settings]")
    page.click("button:text('Administration')")
    page.wait_for_selector("dialog.administration[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    chat.until(f"({FOCUSED}) === 'Administration'")
    page.click("[aria-label='Close settings']")
    page.wait_for_selector("aside[aria-label=Settings]", state="detached")
    chat.until("document.activeElement.id === 'composer'")

    page.set_viewport_size({"width": 700, "height": 800})
    if page.locator(".app-sidebar").count() == 0:
        page.click("[aria-label='Show the list']")
    page.wait_for_selector(".app-sidebar")
    page.click(".sidebar-foot [aria-label='Keyboard shortcuts']")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert page.locator(".app-sidebar").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_selector(".app-sidebar", state="detached")


ACTIVE = """(() => {
  const id = document.activeElement.getAttribute('aria-activedescendant');
  return document.getElementById(id)?.querySelector('.palette-label').textContent ?? null;
})()"""
FINDS = "[role=combobox]"


def _labels(chat: RecordedPage, group: str = "") -> list[str]:
    """Names of the options in the command palette."""
    within = f"[role=group][aria-label={group}] " if group else ""
    texts: list[str] = chat.page.locator(f"{within}[role=option] .palette-label").all_inner_texts()
    return texts


def test_palette_finds_commands_by_their_letters(chat: RecordedPage) -> None:
    page = chat.page
    chat.until("document.activeElement.id === 'composer'")
    page.keyboard.press("Control+k")
    page.wait_for_selector(FINDS)
    chat.until(f"{ACTIVE} === 'New chat'")
    assert not {"Stop the answer", "Share a link to this branch", "Sign out"} & set(_labels(chat)), "cannot be used now"
    page.keyboard.press("ArrowUp")  # around
    assert page.evaluate(ACTIVE) == _labels(chat)[-1]
    page.keyboard.press("ArrowDown")
    assert page.evaluate(ACTIVE) == "New chat"
    page.keyboard.press("ArrowDown")
    second = page.evaluate(ACTIVE)
    assert second == _labels(chat)[1]
    assert page.locator("[role=option][aria-selected=true] .palette-label").all_inner_texts() == [second]

    page.keyboard.type("the dark")
    chat.until(f"{ACTIVE} === 'Dark theme'")
    page.keyboard.press("Escape")
    page.wait_for_selector(FINDS, state="detached")
    chat.until("document.activeElement.id === 'composer'")  # the focus has returned
    assert page.evaluate("document.documentElement.dataset.theme") is None
    page.keyboard.press("Control+k")
    page.wait_for_selector(FINDS)
    page.keyboard.type("the dark")
    page.keyboard.press("Enter")
    chat.until("document.documentElement.dataset.theme === 'dark'")
    page.wait_for_selector(FINDS, state="detached")

    page.keyboard.press("Meta+k")
    page.wait_for_selector(FINDS)
    page.keyboard.type("stngs")
    chat.until(f"{ACTIVE} === 'Settings'")
    page.evaluate("window.former = document.querySelector('dialog')")
    page.keyboard.press("Control+k")  # closes it again
    page.wait_for_selector(FINDS, state="detached")
    page.keyboard.press("Control+k")
    page.wait_for_selector(FINDS)
    page.evaluate("window.former.dispatchEvent(new Event('close'))")  # a busy browser reports the former one late
    page.wait_for_timeout(100)
    assert page.locator(FINDS).count() == 1
    page.keyboard.press("Alt+Shift+3")  # the key of a command works here too
    page.wait_for_selector("#tab-branches[aria-selected=true]")
    page.wait_for_selector(FINDS, state="detached")


def test_palette_opens_conversations_and_searches_messages(chat: RecordedPage, server: str) -> None:
    page = chat.page
    word = f"marmot{secrets.token_hex(3)}"
    made = create_conversation(server, ["Who whistles?", f"The {word}."], title=f"Whistling {word}")
    chat.reload()
    page.wait_for_selector(f"[data-id={made}]")
    page.keyboard.press("Control+k")
    page.wait_for_selector(FINDS)
    page.keyboard.type(f"{word} whist")
    chat.until(f"{ACTIVE} === 'Whistling {word}'")
    assert _labels(chat, "Conversations") == [f"Whistling {word}"]
    page.keyboard.press("Enter")
    page.wait_for_selector(f".answer .prose >> text={word}")
    assert page.evaluate("location.hash.slice(1)") == made

    page.keyboard.press("Control+Shift+S")  # the list is hidden
    page.keyboard.press("Control+k")
    page.wait_for_selector(FINDS)
    page.keyboard.type(word)
    chat.until(f"{ACTIVE} !== null && document.activeElement.value === '{word}'")
    page.click(f"text=Search messages for “{word}”")
    page.wait_for_selector(".search-hit mark")
    chat.until(f"document.activeElement.id === 'find' && document.activeElement.value === '{word}'")


def test_palette_offers_what_can_be_done_now(chat: RecordedPage, endless: None) -> None:
    page = chat.page
    chat.reload()
    chat.say("Tell me a story about an owl")
    page.wait_for_selector(".answer .prose:not(:empty)")
    page.keyboard.press("Control+k")
    page.wait_for_selector(FINDS)
    page.keyboard.press("Escape")
    page.wait_for_selector(FINDS, state="detached")
    assert chat.ends() == [], "Escape closes the palette only"
    page.keyboard.press("Control+k")
    page.wait_for_selector(FINDS)
    assert {"Stop the answer", "Share a link to this branch"} <= set(_labels(chat))
    assert "Regenerate the last answer" not in _labels(chat)
    page.keyboard.type("stop")
    chat.until(f"{ACTIVE} === 'Stop the answer'")
    page.keyboard.press("Enter")
    assert chat.wait_end(0)["status"] == "cancelled"
    page.keyboard.press("Control+k")
    page.wait_for_selector(FINDS)
    assert "Regenerate the last answer" in _labels(chat) and "Stop the answer" not in _labels(chat)
    with page.expect_download() as download:
        page.keyboard.type("export markdown")
        page.keyboard.press("Enter")
    assert download.value.suggested_filename.endswith(".md")


def test_focus_is_kept_among_many_messages(chat: RecordedPage, server: str) -> None:
    """Tab moves through a mostly virtual thread; each focused element is visible on the screen."""
    made = create_conversation(server, ["Hi", "Hello there, [a link](https://example.com)."] * 60)
    chat.page.evaluate("hash => location.hash = hash", made)
    chat.page.wait_for_selector(".row")
    chat.page.focus("#composer")
    stops: list[Any] = []
    for _ in range(40):
        chat.page.keyboard.press("Shift+Tab")
        stops.append(
            chat.page.evaluate(
                """(() => {
                  const row = document.activeElement.closest('.row');
                  const at = document.activeElement.getBoundingClientRect();
                  return row && [Number(row.ariaPosInSet), at.top >= 0 && at.bottom <= innerHeight];
                })()"""
            )
        )
    rows = [stop for stop in stops if stop]
    assert len(rows) > 30
    assert all(seen for _, seen in rows)
    places = [place for place, _ in rows]
    assert places == sorted(places, reverse=True) and places[0] == 120 and places[-1] < 115

    held = chat.page.evaluate_handle("document.activeElement")
    chat.page.mouse.move(640, 300)
    for _ in range(8):
        chat.page.mouse.wheel(0, -700)
        chat.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    chat.until(f"Number(document.querySelector('.row:nth-child(3)').ariaPosInSet) < {places[-1] - 30}")
    assert held.evaluate("element => element === document.activeElement"), "removed while it had the focus"


def _reach(chat: RecordedPage, label: str, back: bool = False) -> None:
    """Press Tab until the label of the focused element starts with `label`."""
    for _ in range(150):
        chat.page.keyboard.press("Shift+Tab" if back else "Tab")
        if str(chat.page.evaluate(FOCUSED)).startswith(label):
            return
    raise AssertionError(f"Tab does not reach {label!r}")
