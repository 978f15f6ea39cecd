"""Test the page while its server is killed in the middle of answers and started again."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BUILT_PAGE, ROOT
from tests.e2e.recorded_page import RecordedPage, pass_endless
from tests.e2e.requirements import require
from tests.e2e.server_process import start_server
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

WRITTEN = "([...document.querySelectorAll('.answer .prose')].at(-1)?.textContent.length ?? 0)"
LOADING = {"status": 503, "json": {"status": "loading", "detail": "layer 1 of 2", "progress": 0.5}}
STORED_CHARS = 240  # the throttled server writes them in 3 s, and stores what it has written within one


class MortalServer:
    """A server on one port and one database that is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.e2e.throttled_server", "serve", "--kv-memory", "32MiB"]
        environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        return start_server(command, self._folder, self._port, cwd=ROOT, environment=environment)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        self._process = self._start()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[MortalServer]:
    require(BUILT_PAGE.is_file(), "the built page", "make web")
    server = MortalServer(tmp_path)
    yield server
    server.kill()


def letters(text: str) -> str:
    """Letters only, which markdown and line breaks do not change: a number may be that of a list's entry."""
    return "".join(re.findall(r"[^\W\d_]", text))


@pytest.mark.parametrize("num_kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_killed_server_loses_no_text_and_the_next_message_works(
    num_kills: int, mortal: MortalServer, browser: Any
) -> None:
    chat = RecordedPage(browser.new_context(), mortal.url)
    chat.page.goto(mortal.url)
    chat.connected()
    chat.page.route_web_socket(re.compile("/v1/responses"), pass_endless)
    chat.reload()
    for number in range(num_kills):
        chat.say(f"Tell me story number {number}")
        chat.until(f"document.querySelectorAll('.answer').length === {number + 1} && {WRITTEN} > {STORED_CHARS}")
        seen = letters(chat.answers()[-1])
        mortal.kill()
        chat.page.wait_for_selector("text=reconnects automatically")
        mortal.restart()
        chat.page.wait_for_selector("text=reconnects automatically", state="detached")
        chat.page.wait_for_selector("button[aria-label=Send]")
        assert letters(chat.answers()[-1]).startswith(seen)
        if number % 2:
            chat.reload()
            chat.page.wait_for_selector(f".answer >> nth={number}")
            kept = letters(chat.answers()[-1])
            assert kept and seen.startswith(kept[: len(seen)])
            answer = chat.page.locator(".answer").nth(number)
            assert answer.get_attribute("data-status") == "interrupted"
            assert answer.locator(".ending span").inner_text().startswith("Interrupted.")
    assert [text.split()[-1] for text in chat.said()] == [str(number) for number in range(num_kills)]
    chat.context.close()


def test_queued_message_waits_until_the_restarted_server_is_ready(mortal: MortalServer, browser: Any) -> None:
    chat = RecordedPage(browser.new_context(), mortal.url)
    page = chat.page
    page.goto(mortal.url)
    chat.connected()
    chat.page.route_web_socket(re.compile("/v1/responses"), pass_endless)
    is_loading = threading.Event()
    page.route("**/readyz", lambda route: route.fulfill(**LOADING) if is_loading.is_set() else route.continue_())
    chat.reload()
    chat.say("Tell me a story")
    chat.until(f"{WRITTEN} > {STORED_CHARS}")
    page.fill("#composer", "And another one")
    page.keyboard.press("Alt+Enter")
    page.wait_for_selector(".queued-text")
    is_loading.set()
    mortal.kill()
    mortal.restart()
    page.wait_for_selector("text=Loading the model")
    page.wait_for_selector(".answer[data-status=interrupted]")
    page.wait_for_timeout(1000)  # time to send it too early
    assert page.locator(".queued-text").inner_text() == "And another one"
    assert page.is_disabled("text=Send the first")
    is_loading.clear()
    page.wait_for_selector(".answer >> nth=1")
    assert chat.said() == ["Tell me a story", "And another one"] and page.locator(".ending-error").count() == 0
    chat.context.close()
