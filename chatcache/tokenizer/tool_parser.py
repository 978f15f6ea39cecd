"""Streaming parser that separates text from tool calls.

The stream may be split at any character.

    text --marker--> head --object--> call --end--> after --separator--> next object, or text again
      ^               |                 |
      `-- not a call -+-- no name ------'     input that turns out not to be a call is returned as text

A call is reported once its name is complete; until then, all input after the marker is held back. Arguments are
reported as they arrive, exactly as the model wrote them:

    {"name": "look_up", "arguments": {"word": "page"}}
                     ^               `-------------- reported character by character
                     `- the call is reported here

White space around calls is not part of the text; a line break separates the text after a call from that before it. If
the stream ends within a call, or its arguments violate their notation, the call keeps the arguments so far and stays
open (`has_open_call`). A part of a delimiter that the stream ends with after a call is not text, nor are surplus
braces around a call in JSON.
Some models double the braces of calls in JSON; every second one is then left out.
Of calls in JSON, only the outer object must be valid (keys, colons, commas). The end of the arguments is found by
brackets and quotes alone: errors within them are passed to the client unchanged. Arguments in another notation are
reported as JSON (`argument_readers`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from chatcache.tokenizer.argument_readers import LiteralReader, TaggedReader
from chatcache.tokenizer.tool_formats import (
    WHITESPACE,
    Functions,
    JsonArguments,
    LiteralArguments,
    TaggedArguments,
    ToolCallSyntax,
    partial_marker_length,
)

MAX_NAME_CHARS = 256
_ARGUMENTS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]<]')
_WORD = re.compile(r"[A-Za-z0-9+.\-]+")


class ReadState(Enum):
    """State of a `CallObjectReader`: the syntactic element that it reads next."""

    START = auto()
    KEY_OR_END = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_TEXT = auto()
    OPENED = auto()  # after the first brace of a value, which may be doubled
    IN_BRACKETS = auto()
    IN_WORD = auto()
    NEXT = auto()
    CLOSED = auto()
    BROKEN = auto()


class CallObjectReader:
    """Reads the JSON object of one tool call while it is generated.

    `name` is "" until it is complete. `at`: the element that is read next; CLOSED after the last brace, BROKEN if the
    next character is not allowed. With `bare_arguments_of` the input is the arguments object alone, for the function
    with that name.
    """

    def __init__(self, bare_arguments_of: str = "") -> None:
        self.name = bare_arguments_of
        self.at = ReadState.VALUE if bare_arguments_of else ReadState.START
        self._is_bare = bool(bare_arguments_of)
        self._key = "arguments" if bare_arguments_of else ""
        self._quoted: list[str] = []
        self._escaped = False
        self._depth = 0
        self._in_quotes = False
        self._is_doubled = False
        self._skips: bool | None = None  # whether the next brace is left out; None if they are not doubled
        self._has_begun = self._has_arguments = False
        self._pending: list[str] = []

    @property
    def is_finished(self) -> bool:
        """True if the object is complete or invalid."""
        return self.at in (ReadState.CLOSED, ReadState.BROKEN)

    @property
    def is_complete(self) -> bool:
        """True unless the arguments began and did not end."""
        return self._has_arguments or not self._has_begun

    def drain(self) -> str:
        """Return the text of the arguments that was read since the last call of this method."""
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def read(self, text: str, last: bool = False) -> int:
        """Read `text`; return the offset where reading stopped: after the name, when finished, or at the end."""
        at, had_name = 0, bool(self.name)
        while at < len(text) and not self.is_finished and bool(self.name) == had_name:
            at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        match self.at:
            case ReadState.IN_KEY | ReadState.IN_TEXT:
                return self._string(text, at)
            case ReadState.OPENED:
                self.at = ReadState.IN_BRACKETS
                if text[at] == "{":
                    self._skips = True
                return at
            case ReadState.IN_BRACKETS:
                return self._brackets(text, at)
            case ReadState.IN_WORD:
                return self._word(text, at)
            case _:
                return at + 1 if text[at] in WHITESPACE or self._read_punctuation(text[at]) else at

    def _read_punctuation(self, char: str) -> bool:
        """Consume a punctuation character.

        Returns False if it belongs to the next element or is not allowed.
        """
        match self.at, char:
            case ((ReadState.START | ReadState.KEY_OR_END), "{"):
                self._is_doubled = self.at is ReadState.KEY_OR_END
                self.at = ReadState.KEY_OR_END
            case ((ReadState.KEY_OR_END | ReadState.KEY), '"'):
                self.at = ReadState.IN_KEY
            case ReadState.COLON, ":":
                self.at = ReadState.VALUE
            case ReadState.NEXT, ",":
                self.at = ReadState.KEY
            case ((ReadState.NEXT | ReadState.KEY_OR_END), "}"):
                self.at = ReadState.CLOSED
            case ReadState.VALUE, _:
                return self._begin_value(char)
            case _:
                self.at = ReadState.BROKEN
                return False
        return True

    def _begin_value(self, char: str) -> bool:
        self._depth, self._in_quotes, self._skips = 0, False, None
        if char == "{" and self._is_doubled:
            self._depth = 1
            self._emit("{")
            self.at = ReadState.OPENED
            return True
        if char in "{[":
            self.at = ReadState.IN_BRACKETS
        elif char == '"':
            self.at = ReadState.IN_TEXT
            self._emit('"')
            return True
        elif _WORD.match(char):
            self.at = ReadState.IN_WORD
        else:
            self.at = ReadState.BROKEN
        return False

    def _string(self, text: str, at: int) -> int:
        """Read a key or a string value up to its closing quote."""
        end, is_closed = self._string_end(text, at)
        self._quoted.append(text[at : end - is_closed])
        if self.at is ReadState.IN_TEXT:
            self._emit(text[at:end])
            if is_closed:
                self._end_value()
                self._end_text()
        elif is_closed:
            self._key = self._unquote() or ""
            self.at = ReadState.COLON
        return end

    def _string_end(self, text: str, at: int) -> tuple[int, bool]:
        """Return the offset after the next part of a string, and whether the string ends there."""
        if self._escaped:
            self._escaped = False
            return at + 1, False
        found = _IN_STRING.search(text, at)
        if found is None:
            return len(text), False
        self._escaped = found[0] == "\\"
        return found.end(), not self._escaped

    def _unquote(self) -> str | None:
        raw = "".join(self._quoted)
        self._quoted.clear()
        try:
            text = json.loads(f'"{raw}"', strict=False)
            text.encode()
        except ValueError:
            return None
        return text if isinstance(text, str) else None

    def _end_text(self) -> None:
        value = self._unquote()
        if self._key == "name" and not self.name:
            self.name = value or ""
            if not 1 <= len(self.name) <= MAX_NAME_CHARS:
                self.name, self.at = "", ReadState.BROKEN

    def _brackets(self, text: str, at: int) -> int:
        """Read an object or list within the arguments, up to its closing bracket.

        A "<" outside of strings makes the call invalid: it starts a marker.
        """
        if self._in_quotes:
            end, is_closed = self._string_end(text, at)
            self._emit(text[at:end])
            self._in_quotes = not is_closed
            return end
        found = _IN_VALUE.search(text, at)
        if found is None:
            self._emit(text[at:])
            return len(text)
        end = found.end()
        if found[0] == "<":
            self._emit(text[at : end - 1])
            self.at = ReadState.BROKEN
            return end - 1
        is_skipped = False
        if found[0] in "{}" and self._skips is not None:
            is_skipped, self._skips = self._skips, not self._skips
        self._emit(text[at : end - is_skipped])
        if found[0] == '"':
            self._in_quotes = True
        else:
            self._depth += 1 if found[0] in "{[" else -1
            if not self._depth:
                self._end_value()
        return end

    def _word(self, text: str, at: int) -> int:
        found = _WORD.match(text, at)
        end = found.end() if found else at
        self._emit(text[at:end])
        if end < len(text):
            self._end_value()
        return end

    def _end_value(self) -> None:
        if self._key in _ARGUMENTS:
            self._has_arguments = True
        elif self._key == "name" and self.at is not ReadState.IN_TEXT and not self.name:
            self.at = ReadState.BROKEN
            return
        self.at = ReadState.CLOSED if self._is_bare else ReadState.NEXT

    def _emit(self, piece: str) -> None:
        if self._key in _ARGUMENTS and not self._has_arguments:
            self._has_begun = True
            self._pending.append(piece)


_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Delta of call `number` (0, 1, ...). The first delta has the complete name.

    `call_id`: the id that the model wrote, in the first delta.
    """

    number: int
    name: str = ""
    arguments: str = ""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Text, reasoning and calls that a chunk of the stream added."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class _Then(Enum):
    """What follows a delimiter after a call."""

    MORE = auto()  # further delimiters
    CALL = auto()
    TEXT = auto()


class ToolCallParser:
    """Separates the tool calls of one candidate from its text while it is generated.

    An object or list without a marker is a call only if it names one of the `functions`.
    """

    def __init__(self, syntax: ToolCallSyntax, functions: Functions | None = None) -> None:
        self._syntax = syntax
        self._functions = functions if functions is not None else {}
        self._markers = _markers(syntax)
        self._bare = ("{" if syntax.is_object and not syntax.is_list else "[") if syntax.allows_bare else ""
        self._followers = _followers(syntax, in_list=False)
        self._state: Callable[[str, bool], str] = self._in_text
        self._held = ""
        self._trims = False
        self._has_text = False
        self._text_separator = ""  # of the next text from an earlier one
        self._attempt: list[str] = []  # input of a possible call whose name is not complete yet
        self._is_bare = False
        self._expected: tuple[str, ...] = ()  # delimiters before the name
        self._in_list = False
        self._after = self._followers
        self._name = ""
        self._call_id: list[str] = []
        self._object: CallObjectReader | TaggedReader | LiteralReader = CallObjectReader()
        self._number = -1
        self._announced = False
        self._is_broken = False
        self._has_emitted = False
        self._texts: list[str] = []
        self._parts: list[ToolCallDelta] = []

    @property
    def has_open_call(self) -> bool:
        """True between the name of a call and the end of its arguments, and after arguments without an end."""
        return self._is_broken or (self._announced and self._state == self._in_call)

    def push(self, text: str) -> ParsedText:
        """Parse a chunk; return the parts that are now final."""
        if self._is_plain_text(text):
            return ParsedText(text)
        return self._run(text, last=False)

    def finish(self) -> ParsedText:
        """End the stream; return the text that was held back."""
        return self._run("", last=True)

    def _is_plain_text(self, text: str) -> bool:
        """Return True if nothing is held back and no call can start in `text`."""
        if self._held or self._trims or not self._has_text or self._state != self._in_text:
            return False
        return text != "" and text[-1] not in WHITESPACE and not any(mark[0] in text for mark in self._markers)

    def _run(self, text: str, *, last: bool) -> ParsedText:
        rest, self._held = self._held + text, ""
        while rest:
            rest = self._state(rest, last)
        if last and self._attempt:
            self._emit_text("".join(self._attempt))
            self._attempt = []
        parsed = ParsedText("".join(self._texts), calls=tuple(self._parts))
        self._texts.clear()
        self._parts.clear()
        return parsed

    def _in_text(self, text: str, last: bool) -> str:
        if self._trims:
            text = text.lstrip(WHITESPACE)
            self._trims = not text
        if self._bare and not self._has_text and self._number < 0:  # at the start of the reply
            first = text.lstrip(WHITESPACE)
            if first.startswith(self._bare):
                return self._begin(text[: len(text) - len(first)], first, (), bare=True)
            if not first and not last:
                return self._hold(text)
        places = [(at, marker) for marker in self._markers if (at := text.find(marker)) >= 0]
        if places:
            at, marker = min(places)
            shown = text[:at].rstrip(WHITESPACE)
            self._emit_text(shown)
            return self._begin(text[len(shown) : at] + marker, text[at + len(marker) :], self._markers[marker])
        held = max((partial_marker_length(text, marker) for marker in self._markers), default=0)
        end = len(text) if last else len(text) - held
        self._emit_text(text[:end])
        return self._hold(text[end:])

    def _begin(self, opening: str, rest: str, expected: tuple[str, ...], *, bare: bool = False) -> str:
        """Start to read a possible call after `opening`, its marker or brace; return `rest`.

        `opening` is returned as text if no call follows.
        """
        self._attempt = [opening]
        self._is_bare = bare
        self._in_list = False
        self._after = self._followers
        self._expected = expected
        self._state = self._in_head
        return rest

    def _in_head(self, text: str, last: bool) -> str:
        """Read the delimiters before a name or object."""
        text = self._skip_whitespace(text)
        if not text:
            return ""
        syntax = self._syntax
        if syntax.is_list and not self._in_list and text[0] == "[":
            self._attempt.append("[")
            self._in_list = True
            self._after = _followers(syntax, in_list=True)
            return text[1:]
        if self._expected:
            rest = self._read_delimiter(text, last)
            return rest if rest is not None else self._reject_call(text)
        if self._bare and (marker := syntax.marker):  # after a separator
            if text.startswith(marker):
                self._attempt.append(marker)
                self._is_bare = False
                return text[len(marker) :]
            if marker.startswith(text) and not last:
                return self._hold(text)
        if text[0] == "{" and (syntax.is_object or not isinstance(syntax.arguments, LiteralArguments)):
            return self._open(CallObjectReader(), text)
        if (not syntax.is_object or (syntax.name_end and not self._in_list)) and _NAME.match(text):
            self._name = ""
            self._state = self._in_name
            return text
        return self._reject_call(text)

    def _read_delimiter(self, text: str, last: bool) -> str | None:
        """Read the next expected delimiter; return None if the text does not begin with it."""
        word = self._expected[0]
        if text.startswith(word):
            self._attempt.append(word)
            self._expected = self._expected[1:]
            return text[len(word) :]
        return self._hold(text) if word.startswith(text) and not last else None

    def _in_name(self, text: str, last: bool) -> str:
        """Read a function name that precedes its arguments."""
        found = _NAME.match(text)
        if found is not None:
            self._name += found[0]
            self._attempt.append(found[0])
            return text[found.end() :]
        if len(self._name) > MAX_NAME_CHARS or (self._is_bare and self._name not in self._functions):
            return self._reject_call(text)
        if self._syntax.id_open and text.startswith(self._syntax.id_open):
            self._attempt.append(self._syntax.id_open)
            self._state = self._in_call_id
            return text[len(self._syntax.id_open) :]
        if self._syntax.id_open.startswith(text) and not last:
            return self._hold(text)
        return self._end_name(text)

    def _in_call_id(self, text: str, last: bool) -> str:
        found = _NAME.match(text)
        if found is not None:
            self._call_id.append(found[0])
            self._attempt.append(found[0])
            return text[found.end() :]
        return self._end_name(text)

    def _end_name(self, rest: str) -> str:
        self._expected = tuple(self._syntax.name_end.split())
        self._state = self._after_name
        return rest

    def _after_name(self, text: str, last: bool) -> str:
        """Read the delimiters between a name and its arguments."""
        syntax = self._syntax
        if syntax.name_end[:1].isspace() or len(self._expected) < len(syntax.name_end.split()):
            text = self._skip_whitespace(text)
            if not text:
                return ""
        if self._expected:
            rest = self._read_delimiter(text, last)
            if rest is not None:
                return rest if self._expected else self._open_arguments(rest)
            if text[0] != "{" or isinstance(syntax.arguments, LiteralArguments):
                return self._reject_call(text)
        return self._open_arguments(text)

    def _open_arguments(self, rest: str) -> str:
        form = self._syntax.arguments
        schema = self._functions.get(self._name, {})
        if isinstance(form, TaggedArguments):
            return self._open(TaggedReader(form, self._name, schema), rest)
        if isinstance(form, LiteralArguments):
            return self._open(LiteralReader(form, self._name, self._syntax.call_close.lstrip()[:1]), rest)
        return self._open(CallObjectReader(self._name), rest)

    def _open(self, call: CallObjectReader | TaggedReader | LiteralReader, rest: str) -> str:
        self._object = call
        self._announced = self._has_emitted = False
        self._state = self._in_call
        self._announce()
        return rest

    def _in_call(self, text: str, last: bool) -> str:
        call = self._object
        end = call.read(text, last)
        if not self._announced:
            self._attempt.append(text[:end])
            if self._is_bare and call.name and call.name not in self._functions:
                return self._reject_call(text[end:])
            self._announce()
        if not self._announced:
            return self._reject_call(text[end:]) if call.is_finished else text[end:]
        self._emit_arguments(call.drain())
        if last:
            return ""  # a part of a delimiter within a call that stays open
        if call.is_finished:
            self._is_broken = not call.is_complete
            if not self._has_emitted:
                self._emit_arguments("{}")
            self._trims = True
            self._state = self._after_call
        elif end == 0:
            return self._hold(text)
        return text[end:]

    def _announce(self) -> None:
        if self._object.name:
            self._announced = True
            self._is_broken = False
            self._attempt = []
            self._number += 1
            self._text_separator = "\n" if self._has_text else ""
            self._parts.append(ToolCallDelta(self._number, self._object.name, call_id="".join(self._call_id)))
            self._call_id = []

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._has_emitted = True
            self._parts.append(ToolCallDelta(self._number, arguments=text))

    def _after_call(self, text: str, last: bool) -> str:
        text = text.lstrip(WHITESPACE)
        for word, (then, expected) in self._after.items():
            if not text.startswith(word):
                continue
            if then is _Then.CALL:
                self._attempt = [word]
                self._expected = expected
                self._state = self._in_head
            elif then is _Then.TEXT:
                self._attempt = []
                self._state = self._in_text
            return text[len(word) :]
        if text.startswith("{") and self._bare == "{":  # no separator
            self._expected, self._state = (), self._in_head
            return text
        if text and any(word.startswith(text) for word in self._after):
            return self._hold(text)
        if text:
            self._state = self._in_text
        return text

    def _reject_call(self, rest: str) -> str:
        """Return the input of the attempted call as text."""
        text = "".join(self._attempt)
        self._attempt = []
        self._call_id = []
        self._trims = False
        self._state = self._in_text
        shown = text.rstrip(WHITESPACE)
        self._emit_text(shown)
        return text[len(shown) :] + rest

    def _skip_whitespace(self, text: str) -> str:
        rest = text.lstrip(WHITESPACE)
        self._attempt.append(text[: len(text) - len(rest)])
        return rest

    def _emit_text(self, text: str) -> None:
        if text:
            self._has_text = True
            self._texts.append(self._text_separator + text)
            self._text_separator = ""

    def _hold(self, text: str) -> str:
        self._held = text
        return ""


def _markers(syntax: ToolCallSyntax) -> dict[str, tuple[str, ...]]:
    """Return the words that start calls anywhere in a reply, each with the delimiters that must follow it.

    The delimiters of a section may be missing.
    """
    section, call = syntax.section_lexemes, syntax.call_lexemes
    starts = [words for words in ((*section, *call), call) if words and words[0] != "[" and words[0][0] != "{"]
    return {words[0]: words[1:] for words in reversed(starts)}


def _followers(syntax: ToolCallSyntax, *, in_list: bool) -> dict[str, tuple[_Then, tuple[str, ...]]]:
    """Return what may follow the arguments of a call, longest first, each with the delimiters that then follow."""
    closing, ending = syntax.call_close.split(), syntax.section_close.split()
    surplus = ["}"] if isinstance(syntax.arguments, JsonArguments) else []
    if syntax.is_list and ending:
        ending = [word for word in (*(["]"] if in_list else []), ending[0].removeprefix("]"), *ending[1:]) if word]
    separator = syntax.separator.split() if in_list or not syntax.is_list else []
    opening = () if syntax.allows_bare else syntax.call_lexemes
    found: dict[str, tuple[_Then, tuple[str, ...]]] = dict.fromkeys((*closing, *ending, *surplus), (_Then.MORE, ()))
    if syntax.section_open or syntax.allows_bare:
        for words in ((*separator, *opening), opening):
            if words:
                found.setdefault(words[0], (_Then.CALL, tuple(words[1:])))
    if syntax.allows_bare and syntax.is_object and not syntax.is_list:
        found |= dict.fromkeys((";", ","), (_Then.CALL, ()))
    last = ending if syntax.section_open else closing
    if last:
        found[last[-1]] = (_Then.TEXT, ())
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
