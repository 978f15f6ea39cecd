"""Test that axe reports no violation in any view, in both themes, on desktop and phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.page_views import VIEWS, watch
from tests.e2e.recorded_page import RecordedPage
from tests.e2e.requirements import require

pytestmark = pytest.mark.slow

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
RUN = """axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map(({id, impact, nodes}) =>
  [id, impact, ...nodes.map(node => `${node.html.slice(0, 120)} ${node.any.map(check => check.message)}`)]))"""


@pytest.mark.parametrize("width", [1440, 1280])
def test_axe_finds_nothing_in_any_view(width: int, open_page: Any, picture: Any) -> None:
    """Nor does a view reach beyond the screen."""
    chat = _page(open_page, viewport={"width": width, "height": 800})
    for question in (
        "What is a KV page?",
        "Make a table of animals and their sounds",
        "Write Python code that prints hello",
    ):
        chat.ask(question)
    found = {}
    for view in VIEWS:
        page = watch(chat, view)
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            if violations := page.evaluate(RUN):
                found[view.name, scheme] = violations
            if beyond := page.evaluate("document.documentElement.scrollWidth - innerWidth"):
                found[view.name, scheme] = f"{beyond} px beyond the screen"
            if view.name == "answer" and width == 1280:
                picture(page, scheme)
    assert found == {}


def test_axe_finds_nothing_on_a_phone(open_page: Any) -> None:
    chat = _page(open_page, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    found = {"start": chat.page.evaluate(RUN)}
    chat.ask("What is a KV page?")
    found["thread"] = chat.page.evaluate(RUN)
    chat.page.tap("[aria-label='Show the list']")
    found["list"] = chat.page.evaluate(RUN)
    assert {view: violations for view, violations in found.items() if violations} == {}


def _page(open_page: Any, **options: Any) -> RecordedPage:
    """Return a page that axe can run in, without animations, so that every colour is final."""
    require(AXE.is_file(), "axe-core", "cd web && npm ci")
    chat: RecordedPage = open_page(reduced_motion="reduce", **options)
    chat.page.evaluate(AXE.read_text())  # not by a script tag: the content policy stays unchanged
    return chat
