"""Frames encoded once, kept in order: the newest as they are, older ones deflated.

Frames of one response repeat each other but for a word, so what nobody reads at the moment shrinks to a tenth.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

SEGMENT = 64  # frames
NUM_RAW_SEGMENTS = 4  # readers that keep up never inflate
MAX_DEFLATED_BYTES = 256 * 1024  # a larger segment (whole answers with log-probabilities) would hold up the event loop
_FRAME_OVERHEAD_BYTES = 200  # the objects around a frame
_SEPARATOR = b"\n"  # never in ASCII JSON
_KIND_AT = len(b'{"type":"')
_NUMBERED = b'","sequence_number":'
_HEAD_BYTES = 128  # as far as a kind reaches


class LogFrame(NamedTuple):
    """An encoded event. `number`: its `sequence_number`; None for a frame that only `chatcache.v1` readers get."""

    kind: str
    number: int | None
    data: bytes


class FrameStore:
    """An append-only sequence of frames. Positions count all of them, numbers only the numbered."""

    def __init__(self) -> None:
        self.num_numbered = 0
        self.num_frames = 0
        self.total_bytes = 0
        self.num_bytes = 0
        self._segments: list[list[LogFrame] | bytes] = []
        self._newest: list[LogFrame] = []
        self._first_numbers: list[int] = []  # of the first numbered frame in the segment or behind it
        self._bytes_before: list[int] = []

    def append(self, frame: LogFrame) -> None:
        if self.num_frames % SEGMENT == 0:
            self._begin_segment()
        self._newest.append(frame)
        self.num_frames += 1
        self.num_numbered += frame.number is not None
        self.total_bytes += len(frame.data)
        self.num_bytes += len(frame.data) + _FRAME_OVERHEAD_BYTES

    def from_position(self, position: int) -> Sequence[LogFrame]:
        """Frames from `position` on, as far as they are kept together; none only at the end."""
        if position >= self.num_frames:
            return ()
        return self._segment(position // SEGMENT)[position % SEGMENT :]

    def behind(self, number: int) -> int:
        """The position right behind the frame with that number; -1 is before all frames."""
        if number < 0:
            return 0
        at = bisect_right(self._first_numbers, number) - 1
        for offset, frame in enumerate(self._segment(at)):
            if frame.number == number:
                return at * SEGMENT + offset + 1
        raise IndexError(f"no frame {number}")

    def num_bytes_before(self, position: int) -> int:
        """Bytes of all frames before `position`."""
        if position >= self.num_frames:
            return self.total_bytes
        at, offset = divmod(position, SEGMENT)
        return self._bytes_before[at] + sum(len(frame.data) for frame in self._segment(at)[:offset])

    def seal(self) -> None:
        """Deflate everything: nothing will be added, and there will be few readers, if any."""
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
        small = zlib.compress(_SEPARATOR.join(frame.data for frame in segment), 1)
        self._segments[at] = small
        self.num_bytes += len(small) - size_bytes - len(segment) * _FRAME_OVERHEAD_BYTES

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
