"""The event log: what a running request says, kept so that readers may fall behind, leave and go on where they were.

What every present reader has done with is forgotten, many events at a time: a request may say a great deal. A reader
has done with an event when it asks for the one behind it. So an only reader may leave, and read on from the last event
that it has dealt with; whoever else wants an event must be there before the others are far beyond it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from msgspec.structs import replace

from chatcache.bus.codec import decode_scores
from chatcache.errors import InvalidRequest, NotFound
from chatcache.types.events import TERMINAL, EngineEvent, Failed, Started, Tokens

RETENTION_S = 60.0
FORGET_EVENTS = 256


class EventLog:
    """Events of one request, `seq` 1, 2, 3, ... without a gap; closed by its terminal event.

    Appending never waits: a slow reader costs memory bounded by the request's own length, never time.
    All methods belong to one event loop.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.scores: list[bytes] = []  # the prompt's log-probabilities, as they came (`messages.Scored`)
        self.closed = False
        self.num_tokens = 0
        self._events: list[EngineEvent] = []
        self._num_forgotten = 0
        self._readers: dict[object, int] = {}  # the last event that each has done with
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def last_seq(self) -> int:
        return self._num_forgotten + len(self._events)

    @property
    def num_kept(self) -> int:
        return len(self._events)

    def append(self, event: EngineEvent) -> None:
        """Add the next event and wake the readers.

        Raises: ValueError for a gap, a repeat, or anything after the terminal event.
        """
        if self.closed or event.seq != self.last_seq + 1:
            state = "closed" if self.closed else "open"
            raise ValueError(f"{self.request_id}: seq {event.seq} after {self.last_seq} in an {state} log")
        self._events.append(event)
        if isinstance(event, Tokens):
            self.num_tokens += len(event.token_ids)
        self.closed = isinstance(event, TERMINAL)
        if self._waiting:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiting.clear()

    async def read(self, after: int = 0) -> AsyncGenerator[EngineEvent, None]:
        """Yield events with seq > `after`, waiting for more until the terminal one.

        Raises: NotFound where some of them are forgotten.
        """
        position, loop, reader = max(after, 0), asyncio.get_running_loop(), object()
        if position < self._num_forgotten:
            raise NotFound(f"{self.request_id}: events up to {self._num_forgotten} were read and are gone")
        self._readers[reader] = position
        try:
            while True:
                while position < self.last_seq:
                    position += 1
                    yield self._events[position - 1 - self._num_forgotten]
                    self._done(reader, position)
                if self.closed:
                    return
                waiter = loop.create_future()
                self._waiting.append(waiter)
                await waiter
        finally:
            del self._readers[reader]

    def _done(self, reader: object, position: int) -> None:
        self._readers[reader] = position
        if position - self._num_forgotten < FORGET_EVENTS:
            return
        num_done = min(self._readers.values()) - self._num_forgotten
        if num_done >= FORGET_EVENTS:
            del self._events[:num_done]
            self._num_forgotten += num_done
            self.scores.clear()


class EventLogs:
    """The logs of all requests. A finished one goes when its terminal event was read, or after `retention_s`."""

    def __init__(self, retention_s: float = RETENTION_S) -> None:
        self._retention_s = retention_s
        self._logs: dict[str, EventLog] = {}
        self._expiry: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._logs)

    @property
    def num_open(self) -> int:
        """Requests without a terminal event yet."""
        return len(self._logs) - len(self._expiry)

    def num_tokens(self, request_id: str) -> int:
        """Tokens in a request's log so far, forgotten ones too; 0 without a log."""
        log = self._logs.get(request_id)
        return log.num_tokens if log is not None else 0

    def open(self, request_id: str) -> EventLog:
        """Begin a log.

        Raises: InvalidRequest while another request holds the same id.
        """
        if request_id in self._logs:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        log = self._logs[request_id] = EventLog(request_id)
        return log

    def append(self, event: EngineEvent) -> None:
        """File an event; one for a request nobody holds any more is dropped."""
        log = self._logs.get(event.request_id)
        if log is None:
            return
        log.append(event)
        if log.closed:
            loop = asyncio.get_running_loop()
            self._expiry[log.request_id] = loop.call_later(self._retention_s, self.drop, log.request_id)

    def add_scores(self, request_id: str, part: bytes) -> None:
        """File prompt log-probabilities, ahead of the `Started` that tells of them."""
        log = self._logs.get(request_id)
        if log is not None:
            log.scores.append(part)

    def drop(self, request_id: str) -> None:
        """Forget a log; readers already on it read to its end. Unknown ids are ignored."""
        self._logs.pop(request_id, None)
        timer = self._expiry.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def fail_open(self, message: str, code: str) -> None:
        """End every open log with one `Failed`."""
        for log in [log for log in self._logs.values() if not log.closed]:
            self.append(Failed(log.request_id, log.last_seq + 1, message, code))

    async def read(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        """Yield a request's events with seq > `after`, to the terminal one.

        Raises: NotFound for an id that was never submitted, or whose end was read already, and for events that were.
        """
        log = self._logs.get(request_id)
        if log is None:
            raise NotFound(f"request {request_id!r} is not known")
        async for event in log.read(after):
            if isinstance(event, Started) and log.scores:
                event = replace(event, prompt_logprobs=await asyncio.to_thread(decode_scores, log.scores))
            if isinstance(event, TERMINAL):
                self.drop(request_id)
            yield event
        self.drop(request_id)
