"""SSE as OpenAI's clients read it: LF, one `data:` line per event, no ids, comments only when idle, `[DONE]`, end.

Framing and pings are ours because each deviation breaks a real client; the response class is sse-starlette's, which
watches for disconnects and shutdown and bounds every send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

from chatcache.errors import ChatcacheError
from chatcache.gateway.errors import INTERNAL, error_body
from chatcache.gateway.jsonio import encode

log = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_SEND_TIMEOUT_S = 60.0
_SHUTDOWN_GRACE_S = 25.0


def frame(event: object) -> bytes:
    """One event. ASCII JSON holds no line end, so it is one line."""
    return b"data: " + encode(event) + b"\n\n"


class EventStream(EventSourceResponse):  # type: ignore[misc]  # sse-starlette ships without types
    """Streams `events` as SSE; `on_end` runs exactly once when the response is over, however it ends."""

    def __init__(
        self,
        events: AsyncIterator[object],
        *,
        keep_alive_s: float,
        on_end: Callable[[], Awaitable[None]],
        headers: dict[str, str],
    ) -> None:
        super().__init__(
            with_keep_alive(framed(events), keep_alive_s),
            headers={"cache-control": "no-cache, no-transform", **headers},
            ping=0,
            sep="\n",
            send_timeout=_SEND_TIMEOUT_S,
            shutdown_grace_period=_SHUTDOWN_GRACE_S,
        )
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._on_end()


async def framed(events: AsyncIterator[object]) -> AsyncGenerator[bytes, None]:
    """Frame events up to `[DONE]`; a failure becomes one error event instead, never its own text."""
    try:
        async for event in events:
            yield frame(event)
        yield DONE
    except ChatcacheError as error:
        yield frame({"error": error_body(error)})
    except Exception:
        log.exception("a stream failed")
        yield frame({"error": error_body(INTERNAL)})


async def with_keep_alive(frames: AsyncGenerator[bytes, None], interval_s: float) -> AsyncGenerator[bytes, None]:
    """Add a comment after every `interval_s` without data; 0 adds none."""
    if interval_s <= 0:
        async for chunk in frames:
            yield chunk
        return
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            pending = asyncio.ensure_future(anext(frames))
            while not pending.done():
                done, _ = await asyncio.wait((pending,), timeout=interval_s)
                if not done:
                    yield KEEP_ALIVE
            try:
                chunk = pending.result()
            except StopAsyncIteration:
                return
            yield chunk
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await frames.aclose()
