"""One call as JSON, read wherever the stream is cut.

    {"name": "look_up", "arguments": {"word": "page"}}
                     ^               `-------------- told as it comes, character by character as written
                     `- the name is complete

Only the object itself is held to the notation: its keys, colons and commas. Arguments are found by their brackets and
quotes alone, since a model's mistake within them is the client's to see.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from chatcache.text.tool_calls.syntax import BLANK

MAX_NAME_CHARS = 256
_ARGUMENTS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]<]')
_WORD = re.compile(r"[A-Za-z0-9+.\-]+")


class At(Enum):
    """Where the reading is."""

    START = auto()
    KEY_OR_END = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_TEXT = auto()
    IN_BRACKETS = auto()
    IN_WORD = auto()
    NEXT = auto()
    CLOSED = auto()
    BROKEN = auto()


class CallObject:
    """`name` is "" until it is complete. CLOSED: the last brace was read; BROKEN: the next character cannot follow.

    `bare_arguments_of`: only the arguments stand in the text, of the function with that name.
    """

    def __init__(self, bare_arguments_of: str = "") -> None:
        self.name = bare_arguments_of
        self.at = At.VALUE if bare_arguments_of else At.START
        self._is_bare = bool(bare_arguments_of)
        self._key = "arguments" if bare_arguments_of else ""
        self._quoted: list[str] = []
        self._escaped = False
        self._depth = 0
        self._in_quotes = False
        self._has_arguments = False
        self._untold: list[str] = []

    @property
    def is_over(self) -> bool:
        return self.at in (At.CLOSED, At.BROKEN)

    def drain(self) -> str:
        """The arguments' text since the last call."""
        text = "".join(self._untold)
        self._untold.clear()
        return text

    def read(self, text: str, at: int = 0) -> int:
        """Read on from `text[at:]`; return where the reading ended: behind the name, where `is_over`, or at its end."""
        had_name = bool(self.name)
        while at < len(text) and not self.is_over and bool(self.name) == had_name:
            at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        match self.at:
            case At.IN_KEY | At.IN_TEXT:
                return self._string(text, at)
            case At.IN_BRACKETS:
                return self._brackets(text, at)
            case At.IN_WORD:
                return self._word(text, at)
            case _:
                return at + 1 if text[at] in BLANK or self._mark(text[at]) else at

    def _mark(self, char: str) -> bool:
        """Take a character of the object's own notation. False: it belongs to what comes, or breaks the object."""
        match self.at, char:
            case At.START, "{":
                self.at = At.KEY_OR_END
            case ((At.KEY_OR_END | At.KEY), '"'):
                self.at = At.IN_KEY
            case At.COLON, ":":
                self.at = At.VALUE
            case At.NEXT, ",":
                self.at = At.KEY
            case ((At.NEXT | At.KEY_OR_END), "}"):
                self.at = At.CLOSED
            case At.VALUE, _:
                return self._begin_value(char)
            case _:
                self.at = At.BROKEN
                return False
        return True

    def _begin_value(self, char: str) -> bool:
        self._depth, self._in_quotes = 0, False
        if char in "{[":
            self.at = At.IN_BRACKETS
        elif char == '"':
            self.at = At.IN_TEXT
            self._tell('"')
            return True
        elif _WORD.match(char):
            self.at = At.IN_WORD
        else:
            self.at = At.BROKEN
        return False

    def _string(self, text: str, at: int) -> int:
        """Read a key, or a value that is a text, up to its closing quote."""
        if self._escaped:
            self._escaped = False
            self._take(text[at])
            return at + 1
        found = _IN_STRING.search(text, at)
        end = found.start() if found else len(text)
        self._take(text[at:end])
        if found is None:
            return end
        if found[0] == "\\":
            self._escaped = True
            self._take("\\")
        elif self.at is At.IN_KEY:
            key = self._unquoted()
            self._key = key if key is not None else ""
            self.at = At.COLON
        else:
            self._tell('"')
            self._end_value()
            self._end_text()
        return end + 1

    def _take(self, piece: str) -> None:
        self._quoted.append(piece)
        if self.at is At.IN_TEXT:
            self._tell(piece)

    def _unquoted(self) -> str | None:
        raw = "".join(self._quoted)
        self._quoted.clear()
        try:
            text = json.loads(f'"{raw}"', strict=False)
            text.encode()
        except ValueError:
            return None
        return text if isinstance(text, str) else None

    def _end_text(self) -> None:
        value = self._unquoted()
        if self._key == "name" and not self.name:
            self.name = value or ""
            if not 1 <= len(self.name) <= MAX_NAME_CHARS:
                self.name, self.at = "", At.BROKEN

    def _brackets(self, text: str, at: int) -> int:
        """Read a value in brackets; "<" outside of a text ends it: what follows is a mark, and never JSON."""
        if self._in_quotes:
            return self._quoted_part(text, at)
        found = _IN_VALUE.search(text, at)
        if found is None:
            self._tell(text[at:])
            return len(text)
        end = found.end()
        if found[0] == "<":
            self._tell(text[at : end - 1])
            self.at = At.BROKEN
            return end - 1
        self._tell(text[at:end])
        if found[0] == '"':
            self._in_quotes = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            if not self._depth:
                self._end_value()
        return end

    def _quoted_part(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._tell(text[at])
            return at + 1
        found = _IN_STRING.search(text, at)
        end = found.end() if found else len(text)
        self._tell(text[at:end])
        if found is not None and found[0] == "\\":
            self._escaped = True
        elif found is not None:
            self._in_quotes = False
        return end

    def _word(self, text: str, at: int) -> int:
        found = _WORD.match(text, at)
        end = found.end() if found else at
        self._tell(text[at:end])
        if end < len(text):
            self._end_value()
        return end

    def _end_value(self) -> None:
        if self._key in _ARGUMENTS:
            self._has_arguments = True
        elif self._key == "name" and self.at is not At.IN_TEXT and not self.name:
            self.at = At.BROKEN
            return
        self.at = At.CLOSED if self._is_bare else At.NEXT

    def _tell(self, piece: str) -> None:
        if self._key in _ARGUMENTS and not self._has_arguments:
            self._untold.append(piece)
