"""Fewer, larger deltas for readers that draw frames: the first at once, then at most one per candidate and window."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from chatcache.chat.events import ReplyDelta, ReplyEvent


async def coalesced(events: AsyncIterator[ReplyEvent], window_s: float) -> AsyncIterator[ReplyEvent]:
    """Pass events on in order, joining deltas of one candidate that come within `window_s` of its last one."""
    queue: asyncio.Queue[ReplyEvent | BaseException | None] = asyncio.Queue()

    async def pump() -> None:
        try:
            async for event in events:
                queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    task = asyncio.create_task(pump())
    waiting: dict[int, ReplyDelta] = {}
    sent_s: dict[int, float] = {}
    try:
        while True:
            due_s = min((sent_s[index] + window_s for index in waiting), default=None)
            event = await _next(queue, due_s)
            now_s = time.monotonic()
            if isinstance(event, ReplyDelta):
                held = waiting.pop(event.index, None)
                event = event if held is None else _joined(held, event)
                if now_s < sent_s.get(event.index, 0.0) + window_s:
                    waiting[event.index] = event
                else:
                    sent_s[event.index] = now_s
                    yield event
                continue
            over = not isinstance(event, _Due)
            for index in [i for i in waiting if over or now_s >= sent_s[i] + window_s]:
                sent_s[index] = now_s
                yield waiting.pop(index)
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


def _joined(first: ReplyDelta, then: ReplyDelta) -> ReplyDelta:
    return replace(
        first,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
    )
