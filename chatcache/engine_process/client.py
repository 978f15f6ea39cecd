"""Client side of the protocol: pending calls, event logs of requests, last health report.

An event log keeps the events of a request, so that readers may be slow, disconnect and continue where they stopped.
Events that every present reader has processed are discarded, PRUNE_EVENTS at a time. A reader has processed an event
when it requests the next one. A reader that was alone can therefore return to the last event that it processed; an
additional reader must begin before the others are far ahead.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, Literal, cast

import msgspec
from msgspec.structs import replace

from chatcache.engine_process.protocol import (
    Abort,
    Answer,
    CancelCandidate,
    Command,
    CountCached,
    Events,
    Explain,
    Invoke,
    MapPages,
    PromptScores,
    Reply,
    Submit,
    decode_error,
    decode_scores,
)
from chatcache.errors import ChatcacheError, ContextLengthError, InvalidRequestError, NotFoundError
from chatcache.types.events import TERMINAL, EngineEvent, Failed, Started, Tokens
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import (
    EngineHealth,
    ExplainQuery,
    Explanation,
    ModelInfo,
    PackedPrompt,
    PageAccounts,
    PageMap,
)

RETENTION_S = 60.0
PRUNE_EVENTS = 256
_MAX_DECODED_EVENTS = 2 * PRUNE_EVENTS  # a reader that keeps up never decodes
MAX_COUNT_BYTES = 4 * 8_192  # of prompt tokens in one CountCached command


def check_length(prompt: Sequence[int], model_info: ModelInfo) -> None:
    """Check that a prompt is not too long for the model. Raises: ContextLengthError."""
    if len(prompt) > model_info.max_model_len:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens; "
            f"this model's maximum context length is {model_info.max_model_len} tokens",
            param="prompt",
        )


class EventLog:
    """Events of one request, `seq` 1, 2, 3, ... without a gap; closed by its terminal event.

    Appending never waits: a slow reader costs memory, bounded by the request's length. Log-probabilities that it lags
    behind are kept encoded, in a tenth of the memory of the objects.
    All methods belong to one event loop.
    """

    def __init__(self, request_id: str, after: int = 0) -> None:
        """Create a log whose first event will be that after `after`."""
        self.request_id = request_id
        self.scores: list[bytes] = []  # encoded prompt log-probabilities (`PromptScores`)
        self.closed = False
        self.num_tokens = 0
        self._events: list[EngineEvent | bytes] = []  # bytes: an encoded `Tokens`
        self._num_discarded = after
        self._readers: dict[object, int] = {}  # the last event that each has processed
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def last_seq(self) -> int:
        return self._num_discarded + len(self._events)

    @property
    def num_retained(self) -> int:
        return len(self._events)

    def append(self, event: EngineEvent) -> None:
        """Add the next event and wake the readers.

        Raises: ValueError for a gap, a repeat, or anything after the terminal event.
        """
        if self.closed or event.seq != self.last_seq + 1:
            state = "closed" if self.closed else "open"
            raise ValueError(f"{self.request_id}: seq {event.seq} after {self.last_seq} in an {state} log")
        self._events.append(event if len(self._events) < _MAX_DECODED_EVENTS else _encode_logprobs(event))
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

        Raises: NotFoundError when some of them were discarded.
        """
        position, loop, reader = max(after, 0), asyncio.get_running_loop(), object()
        if position < self._num_discarded:
            raise NotFoundError(f"{self.request_id}: events up to {self._num_discarded} were read and discarded")
        self._readers[reader] = position
        try:
            while True:
                while position < self.last_seq:
                    position += 1
                    event = self._events[position - 1 - self._num_discarded]
                    yield _tokens.decode(event) if isinstance(event, bytes) else event
                    self._advance_reader(reader, position)
                if self.closed:
                    return
                waiter = loop.create_future()
                self._waiting.append(waiter)
                await waiter
        finally:
            del self._readers[reader]

    def _advance_reader(self, reader: object, position: int) -> None:
        self._readers[reader] = position
        if position - self._num_discarded < PRUNE_EVENTS:
            return
        num_done = min(self._readers.values()) - self._num_discarded
        if num_done >= PRUNE_EVENTS:
            del self._events[:num_done]
            self._num_discarded += num_done
            self.scores.clear()


_tokens = msgspec.msgpack.Decoder(Tokens)


def _encode_logprobs(event: EngineEvent) -> EngineEvent | bytes:
    """Encode an event that has log-probabilities."""
    return msgspec.msgpack.encode(event) if isinstance(event, Tokens) and event.logprobs else event


class EventLogs:
    """The event logs of all requests.

    The log of a finished request is removed when its terminal event was read, or after `retention_s`.
    """

    def __init__(self, retention_s: float = RETENTION_S) -> None:
        self._retention_s = retention_s
        self._logs: dict[str, EventLog] = {}
        self._expiry: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._logs)

    @property
    def num_open(self) -> int:
        """Number of requests without a terminal event."""
        return len(self._logs) - len(self._expiry)

    def num_tokens(self, request_id: str) -> int:
        """Return the number of tokens in a request's log, discarded ones included; 0 without a log."""
        log = self._logs.get(request_id)
        return log.num_tokens if log is not None else 0

    def open(self, request_id: str, after: int = 0) -> EventLog:
        """Create the log of a request whose events up to `after` were sent by another engine.

        Raises: InvalidRequestError while another request has the same id.
        """
        if request_id in self._logs:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
        log = self._logs[request_id] = EventLog(request_id, after)
        return log

    def append(self, event: EngineEvent) -> None:
        """Append an event to its request's log; an event without a log is dropped."""
        log = self._logs.get(event.request_id)
        if log is None:
            return
        log.append(event)
        if log.closed:
            loop = asyncio.get_running_loop()
            self._expiry[log.request_id] = loop.call_later(self._retention_s, self.drop, log.request_id)

    def add_scores(self, request_id: str, part: bytes) -> None:
        """Append prompt log-probabilities, which arrive before the `Started` event they belong to."""
        log = self._logs.get(request_id)
        if log is not None:
            log.scores.append(part)

    def drop(self, request_id: str) -> None:
        """Remove a log; its present readers can finish. Unknown ids are ignored."""
        self._logs.pop(request_id, None)
        timer = self._expiry.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def fail_open(self, message: str, code: str) -> None:
        """Append a `Failed` event to every open log."""
        for log in [log for log in self._logs.values() if not log.closed]:
            self.append(Failed(log.request_id, log.last_seq + 1, message, code))

    async def read(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        """Yield a request's events with seq > `after`, to the terminal one.

        Raises: NotFoundError for an unknown id, after the terminal event was read, and for discarded events.
        """
        log = self._logs.get(request_id)
        if log is None:
            raise NotFoundError(f"request {request_id!r} is unknown")
        async for event in log.read(after):
            if isinstance(event, Started) and log.scores:
                event = replace(event, prompt_logprobs=await asyncio.to_thread(decode_scores, log.scores))
            if isinstance(event, TERMINAL):
                self.drop(request_id)
            yield event
        self.drop(request_id)


class EngineClientBase:
    """Converts calls into commands, and notices into results and events.

    Belongs to one event loop. `send` sends a command to the engine without waiting. Clients whose replies arrive
    together share the `numbers` of their calls.
    """

    def __init__(
        self,
        send: Callable[[Command], None],
        retention_s: float = RETENTION_S,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._send = send
        self._logs = EventLogs(retention_s)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1) if numbers is None else numbers
        self.health: EngineHealth | None = None

    @property
    def num_open(self) -> int:
        """Number of submitted requests that have not ended."""
        return self._logs.num_open

    async def submit(self, request: GenerateRequest) -> None:
        """Send a request and wait until it is accepted; a cancelled wait aborts the request."""
        self._logs.open(request.request_id, request.resume_point.last_seq if request.resume_point is not None else 0)
        try:
            await self._call(lambda call: Submit(call, request))
        except BaseException as error:
            self._logs.drop(request.request_id)
            if isinstance(error, asyncio.CancelledError):
                self._send(Abort(request.request_id))
            raise

    def open_log(self, request_id: str) -> None:
        """Create the log of a request that another client has submitted. Raises: InvalidRequestError if it exists."""
        self._logs.open(request_id)

    def drop_log(self, request_id: str) -> None:
        """Remove the log of a request; its present readers wait in vain."""
        self._logs.drop(request_id)

    def events(self, request_id: str, after: int = 0) -> AsyncIterator[EngineEvent]:
        return self._logs.read(request_id, after)

    def num_tokens_sent(self, request_id: str) -> int:
        return self._logs.num_tokens(request_id)

    def abort(self, request_id: str) -> None:
        self._send(Abort(request_id))

    async def cancel_candidate(self, request_id: str, index: int) -> None:
        await self._call(partial(CancelCandidate, request_id=request_id, index=index))

    async def explain(self, query: ExplainQuery) -> Explanation:
        return cast(Explanation, await self._call(partial(Explain, query=query)))

    async def count_cached_tokens(self, prompts: Sequence[PackedPrompt], namespace: str) -> list[int]:
        counts: list[int] = []
        for batch in _batches(prompts):
            counts += await self._call(partial(CountCached, prompts=batch, namespace=namespace))
        return counts

    async def page_map(self, namespace: str, operator: bool) -> PageMap:
        return cast(PageMap, await self._call(lambda call: MapPages(call, namespace, operator)))

    async def page_accounts(self) -> PageAccounts:
        return cast(PageAccounts, await self._call(lambda call: Invoke(call, "accounts")))

    async def invoke(self, method: Literal["stats", "reset_prefix_cache"]) -> Any:
        return await self._call(lambda call: Invoke(call, method))

    async def _call(self, command: Callable[[int], Command]) -> Any:
        call = next(self._numbers)
        future = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(command(call))
            return await future
        finally:
            del self._calls[call]

    def receive(self, notice: Reply | PromptScores | Events) -> None:
        """Process a notice: resolve its call, or append its events to their logs."""
        if isinstance(notice, PromptScores):
            self._logs.add_scores(notice.request_id, notice.part)
            return
        if isinstance(notice, Reply):
            future = self._calls.get(notice.call)
            if future is not None and not future.done():
                if isinstance(notice, Answer) and notice.error is not None:
                    future.set_exception(decode_error(notice.error))
                else:
                    future.set_result(notice.value)
            return
        if notice.health is not None:
            self.health = notice.health
        for event in notice.events:
            self._logs.append(event)

    @property
    def num_calls(self) -> int:
        """Number of calls without a reply."""
        return len(self._calls)

    def fail_calls(self, error: ChatcacheError, keep: Container[int] = ()) -> None:
        """Make every pending call raise `error`, except the calls in `keep`."""
        for call, future in self._calls.items():
            if call not in keep and not future.done():
                future.set_exception(error)

    def fail_all(self, error: ChatcacheError) -> None:
        """End every open request with `Failed` and make every pending call raise `error`."""
        self.fail_calls(error)
        self._logs.fail_open(error.message, error.code)


def _batches(prompts: Sequence[PackedPrompt]) -> Iterator[tuple[PackedPrompt, ...]]:
    """Split prompts into batches that delay the engine's next step by about a millisecond."""
    batch: list[PackedPrompt] = []
    for prompt in prompts:
        batch.append(prompt)
        if sum(len(each.tokens) for each in batch) >= MAX_COUNT_BYTES:
            yield tuple(batch)
            batch = []
    if batch:
        yield tuple(batch)
