"""Decoding of a large JSON text in pieces, so that no piece occupies the interpreter lock for long.

A decoder holds the lock for as long as it runs, and the event loop waits. Here the text is scanned and decoded in
pieces of about `PIECE_BYTES`. After each piece the thread sleeps for as long as the piece took, so that the event loop
gets the lock at least half of the time.

    {"a": [1, 2, ..., 9], "b": 1}    ->    {"a": ...} is cut into [1, 2, ...], ..., [..., 9] and {"b": 1}

A long text between quotes is one piece.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 32 * 1024
_OPEN, _CLOSE, _QUOTE, _COMMA, _COLON = b"[{", b"]}", ord('"'), ord(","), ord(":")
_IS_MARK = np.zeros(256, np.bool_)
_IS_MARK[list(b'"[]{}:,')] = True
_STEPS = np.zeros(256, np.int8)  # change of the depth
_STEPS[list(_OPEN)], _STEPS[list(_CLOSE)] = 1, -1
_SPACE = b" \t\r\n"


class RepeatedKeyError(ValueError):
    """The same key appears twice in one object."""


class PieceError(ValueError):
    """A piece is not valid JSON. `problem`: msgspec's message, with the position in the whole text."""

    def __init__(self, problem: str, piece: bytes = b"") -> None:
        super().__init__(problem)
        self.problem = problem
        self.piece = piece


class Marks(NamedTuple):
    """The brackets, colons and commas outside strings: where they are, which, and the depth after each."""

    at: NDArray[np.int32]
    kind: NDArray[np.uint8]
    depth: NDArray[np.int32]


class Turns:
    """Pauses a thread after each piece of its work. `num_pieces` counts them."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self._since_s = time.perf_counter()

    def end_piece(self) -> None:
        """Sleep for as long as the work since the last pause took."""
        self.num_pieces += 1
        time.sleep(time.perf_counter() - self._since_s)
        self._since_s = time.perf_counter()


class NoTurns(Turns):
    """Pauses nothing: the work is short."""

    def end_piece(self) -> None:
        """Continue at once."""


NO_TURNS = NoTurns()


def find_marks(raw: bytes, turns: Turns) -> Marks:
    """Find the structure of a JSON text that is valid or invalid from some byte on."""
    places: list[NDArray[np.int32]] = []
    kinds: list[NDArray[np.uint8]] = []
    start = 0
    while start < len(raw):
        end = _end_of_chunk(raw, start)
        chunk = raw[start:end]
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
        data = np.frombuffer(chunk, np.uint8)
        found = np.flatnonzero(_IS_MARK[data]).astype(np.int32)
        places.append(found + np.int32(start))
        kinds.append(data[found])
        start = end
        turns.end_piece()
    at, kind = np.concatenate(places), np.concatenate(kinds)
    is_quote = kind == _QUOTE
    is_outside = ~(np.bitwise_xor.accumulate(is_quote) | is_quote)
    at, kind = at[is_outside], kind[is_outside]
    return Marks(at, kind, np.cumsum(_STEPS[kind], dtype=np.int32))


def _end_of_chunk(raw: bytes, start: int) -> int:
    """Return an end near `start` + PIECE_BYTES that does not separate a backslash from what it escapes.

    Before `start`, every backslash has its pair.
    """
    chunk = raw[start : start + PIECE_BYTES]
    num_backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
    return min(len(raw), start + len(chunk) + num_backslashes % 2)


def decode_pieces(raw: bytes, marks: Marks, turns: Turns) -> Any:
    """Decode a JSON text piece by piece. Raises: PieceError, RepeatedKeyError."""
    if marks.depth.size and marks.depth[-1] > 0:
        raise PieceError("Input data was truncated")
    return _Decoder(raw, marks, turns).decode()


class _Decoder:
    def __init__(self, raw: bytes, marks: Marks, turns: Turns) -> None:
        self._raw = raw
        self._marks = marks
        self._turns = turns

    def decode(self) -> Any:
        return self._value(0, len(self._raw), 0, len(self._marks.at))

    def _value(self, start: int, end: int, first: int, last: int) -> Any:
        """Decode a value between two positions. `first`, `last`: the range of its marks."""
        at, kind, _ = self._marks
        is_container = (
            last - first >= 2
            and kind[first] in _OPEN
            and kind[last - 1] == kind[first] + 2  # ] is [ + 2, } is { + 2
            and not self._raw[start : at[first]].strip(_SPACE)
            and not self._raw[at[last - 1] + 1 : end].strip(_SPACE)
        )
        if end - start <= PIECE_BYTES or first == last:
            return self._piece(start, end, b"%b", first, last)
        if not is_container:
            raise PieceError(f"JSON is malformed: the brackets do not match (byte {start})")
        return self._object(first, last) if kind[first] == _OPEN[1] else self._array(first, last)

    def _array(self, first: int, last: int) -> list[Any]:
        found: list[Any] = []
        for run in self._runs(first, last):
            if run.num_children == 1 and run.end - run.start > PIECE_BYTES:
                found.append(self._value(*run[:4]))
            else:
                found += self._children(run, b"[%b]")
        return found

    def _object(self, first: int, last: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        num_members = 0
        for run in self._runs(first, last):
            num_members += run.num_children
            if run.num_children == 1 and run.end - run.start > PIECE_BYTES and self._has_key(run):
                colon = int(self._marks.at[run.first])
                key = self._piece(run.start, colon, b"%b", 0, 0)
                if not isinstance(key, str):
                    raise PieceError(f"JSON is malformed: expected a string (byte {run.start})")
                found[key] = self._value(colon + 1, run.end, run.first + 1, run.last)
            else:
                found |= self._children(run, b"{%b}")
        if len(found) < num_members:
            raise RepeatedKeyError
        return found

    def _has_key(self, run: _Run) -> bool:
        return run.first < run.last and self._marks.kind[run.first] == _COLON

    def _children(self, run: _Run, frame: bytes) -> Any:
        found = self._piece(run.start, run.end, frame, run.first, run.last)
        if not found:  # nothing between two commas, or between a comma and a bracket
            raise PieceError(f"JSON is malformed: expected a value (byte {run.end})")
        if len(found) < run.num_children:
            raise RepeatedKeyError
        return found

    def _piece(self, start: int, end: int, frame: bytes, first: int, last: int) -> Any:
        """Decode a part of the text within the brackets of `frame`."""
        text = frame % self._raw[start:end]
        try:
            found = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise PieceError(_moved(str(error), start - frame.index(b"%")), text) from None
        num_members = int((self._marks.kind[first:last] == _COLON).sum())
        if num_members > 1 and _num_colons(msgspec.json.encode(found)) < num_members:
            raise RepeatedKeyError
        self._turns.end_piece()
        return found

    def _runs(self, first: int, last: int) -> Iterator[_Run]:
        """Divide the children of a container into runs of about PIECE_BYTES, of at least one child."""
        at, kind, depth = self._marks
        inside = slice(first + 1, last - 1)
        is_comma = (kind[inside] == _COMMA) & (depth[inside] == depth[first])
        commas = np.append(np.flatnonzero(is_comma) + first + 1, last - 1)  # and the closing bracket
        ends = at[commas]
        start, mark, child = int(at[first]) + 1, first + 1, 0
        while child < len(commas):
            stop = max(child + 1, int(np.searchsorted(ends, start + PIECE_BYTES, "right")))
            closing = int(commas[stop - 1])
            yield _Run(start, int(ends[stop - 1]), mark, closing, stop - child)
            start, mark, child = int(ends[stop - 1]) + 1, closing + 1, stop


class _Run(NamedTuple):
    """Some children of a container: their positions in the text, the range of their marks, and their number."""

    start: int
    end: int
    first: int
    last: int
    num_children: int


def _num_colons(encoded: bytes) -> int:
    """Count the members of all objects in a text that was encoded by msgspec."""
    return int((find_marks(encoded, NO_TURNS).kind == _COLON).sum())


def _moved(message: str, by: int) -> str:
    """Return the message about a piece with the position in the whole text."""
    text, mark, place = message.rpartition("(byte ")
    number = place.removesuffix(")")
    return f"{text}(byte {int(number) + by})" if mark and number.isdigit() else message
