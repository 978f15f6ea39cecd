"""What crosses the bus, and how it is framed: 4 bytes of big-endian length, then one msgpack message.

Commands go to the engine, notices come back. All are tagged msgspec structs, decoded against the union of their kind,
so a frame that is not one of them is refused before anything acts on it.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

from chatcache import errors
from chatcache.config import EngineConfig
from chatcache.errors import ChatcacheError, EngineFault
from chatcache.types import EngineEvent, EngineHealth, GenerateRequest, ModelFacts

MAX_FRAME_BYTES = 16 * 1024 * 1024
_HEADER = struct.Struct(">I")


class Boot(msgspec.Struct, frozen=True, tag="boot"):
    """First command to a child: build the engine `factory` ("module:function") makes of `config`."""

    factory: str
    config: EngineConfig
    log_level: str = "info"


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    call: int
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    call: int
    what: Literal["stats", "reset_prefix_cache"]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop; what still runs is dropped."""


class Fault(msgspec.Struct, frozen=True):
    """A `ChatcacheError` as data. `kind` is its class in `chatcache.errors`."""

    kind: str
    message: str
    code: str
    param: str | None = None


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    fraction: float
    detail: str


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    facts: ModelFacts
    health: EngineHealth


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    fault: Fault


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Reply to `call`: `fault`, or `value` (None for an accepted submit)."""

    call: int
    fault: Fault | None = None
    value: Any = None


class Events(msgspec.Struct, frozen=True, tag="events"):
    """One step's events; `health` is there when the last one told is older than a moment."""

    events: tuple[EngineEvent, ...] = ()
    health: EngineHealth | None = None


Command = Boot | Submit | Abort | Ask | Stop
Notice = Loading | Loaded | LoadFailed | Answer | Events

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_notices: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(message: Command | Notice) -> bytes:
    """Frame one message.

    Raises: ValueError for a message over `MAX_FRAME_BYTES`.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(body)} bytes exceeds the frame limit {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


def decode_command(body: bytes) -> Command:
    """Raises: msgspec.DecodeError or ValidationError for anything that is not a command."""
    return _commands.decode(body)


def decode_notice(body: bytes) -> Notice:
    """Raises: msgspec.DecodeError or ValidationError for anything that is not a notice."""
    return _notices.decode(body)


class FrameBuffer:
    """Cuts a byte stream into frame bodies, however it arrives."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the bodies that are now complete.

        Raises: ValueError as soon as a header announces more than `MAX_FRAME_BYTES`.
        """
        self._data += data
        bodies: list[bytes] = []
        position = 0
        while len(self._data) - position >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._data, position)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes exceeds the limit {MAX_FRAME_BYTES}")
            end = position + _HEADER.size + length
            if end > len(self._data):
                break
            bodies.append(bytes(self._data[position + _HEADER.size : end]))
            position = end
        del self._data[:position]
        return bodies


def to_fault(error: BaseException) -> Fault:
    """Describe an error as data; what is not in the catalogue becomes an `EngineFault` naming its type."""
    if isinstance(error, ChatcacheError):
        return Fault(type(error).__name__, error.message, error.code, error.param)
    return Fault(EngineFault.__name__, f"{type(error).__name__}: {error}", EngineFault.code)


def from_fault(fault: Fault) -> ChatcacheError:
    """Rebuild the catalogued error a fault describes."""
    kind = getattr(errors, fault.kind, EngineFault)
    if not (isinstance(kind, type) and issubclass(kind, ChatcacheError)):
        kind = EngineFault
    return kind(fault.message, param=fault.param, code=fault.code)
