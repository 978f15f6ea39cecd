"""The client's half of the bus: calls awaiting their answers, logs of running requests, the last health heard.

The event log: what a running request says, kept so that readers may fall behind, leave and go on where they were.

What every present reader has done with is forgotten, many events at a time: a request may say a great deal. A reader
has done with an event when it asks for the one behind it. So an only reader may leave, and read on from the last event
that it has dealt with; whoever else wants an event must be there before the others are far beyond it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, Literal, cast

from msgspec.structs import replace

from chatcache.engine_process.protocol import (
    Abort,
    Answer,
    Ask,
    Command,
    CountCached,
    Drop,
    Events,
    Explain,
    MapPages,
    Reply,
    Scored,
    Submit,
    decode_error,
    decode_scores,
)
from chatcache.errors import ChatcacheError, InvalidRequestError, NotFoundError
from chatcache.types.events import TERMINAL, EngineEvent, Failed, Started, Tokens
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import EngineHealth, Explanation, PackedPrompt, PageAccounts, PageMap

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

        Raises: NotFoundError where some of them are forgotten.
        """
        position, loop, reader = max(after, 0), asyncio.get_running_loop(), object()
        if position < self._num_forgotten:
            raise NotFoundError(f"{self.request_id}: events up to {self._num_forgotten} were read and are gone")
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

        Raises: InvalidRequestError while another request holds the same id.
        """
        if request_id in self._logs:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
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

        Raises: NotFoundError for an id that was never submitted, or whose end was read already, and for events that
        were.
        """
        log = self._logs.get(request_id)
        if log is None:
            raise NotFoundError(f"request {request_id!r} is not known")
        async for event in log.read(after):
            if isinstance(event, Started) and log.scores:
                event = replace(event, prompt_logprobs=await asyncio.to_thread(decode_scores, log.scores))
            if isinstance(event, TERMINAL):
                self.drop(request_id)
            yield event
        self.drop(request_id)


COUNTED_BYTES = 4 * 8_192


class EngineClientBase:
    """Turns calls into commands and notices into results. Belongs to one event loop.

    `send` hands a command to the engine and never waits.
    """

    def __init__(self, send: Callable[[Command], None], retention_s: float = RETENTION_S) -> None:
        self._send = send
        self._logs = EventLogs(retention_s)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self.health: EngineHealth | None = None

    @property
    def num_open(self) -> int:
        """Requests submitted that have not ended."""
        return self._logs.num_open

    async def submit(self, request: GenerateRequest) -> None:
        """Hand a request over and wait for the engine's verdict; a cancelled wait withdraws the request."""
        self._logs.open(request.request_id)
        try:
            await self._call(lambda call: Submit(call, request))
        except BaseException as error:
            self._logs.drop(request.request_id)
            if isinstance(error, asyncio.CancelledError):
                self._send(Abort(request.request_id))
            raise

    def events(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        return self._logs.read(request_id, after)

    def num_told(self, request_id: str) -> int:
        return self._logs.num_tokens(request_id)

    def abort(self, request_id: str) -> None:
        self._send(Abort(request_id))

    async def drop(self, request_id: str, index: int) -> None:
        await self._call(partial(Drop, request_id=request_id, index=index))

    async def explain(
        self, prompt: Sequence[int], namespace: str, num_public_tokens: int, operator: bool
    ) -> Explanation:
        value = await self._call(lambda call: Explain(call, tuple(prompt), namespace, num_public_tokens, operator))
        return cast(Explanation, value)

    async def num_cached(self, prompts: Sequence[PackedPrompt], namespace: str) -> list[int]:
        counts: list[int] = []
        for some in _shares(prompts):
            counts += await self._call(partial(CountCached, prompts=some, namespace=namespace))
        return counts

    async def page_map(self, namespace: str, operator: bool) -> PageMap:
        return cast(PageMap, await self._call(lambda call: MapPages(call, namespace, operator)))

    async def accounts(self) -> PageAccounts:
        return cast(PageAccounts, await self._call(lambda call: Ask(call, "accounts")))

    async def ask(self, what: Literal["stats", "reset_prefix_cache"]) -> Any:
        return await self._call(lambda call: Ask(call, what))

    async def _call(self, command: Callable[[int], Command]) -> Any:
        call = next(self._numbers)
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(command(call))
            return await future
        finally:
            del self._calls[call]

    def receive(self, notice: Reply | Scored | Events) -> None:
        """File what the engine said."""
        if isinstance(notice, Scored):
            self._logs.add_scores(notice.request_id, notice.part)
            return
        if isinstance(notice, Reply):
            future = self._calls.get(notice.call)
            if future is not None and not future.done():
                if isinstance(notice, Answer) and notice.fault is not None:
                    future.set_exception(decode_error(notice.fault))
                else:
                    future.set_result(notice.value)
            return
        if notice.health is not None:
            self.health = notice.health
        for event in notice.events:
            self._logs.append(event)

    @property
    def num_calls(self) -> int:
        """Calls without an answer yet."""
        return len(self._calls)

    def fail_calls(self, error: ChatcacheError, keep: Container[int] = ()) -> None:
        """Every pending call raises `error`, but for those to `keep`."""
        for call, future in self._calls.items():
            if call not in keep and not future.done():
                future.set_exception(error)

    def hang_up(self, error: ChatcacheError) -> None:
        """The engine is gone: every open request ends with one `Failed`, every pending call raises `error`."""
        self.fail_calls(error)
        self._logs.fail_open(error.message, error.code)


def _shares(prompts: Sequence[PackedPrompt]) -> Iterator[tuple[PackedPrompt, ...]]:
    """Split prompts so that the engine, which answers between two steps, is held up for a millisecond at a time."""
    some: list[PackedPrompt] = []
    for prompt in prompts:
        some.append(prompt)
        if sum(len(each.tokens) for each in some) >= COUNTED_BYTES:
            yield tuple(some)
            some = []
    if some:
        yield tuple(some)
