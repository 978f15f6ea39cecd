"""What chat completions and completions have in common: submit, meter, stream or collect, die with the socket.

Several replies as one: choices numbered through, one end with the sums.

Chunks that add text and nothing else, which nearly all are: everything around the text is encoded once.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from msgspec import Raw, structs
from starlette.requests import Request
from starlette.responses import Response

from chatcache.conversations.replies.events import ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished, ReplyStarted
from chatcache.conversations.replies.service import Reply
from chatcache.errors import EngineError
from chatcache.gateway.api.logprobs import max_top
from chatcache.gateway.api.sse import EventStream, framed
from chatcache.gateway.context import gateway_of
from chatcache.gateway.errors import ShuttingDownError
from chatcache.gateway.json_codec import encode
from chatcache.gateway.metrics import Metrics, record_reply_metrics
from chatcache.gateway.middleware import until_disconnect
from chatcache.types.events import TokenLogprob


@dataclass(frozen=True, slots=True)
class Heard:
    """A whole reply: how each candidate ended, by index; the deltas of each; what was said of each prompt."""

    dones: Sequence[ReplyDone]
    deltas: Mapping[int, Sequence[ReplyDelta]]
    prompt_logprobs: Mapping[int, Sequence[TokenLogprob | None]]
    finished: ReplyFinished


# Writing this many log-probabilities takes about a millisecond; longer answers leave the event loop alone.
_INLINE_LOGPROBS = 500


class Shape(Protocol):
    """One route's wire form of a reply."""

    def chunks(self, events: AsyncIterator[ReplyEvent]) -> AsyncIterator[object]: ...

    def whole(self, heard: Heard) -> object: ...


def usage(finished: ReplyFinished) -> dict[str, Any]:
    """OpenAI's usage object; prompt and cached tokens count once, however many candidates there are."""
    return {
        "prompt_tokens": finished.num_prompt_tokens,
        "completion_tokens": finished.num_output_tokens,
        "total_tokens": finished.num_prompt_tokens + finished.num_output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": finished.num_cached_tokens,
            "cache_write_tokens": finished.num_prompt_tokens - finished.num_cached_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": finished.num_reasoning_tokens},
    }


async def respond(
    request: Request,
    events: Callable[[], AsyncIterator[ReplyEvent]],
    replies: Sequence[Reply],
    shape: Shape,
    *,
    stream: bool,
    headers: dict[str, str],
) -> Response:
    """Answer with a stream or one body; whichever way it ends, the engine requests end with it."""
    gateway = gateway_of(request)

    async def close() -> None:
        for reply in replies:
            if not reply.ended:
                gateway.metrics.disconnects.inc()
            await reply.close()

    if stream:
        return EventStream(
            framed(shape.chunks(events())),
            keep_alive_s=gateway.config.sse_keep_alive_interval_s,
            on_end=close,
            headers=headers,
        )
    try:
        body = await until_disconnect(request, collect(events(), shape))
        return Response(body, 200, headers, media_type="application/json")
    finally:
        await close()


async def collect(events: AsyncIterator[ReplyEvent], shape: Shape) -> bytes:
    """Read to the end; return the encoded body."""
    dones: list[ReplyDone] = []
    deltas: dict[int, list[ReplyDelta]] = defaultdict(list)
    of_prompts: dict[int, Sequence[TokenLogprob | None]] = {}
    num_logprobs = 0
    async for event in events:
        if isinstance(event, ReplyStarted):
            of_prompts[event.index] = event.prompt_logprobs
            num_logprobs += len(event.prompt_logprobs) * (1 + max_top(event.prompt_logprobs))
        elif isinstance(event, ReplyDelta):
            deltas[event.index].append(event)
            num_logprobs += len(event.logprobs) * (1 + max_top(event.logprobs))
        elif isinstance(event, ReplyDone):
            dones.append(event)
        elif isinstance(event, ReplyFinished):
            dones.sort(key=lambda done: done.index)
            heard = Heard(dones, deltas, of_prompts, event)
            if num_logprobs <= _INLINE_LOGPROBS:
                return _encode(shape, heard)
            return await asyncio.to_thread(_encode, shape, heard)
    raise EngineError("the engine ended without a result")


def _encode(shape: Shape, heard: Heard) -> bytes:
    return encode(shape.whole(heard))


async def generation(reply: Reply, metrics: Metrics) -> AsyncIterator[ReplyEvent]:
    """A reply's events, metered. Raises: ShuttingDownError when the server, not the client, ended it."""
    async for event in record_reply_metrics(reply, metrics):
        if isinstance(event, ReplyFinished) and event.cancelled:
            raise ShuttingDownError("the server is shutting down and ended this generation; try again in a moment")
        yield event


async def merged(sources: Sequence[AsyncIterator[ReplyEvent]], width: int) -> AsyncIterator[ReplyEvent]:
    """Interleave the events of replies that have `width` candidates each, as they come.

    Raises: the first failure of any; the others are left to their owner to close.
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


_SEAM = "\ue000"  # private use, and the last of its kind in any chunk


class FastChunks:
    """`chunk(index, text)` is the chunk as an object; `of` gives the same as JSON."""

    def __init__(self, chunk: Callable[[int, str], object]) -> None:
        self._chunk = chunk
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def of(self, event: ReplyDelta) -> Raw:
        around = self._around.get(event.index)
        if around is None:
            before, _, behind = encode(self._chunk(event.index, _SEAM)).rpartition(encode(_SEAM))
            around = self._around[event.index] = before, behind
        return Raw(around[0] + encode(event.text) + around[1])


def is_plain(event: ReplyDelta) -> bool:
    """Whether text is all it has for a client that asked for neither log-probabilities nor token ids."""
    return bool(event.text) and not event.reasoning and not event.calls
