"""Test the content security policy, the size of the first load, and use on a phone."""

from __future__ import annotations

import gzip
import re
import urllib.request
from typing import Any

import pytest

from tests.e2e.conftest import BUILT_PAGE
from tests.e2e.recorded_page import RecordedPage
from tests.e2e.requirements import require

STATIC = BUILT_PAGE.parent
MOST_BYTES = 105_000  # of the first load
MOST_REPLY_BYTES = 121_000  # of the first load and the first reply, without the font
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data: blob:",
    "font-src": "'self'",
    "connect-src": "'self'",
    "manifest-src": "'self'",
    "frame-src": "'self'",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "form-action": "'self'",
}


@pytest.mark.slow
def test_policy_is_sent_and_the_page_obeys_it(server: str) -> None:
    with urllib.request.urlopen(server, timeout=10) as reply:
        sent = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        html = reply.read().decode()
    assert sent == POLICY
    assert "style=" not in html
    assert re.findall(r"<script(?![^>]*\bsrc=)", html) == []
    assert re.findall(r"(?:src|href)=\"(?!\./)", html) == []


@pytest.mark.slow
def test_first_load_is_small(open_page: Any) -> None:
    """Transfer at most 105 KB: page, program, styles and fonts, without the list of conversations."""
    chat: RecordedPage = open_page()
    wire = chat.context.new_cdp_session(chat.page)
    wire.send("Network.enable")
    wire.send("Network.setCacheDisabled", {"cacheDisabled": True})
    files: set[str] = set()  # ids of requests
    sizes: dict[str, float] = {}

    def on_request(event: dict[str, Any]) -> None:
        if not re.search("/v1/|/readyz$", event["request"]["url"]):  # the latter is polled
            files.add(event["requestId"])

    wire.on("Network.requestWillBeSent", on_request)
    wire.on("Network.loadingFinished", lambda event: sizes.update({event["requestId"]: event["encodedDataLength"]}))
    chat.reload()
    chat.page.wait_for_load_state("networkidle")
    assert 80_000 < sum(sizes[each] for each in files if each in sizes) <= MOST_BYTES


def test_files_of_a_first_reply_are_small_too() -> None:
    """The renderer loads with the first text."""
    require(BUILT_PAGE.is_file(), "the built page", "make web")
    names = re.findall(r"(?:src|href)=\"\./([^\"]+)\"", BUILT_PAGE.read_text())
    needed = [BUILT_PAGE, *(STATIC / name for name in names), *STATIC.glob("assets/renderer-*.js")]
    assert len(needed) >= 5
    assert sum(len(gzip.compress(path.read_bytes())) for path in needed) <= MOST_REPLY_BYTES


@pytest.mark.slow
def test_page_works_on_a_phone(open_page: Any, picture: Any) -> None:
    phone = {"width": 390, "height": 844}
    chat: RecordedPage = open_page(viewport=phone, device_scale_factor=2, is_mobile=True, has_touch=True)
    assert chat.page.locator(".sidebar").is_hidden()
    chat.page.wait_for_timeout(200)  # time for a scroll animation
    assert chat.page.evaluate("document.querySelector('.thread-scroll').scrollTop") == 0
    chat.page.tap(".starter >> text=Four stories")
    chat.wait_end(0)
    picture(chat.page, "phone")
    assert chat.page.evaluate("document.documentElement.scrollWidth") <= phone["width"]
    chat.page.tap(".card-pick >> nth=0")
    assert len(chat.answers()) == 1
    chat.page.tap("[aria-label='Show the list']")
    assert chat.page.locator(".sidebar").is_visible()
    chat.page.tap(".new-chat")
    chat.page.wait_for_selector(".empty-state")
    assert chat.page.locator(".sidebar").is_hidden()
    boxes = [
        button.bounding_box() for button in chat.page.locator(".composer button:visible, .top-bar button:visible").all()
    ]
    assert boxes and all(box["height"] >= 24 and box["width"] >= 24 for box in boxes), "a touch target is under 24 px"
