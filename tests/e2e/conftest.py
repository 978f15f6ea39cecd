"""Fixtures: a real server with the demo model, and the system's Chromium on its page."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recorded_page import PICTURES, RecordedPage, pass_endless
from tests.e2e.requirements import require
from tests.e2e.server_process import serving

ROOT = Path(__file__).parents[2]
BUILT_PAGE = ROOT / "chatcache" / "gateway" / "static" / "index.html"
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
]


@pytest.fixture(scope="session")
def server_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int | None]]:
    """Start a server with a free port, an empty database and the demo model; yield its URL and process id.

    CHATCACHE_E2E_URL names a running server instead, to test a deployment.
    """
    if running := os.environ.get("CHATCACHE_E2E_URL"):
        yield running.rstrip("/"), None
        return
    require(BUILT_PAGE.is_file(), "the built page", "make web")
    folder = tmp_path_factory.mktemp("server")
    # about 1,600 pages: the page map has a cell for each
    command = [sys.executable, "-m", "tests.e2e.throttled_server", "serve", "--kv-memory", "64MiB"]
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH")]))
    with serving(command, folder, cwd=ROOT, environment={"PYTHONPATH": path}) as process:
        yield process


@pytest.fixture(scope="session")
def server(server_process: tuple[str, int | None]) -> str:
    """Address of the server."""
    return server_process[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium per module, closed before other tests need the event loop that Playwright blocks."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    require(executable is not None, "Chromium", "apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        require(False, "playwright", "pip install 'chatcache[test]'")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(server: str, browser: Any) -> Iterator[Any]:
    """Function that opens recorded pages; at the end, none may have logged an error or an external request."""
    opened: list[RecordedPage] = []

    def open_page(path: str = "/", **options: Any) -> RecordedPage:
        # without a service worker: a test sees every request of its page
        options = {
            "viewport": {"width": 1280, "height": 800},
            "color_scheme": "light",
            "service_workers": "block",
        } | options
        watched = RecordedPage(browser.new_context(**options), server)
        opened.append(watched)
        watched.page.goto(server + path)
        watched.connected()
        return watched

    yield open_page
    problems = [complaint for watched in opened for complaint in watched.problems()]
    for watched in opened:
        watched.leave()
    assert problems == []


@pytest.fixture
def chat(open_page: Any) -> RecordedPage:
    """An open page with empty storage."""
    page: RecordedPage = open_page()
    return page


@pytest.fixture
def endless(chat: RecordedPage) -> None:
    """Make the next page loads of `chat` request replies that do not end by themselves."""
    chat.page.route_web_socket(re.compile("/v1/responses"), pass_endless)


@pytest.fixture
def picture(tmp_path: Path) -> Any:
    """Function that saves a screenshot, in web/screenshots if CHATCACHE_SCREENSHOTS is set."""
    folder = ROOT / "web" / "screenshots" if PICTURES else tmp_path

    def picture(page: Any, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        page.screenshot(path=path, animations="disabled")
        return path

    return picture
