"""Concurrent response streams of one WebSocket, named by the `stream_id` of their frames.

Responses of one stream run one after another; streams run concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chatcache.conversations.prompt import Message
from chatcache.errors import (
    ChatcacheError,
    InvalidRequestError,
    OverloadedError,
    RateLimitError,
    UnsupportedParameterError,
)
from chatcache.gateway.api.idempotency import IdempotencyKey
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.context import Gateway
from chatcache.gateway.errors import INTERNAL_ERROR, GatewayUnreachableError
from chatcache.gateway.middleware import parse_json
from chatcache.gateway.responses.create import start_idempotent_response, start_response
from chatcache.gateway.responses.event_log import LogReader
from chatcache.gateway.responses.log_frames import LogFrame, has_references, in_turns
from chatcache.gateway.responses.registry import LoggedResponse
from chatcache.gateway.responses.run import LiveResponse
from chatcache.gateway.responses.state import load_response_tree, no_stream_error
from chatcache.gateway.schemas.fields import parse_fields
from chatcache.gateway.schemas.requests import CreateFields
from chatcache.gateway.websocket.frames import CLIENT_GONE, FrameSender, stream_id_suffix

log = logging.getLogger(__name__)

MAX_STREAMS = 16
MAX_QUEUED = 16
MAX_RESUMED = 32
_MAX_ENDED = 256
_RESUME_WAIT_S = 1.0  # for a response to be found, before the connection handles further messages
_MAX_UNACKED_S = 30.0
MAX_UNSTORED_CHARS = 8 << 20
_MESSAGE_OVERHEAD = 256  # in characters: Python objects of a message
MAX_QUEUED_BYTES = 4 << 20  # of all streams of one WebSocket

StreamId = str | None
Body = dict[str, Any]


class QueueFullError(RateLimitError):
    """More bytes wait on one WebSocket than are allowed; it is closed."""


@dataclass(frozen=True, slots=True)
class _WaitingCreate:
    """A `response.create` that waits: its bytes, because the decoded fields can need far more memory.

    `body`: the fields, of one that does not wait for another.
    """

    data: bytes
    body: Body | None


class UnstoredHistories(dict[str, tuple[Message, ...]]):
    """The messages of the responses of one connection that are not stored, for `previous_response_id`.

    The oldest are removed beyond `MAX_UNSTORED_CHARS`, and the one that a new response continues.
    """

    def record(self, run: LiveResponse, continued: object) -> None:
        """Record a response that has ended, and remove the one that it `continued`."""
        if history := run.history:
            if isinstance(continued, str):
                self.pop(continued, None)
            self[run.id] = history
            sizes = {name: _num_chars(messages) for name, messages in self.items()}
            total = sum(sizes.values())
            for name, num_chars in sizes.items():
                if total > MAX_UNSTORED_CHARS:
                    del self[name]
                    total -= num_chars


def _num_chars(messages: Sequence[Message]) -> int:
    """Return the approximate size of messages, with their calls and reasoning."""
    return sum(
        len(each["content"])
        + len(each.get("reasoning_content", ""))
        + len(str(each.get("tool_calls", "")))
        + _MESSAGE_OVERHEAD
        for each in messages
    )


class StreamMultiplexer:
    """Runs and forwards the responses that one connection created or resumed."""

    def __init__(self, gateway: Gateway, principal: Principal, sender: FrameSender, extended: bool) -> None:
        self._gateway = gateway
        self._principal = principal
        self._sender = sender
        self._extended = extended
        self._queues: dict[StreamId, deque[_WaitingCreate]] = {}
        self._num_queued_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_resumed = 0
        self._open_readers: dict[str, tuple[LogReader, StreamId]] = {}
        self._terminals: dict[str, str | None] = {}
        self._unstored = UnstoredHistories()

    def enqueue(self, body: Body, data: bytes) -> None:
        """Queue a `response.create` in its stream. `data`: the frame that `body` was decoded from.

        Raises: InvalidRequestError, OverloadedError, RateLimitError; QueueFullError if the connection must be closed.
        """
        body = flatten_body(body)
        stream_id = parse_fields(body, CreateFields).stream_id
        if body.get("background"):
            raise UnsupportedParameterError("background is not supported over WebSocket", param="background")
        queue = self._queues.get(stream_id)
        if queue is None and len(self._queues) >= MAX_STREAMS:
            raise OverloadedError(f"at most {MAX_STREAMS} concurrent streams", param="stream_id")
        if queue is not None and len(queue) >= MAX_QUEUED:
            raise OverloadedError(f"at most {MAX_QUEUED} responses may wait in a stream", param="stream_id")
        if self._num_queued_bytes and self._num_queued_bytes + len(data) > MAX_QUEUED_BYTES:
            raise QueueFullError(f"more than {MAX_QUEUED_BYTES} bytes of response.create wait on this connection")
        self._gateway.socket_limiter.add_bytes(self._principal.owner, len(data))
        self._num_queued_bytes += len(data)
        if queue is not None:
            queue.append(_WaitingCreate(data, None))
            return
        queue = self._queues[stream_id] = deque([_WaitingCreate(data, body)])
        self._start_task(self._run_stream(stream_id, queue))

    async def resume(self, response_id: str, after: int, stream_id: StreamId) -> None:
        """Send the events of a response after the given sequence number, or an error, next to the other streams.

        Returns when they begin, but after `_RESUME_WAIT_S` at the latest: another gateway may have the response and not
        answer, and the connection handles other messages meanwhile.

        Raises: InvalidRequestError if the connection already sends this response; OverloadedError.
        """
        self._check_not_sent(response_id)
        if self._num_resumed >= MAX_RESUMED:
            raise OverloadedError(f"at most {MAX_RESUMED} responses may be resumed at once", param="response_id")
        self._num_resumed += 1
        has_begun = asyncio.Event()
        self._start_task(self._run_resumed(response_id, after, stream_id, has_begun))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RESUME_WAIT_S):
                await has_begun.wait()

    def reader_of(self, response_id: str) -> LogReader | None:
        """Return the log reader of a response that this connection sends."""
        found = self._open_readers.get(response_id)
        return found[0] if found is not None else None

    def stream_id_of(self, response_id: str) -> StreamId:
        found = self._open_readers.get(response_id)
        return found[1] if found is not None else None

    def terminal_of(self, response_id: str) -> tuple[bool, str | None]:
        """Return whether a response was recently sent to its end here, and how it ended.

        The second value is the type of its terminal frame, None if it was not sent.
        """
        return response_id in self._terminals, self._terminals.get(response_id)

    async def close(self) -> None:
        """Stop all streams of this connection. The responses themselves may continue."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_stream(self, stream_id: StreamId, queue: deque[_WaitingCreate]) -> None:
        try:
            while queue:
                await self._respond(stream_id, queue)
        except CLIENT_GONE:
            pass  # the read loop of the connection notices the disconnect too
        finally:
            del self._queues[stream_id]
            for waiting in queue:
                self._remove_bytes(waiting)

    def _remove_bytes(self, waiting: _WaitingCreate) -> None:
        self._num_queued_bytes -= len(waiting.data)
        self._gateway.socket_limiter.remove_bytes(self._principal.owner, len(waiting.data))

    async def _run_resumed(self, response_id: str, after: int, stream_id: StreamId, has_begun: asyncio.Event) -> None:
        try:
            try:
                logged, reader = await self._open_resumed(response_id, after, stream_id)
            except Exception as error:
                await self._send_error(error, stream_id)
                return
            finally:
                has_begun.set()
            await self._sender.send(_resumed_frame(logged), stream_id)
            await self._forward(logged, stream_id, reader)
        except CLIENT_GONE:
            pass
        finally:
            self._num_resumed -= 1

    async def _open_resumed(
        self, response_id: str, after: int, stream_id: StreamId
    ) -> tuple[LoggedResponse, LogReader]:
        """Open the log of a response after the given sequence number.

        Raises: InvalidRequestError if the connection already sends this response, or the number does not exist yet;
        NotFoundError, GatewayUnreachableError, StoreUnavailableError.
        """
        owner = self._principal.owner
        found = await self._gateway.find_caught_up(owner, response_id, after)
        logged = found or self._gateway.responses.get(owner, response_id)
        self._check_not_sent(response_id)
        reader = logged.log.reader(after, extended=self._extended)
        self._open_readers[logged.id] = reader, stream_id
        self._gateway.metrics.resumed.labels(transport="ws").inc()
        return logged, reader

    def _check_not_sent(self, response_id: str, param: str = "response_id") -> None:
        if response_id in self._open_readers:
            raise InvalidRequestError("the response is being sent on this connection already", param=param)

    async def _send_error(self, error: Exception, stream_id: StreamId) -> None:
        if not isinstance(error, ChatcacheError):
            log.error("a response cannot be sent", exc_info=error)
        await self._sender.send_error(error if isinstance(error, ChatcacheError) else INTERNAL_ERROR, stream_id)

    async def _respond(self, stream_id: StreamId, queue: deque[_WaitingCreate]) -> None:
        """Start the first response of the queue and send it to its end."""
        try:
            run, logged, continued = await self._start_next(queue)
            reader = logged.log.reader(extended=self._extended)
        except Exception as error:
            await self._send_error(error, stream_id)
            return
        await self._forward(logged, stream_id, reader)
        if run is not None:
            self._unstored.record(run, continued)

    async def _start_next(self, queue: deque[_WaitingCreate]) -> tuple[LiveResponse | None, LoggedResponse, object]:
        """Take the first response from the queue and start it; its frame is not kept.

        Returns it as `_start_or_find` does, and the id of the response that it continues. Raises: any ChatcacheError.
        """
        waiting = queue.popleft()
        try:
            body = waiting.body
            if body is None:
                body = flatten_body(
                    await parse_json(waiting.data, self._gateway.decode_throttle, self._principal.owner)
                )
            return *await self._start_or_find(body), body.get("previous_response_id")
        finally:
            self._remove_bytes(waiting)

    async def _start_or_find(self, body: Mapping[str, Any]) -> tuple[LiveResponse | None, LoggedResponse]:
        """Start a response, or find the one that was created with the same idempotency key.

        Raises: any ChatcacheError.
        """
        key_text = parse_fields(body, CreateFields).idempotency_key
        if key_text is None:
            run = await start_response(
                self._gateway, self._principal, body, extended=self._extended, unstored=self._unstored
            )
            return run, run.logged
        body = {name: value for name, value in body.items() if name != "idempotency_key"}
        idempotency_key = IdempotencyKey.create(key_text, "response", body)
        started = await start_idempotent_response(
            self._gateway, self._principal, body, idempotency_key, extended=self._extended
        )
        if not isinstance(started, str):
            return started, started.logged
        found = await self._gateway.find_caught_up(self._principal.owner, started)
        if found is None:
            tree = await load_response_tree(self._gateway.opened_store(), self._principal.owner, started)
            raise no_stream_error(tree, started)
        self._check_not_sent(found.id, "idempotency_key")
        return None, found

    async def _forward(self, logged: LoggedResponse, stream_id: StreamId, reader: LogReader) -> None:
        """Send the frames of a response, also from a gateway that takes it over, then those of its successors."""
        suffix, owner = stream_id_suffix(stream_id), self._principal.owner
        while True:
            try:
                try:
                    await self._send_response(logged, reader, stream_id, suffix)
                except GatewayUnreachableError:
                    logged, reader = await self._gateway.reopen(owner, reader)
                    if logged.id in self._open_readers:  # the client has resumed it meanwhile
                        return
                    continue
                successor = logged.successor
                found = await self._gateway.find_caught_up(owner, successor) if successor else None
            except ChatcacheError as error:  # another gateway runs it, and does not answer any more
                await self._sender.send_error(error, stream_id)
                return
            if found is None or found.id in self._open_readers:
                return
            logged, reader = found, found.log.reader(extended=self._extended)

    async def _send_response(
        self, logged: LoggedResponse, reader: LogReader, stream_id: StreamId, suffix: bytes
    ) -> None:
        with reader:
            self._open_readers[logged.id] = reader, stream_id
            try:
                while frames := await self._next_frames(reader):
                    if has_references(frames[0]):
                        pieces = in_turns(reader.pieces(frames[0]), self._gateway.loop_turns, self._principal.owner)
                        frames = (frames[0]._replace(data=b"".join([piece async for piece in pieces])),)
                    await self._sender.forward(frames, suffix)
            except BaseException:
                self._gateway.metrics.disconnects.inc()
                raise
            finally:
                del self._open_readers[logged.id]
                self._gateway.metrics.snapshots.inc(reader.num_snapshots)
        self._terminals[logged.id] = logged.log.terminal
        if len(self._terminals) > _MAX_ENDED:
            del self._terminals[next(iter(self._terminals))]

    async def _next_frames(self, reader: LogReader) -> Sequence[LogFrame]:
        """Return the next frames.

        Raises: ConnectionError for a client that has sent acks before and stops for `_MAX_UNACKED_S`.
        """
        if not reader.is_open:
            try:
                async with asyncio.timeout(_MAX_UNACKED_S):
                    await reader.wait_open()
            except TimeoutError:
                await self._sender.close_slow_client()
                raise ConnectionError("the client acknowledges nothing") from None
        return await reader.next(self._gateway.loop_turns, self._principal.owner)


def flatten_body(body: Body) -> Body:
    """Move the fields of a nested `response` object to the top level of `response.create`."""
    nested = body.get("response")
    if nested is None:
        return body
    if not isinstance(nested, dict):
        raise InvalidRequestError("response must be an object", param="response")
    return {**{name: value for name, value in body.items() if name != "response"}, **nested}


def _resumed_frame(logged: LoggedResponse) -> dict[str, object]:
    terminal = logged.log.terminal
    status = terminal.rpartition(".")[2] if terminal is not None else "in_progress"
    last_number = logged.log.last_number
    return {"type": "response.resumed", "response_id": logged.id, "status": status, "sequence_number": last_number}
