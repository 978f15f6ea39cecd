"""Frames sent on one WebSocket, one at a time, to a client that may read slowly."""

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
from chatcache.gateway.responses.log_frames import LogFrame

Frame = Mapping[str, Any]

TRY_LATER = 1013
MAX_STREAM_ID_CHARS = 128
# Exceptions that a send raises after the client has disconnected.
CLIENT_GONE = (WebSocketDisconnect, ConnectionError)


class FrameSender:
    """Sends whole frames of concurrent tasks in turn.

    A send waits for a client that does not read; `gateway.uvicorn_limits` disconnects it after a while.
    """

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._lock = asyncio.Lock()

    async def send(self, frame: Frame, stream_id: str | None = None) -> None:
        """Send one frame. Raises: one of `CLIENT_GONE`."""
        await self._send_all((with_stream_id(encode(frame), stream_id_suffix(stream_id)),))

    async def forward(self, frames: Sequence[LogFrame], suffix: bytes) -> None:
        """Send frames of a response log with their stream id. Raises: one of `CLIENT_GONE`."""
        await self._send_all([with_stream_id(frame.data, suffix) for frame in frames])

    async def send_error(self, error: ChatcacheError, stream_id: object = None) -> None:
        """Send an error frame; the connection stays open."""
        gateway_of(self._socket).metrics.record_refusal(error)
        valid_id = stream_id if isinstance(stream_id, str) and len(stream_id) <= MAX_STREAM_ID_CHARS else None
        wait_s = retry_after_s(error)
        retry = {"retry_after": wait_s} if wait_s is not None else {}
        await self.send({"type": "error", "status": error.status, "error": error_body(error), **retry}, valid_id)

    async def close(self, code: int, reason: str) -> None:
        """Close the connection, unless the client has closed it."""
        with contextlib.suppress(RuntimeError):
            await self._socket.close(code, reason)

    async def close_slow_client(self) -> None:
        """Close the connection of a client that acknowledges too slowly."""
        await self.close(TRY_LATER, "reading too slowly")

    async def _send_all(self, frames: Sequence[bytes]) -> None:
        async with self._lock:
            try:
                for data in frames:
                    await self._socket.send_text(data.decode("ascii"))
            except RuntimeError:  # Starlette: an earlier send has already found the client disconnected
                raise ConnectionError("the client has disconnected") from None


def stream_id_suffix(stream_id: str | None) -> bytes:
    """Return the bytes that replace the closing brace of a JSON frame to add the stream id.

    Empty for None: the frame stays unchanged.
    """
    return b"" if stream_id is None else b',"stream_id":%s}' % encode(stream_id)


def with_stream_id(data: bytes, suffix: bytes) -> bytes:
    """Add the stream id to an encoded frame. `suffix`: from `stream_id_suffix`."""
    return data[:-1] + suffix if suffix else data
