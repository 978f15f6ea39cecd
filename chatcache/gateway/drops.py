"""Candidates of a running response that are given up one by one: who may be, and what each receipt says."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from chatcache.chat.events import ReplyDone
from chatcache.chat.service import Reply, is_ranked
from chatcache.errors import InvalidRequest, NotFound, UnsupportedParameter
from chatcache.gateway.metrics import Metrics
from chatcache.gateway.response_log import ResponseLog
from chatcache.gateway.response_registry import Receipt
from chatcache.types.events import FINISH_CANCELLED


@dataclass(slots=True)
class _Drop:
    """One that was asked for. `receipt`: None for a candidate that came to its end by itself."""

    since_s: float
    num_tokens: int
    receipt: asyncio.Future[Receipt | None]


class Drops:
    """Of one response. Belongs to one event loop."""

    def __init__(self, reply: Reply, log: ResponseLog, metrics: Metrics) -> None:
        self._reply = reply
        self._log = log
        self._metrics = metrics
        self._waiting: dict[int, _Drop] = {}

    @property
    def since_s(self) -> float | None:
        """When the first that is not settled was asked for."""
        return min((drop.since_s for drop in self._waiting.values()), default=None)

    @property
    def first_kept(self) -> int:
        """The first candidate that was not dropped."""
        kept = [each.index for each in self._reply.candidates if not each.dropped]
        return kept[0] if kept else 0

    def check(self, index: int) -> None:
        """Raises: InvalidRequest, UnsupportedParameter, NotFound for a candidate that cannot be dropped."""
        candidates = self._reply.candidates
        if is_ranked(self._reply.request.params):
            message = "beams, best_of and distinct candidates are settled together: cancel the response"
            raise UnsupportedParameter(message, param="candidate")
        if index >= len(candidates):
            raise InvalidRequest(f"candidate must be between 0 and {len(candidates) - 1}", param="candidate")
        if candidates[index].done:
            raise _ended(index)

    def is_last(self, index: int) -> bool:
        """Whether all others have ended."""
        return [each.index for each in self._reply.candidates if not each.done] == [index]

    async def drop(self, index: int, response: asyncio.Task[None]) -> Receipt | None:
        """End a candidate that may be dropped, and wait for that; None where the whole `response` ended under it.

        Raises: NotFound if it came to its end by itself.
        """
        drop = self._waiting.get(index)
        if drop is None:
            receipt: asyncio.Future[Receipt | None] = asyncio.get_running_loop().create_future()
            drop = _Drop(time.perf_counter(), self._reply.candidates[index].num_tokens, receipt)
            self._waiting[index] = drop
        await self._reply.drop(index)
        ends: tuple[asyncio.Future[Any], ...] = (drop.receipt, response)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not drop.receipt.done():
            return None
        told = drop.receipt.result()
        if told is None:
            raise _ended(index)
        return told

    def done(self, event: ReplyDone) -> None:
        """A candidate has ended, and its frames are written: tell all readers if it was dropped."""
        if event.finish_reason == FINISH_CANCELLED and event.num_pages_freed is None:
            return  # it ends with the whole response, whose last frame tells
        drop = self._waiting.pop(event.index, None)
        receipt: Receipt | None = None
        if event.num_pages_freed is not None:
            now_s = time.perf_counter()
            since_s = drop.since_s if drop is not None else now_s
            num_late = self._reply.candidates[event.index].num_tokens - drop.num_tokens if drop is not None else 0
            receipt = {
                "tokens_after_stop": num_late,
                "pages_freed": event.num_pages_freed,
                "stop_latency_ms": round((now_s - since_s) * 1000, 3),
            }
            self._metrics.stop_latency.observe(now_s - since_s)
            self._metrics.tokens_after_stop.inc(num_late)
            self._log.note("response.dropped", **dropped(self._log.response_id, event.index, receipt))
        if drop is not None and not drop.receipt.done():
            drop.receipt.set_result(receipt)


def dropped(response_id: str, candidate: int, receipt: Receipt) -> dict[str, object]:
    """The fields of `response.dropped`."""
    return {"response_id": response_id, "candidate": candidate, "receipt": receipt}


def _ended(index: int) -> NotFound:
    return NotFound(f"candidate {index} has ended", param="candidate")
