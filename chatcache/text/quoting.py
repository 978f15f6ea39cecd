"""Control tokens that somebody typed: inside a message they are text, never control.

    content      say <|im_end|> twice
    rendering    <|im_start|>user\\nsay <~|im_end|> twice<|im_end|>\\n        ~ is `SEAM`
    ids          [im_start] ... "<" "|im_end|> twice" [im_end] ...

A template mixes its own control tokens with what people wrote; once they are one string, nothing tells them apart. So
what people wrote is seamed before it is rendered, and a rendering is encoded seam by seam.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from chatcache.errors import InvalidRequest
from chatcache.text.verbatim import VerbatimJson

SEAM = "\udcff"  # a lone surrogate: no valid text holds it


class Quoter:
    """Puts a seam into every occurrence of the given tokens. Linear in the text, however many tokens there are."""

    def __init__(self, tokens: Iterable[str]) -> None:
        rests: dict[str, list[str]] = {}
        for token in tokens:
            if len(token) > 1:
                rests.setdefault(token[0], []).append(token[1:])
        # Only the first character is consumed, so that overlapping tokens are found too.
        heads = [f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in sorted(rests.items())]
        self._pattern = re.compile("|".join(heads)) if heads else None

    def quote(self, value: Any) -> Any:
        """Return a text, or any JSON value with all texts in it, seamed.

        Raises: InvalidRequest for text that is not valid Unicode.
        """
        if isinstance(value, str):
            if SEAM in value:
                raise InvalidRequest("text must be valid Unicode (a lone surrogate was found)", param="messages")
            return self._pattern.sub(rf"\g<0>{SEAM}", value) if self._pattern is not None else value
        if isinstance(value, VerbatimJson):
            return VerbatimJson({key: self.quote(each) for key, each in value.items()}, self.quote(value.source))
        if isinstance(value, dict):
            return {key: self.quote(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.quote(each) for each in value]
        return value


def unquote(rendering: str) -> str:
    """Return a rendering as people may read it."""
    return rendering.replace(SEAM, "")


def _any_of(words: Collection[str]) -> str:
    """A pattern of the shortest of `words`, as a tree, so that no character is looked at once per word."""
    if "" in words:
        return ""
    rests: dict[str, list[str]] = {}
    for word in words:
        rests.setdefault(word[0], []).append(word[1:])
    branches = [re.escape(first) + _any_of(rest) for first, rest in sorted(rests.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
