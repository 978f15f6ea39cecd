"""Streamed responses in the form that clients parse; by default the server-sent events of OpenAI.

Lines end with LF, an event is one `data:` line without id, and `[DONE]` ends the stream. Framing and keep-alive
comments differ from sse-starlette's, because other forms break real clients; its response class detects disconnects and
shutdown. A stream of tokens has thousands of small sends, so one watcher per stream, not one timeout per send, detects
idle streams and stalled clients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import anyio
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from chatcache.errors import ChatcacheError
from chatcache.gateway.errors import INTERNAL_ERROR, error_body
from chatcache.gateway.json_codec import encode
from chatcache.gateway.schemas.server import Error

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_ERROR_PREFIX = b'data: {"error":'
_SCOPE_KEY = "chatcache.stream"
_SEND_TIMEOUT_S = 60.0
_SHUTDOWN_GRACE_S = 25.0


def sse_frame(event: object) -> bytes:
    """Encode one event. ASCII JSON has no line separators, so the data is one line."""
    return b"data: " + encode(event) + b"\n\n"


def named_sse_frame(name: str, event: object) -> bytes:
    """Encode one event with an `event:` line."""
    return b"event: " + name.encode() + b"\n" + sse_frame(event)


@dataclass(frozen=True, slots=True)
class SseFormat:
    """How an API writes its events.

    `end`: the frame after the last event, b"" for none. `final`: beginnings of the frames after which none follows.
    """

    media_type: str = "text/event-stream"

    encode_event: Callable[[object], bytes] = sse_frame
    encode_error: Callable[[ChatcacheError], bytes] = lambda error: sse_frame(Error(error_body(error)))
    end: bytes = DONE
    final: tuple[bytes, ...] = (DONE, _ERROR_PREFIX)
    keep_alive: bytes = KEEP_ALIVE


OPENAI_FORMAT = SseFormat()


class EventStream(EventSourceResponse):  # type: ignore[misc]  # sse-starlette ships without types
    """Streams frames as SSE. `on_end` runs exactly once when the response ends, also on errors.

    `format.keep_alive` is sent when nothing was sent for `keep_alive_s`; 0 sends none.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        keep_alive_s: float,
        on_end: Callable[[], Awaitable[None]],
        headers: dict[str, str],
        format: SseFormat = OPENAI_FORMAT,
    ) -> None:
        super().__init__(
            frames,
            headers={"cache-control": "no-cache, no-transform", **headers},
            media_type=format.media_type,
            ping=keep_alive_s or _SEND_TIMEOUT_S,
            sep="\n",
            shutdown_grace_period=_SHUTDOWN_GRACE_S,
        )
        self._on_end = on_end
        self._keep_alive_s = keep_alive_s
        self._format = format
        self._last = b""  # last chunk sent
        self._last_send_s = time.monotonic()  # start of the last send
        self._is_sending = False

    def closing_frame(self, error: ChatcacheError) -> bytes:
        """Build the final frame of a stream that is cut off: the error, or b"" if its end was sent."""
        return b"" if self._last.startswith(self._format.final) else self._format.encode_error(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_SCOPE_KEY] = self
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._on_end()

    async def _stream_response(self, send: Send) -> None:
        """Send the chunks. The base class would create a timeout for each one."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self.body_iterator:
                self._last_send_s, self._is_sending = time.monotonic(), True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._is_sending, self._last = False, chunk
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            with anyio.CancelScope(shield=True):
                await self.body_iterator.aclose()

    async def _ping(self, send: Send) -> None:
        """Send comments while the stream is idle.

        The base class would also send them in a busy stream.

        Raises: SendTimeoutError when one send takes too long.
        """
        while self.active:
            limit_s = _SEND_TIMEOUT_S if self._is_sending or not self._keep_alive_s else self._keep_alive_s
            left_s = self._last_send_s + limit_s - time.monotonic()
            if left_s > 0:
                await anyio.sleep(min(left_s, self._ping_interval))
            elif self._is_sending:
                raise SendTimeoutError
            else:
                self._last_send_s = time.monotonic()
                if self._keep_alive_s:
                    await send({"type": "http.response.body", "body": self._format.keep_alive, "more_body": True})


def stream_of(scope: Scope) -> EventStream | None:
    """Return the event stream that responds to a request; None before it starts, or without one."""
    stream: EventStream | None = scope.get(_SCOPE_KEY)
    return stream


async def sse_frames(events: AsyncIterator[object], format: SseFormat = OPENAI_FORMAT) -> AsyncGenerator[bytes, None]:
    """Encode events up to the end frame. An exception ends the stream with one error event instead."""
    try:
        async for event in events:
            yield format.encode_event(event)
        if format.end:
            yield format.end
    except ChatcacheError as error:
        yield format.encode_error(error)
    except Exception:
        log.exception("a stream failed")
        yield format.encode_error(INTERNAL_ERROR)
