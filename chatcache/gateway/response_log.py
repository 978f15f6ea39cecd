"""One response's events, append-only, for as many readers as like, on whatever transport.

Events are encoded when they happen and never again. A reader is a position in the log and nothing else: it may stall
for as long as it likes at no cost to anybody, and the engine never waits for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from chatcache.errors import InvalidRequest
from chatcache.gateway.beam_tree import BEAM, BeamTree
from chatcache.gateway.jsonio import encode
from chatcache.gateway.log_frames import FrameStore, LogFrame
from chatcache.gateway.snapshots import OutputTexts

TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})
MAX_BEHIND = 256
MAX_BEHIND_BYTES = 256 * 1024
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
        self.closed = False
        self.unsaved = False  # it ended, and the store has not taken that yet
        self.num_readers = 0
        self.on_readers: Callable[[int], None] | None = None
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
        self._texts.take(kind, fields)
        if kind in TERMINAL:
            if self._terminal is not None:
                raise RuntimeError(f"{self.response_id} ended twice: {self._terminal.kind}, then {kind}")
            self._terminal = _Terminal(self._frames.num_frames, number, kind)
        if kind in _MILESTONES:
            self._milestones.append(self._frames.num_frames)
        self._add(LogFrame(kind, number, encode({"type": kind, "sequence_number": number, **fields})))

    def note(self, kind: str, **fields: Any) -> None:
        """Add a frame outside the numbering."""
        if kind == BEAM:
            self._beams.take(fields["nodes"], fields["live"])
        frame = LogFrame(kind, None, encode({"type": kind, **fields}))
        if kind in _KEPT_NOTES:
            self._notes[kind] = self._frames.num_frames, frame
        self._add(frame)

    def close(self) -> None:
        """Nothing will be added any more."""
        self.closed = True
        self._frames.seal()
        self._wake()

    def reader(self, after: int = -1, *, extended: bool = False) -> LogReader:
        """Read from the frame numbered `after` + 1 on. `extended`: as `chatcache.v1`, with notes and snapshots.

        Raises: InvalidRequest for a number that has not been given yet.
        """
        if after > self.last_number:
            raise InvalidRequest(f"starting_after: the last event so far is {self.last_number}", param="starting_after")
        return LogReader(self, self._frames, after, extended)

    def milestones(self) -> list[LogFrame]:
        """The frames that tell how the response stands: created, each finished output item, the terminal one."""
        return [self._frames.from_position(position)[0] for position in self._milestones]

    def texts(self) -> list[dict[str, object]]:
        """What every output item says so far, as in `response.snapshot`."""
        return self._texts.outputs()

    async def wait_beyond(self, position: int) -> bool:
        """Wait for a frame at `position`; False when there will be none."""
        while position >= self._frames.num_frames:
            if self.closed:
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

    def count_reader(self, more: int) -> None:
        self.num_readers += more
        if self.on_readers is not None:
            self.on_readers(self.num_readers)

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
        self._position = frames.behind(after)
        self._bytes_read = frames.num_bytes_before(self._position)
        self.sent_number = after
        self.num_snapshots = 0
        self._needs_beams = extended and after >= 0
        self._beams_told = 0  # what was noted of beams before this position is told
        self._acked: int | None = None
        self._opened = asyncio.Event()

    def __enter__(self) -> LogReader:
        self._log.count_reader(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.count_reader(-1)

    async def __aiter__(self) -> AsyncIterator[LogFrame]:
        while frames := await self.next():
            for frame in frames:
                yield frame

    async def next(self) -> Sequence[LogFrame]:
        """Wait for frames and take those that are there, a segment at most; none when the log has ended."""
        while True:
            await self.wait_open()
            if not self._needs_beams and not await self._log.wait_beyond(self._position):
                return ()
            frames = self._take()
            if frames:
                return frames

    @property
    def is_open(self) -> bool:
        """Whether the window has room."""
        return self._acked is None or self.sent_number - self._acked < MAX_BEHIND

    async def wait_open(self) -> None:
        while not self.is_open:
            self._opened.clear()
            await self._opened.wait()

    def ack(self, number: int) -> None:
        """The client has seen everything up to that number. Raises: InvalidRequest for what it cannot have seen."""
        if number > self.sent_number:
            raise InvalidRequest(
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
        return num_frames > MAX_BEHIND or (num_frames > 1 and num_bytes > MAX_BEHIND_BYTES)
