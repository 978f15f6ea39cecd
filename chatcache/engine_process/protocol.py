"""What crosses the bus: commands go to the engine, notices come back.

Catalogued errors as data, and back.

How messages are framed: 4 bytes of big-endian length, then one msgpack message.

All are tagged msgspec structs, decoded against the union of their kind, so a frame that is not one of them is refused
before anything acts on it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from chatcache.config import EngineConfig
from chatcache.errors import (
    ChatcacheError,
    ContextLengthError,
    DeviceLostError,
    EngineError,
    InvalidRequestError,
    ModelFolderError,
    NotFoundError,
    OverloadedError,
    RateLimitError,
    RequestPoisonedError,
    UnsupportedParameterError,
)
from chatcache.logs import LogFormat
from chatcache.types.events import EngineEvent, Started, TokenLogprob
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import EngineHealth, Explanation, ModelInfo, PackedPrompt, PageAccounts, PageMap

_KINDS: dict[str, type[ChatcacheError]] = {
    kind.__name__: kind
    for kind in (
        InvalidRequestError,
        UnsupportedParameterError,
        ContextLengthError,
        NotFoundError,
        OverloadedError,
        RateLimitError,
        EngineError,
        DeviceLostError,
        RequestPoisonedError,
        ModelFolderError,
    )
}


class ErrorData(msgspec.Struct, frozen=True):
    """A `ChatcacheError` as data. `kind` is the name of its class, one of `_KINDS`."""

    kind: str
    message: str
    code: str
    param: str | None = None


def encode_error(error: BaseException) -> ErrorData:
    """Describe an error as data; what is not in the catalogue becomes an `EngineError` naming its type."""
    if isinstance(error, ChatcacheError):
        kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS)
        return ErrorData(next(kinds, EngineError.__name__), error.message, error.code, error.param)
    return ErrorData(EngineError.__name__, f"{type(error).__name__}: {error}", EngineError.code)


def decode_error(fault: ErrorData) -> ChatcacheError:
    """Rebuild the catalogued error a fault describes."""
    kind = _KINDS.get(fault.kind, EngineError)
    return kind(fault.message, param=fault.param, code=fault.code)


class Boot(msgspec.Struct, frozen=True, tag="boot"):
    """First command to a child: build the engine `factory` ("module:function") makes of `config`."""

    factory: str
    config: EngineConfig
    log_level: str = "info"
    log_format: LogFormat = "text"


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    call: int
    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Arguments as of `EngineClient.drop`."""

    call: int
    request_id: str
    index: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    call: int
    what: Literal["accounts", "stats", "reset_prefix_cache"]


class Explain(msgspec.Struct, frozen=True, tag="explain"):
    """Arguments as of `EngineClient.explain`."""

    call: int
    prompt: tuple[int, ...]
    namespace: str = ""
    num_public_tokens: int = 0
    operator: bool = False


class CountCached(msgspec.Struct, frozen=True, tag="count_cached"):
    """Arguments as of `EngineClient.num_cached`."""

    call: int
    prompts: tuple[PackedPrompt, ...]
    namespace: str = ""


class MapPages(msgspec.Struct, frozen=True, tag="map_pages"):
    """Arguments as of `EngineClient.page_map`."""

    call: int
    namespace: str = ""
    operator: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop; what still runs is dropped."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    fraction: float
    detail: str


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    facts: ModelInfo
    health: EngineHealth


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    fault: ErrorData


class Ending(msgspec.Struct, frozen=True, tag="ending"):
    """The engine ends, of this; no event follows."""

    fault: ErrorData


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Reply to `call`: `fault`, or `value` (None for an accepted submit)."""

    call: int
    fault: ErrorData | None = None
    value: Any = None


class Explained(msgspec.Struct, frozen=True, tag="explained"):
    """Reply to an `Explain`."""

    call: int
    value: Explanation


class Accounted(msgspec.Struct, frozen=True, tag="accounted"):
    """Reply to an `Ask` for the accounts."""

    call: int
    value: PageAccounts


class Mapped(msgspec.Struct, frozen=True, tag="mapped"):
    """Reply to a `MapPages`."""

    call: int
    value: PageMap


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """Prompt log-probabilities of a request whose `Started` comes behind without them.

    There may be hundreds of thousands: they travel in parts, and stay encoded until somebody reads them.
    """

    request_id: str
    part: bytes


class Events(msgspec.Struct, frozen=True, tag="events"):
    """One step's events; `health` is there when the last one told is older than a moment."""

    events: tuple[EngineEvent, ...] = ()
    health: EngineHealth | None = None


Command = Boot | Submit | Abort | Drop | Ask | Explain | CountCached | MapPages | Stop
Reply = Answer | Explained | Accounted | Mapped
Notice = Loading | Loaded | LoadFailed | Ending | Reply | Scored | Events


MAX_FRAME_BYTES = 16 * 1024 * 1024
PART_LOGPROBS = 4096
_HEADER = struct.Struct(">I")


class FrameTooLargeError(ValueError):
    """A message does not fit a frame."""


_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_scores: msgspec.msgpack.Decoder[list[TokenLogprob | None]] = msgspec.msgpack.Decoder(list[TokenLogprob | None])
_notices: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(message: Command | Notice) -> bytes:
    """Frame one message.

    Raises: FrameTooLargeError for a message over `MAX_FRAME_BYTES`.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        size = len(body)
        raise FrameTooLargeError(
            f"a {type(message).__name__} of {size} bytes exceeds the frame limit {MAX_FRAME_BYTES}"
        )
    return _HEADER.pack(len(body)) + body


def encode_notice(notice: Notice) -> Iterator[bytes]:
    """Frame one notice; events that do not fit one frame go in several, in order, the health with the last.

    An answer that does not fit becomes a fault. Raises: FrameTooLargeError for a single event that does not.
    """
    if isinstance(notice, Events):
        for event in notice.events:
            if isinstance(event, Started) and event.prompt_logprobs:
                yield from _encode_scores(event)
        notice = Events(tuple(map(_without_scores, notice.events)), notice.health)
    try:
        yield encode(notice)
    except FrameTooLargeError as error:
        if isinstance(notice, Reply):
            yield encode(Answer(notice.call, encode_error(EngineError(f"the answer is too large: {error}"))))
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
