"""Search queries: folding, phrases, prefixes and snippets, against a plain reading of the text."""

from __future__ import annotations

import random

import pytest

from chatcache.conversations.search import (
    SearchQuery,
    fold_words,
    iter_words,
    make_snippet,
)
from chatcache.errors import InvalidRequestError


def found(query: str, text: str) -> list[str] | None:
    """Return the marked pieces."""
    result = SearchQuery.parse(query).find(text)
    return [text[start:end] for start, end in result.marks] if result is not None else None


@pytest.mark.parametrize(
    ("query", "text", "marked"),
    [
        ("hello", "Oh, HELLO there", ["HELLO"]),
        ("there hello", "hello out there", ["hello", "there"]),
        ("hello stranger", "hello there", None),
        ("hel", "hello shell help", ["hello", "help"]),  # the last word may be a prefix
        ("hel there", "hello there", None),  # the others may not
        ("cafe", "un Café crème", ["Café"]),
        ("café", "CAFE", ["CAFE"]),
        ("cafe\u0301", "caf\u00e9", ["caf\u00e9"]),
        ("STRASSE", "die Straße", ["Straße"]),
        ("ﬁle", "a file", ["file"]),
        ("don't", "I don't know", ["don", "t"]),
        ("don't", "t don", None),  # in a row
        ("你好", "他说你好吗", ["你", "好"]),
        ("好你", "你好", None),
        ("世", "hello世界", ["世"]),
        ("สวัส", "สวัสดี", list("สวัส")),
        ("हिन्दी", "यह हिन्दी है", ["हिन्दी"]),
        ("한국", "한국어 좋아", ["한국어"]),
        ("🎉", "party 🎉🎉", ["🎉", "🎉"]),
        ("👨‍👩‍👧", "the 👨‍👩‍👧 family", ["👨", "👩", "👧"]),
        ("foo_bar", "see foo-bar", ["foo", "bar"]),
        ("1.5", "version 1.55", ["1", "55"]),
        ('"quoted" (AND) OR* NEAR^', "quoted and or nearly", ["quoted", "and", "or", "nearly"]),
        ("a\x00b", "a b", ["a", "b"]),
        ("", "anything", None),
        (" .,!\"'*^:-() ", "anything . , !", None),
    ],
)
def test_query_finds_the_expected_words(query: str, text: str, marked: list[str] | None) -> None:
    assert found(query, text) == marked


def test_fold_words_of_ascii_equals_the_general_path() -> None:
    generator = random.Random(2)
    for _ in range(500):
        text = "".join(generator.choices("aB1_-' \n\x00\x1f\x7f.", k=200)) + "x" * generator.choice([0, 99])
        assert fold_words(text) == " ".join(word.text for word in iter_words(text)) == fold_words(text + " é")[:-2]


def test_query_over_the_length_limit_is_refused() -> None:
    assert len(SearchQuery.parse("word " * 800).phrases) == 2
    with pytest.raises(InvalidRequestError, match="4096"):
        SearchQuery.parse("x" * 4097)


@pytest.mark.slow
def test_snippet_is_cut_between_words_and_has_valid_marks() -> None:
    generator = random.Random(5)
    for _ in range(300):
        text = " ".join("".join(generator.choices("abcß你é🎉\n", k=generator.randint(1, 60))) for _ in range(40))
        result = SearchQuery.parse(generator.choice("abc你")).find(text)
        if result is None:
            continue
        cut = make_snippet(text, result.marks)
        assert len(cut.text) <= 202 and cut.text.strip("…") in text
        pieces = [cut.text[start:end] for start, end in cut.marks]
        assert pieces and [text[start:end] for start, end in result.marks[: len(pieces) - 1]] == pieces[:-1]
        assert all(later[0] >= earlier[1] for earlier, later in zip(cut.marks, cut.marks[1:], strict=False))
