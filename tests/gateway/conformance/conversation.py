"""One conversation with a WebSocket server, octet by octet, and its result by RFC 6455.

A script sends octets and waits until a number of events were received. The received events and the close code are
compared with the expected ones (OK) and with the alternatives that the RFC allows (non-strict).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import select
import socket
import struct
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from enum import Enum

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
NO_STATUS = 1005  # a Close without a code
NAMES = {TEXT: "text", BINARY: "binary", PONG: "pong"}
ANSWER_TIMEOUT_S = 60.0
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_NONCE = base64.b64encode(bytes(range(16)))

Event = tuple[str, bytes]  # what kind of message or control frame, and its payload
LOOK = -1  # script step: is the connection open after the server has read all sent octets?
OPEN: Event = ("still open", b"")


class Result(Enum):
    OK = "OK"
    NON_STRICT = "non-strict"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation and the answers that are allowed.

    `script`: octets to send, number of received events after which it continues, or `LOOK`. `events`: events from a
    strict server. `lax`: other allowed events. `codes`: codes of its Close; None is an end of the connection without
    a Close. `lax_codes`: other allowed codes.
    """

    name: str
    script: tuple[bytes | int, ...]
    events: tuple[Event, ...]
    codes: frozenset[int | None]
    lax: tuple[tuple[Event, ...], ...] = ()
    lax_codes: frozenset[int | None] = frozenset()
    chop: int = 0  # send so many octets at a time

    def judge(self, received: tuple[Event, ...], code: int | None) -> Result:
        if code in self.codes and received == self.events:
            return Result.OK
        is_allowed = received in (self.events, *self.lax) and code in self.codes | self.lax_codes
        return Result.NON_STRICT if is_allowed else Result.FAILED


@dataclass(frozen=True, slots=True)
class Outcome:
    case: Case
    result: Result
    detail: str


class BrokenFrameError(Exception):
    """A frame that RFC 6455 does not allow a server to send."""


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0) -> bytes:
    """Encode a masked client frame."""
    mask, size = b"\x37\xfa\x21\x3d", len(payload)
    first = fin << 7 | rsv << 4 | opcode
    if size < 126:
        head = struct.pack("!BB", first, 0x80 | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", first, 0x80 | 127, size)
    return head + mask + masked(payload, mask)


def masked(payload: bytes, mask: bytes) -> bytes:
    """Mask or unmask a payload."""
    size = len(payload)
    key = int.from_bytes((mask * (size // 4 + 1))[:size])
    return (int.from_bytes(payload) ^ key).to_bytes(size)


def close(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, struct.pack("!H", code) + reason)


class _Line:
    """A connection. Data that the server has sent is read even after sending to it fails."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._data = bytearray()

    async def send(self, data: bytes, chop: int) -> None:
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(data), chop or len(data)):
                await self._loop.sock_sendall(self._connection, data[at : at + chop] if chop else data)
                await asyncio.sleep(0)

    async def exactly(self, size: int) -> bytes:
        """Raises: EOFError."""
        while len(self._data) < size:
            await self._more()
        taken = bytes(self._data[:size])
        del self._data[:size]
        return taken

    async def until(self, end: bytes) -> bytes:
        """Raises: EOFError."""
        while end not in self._data:
            await self._more()
        return await self.exactly(self._data.index(end) + len(end))

    def has_more(self) -> bool:
        """Return whether there is data or an end of file to read."""
        return bool(self._data or select.select([self._connection], [], [], 0)[0])

    async def _more(self) -> None:
        try:
            data = await self._loop.sock_recv(self._connection, 1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self._data += data


@contextlib.asynccontextmanager
async def _connected(port: int, path: str, protocol: str) -> AsyncIterator[_Line]:
    """Connect and do the handshake. Raises: BrokenFrameError for an invalid handshake."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        line = _Line(connection)
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        head += f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: {protocol}\r\n"
        await line.send(head.encode() + b"Sec-WebSocket-Key: " + _NONCE + b"\r\n\r\n", 0)
        answer = (await line.until(b"\r\n\r\n")).lower()
        accepted = base64.b64encode(hashlib.sha1(_NONCE + _GUID, usedforsecurity=False).digest())
        if not answer.startswith(b"http/1.1 101 ") or b"\r\nsec-websocket-accept: " + accepted.lower() not in answer:
            raise BrokenFrameError(f"a handshake was answered with {answer!r}")
        yield line


class _Talk:
    def __init__(self, line: _Line) -> None:
        self._line = line
        self._message: tuple[int, bytes] | None = None
        self.received: list[Event] = []
        self.code: int | None = None
        self.is_over = False

    async def receive(self, num_events: float) -> None:
        """Read until `num_events` events were received or the connection ended.

        Raises: BrokenFrameError.
        """
        try:
            while len(self.received) < num_events:
                await self._receive_frame()
        except EOFError:
            self.is_over = True

    async def _receive_frame(self) -> None:
        """Raises: BrokenFrameError, EOFError."""
        first, size = await self._line.exactly(2)
        opcode, is_last = first & 15, bool(first >> 7)
        if first & 0x70 or size & 0x80:
            raise BrokenFrameError("reserved bits or a mask")
        if size > 125:
            num_octets, least = (2, 126) if size == 126 else (8, 1 << 16)
            size = int.from_bytes(await self._line.exactly(num_octets))
            if opcode >= CLOSE or size < least:
                raise BrokenFrameError("too long a control frame, or a length in too many octets")
        payload = await self._line.exactly(size)
        if self.code is not None:
            raise BrokenFrameError("a frame after the Close")
        if opcode >= CLOSE:
            self._receive_control(opcode, payload, is_last)
            return
        if (opcode == CONT) != (self._message is not None) or opcode > BINARY:
            raise BrokenFrameError(f"opcode {opcode} out of turn")
        kind, begun = self._message or (opcode, b"")
        self._message = (kind, begun + payload)
        if is_last:
            self._message = None
            self.received.append((NAMES[kind], begun + payload))

    def _receive_control(self, opcode: int, payload: bytes, is_last: bool) -> None:
        """Raises: BrokenFrameError."""
        if opcode > PONG or not is_last or (opcode == CLOSE and len(payload) == 1):
            raise BrokenFrameError(f"no such control frame: opcode {opcode}")
        if opcode == PONG:
            self.received.append((NAMES[PONG], payload))
        elif opcode == CLOSE:
            self.code = int.from_bytes(payload[:2]) if payload else NO_STATUS


async def hold(
    case: Case, port: int, path: str = "/", protocol: str = "any", timeout_s: float = ANSWER_TIMEOUT_S
) -> Outcome:
    """Run one conversation on its own connection.

    It fails if the server does not end the connection.
    """
    talk: _Talk | None = None
    try:
        async with asyncio.timeout(timeout_s), _connected(port, path, protocol) as line:
            talk = _Talk(line)
            for step in case.script:
                if talk.is_over:
                    break
                if isinstance(step, bytes):
                    await line.send(step, case.chop)
                elif step == LOOK:
                    await _look(talk, line, port, path, protocol)
                else:
                    await talk.receive(step)
            await talk.receive(float("inf"))
    except (BrokenFrameError, EOFError, OSError) as error:  # a timeout is an OSError too
        return Outcome(case, Result.FAILED, f"{error!r} after {_short(talk.received if talk else ())}")
    result = case.judge(tuple(talk.received), talk.code)
    return Outcome(case, result, f"{_short(talk.received)}, close {talk.code}; expected {_short(case.events)}")


async def _look(talk: _Talk, line: _Line, port: int, path: str, protocol: str) -> None:
    """Record `OPEN` if the connection is still open once the server has read what was sent.

    A server that has answered a Ping on another connection since has read this one, unless it works on several at once.
    """
    async with _connected(port, path, protocol) as other:
        await other.send(frame(PING), 0)
        await _Talk(other).receive(1)
    if not line.has_more():
        talk.received.append(OPEN)


def _short(events: Iterable[Event]) -> str:
    return str([(kind, data if len(data) < 40 else f"{len(data)} bytes") for kind, data in events])


async def hold_all(cases: Iterable[Case], port: int, path: str = "/", protocol: str = "any") -> list[Outcome]:
    """Run conversations concurrently, at most 16 at a time."""
    room = asyncio.Semaphore(16)

    async def one(case: Case) -> Outcome:
        async with room:
            return await hold(case, port, path, protocol)

    return list(await asyncio.gather(*(one(case) for case in cases)))
