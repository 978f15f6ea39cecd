"""A reply's events, timed and counted on their way through."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from chatcache.chat.events import ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished, ReplyStarted
from chatcache.chat.service import Reply
from chatcache.gateway.metrics import Metrics


async def metered(reply: Reply, metrics: Metrics) -> AsyncIterator[ReplyEvent]:
    """Pass a reply's events on."""
    accepted_s = time.perf_counter()
    last_s: float | None = None
    outcome = "miss"
    async for event in reply.events():
        if isinstance(event, ReplyDelta):
            now_s = time.perf_counter()
            if last_s is None:
                metrics.first_token.labels(cache=outcome).observe(now_s - accepted_s)
            else:
                metrics.inter_token.observe(now_s - last_s)
            last_s = now_s
        elif isinstance(event, ReplyStarted):
            outcome = _cache_outcome(event)
        elif isinstance(event, ReplyDone):
            metrics.finished.labels(finish_reason=event.finish_reason).inc()
        elif isinstance(event, ReplyFinished):
            _count_tokens(metrics, event)
        yield event


def _cache_outcome(started: ReplyStarted) -> str:
    """miss: nothing of the prompt came from the cache; hit: half of it or more."""
    if started.num_cached_tokens == 0:
        return "miss"
    return "hit" if 2 * started.num_cached_tokens >= started.num_prompt_tokens else "partial"


def _count_tokens(metrics: Metrics, finished: ReplyFinished) -> None:
    metrics.prompt_tokens.labels(source="cached").inc(finished.num_cached_tokens)
    metrics.prompt_tokens.labels(source="computed").inc(finished.num_prompt_tokens - finished.num_cached_tokens)
    metrics.generation_tokens.inc(finished.num_output_tokens)
