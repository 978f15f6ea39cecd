"""Lanes of one WebSocket: the responses of a lane follow one another, lanes run side by side."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from chatcache.errors import ChatcacheError, InvalidRequestError, OverloadedError, UnsupportedParameterError
from chatcache.gateway.api.idempotency import IdempotencyKey
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.context import Gateway
from chatcache.gateway.errors import INTERNAL_ERROR
from chatcache.gateway.responses.create import start_idempotent_response, start_response
from chatcache.gateway.responses.event_log import LogFrame, LogReader
from chatcache.gateway.responses.registry import LoggedResponse
from chatcache.gateway.responses.state import stream_expired_error
from chatcache.gateway.schemas.fields import parse_fields
from chatcache.gateway.schemas.requests import CreateFields
from chatcache.gateway.websocket.frames import CLIENT_GONE, FrameSender, stream_id_suffix

log = logging.getLogger(__name__)

MAX_STREAMS = 16
MAX_QUEUED = 16
MAX_RESUMED = 32
_MAX_ENDED = 256
_MAX_UNACKED_S = 30.0

Lane = str | None


class StreamMultiplexer:
    """Responses that one connection asked for or resumed, on their way out of it."""

    def __init__(self, gateway: Gateway, principal: Principal, outbox: FrameSender, extended: bool) -> None:
        self._gateway = gateway
        self._principal = principal
        self._outbox = outbox
        self._extended = extended
        self._queues: dict[Lane, deque[dict[str, Any]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_resumed = 0
        self._reading: dict[str, tuple[LogReader, Lane]] = {}
        self._ended: dict[str, str | None] = {}

    def enqueue(self, body: dict[str, Any]) -> None:
        """Have a `response.create` done after those of its lane. Raises: InvalidRequestError, OverloadedError."""
        lane = parse_fields(body, CreateFields).stream_id
        if body.get("background"):
            raise UnsupportedParameterError("background is not supported over WebSocket", param="background")
        queue = self._queues.get(lane)
        if queue is None:
            if len(self._queues) >= MAX_STREAMS:
                raise OverloadedError(f"at most {MAX_STREAMS} lanes at once", param="stream_id")
            queue = self._queues[lane] = deque()
            self._begin(self._run_lane(lane, queue))
        if len(queue) >= MAX_QUEUED:
            raise OverloadedError(f"at most {MAX_QUEUED} responses may wait in a lane", param="stream_id")
        queue.append(body)

    def resume(self, logged: LoggedResponse, after: int, lane: Lane) -> None:
        """Send a response from behind that number on, beside what goes on already.

        Raises: InvalidRequestError for one that is being sent already, or a number it has not reached; OverloadedError.
        """
        if logged.id in self._reading:
            raise InvalidRequestError("the response is being sent on this connection already", param="response_id")
        if self._num_resumed >= MAX_RESUMED:
            raise OverloadedError(f"at most {MAX_RESUMED} responses may be resumed at once", param="response_id")
        reader = logged.log.reader(after, extended=self._extended)
        self._num_resumed += 1
        self._reading[logged.id] = reader, lane
        self._begin(self._run_resumed(logged, reader, lane))

    def reader_of(self, response_id: str) -> LogReader | None:
        """The reader of a response that is being sent here."""
        found = self._reading.get(response_id)
        return found[0] if found is not None else None

    def stream_id_of(self, response_id: str) -> Lane:
        found = self._reading.get(response_id)
        return found[1] if found is not None else None

    def terminal_of(self, response_id: str) -> tuple[bool, str | None]:
        """Whether a response was lately sent here to its end, and the frame that ended it."""
        return response_id in self._ended, self._ended.get(response_id)

    async def close(self) -> None:
        """Stop reading. What becomes of the responses is their own affair."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_lane(self, lane: Lane, queue: deque[dict[str, Any]]) -> None:
        try:
            while queue:
                await self._respond(lane, queue.popleft())
        except CLIENT_GONE:
            pass  # the socket closed under a send; its own loop notices too
        finally:
            del self._queues[lane]

    async def _run_resumed(self, logged: LoggedResponse, reader: LogReader, lane: Lane) -> None:
        try:
            await self._outbox.send(_resumed(logged), lane)
            await self._forward(logged, lane, reader)
        except CLIENT_GONE:
            pass
        finally:
            self._num_resumed -= 1

    async def _respond(self, lane: Lane, body: Mapping[str, Any]) -> None:
        try:
            logged = await self._start(body)
            reader = logged.log.reader(extended=self._extended)
        except Exception as error:
            if not isinstance(error, ChatcacheError):
                log.exception("response.create failed")
            await self._outbox.send_error(error if isinstance(error, ChatcacheError) else INTERNAL_ERROR, lane)
            return
        await self._forward(logged, lane, reader)

    async def _start(self, body: Mapping[str, Any]) -> LoggedResponse:
        """Start a response, or find the one that its idempotency key made before. Raises: any ChatcacheError."""
        key = parse_fields(body, CreateFields).idempotency_key
        if key is None:
            return (await start_response(self._gateway, self._principal, body, watched=self._extended)).logged
        body = {name: value for name, value in body.items() if name != "idempotency_key"}
        once = IdempotencyKey.create(key, "response", body)
        run = await start_idempotent_response(self._gateway, self._principal, body, once, watched=self._extended)
        if not isinstance(run, str):
            return run.logged
        found = self._gateway.responses.find(self._principal.owner, run)
        if found is None:
            raise stream_expired_error(run)
        if found.id in self._reading:
            raise InvalidRequestError("the response is being sent on this connection already", param="idempotency_key")
        return found

    async def _forward(self, logged: LoggedResponse, lane: Lane, reader: LogReader) -> None:
        """Send a response's frames, and then those of whatever goes on with it."""
        suffix = stream_id_suffix(lane)
        while True:
            await self._send_from(logged, reader, lane, suffix)
            successor = logged.successor
            found = self._gateway.responses.find(self._principal.owner, successor) if successor is not None else None
            if found is None or found.id in self._reading:
                return
            logged, reader = found, found.log.reader(extended=self._extended)

    async def _send_from(self, logged: LoggedResponse, reader: LogReader, lane: Lane, suffix: bytes) -> None:
        with reader:
            self._reading[logged.id] = reader, lane
            try:
                while frames := await self._next(reader):
                    await self._outbox.forward(frames, suffix)
            except BaseException:
                self._gateway.metrics.disconnects.inc()
                raise
            finally:
                del self._reading[logged.id]
                self._gateway.metrics.snapshots.inc(reader.num_snapshots)
        self._ended[logged.id] = logged.log.terminal
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _next(self, reader: LogReader) -> Sequence[LogFrame]:
        """More frames. A client that acks, and then for long does not, is as good as gone."""
        if not reader.is_open:
            try:
                async with asyncio.timeout(_MAX_UNACKED_S):
                    await reader.wait_open()
            except TimeoutError:
                await self._outbox.close_slow_client()
                raise ConnectionError("the client acknowledges nothing") from None
        return await reader.next()


def _resumed(logged: LoggedResponse) -> dict[str, object]:
    terminal = logged.log.terminal
    status = terminal.rpartition(".")[2] if terminal is not None else "in_progress"
    number = logged.log.last_number
    return {"type": "response.resumed", "response_id": logged.id, "status": status, "sequence_number": number}
