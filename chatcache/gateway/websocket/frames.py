"""Frames out of one WebSocket, one at a time, to a client that may be slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from chatcache.errors import ChatcacheError
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import error_body, retry_after_s
from chatcache.gateway.json_codec import encode
from chatcache.gateway.responses.event_log import LogFrame

Frame = Mapping[str, Any]

TRY_LATER = 1013
MAX_STREAM_ID_CHARS = 128
# What a send raises when the client is gone.
CLIENT_GONE = (WebSocketDisconnect, ConnectionError)


class FrameSender:
    """Sends whole frames in turn, whoever sends.

    A send waits for a client that takes nothing; the server's protocol (`cli.http`) cuts such a one off.
    """

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._turn = asyncio.Lock()

    async def send(self, frame: Frame, lane: str | None = None) -> None:
        """Raises: one of `CLIENT_GONE`."""
        await self._send_all((with_stream_id(encode(frame), stream_id_suffix(lane)),))

    async def forward(self, frames: Sequence[LogFrame], suffix: bytes) -> None:
        """Frames of a log, each with its lane. Raises: one of `CLIENT_GONE`."""
        await self._send_all([with_stream_id(frame.data, suffix) for frame in frames])

    async def send_error(self, error: ChatcacheError, lane: object = None) -> None:
        """An error frame; the connection stays usable."""
        gateway_of(self._socket).metrics.record_refusal(error)
        named = lane if isinstance(lane, str) and len(lane) <= MAX_STREAM_ID_CHARS else None
        wait_s = retry_after_s(error)
        wait = {"retry_after": wait_s} if wait_s is not None else {}
        await self.send({"type": "error", "status": error.status, "error": error_body(error), **wait}, named)

    async def close(self, code: int, reason: str) -> None:
        """Close, unless the client was faster."""
        with contextlib.suppress(RuntimeError):
            await self._socket.close(code, reason)

    async def close_slow_client(self) -> None:
        """Close on a client that does not keep up."""
        await self.close(TRY_LATER, "reading too slowly")

    async def _send_all(self, frames: Sequence[bytes]) -> None:
        async with self._turn:
            try:
                for data in frames:
                    await self._socket.send_text(data.decode("ascii"))
            except RuntimeError:  # Starlette: somebody else's send has found the client gone
                raise ConnectionError("the client has left") from None


def stream_id_suffix(lane: str | None) -> bytes:
    """What ends a frame of that lane, in place of its closing brace."""
    return b"" if lane is None else b',"stream_id":%s}' % encode(lane)


def with_stream_id(data: bytes, suffix: bytes) -> bytes:
    """An encoded frame with its lane spliced in."""
    return data[:-1] + suffix if suffix else data
