"""Text and function calls apart, from a stream cut anywhere.

    text --marker--> head --object--> call --over--> after --joint--> next object, or text again
      ^               |                 |
      `--- no call ---+--- no name -----'    what turns out to be no call is text, up to where that was found out

A call is told from the moment its name is complete; until then everything behind the marker is held back. White space
around calls is no part of the text. An end of the stream inside a call leaves it with the arguments so far.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from chatcache.text.tool_calls.call_object import MAX_NAME_CHARS, CallObject
from chatcache.text.tool_calls.syntax import BLANK, LIST_JOINTS, Syntax, open_tail

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
