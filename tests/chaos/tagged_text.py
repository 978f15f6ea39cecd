"""What the engine of these runs says: text that tells whose it is, so that whatever goes astray gives itself away.

A user says "TAG wN": TAG is theirs alone. The answer begins with a digest of every tag said before, and goes on with N
numbered words, each with a letter that was drawn:

    ~3f2a|c3t14.00b c3t14.01d c3t14.02a

Every token is one character. So a token twice, one missing, another conversation's text or a prompt that lost a turn
are all seen in the text itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

DRAWN = "abcd"
TAG = re.compile(r"\b(c\d+t\d+) w(\d+)\b")
NUM_DIGEST_CHARS = 4


def said(tag: str, num_words: int) -> str:
    """The user's message."""
    return f"{tag} w{num_words}"


def tag_of(text: str) -> tuple[str, int] | None:
    """Tag and number of words of a user's message, None of another text."""
    found = TAG.fullmatch(text)
    return (found[1], int(found[2])) if found else None


def digest_of(tags: Sequence[str]) -> str:
    """Four digits of what was said, the last one included."""
    return hashlib.sha256("/".join(tags).encode()).hexdigest()[:NUM_DIGEST_CHARS]


def length_of(tag: str, num_words: int) -> int:
    """How many tokens the whole answer has, without the one that ends it."""
    return NUM_DIGEST_CHARS + 2 + num_words * (len(tag) + 5) - 1


def choices_at(tags: Sequence[str], num_words: int, position: int) -> str:
    """What may stand at a place of the answer to the last of these tags: a character, or some; "" at the end."""
    tag = tags[-1]
    head = f"~{digest_of(tags)}|"
    if position < len(head):
        return head[position]
    word, place = divmod(position - len(head), len(tag) + 5)
    if word >= num_words or (word == num_words - 1 and place == len(tag) + 4):
        return ""
    shape = f"{tag}.{word:02d}{{}} ".replace("{}", "\0")
    return DRAWN if shape[place] == "\0" else shape[place]


def fault_in(text: str, tags: Sequence[str], num_words: int) -> str | None:
    """What is wrong with an answer, or the beginning of one; None where it is as it should be."""
    for position, character in enumerate(text):
        wanted = choices_at(tags, num_words, position)
        if not wanted:
            return f"it goes on behind its end: {text[position:]!r}"
        if character not in wanted:
            return f"at {position} it says {text[max(0, position - 12) : position + 12]!r}, not one of {wanted!r} there"
    return None
