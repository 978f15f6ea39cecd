"""Fewer, larger deltas for readers that draw frames: the first at once, then at most one per source and window."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from msgspec.structs import replace

from chatcache.chat import live_beams
from chatcache.chat.events import ReplyBeams, ReplyDelta, ReplyEvent

_BEAMS = -1  # where candidates have their index


async def coalesced(events: AsyncIterator[ReplyEvent], window_s: float) -> AsyncIterator[ReplyEvent]:
    """Pass events on in order, joining deltas of one candidate that come within `window_s` of its last one.

    Reports of live beams are joined likewise.
    """
    queue: asyncio.Queue[ReplyEvent | BaseException | None] = asyncio.Queue()

    async def pump() -> None:
        try:
            async for event in events:
                queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    task = asyncio.create_task(pump())
    waiting: dict[int, ReplyDelta | ReplyBeams] = {}
    sent_s: dict[int, float] = {}
    try:
        while True:
            due_s = min((sent_s[source] + window_s for source in waiting), default=None)
            event = await _next(queue, due_s)
            now_s = time.monotonic()
            if isinstance(event, ReplyDelta | ReplyBeams):
                source = event.index if isinstance(event, ReplyDelta) else _BEAMS
                event = _joined(waiting.pop(source, None), event)
                if now_s < sent_s.get(source, 0.0) + window_s:
                    waiting[source] = event
                else:
                    sent_s[source] = now_s
                    yield event
                continue
            over = not isinstance(event, _Due)
            for source in [each for each in waiting if over or now_s >= sent_s[each] + window_s]:
                sent_s[source] = now_s
                yield waiting.pop(source)
            if event is None:
                return
            if isinstance(event, BaseException):
                raise event
            if not isinstance(event, _Due):
                yield event
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Due:
    """Something held back may go now."""


async def _next(
    queue: asyncio.Queue[ReplyEvent | BaseException | None], due_s: float | None
) -> ReplyEvent | BaseException | _Due | None:
    if due_s is None:
        return await queue.get()
    try:
        async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
            return await queue.get()
    except TimeoutError:
        return _Due()


def _joined(first: ReplyDelta | ReplyBeams | None, then: ReplyDelta | ReplyBeams) -> ReplyDelta | ReplyBeams:
    """One source's events as one."""
    match first, then:
        case ReplyDelta(), ReplyDelta():
            return replace(
                first,
                text=first.text + then.text,
                token_ids=first.token_ids + then.token_ids,
                logprobs=first.logprobs + then.logprobs,
                reasoning=first.reasoning + then.reasoning,
                calls=first.calls + then.calls,
            )
        case ReplyBeams(), ReplyBeams():
            return live_beams.joined(first, then)
    return then
