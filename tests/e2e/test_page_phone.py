"""Test the page as an app on a phone: layout, installation, offline reading and read-aloud."""

from __future__ import annotations

import functools
import http.server
import itertools
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BUILT_PAGE
from tests.e2e.page_checks import SMALL
from tests.e2e.recorded_page import TIMEOUT_MS, RecordedPage, pass_endless
from tests.e2e.requirements import require
from tests.e2e.rest_client import create_conversation
from tests.gateway.keyed import Keyed, keyed

pytestmark = pytest.mark.slow

SHELLS = "caches.keys().then(names => names.filter(name => name.startsWith('chatcache-shell')))"
# Addresses of the copies of conversations in the browser.
COPIES = """caches.keys().then(names => Promise.all(names.filter(name => name.startsWith('chatcache-copies'))
  .map(name => caches.open(name).then(cache => cache.keys())))).then(lists => lists.flat().map(({url}) => url))"""


SETTINGS = "aside[aria-label=Settings]"
COVERS = {
    "settings": ("[aria-label=Settings]", SETTINGS, "[aria-label='Close settings']"),
    "panel": ("[aria-label=Panel]", ".side-panel .tabs", "[aria-label='Close the panel']"),
    "list": ("[aria-label='Show the list']", ".app-sidebar", ".sidebar-close"),
}


@pytest.mark.parametrize("cover", list(COVERS))
def test_back_on_a_phone_closes_what_covers_the_chat(cover: str, open_page: Any) -> None:
    chat = _phone(open_page)
    page = chat.page
    opener, covering, closer = COVERS[cover]
    for name in ("first", "second"):
        page.evaluate("hash => location.hash = hash", create_conversation(chat.server, ["Name", f"The {name} one"]))
        page.wait_for_selector(f"text=The {name} one")
    page.tap(opener)
    page.wait_for_selector(covering)
    page.go_back()
    page.wait_for_selector(covering, state="detached")
    assert chat.answers() == ["The second one"]
    page.go_forward()
    page.wait_for_selector(covering)
    assert chat.answers() == ["The second one"]
    page.tap(closer)  # its entry is left, too
    page.wait_for_selector(covering, state="detached")
    chat.until("!history.state?.cover")
    page.go_back()
    page.wait_for_selector("text=The first one")
    page.go_forward()
    page.wait_for_selector("text=The second one")
    assert page.locator(covering).count() == 0


def test_back_after_a_choice_from_the_list_returns_to_the_chat_before(open_page: Any) -> None:
    chat = _phone(open_page)
    page = chat.page
    made = [create_conversation(chat.server, ["Name", f"The {name} one"]) for name in ("first", "second")]
    page.evaluate("hash => location.hash = hash", made[0])
    page.wait_for_selector("text=The first one")
    page.tap("[aria-label='Show the list']")
    page.tap(f"[data-id={made[1]}] .conversation-open")
    page.wait_for_selector("text=The second one")
    page.wait_for_selector(".app-sidebar", state="detached")
    page.go_back()
    page.wait_for_selector("text=The first one")
    assert page.locator(".app-sidebar").count() == 0


def test_back_closes_settings_that_were_opened_before_the_chat_had_an_address(open_page: Any) -> None:
    chat = _phone(open_page)
    chat.page.fill("#composer", "Hello")
    chat.page.evaluate(
        "() => { for (const name of ['Send', 'Settings']) document.querySelector(`[aria-label=${name}]`).click(); }"
    )
    chat.page.wait_for_selector(SETTINGS)
    chat.until("location.hash !== ''")
    chat.page.go_back()
    chat.page.wait_for_selector(SETTINGS, state="detached")
    chat.wait_end(0)
    assert chat.said() == ["Hello"] and chat.page.evaluate("location.hash") != ""


# Of an element: its top and bottom, next to those of the area that scrolls the messages.
PLACE = """selector => {
  const [found, area] = [selector, '.thread-scroll'].map(each => document.querySelector(each).getBoundingClientRect());
  return {top: found.top - area.top, bottom: area.bottom - found.bottom, height: found.height, area: area.height};
}"""


def _show_answer(chat: RecordedPage, num_sentences: int) -> None:
    made = create_conversation(chat.server, ["Question", "Some words of an answer. " * num_sentences])
    chat.page.evaluate("hash => location.hash = hash", made)
    chat.page.wait_for_selector(".answer-foot")


def _answer_menu(chat: RecordedPage, entry: str) -> None:
    chat.page.tap("[aria-label='Actions for the answer']")
    chat.page.tap(f".menu:popover-open >> text={entry}")


@pytest.mark.parametrize("width", [320, 390])
def test_compare_form_on_a_phone_opens_from_its_top(width: int, open_page: Any) -> None:
    chat = _phone(open_page, width)
    _show_answer(chat, 60)
    _answer_menu(chat, "Compare settings…")
    chat.page.wait_for_selector(".compare-form")
    chat.page.wait_for_timeout(300)  # late changes of the layout
    assert 0 <= chat.page.evaluate(PLACE, ".compare-form")["top"] < 40
    assert chat.page.evaluate("document.documentElement.scrollWidth") == width


def test_answer_editor_on_a_phone_takes_most_of_the_height(open_page: Any) -> None:
    chat = _phone(open_page)
    _show_answer(chat, 12)
    _answer_menu(chat, "Edit")
    chat.page.wait_for_selector(".user-editor")
    chat.page.wait_for_timeout(300)  # late changes of the layout
    editor = chat.page.evaluate(PLACE, ".user-editor")
    assert editor["top"] >= 0 and editor["bottom"] >= 0
    assert chat.page.evaluate(PLACE, ".user-editor textarea")["height"] > 0.6 * editor["area"]


def test_settings_on_a_phone_keep_their_head_and_labels_near_their_controls(open_page: Any) -> None:
    chat = _phone(open_page)
    chat.page.tap("[aria-label=Settings]")
    chat.page.wait_for_selector(SETTINGS)
    gaps = chat.page.evaluate(
        """() => {
          const fields = [...document.querySelectorAll('aside .slider')].filter(field => field.checkVisibility());
          const boxes = fields.map(field => ['.field-label', 'input'].map(
            part => field.querySelector(part).getBoundingClientRect()));
          const middle = ({top, bottom}) => (top + bottom) / 2;
          return boxes.map(([label, slider], place) => ({
            own: middle(slider) - label.bottom,
            other: place ? label.top - middle(boxes[place - 1][1]) : Infinity,
          }));
        }"""
    )
    assert len(gaps) >= 3 and all(gap["own"] < 0.8 * gap["other"] for gap in gaps)
    chat.page.evaluate("document.querySelector('aside.panel').scrollTop = 400")
    head = "document.querySelector('aside.panel .panel-head').getBoundingClientRect()"
    assert chat.page.evaluate(f"{head}.top") == 0, "nothing shows above it"
    chat.page.tap("[aria-label='Close settings']")
    chat.page.wait_for_selector(SETTINGS, state="detached")
    chat.until("document.activeElement.ariaLabel === 'Settings'")  # not in the message box
    chat.page.tap("[aria-label=Settings]")
    chat.page.wait_for_selector(SETTINGS)
    chat.page.evaluate("document.querySelector('aside.panel').scrollTop = 1e6")
    top = chat.page.evaluate("document.querySelector('[aria-label=\"Close settings\"]').getBoundingClientRect().top")
    assert 0 <= top < 40


def test_keyboard_of_a_phone_opens_only_when_it_is_wanted(open_page: Any) -> None:
    chat = _phone(open_page)
    page = chat.page
    active = "document.activeElement.localName"
    _show_answer(chat, 60)
    assert page.evaluate(active) != "textarea"
    page.tap("[aria-label=Panel]")
    page.tap("[aria-label='Close the panel']")
    page.tap("[aria-label='New chat']")
    page.wait_for_selector(".empty-state")
    page.wait_for_timeout(300)
    assert page.evaluate(active) != "textarea"
    page.tap("#composer")
    assert page.evaluate(active) == "textarea"


def test_messages_of_a_phone_have_no_focus_frame_at_load(open_page: Any) -> None:
    chat = _phone(open_page)
    framed = "document.querySelector('.thread-scroll').matches(':focus-visible')"
    assert not chat.page.evaluate(framed)
    chat.page.goto(f"{chat.server}/#{create_conversation(chat.server, ['Question', 'Answer'])}")
    chat.reload()
    chat.page.wait_for_selector(".answer-foot")
    assert not chat.page.evaluate(framed)
    chat.page.keyboard.press("Tab")
    chat.page.focus(".thread-scroll")
    assert chat.page.evaluate(framed), "a key moved the focus"


# Of the buttons below the message box: the height of each one's middle, and the places of Stop and the right end.
FOOT = """(() => {
  const foot = document.querySelector('.composer-foot');
  const boxes = [...foot.querySelectorAll('button')].map(button => button.getBoundingClientRect());
  const last = foot.querySelector('.send:last-child').getBoundingClientRect();
  return {
    rows: new Set(boxes.map(({top, bottom}) => Math.round((top + bottom) / 2))).size,
    last: [last.left, last.top],
    space: foot.getBoundingClientRect().right - last.right,
    height: foot.offsetHeight,
  };
})()"""


@pytest.mark.parametrize("width", [320, 390])
def test_composer_on_a_phone_keeps_its_buttons_in_one_row(width: int, open_page: Any) -> None:
    chat = _phone(open_page, width)
    page = chat.page
    page.add_init_script(FAKE_RECOGNITION)
    page.route_web_socket(re.compile("/v1/responses"), pass_endless)
    chat.reload()
    page.wait_for_selector("[aria-label='Voice input']")
    seen = [page.evaluate(FOOT)]
    chat.say("Hello")
    page.wait_for_selector(".composer [aria-label=Stop]")
    page.wait_for_selector(".meter")
    page.hover(".composer [aria-label=Stop]")  # as a phone does where the finger was last
    seen.append(page.evaluate(FOOT))
    page.fill("#composer", "More")
    page.wait_for_selector(".composer [aria-label=Queue]")
    seen.append(page.evaluate(FOOT))
    assert page.evaluate(SMALL) == []
    page.tap(".composer [aria-label=Stop]")
    page.wait_for_selector(".composer [aria-label=Send]")
    page.fill("#composer", "")
    seen.append(page.evaluate(FOOT))
    assert seen[0]["rows"] == 1 and seen[0]["space"] < 1 and seen[1:] == seen[:1] * 3
    assert page.evaluate("document.documentElement.scrollWidth") == width
    send = page.locator(".composer .send").bounding_box()
    assert send["width"] == pytest.approx(send["height"])
    page.tap(".composer [aria-label='More answers']")  # in the part that scrolls
    assert page.inner_text(".answer-count") == "2 answers"


def test_composer_leaves_room_for_the_chat_above_the_keyboard_of_a_phone(open_page: Any) -> None:
    chat = _phone(open_page)
    chat.page.set_viewport_size({"width": 390, "height": 300})
    chat.page.fill("#composer", "A line\n" * 12)
    assert chat.page.evaluate("document.querySelector('.composer-area').offsetHeight") < 150


def test_return_key_of_a_phone_inserts_a_new_line(open_page: Any) -> None:
    chat = _phone(open_page)
    chat.page.focus("#composer")
    chat.page.keyboard.type("One")
    chat.page.keyboard.press("Enter")
    chat.page.keyboard.type("Two")
    assert chat.page.input_value("#composer") == "One\nTwo" and chat.said() == []
    chat.page.tap("[aria-label=Send]")
    chat.wait_end(0)
    assert chat.said() == ["One\nTwo"]


# Rectangles of the texts of the tabs: one for each line.
TABS = """[...document.querySelectorAll('.tabs [role=tab]')].flatMap(tab => {
  const range = new Range();
  range.selectNodeContents(tab);
  return [...range.getClientRects()].map(({left, right}) => [left, right]);
})"""


def test_tabs_of_the_panel_have_gaps_on_a_small_phone(open_page: Any) -> None:
    chat = _phone(open_page, 320)
    chat.page.tap("[aria-label=Panel]")
    chat.page.wait_for_selector(".side-panel .tabs")
    lines = chat.page.evaluate(TABS)
    assert len(lines) == 4, "a name has two lines"
    assert all(next_left - right >= 8 for (_, right), (next_left, _) in itertools.pairwise(lines))
    closer = chat.page.locator("[aria-label='Close the panel']").bounding_box()
    assert lines[-1][1] <= closer["x"]


CHIPS = """[...document.querySelectorAll('.attachment')].map(chip => {
  const [icon, text, remove] = [...chip.children].map(part => part.getBoundingClientRect());
  return icon.right <= text.left && text.right <= remove.left && text.top < icon.bottom && icon.top < text.bottom
    && text.top < remove.bottom && remove.top < text.bottom;
})"""


def test_file_of_a_message_on_a_phone_is_one_row(open_page: Any) -> None:
    chat = _phone(open_page, 320)
    chat.expected_errors += 1  # the refused picture
    chat.drop(
        ".thread", [("notes-of-a-long-meeting.txt", b"The dragon sleeps. " * 40), ("picture" * 9 + ".png", b"\0")]
    )
    chat.until("document.querySelectorAll('.attachment:not(.attachment-reading)').length === 2")
    assert chat.page.evaluate(CHIPS) == [True, True]
    assert chat.page.evaluate("document.documentElement.scrollWidth") == 320


def test_manifest_makes_the_page_installable(chat: RecordedPage) -> None:
    wire = chat.context.new_cdp_session(chat.page)
    found = wire.send("Page.getAppManifest")
    assert found["errors"] == [] and found["url"].endswith("/manifest.webmanifest")
    manifest = json.loads(found["data"])
    assert manifest["display"] == "standalone" and manifest["start_url"] == "./"
    for icon in manifest["icons"]:
        assert chat.page.request.get(f"{chat.server}/{icon['src']}").headers["content-type"] == icon["type"]


@pytest.fixture
def installed(open_page: Any) -> RecordedPage:
    """A page whose service worker has stored the files of the build."""
    chat = _phone(open_page, service_workers="allow")
    chat.page.evaluate("navigator.serviceWorker.ready.then(() => true)")
    chat.until("navigator.serviceWorker.controller !== null")
    return chat


def test_offline_page_opens_and_the_last_chats_can_be_read(installed: RecordedPage) -> None:
    chat = installed
    chat.ask("Tell me a story about an owl")
    answers, said = chat.answers(), chat.said()
    address = chat.page.url
    stored = create_conversation(chat.server, ["An earlier question", "An *earlier* answer"], title="Earlier")
    chat.page.evaluate("hash => location.hash = hash", stored)
    chat.page.wait_for_selector(".prose em")
    chat.until(f"{COPIES}.then(names => names.some(name => name.endsWith('{stored}')))")
    chat.until("caches.match('copies/list').then(found => found.text()).then(text => text.includes('Earlier'))")

    chat.context.set_offline(True)
    chat.page.wait_for_selector("text=You are offline.")
    chat.page.goto(address)
    chat.page.reload()  # some versions of Chromium report navigator.onLine as true from here on
    chat.page.wait_for_selector(".answer .prose:not(:empty)")
    assert chat.answers() == answers and chat.said() == said
    assert chat.page.locator("[aria-label=Send]").is_disabled()
    chat.page.tap("[aria-label='Show the list']")
    chat.page.tap("text=Earlier")
    chat.page.wait_for_selector(".prose em")
    chat.page.wait_for_selector("text=reconnects automatically")
    chat.ignore_problems()

    chat.context.set_offline(False)
    chat.page.wait_for_selector(".sidebar .dot-on", state="attached")
    chat.page.wait_for_selector("text=reconnects automatically", state="detached")
    chat.ask("And another one")
    assert chat.said() == ["An earlier question", "And another one"]
    chat.ignore_problems()


def test_deleted_conversation_is_not_readable_offline(installed: RecordedPage) -> None:
    chat = installed
    made = create_conversation(chat.server, ["Delete me", "Soon"], title="Gone")
    chat.page.evaluate("hash => location.hash = hash", made)
    chat.page.wait_for_selector(".answer .prose:not(:empty)")
    chat.until(f"{COPIES}.then(names => names.some(name => name.endsWith('{made}')))")
    chat.page.request.delete(f"{chat.server}/v1/conversations/{made}")
    chat.until(f"{COPIES}.then(names => !names.some(name => name.endsWith('{made}')))")
    chat.ignore_problems()  # the page may have read the conversation after its deletion: 404


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server of the built page alone, and the link to its folder, to change the build."""
    require(BUILT_PAGE.is_file(), "the built page", "make web")
    shutil.copytree(BUILT_PAGE.parent, tmp_path / "first")
    folder = tmp_path / "site"
    folder.symlink_to("first")
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_new_build_replaces_the_stored_one(site: tuple[str, Path], browser: Any) -> None:
    url, folder = site
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.evaluate("navigator.serviceWorker.ready.then(() => true)")  # all files are stored
    before = page.evaluate(SHELLS)
    assert len(before) == 1
    page.reload()

    _new_build(folder)
    page.reload()
    described = page.locator("meta[name=description]")
    assert described.get_attribute("content") == "second build"  # at once, not at the visit after
    _until(page, f"{SHELLS}.then(names => names.length === 1 && names[0] !== {json.dumps(before[0])})")
    context.set_offline(True)
    page.reload()
    page.wait_for_selector("#composer")
    assert described.get_attribute("content") == "second build"
    context.close()


def _new_build(site: Path) -> None:
    """Serve another build: a page with another text and entry file, without the files of the first.

    The browser checks the service worker for updates whenever it likes, so the builds are exchanged in one operation.
    """
    folder = site.with_name("second")
    shutil.copytree(site, folder)
    index, worker = folder / "index.html", folder / "sw.js"
    entry = re.search(r"assets/index-[\w-]+\.js", index.read_text())
    assert entry is not None
    renamed = "assets/index-second.js"
    (folder / entry[0]).rename(folder / renamed)
    for each in (index, worker):
        each.write_text(each.read_text().replace(entry[0], renamed))
    for each in folder.glob("assets/*.js"):
        each.write_text(each.read_text().replace(Path(entry[0]).name, "index-second.js"))
    index.write_text(index.read_text().replace("Chat with shared KV pages", "second build"))
    worker.write_text(re.sub(r'"version":"\w+"', '"version":"second"', worker.read_text()))
    link = site.with_name("link")
    link.symlink_to(folder.name)
    link.replace(site)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    require(BUILT_PAGE.is_file(), "the built page", "make web")
    with keyed(tmp_path_factory.mktemp("keys"), sse_keep_alive_interval_s=15) as keys:
        yield keys


def test_nothing_of_a_user_is_left_after_the_sign_out(keys: Keyed, browser: Any) -> None:
    visitor = RecordedPage(browser.new_context(), keys.server.url)
    page = visitor.page
    page.goto(keys.server.url)
    page.fill("input[name=key]", keys.bob.key)
    page.click("text=Sign in")
    visitor.connected()
    visitor.ask("My secret is a marmot")
    page.fill("#composer", "an unsent marmot")
    address = page.url
    visitor.until(f"{COPIES}.then(names => names.length >= 3)")
    visitor.until("JSON.stringify({...localStorage}).includes('unsent marmot')")
    second = visitor.context.new_page()
    second.goto(address)
    second.wait_for_selector("text=My secret is a marmot")

    page.click("[aria-label=Settings]")
    page.click("text=Sign out")
    page.wait_for_selector("input[name=key]")
    second.wait_for_selector("input[name=key]")  # in every tab
    for each in (page, second):
        assert "marmot" not in each.content() and each.input_value("#composer") == ""
    visitor.until(f"{COPIES}.then(names => names.length === 0)")
    assert "marmot" not in page.evaluate("JSON.stringify({...localStorage})")
    second.close()
    visitor.context.set_offline(True)
    page.goto(address)
    page.reload()
    page.wait_for_selector("#composer")
    page.wait_for_timeout(500)
    assert "marmot" not in page.content() and page.input_value("#composer") == ""
    visitor.context.close()


FAKE_SPEECH = """
window.spoken = [];
Object.defineProperty(window, 'speechSynthesis', {value: {
  speak: utterance => { spoken.push(utterance.text); window.lastUtterance = utterance; },
  cancel: () => spoken.push('(cancel)'),
}});
window.SpeechSynthesisUtterance = class { constructor(text) { this.text = text; } };
"""
NO_SPEECH = """
delete window.speechSynthesis;
delete Window.prototype.speechSynthesis;
"""


def test_answer_is_read_aloud_without_its_code(chat: RecordedPage) -> None:
    chat.page.add_init_script(FAKE_SPEECH)
    chat.reload()
    made = create_conversation(chat.server, ["Read", "# Title\n\nOne *two*.\n\n- a\n  - b\n\n```\ncode\n```\n\nEnd."])
    chat.page.evaluate("hash => location.hash = hash", made)
    chat.page.wait_for_selector(".prose em")
    chat.page.click("[aria-label='Read aloud']")
    assert chat.page.evaluate("spoken") == ["(cancel)", "Title", "One two.", "a", "b", "End."]
    chat.page.click("[aria-label='Stop reading']")
    assert chat.page.evaluate("spoken.at(-1)") == "(cancel)"
    chat.page.click("[aria-label='Read aloud']")
    chat.page.evaluate("lastUtterance.onend()")
    chat.page.wait_for_selector("[aria-label='Read aloud']")
    chat.page.click("[aria-label='Read aloud']")
    before = chat.page.evaluate("spoken.length")
    chat.page.keyboard.press("Control+Shift+O")  # another conversation
    chat.until(f"spoken.length === {before + 1} && spoken.at(-1) === '(cancel)'")


def test_browser_without_speech_shows_no_read_aloud_button(chat: RecordedPage) -> None:
    chat.page.add_init_script(NO_SPEECH)
    chat.reload()
    chat.ask("Hello")
    chat.page.wait_for_selector("[aria-label='Copy answer']")
    assert chat.page.locator("[aria-label='Read aloud']").count() == 0


FAKE_RECOGNITION = """
window.SpeechRecognition = class {
  constructor() { window.recognition = this; }
  start() {}
  stop() { this.onend(); }
  abort() {}
};
window.recognise = (...phrases) => recognition.onresult({resultIndex: 0, results: phrases.map(
  ([transcript, isFinal]) => Object.assign([{transcript}], {isFinal})).filter(
  ({isFinal}) => isFinal || recognition.interimResults)});
"""


def test_words_are_shown_while_they_are_spoken_and_replaced_by_the_final_ones(open_page: Any) -> None:
    chat = _phone(open_page, 320)
    page = chat.page
    page.add_init_script(FAKE_RECOGNITION)
    chat.reload()
    page.tap("[aria-label='Voice input']")
    chat.until("!!window.recognition?.onresult")
    page.evaluate("recognise(['wreck a nice', false])")
    page.wait_for_selector(".voice-interim >> text=wreck a nice")
    assert page.input_value("#composer") == ""
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    assert page.is_enabled("[aria-label='Stop voice input']")
    page.evaluate("recognise(['Recognise speech', true])")
    page.wait_for_selector(".voice-interim", state="detached")
    chat.until("document.querySelector('#composer').value === 'Recognise speech'")
    page.evaluate("recognise(['and so', false])")
    page.wait_for_selector(".voice-interim >> text=and so")
    page.click("[aria-label=Send]")
    page.wait_for_selector(".voice-interim", state="detached")
    chat.wait_end(0)
    assert chat.said() == ["Recognise speech"]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def _until(page: Any, expression: str) -> None:
    for _ in range(TIMEOUT_MS // 50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


def _phone(open_page: Any, width: int = 390, **options: Any) -> RecordedPage:
    chat: RecordedPage = open_page(
        viewport={"width": width, "height": 844}, is_mobile=True, has_touch=True, reduced_motion="reduce", **options
    )
    return chat
