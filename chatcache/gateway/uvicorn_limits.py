"""uvicorn protocols with limits on connections, request heads, stalled readers and frames.

uvicorn by itself has no such limits: it buffers an unfinished request head without end, keeps the output of a reader
that has stalled for as long as the connection lasts, and accepts any number of pipelined requests, WebSocket pings and
message fragments. It also treats trailers of a chunked body as part of the request head.

What a WebSocket sends is parsed in turns of its owner, and not at all once the server has closed the connection, so
that large frames do not occupy the event loop.

`StrictWebSocketProtocol` corrects two deviations of the `websockets` library from RFC 6455 and sends its refusals in
the JSON error envelope. `max_connections` derives the connection limit from the limit on file descriptors.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import math
import sys
import time
from collections.abc import Generator
from http import HTTPStatus
from typing import Any, cast

from starlette.requests import HTTPConnection
from starlette.types import Scope
from uvicorn._types import ASGI3Application, ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

from chatcache.errors import InvalidRequestError
from chatcache.gateway.auth.principal import find_principal
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import INTERNAL_ERROR, error_body
from chatcache.gateway.json_codec import encode
from chatcache.gateway.limits.rate_limits import SECOND_NS, TokenBucket
from chatcache.gateway.schemas.server import Error
from chatcache.gateway.websocket.connection import RATE_LIMITED

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 30.0
MAX_PIPELINED = 100  # requests that wait for the response to an earlier one
# Limits on WebSocket frames of all kinds; `websocket.connection` also limits messages.
MAX_FRAMES_PER_S = 1000
MAX_FRAME_BURST = 5000
MAX_FRAGMENTS = 10_000  # of one message
_CHUNK_BYTES = 4096  # parsing this many bytes of minimal frames takes ten milliseconds
_MAX_CONTROL_BYTES = 125  # of the payload of a close frame, a ping or a pong
RESERVED_DESCRIPTORS = 128  # for files and the engine process

if sys.platform != "win32":
    import resource

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class _FrameReader(StreamReader):
    """Buffer of received bytes; once `is_discarding`, payloads of messages are skipped and read as shorter."""

    is_discarding = False

    def read_exact(self, n: int) -> Generator[None, None, bytearray]:
        num_skipped = 0
        while len(self.buffer) + num_skipped < n:
            if self.eof:
                raise EOFError(f"stream ends after {len(self.buffer)} bytes, expected {n} bytes")
            if self.is_discarding and n > _MAX_CONTROL_BYTES:
                num_skipped += len(self.buffer)
                self.buffer.clear()
            yield
        found = self.buffer[: n - num_skipped]
        del self.buffer[: n - num_skipped]
        return found


class StrictWebSocketProtocol(ServerProtocol):
    """WebSocket protocol that follows RFC 6455 where the `websockets` library does not.

    Checks UTF-8 of each text fragment when it arrives (8.1), instead of leaving it to uvicorn, which logs a traceback.
    If the client sends a close frame between the fragments of a message (5.4), it gets its close code back.
    """

    _decoder: codecs.IncrementalDecoder | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.reader = self._frames = _FrameReader()
        self.parser = self.parse()  # the library's has begun to read from its own reader
        next(self.parser)

    def discard_messages(self) -> None:
        """Skip the messages that arrive from now on; control frames are still processed."""
        self._frames.is_discarding = True

    def reject(self, status: HTTPStatus | int, text: str) -> Response:
        error = InvalidRequestError(text.strip(), code="handshake_refused") if status < 500 else INTERNAL_ERROR
        response = super().reject(status, encode(Error(error_body(error))).decode())
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response

    def recv_frame(self, frame: Frame) -> None:
        """Process a frame and check its UTF-8.

        Raises: ProtocolError, UnicodeDecodeError.
        """
        super().recv_frame(frame)
        if self._frames.is_discarding:
            return
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._decoder = _Utf8Decoder() if frame.opcode is Opcode.TEXT else None
        if frame.opcode in (Opcode.TEXT, Opcode.CONT) and self._decoder is not None:
            self._decoder.decode(frame.data, final=frame.fin)

    def fail(self, code: int, reason: str = "") -> None:
        if self.close_rcvd is not None:  # the library reports the unfinished message as a protocol error
            code_received = self.close_rcvd.code
            code, reason = CloseCode.NORMAL_CLOSURE if code_received == CloseCode.NO_STATUS_RCVD else code_received, ""
        super().fail(code, reason)


def _max_descriptors() -> int:
    if sys.platform == "win32":
        return sys.maxsize
    num_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return num_descriptors if num_descriptors != resource.RLIM_INFINITY else sys.maxsize


def raise_fd_limit() -> None:
    """Raise the limit on file descriptors to the maximum that the system allows.

    Shells and service managers start processes with 1,024, where the system would allow thousands.
    """
    if sys.platform != "win32":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # macOS rejects "unlimited"
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """Maximum number of open connections.

    Reserves file descriptors for files and for restarting the engine process.
    """
    num_descriptors = _max_descriptors()
    return max(num_descriptors // 2, num_descriptors - RESERVED_DESCRIPTORS)


class _StallTimer:
    """Disconnects a client that reads nothing for `STALL_TIMEOUT_S`; slow reading is fine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Check the write buffer again after `STALL_TIMEOUT_S`."""
        self.release()
        num_waiting_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(STALL_TIMEOUT_S, self._check, num_waiting_bytes)

    def release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, num_waiting_bytes: int) -> None:
        if self._transport.get_write_buffer_size() < num_waiting_bytes:
            self.watch()
            return
        log.info("a client read nothing for %g s: disconnected", STALL_TIMEOUT_S)
        self._transport.abort()


class _StallGuard(asyncio.Protocol):
    """Runs the stall timer while the transport has paused writing."""

    _stall_timer: _StallTimer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._stall_timer = _StallTimer(asyncio.get_running_loop(), cast(asyncio.Transport, transport))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is not None:
            self._stall_timer.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.release()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stall_timer is not None:
            self._stall_timer.release()
        super().connection_lost(exc)


class BoundedWebSocket(_StallGuard, WebSocketsSansIOProtocol):
    """WebSocket protocol that disconnects stalled readers and clients that send too many frames.

    It also ends the connection after a refused handshake. uvicorn logs such a handshake as an error, or waits forever
    if the library refused it.
    """

    _frame_bucket: TokenBucket | None = None
    _awaits_turn = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unparsed = bytearray()
        self.conn = self._strict = StrictWebSocketProtocol(
            extensions=self.conn.available_extensions, max_size=self.config.ws_max_size, logger=self.logger
        )

    def data_received(self, data: bytes) -> None:
        """Parse a little data at once, and more in turns of the owner, without reading on meanwhile."""
        self._unparsed += data
        if self._awaits_turn:
            return
        if self.handshake_initiated and len(self._unparsed) > _CHUNK_BYTES:
            self._await_turn()
        else:
            self._parse(math.inf)

    def _await_turn(self) -> None:
        if not self._awaits_turn:
            self._awaits_turn = True
            self.transport.pause_reading()
            scope = cast(Scope, self.scope)
            principal = find_principal(scope)
            turns = gateway_of(HTTPConnection(scope)).loop_turns
            turns.add(principal.owner if principal is not None else "", self._take_turn)

    def _take_turn(self, deadline_s: float) -> bool:
        """Parse until the deadline; return whether there is more to parse."""
        self._parse(deadline_s)
        if self._unparsed and not self.read_paused:
            return True
        self._awaits_turn = False
        if not self.read_paused:
            self.transport.resume_reading()
        return False

    def _parse(self, deadline_s: float) -> None:
        """Parse what has arrived, up to the end of a message or the deadline."""
        while self._unparsed and not self.read_paused:
            if self.transport.is_closing():
                self._unparsed.clear()
                return
            chunk = bytes(self._unparsed[:_CHUNK_BYTES])
            del self._unparsed[:_CHUNK_BYTES]
            super().data_received(chunk)
            if self.conn.handshake_exc is not None and not self.handshake_initiated:
                answer = (
                    b"".join(self.conn.data_to_send()) or self.conn.reject(400, "not a WebSocket handshake").serialize()
                )
                self.transport.write(answer)
                self.transport.close()
            if time.perf_counter() > deadline_s:
                return

    async def receive(self) -> ASGIReceiveEvent:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self._unparsed:
                self._await_turn()
            elif not self._awaits_turn:
                self.transport.resume_reading()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.close" and self.handshake_complete:
            self._strict.discard_messages()
            if self._unparsed:
                self._await_turn()
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def handle_events(self) -> None:
        now_ns = time.monotonic_ns()
        if self._frame_bucket is None:
            self._frame_bucket = TokenBucket(MAX_FRAMES_PER_S, now_ns, period_ns=SECOND_NS, burst=MAX_FRAME_BURST)
        num_frames = len(self.conn.events)
        super().handle_events()
        if not self._frame_bucket.try_consume(num_frames, now_ns) or len(self.frames) > MAX_FRAGMENTS:
            self._refuse()

    def _refuse(self) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        log.info("a WebSocket sent too many frames: disconnected")
        self.stop_keepalive()
        self.conn.fail(RATE_LIMITED, "too many frames")
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": RATE_LIMITED})
        self.transport.close()


class BoundedHttp(_StallGuard, HttpToolsProtocol):
    """HTTP protocol with limits on connections, heads, pipelined requests and stalled readers.

    Closes connections over `max_connections`. Answers 431 to a request head, or to trailers of a body, that are larger
    than `MAX_HEAD_BYTES`, and closes a connection whose head or rejected body does not end within `HEAD_TIMEOUT_S`.
    """

    _in_head = True
    _num_head_bytes = 0  # received since the last complete head or body chunk
    _num_field_bytes = 0  # of the current head: its URL and header lines
    _deadline: asyncio.TimerHandle | None = None
    _started_cycle: RequestResponseCycle | None = None  # of the request that is answered; `cycle` is the newest one's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            log.debug("connection limit reached: closing a new connection")
            self.transport.abort()
            return
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._deadline is None:
            self._start_deadline()
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_url(self, url: bytes) -> None:
        self._num_field_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # uvicorn would add trailers of a body to the request head
            self._num_field_bytes += len(name) + len(value) + len(": \r\n")
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start a request, unless its head is too large or too many are pipelined.

        Raises: ConnectionError, which the parser reports as an invalid request.
        """
        num_bytes, self._num_field_bytes = self._num_field_bytes, 0
        if num_bytes > MAX_HEAD_BYTES:
            self._refuse()
            raise ConnectionError("the head is too large")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ConnectionError("too many pipelined requests")
        self._in_head, self._num_head_bytes = False, 0
        self._cancel_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._num_head_bytes = True, 0
        super().on_message_complete()
        if self._deadline is not None:  # the response ended before the request body
            self._cancel_deadline()
            self._start_deadline()

    def handle_websocket_upgrade(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            log.info("a WebSocket handshake arrived during a response: disconnected")
            self.transport.close()  # otherwise the response would be written into the WebSocket
            return
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and self.cycle.response_complete and not self.transport.is_closing():
            self._start_deadline()  # the rest of the request body is not read

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._started_cycle = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that is answered. uvicorn ends the newest one, which may wait in the pipeline."""
        self._cancel_deadline()
        super().connection_lost(exc)
        if (started := self._started_cycle) is not None and not started.response_complete:
            started.disconnected = True
            started.message_event.set()

    def _start_deadline(self) -> None:
        """Limit the time for the end of a request head, or of a body after its response."""
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._on_deadline)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:  # do not interrupt a running response
            self.transport.close()

    def _refuse(self) -> None:
        log.info("the head of a request is larger than %d bytes", MAX_HEAD_BYTES)
        message = f"the request head or the trailers of the body are larger than {MAX_HEAD_BYTES} bytes"
        self._send_error(
            b"431 Request Header Fields Too Large", InvalidRequestError(message, code="request_head_too_large")
        )

    def send_400_response(self, msg: str) -> None:
        self._send_error(b"400 Bad Request", InvalidRequestError("this is not HTTP/1.1", code="invalid_http"))

    def _send_error(self, status: bytes, error: InvalidRequestError) -> None:
        if self.transport.is_closing():
            return
        if not self._is_responding:
            body = encode(Error(error_body(error)))
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body)
            )
        self.transport.close()

    @property
    def _is_responding(self) -> bool:
        """Whether a response has started, or an earlier pipelined request is still unanswered."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return self._in_head or bool(self.pipeline) or self.cycle.response_started
