"""Code shared by chat completions and completions: stream, collect and merge replies.

The engine requests of a response end with it, also when the client disconnects.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Raw, structs
from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.replies.events import ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished, ReplyStarted
from chatcache.conversations.replies.service import Reply
from chatcache.errors import EngineError
from chatcache.gateway.api.logprobs import PackedLogprobs, num_alternatives
from chatcache.gateway.api.sse import OPENAI_FORMAT, EventStream, SseFormat, sse_frames
from chatcache.gateway.context import Gateway, gateway_of
from chatcache.gateway.errors import ShuttingDownError
from chatcache.gateway.json_codec import encode
from chatcache.gateway.json_pieces import NO_TURNS, Turns
from chatcache.gateway.metrics import Metrics, record_reply_metrics
from chatcache.gateway.middleware import cancel_on_disconnect
from chatcache.gateway.schemas import completions as schemas
from chatcache.gateway.schemas.completions import (
    ChatChunkChoice,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    OutputTokensDetails,
    PromptTokensDetails,
    Usage,
)
from chatcache.types.events import FINISH_CANCELLED, TokenLogprob

# Writing this many log-probabilities takes about a millisecond; longer bodies are encoded in a thread.
_INLINE_LOGPROBS = 500
_EVENTS_PER_TURN = 8  # of the event loop, of those that may have log-probabilities

Choice = TypeVar("Choice", ChatChunkChoice, CompletionChoice)


@dataclass(frozen=True, slots=True)
class CompleteReply:
    """All events of a reply that is not streamed.

    `dones`: final events by candidate index. `deltas`: by candidate index, without their log-probabilities, which are
    in `logprobs`: as objects they would take ten times the memory. `prompt_logprobs`: by number of the prompt. `turns`:
    pauses for the thread that builds a large body.
    """

    dones: Sequence[ReplyDone]
    deltas: Mapping[int, Sequence[ReplyDelta]]
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob | None]]
    finished: ReplyFinished
    logprobs: Mapping[int, PackedLogprobs] = field(default_factory=dict)
    turns: Turns = NO_TURNS

    def encoded_logprobs(self, index: int) -> list[schemas.TokenLogprob]:
        """Return the log-probabilities of a candidate, already encoded, as in chat completions."""
        packed = self.logprobs.get(index)
        return packed.encoded(self.turns) if packed is not None else []


class ReplySerializer(Protocol):
    """Converts reply events to the bodies of one route."""

    def chunks(self, events: AsyncIterator[ReplyEvent]) -> AsyncIterator[object]:
        """Yield the chunks of a stream."""
        ...

    def body(self, reply: CompleteReply) -> object:
        """Build the body of a response that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class CompletionHead:
    """The fields that every chunk and every body of one completion repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

    @classmethod
    def of(cls, gateway: Gateway, completion_id: str) -> CompletionHead:
        return cls(completion_id, int(time.time()), gateway.model_name, gateway.fingerprint)


class ChunkWriter(ABC, Generic[Choice]):
    """Converts reply events to chunks. Subclasses build the choices of their route.

    Order: with the first token, one first chunk for each choice in index order; chunks with text; one final chunk for
    each choice; the usage. `fast_text`: `FastChunks` may encode the deltas that have text only.
    """

    def __init__(self, num_choices: int, *, fast_text: bool, with_usage: bool) -> None:
        self.num_choices = num_choices
        self._fast_text = fast_text
        self._with_usage = with_usage

    @abstractmethod
    def chunk(self, choice: Choice) -> ChatCompletionChunk | Completion: ...

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk | Completion:
        """Build the last chunk, which has the usage and no choice."""

    @abstractmethod
    def first_chunk(self, index: int) -> ChatCompletionChunk | Completion: ...

    @abstractmethod
    def text_choice(self, index: int, text: str) -> Choice: ...

    @abstractmethod
    def delta_choice(self, event: ReplyDelta) -> Choice | None:
        """Build the choice of a delta; None if the delta has nothing that the client requested."""

    @abstractmethod
    def final_choice(self, event: ReplyDone, unsent_ids: Sequence[int]) -> Choice:
        """Build the last choice of a candidate. `unsent_ids`: its tokens that no delta contained."""

    async def chunks(self, events: AsyncIterator[ReplyEvent]) -> AsyncIterator[object]:
        """Yield the chunks of one reply, some of them already encoded (by `FastChunks`)."""
        fast = FastChunks(lambda index, text: self.chunk(self.text_choice(index, text)))
        num_sent = [0] * self.num_choices
        num_slow = 0
        begun = False
        async for event in events:
            if isinstance(event, ReplyFinished):
                if self._with_usage:
                    yield self.usage_chunk(completion_usage(event))
                continue
            if not isinstance(event, ReplyDelta | ReplyDone):
                continue
            if begun and self._fast_text and isinstance(event, ReplyDelta) and is_text_only(event):
                yield fast.encode(event)
                continue
            if not begun:
                begun = True
                for index in range(self.num_choices):
                    yield self.first_chunk(index)
            if (choice := self._choice(event, num_sent)) is not None:
                yield self.chunk(choice)
                num_slow += 1
                if num_slow % _EVENTS_PER_TURN == 0:  # those of a step are here already: many candidates have many
                    await asyncio.sleep(0)

    def _choice(self, event: ReplyDelta | ReplyDone, num_sent: list[int]) -> Choice | None:
        if isinstance(event, ReplyDone):
            return self.final_choice(event, event.token_ids[num_sent[event.index] :])
        num_sent[event.index] += len(event.token_ids)
        return self.delta_choice(event)


def completion_usage(finished: ReplyFinished) -> Usage:
    """Build OpenAI's usage object.

    Prompt and cached tokens count once, also with several candidates.
    """
    return Usage(
        prompt_tokens=finished.num_prompt_tokens,
        completion_tokens=finished.num_output_tokens,
        total_tokens=finished.num_prompt_tokens + finished.num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(
            finished.num_cached_tokens, finished.num_prompt_tokens - finished.num_cached_tokens
        ),
        completion_tokens_details=OutputTokensDetails(finished.num_reasoning_tokens),
    )


async def respond(
    request: Request,
    events: Callable[[], AsyncIterator[ReplyEvent]],
    replies: Sequence[Reply],
    serializer: ReplySerializer,
    *,
    stream: bool,
    headers: dict[str, str],
    format: SseFormat = OPENAI_FORMAT,
) -> Response:
    """Respond with a stream or one body.

    The engine requests end with the response, also if it fails.
    """
    gateway = gateway_of(request)

    async def close() -> None:
        for reply in replies:
            if not reply.ended:
                gateway.metrics.disconnects.inc()
            await reply.close()

    if stream:
        return EventStream(
            sse_frames(serializer.chunks(events()), format),
            keep_alive_s=gateway.config.sse_keep_alive_interval_s,
            on_end=close,
            headers=headers,
            format=format,
        )
    try:
        token_bytes = gateway.loaded_model().tokenizer.token_bytes
        body = await cancel_on_disconnect(request, collect(events(), serializer, token_bytes))
        return Response(body, 200, headers, media_type="application/json")
    finally:
        await close()


async def collect(
    events: AsyncIterator[ReplyEvent], serializer: ReplySerializer, token_bytes: Sequence[bytes]
) -> bytes:
    """Read the reply to its end and return the encoded body of the response."""
    dones: list[ReplyDone] = []
    deltas: dict[int, list[ReplyDelta]] = defaultdict(list)
    logprobs: dict[int, PackedLogprobs] = defaultdict(partial(PackedLogprobs, token_bytes))
    of_prompts: dict[int, Sequence[TokenLogprob | None]] = {}
    num_logprobs = num_scored = 0
    async for event in events:
        if isinstance(event, ReplyStarted):
            of_prompts[event.index] = event.prompt_logprobs
            num_logprobs += len(event.prompt_logprobs) * (1 + num_alternatives(event.prompt_logprobs))
        elif isinstance(event, ReplyDelta):
            if event.logprobs:
                num_logprobs += len(event.logprobs) * (1 + num_alternatives(event.logprobs))
                logprobs[event.index].extend(zip(event.token_ids, event.logprobs, strict=True))
                event = structs.replace(event, logprobs=())
                num_scored += 1
                if num_scored % _EVENTS_PER_TURN == 0:
                    await asyncio.sleep(0)
            deltas[event.index].append(event)
        elif isinstance(event, ReplyDone):
            dones.append(event)
        elif isinstance(event, ReplyFinished):
            dones.sort(key=lambda done: done.index)
            if num_logprobs <= _INLINE_LOGPROBS:
                return _encode(serializer, CompleteReply(dones, deltas, of_prompts, event, logprobs))
            reply = CompleteReply(dones, deltas, of_prompts, event, logprobs, Turns())
            return await asyncio.to_thread(_encode, serializer, reply)
    raise EngineError("the engine ended without a result")


def _encode(serializer: ReplySerializer, reply: CompleteReply) -> bytes:
    return encode(serializer.body(reply))


async def reply_events(reply: Reply, metrics: Metrics) -> AsyncIterator[ReplyEvent]:
    """Yield a reply's events and record its metrics.

    Raises: ShuttingDownError if the server ended it, in place of the ends of its candidates.
    """
    async for event in record_reply_metrics(reply, metrics):
        if isinstance(event, ReplyFinished) and event.cancelled:
            raise ShuttingDownError("the server is shutting down and ended this generation; try again in a moment")
        if not (isinstance(event, ReplyDone) and event.finish_reason == FINISH_CANCELLED):
            yield event


def arguments_object(text: str) -> dict[str, Any]:
    """Parse the arguments of a call for an API that has them as an object; {} if the call is cut off."""
    try:
        value = json.loads(text)
        msgspec.json.encode(value)  # escapes may stand for lone surrogates
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


async def merge_replies(sources: Sequence[AsyncIterator[ReplyEvent]], width: int) -> AsyncIterator[ReplyEvent]:
    """Interleave the events of several replies with `width` candidates each; renumber them.

    Raises: the first error of any reply. The caller closes the replies.
    """
    if len(sources) == 1:
        async for only in sources[0]:
            yield only
        return
    queue: asyncio.Queue[tuple[int, ReplyEvent | BaseException]] = asyncio.Queue()

    async def pump(at: int) -> None:
        try:
            async for event in sources[at]:
                queue.put_nowait((at, event))
        except Exception as error:
            queue.put_nowait((at, error))

    tasks = [asyncio.create_task(pump(at)) for at in range(len(sources))]
    ended: list[ReplyFinished] = []
    try:
        while len(ended) < len(sources):
            at, event = await queue.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, ReplyFinished):
                ended.append(event)
            elif isinstance(event, ReplyStarted):
                yield replace(event, index=at)
            elif isinstance(event, ReplyDelta):
                yield structs.replace(event, index=at * width + event.index)
            elif isinstance(event, ReplyDone):
                yield replace(event, index=at * width + event.index)
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    yield ReplyFinished(
        num_prompt_tokens=sum(end.num_prompt_tokens for end in ended),
        num_cached_tokens=sum(end.num_cached_tokens for end in ended),
        num_output_tokens=sum(end.num_output_tokens for end in ended),
    )


# A private-use character. `rpartition` finds its last occurrence, so one in the model's name does no harm.
_SEAM = "\ue000"


class FastChunks:
    """Encodes chunks that add text only: the JSON around the text is encoded once per choice.

    `chunk(index, text)` returns the chunk as an object; `encode` returns the JSON that encoding it would give.
    """

    def __init__(self, chunk: Callable[[int, str], object]) -> None:
        self._chunk = chunk
        self._surroundings: dict[int, tuple[bytes, bytes]] = {}

    def encode(self, event: ReplyDelta) -> Raw:
        surroundings = self._surroundings.get(event.index)
        if surroundings is None:
            head, _, tail = encode(self._chunk(event.index, _SEAM)).rpartition(encode(_SEAM))
            surroundings = self._surroundings[event.index] = head, tail
        return Raw(surroundings[0] + encode(event.text) + surroundings[1])


def is_text_only(event: ReplyDelta) -> bool:
    """Whether the delta is only text, if the client wants no log-probabilities and token ids."""
    return bool(event.text) and not event.reasoning and not event.calls
