"""Messages between client and engine: commands to the engine, notices from it, and frames.

A frame is a 4-byte big-endian length and one msgpack message. Messages are tagged msgspec structs; a frame is decoded
as a command or as a notice, and anything else is rejected before it has an effect.
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
from chatcache.types.events import EngineEvent, SearchStep, Started, TokenLogprob
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import (
    EngineHealth,
    ExplainQuery,
    Explanation,
    ModelInfo,
    PackedPrompt,
    PageAccounts,
    PageMap,
)

_ERROR_TYPES: dict[str, type[ChatcacheError]] = {
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
    """A `ChatcacheError` as data. `kind` is the name of its class, one of `_ERROR_TYPES`."""

    kind: str
    message: str
    code: str
    param: str | None = None


def encode_error(error: BaseException) -> ErrorData:
    """Encode an error; one of an unknown class becomes an `EngineError` that names the class."""
    if isinstance(error, ChatcacheError):
        kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERROR_TYPES)
        return ErrorData(next(kinds, EngineError.__name__), error.message, error.code, error.param)
    return ErrorData(EngineError.__name__, f"{type(error).__name__}: {error}", EngineError.code)


def decode_error(error: ErrorData) -> ChatcacheError:
    """Create the exception that the data describes."""
    kind = _ERROR_TYPES.get(error.kind, EngineError)
    return kind(error.message, param=error.param, code=error.code)


class Boot(msgspec.Struct, frozen=True, tag="boot"):
    """First command to a child: build an engine by calling `factory` with `config`.

    `factory` is "module:function".
    """

    factory: str
    config: EngineConfig
    log_level: str = "info"
    log_format: LogFormat = "text"


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Add a request; the answer follows when it is accepted or rejected.

    `num_new_tokens`: prompt tokens that are probably not in the cache, if the sender knows.
    """

    call: int
    request: GenerateRequest
    num_new_tokens: int | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request. The engine sends no answer."""

    request_id: str


class CancelCandidate(msgspec.Struct, frozen=True, tag="cancel_candidate"):
    """End one candidate of a request, see `EngineClient.cancel_candidate`."""

    call: int
    request_id: str
    index: int


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """Send the further notices of a request to this gateway instead of `gateway`, which has ended.

    Only engine workers know it. The answer is a NotFoundError if `gateway` has no such request there.
    """

    call: int
    request_id: str
    gateway: str


class Invoke(msgspec.Struct, frozen=True, tag="invoke"):
    """Call a method without arguments of the engine's page cache."""

    call: int
    method: Literal["accounts", "stats", "reset_prefix_cache"]


class Explain(msgspec.Struct, frozen=True, tag="explain"):
    """Explain which pages of a prompt are cached, see `EngineClient.explain`."""

    call: int
    query: ExplainQuery


class CountCached(msgspec.Struct, frozen=True, tag="count_cached"):
    """Count the cached tokens of prompts, see `EngineClient.count_cached_tokens`."""

    call: int
    prompts: tuple[PackedPrompt, ...]
    namespace: str = ""


class MapPages(msgspec.Struct, frozen=True, tag="map_pages"):
    """Return the page map, see `EngineClient.page_map`."""

    call: int
    namespace: str = ""
    operator: bool = False


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave the loop; running requests are dropped."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress of loading the model."""

    fraction: float
    detail: str


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The engine is ready for requests."""

    model_info: ModelInfo
    health: EngineHealth


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The engine could not be built; the child process ends."""

    error: ErrorData


class EngineFailed(msgspec.Struct, frozen=True, tag="engine_failed"):
    """The engine cannot continue because of this error; no event follows."""

    error: ErrorData


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Reply to `call`: `error`, or `value` (None for an accepted submit)."""

    call: int
    error: ErrorData | None = None
    value: Any = None


class ExplainReply(msgspec.Struct, frozen=True, tag="explanation"):
    """Reply to an `Explain`."""

    call: int
    value: Explanation


class PageAccountsReply(msgspec.Struct, frozen=True, tag="page_accounts"):
    """Reply to an `Invoke` of `accounts`."""

    call: int
    value: PageAccounts


class PageMapReply(msgspec.Struct, frozen=True, tag="page_map"):
    """Reply to a `MapPages`."""

    call: int
    value: PageMap


class PromptScores(msgspec.Struct, frozen=True, tag="prompt_scores"):
    """Part of a request's prompt log-probabilities, sent before its `Started` event.

    There may be hundreds of thousands: they are sent in parts and stay encoded until a reader needs them.
    """

    request_id: str
    part: bytes


class Events(msgspec.Struct, frozen=True, tag="events"):
    """The events of a step; with `health` if the last report is older than HEALTH_INTERVAL_S.

    `search_steps`: what the searches chose in this step; for `RequestRecovery`, here and at a gateway of workers.
    """

    events: tuple[EngineEvent, ...] = ()
    health: EngineHealth | None = None
    search_steps: tuple[SearchStep, ...] = ()


Command = Boot | Submit | Abort | CancelCandidate | Adopt | Invoke | Explain | CountCached | MapPages | Stop
Reply = Answer | ExplainReply | PageAccountsReply | PageMapReply
Notice = Loading | Loaded | LoadFailed | EngineFailed | Reply | PromptScores | Events


MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_LOGPROBS_PER_PART = 4096
_HEADER = struct.Struct(">I")
FRAME_HEADER_BYTES = _HEADER.size


class FrameTooLargeError(ValueError):
    """A message exceeds MAX_FRAME_BYTES."""


_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_scores: msgspec.msgpack.Decoder[list[TokenLogprob | None]] = msgspec.msgpack.Decoder(list[TokenLogprob | None])
_notices: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(message: Command | Notice) -> bytes:
    """Encode one message as a frame.

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
    """Encode a notice as one or more frames.

    Events that exceed one frame are split in order: the search steps are in the first frame, the health in the last.
    A reply that exceeds one frame is replaced by an error. Raises: FrameTooLargeError for a single event that does.
    """
    if isinstance(notice, Events):
        for event in notice.events:
            if isinstance(event, Started) and event.prompt_logprobs:
                yield from _encode_scores(event)
        notice = replace(notice, events=tuple(map(_without_scores, notice.events)))
    try:
        yield encode(notice)
    except FrameTooLargeError as error:
        if isinstance(notice, Reply):
            yield encode(Answer(notice.call, encode_error(EngineError(f"the answer is too large: {error}"))))
        elif isinstance(notice, Events) and len(notice.events) > 1:
            middle = len(notice.events) // 2
            yield from encode_notice(Events(notice.events[:middle], search_steps=notice.search_steps))
            yield from encode_notice(Events(notice.events[middle:], notice.health))
        else:
            raise


def decode_command(body: bytes) -> Command:
    """Decode the body of a command frame.

    Raises: msgspec.DecodeError or ValidationError for anything else.
    """
    return _commands.decode(body)


def _without_scores(event: EngineEvent) -> EngineEvent:
    return replace(event, prompt_logprobs=()) if isinstance(event, Started) else event


def _encode_scores(event: Started) -> Iterator[bytes]:
    """Encode prompt log-probabilities in frames of about MAX_LOGPROBS_PER_PART."""
    entries = event.prompt_logprobs
    last = entries[-1]
    step = max(1, MAX_LOGPROBS_PER_PART // (1 + (len(last.top) if last is not None else 0)))
    for start in range(0, len(entries), step):
        yield encode(PromptScores(event.request_id, _encoder.encode(entries[start : start + step])))


def decode_scores(parts: Iterable[bytes]) -> tuple[TokenLogprob | None, ...]:
    """Decode and join the parts of a prompt's log-probabilities. Slow: call it in a thread."""
    return tuple(entry for part in parts for entry in _scores.decode(part))


class _Call(msgspec.Struct):
    call: int | None = None


def call_id_of(body: bytes) -> int | None:
    """Return the call number of an invalid command frame, or None.

    The call is answered with an error.
    """
    try:
        return msgspec.msgpack.decode(body, type=_Call).call
    except msgspec.MsgspecError:
        return None


def decode_notice(body: bytes) -> Notice:
    """Decode the body of a notice frame.

    Raises: msgspec.DecodeError or ValidationError for anything else.
    """
    return _notices.decode(body)


class FrameBuffer:
    """Splits a byte stream, received in arbitrary pieces, into frame bodies."""

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
