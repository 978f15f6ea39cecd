"""Titles extracted from model output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatcache.conversations.titles import MAX_TITLE_CHARS, clean_title


@pytest.mark.parametrize(
    ("answer", "title"),
    [
        ("A trip to Rome", "A trip to Rome"),
        ('"A trip to Rome."', "A trip to Rome"),
        ("'A trip to Rome'\nIt fits because", "A trip to Rome"),
        ("**Title:** “A trip”", "A trip"),
        ('Title: "A trip"\n', "A trip"),
        ("\n\n# A trip\n", "A trip"),
        ("- `A trip`", "A trip"),
        ("<think>They want\na title</think>\n\nA trip", "A trip"),
        ("<think>They want a title that", ""),
        ("Titel：《罗马之旅》", "罗马之旅"),
        ("「東京」", "東京"),
        ('Review of "Dune"', 'Review of "Dune"'),
        ("f(x) and (g)", "f(x) and (g)"),
        ("What is 2 + 2?", "What is 2 + 2?"),
        ("tabs\tand\u200b zero\x07 width", "tabs and zero width"),
        ("...", ""),
        ("", ""),
        ('""', ""),
        (" \n\t\n🎉", ""),
        ("Sorry, I do not know. I am a small demonstration model.", ""),
        ("word " * 10, "word word word word word word word word word word"),
        ("word " * 11, ""),
        ("wordyword " * 8, "wordyword wordyword wordyword wordyword wordyword…"),
        ("x" * 100, "x" * 59 + "…"),
        ("C++ & <b>bold</b>", "C++ & <b>bold</b>"),
    ],
)
def test_clean_title_removes_markup_and_quotes(answer: str, title: str) -> None:
    assert clean_title(answer) == title


@given(st.text())
def test_clean_title_of_any_answer_is_one_short_line_or_empty(answer: str) -> None:
    title = clean_title(answer)
    assert len(title) <= MAX_TITLE_CHARS and title == title.strip() and len(title.splitlines()) <= 1
    assert not title or any(char.isalnum() for char in title)
