"""ASGI middleware around every request, and helpers that read JSON bodies.

`RequestContextMiddleware` assigns a request id, turns exceptions into error responses and logs one line per request.
`BodyLimitMiddleware` limits the size and the duration of request bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from sse_starlette.sse import SendTimeoutError
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatcache.conversations.tree import new_id
from chatcache.errors import ChatcacheError
from chatcache.gateway.auth.principal import find_principal, optional_principal
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import (
    INTERNAL_ERROR,
    REQUEST_ID,
    BodyTimeoutError,
    BodyTooLargeError,
    ShuttingDownError,
    UnsupportedMediaTypeError,
    error_response,
    is_messages_api,
)
from chatcache.gateway.json_codec import decode_object
from chatcache.gateway.limits.admission import UNTHROTTLED_BYTES, TextThrottle
from chatcache.gateway.limits.rate_limits import RateLimiter
from chatcache.gateway.metrics import Metrics
from chatcache.logs import REQUEST_ID as LOGGED_ID

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CLIENT_CLOSED_REQUEST = 499
MAX_OWNER_READS = 2
_ACCEPTED_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MIN_BYTES_PER_S = 1024
_REFUSED_GZIP = re.compile(r"\bgzip\s*;\s*q\s*=\s*0(\.0*)?\s*(,|$)", re.IGNORECASE)
_START_MESSAGES = ("http.response.start", "websocket.http.response.start", "websocket.accept")


class RequestContextMiddleware:
    """Outermost middleware but for CORS: request id, error responses, metrics and one log line per request."""

    def __init__(self, app: ASGIApp, metrics: Metrics, limiter: RateLimiter) -> None:
        self._app = app
        self._metrics = metrics
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        offered = headers.get("x-request-id") or headers.get("x-client-request-id") or ""
        request_id = offered if _ACCEPTED_ID.fullmatch(offered) else new_id("req")
        scope[REQUEST_ID] = request_id
        LOGGED_ID.set(request_id)
        started_s, status, is_stream = time.perf_counter(), 0, False
        if self._metrics.tracer is not None:
            self._metrics.tracer.begin_request(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] in _START_MESSAGES:
                status = message.get("status", 101)
                headers_out = MutableHeaders(scope=message)
                headers_out["x-request-id"] = request_id
                if is_messages_api(scope):
                    headers_out["request-id"] = request_id
                if (principal := find_principal(scope)) is not None:
                    headers_out.update(self._limiter.headers(principal))
                if headers_out.get("content-type", "").startswith("text/event-stream"):
                    is_stream = True
                    self._metrics.streams.inc()
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except (SendTimeoutError, ClientDisconnect):
            log.info("%s the client disconnected or stopped reading", request_id)
        except asyncio.CancelledError:  # by uvicorn, which waits no longer for requests while the server shuts down
            if status or scope["type"] != "http":
                raise
            error = ShuttingDownError("the server is shutting down; try again in a moment")
            self._metrics.record_refusal(error)
            await _send_error(error, scope, receive, send_with_id)
        except Exception as error:
            if not isinstance(error, ChatcacheError):
                log.exception("%s failed", request_id)
            if not status:
                public_error = error if isinstance(error, ChatcacheError) else INTERNAL_ERROR
                self._metrics.record_refusal(public_error)
                await _send_error(public_error, scope, receive, send_with_id)
        finally:
            if is_stream:
                self._metrics.streams.dec()
            self._record(scope, status or CLIENT_CLOSED_REQUEST, time.perf_counter() - started_s)

    def _record(self, scope: Scope, status: int, duration_s: float) -> None:
        route = _route_of(scope)
        if self._metrics.tracer is not None:
            self._metrics.tracer.end_request(scope, route, status)
        self._metrics.requests.labels(route=route, status=str(status)).inc()
        self._metrics.duration.labels(route=route).observe(duration_s)
        method = scope.get("method", "WS")
        is_probe = method in ("GET", "HEAD") and not route.startswith("/v1/")  # health probes and static files
        level = logging.DEBUG if is_probe else logging.INFO
        fields = {"method": method, "route": route, "status": status, "duration_ms": round(duration_s * 1000, 1)}
        line = (scope[REQUEST_ID], *fields.values())
        log.log(level, "%s %s %s %d %.1f ms", *line, extra={"fields": fields})


class CompressionMiddleware(GZipMiddleware):
    """Compresses answers, but not for clients that exclude gzip (`gzip;q=0`)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _REFUSED_GZIP.search(Headers(scope=scope).get("accept-encoding", "")):
            scope = {**scope, "headers": [each for each in scope["headers"] if each[0] != b"accept-encoding"]}
        await super().__call__(scope, receive, send)


class ReadTurnsMiddleware:
    """Lets each owner have `MAX_OWNER_READS` GET requests processed at a time; the others wait.

    A request counts until its answer begins. Without this, a client that reads on many connections has that many turns
    of the event loop for each turn of another. On an open server, where all clients are one owner, there is no limit.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal = find_principal(scope)
        if scope["type"] != "http" or scope["method"] != "GET" or principal is None or not principal.owner:
            await self._app(scope, receive, send)
            return
        turn = self._turns.get(principal.owner)
        if turn is None:
            turn = self._turns[principal.owner] = asyncio.Semaphore(MAX_OWNER_READS)
        with contextlib.ExitStack() as stack:
            await turn.acquire()
            stack.callback(turn.release)

            async def send_and_end_turn(message: Message) -> None:
                if message["type"] == "http.response.start":
                    stack.close()
                await send(message)

            await self._app(scope, receive, send_and_end_turn)


class BodyLimitMiddleware:
    """Limits the size and the transfer time of request bodies.

    `max_bytes_by_path` overrides `max_bytes` for single paths. Raises, from `receive`, or at once for a Content-Length
    over the limit: BodyTooLargeError; BodyTimeoutError if no data arrives for `timeout_s`, or less than
    `_MIN_BYTES_PER_S` on average.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, timeout_s: float, max_bytes_by_path: Mapping[str, int] | None = None
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._max_bytes_by_path = max_bytes_by_path or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        max_bytes = self._max_bytes_by_path.get(path, self._max_bytes)
        content_length = Headers(scope=scope).get("content-length", "")
        if content_length.isdigit() and int(content_length[:20]) > max_bytes:
            raise _too_large(max_bytes)
        clock = asyncio.get_running_loop().time
        num_bytes, is_complete, waited_s = 0, False, 0.0

        async def receive_counted() -> Message:
            nonlocal num_bytes, is_complete, waited_s
            if is_complete:  # the next message is the disconnect, which has no deadline
                return await receive()
            asked_s, head_start_s = clock(), num_bytes / _MIN_BYTES_PER_S - waited_s
            try:
                async with asyncio.timeout(self._timeout_s + min(0.0, head_start_s)):
                    message = await receive()
            except TimeoutError:
                raise BodyTimeoutError(f"the body stopped arriving after {num_bytes} bytes") from None
            waited_s += clock() - asked_s  # time that the server spends between reads does not count
            is_complete = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            return message

        await self._app(scope, receive_counted, send)


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than {max_bytes} bytes")


async def _send_error(error: ChatcacheError, scope: Scope, receive: Receive, send: Send) -> None:
    response: Response = error_response(error, scope)
    # On a WebSocket scope Starlette sends this as a denial: an HTTP response to the handshake.
    await response(scope, receive, send)


def _route_of(scope: Scope) -> str:
    """Return the route pattern, so that ids in paths do not create new metric labels."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    return path if isinstance(path, str) else "unmatched"


async def read_json(request: Request, *, any_media_type: bool = False) -> dict[str, Any]:
    """Read the body as a strict JSON object.

    `any_media_type`: for clients of APIs that never look at the content type. Pages of other sites, whose requests need
    no permission with some content types, are refused by their Origin.

    Raises: UnsupportedMediaTypeError, BodyTooLargeError, InvalidRequestError, ClientDisconnect.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not any_media_type:
        raise UnsupportedMediaTypeError("send JSON with content-type: application/json")
    reject_encoding(request)
    principal = optional_principal(request)
    owner = principal.owner if principal is not None else ""
    return await parse_json(await request.body(), gateway_of(request).decode_throttle, owner)


def reject_encoding(request: Request) -> None:
    """Reject a compressed body, which could expand without limit.

    Raises: UnsupportedMediaTypeError.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaTypeError("send the body uncompressed, without content-encoding")


async def read_optional_json(request: Request) -> dict[str, Any]:
    """Read the body as a strict JSON object; {} for an empty body. Raises: as `read_json`."""
    return await read_json(request) if await request.body() else {}


async def parse_json(data: bytes | str, throttle: TextThrottle, owner: str) -> dict[str, Any]:
    """Decode a JSON object, in a thread if it is large.

    Large ones are decoded one after another, those of one owner in turn with those of the others.

    Raises: InvalidRequestError; RateLimitError if too many bytes of the owner wait already.
    """
    if len(data) <= UNTHROTTLED_BYTES:
        return decode_object(data)
    return await throttle.run(owner, data, decode_object)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work` and cancel it if the client disconnects, which ASGI servers do not do.

    Raises: ClientDisconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
