"""The frames of an event log as bytes, and the log-probabilities that they refer to."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

from msgspec import Raw

from chatcache.gateway.api.logprobs import LogprobCopy, PackedLogprobs, ScoredToken
from chatcache.gateway.limits.admission import LoopTurns
from chatcache.gateway.schemas.completions import TokenLogprob

SEGMENT_FRAMES = 64
NUM_RAW_SEGMENTS = 4  # readers that keep up never decompress
MAX_DEFLATED_BYTES = 256 * 1024  # compressing a larger segment would block the event loop
_FRAME_OVERHEAD_BYTES = 200  # Python objects of a frame
_SEPARATOR = b"\n"  # never in ASCII JSON
_KIND_AT = len(b'{"type":"')
_NUMBERED = b'","sequence_number":'
_HEAD_BYTES = 128  # the kind and the number are within this prefix


class LogFrame(NamedTuple):
    """An encoded event.

    `number` is its `sequence_number`; None for a frame that only `chatcache.v1` readers receive.
    """

    kind: str
    number: int | None
    data: bytes


class FrameStore:
    """Append-only list of encoded frames; old ones are compressed in segments.

    A position counts all frames; a number counts only those with a `sequence_number`.
    """

    def __init__(self) -> None:
        self.num_numbered = 0
        self.num_frames = 0
        self.total_bytes = 0
        self.num_bytes = 0
        self._segments: list[list[LogFrame] | bytes] = []
        self._newest: list[LogFrame] = []
        self._first_numbers: list[int] = []  # of the first numbered frame in or after the segment
        self._bytes_before: list[int] = []

    def append(self, frame: LogFrame) -> None:
        if self.num_frames % SEGMENT_FRAMES == 0:
            self._begin_segment()
        self._newest.append(frame)
        self.num_frames += 1
        self.num_numbered += frame.number is not None
        self.total_bytes += len(frame.data)
        self.num_bytes += len(frame.data) + _FRAME_OVERHEAD_BYTES

    def from_position(self, position: int) -> Sequence[LogFrame]:
        """Return frames from `position` to the end of its segment; none only at the end."""
        if position >= self.num_frames:
            return ()
        return self._segment(position // SEGMENT_FRAMES)[position % SEGMENT_FRAMES :]

    def position_after(self, number: int) -> int:
        """Return the position just after the frame with this number, or 0 for the number -1."""
        if number < 0:
            return 0
        at = bisect_right(self._first_numbers, number) - 1
        for offset, frame in enumerate(self._segment(at)):
            if frame.number == number:
                return at * SEGMENT_FRAMES + offset + 1
        raise IndexError(f"no frame {number}")

    def num_bytes_before(self, position: int) -> int:
        """Total size of all frames before `position`."""
        if position >= self.num_frames:
            return self.total_bytes
        at, offset = divmod(position, SEGMENT_FRAMES)
        return self._bytes_before[at] + sum(len(frame.data) for frame in self._segment(at)[:offset])

    def seal(self) -> None:
        """Compress all segments: no frame will be added, and few readers will come."""
        for at in range(max(0, len(self._segments) - NUM_RAW_SEGMENTS), len(self._segments)):
            self._deflate(at)

    def _begin_segment(self) -> None:
        if len(self._segments) >= NUM_RAW_SEGMENTS:
            self._deflate(len(self._segments) - NUM_RAW_SEGMENTS)
        self._newest = []
        self._segments.append(self._newest)
        self._first_numbers.append(self.num_numbered)
        self._bytes_before.append(self.total_bytes)

    def _deflate(self, at: int) -> None:
        segment = self._segments[at]
        if isinstance(segment, bytes):
            return
        size_bytes = sum(len(frame.data) for frame in segment)
        if size_bytes > MAX_DEFLATED_BYTES:
            return
        compressed = zlib.compress(_SEPARATOR.join(frame.data for frame in segment), 1)
        self._segments[at] = compressed
        self.num_bytes += len(compressed) - size_bytes - len(segment) * _FRAME_OVERHEAD_BYTES

    def _segment(self, at: int) -> Sequence[LogFrame]:
        segment = self._segments[at]
        if isinstance(segment, list):
            return segment
        number = self._first_numbers[at]
        frames: list[LogFrame] = []
        for data in zlib.decompress(segment).split(_SEPARATOR):
            numbered = _NUMBERED in data[:_HEAD_BYTES]
            frames.append(LogFrame(_kind(data), number if numbered else None, data))
            number += numbered
        return frames


def _kind(data: bytes) -> str:
    return data[_KIND_AT : data.index(b'"', _KIND_AT)].decode()


MAX_RESOLVED_BYTES = 64 * 1024  # of the frames that a reader gets at once
MIN_PIECE_BYTES = 32 * 1024
MAX_SHARED_BYTES = 256 * 1024  # of the resolved frames that the readers of a log share
_REFERENCE = b"\t"  # encloses a reference; white space of JSON, of which encoded frames have none


def has_references(frame: LogFrame) -> bool:
    """Whether a frame has references to log-probabilities in the place of these."""
    return _REFERENCE in frame.data


class LogprobStore:
    """The log-probabilities of the output tokens, once for each candidate, for frames that refer to them."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._entries: defaultdict[int, PackedLogprobs] = defaultdict(partial(PackedLogprobs, token_bytes))
        self._shares_resolved = False
        self._resolved: dict[bytes, bytes] = {}  # the latest resolved frames, oldest first, by their references
        self.num_shared_bytes = 0  # of these

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def num_bytes(self) -> int:
        """Approximate memory use, without the resolved frames: these are gone when the readers are."""
        return sum(entries.num_bytes for entries in self._entries.values())

    def add(self, candidate: int, scored: Iterable[ScoredToken]) -> list[TokenLogprob]:
        """Add entries and return the reference to them, as the value of a frame's field."""
        entries = self._entries[candidate]
        start = len(entries)
        entries.extend(scored)
        return self._reference(candidate, start, len(entries))

    def all_of(self, candidate: int) -> list[TokenLogprob]:
        """Return the reference to all entries of a candidate so far; the empty list if it has none."""
        found = self._entries.get(candidate)
        return self._reference(candidate, 0, len(found)) if found is not None else []

    def copy(self, frames: Iterable[LogFrame], sizes: Mapping[int, int]) -> list[tuple[int, LogprobCopy]]:
        """Return by candidate the entries to append to a copy of this store, before it gets these frames.

        `sizes`: the number of entries that the copy has of each candidate.
        """
        ends: dict[int, int] = {}
        for frame in frames:
            for reference in frame.data.split(_REFERENCE)[1::2]:
                candidate, _, end = _place(reference)
                ends[candidate] = max(end, ends.get(candidate, 0))
        starts = {candidate: sizes.get(candidate, 0) for candidate in ends}
        return [
            (candidate, self._entries[candidate].copy(starts[candidate], end))
            for candidate, end in ends.items()
            if end > starts[candidate]
        ]

    def sizes(self) -> dict[int, int]:
        """Return the number of entries of each candidate."""
        return {candidate: len(entries) for candidate, entries in self._entries.items()}

    def append_copy(self, candidate: int, copied: LogprobCopy) -> None:
        """Append what `copy` of another store returned."""
        self._entries[candidate].append_copy(copied)

    def share_resolved(self, is_shared: bool) -> None:
        """Set whether `resolve` keeps the latest frames, because several readers resolve the same ones."""
        self._shares_resolved = is_shared
        if not is_shared:
            self._resolved.clear()
            self.num_shared_bytes = 0

    def resolve(self, frame: LogFrame) -> LogFrame:
        """Replace the references in a frame by the entries, unless there are too many for one turn."""
        if not has_references(frame):
            return frame
        data = self._resolved.get(frame.data)
        if data is None:
            if self.num_resolved_bytes(frame.data) > MAX_RESOLVED_BYTES:
                return frame
            data = b"".join(self.pieces(frame.data))
            if self._shares_resolved:
                self._keep_resolved(frame.data, data)
        return frame._replace(data=data)

    def _keep_resolved(self, references: bytes, data: bytes) -> None:
        self._resolved[references] = data
        self.num_shared_bytes += len(data)
        while self.num_shared_bytes > MAX_SHARED_BYTES:
            oldest = next(iter(self._resolved))
            self.num_shared_bytes -= len(self._resolved.pop(oldest))

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield an encoded text in pieces, in which each reference is replaced by the entries.

        A piece is small, or has no entries. The entries may be added to meanwhile.
        """
        parts = data.split(_REFERENCE)
        for at, part in enumerate(parts):
            if at % 2 == 0:
                yield part
                continue
            candidate, start, end = _place(part)
            yield b"["
            yield from self._entries[candidate].read(start, end)
            yield b"]"

    def num_resolved_bytes(self, data: bytes) -> int:
        """Return the approximate size of an encoded text once its references are replaced by the entries."""
        parts = data.split(_REFERENCE)
        places = map(_place, parts[1::2])
        return sum(map(len, parts[::2])) + sum(
            self._entries[candidate].num_json_bytes(start, end) for candidate, start, end in places
        )

    def _reference(self, candidate: int, start: int, end: int) -> list[TokenLogprob]:
        return cast(list[TokenLogprob], Raw(b"\t[%d,%d,%d]\t" % (candidate, start, end)))


async def in_turns(pieces: Iterator[bytes], turns: LoopTurns, owner: str) -> AsyncGenerator[bytes, None]:
    """Yield pieces, joined to MIN_PIECE_BYTES. Each is made in a turn of the owner, however many clients it has."""
    while joined := await turns.run(owner, partial(_next_piece, pieces)):
        yield joined


def _next_piece(pieces: Iterator[bytes]) -> bytes:
    """Return the next pieces, joined to MIN_PIECE_BYTES; empty after the last one."""
    joined = bytearray()
    for piece in pieces:
        joined += piece
        if len(joined) >= MIN_PIECE_BYTES:
            break
    return bytes(joined)


def _place(reference: bytes) -> tuple[int, int, int]:
    """Return the candidate, the start and the end of a reference."""
    candidate, start, end = map(int, reference[1:-1].split(b","))
    return candidate, start, end
