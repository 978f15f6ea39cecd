"""Text and function calls apart, from a stream cut anywhere.

    text --marker--> head --object--> call --over--> after --joint--> next object, or text again
      ^               |                 |
      `--- no call ---+--- no name -----'    what turns out to be no call is text, up to where that was found out

A call is told from the moment its name is complete; until then everything behind the marker is held back. White space
around calls is no part of the text. An end of the stream inside a call leaves it with the arguments so far.

One call as JSON, read wherever the stream is cut.

    {"name": "look_up", "arguments": {"word": "page"}}
                     ^               `-------------- told as it comes, character by character as written
                     `- the name is complete

Only the object itself is held to the notation: its keys, colons and commas. Arguments are found by their brackets and
quotes alone, since a model's mistake within them is the client's to see.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto

from chatcache.tokenizer.tool_formats import BLANK, LIST_JOINTS, Syntax, open_tail

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


_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of call `number` (0, 1, ...). The name comes whole, with the first part."""

    number: int
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of the stream added."""

    text: str = ""
    calls: tuple[CallPart, ...] = ()


class CallParser:
    """One candidate's. A bare object is a call only if it names one of `names`."""

    def __init__(self, syntax: Syntax, names: Collection[str] = ()) -> None:
        self._syntax = syntax
        self._names = frozenset(names)
        self._state: Callable[[str, bool], str] = self._in_text
        self._held = ""
        self._at_start = True
        self._trims = False
        self._attempt: list[str] = []  # what was read of a call that has no name yet
        self._is_bare = False
        self._joints = syntax.joints
        self._name = ""
        self._object = CallObject()
        self._number = -1
        self._announced = False
        self._has_told = False
        self._texts: list[str] = []
        self._parts: list[CallPart] = []

    def push(self, text: str) -> Parsed:
        """Read on; return what is now certain."""
        if self._is_plain(text):
            return Parsed(text)
        return self._run(text, last=False)

    def finish(self) -> Parsed:
        """The stream is over: return what was held back."""
        return self._run("", last=True)

    def _is_plain(self, text: str) -> bool:
        """Whether nothing of a call can begin in `text`, which follows text of which nothing is held back."""
        if self._held or self._trims or self._at_start or self._state != self._in_text:
            return False
        return text != "" and self._syntax.marker[0] not in text and text[-1] not in BLANK

    def _run(self, text: str, *, last: bool) -> Parsed:
        rest, self._held = self._held + text, ""
        while rest:
            rest = self._state(rest, last)
        if last and self._attempt:
            self._texts += self._attempt
            self._attempt = []
        parsed = Parsed("".join(self._texts), tuple(self._parts))
        self._texts.clear()
        self._parts.clear()
        return parsed

    def _in_text(self, text: str, last: bool) -> str:
        if self._trims:
            text = text.lstrip(BLANK)
            self._trims = not text
        if self._at_start and self._syntax.bare:
            first = text.lstrip(BLANK)
            if first.startswith("{"):
                return self._begin(text[: len(text) - len(first)], first, bare=True)
            if not first and not last:
                return self._hold(text)
        marker = self._syntax.marker
        at = text.find(marker)
        if at >= 0:
            shown = text[:at].rstrip(BLANK)
            self._say(shown)
            return self._begin(text[len(shown) : at] + marker, text[at + len(marker) :])
        end = len(text) if last else len(text) - open_tail(text, marker)
        self._say(text[:end])
        return self._hold(text[end:])

    def _begin(self, opening: str, rest: str, *, bare: bool = False) -> str:
        """A call may begin here; `opening` is text if none does."""
        self._attempt = [opening]
        self._is_bare = bare
        self._at_start = False
        self._joints = self._syntax.joints
        self._state = self._in_head
        return rest

    def _in_head(self, text: str, last: bool) -> str:
        text = self._without_blank(text)
        if not text:
            return ""
        if self._syntax.listed and text[0] == "[":
            self._attempt.append("[")
            self._joints = LIST_JOINTS
            self._state = self._before_object
            return text[1:]
        if self._syntax.between and _NAME.match(text):
            self._name = ""
            self._joints = {}
            self._state = self._in_name
            return text
        self._state = self._before_object
        return text

    def _before_object(self, text: str, last: bool) -> str:
        text = self._without_blank(text)
        if not text:
            return ""
        if text[0] != "{":
            return self._give_up(text)
        return self._open(CallObject(), text)

    def _in_name(self, text: str, last: bool) -> str:
        """Read a name that stands before the arguments."""
        found = _NAME.match(text)
        if found is not None:
            self._name += found[0]
            self._attempt.append(found[0])
            return text[found.end() :]
        if len(self._name) > MAX_NAME_CHARS:
            return self._give_up(text)
        between = self._syntax.between
        if text.startswith(between):
            self._attempt.append(between)
            return self._open(CallObject(self._name), text[len(between) :])
        if text[0] == "{":
            return self._open(CallObject(self._name), text)
        if between.startswith(text) and not last:
            return self._hold(text)
        return self._give_up(text)

    def _open(self, call: CallObject, rest: str) -> str:
        self._object = call
        self._announced = self._has_told = False
        self._state = self._in_call
        self._announce()
        return rest

    def _in_call(self, text: str, last: bool) -> str:
        call = self._object
        end = call.read(text)
        if not self._announced:
            self._attempt.append(text[:end])
            if self._is_bare and call.name and call.name not in self._names:
                return self._give_up(text[end:])
            self._announce()
        if not self._announced:
            return self._give_up(text[end:]) if call.is_over else text[end:]
        self._tell_arguments(call.drain())
        if call.is_over:
            if not self._has_told:
                self._tell_arguments("{}")
            self._trims = True
            self._state = self._behind_call
        return text[end:]

    def _announce(self) -> None:
        if self._object.name:
            self._announced = True
            self._attempt = []
            self._number += 1
            self._parts.append(CallPart(self._number, self._object.name))

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._has_told = True
            self._parts.append(CallPart(self._number, arguments=text))

    def _behind_call(self, text: str, last: bool) -> str:
        text = text.lstrip(BLANK)
        for joint, goes_on in self._joints.items():
            if text.startswith(joint):
                self._attempt = [joint] if goes_on else []
                self._state = self._before_object if goes_on else self._in_text
                return text[len(joint) :]
        if text and not last and any(joint.startswith(text) for joint in self._joints):
            return self._hold(text)
        if text:
            self._state = self._in_text
        return text

    def _give_up(self, rest: str) -> str:
        """No call after all."""
        text = "".join(self._attempt)
        self._attempt = []
        self._trims = False
        self._state = self._in_text
        shown = text.rstrip(BLANK)
        self._say(shown)
        return text[len(shown) :] + rest

    def _without_blank(self, text: str) -> str:
        rest = text.lstrip(BLANK)
        self._attempt.append(text[: len(text) - len(rest)])
        return rest

    def _say(self, text: str) -> None:
        if text:
            self._at_start = False
            self._texts.append(text)

    def _hold(self, text: str) -> str:
        self._held = text
        return ""
