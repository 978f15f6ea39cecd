"""Test the page as an app on a phone: touch targets, installation, offline reading, voice input and read-aloud."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.page_views import EVERYTHING
from tests.e2e.recorded_page import RecordedPage
from tests.e2e.rest_client import create_conversation

pytestmark = pytest.mark.slow

# Visible targets smaller than 44 px. Exempt, as in WCAG 2.5.5: links and marks within a text, which its line limits.
SMALL = """() => [...document.querySelectorAll(
    'button, select, input, textarea, summary, [role=tab], [role=button], a[href]')].filter(element => {
  if (element.closest('.prose p, .prose li, .prose blockquote, svg, [inert], .sr-only')) return false;
  if (element.closest('details:not([open])') && element.localName !== 'summary') return false;
  if (!element.checkVisibility({visibilityProperty: true, opacityProperty: true})) return false;
  const target = ['checkbox', 'radio', 'file', 'range'].includes(element.type) && element.labels[0] || element;
  const {width, height} = target.getBoundingClientRect();
  return width > 1 && (width < 43.9 || height < 43.9);
}).map(element => {
  const {width, height} = element.getBoundingClientRect();
  const name = element.getAttribute('aria-label') ?? element.textContent.slice(0, 30);
  return `${element.localName}.${element.className} ${name} ${width.toFixed(0)}x${height.toFixed(0)}`;
})"""


@pytest.mark.parametrize("width", [320, 390])
def test_touch_targets_are_at_least_44_px(width: int, open_page: Any) -> None:
    chat = _phone(open_page, width)
    found = {"start": chat.page.evaluate(SMALL)}
    chat.ask("Hello")
    found["answer"] = chat.page.evaluate(SMALL)
    chat.page.tap("[aria-label='More answers']")
    chat.ask("Tell me a story about a robot")
    found["candidates"] = chat.page.evaluate(SMALL)
    chat.page.tap("[aria-label='Fewer answers']")
    chat.page.tap("[aria-label=Panel]")
    for tab in ("candidates", "beams", "branches", "pages"):
        chat.page.tap(f"#tab-{tab}")
        chat.page.wait_for_selector(f"#tab-{tab}[aria-selected=true]")
        found[tab] = chat.page.evaluate(SMALL)
    chat.page.tap("[aria-label='Close the panel']")
    chat.page.tap("[aria-label=Settings]")
    chat.page.wait_for_selector("aside[aria-label=Settings]")
    found["settings"] = chat.page.evaluate(SMALL)
    chat.page.keyboard.press("Escape")
    made = create_conversation(chat.server, ["Show me all you can draw", EVERYTHING], title="Everything")
    chat.page.evaluate("hash => location.hash = hash", made)
    chat.page.wait_for_selector(".prose pre")
    found["everything"] = chat.page.evaluate(SMALL)
    chat.page.tap("[aria-label='Show the list']")
    chat.page.wait_for_selector(".conversation-row-current")
    found["list"] = chat.page.evaluate(SMALL)
    chat.page.tap(".conversation-row-current .conversation-menu")
    chat.page.wait_for_selector(".menu:popover-open")
    found["menu"] = chat.page.evaluate(SMALL)
    assert {view: small for view, small in found.items() if small} == {}


def _phone(open_page: Any, width: int = 390, **options: Any) -> RecordedPage:
    chat: RecordedPage = open_page(
        viewport={"width": width, "height": 844}, is_mobile=True, has_touch=True, reduced_motion="reduce", **options
    )
    return chat
