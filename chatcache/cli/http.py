"""uvicorn's protocols with an end to what clients may draw out: connections, request heads, answers that nobody reads,
and messages in pieces without number.

uvicorn gathers a head for ever, ever more slowly, and keeps what a stalled reader does not take for as long as its
connection lasts; even closing waits for it. A WebSocket may send pings and empty pieces of a message as fast as it
likes: nobody else would be heard.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from chatcache.cli.descriptors import most_connections
from chatcache.cli.ws_protocol import StrictProtocol
from chatcache.errors import InvalidRequest
from chatcache.gateway.errors import error_body
from chatcache.gateway.jsonio import encode
from chatcache.gateway.pace import Pace
from chatcache.gateway.ws import TOO_MANY

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 30.0
# Of a WebSocket, whatever they are; messages have a limit of their own (`gateway.ws`).
MAX_FRAMES_PER_S = 1000.0
MAX_FRAMES_AT_ONCE = 5000.0
MAX_PIECES = 10_000  # of one message
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


class BoundedSocket(_Watched, WebSocketsSansIOProtocol):
    """A WebSocket that ends when its reader stalls, or when it sends more frames than anybody needs.

    A handshake that is refused, by us or by the library, is an answer and an end: uvicorn logs the one as an error and
    waits for ever behind the other.
    """

    _pace: Pace | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictProtocol(
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
        self._pace = self._pace or Pace(MAX_FRAMES_PER_S, MAX_FRAMES_AT_ONCE)
        num_frames = len(self.conn.events)
        super().handle_events()
        if not self._pace.take(self.loop.time(), num_frames) or len(self.frames) > MAX_PIECES:
            self._refuse()

    def _refuse(self) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        log.info("a WebSocket sent too many frames: disconnected")
        self.stop_keepalive()
        self.conn.fail(TOO_MANY, "too many frames")
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": TOO_MANY})
        self.transport.close()


class BoundedHttp(_Watched, HttpToolsProtocol):
    """Turns away who comes when there are `most_connections`, answers 431 to a head that is still open after
    `MAX_HEAD_BYTES`, hangs up on one that never ends, and on a reader that stalls."""

    _in_head = True
    _num_head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            log.debug("all connections are taken: one is turned away")
            self.transport.abort()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._deadline is None:
            self._await_head()
        self._num_head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._in_head and self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        self._in_head, self._num_head_bytes = False, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
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
        log.info("a request head is larger than %d bytes", MAX_HEAD_BYTES)
        told = f"the request head is larger than {MAX_HEAD_BYTES} bytes"
        self._end(b"431 Request Header Fields Too Large", InvalidRequest(told, code="request_head_too_large"))

    def send_400_response(self, msg: str) -> None:
        self._end(b"400 Bad Request", InvalidRequest("this is not HTTP/1.1", code="invalid_http"))

    def _end(self, status: bytes, error: InvalidRequest) -> None:
        body = encode({"error": error_body(error)})
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body)
        )
        self.transport.close()
