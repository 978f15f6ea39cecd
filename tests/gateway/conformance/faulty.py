"""An echo server that follows every rule of RFC 6455 except the one selected."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import struct
from collections.abc import AsyncIterator
from typing import Literal

from tests.gateway.conformance.conversation import BINARY, CLOSE, CONT, PING, PONG, TEXT, masked

Rule = Literal[
    "reserved bits",
    "opcodes",
    "long control",
    "fragmented control",
    "nothing to continue",
    "interleaved",
    "text",
    "close codes",
    "short close",
    "close reason",
    "whole pongs",
    "whole echoes",
    "large messages",
    "closes answered",
    "silence after close",
    "an end",
]
FORBIDDEN = {1004, 1005, 1006, *range(1015, 3000)}


class InjectedFaultError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextlib.asynccontextmanager
async def serving(broken: Rule | None) -> AsyncIterator[int]:
    """Run a server that breaks `broken` and return its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            await _Peer(reader, writer, broken).serve()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    talks: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(
        lambda reader, writer: talks.append(asyncio.create_task(serve(reader, writer))), "127.0.0.1", 0
    )
    async with server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*talks)


class _Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, broken: Rule | None) -> None:
        self._reader, self._writer, self._broken = reader, writer, broken
        self._kind, self._pieces = CONT, b""
        self._has_closed = False

    async def serve(self) -> None:
        """Raises: EOFError, ConnectionError."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        nonce = head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0]
        digest = hashlib.sha1(nonce + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11", usedforsecurity=False).digest()
        self._writer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n")
        self._writer.write(b"sec-websocket-accept: " + base64.b64encode(digest) + b"\r\n\r\n")
        try:
            while not self._has_closed or self._broken == "silence after close":
                await self._take()
        except InjectedFaultError as fault:
            self._send(CLOSE, struct.pack("!H", fault.code))
        if self._broken == "an end":
            await self._reader.read()
        await self._writer.drain()

    def _check(self, rule: Rule, is_kept: bool, code: int = 1002) -> None:
        """Raises: InjectedFaultError, unless this rule is the broken one."""
        if not is_kept and rule != self._broken:
            raise InjectedFaultError(code)

    async def _take(self) -> None:
        """Raises: InjectedFaultError, EOFError, ConnectionError."""
        first, size = await self._reader.readexactly(2)
        opcode, is_last, size = first & 15, bool(first >> 7), size & 0x7F
        self._check("reserved bits", not first & 0x70)
        self._check("opcodes", opcode in (CONT, TEXT, BINARY, CLOSE, PING, PONG))
        self._check("long control", opcode < CLOSE or size < 126)
        self._check("fragmented control", opcode < CLOSE or is_last)
        if size > 125:
            size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8))
        mask = await self._reader.readexactly(4)
        payload = masked(await self._reader.readexactly(size), mask)
        if opcode == CLOSE:
            self._take_close(payload)
        elif opcode == PING:
            self._send(PONG, payload[:-1] if self._broken == "whole pongs" else payload)
        elif opcode in (CONT, TEXT, BINARY):
            self._take_data(opcode, payload, is_last)
        await self._writer.drain()

    def _take_close(self, payload: bytes) -> None:
        """Raises: InjectedFaultError."""
        self._check("short close", len(payload) != 1)
        if len(payload) > 1:
            code = int.from_bytes(payload[:2])
            self._check("close codes", 1000 <= code < 5000 and code not in FORBIDDEN)
            self._check("close reason", _is_text(payload[2:]), 1007)
        if self._broken != "closes answered" and not self._has_closed:
            self._send(CLOSE, payload if len(payload) != 1 else b"")
        self._has_closed = True

    def _take_data(self, opcode: int, payload: bytes, is_last: bool) -> None:
        """Raises: InjectedFaultError."""
        if opcode == CONT:
            self._check("nothing to continue", self._kind != CONT)
        else:
            self._check("interleaved", self._kind == CONT)
            self._kind = self._kind or opcode
        self._pieces += payload
        if not is_last:
            return
        kind, whole, self._kind, self._pieces = self._kind or TEXT, self._pieces, CONT, b""
        self._check("text", kind != TEXT or _is_text(whole), 1007)
        if self._broken == "large messages" and len(whole) > 65535:
            raise InjectedFaultError(1009)
        self._send(kind, whole[:-1] if self._broken == "whole echoes" else whole)

    def _send(self, opcode: int, payload: bytes) -> None:
        size, first = len(payload), 0x80 | opcode
        if size < 126:
            head = struct.pack("!BB", first, size)
        else:
            head = struct.pack("!BBH", first, 126, size) if size < 1 << 16 else struct.pack("!BBQ", first, 127, size)
        self._writer.write(head + payload)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
