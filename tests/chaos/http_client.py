"""HTTP and server-sent events over plain sockets, so that a client can close them by FIN or RST."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from tests.chaos.proxy import reset

Frame = dict[str, Any]
ANSWER_TIMEOUT_S = 60.0  # longer than any fault: a request without an answer by then hangs
Lost = (OSError, EOFError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ValueError)


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and JSON body (or None) of an HTTP response."""

    status: int
    body: Any

    @property
    def code(self) -> str:
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("code")) if isinstance(error, dict) else ""


class Exchange:
    """One request on its own connection, and its response: complete, or event by event."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self._is_chunked = False
        self._length = 0

    @classmethod
    async def begin(cls, port: int, method: str, path: str, body: object = None, key: str = "") -> Exchange:
        """Send a request and read the head of the response. Raises: an error of `Lost`."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
            exchange = cls(reader, writer)
            try:
                exchange._send(port, method, path, body, key)
                await exchange._read_head()
            except BaseException:
                writer.transport.abort()
                raise
            return exchange

    def _send(self, port: int, method: str, path: str, body: object, key: str) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"host: 127.0.0.1:{port}", "connection: close"]
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
        lines += [f"idempotency-key: {key}"] if key else []
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)

    async def _read_head(self) -> None:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        self.status = int(head.split(" ", 2)[1])
        self._is_chunked = "transfer-encoding: chunked" in head
        if "content-length: " in head:
            self._length = int(head.partition("content-length: ")[2].partition("\r\n")[0])

    async def whole(self) -> Answer:
        """Return the rest of the response as JSON. Raises: an error of `Lost`."""
        data = await self.text()
        return Answer(self.status, json.loads(data) if data[:1] in ("{", "[") else None)

    async def text(self) -> str:
        """Return the rest of the response as text. Raises: an error of `Lost`."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            if self._is_chunked:
                data = b"".join([piece async for piece in self._chunks()])
            else:
                data = await self._reader.readexactly(self._length)
        self.finish()
        return data.decode()

    async def events(self) -> AsyncIterator[Frame]:
        """Yield frames until the server ends the stream. Raises: an error of `Lost` on a disconnect."""
        held = b""
        pieces = self._chunks()
        while True:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                piece = await anext(pieces, None)
            if piece is None:
                return
            *whole, held = (held + piece).split(b"\n")
            for line in whole:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int((await self._reader.readuntil(b"\r\n")).strip(), 16)
            data = (await self._reader.readexactly(size + 2))[:-2]
            if size == 0:
                return
            yield data

    def finish(self) -> None:
        """Close with a FIN."""
        with contextlib.suppress(OSError):
            self._writer.close()

    def reset(self) -> None:
        """Close with a RST."""
        reset(self._writer)


async def ask(port: int, method: str, path: str, body: object = None, key: str = "") -> Answer:
    """Send one request and return the complete response. Raises: an error of `Lost`."""
    exchange = await Exchange.begin(port, method, path, body, key)
    try:
        return await exchange.whole()
    except BaseException:
        exchange.reset()
        raise
