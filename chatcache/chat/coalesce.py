"""Fewer, larger deltas for readers that draw frames: the first at once, then at most one per source and window."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator

from msgspec.structs import replace

from chatcache.chat import live_beams
from chatcache.chat.events import ReplyBeams, ReplyDelta, ReplyEvent

_BEAMS = -1  # where candidates have their index


async def coalesced(events: AsyncIterator[ReplyEvent], window_s: float) -> AsyncIterator[ReplyEvent]:
    """Pass events on in order, joining deltas of one candidate that come within `window_s` of its last one.

    Reports of live beams are joined likewise. A delta that is joined to another wakes nobody.
    """
    window = _Window(window_s)

    async def pump() -> None:
        try:
            async for event in events:
                window.take(event)
        except Exception as error:
            window.end(error)
        else:
            window.end(None)

    task = asyncio.create_task(pump())
    try:
        while await window.wait():
            while window.ready:
                yield window.ready.popleft()
        if window.error is not None:
            raise window.error
    finally:
        window.end(None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Window:
    """What may go now (`ready`), and what waits for its time."""

    def __init__(self, window_s: float) -> None:
        self.ready: deque[ReplyEvent] = deque()
        self.error: Exception | None = None
        self._window_s = window_s
        self._waiting: dict[int, ReplyDelta | ReplyBeams] = {}
        self._sent_s: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None
        self._ended = False

    def take(self, event: ReplyEvent) -> None:
        if isinstance(event, ReplyDelta):
            source = event.index
        elif isinstance(event, ReplyBeams):
            source = _BEAMS
        else:
            self._flush()
            self._tell(event)
            return
        waiting = self._waiting.get(source)
        if waiting is not None:
            self._waiting[source] = _joined(waiting, event)
            return
        now_s = time.monotonic()
        if now_s < self._sent_s.get(source, 0.0) + self._window_s:
            self._waiting[source] = event
            if self._timer is None:
                self._arm(now_s)
        else:
            self._sent_s[source] = now_s
            self._tell(event)

    def end(self, error: Exception | None) -> None:
        """Nothing more comes; what waits goes first."""
        if self._ended:
            return
        self._flush()
        self._ended, self.error = True, error
        self._wake()

    async def wait(self) -> bool:
        """Wait for something ready; False at the end."""
        while not self.ready and not self._ended:
            self._reader = self._loop.create_future()
            await self._reader
        return bool(self.ready)

    def _flush(self) -> None:
        if self._waiting:
            now_s = time.monotonic()
            for source, event in self._waiting.items():
                self._sent_s[source] = now_s
                self._tell(event)
            self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, now_s: float) -> None:
        due_s = min(self._sent_s[source] for source in self._waiting) + self._window_s
        self._timer = self._loop.call_later(max(0.0, due_s - now_s), self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        for source in [each for each in self._waiting if now_s >= self._sent_s[each] + self._window_s]:
            self._sent_s[source] = now_s
            self._tell(self._waiting.pop(source))
        if self._waiting:
            self._arm(now_s)

    def _tell(self, event: ReplyEvent) -> None:
        self.ready.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _joined(first: ReplyDelta | ReplyBeams, then: ReplyDelta | ReplyBeams) -> ReplyDelta | ReplyBeams:
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
