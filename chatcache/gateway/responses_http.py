"""`POST /v1/responses`, streamed or whole, and reading a response again while its log is kept.

The response runs by itself (`response_run`); a connection only reads its log. What becomes of a response whose readers
leave is settled there: without `store` it ends, with it it goes on for a while, in the background until it is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chatcache.errors import ChatcacheError
from chatcache.gateway.body import read_json, until_disconnect
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.errors import json_response
from chatcache.gateway.fields import ignored_header, read, unknown_fields
from chatcache.gateway.jsonio import encode
from chatcache.gateway.principal import owner_of, principal_of
from chatcache.gateway.repeats import REPLAYED, Once
from chatcache.gateway.response_log import TERMINAL, LogReader
from chatcache.gateway.response_registry import Run
from chatcache.gateway.response_run import start_once, start_response
from chatcache.gateway.response_state import as_created, as_logged, as_stored, find_stored, stream_expired
from chatcache.gateway.sse import EventStream
from chatcache.gateway.wire import DeliveryFields, ResponseFields, SamplingFields

# openai-python takes a blank line for the end of an event wherever ids may be: a ping has none.
PING = b": keep-alive\n"
JSON = "application/json"


async def create(request: Request) -> Response:
    """POST /v1/responses."""
    gateway = gateway_of(request)
    body = await read_json(request)
    delivery = read(body, DeliveryFields)
    headers = ignored_header(unknown_fields(body, DeliveryFields, ResponseFields, SamplingFields))
    principal, once = principal_of(request), Once.of_request(request, "response", body)
    # One that is stored is started even if the client is gone by then: resending it could only double it.
    if once is not None:
        run = await start_once(gateway, principal, body, once)
        if isinstance(run, str):
            return await _again(request, run, delivery, headers | REPLAYED)
    elif delivery.store is not False:
        run = await start_response(gateway, principal, body)
    else:
        run = await until_disconnect(request, start_response(gateway, principal, body))
    if delivery.stream:
        return LogStream(gateway, run.log.reader(), headers)
    if delivery.background:
        return Response(as_created(run.log), headers=headers, media_type=JSON)
    with run.log.reader():
        await until_disconnect(request, _over(gateway, run))
    return Response(as_logged(run.log), headers=headers, media_type=JSON)


async def _again(request: Request, response_id: str, delivery: DeliveryFields, headers: dict[str, str]) -> Response:
    """Answer a request that comes again with what the first one made. Raises: NotFound where that was deleted."""
    gateway, owner = gateway_of(request), owner_of(request)
    logged = gateway.responses.find(owner, response_id)
    if logged is None:  # of long ago, or another gateway's
        tree = await find_stored(gateway.opened_store(), owner, response_id)
        if delivery.stream:
            raise stream_expired(response_id)
        return json_response(as_stored(tree, response_id), headers=headers)
    if delivery.stream:
        return LogStream(gateway, logged.log.reader(), headers)
    if not delivery.background and logged.run is not None:
        with logged.log.reader():
            await until_disconnect(request, _over(gateway, logged.run))
    return Response(as_logged(logged.log), headers=headers, media_type=JSON)


async def _over(gateway: Gateway, run: Run) -> None:
    """Wait for the end; whoever stops waiting before has left."""
    try:
        await asyncio.wait([run.task])
    except asyncio.CancelledError:
        gateway.metrics.disconnects.inc()
        raise


class LogStream(EventStream):
    """The numbered frames of a log as SSE. Counts as a reader for as long as it is connected."""

    def __init__(self, gateway: Gateway, reader: LogReader, headers: dict[str, str]) -> None:
        self._gateway = gateway
        self._reader = reader
        self._whole = False
        self._num_sent = reader.sent_number + 1  # of the response's numbered frames
        self._has_ended = False
        super().__init__(
            self._frames(),
            keep_alive_s=gateway.config.sse_keep_alive_interval_s,
            keep_alive=PING,
            on_end=self._ended,
            headers=headers,
        )

    def last_words(self, error: ChatcacheError) -> bytes:
        """OpenAI's `error` event under the next number, unless the response's own end was told."""
        if self._has_ended:
            return b""
        body = {"code": error.code, "message": error.message, "param": error.param}
        return _framed("error", encode({"type": "error", "sequence_number": self._num_sent, **body}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reader:
            await super().__call__(scope, receive, send)

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        """What is there goes in one piece, each event with OpenAI's name for it."""
        while frames := await self._reader.next():
            yield b"".join(_framed(frame.kind, frame.data) for frame in frames)
            # Whoever asks for more has sent them.
            self._num_sent += len(frames)
            self._has_ended |= any(frame.kind in TERMINAL for frame in frames)
        self._whole = True

    async def _ended(self) -> None:
        if not self._whole:
            self._gateway.metrics.disconnects.inc()


def _framed(kind: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)
