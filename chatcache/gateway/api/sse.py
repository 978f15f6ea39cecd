"""SSE as OpenAI's clients read it: LF, one `data:` line per event, no ids, comments only when idle, `[DONE]`, end.

Framing and pings are ours because each deviation breaks a real client; the response class is sse-starlette's, which
watches for disconnects and shutdown. A stream of tokens is thousands of small sends, so nothing is made anew for each:
one watcher per stream tells both that it is idle and that its reader takes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import anyio
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from chatcache.errors import ChatcacheError
from chatcache.gateway.errors import INTERNAL, error_body
from chatcache.gateway.json_codec import encode
from chatcache.gateway.schemas.errors import Error

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_ERROR_HEAD = b'data: {"error":'
_IN_SCOPE = "chatcache.stream"
_SEND_TIMEOUT_S = 60.0
_SHUTDOWN_GRACE_S = 25.0


def sse_frame(event: object) -> bytes:
    """One event. ASCII JSON holds no line end, so it is one line."""
    return b"data: " + encode(event) + b"\n\n"


class EventStream(EventSourceResponse):  # type: ignore[misc]  # sse-starlette ships without types
    """Streams frames as SSE; `on_end` runs exactly once when the response is over, however it ends.

    `keep_alive`, a comment, goes out whenever nothing did for `keep_alive_s`; 0 sends none.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        keep_alive_s: float,
        on_end: Callable[[], Awaitable[None]],
        headers: dict[str, str],
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        super().__init__(
            frames,
            headers={"cache-control": "no-cache, no-transform", **headers},
            ping=keep_alive_s or _SEND_TIMEOUT_S,
            sep="\n",
            shutdown_grace_period=_SHUTDOWN_GRACE_S,
        )
        self._on_end = on_end
        self._keep_alive_s = keep_alive_s
        self._keep_alive = keep_alive
        self._last = b""  # what was sent last
        self._moved_s = time.monotonic()  # when a send last began
        self._is_sending = False

    def closing_frame(self, error: ChatcacheError) -> bytes:
        """What a stream that is cut off still has to say: the error, or nothing where its own end was sent."""
        has_ended = self._last == DONE or self._last.startswith(_ERROR_HEAD)
        return b"" if has_ended else sse_frame(Error(error_body(error)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_IN_SCOPE] = self
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._on_end()

    async def _stream_response(self, send: Send) -> None:
        """Replaces the base class's, which makes a timeout for every chunk."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self.body_iterator:
                self._moved_s, self._is_sending = time.monotonic(), True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._is_sending, self._last = False, chunk
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            with anyio.CancelScope(shield=True):
                await self.body_iterator.aclose()

    async def _ping(self, send: Send) -> None:
        """Comment when idle, end when a send takes too long. Replaces the base class's, which pings a busy stream.

        Raises: SendTimeoutError.
        """
        while self.active:
            limit_s = _SEND_TIMEOUT_S if self._is_sending or not self._keep_alive_s else self._keep_alive_s
            left_s = self._moved_s + limit_s - time.monotonic()
            if left_s > 0:
                await anyio.sleep(min(left_s, self._ping_interval))
            elif self._is_sending:
                raise SendTimeoutError
            else:
                self._moved_s = time.monotonic()
                if self._keep_alive_s:
                    await send({"type": "http.response.body", "body": self._keep_alive, "more_body": True})


def stream_of(scope: Scope) -> EventStream | None:
    """The stream that a request was answered with, once it was."""
    stream: EventStream | None = scope.get(_IN_SCOPE)
    return stream


async def sse_frames(events: AsyncIterator[object]) -> AsyncGenerator[bytes, None]:
    """Frame events up to `[DONE]`; a failure becomes one error event instead, never its own text."""
    try:
        async for event in events:
            yield sse_frame(event)
        yield DONE
    except ChatcacheError as error:
        yield sse_frame(Error(error_body(error)))
    except Exception:
        log.exception("a stream failed")
        yield sse_frame(Error(error_body(INTERNAL)))
