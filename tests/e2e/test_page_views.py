"""Test every view on a desktop, a laptop and two phones: axe, nothing beyond the screen, large enough touch targets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.page_checks import SCREENS, find_problems
from tests.e2e.page_views import VIEWS, watch
from tests.e2e.recorded_page import RecordedPage

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("width", list(SCREENS))
def test_views_have_no_problem_in_both_themes(width: int, open_page: Any, picture: Any) -> None:
    chat: RecordedPage = open_page(**SCREENS[width])
    for question in (
        "What is a KV page?",
        "Make a table of animals and their sounds",
        "Write Python code that prints hello",
    ):
        chat.ask(question)
    found = {}
    for view in VIEWS:
        page = watch(chat, view)
        if problems := find_problems(page):
            found[view.name] = problems
        if view.name == "answer" and width == 1280:
            for scheme in ("dark", "light"):
                page.emulate_media(color_scheme=scheme)
                picture(page, scheme)
    assert found == {}
