"""Strict JSON decoding, ASCII JSON encoding, and splitting a byte stream into JSON objects.

`decode_object` accepts UTF-8, one value, depth <= 32, at most 100,000 objects, arrays and members and 1,000,000
values, no duplicate keys, no NaN or Infinity (nor 1e999), no lone surrogates. JSON that two parsers could read
differently is refused, for HTTP bodies and WebSocket frames alike.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from chatcache.errors import InvalidRequestError
from chatcache.gateway.json_pieces import PIECE_BYTES, PieceError, RepeatedKeyError, Turns, decode_pieces, find_marks

Value = TypeVar("Value")

MAX_DEPTH = 32
MAX_NODES = 100_000
MAX_VALUES = 1_000_000
_REPEATED_KEY = "the same key appears twice in one JSON object"
_NON_ASCII = re.compile(r"[^\x00-\x7f]+")
_STRUCTURE = b'"[]{}:,'
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_BRACKET_STEPS = np.zeros(256, np.int8)  # change of the depth
_BRACKET_STEPS[list(b"[{")], _BRACKET_STEPS[list(b"]}")] = 1, -1


def decode_object(data: bytes | str) -> dict[str, Any]:
    """Parse a JSON object. Raises: InvalidRequestError with code "invalid_json"."""
    try:
        raw = data.encode() if isinstance(data, str) else data
        if len(raw) > PIECE_BYTES:
            return _as_object(_decode_large(raw))
        num_members = _check_structure(_structure(raw))
        value = _as_object(msgspec.json.decode(raw))
    except UnicodeError:
        raise _invalid("the body must be UTF-8") from None
    except msgspec.MsgspecError as error:
        raise _invalid(f"not valid JSON: {_describe(str(error), data)}") from None
    # The decoder keeps the last member of a name. If there was an earlier one, the value has fewer members.
    if num_members > 1 and _structure(msgspec.json.encode(value)).count(b":") < num_members:
        raise _invalid(_REPEATED_KEY)
    return value


def _decode_large(raw: bytes) -> Any:
    """Decode in pieces, for a thread. Raises: as `decode_object`."""
    turns = Turns()
    marks = find_marks(raw, turns)
    _check_structure(marks.kind.tobytes())
    try:
        return decode_pieces(raw, marks, turns)
    except PieceError as error:
        raise _invalid(f"not valid JSON: {_describe(error.problem, error.piece)}") from None
    except RepeatedKeyError:
        raise _invalid(_REPEATED_KEY) from None


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid("the body must be a JSON object")
    return value


def encode(value: object) -> bytes:
    """Encode as compact ASCII JSON.

    It contains no line separators of any kind, so it fits in one SSE line.
    """
    data = msgspec.json.encode(value)
    return data if data.isascii() else _NON_ASCII.sub(_escape, data.decode()).encode("ascii")


def preencoded(value: Value) -> Value:
    """Encode a part of a larger body in advance, for example on a thread.

    The result is a `msgspec.Raw`, which msgspec copies into the body unchanged. Its declared type is that of the value,
    as the schema requires it.
    """
    return cast(Value, msgspec.Raw(encode(value)))


def _escape(match: re.Match[str]) -> str:
    return json.dumps(match.group())[1:-1]


def _describe(message: str, data: bytes | str) -> str:
    """Rephrase msgspec's message about invalid JSON.

    Of a lone surrogate at the end of a string, msgspec reports that the data is truncated.
    """
    if "out of range" in message:
        return "a number is out of range"
    if "truncated" not in message and "surrogate" not in message:
        return message.removeprefix("JSON is malformed: ")
    try:
        json.loads(data)
    except ValueError:
        return "it ends too early" if "truncated" in message else message.removeprefix("JSON is malformed: ")
    return "a string has a lone surrogate"


def _structure(raw: bytes) -> bytes:
    """Return the brackets, colons and commas outside strings, of JSON that is valid or invalid from some byte on."""
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(raw.translate(None, _NO_STRUCTURE), np.uint8)
    is_quote = marks == ord('"')
    is_outside = ~(np.bitwise_xor.accumulate(is_quote) | is_quote)
    return bytes(marks[is_outside])


def _check_structure(structure: bytes) -> int:
    """Limit depth and number of values before parsing, because a parsed value costs far more than its bytes.

    Returns the number of members of all objects.
    """
    num_members = structure.count(b":")
    num_nodes = structure.count(b"[") + structure.count(b"{") + num_members
    if num_nodes > MAX_NODES:
        raise _invalid(f"JSON may hold at most {MAX_NODES} objects, arrays and members")
    if num_nodes + structure.count(b",") > MAX_VALUES:
        raise _invalid(f"JSON may hold at most {MAX_VALUES} values")
    depths = np.cumsum(_BRACKET_STEPS[np.frombuffer(structure, np.uint8)], dtype=np.int32)
    if depths.max(initial=0) > MAX_DEPTH:
        raise _invalid(f"JSON may nest at most {MAX_DEPTH} deep")
    return num_members


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="invalid_json")


# Objects and arrays of one value in an import file; a parser needs far more memory for them than for text.
MAX_BRACKETS = 2_000_000
_OUTSIDE = re.compile(rb'["\[\]{}]')
_INSIDE = re.compile(rb'["\\]')
_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"


class JsonObjectSplitter:
    """Splits a byte stream into JSON objects: lines, a sequence, or the elements of an array.

    It tracks only brackets and strings and buffers at most one object, so a parser never gets a whole import file.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0  # scanned up to this position of the buffer
        self._start = 0  # of the object that is open, or of the bytes after the last one
        self._depth = 0
        self._top = 0  # depth at which objects begin: 1 inside the array, else 0
        self._in_string = False
        self._num_brackets = 0
        self._num_bytes_dropped = 0
        self._num_values = 0
        self._has_begun = False
        self._is_closed = False

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the objects that are complete.

        Raises: InvalidRequestError with the byte position if the bytes cannot be a JSON object.
        """
        self._buffer += data
        if not self._has_begun:
            if len(self._buffer) < len(_BOM) and _BOM.startswith(self._buffer):
                return []
            self._has_begun = True
            if self._buffer.startswith(_BOM):
                self._at = self._start = len(_BOM)
        found: list[bytes] = []
        while (mark := self._next_mark()) is not None:
            value = self._process_bracket(mark)
            if value is not None:
                found.append(value)
        self._drop(self._start if self._depth > self._top else self._at)
        return found

    def end(self) -> None:
        """End the stream. Raises: InvalidRequestError if the last object or the array is incomplete."""
        if self._depth or self._in_string:
            raise InvalidRequestError(
                f"not valid JSON: it ends within a value that began at byte {self._position(self._start)}"
            )
        if not self._has_begun and self._buffer:
            raise self._unexpected(0)
        self._check_between(len(self._buffer))

    def _next_mark(self) -> int | None:
        """Position of the next bracket outside strings, or None; `_at` moves past it."""
        while True:
            pattern = _INSIDE if self._in_string else _OUTSIDE
            match = pattern.search(self._buffer, self._at)
            if match is None:
                self._at = len(self._buffer)
                if self._depth == self._top:
                    self._check_between(self._at)
                return None
            at, mark = match.start(), match.group()
            if mark == b"\\":
                if at + 1 >= len(self._buffer):
                    self._at = at
                    return None
                self._at = at + 2
            elif mark == b'"':
                if self._depth == self._top:
                    raise self._unexpected(at)
                self._in_string, self._at = not self._in_string, at + 1
            else:
                self._at = at + 1
                return at

    def _process_bracket(self, at: int) -> bytes | None:
        """Process the bracket at `at`; return the object if this bracket ends it."""
        mark = bytes(self._buffer[at : at + 1])
        if self._depth == self._top:
            self._check_between(at)
        if mark in b"{[":
            self._num_brackets += 1
            if self._num_brackets > MAX_BRACKETS:
                raise InvalidRequestError(f"one conversation may hold at most {MAX_BRACKETS} JSON objects and arrays")
            if self._depth == self._top:
                self._open_value(mark, at)
            else:
                self._depth += 1
            return None
        if self._depth == self._top:
            if mark != b"]" or not self._top:
                raise self._unexpected(at)
            self._depth = self._top = 0
            self._is_closed, self._start = True, at + 1
            return None
        self._depth -= 1
        if self._depth > self._top:
            return None
        value = bytes(self._buffer[self._start : at + 1])
        self._start, self._num_brackets = at + 1, 0
        self._num_values += 1
        return value

    def _open_value(self, mark: bytes, at: int) -> None:
        if self._is_closed:
            raise self._unexpected(at)
        if mark == b"[":
            if self._top or self._num_values:
                raise self._unexpected(at)
            self._top, self._start = 1, at + 1
        else:
            self._start = at
        self._depth += 1

    def _check_between(self, end: int) -> None:
        """Allow only white space and commas between objects. Raises: InvalidRequestError."""
        between = bytes(self._buffer[self._start : end])
        odd = between.lstrip(_SPACE + (b"," if self._num_values and not self._is_closed else b""))
        if odd:
            raise self._unexpected(end - len(odd))

    def _drop(self, num_bytes: int) -> None:
        del self._buffer[:num_bytes]
        self._num_bytes_dropped += num_bytes
        self._at -= num_bytes
        self._start = max(0, self._start - num_bytes)

    def _position(self, at: int) -> int:
        return self._num_bytes_dropped + at

    def _unexpected(self, at: int) -> InvalidRequestError:
        byte = bytes(self._buffer[at : at + 1])
        message = f"not valid JSON: {byte!r} at byte {self._position(at)}, where an object should begin"
        return InvalidRequestError(message)
