"""How messages are framed: 4 bytes of big-endian length, then one msgpack message.

All are tagged msgspec structs, decoded against the union of their kind, so a frame that is not one of them is refused
before anything acts on it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from chatcache.bus.faults import to_fault
from chatcache.bus.messages import Answer, Command, Events, Notice, Reply, Scored
from chatcache.errors import EngineFault
from chatcache.types.events import EngineEvent, Started, TokenLogprob

MAX_FRAME_BYTES = 16 * 1024 * 1024
PART_LOGPROBS = 4096
_HEADER = struct.Struct(">I")


class FrameTooLarge(ValueError):
    """A message does not fit a frame."""


_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_scores: msgspec.msgpack.Decoder[list[TokenLogprob | None]] = msgspec.msgpack.Decoder(list[TokenLogprob | None])
_notices: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(message: Command | Notice) -> bytes:
    """Frame one message.

    Raises: FrameTooLarge for a message over `MAX_FRAME_BYTES`.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        size = len(body)
        raise FrameTooLarge(f"a {type(message).__name__} of {size} bytes exceeds the frame limit {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


def encode_notice(notice: Notice) -> Iterator[bytes]:
    """Frame one notice; events that do not fit one frame go in several, in order, the health with the last.

    An answer that does not fit becomes a fault. Raises: FrameTooLarge for a single event that does not.
    """
    if isinstance(notice, Events):
        for event in notice.events:
            if isinstance(event, Started) and event.prompt_logprobs:
                yield from _encode_scores(event)
        notice = Events(tuple(map(_without_scores, notice.events)), notice.health)
    try:
        yield encode(notice)
    except FrameTooLarge as error:
        if isinstance(notice, Reply):
            yield encode(Answer(notice.call, to_fault(EngineFault(f"the answer is too large: {error}"))))
        elif isinstance(notice, Events) and len(notice.events) > 1:
            middle = len(notice.events) // 2
            yield from encode_notice(Events(notice.events[:middle]))
            yield from encode_notice(Events(notice.events[middle:], notice.health))
        else:
            raise


def decode_command(body: bytes) -> Command:
    """Raises: msgspec.DecodeError or ValidationError for anything that is not a command."""
    return _commands.decode(body)


def _without_scores(event: EngineEvent) -> EngineEvent:
    return replace(event, prompt_logprobs=()) if isinstance(event, Started) else event


def _encode_scores(event: Started) -> Iterator[bytes]:
    """Frame a prompt's log-probabilities in parts of about `PART_LOGPROBS`."""
    entries = event.prompt_logprobs
    last = entries[-1]
    step = max(1, PART_LOGPROBS // (1 + (len(last.top) if last is not None else 0)))
    for start in range(0, len(entries), step):
        yield encode(Scored(event.request_id, _encoder.encode(entries[start : start + step])))


def decode_scores(parts: Iterable[bytes]) -> tuple[TokenLogprob | None, ...]:
    """Put the parts of a prompt's log-probabilities together. Takes a while: for a thread beside the event loop."""
    return tuple(entry for part in parts for entry in _scores.decode(part))


class _Call(msgspec.Struct):
    call: int | None = None


def call_of(body: bytes) -> int | None:
    """The call number in a frame that is no command, for whoever waits for its answer; None if it has none."""
    try:
        return msgspec.msgpack.decode(body, type=_Call).call
    except msgspec.MsgspecError:
        return None


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
