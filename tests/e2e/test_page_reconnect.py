"""Test that no stream is lost: reload, second tab, cut connection, no network, killed engine."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recorded_page import RecordedPage, endless_create, pass_endless, stores_active_leaf

pytestmark = pytest.mark.slow

WRITTEN = "(document.querySelector('.answer .prose')?.textContent.length ?? 0)"


def items_of(chat: RecordedPage, conversation: str) -> list[dict[str, Any]]:
    """Return the stored items of all branches."""
    found: list[dict[str, Any]] = chat.page.request.get(
        f"{chat.server}/v1/conversations/{conversation}/items?branches=all"
    ).json()["data"]
    return found


def conversation_of(chat: RecordedPage) -> str:
    return str(chat.page.evaluate("location.hash.slice(1)"))


def letters(text: str) -> str:
    """Letters and digits only, which markdown and line breaks do not change."""
    return "".join(re.findall(r"\w", text))


def assert_as_stored(chat: RecordedPage, midway: str = "") -> None:
    """Check that every shown reply equals a stored one, which excludes gaps and repeats.

    `midway`: text of the first reply during generation; the final text may hide an earlier error.
    """
    stored = [letters(item["content"][0]["text"]) for item in items_of(chat, conversation_of(chat))]
    answers = [letters(text) for text in chat.answers()]
    assert answers and all(answer in stored for answer in answers)
    assert answers[0].startswith(letters(midway))


def begin(chat: RecordedPage, text: str = "Tell me a story about a dragon") -> None:
    """Start a reply that continues until it is stopped."""
    chat.say(text)
    chat.until(f"{WRITTEN} > 40")


def stop(chat: RecordedPage) -> None:
    chat.page.click("button[aria-label=Stop]")
    chat.page.wait_for_selector(".answer[data-status=stopped]")
    chat.page.wait_for_selector("button[aria-label=Send]")


def test_reload_during_a_reply_continues_the_stream(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    begin(chat)
    before = chat.answers()[0]
    chat.reload()
    chat.page.wait_for_selector(".answer[data-status=streaming]")
    chat.until(f"{WRITTEN} > {len(before) + 40}")
    assert letters(chat.answers()[0]).startswith(letters(before))
    assert chat.page.locator("text=No answer is stored").count() == 0
    asked = [frame["type"] for frame in chat.received].count("response.created")
    assert asked == 2, "the same response, once before the reload and once after"
    midway = chat.answers()[0]
    stop(chat)
    assert len(items_of(chat, conversation_of(chat))) == 2
    assert_as_stored(chat, midway)


def test_reload_during_candidates_and_a_regenerated_reply_continues(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    chat.page.click("[aria-label='More answers']")
    chat.say("Tell me a story about a fox")
    cards = "[...document.querySelectorAll('.card .prose')]"
    chat.until(f"{cards}.length === 2 && {cards}.every(card => card.textContent.length > 40)")
    chat.reload()
    chat.until(f"{cards}.length === 2 && {cards}.every(card => card.textContent.length > 40)")
    chat.page.click("button[aria-label=Stop]")
    chat.page.wait_for_selector("button[aria-label=Send]")
    chat.page.keyboard.press("Alt+2")
    chat.page.click("[aria-label='Fewer answers']")
    chat.page.click(".tool-regenerate")
    chat.page.wait_for_selector(".answer[data-status=streaming]")
    chat.until(f"{WRITTEN} > 40")
    chat.reload()
    chat.page.wait_for_selector(".answer[data-status=streaming]")
    assert chat.page.locator("[aria-label='Version 3 of 3']").count() == 0  # shown when the reply is complete
    chat.until(f"{WRITTEN} > 40")
    stop(chat)
    assert chat.page.locator(".answer .version-position").inner_text() == "3/3"
    assert_as_stored(chat)


def test_two_tabs_show_one_conversation_live(open_page: Any) -> None:
    """Replies, stops, picks, titles and deletions of one tab appear in the other."""
    first: RecordedPage = open_page()
    first.page.route_web_socket(re.compile("/v1/responses"), pass_endless)
    first.reload()
    begin(first)
    second: RecordedPage = open_page(f"/#{conversation_of(first)}")
    second.page.wait_for_selector(".answer[data-status=streaming]")
    second.until(f"{WRITTEN} > {len(first.answers()[0])}")
    stop(second)  # either tab can stop it
    first.page.wait_for_selector(".answer[data-status=stopped]")
    first.page.wait_for_selector("button[aria-label=Send]")  # the text ends before the response
    assert first.answers() == second.answers()
    assert_as_stored(first)

    first.page.click("[aria-label='More answers']")
    first.say("Another one")
    cards = "document.querySelectorAll('.card .prose').length"
    second.until(f"{cards} === 2")
    assert second.said() == first.said()
    stop_all = "button[aria-label=Stop]"
    first.page.click(stop_all)
    for tab in (first, second):
        tab.page.wait_for_selector("button[aria-label=Send]")
    texts = second.page.locator(".card .prose").all_inner_texts()
    first.page.keyboard.press("Alt+2")
    second.page.wait_for_selector(".version-position >> text=2/2")
    assert second.answers()[-1] == first.answers()[-1] == texts[1]

    name = f"Shared {secrets.token_hex(4)}"
    first.page.locator(".conversation-row-current .conversation-open").focus()
    first.page.keyboard.press("F2")
    first.page.fill("[aria-label='New title']", name)
    first.page.keyboard.press("Enter")
    second.page.wait_for_selector(f".conversation-row-current >> text={name}")
    first.page.request.delete(f"{first.server}/v1/conversations/{conversation_of(first)}")
    for tab in (first, second):
        tab.page.wait_for_selector(".toast >> text=deleted elsewhere")
        tab.page.wait_for_selector(".empty-state")
        tab.ignore_problems()  # a tab may have read the new title after the deletion: 404


def test_view_of_another_branch_is_not_changed(open_page: Any) -> None:
    first: RecordedPage = open_page()
    first.ask("What is 2 + 3?")
    first.ask("Thank you")
    second: RecordedPage = open_page(f"/#{conversation_of(first)}")
    second.page.route_web_socket(re.compile("/v1/responses"), pass_endless)
    second.reload()
    second.page.wait_for_selector(".answer >> nth=1")
    second.page.click(".tool-regenerate >> nth=0")
    second.until(f"{WRITTEN} > 20")
    stop(second)
    first.page.wait_for_selector(".version-position >> text=2/2")  # a tab with the same branch follows
    first.page.wait_for_selector("button[aria-label=Send]")  # a pick during generation is not sent
    with first.page.expect_response(stores_active_leaf):
        first.page.click("[aria-label='Previous version']")
    assert first.said() == ["What is 2 + 3?", "Thank you"]
    second.page.wait_for_selector(".user-message >> nth=1")
    second.page.click("[aria-label='Next version']")
    second.page.wait_for_selector(".user-message >> nth=1", state="detached")
    first.page.wait_for_selector(".user-message >> nth=1", state="detached")
    second.say("And you?")
    first.page.wait_for_selector(".answer[data-status=streaming]")
    first.page.click("[aria-label='Previous version']")  # not sent: the other tab does not change
    assert first.said() == ["What is 2 + 3?", "Thank you"]
    second.until("document.querySelectorAll('.answer .prose')[1]?.textContent.length > 20")
    stop(second)
    first.page.wait_for_selector("button[aria-label=Send]")
    assert second.said() == ["What is 2 + 3?", "And you?"]
    assert first.said() == ["What is 2 + 3?", "Thank you"]


def test_loading_model_shows_progress_then_that_kernels_are_compiled(chat: RecordedPage) -> None:
    page = chat.page
    state = {"status": "loading", "detail": "reading weights", "progress": 0.5}
    page.route("**/readyz", lambda route: route.fulfill(status=503, json=state))
    page.reload()
    assert page.get_attribute(".banner progress", "value") == "0.5"
    state |= {"detail": "warming up", "progress": 0.95}
    page.wait_for_selector(".banner progress:not([value])")  # moves, as its end is unknown
    page.wait_for_selector(".banner .hint:text-matches('^[0-9]+ s$')")
    assert page.get_by_text("warming up").is_visible() and page.locator("[aria-label=Send]").is_disabled()
    page.unroute("**/readyz")
    page.wait_for_selector(".banner", state="detached")
    chat.ignore_problems()  # the answers 503


def test_cut_connection_is_reported_and_the_reply_continues(browser: Any, server: str) -> None:
    """The socket runs through the test, which cuts it during a reply."""
    chat = RecordedPage(browser.new_context(), server)
    links: list[Any] = []

    def through(link: Any) -> None:
        upstream = link.connect_to_server()
        link.on_message(lambda text: upstream.send(endless_create(text)))
        links.append((link, upstream))

    chat.page.route_web_socket(re.compile("/v1/responses"), through)
    chat.page.goto(server)
    chat.connected()
    begin(chat)
    link, upstream = links[0]
    with chat.appears(".banner"):  # maybe only for half a second
        upstream.close()
        link.close(code=1012)
    before = len(chat.answers()[0])
    chat.page.wait_for_selector(".banner", state="detached")
    chat.until(f"{WRITTEN} > {before + 20}")
    midway = chat.answers()[0]
    stop(chat)
    assert len(links) == 2
    assert_as_stored(chat, midway)
    assert chat.problems() == []
    chat.context.close()


def test_message_is_sent_once_if_the_connection_is_cut_before_its_receipt(browser: Any, server: str) -> None:
    """The test cuts the connection instead of passing on that the response was created; the page sends it again."""
    chat = RecordedPage(browser.new_context(), server)
    links: list[Any] = []
    cut: list[Any] = []

    def through(link: Any) -> None:
        upstream = link.connect_to_server()
        links.append(link)

        def receive(text: str) -> None:
            if link not in cut and (cut or json.loads(text)["type"] != "response.created"):
                link.send(text)
            elif not cut:
                cut.append(link)
                upstream.close()
                link.close(code=1012)

        upstream.on_message(receive)

    chat.page.route_web_socket(re.compile("/v1/responses"), through)
    chat.page.goto(server)
    chat.connected()
    chat.ask(f"What is {secrets.randbelow(10**9)} + 3?")
    assert len(links) == 2
    assert len(items_of(chat, conversation_of(chat))) == 2
    assert_as_stored(chat)
    found = chat.page.request.get(f"{server}/v1/conversations", params={"query": chat.said()[0]}).json()["data"]
    assert [each["id"] for each in found] == [conversation_of(chat)]
    assert chat.problems() == []
    chat.context.close()


def test_offline_page_loses_nothing(chat: RecordedPage, endless: None) -> None:
    chat.reload()
    begin(chat)
    chat.context.set_offline(True)
    chat.page.wait_for_selector(".banner >> text=You are offline")
    assert chat.page.locator("[role=alert]").count() == 1
    before = len(chat.answers()[0])
    chat.context.set_offline(False)
    chat.page.wait_for_selector(".banner", state="detached")
    chat.until(f"{WRITTEN} > {before + 40}")
    midway = chat.answers()[0]
    stop(chat)
    assert_as_stored(chat, midway)
    chat.context.set_offline(True)
    chat.page.wait_for_selector(".banner")
    chat.page.fill("#composer", "Are you there?")
    chat.page.keyboard.press("Enter")
    assert chat.page.input_value("#composer") == "Are you there?"  # it stays in the box
    chat.context.set_offline(False)
    chat.page.wait_for_selector(".banner", state="detached")
    chat.page.wait_for_selector("button[aria-label=Send]:enabled")
    chat.page.focus("#composer")
    chat.page.keyboard.press("Enter")
    chat.until("document.querySelectorAll('.user-message').length === 2")
    chat.ignore_problems()


def test_page_continues_after_the_computer_slept(chat: RecordedPage, endless: None) -> None:
    """Time jumps; the page must not trust the connection that looks open."""
    chat.page.clock.install()
    chat.reload()
    begin(chat)
    created = [frame["type"] for frame in chat.received].count("session.created")
    before = len(chat.answers()[0])
    chat.page.clock.fast_forward(3600_000)  # the next timer of the page fires an hour late
    for _ in range(1200):
        if [frame["type"] for frame in chat.received].count("session.created") > created:
            break
        chat.page.wait_for_timeout(50)
    assert [frame["type"] for frame in chat.received].count("session.created") == created + 1
    chat.until(f"{WRITTEN} > {before + 40}")
    assert chat.page.locator(".banner").count() == 0
    midway = chat.answers()[0]
    stop(chat)
    assert_as_stored(chat, midway)


def test_killed_engine_is_reported_and_the_reply_continues(
    chat: RecordedPage, endless: None, server_process: tuple[str, int | None]
) -> None:
    """The page reports that the model is not running; then the running reply continues without a gap."""
    pid = server_process[1]
    if pid is None:
        pytest.skip("the engine of a server that is not ours is not ours to kill")
    chat.reload()
    begin(chat)
    engine = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    os.kill(engine, signal.SIGKILL)
    before = chat.answers()[0]
    for more in (100, 400):  # the first after the restart
        chat.until(f"{WRITTEN} > {len(before) + more}")
    assert chat.page.locator(".answer[data-status=error]").count() == 0
    chat.page.wait_for_selector(".banner", state="detached", timeout=60_000)
    stop(chat)
    assert_as_stored(chat, before)
    chat.ignore_problems()  # readiness requests failed meanwhile


def test_back_and_forward_switch_between_conversations(chat: RecordedPage) -> None:
    chat.page.evaluate("localStorage.setItem('chatcache.titles', 'false')")  # a title moves its conversation up
    chat.reload()
    chat.ask("Hello")
    first = conversation_of(chat)
    chat.page.keyboard.press("Control+Shift+O")
    chat.page.wait_for_selector(".empty-state")
    chat.ask("Who are you?")
    second = conversation_of(chat)
    chat.page.go_back()
    chat.page.wait_for_selector(".user-text >> text=Hello")
    assert conversation_of(chat) == first
    chat.page.go_forward()
    chat.page.wait_for_selector(".user-text >> text=Who are you?")
    assert conversation_of(chat) == second
    listed = chat.page.evaluate("[...document.querySelectorAll('[data-id]')].map(row => row.dataset.id)")
    assert listed[listed.index(second) + 1] == first
    chat.page.keyboard.press("Alt+ArrowDown")
    chat.page.wait_for_selector(".user-text >> text=Hello")
    chat.page.goto(f"{chat.server}/#conv_nobody")
    chat.page.wait_for_selector("text=does not exist on this server")
    chat.ignore_problems()  # the 404
