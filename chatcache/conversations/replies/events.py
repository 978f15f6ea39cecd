"""Events of a reply.

Text of candidates by index, live beams as text, and batching of small deltas.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec
from msgspec.structs import replace

from chatcache.conversations.tree import ReplyParts
from chatcache.types.events import FINISH_STOP, Beams, StartReport, TokenLogprob


@dataclass(frozen=True, slots=True)
class ReplyStarted:
    """The first token was computed, so the prompt's counts are final.

    `index`: number of the prompt in a request with several. If requested, `prompt_logprobs` has one entry per prompt
    token (None for the first), and `report` the details of the cache look-up.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    index: int = 0
    report: StartReport | None = None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """New output of tool call `number` (0, 1, ... within its candidate).

    `call_id` and `name` are only set in the first delta of the call.
    """

    number: int
    arguments: str
    call_id: str = ""
    name: str = ""


class ReplyDelta(msgspec.Struct, frozen=True, gc=False):  # one per token: created four times as fast as a dataclass
    """New output of candidate `index`.

    `text` may be empty while characters or a possible stop string are held back. `token_ids` and `logprobs` (one each,
    if requested) belong to the tokens that arrived, visible or not yet visible. Where the output is parsed, its
    reasoning and tool calls are in `reasoning` and `calls`, and not part of `text`.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class BeamNode:
    """A node of the token tree of a beam search: a token that a live beam has chosen.

    `text` follows the text of the node `parent` (0: the prompt). `score`: summed log-probability of the path down to
    this node.
    """

    id: int
    parent: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class ReplyBeams:
    """New nodes, parents first, and the ids of the nodes where live beams end now, best first."""

    nodes: tuple[BeamNode, ...]
    live: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplyDone:
    """Candidate `index` is complete: its whole text and all its tokens, the ending one included.

    `stored_ids` are the tokens for exactly `text`, or `parts.raw` if set, in a later prompt. `num_pages_freed`: KV
    pages freed by a candidate that the client cancelled on its own, else None.
    """

    index: int
    text: str
    finish_reason: str
    stop_reason: str | int | None
    token_ids: tuple[int, ...]
    stored_ids: tuple[int, ...]
    score: float = 0.0
    parts: ReplyParts = field(default_factory=ReplyParts)
    num_pages_freed: int | None = None

    @property
    def ends_in_calls(self) -> bool:
        """Whether the candidate ended with calls to execute: none of them was cut off."""
        return self.finish_reason == FINISH_STOP and bool(self.parts.tool_calls) and not self.parts.is_call_cut


@dataclass(frozen=True, slots=True)
class ReplyFinished:
    """All candidates are done.

    `cancelled`: the client ended the reply early; `num_pages_freed` is then the number of KV pages that this freed.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    cancelled: bool = False
    num_pages_freed: int = 0
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplyBatchEnd:
    """The events before it were sent together by the engine, and form one update of each candidate."""


ReplyEvent = ReplyStarted | ReplyDelta | ReplyBeams | ReplyDone | ReplyFinished | ReplyBatchEnd


class BeamReader:
    """Converts the engine's beam nodes to text.

    A character whose bytes span nodes belongs to the node that completes it.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._unfinished: dict[int, bytes] = {}

    def read(self, event: Beams) -> ReplyBeams:
        before, self._unfinished = self._unfinished, {}
        nodes = tuple(
            BeamNode(
                beam.node, beam.parent, self._text(beam.node, before.get(beam.parent, b""), beam.token_id), beam.score
            )
            for beam in event.beams
        )
        return ReplyBeams(nodes, tuple(node.id for node in nodes))

    def _text(self, node: int, before: bytes, token: int) -> str:
        piece = self._token_bytes[token] if 0 <= token < len(self._token_bytes) else b""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(before + piece)
        unfinished, _ = decoder.getstate()
        if unfinished:
            self._unfinished[node] = unfinished
        return text


def merge_beams(first: ReplyBeams, then: ReplyBeams) -> ReplyBeams:
    """Merge two consecutive beam updates: all nodes in order, and the live beams of the second."""
    return ReplyBeams(first.nodes + then.nodes, then.live)


_BEAMS = -1  # the source of beam updates, in place of a candidate index

BatchedEvent = ReplyDelta | ReplyBeams
_HELD_BACK = (False, False, False)


_MAX_RELEASED = 8  # events that are emitted in one turn of the event loop: log-probabilities make each expensive


class DeltaBatcher:
    """Merges events that follow each other quickly before they are passed to `emit`.

    An event is held for at most `window_s` seconds if one of the same candidate was emitted less than `window_s` ago;
    without a window, until `flush`.
    Text, reasoning and calls are never merged with each other. Beam updates are batched likewise. At most one timer
    runs and no task is created. An exception of `emit` is raised by the next call. Belongs to one event loop.
    """

    def __init__(self, emit: Callable[[BatchedEvent], None], window_s: float | None) -> None:
        self._emit = emit
        self._has_window = window_s is not None
        self._window_s = window_s or 0.0
        self._pending: dict[int, BatchedEvent] = {}
        self._emitted_s: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None

    def push(self, event: BatchedEvent) -> None:
        """Emit the event now, or merged with others at the end of the window."""
        self._check()
        source = event.index if isinstance(event, ReplyDelta) else _BEAMS
        pending = self._pending.get(source)
        if pending is not None:
            if _can_merge(pending, event):
                self._pending[source] = _merged(pending, event)
            else:
                self._pending[source] = event
                self._emit(pending)
            return
        if not self._has_window:
            self._pending[source] = event
            return
        now_s = time.monotonic()
        if now_s >= self._emitted_s.get(source, 0.0) + self._window_s:
            self._emitted_s[source] = now_s
            self._emit(event)
            return
        self._pending[source] = event
        if self._timer is None:
            self._arm(now_s)

    async def flush(self) -> None:
        """Emit all pending events, before an event of another kind is sent; other tasks have turns in between."""
        self._check()
        while self._pending:
            self._release(time.monotonic(), islice(self._pending, _MAX_RELEASED))
            if self._pending:
                await asyncio.sleep(0)
                self._check()

    def close(self) -> None:
        """Discard pending events."""
        self._pending.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _arm(self, now_s: float) -> None:
        due_s = min(self._emitted_s[source] for source in self._pending) + self._window_s
        self._timer = self._loop.call_later(max(0.0, due_s - now_s), self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        try:
            due = (each for each in self._pending if now_s >= self._emitted_s[each] + self._window_s)
            self._release(now_s, islice(due, _MAX_RELEASED))
        except Exception as error:
            self._error = error
            self.close()
        if self._pending:
            self._arm(now_s)

    def _release(self, now_s: float, sources: Iterable[int]) -> None:
        for source in list(sources):
            self._emitted_s[source] = now_s
            self._emit(self._pending.pop(source))


def _can_merge(first: BatchedEvent, then: BatchedEvent) -> bool:
    """Check whether two events of one candidate can be merged without loss of information.

    The order of text, reasoning and calls must stay, and log-probabilities must stay with their text.
    """
    if not (isinstance(first, ReplyDelta) and isinstance(then, ReplyDelta)):
        return True
    one, other = _kind(first), _kind(then)
    return one in (other, _HELD_BACK) or (other == _HELD_BACK and not then.logprobs)


def _kind(delta: ReplyDelta) -> tuple[bool, bool, bool]:
    return bool(delta.text), bool(delta.reasoning), bool(delta.calls)


def _merged(first: BatchedEvent, then: BatchedEvent) -> BatchedEvent:
    """Return two consecutive events of one candidate, or two beam updates, as one event."""
    match first, then:
        case ReplyDelta(), ReplyDelta():
            return replace(
                first,
                text=first.text + then.text,
                token_ids=first.token_ids + then.token_ids,
                logprobs=first.logprobs + then.logprobs,
                reasoning=first.reasoning + then.reasoning,
                calls=first.calls + then.calls,
            )
        case ReplyBeams(), ReplyBeams():
            return merge_beams(first, then)
    return then
