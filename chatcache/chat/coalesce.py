"""Fewer, larger deltas for readers that draw frames: the first at once, then at most one per source and window."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from chatcache.chat import live_beams
from chatcache.chat.events import ReplyBeams, ReplyDelta

_BEAMS = -1  # where candidates have their index

Told = ReplyDelta | ReplyBeams
_HELD_BACK = (False, False, False)


class Coalescer:
    """Hands events to `tell` in order, joining those of one candidate that come within `window_s` of its last one.

    What is said, thought and called is told apart. Reports of live beams are joined likewise. Nothing is awaited and no
    task made: at most one timer runs. What `tell` raises comes out of the next call. Belongs to one event loop.
    """

    def __init__(self, tell: Callable[[Told], None], window_s: float) -> None:
        self._tell = tell
        self._window_s = window_s
        self._waiting: dict[int, Told] = {}
        self._told_s: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None

    def take(self, event: Told) -> None:
        """Tell it now, or with others when its time has come."""
        self._check()
        source = event.index if isinstance(event, ReplyDelta) else _BEAMS
        waiting = self._waiting.get(source)
        if waiting is not None:
            if _is_alike(waiting, event):
                self._waiting[source] = _joined(waiting, event)
            else:
                self._waiting[source] = event
                self._tell(waiting)
            return
        now_s = time.monotonic()
        if now_s >= self._told_s.get(source, 0.0) + self._window_s:
            self._told_s[source] = now_s
            self._tell(event)
            return
        self._waiting[source] = event
        if self._timer is None:
            self._arm(now_s)

    def flush(self) -> None:
        """Tell all that waits; something else is about to be told."""
        self._check()
        self._release(time.monotonic(), self._waiting)

    def close(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _arm(self, now_s: float) -> None:
        due_s = min(self._told_s[source] for source in self._waiting) + self._window_s
        self._timer = self._loop.call_later(max(0.0, due_s - now_s), self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        try:
            self._release(now_s, [each for each in self._waiting if now_s >= self._told_s[each] + self._window_s])
        except Exception as error:
            self._error = error
            self.close()
        if self._waiting:
            self._arm(now_s)

    def _release(self, now_s: float, sources: Iterable[int]) -> None:
        for source in list(sources):
            self._told_s[source] = now_s
            self._tell(self._waiting.pop(source))


def _is_alike(first: Told, then: Told) -> bool:
    """Whether joining loses nothing: neither the order of text and calls, nor which log-probabilities are of what."""
    if not (isinstance(first, ReplyDelta) and isinstance(then, ReplyDelta)):
        return True
    one, other = _kind(first), _kind(then)
    return one in (other, _HELD_BACK) or (other == _HELD_BACK and not then.logprobs)


def _kind(delta: ReplyDelta) -> tuple[bool, bool, bool]:
    return bool(delta.text), bool(delta.reasoning), bool(delta.calls)


def _joined(first: Told, then: Told) -> Told:
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
