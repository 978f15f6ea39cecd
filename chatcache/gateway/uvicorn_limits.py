"""uvicorn's protocols with an end to what clients may draw out: connections, request heads, answers that nobody reads,
and messages in pieces without number.

uvicorn gathers a head for ever, ever more slowly, and keeps what a stalled reader does not take for as long as its
connection lasts; even closing waits for it. A WebSocket may send pings and empty pieces of a message as fast as it
likes: nobody else would be heard. What comes behind a body in pieces it gathers too, and takes for more of the head;
requests that wait for the answer to another, however many; and what is left of a body that was answered, it awaits
for ever.

The WebSocket protocol as RFC 6455 has it where the library has it otherwise, and its refusals in our envelope.

How many descriptors this process may have open, and how many of them connections.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import sys
import time
from http import HTTPStatus
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.server import ServerProtocol

from chatcache.errors import InvalidRequestError
from chatcache.gateway.errors import INTERNAL_ERROR, error_body
from chatcache.gateway.json_codec import encode
from chatcache.gateway.limits.rate_limits import SECOND_NS, TokenBucket
from chatcache.gateway.schemas.errors import Error
from chatcache.gateway.websocket.connection import RATE_LIMITED

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class StrictWebSocketProtocol(ServerProtocol):
    """Text is looked at as it comes (8.1), not when it is whole and by uvicorn, which logs a traceback; whoever says
    goodbye between the pieces of a message (5.4) is answered so."""

    _decoder: codecs.IncrementalDecoder | None = None

    def reject(self, status: HTTPStatus | int, text: str) -> Response:
        error = InvalidRequestError(text.strip(), code="handshake_refused") if status < 500 else INTERNAL_ERROR
        response = super().reject(status, encode(Error(error_body(error))).decode())
        del response.headers["Content-Type"]
        response.headers["Content-Type"] = "application/json"
        return response

    def recv_frame(self, frame: Frame) -> None:
        """Raises: ProtocolError, UnicodeDecodeError."""
        super().recv_frame(frame)
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._decoder = _Utf8Decoder() if frame.opcode is Opcode.TEXT else None
        if frame.opcode in (Opcode.TEXT, Opcode.CONT) and self._decoder is not None:
            self._decoder.decode(frame.data, final=frame.fin)

    def fail(self, code: int, reason: str = "") -> None:
        if self.close_rcvd is not None:  # the library takes what was left unfinished for a fault
            given = self.close_rcvd.code
            code, reason = CloseCode.NORMAL_CLOSURE if given == CloseCode.NO_STATUS_RCVD else given, ""
        super().fail(code, reason)


if sys.platform != "win32":
    import resource

RESERVED_DESCRIPTORS = 128


def _most() -> int:
    if sys.platform == "win32":
        return sys.maxsize
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if most != resource.RLIM_INFINITY else sys.maxsize


def raise_fd_limit() -> None:
    """Take all the system allows; shells and service managers give 1,024 where it would allow thousands."""
    if sys.platform != "win32":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # macOS: "unlimited" is more than it takes
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """How many may be open at once, so that files, and a new engine, always find a descriptor of this process free."""
    most = _most()
    return max(most // 2, most - RESERVED_DESCRIPTORS)


log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 30.0
MAX_PIPELINED = 100  # requests that wait while one before them is answered
# Of a WebSocket, whatever they are; messages have a limit of their own (`gateway.ws`).
MAX_FRAMES_PER_S = 1000
MAX_FRAME_BURST = 5000
MAX_FRAGMENTS = 10_000  # of one message
_FED_BYTES = 4096  # the smallest frames in so much take ten milliseconds


class _Reader:
    """Cuts off a reader that takes nothing at all for `STALL_TIMEOUT_S`; any other may be as slow as it likes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Look again in a while: more is waiting than the transport likes to hold."""
        self.release()
        num_waiting_bytes = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(STALL_TIMEOUT_S, self._look, num_waiting_bytes)

    def release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, num_waiting_bytes: int) -> None:
        if self._transport.get_write_buffer_size() < num_waiting_bytes:
            self.watch()
            return
        log.info("a client took nothing for %g s: disconnected", STALL_TIMEOUT_S)
        self._transport.abort()


class _Watched(asyncio.Protocol):
    """Watches the reader while the transport asks the writer to wait."""

    _reader: _Reader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._reader = _Reader(asyncio.get_running_loop(), cast(asyncio.Transport, transport))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader is not None:
            self._reader.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader is not None:
            self._reader.release()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reader is not None:
            self._reader.release()
        super().connection_lost(exc)


class BoundedWebSocket(_Watched, WebSocketsSansIOProtocol):
    """A WebSocket that ends when its reader stalls, or when it sends more frames than anybody needs.

    A handshake that is refused, by us or by the library, is an answer and an end: uvicorn logs the one as an error and
    waits for ever behind the other.
    """

    _frame_bucket: TokenBucket | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictWebSocketProtocol(
            extensions=self.conn.available_extensions, max_size=self.config.ws_max_size, logger=self.logger
        )

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), _FED_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[at : at + _FED_BYTES])
            if self.conn.handshake_exc is not None and not self.handshake_initiated:
                answer = (
                    b"".join(self.conn.data_to_send()) or self.conn.reject(400, "no WebSocket handshake").serialize()
                )
                self.transport.write(answer)
                self.transport.close()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
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


class BoundedHttp(_Watched, HttpToolsProtocol):
    """Turns away who comes when there are `max_connections`, answers 431 to a head that is still open after
    `MAX_HEAD_BYTES`, and to as much between the pieces of a body or behind it; hangs up on what never ends, on a reader
    that stalls, and on whoever sends requests without waiting for answers."""

    _in_head = True
    _num_idle_bytes = 0  # since the last head or piece of a body was whole
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            log.debug("all connections are taken: one is turned away")
            self.transport.abort()
            return
        self._await_end()

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._deadline is None:
            self._await_end()
        self._num_idle_bytes += len(data)
        super().data_received(data)
        if self._num_idle_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes behind a body, uvicorn would take for more of its head
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Raises: ConnectionError, which the parser takes for a request that is none."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ConnectionError("too many requests wait for others")
        self._in_head, self._num_idle_bytes = False, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._num_idle_bytes = True, 0
        super().on_message_complete()
        if self._deadline is not None:  # it was answered before it was whole
            self._stop_waiting()
            self._await_end()

    def handle_websocket_upgrade(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            log.info("a WebSocket was asked for amid an answer: disconnected")
            self.transport.close()  # else that answer would be written into the socket, and hear of no end
            return
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and self.cycle.response_complete and not self.transport.is_closing():
            self._await_end()  # nobody reads what is left of this body

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_end(self) -> None:
        """Of a head, or of what is left of a body behind its answer."""
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._hang_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _hang_up(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:  # stray bytes during an answer do not end it
            self.transport.close()

    def _refuse(self) -> None:
        log.info("the fields of a request are larger than %d bytes", MAX_HEAD_BYTES)
        told = f"the request head, or what is beside its body, is larger than {MAX_HEAD_BYTES} bytes"
        self._end(b"431 Request Header Fields Too Large", InvalidRequestError(told, code="request_head_too_large"))

    def send_400_response(self, msg: str) -> None:
        self._end(b"400 Bad Request", InvalidRequestError("this is not HTTP/1.1", code="invalid_http"))

    def _end(self, status: bytes, error: InvalidRequestError) -> None:
        if not self._is_answering:
            body = encode(Error(error_body(error)))
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body)
            )
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        """Whether an answer is under way, or due before one to what is being read."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return self._in_head or bool(self.pipeline) or self.cycle.response_started
