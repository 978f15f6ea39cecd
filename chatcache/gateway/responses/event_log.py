r"""The event log of one response: append-only, with any number of independent readers.

Each event is encoded once, when it happens. A reader is only a position in the log, so a stalled reader costs nothing
and never delays the engine.

`FrameStore` keeps the encoded frames. Frames of one response differ in a few words, so old segments are compressed to
about a tenth. `OutputTexts` collects the text of each output item for `response.snapshot`. `BeamTree` keeps the live
beams as one tree, for readers that missed its growth. Log-probabilities are repeated by four frames and are most of a
response that has them, so frames only refer to `LogprobStore`, and a reader gets the entries:

    0 -- 1 -- 3 -- 6 (live)        sent: 1 3 6 7, live: 6 7
          \    `--- 7 (live)
           `- 4                    no live beam below it: pruned
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from chatcache.errors import ChatcacheError, InvalidRequestError
from chatcache.gateway.api.logprobs import LogprobCopy
from chatcache.gateway.json_codec import encode
from chatcache.gateway.limits.admission import LoopTurns
from chatcache.gateway.responses.log_frames import (
    MAX_RESOLVED_BYTES,
    MIN_PIECE_BYTES,
    FrameStore,
    LogFrame,
    LogprobStore,
    has_references,
)
from chatcache.gateway.schemas.fields import LOGPROBS
from chatcache.gateway.schemas.responses import OutputItem

_ADDED = "response.output_item.added"
_DONE = "response.output_item.done"
_DELTA = ".delta"
_TEXT_NAMES = {"function_call": "arguments"}  # item types whose text field is not "text"


class _EncodedItem(msgspec.Struct):
    """The fields of an encoded output item that `OutputTexts` needs."""

    id: str
    type: str
    namespace: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    candidate: int | UnsetType = UNSET
    status: str | UnsetType = UNSET
    finish_reason: str | UnsetType | None = UNSET
    score: float | UnsetType = UNSET


class _EncodedFields(msgspec.Struct):
    """The fields of an encoded frame from which texts and beams are built again."""

    item: _EncodedItem | UnsetType = UNSET
    output_index: int = 0
    item_id: str = ""
    delta: str = ""
    nodes: list[dict[str, Any]] = []
    live: list[int] = []


@dataclass(slots=True)
class _Output:
    head: dict[str, Any]
    text_name: str
    parts: list[str] = field(default_factory=list)


class OutputTexts:
    """The text of every output item by item id, joined from its deltas."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._outputs: dict[object, _Output] = {}

    def update(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Apply an event that adds an item, extends it or ends it."""
        if kind == _ADDED:
            item: OutputItem | _EncodedItem = fields["item"]
            item_type = item.type if isinstance(item, _EncodedItem) else str(item.__struct_config__.tag)
            head = {"item_id": item.id, "output_index": fields["output_index"], "type": item_type}
            head |= _present(item, "namespace", "name", "call_id", "candidate", "status")
            self._outputs[item.id] = _Output(head, _TEXT_NAMES.get(item_type, "text"))
        elif kind == _DONE and (output := self._outputs.get(fields["item"].id)) is not None:
            output.head |= _present(fields["item"], "status", "finish_reason", "score")
        elif kind.endswith(_DELTA) and (output := self._outputs.get(fields["item_id"])) is not None:
            output.parts.append(fields["delta"])
            self.num_bytes += len(fields["delta"])

    def outputs(self) -> list[dict[str, object]]:
        """Return all items in the order in which they were added."""
        found: list[dict[str, object]] = []
        for output in self._outputs.values():
            output.parts = ["".join(output.parts)]
            found.append({**output.head, output.text_name: output.parts[0]})
        return found


def _present(item: OutputItem | _EncodedItem, *names: str) -> dict[str, object]:
    """Return the named fields that the item has and that are set."""
    values = {name: getattr(item, name, UNSET) for name in names}
    return {name: value for name, value in values.items() if value is not UNSET}


BEAM = "response.beam"
_NODE_OVERHEAD_BYTES = 250  # Python objects of a node


class _Node(NamedTuple):
    parent: int
    data: bytes


class BeamTree:
    """The token tree of a beam search, limited to the paths that lead to live beams.

    Each node is added and pruned once, so the cost per event does not depend on the size of the tree.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._nodes: dict[int, _Node] = {}  # parents before children
        self._num_children: defaultdict[int, int] = defaultdict(int)
        self._live: tuple[int, ...] = ()

    def update(self, nodes: Sequence[Mapping[str, Any]], live: Sequence[int]) -> None:
        """Add nodes, parents first, and set the ends of the live beams (a `response.beam`)."""
        candidates = [*self._live, *(node["id"] for node in nodes)]
        for node in nodes:
            self._nodes[node["id"]] = added = _Node(node["parent"], encode(node))
            self._num_children[added.parent] += 1
            self.num_bytes += len(added.data) + _NODE_OVERHEAD_BYTES
        self._live = tuple(live)
        ends = frozenset(live)
        for node_id in candidates:
            self._prune(node_id, ends)

    def frame(self, response_id: str) -> bytes | None:
        """Encode the whole tree as one frame; None if it is empty."""
        if not self._nodes:
            return None
        nodes = Raw(b"[%s]" % b",".join(node.data for node in self._nodes.values()))
        return encode({"type": BEAM, "response_id": response_id, "whole": True, "nodes": nodes, "live": self._live})

    def _prune(self, node_id: int, ends: frozenset[int]) -> None:
        """Remove a node if it leads to no live beam, then its ancestors that lead to none either."""
        while node_id in self._nodes and node_id not in ends and not self._num_children[node_id]:
            removed = self._nodes.pop(node_id)
            del self._num_children[node_id]
            self._num_children[removed.parent] -= 1
            self.num_bytes -= len(removed.data) + _NODE_OVERHEAD_BYTES
            node_id = removed.parent


TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})
MAX_LAG_FRAMES = 256
MAX_LAG_BYTES = 256 * 1024
MAX_DIRECT_FRAMES = 16  # more are read in turns if the log has other readers
_MILESTONES = frozenset({"response.created", "response.output_item.done", *TERMINAL})
_SNAPSHOT_KINDS = ("response.progress", "conversation.updated")  # a snapshot includes the newest of each


class _Terminal(NamedTuple):
    position: int
    number: int
    kind: str


MAX_COPIED_BYTES = 256 * 1024  # of frames, unless a single one is larger


class LogCopy(msgspec.Struct, array_like=True):
    """Frames of a log from a position on, for a log in another process that has all before it.

    `logprobs`: by candidate, what the frames refer to. `is_closed`: these are the last ones.
    """

    position: int
    frames: list[tuple[str, int | None, bytes]]
    logprobs: list[tuple[int, LogprobCopy]]
    is_closed: bool
    is_unsaved: bool
    num_frames: int  # of the whole log so far
    successor: str | None = None
    conversation_id: str | None = None


class ResponseLog:
    """The frames of one response in order. Belongs to one event loop.

    Numbered frames have `sequence_number` 0, 1, 2, ... without gaps; unnumbered ones are for `chatcache.v1` only.
    `token_bytes`: of each token, for log-probabilities. `conversation_id`: None for a response that is not stored.
    `on_reader_count` is called with the number of readers whenever it changes.
    """

    def __init__(self, response_id: str, token_bytes: Sequence[bytes] = (), conversation_id: str | None = None) -> None:
        self.response_id = response_id
        self.conversation_id = conversation_id
        self.is_closed = False
        self.is_unsaved = False  # the response ended, but the store does not have it yet
        self.num_readers = 0
        self.on_reader_count: Callable[[int], None] | None = None
        self._frames = FrameStore()
        self.logprobs = LogprobStore(token_bytes)
        self._texts = OutputTexts()
        self._beams = BeamTree()
        self._terminal: _Terminal | None = None
        self._failure: ChatcacheError | None = None
        self._milestones: list[int] = []
        self._latest_unnumbered: dict[str, tuple[int, LogFrame]] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # cached: looking it up costs a system call

    @property
    def last_number(self) -> int:
        """Number of the newest numbered frame, -1 before the first."""
        return self._frames.num_numbered - 1

    @property
    def terminal(self) -> str | None:
        """Type of the terminal frame; None until the response has ended."""
        return self._terminal.kind if self._terminal is not None else None

    @property
    def num_bytes(self) -> int:
        """Approximate memory use."""
        return self._frames.num_bytes + self._texts.num_bytes + self._beams.num_bytes + self.logprobs.num_bytes

    def append(self, kind: str, **fields: object) -> None:
        """Add a numbered frame."""
        number = self._frames.num_numbered
        self._texts.update(kind, fields)
        self._add_numbered(kind, number, encode({"type": kind, "sequence_number": number, **fields}))

    def append_unnumbered(self, kind: str, **fields: Any) -> None:
        """Add a frame without a sequence number."""
        if kind == BEAM:
            self._beams.update(fields["nodes"], fields["live"])
        self._add_unnumbered(kind, encode({"type": kind, **fields}))

    @property
    def num_frames(self) -> int:
        """Number of all frames, the unnumbered ones included."""
        return self._frames.num_frames

    def copy(self, position: int, logprob_sizes: Mapping[int, int]) -> LogCopy:
        """Return frames from `position` on. `logprob_sizes`: of the log that they are for (`LogprobStore.sizes`)."""
        frames: list[LogFrame] = []
        num_bytes = 0
        for frame in self._frames.from_position(position):
            if frames and num_bytes + len(frame.data) > MAX_COPIED_BYTES:
                break
            frames.append(frame)
            num_bytes += len(frame.data)
        is_last = self.is_closed and position + len(frames) >= self._frames.num_frames
        return LogCopy(
            position=position,
            frames=[(frame.kind, frame.number, frame.data) for frame in frames],
            logprobs=self.logprobs.copy(frames, logprob_sizes),
            is_closed=is_last,
            is_unsaved=self.is_unsaved,
            num_frames=self._frames.num_frames,
            conversation_id=self.conversation_id,
        )

    def append_copy(self, copied: LogCopy) -> None:
        """Add frames of a log in another process. Raises: ValueError if they are not the next ones."""
        if copied.position != self._frames.num_frames:
            raise ValueError(f"frames from {copied.position}, not from {self._frames.num_frames}")
        self.conversation_id = copied.conversation_id
        for candidate, entries in copied.logprobs:
            self.logprobs.append_copy(candidate, entries)
        for kind, number, data in copied.frames:
            if kind in (_ADDED, _DONE, BEAM) or kind.endswith(_DELTA):
                fields = msgspec.structs.asdict(msgspec.json.decode(data, type=_EncodedFields))
                if kind == BEAM:
                    self._beams.update(fields["nodes"], fields["live"])
                else:
                    self._texts.update(kind, fields)
            if number is None:
                self._add_unnumbered(kind, data)
            else:
                self._add_numbered(kind, number, data)
        if copied.is_closed:
            self.is_unsaved = copied.is_unsaved
            self.close()

    @property
    def failure(self) -> ChatcacheError | None:
        """Why the log, a copy of one in another process, ends before its response."""
        return self._failure

    def fail(self, error: ChatcacheError) -> None:
        """Have readers raise `error` after the last frame: the log of the other process cannot be read any more."""
        self._failure = error
        self._wake()

    def close(self) -> None:
        """End the log: no frame will be added."""
        self.is_closed = True
        self._frames.seal()
        self._wake()

    def reader(self, after: int = -1, *, extended: bool = False) -> LogReader:
        """Return a reader of all frames after number `after`.

        `extended`: for `chatcache.v1`, with unnumbered frames and snapshots.

        Raises: InvalidRequestError for a number that does not exist yet.
        """
        if after > self.last_number:
            raise InvalidRequestError(
                f"starting_after: the last event so far is {self.last_number}", param="starting_after"
            )
        return LogReader(self, self._frames, after, extended)

    def milestones(self) -> Iterator[LogFrame]:
        """Yield the terminal frame, or `response.created` and all finished output items before the end.

        They refer to `logprobs`.
        """
        positions = [self._terminal.position] if self._terminal is not None else self._milestones
        for position in positions:
            yield self._frames.from_position(position)[0]

    def created(self) -> LogFrame:
        """Return `response.created`."""
        return self._frames.from_position(self._milestones[0])[0]

    def texts(self) -> list[dict[str, object]]:
        """Return the current text of every output item, as in `response.snapshot`."""
        return self._texts.outputs()

    async def wait_for_frame(self, position: int) -> bool:
        """Wait until there is a frame at `position`; return False if the log ends before it.

        Raises: ChatcacheError if the log is that of another process, which cannot be read any more.
        """
        while position >= self._frames.num_frames:
            if self.is_closed:
                return False
            if self._failure is not None:
                raise self._failure
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
        """Return the frames that replace all frames from `position` to the present.

        Returns the position and number to continue from, and the frames. The terminal frame is never replaced.
        """
        end, number = self._frames.num_frames, self.last_number
        if self._terminal is not None:
            end, number = self._terminal.position, self._terminal.number - 1
            if position >= end:
                return position, number, []
        first = list(self._frames.from_position(0)[:1]) if position == 0 else []  # `response.created`
        fields = {"response_id": self.response_id, "sequence_number": number, "outputs": self._texts.outputs()}
        if self.logprobs:
            fields["omitted"] = [LOGPROBS]
        beams = self.beams()[1]
        merged = LogFrame("response.snapshot", None, encode({"type": "response.snapshot", **fields}))
        notes = sorted(found for found in self._latest_unnumbered.values() if position <= found[0] < end)
        return end, number, [*first, *(frame for _, frame in notes), *beams, merged]

    def beams(self) -> tuple[int, list[LogFrame]]:
        """Return the live beams as at most one frame, and the position of the next frame of the log.

        Beam frames before that position are contained in it.
        """
        data = self._beams.frame(self.response_id)
        return self._frames.num_frames, [LogFrame(BEAM, None, data)] if data is not None else []

    def add_readers(self, change: int) -> None:
        self.num_readers += change
        self.logprobs.share_resolved(self.num_readers > 1)
        if self.on_reader_count is not None:
            self.on_reader_count(self.num_readers)

    def _add_numbered(self, kind: str, number: int, data: bytes) -> None:
        if kind in TERMINAL:
            if self._terminal is not None:
                raise RuntimeError(f"{self.response_id} ended twice: {self._terminal.kind}, then {kind}")
            self._terminal = _Terminal(self._frames.num_frames, number, kind)
        if kind in _MILESTONES:
            self._milestones.append(self._frames.num_frames)
        self._add(LogFrame(kind, number, data))

    def _add_unnumbered(self, kind: str, data: bytes) -> None:
        frame = LogFrame(kind, None, data)
        if kind in _SNAPSHOT_KINDS:
            self._latest_unnumbered[kind] = self._frames.num_frames, frame
        self._add(frame)

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
    """Reads the frames of a log from a position on; a reader of the response while it is open.

    A plain reader gets every numbered frame. An extended reader also gets unnumbered frames and, after falling behind,
    one `response.snapshot` in place of the frames it missed. Once the client has acknowledged a frame (`ack`), the
    reader stays at most one window ahead of the last acknowledged frame. After a gap, it gets the live beams as a whole
    tree.
    """

    def __init__(self, log: ResponseLog, frames: FrameStore, after: int, extended: bool) -> None:
        self._log = log
        self._frames = frames
        self.response_id = log.response_id
        self.is_extended = extended
        self._position = frames.position_after(after)
        self._bytes_read = frames.num_bytes_before(self._position)
        self.sent_number = after
        self.num_snapshots = 0
        self._needs_beams = extended and after >= 0
        self._beams_sent_until = 0  # beam frames before this position were sent as part of a tree
        self._acked: int | None = None
        self._opened = asyncio.Event()
        self._num_turn_bytes = 0  # returned since the last pause

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

    async def next(self, turns: LoopTurns | None = None, owner: str = "") -> Sequence[LogFrame]:
        """Wait for frames and return at most one segment of them; empty at the end of the log.

        A frame with very many log-probabilities is returned alone and with references, for `pieces`. The reader pauses
        after each MIN_PIECE_BYTES, so that the event loop does other work. If the log has other readers, they read many
        frames in `turns` of the owner.
        """
        while True:
            await self.wait_open()
            if not self._needs_beams and not await self._log.wait_for_frame(self._position):
                return ()
            if turns is not None and self._log.num_readers > 1 and self._num_available > MAX_DIRECT_FRAMES:
                frames = await turns.run(owner, self._pop_frames)
            else:
                if self._num_turn_bytes >= MIN_PIECE_BYTES:
                    self._num_turn_bytes = 0
                    await asyncio.sleep(0)
                frames = self._pop_frames()
            if frames:
                self._num_turn_bytes += sum(len(frame.data) for frame in frames)
                return frames

    def pieces(self, frame: LogFrame) -> Iterator[bytes]:
        """Yield the data of a frame with references, in small pieces, for `in_turns`."""
        return self._log.logprobs.pieces(frame.data)

    @property
    def is_open(self) -> bool:
        """Whether the acknowledgement window has room."""
        return self._acked is None or self.sent_number - self._acked < MAX_LAG_FRAMES

    async def wait_open(self) -> None:
        while not self.is_open:
            self._opened.clear()
            await self._opened.wait()

    def ack(self, number: int) -> None:
        """Record that the client has received everything up to that number.

        Raises: InvalidRequestError for a number that was not sent.
        """
        if number > self.sent_number:
            raise InvalidRequestError(
                f"sequence_number: the last one sent here is {self.sent_number}", param="sequence_number"
            )
        self._acked = max(number, self._acked if self._acked is not None else -1)
        self._opened.set()

    def _pop_frames(self) -> Sequence[LogFrame]:
        if self.is_extended and self._is_lagging():
            end, number, frames = self._log.snapshot(self._position)
            if frames:
                self.num_snapshots += 1
                self._needs_beams = False
                self._position, self._bytes_read, self.sent_number = end, self._frames.num_bytes_before(end), number
                return frames
        if self._needs_beams:
            self._needs_beams = False
            self._beams_sent_until, beam_frames = self._log.beams()
            return beam_frames
        start = self._position
        available = self._resolve(self._frames.from_position(start))
        self._position += len(available)
        if not self.is_extended:
            return [frame for frame in available if frame.number is not None]
        if start >= self._beams_sent_until:
            return available
        return [
            frame for at, frame in enumerate(available, start) if frame.kind != BEAM or at >= self._beams_sent_until
        ]

    def _resolve(self, frames: Sequence[LogFrame]) -> Sequence[LogFrame]:
        """Count frames as read and resolve their references, up to `MAX_RESOLVED_BYTES`."""
        resolved: list[LogFrame] = []
        num_bytes = 0
        for frame in frames:
            if num_bytes > MAX_RESOLVED_BYTES:
                break
            found = self._log.logprobs.resolve(frame)
            if has_references(found) and resolved:
                break
            self._bytes_read += len(frame.data)
            if frame.number is not None:
                self.sent_number = frame.number
            resolved.append(found)
            num_bytes += len(found.data)
            if has_references(found):
                break
        return resolved

    @property
    def _num_available(self) -> int:
        """Number of frames to read."""
        return self._frames.num_frames - self._position

    def _is_lagging(self) -> bool:
        num_bytes = self._frames.total_bytes - self._bytes_read
        return self._num_available > MAX_LAG_FRAMES or (self._num_available > 1 and num_bytes > MAX_LAG_BYTES)


class TimedReader:
    """Counts as a reader of a log for some time: another gateway, until it asks for nothing any more."""

    def __init__(self, log: ResponseLog) -> None:
        self._log = log
        self._timer: asyncio.TimerHandle | None = None

    def extend(self, seconds: float) -> None:
        """Count as a reader for this time from now on."""
        if self._timer is None:
            self._log.add_readers(1)
        else:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.end)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._log.add_readers(-1)
