"""Several replies as one: choices numbered through, one end with the sums."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from msgspec import structs

from chatcache.chat.events import ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished, ReplyStarted


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
