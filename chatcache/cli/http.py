"""uvicorn's HTTP protocol with an end to request heads: it would gather one for ever, ever more slowly."""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0


class BoundedHead(HttpToolsProtocol):
    """Answers 431 to a head that is still open after `MAX_HEAD_BYTES`, and hangs up on one that never ends."""

    _in_head = True
    _num_head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        body = (
            b'{"error":{"message":"the request head is larger than %d bytes",'
            b'"type":"invalid_request_error","param":null,"code":"request_head_too_large"}}' % MAX_HEAD_BYTES
        )
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()
