"""Sources of a response's frames: an SSE stream or a WebSocket. Both can be left by FIN or RST."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.typing import Subprotocol

from tests.chaos.http_client import ANSWER_TIMEOUT_S, Answer, Exchange, Frame
from tests.chaos.http_client import Lost as LostOverHttp

Lost = (*LostOverHttp, ConnectionClosed, InvalidHandshake)


class RefusedError(Exception):
    """The server refused the request for good."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"{answer.status} {answer.code}")
        self.answer = answer


class Source(Protocol):
    """Numbered frames of one response. Iterating raises `RefusedError`, or an error of `Lost` on a disconnect."""

    def frames(self) -> AsyncIterator[Frame]: ...

    def finish(self) -> None:
        """Close with a FIN."""
        ...

    def reset(self) -> None:
        """Close with a RST."""
        ...


class SseSource:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @classmethod
    async def create(cls, port: int, body: dict[str, Any], key: str) -> SseSource:
        """Create a response. Raises: RefusedError, or an error of `Lost`."""
        return await cls._begin(port, "POST", "/v1/responses", {**body, "stream": True}, key)

    @classmethod
    async def resume(cls, port: int, response_id: str, after: int) -> SseSource:
        """Resume a stream. Raises: RefusedError, or an error of `Lost`."""
        since = f"&starting_after={after}" if after >= 0 else ""
        return await cls._begin(port, "GET", f"/v1/responses/{response_id}?stream=true{since}")

    @classmethod
    async def _begin(cls, port: int, method: str, path: str, body: object = None, key: str = "") -> SseSource:
        exchange = await Exchange.begin(port, method, path, body, key)
        if exchange.status != 200:
            raise RefusedError(await exchange.whole())
        return cls(exchange)

    async def frames(self) -> AsyncIterator[Frame]:
        async for frame in self._exchange.events():
            if frame["type"] == "error":
                raise ConnectionError(frame["message"])
            yield frame

    def finish(self) -> None:
        self._exchange.finish()

    def reset(self) -> None:
        self._exchange.reset()


class WsSource:
    """One response on its own connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def create(cls, port: int, body: dict[str, Any], key: str) -> WsSource:
        return await cls._begin(port, {"type": "response.create", "idempotency_key": key, **body})

    @classmethod
    async def resume(cls, port: int, response_id: str, after: int) -> WsSource:
        frame: Frame = {"type": "response.resume", "response_id": response_id}
        return await cls._begin(port, frame | ({"starting_after": after} if after >= 0 else {}))

    @classmethod
    async def _begin(cls, port: int, frame: Frame) -> WsSource:
        connection = await connect(
            f"ws://127.0.0.1:{port}/v1/responses",
            subprotocols=[Subprotocol("chatcache.v1")],
            open_timeout=ANSWER_TIMEOUT_S,
            close_timeout=1,
            ping_interval=None,
            compression=None,
            proxy=None,
        )
        await connection.send(json.dumps(frame))
        return cls(connection)

    async def frames(self) -> AsyncIterator[Frame]:
        """Yield frames up to the terminal one; the connection stays open after it."""
        while True:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                frame: Frame = json.loads(await self._connection.recv())
            if frame["type"] == "error":
                self.finish()
                raise RefusedError(Answer(frame["status"], frame))
            yield frame
            if frame["type"] in ("response.completed", "response.incomplete", "response.failed"):
                return

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.transport.close()

    def reset(self) -> None:
        sock = self._connection.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.transport.abort()


SOURCES: dict[str, type[SseSource] | type[WsSource]] = {"sse": SseSource, "ws": WsSource}
