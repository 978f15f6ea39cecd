r"""One response's events, append-only, for as many readers as like, on whatever transport.

Events are encoded when they happen and never again. A reader is a position in the log and nothing else: it may stall
for as long as it likes at no cost to anybody, and the engine never waits for one.

Frames encoded once, kept in order: the newest as they are, older ones deflated.

Frames of one response repeat each other but for a word, so what nobody reads at the moment shrinks to a tenth.

What the outputs of a response say so far, gathered from its events: what one `response.snapshot` tells.

The live beams of a response as one tree, for readers that have not heard how it grew.

0 -- 1 -- 3 -- 6 (live)        told to them: 1 3 6 7, and that 6 and 7 are live
      \    `--- 7 (live)
       `- 4                    nothing live is below it any more: forgotten
"""

from __future__ import annotations

import asyncio
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

from msgspec import UNSET, Raw

from chatcache.errors import InvalidRequestError
from chatcache.gateway.json_codec import encode
from chatcache.gateway.schemas.responses import OutputItem

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

    def position_after(self, number: int) -> int:
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


_ADDED = "response.output_item.added"
_DONE = "response.output_item.done"
_DELTA = ".delta"
_TEXT_NAMES = {"function_call": "arguments"}  # of item types whose text goes by another name


@dataclass(slots=True)
class _Output:
    head: dict[str, Any]
    text_name: str
    parts: list[str] = field(default_factory=list)


class OutputTexts:
    """The text of every output item, by item id, joined from deltas whatever they are of."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._outputs: dict[object, _Output] = {}

    def update(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Heed an event that adds an item, or adds to one."""
        if kind == _ADDED:
            item: OutputItem = fields["item"]
            item_type = str(item.__struct_config__.tag)
            head = {"item_id": item.id, "output_index": fields["output_index"], "type": item_type}
            head |= _present(item, "name", "call_id", "candidate", "status")
            self._outputs[item.id] = _Output(head, _TEXT_NAMES.get(item_type, "text"))
        elif kind == _DONE and (output := self._outputs.get(fields["item"].id)) is not None:
            output.head |= _present(fields["item"], "status", "finish_reason", "score")
        elif kind.endswith(_DELTA) and (output := self._outputs.get(fields["item_id"])) is not None:
            output.parts.append(fields["delta"])
            self.num_bytes += len(fields["delta"])

    def outputs(self) -> list[dict[str, object]]:
        """All items in the order they came."""
        found: list[dict[str, object]] = []
        for output in self._outputs.values():
            output.parts = ["".join(output.parts)]
            found.append({**output.head, output.text_name: output.parts[0]})
        return found


def _present(item: OutputItem, *names: str) -> dict[str, object]:
    """The fields of these names that the item has and that are set."""
    values = {name: getattr(item, name, UNSET) for name in names}
    return {name: value for name, value in values.items() if value is not UNSET}


BEAM = "response.beam"
_NODE_OVERHEAD_BYTES = 250  # the objects around a node


class _Node(NamedTuple):
    parent: int
    data: bytes


class BeamTree:
    """Nodes that lead to live beams. What a node costs is paid once, when it comes or goes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._nodes: dict[int, _Node] = {}  # parents before children
        self._num_children: defaultdict[int, int] = defaultdict(int)
        self._live: tuple[int, ...] = ()

    def update(self, nodes: Sequence[Mapping[str, Any]], live: Sequence[int]) -> None:
        """New nodes, parents first, and where live beams end now: the fields of a `response.beam`."""
        perhaps_gone = [*self._live, *(node["id"] for node in nodes)]
        for node in nodes:
            self._nodes[node["id"]] = added = _Node(node["parent"], encode(node))
            self._num_children[added.parent] += 1
            self.num_bytes += len(added.data) + _NODE_OVERHEAD_BYTES
        self._live = tuple(live)
        ends = frozenset(live)
        for node_id in perhaps_gone:
            self._drop(node_id, ends)

    def frame(self, response_id: str) -> bytes | None:
        """The whole tree as one frame; None while there is none."""
        if not self._nodes:
            return None
        nodes = Raw(b"[%s]" % b",".join(node.data for node in self._nodes.values()))
        return encode({"type": BEAM, "response_id": response_id, "whole": True, "nodes": nodes, "live": self._live})

    def _drop(self, node_id: int, ends: frozenset[int]) -> None:
        """Forget a node that leads nowhere, and its ancestors that led nowhere else."""
        while node_id in self._nodes and node_id not in ends and not self._num_children[node_id]:
            gone = self._nodes.pop(node_id)
            del self._num_children[node_id]
            self._num_children[gone.parent] -= 1
            self.num_bytes -= len(gone.data) + _NODE_OVERHEAD_BYTES
            node_id = gone.parent


TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})
MAX_LAG_FRAMES = 256
MAX_LAG_BYTES = 256 * 1024
_MILESTONES = frozenset({"response.created", "response.output_item.done", *TERMINAL})
_KEPT_NOTES = ("response.progress", "conversation.updated")  # the newest of each survives a snapshot


class _Terminal(NamedTuple):
    position: int
    number: int
    kind: str


class ResponseLog:
    """Frames of one response in order. Belongs to one event loop.

    Numbered frames carry `sequence_number` 0, 1, 2, ... without gaps; unnumbered ones are for `chatcache.v1` only.
    `on_readers` is told how many readers there are whenever that changes.
    """

    def __init__(self, response_id: str) -> None:
        self.response_id = response_id
        self.is_closed = False
        self.is_unsaved = False  # it ended, and the store has not taken that yet
        self.num_readers = 0
        self.on_reader_count: Callable[[int], None] | None = None
        self._frames = FrameStore()
        self._texts = OutputTexts()
        self._beams = BeamTree()
        self._terminal: _Terminal | None = None
        self._milestones: list[int] = []
        self._notes: dict[str, tuple[int, LogFrame]] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # of the readers; looking it up costs a system call

    @property
    def last_number(self) -> int:
        """The number of the newest numbered frame, -1 before the first."""
        return self._frames.num_numbered - 1

    @property
    def terminal(self) -> str | None:
        """The type of the frame that ended the response, once there is one."""
        return self._terminal.kind if self._terminal is not None else None

    @property
    def num_bytes(self) -> int:
        """Memory held, about."""
        return self._frames.num_bytes + self._texts.num_bytes + self._beams.num_bytes

    def append(self, kind: str, **fields: object) -> None:
        """Add a numbered frame."""
        number = self._frames.num_numbered
        self._texts.update(kind, fields)
        if kind in TERMINAL:
            if self._terminal is not None:
                raise RuntimeError(f"{self.response_id} ended twice: {self._terminal.kind}, then {kind}")
            self._terminal = _Terminal(self._frames.num_frames, number, kind)
        if kind in _MILESTONES:
            self._milestones.append(self._frames.num_frames)
        self._add(LogFrame(kind, number, encode({"type": kind, "sequence_number": number, **fields})))

    def append_unnumbered(self, kind: str, **fields: Any) -> None:
        """Add a frame outside the numbering."""
        if kind == BEAM:
            self._beams.update(fields["nodes"], fields["live"])
        frame = LogFrame(kind, None, encode({"type": kind, **fields}))
        if kind in _KEPT_NOTES:
            self._notes[kind] = self._frames.num_frames, frame
        self._add(frame)

    def close(self) -> None:
        """Nothing will be added any more."""
        self.is_closed = True
        self._frames.seal()
        self._wake()

    def reader(self, after: int = -1, *, extended: bool = False) -> LogReader:
        """Read from the frame numbered `after` + 1 on. `extended`: as `chatcache.v1`, with notes and snapshots.

        Raises: InvalidRequestError for a number that has not been given yet.
        """
        if after > self.last_number:
            raise InvalidRequestError(
                f"starting_after: the last event so far is {self.last_number}", param="starting_after"
            )
        return LogReader(self, self._frames, after, extended)

    def milestones(self) -> list[LogFrame]:
        """The frames that tell how the response stands: created, each finished output item, the terminal one."""
        return [self._frames.from_position(position)[0] for position in self._milestones]

    def texts(self) -> list[dict[str, object]]:
        """What every output item says so far, as in `response.snapshot`."""
        return self._texts.outputs()

    async def wait_for_frame(self, position: int) -> bool:
        """Wait for a frame at `position`; False when there will be none."""
        while position >= self._frames.num_frames:
            if self.is_closed:
                return False
            self._loop = self._loop or asyncio.get_running_loop()
            waiter = self._loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                raise
        return True

    def snapshot(self, position: int) -> tuple[int, int, list[LogFrame]]:
        """Where to go on, the newest number stood for, and what stands for all frames before that from `position` on.

        The terminal frame is never among them: behind it there is nothing to stand for.
        """
        end, number = self._frames.num_frames, self.last_number
        if self._terminal is not None:
            end, number = self._terminal.position, self._terminal.number - 1
            if position >= end:
                return position, number, []
        first = list(self._frames.from_position(0)[:1]) if position == 0 else []  # tells what the response is
        fields = {"response_id": self.response_id, "sequence_number": number, "outputs": self._texts.outputs()}
        beams = self.beams()[1]
        merged = LogFrame("response.snapshot", None, encode({"type": "response.snapshot", **fields}))
        notes = sorted(found for found in self._notes.values() if position <= found[0] < end)
        return end, number, [*first, *(frame for _, frame in notes), *beams, merged]

    def beams(self) -> tuple[int, list[LogFrame]]:
        """The live beams as they stand now, in place of all that was told of them before the position."""
        data = self._beams.frame(self.response_id)
        return self._frames.num_frames, [LogFrame(BEAM, None, data)] if data is not None else []

    def add_readers(self, more: int) -> None:
        self.num_readers += more
        if self.on_reader_count is not None:
            self.on_reader_count(self.num_readers)

    def _add(self, frame: LogFrame) -> None:
        self._frames.append(frame)
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiting.clear()


class LogReader:
    """A position in a log. Entered as a context manager, it counts as somebody who listens.

    A plain reader gets every numbered frame. An extended one also gets the notes, and where it has fallen behind, one
    `response.snapshot` in place of what it missed; once it has said what its client has seen (`ack`), it goes no
    further than the window beyond that. Where it missed something, or may have, live beams are told as a whole.
    """

    def __init__(self, log: ResponseLog, frames: FrameStore, after: int, extended: bool) -> None:
        self._log = log
        self._frames = frames
        self._extended = extended
        self._position = frames.position_after(after)
        self._bytes_read = frames.num_bytes_before(self._position)
        self.sent_number = after
        self.num_snapshots = 0
        self._needs_beams = extended and after >= 0
        self._beams_told = 0  # what was noted of beams before this position is told
        self._acked: int | None = None
        self._opened = asyncio.Event()

    def __enter__(self) -> LogReader:
        self._log.add_readers(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.add_readers(-1)

    async def __aiter__(self) -> AsyncIterator[LogFrame]:
        while frames := await self.next():
            for frame in frames:
                yield frame

    async def next(self) -> Sequence[LogFrame]:
        """Wait for frames and take those that are there, a segment at most; none when the log has ended."""
        while True:
            await self.wait_open()
            if not self._needs_beams and not await self._log.wait_for_frame(self._position):
                return ()
            frames = self._take()
            if frames:
                return frames

    @property
    def is_open(self) -> bool:
        """Whether the window has room."""
        return self._acked is None or self.sent_number - self._acked < MAX_LAG_FRAMES

    async def wait_open(self) -> None:
        while not self.is_open:
            self._opened.clear()
            await self._opened.wait()

    def ack(self, number: int) -> None:
        """The client has seen everything up to that number.

        Raises: InvalidRequestError for what it cannot have seen.
        """
        if number > self.sent_number:
            raise InvalidRequestError(
                f"sequence_number: the last one sent here is {self.sent_number}", param="sequence_number"
            )
        self._acked = max(number, self._acked if self._acked is not None else -1)
        self._opened.set()

    def _take(self) -> Sequence[LogFrame]:
        if self._extended and self._is_behind():
            end, number, frames = self._log.snapshot(self._position)
            if frames:
                self.num_snapshots += 1
                self._needs_beams = False
                self._position, self._bytes_read, self.sent_number = end, self._frames.num_bytes_before(end), number
                return frames
        if self._needs_beams:
            self._needs_beams = False
            self._beams_told, whole = self._log.beams()
            return whole
        start = self._position
        taken = self._frames.from_position(start)
        self._position += len(taken)
        for frame in taken:
            self._bytes_read += len(frame.data)
            if frame.number is not None:
                self.sent_number = frame.number
        if not self._extended:
            return [frame for frame in taken if frame.number is not None]
        if start >= self._beams_told:
            return taken
        return [frame for at, frame in enumerate(taken, start) if frame.kind != BEAM or at >= self._beams_told]

    def _is_behind(self) -> bool:
        num_frames = self._frames.num_frames - self._position
        num_bytes = self._frames.total_bytes - self._bytes_read
        return num_frames > MAX_LAG_FRAMES or (num_frames > 1 and num_bytes > MAX_LAG_BYTES)
