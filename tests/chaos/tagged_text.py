"""Tagged text of the chaos runs: each reply identifies its message, so that misdirected tokens are detected.

A user message is "TAG wN" with a unique TAG. The reply starts with a digest of all earlier tags and continues with N
numbered words, each with a randomly drawn letter:

    ~3f2a|c3t14.00b c3t14.01d c3t14.02a

Every token is one character. So a repeated or missing token, text of another conversation, or a prompt that lacks a
turn is visible in the text itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

DRAWN = "abcd"
TAG = re.compile(r"\b(c\d+t\d+) w(\d+)\b")
NUM_DIGEST_CHARS = 4


def user_message(tag: str, num_words: int) -> str:
    """Return a user message."""
    return f"{tag} w{num_words}"


def tag_of(text: str) -> tuple[str, int] | None:
    """Return tag and number of words of a user message, or None for another text."""
    found = TAG.fullmatch(text)
    return (found[1], int(found[2])) if found else None


def digest_of(tags: Sequence[str]) -> str:
    """Return four hexadecimal digits that depend on all tags."""
    return hashlib.sha256("/".join(tags).encode()).hexdigest()[:NUM_DIGEST_CHARS]


def length_of(tag: str, num_words: int) -> int:
    """Return the number of tokens of the whole reply, without the end token."""
    return NUM_DIGEST_CHARS + 2 + num_words * (len(tag) + 5) - 1


def choices_at(tags: Sequence[str], num_words: int, position: int) -> str:
    """Return the characters allowed at a position of the reply to the last of the tags; "" at its end."""
    tag = tags[-1]
    head = f"~{digest_of(tags)}|"
    if position < len(head):
        return head[position]
    word, offset = divmod(position - len(head), len(tag) + 5)
    if word >= num_words or (word == num_words - 1 and offset == len(tag) + 4):
        return ""
    shape = f"{tag}.{word:02d}{{}} ".replace("{}", "\0")
    return DRAWN if shape[offset] == "\0" else shape[offset]


def fault_in(text: str, tags: Sequence[str], num_words: int) -> str | None:
    """Return what is wrong with a complete or partial reply, or None."""
    for position, character in enumerate(text):
        wanted = choices_at(tags, num_words, position)
        if not wanted:
            return f"text after the end: {text[position:]!r}"
        if character not in wanted:
            return f"at {position}: {text[max(0, position - 12) : position + 12]!r}, expected one of {wanted!r}"
    return None
