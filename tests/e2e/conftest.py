"""The real server with the demo model, and Debian's Chromium on its page."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recorded_page import PICTURES, Watched, pass_endless
from tests.e2e.requirements import need
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
    """A server of our own: free port, empty database, demo model. Its address and process id.

    CHATCACHE_E2E_URL names a running one instead, to try the suite on a deployment.
    """
    if running := os.environ.get("CHATCACHE_E2E_URL"):
        yield running.rstrip("/"), None
        return
    need(BUILT_PAGE.is_file(), "the built page", "make web")
    folder = tmp_path_factory.mktemp("server")
    # some 1,600 pages: the page map has a cell for each
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
    """One Chromium per module; closed before other tests need the event loop that Playwright holds."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    need(executable is not None, "Chromium", "apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        need(False, "playwright", "pip install 'chatcache[test]'")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(server: str, browser: Any) -> Iterator[Any]:
    """Opens watched pages; at the end none of them may have logged an error or asked a stranger for anything."""
    opened: list[Watched] = []

    def open_page(path: str = "/", **options: Any) -> Watched:
        options = {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"} | options
        watched = Watched(browser.new_context(**options), server)
        opened.append(watched)
        watched.page.goto(server + path)
        watched.connected()
        return watched

    yield open_page
    complaints = [complaint for watched in opened for complaint in watched.complaints()]
    for watched in opened:
        watched.leave()
    assert complaints == []


@pytest.fixture
def chat(open_page: Any) -> Watched:
    """A fresh page of a fresh visitor."""
    page: Watched = open_page()
    return page


@pytest.fixture
def endless(chat: Watched) -> None:
    """Make the next pages of `chat` ask for answers that do not end by themselves."""
    chat.page.route_web_socket(re.compile("/v1/responses"), pass_endless)


@pytest.fixture
def picture(tmp_path: Path) -> Any:
    """Where a screenshot goes: web/screenshots when CHATCACHE_SCREENSHOTS is set, else a folder of the test."""
    folder = ROOT / "web" / "screenshots" if PICTURES else tmp_path

    def picture(page: Any, name: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        page.screenshot(path=path, animations="disabled")
        return path

    return picture
