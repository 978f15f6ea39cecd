"""A client that disconnects before the first token is charged for the computed prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from chatcache.conversations.replies.service import ChatService, ReplyFailedError
from chatcache.gateway.api.generation import reply_events
from chatcache.gateway.auth.principal import KeyLimits, Principal
from chatcache.gateway.errors import ShuttingDownError, error_headers
from chatcache.gateway.limits.admission import AdmissionController
from chatcache.gateway.limits.rate_limits import RateLimiter, RequestCost
from chatcache.gateway.metrics import Metrics
from chatcache.types.events import EngineEvent, Failed, Finished
from chatcache.types.request import GenerateRequest, SamplingParams
from chatcache.types.stats import EngineHealth
from tests.gateway.serving import CHATML, tokenizer_with

PER_MINUTE = 1000
WHO = Principal("key", "acme", "acme", limits=KeyLimits(tokens_per_minute=PER_MINUTE, max_concurrent=1))


class OneReply:
    """An engine that accepts every request and emits fixed events."""

    def __init__(self, *events: EngineEvent) -> None:
        self._events = events

    async def health(self) -> EngineHealth:
        return EngineHealth(ready=True)

    async def submit(self, request: GenerateRequest) -> None: ...

    def num_tokens_sent(self, request_id: str) -> int:
        return 0

    async def abort(self, request_id: str) -> None: ...

    async def events(self, request_id: str) -> AsyncIterator[EngineEvent]:
        for event in self._events:
            yield event


async def num_left(*events: EngineEvent) -> int:
    """Return the tokens left after 100 were requested, `events` received, and the client left."""
    engine: Any = OneReply(*events)
    limiter = RateLimiter(clock_ns=lambda: 0)
    service = ChatService(engine, tokenizer_with(CHATML))
    asked = GenerateRequest(request_id="r", prompt=(1,) * 100, params=SamplingParams(max_tokens=10))
    async with AdmissionController(engine, limiter).acquire(WHO, RequestCost(25, max_tokens=10)) as permit:
        reply = await service.start(asked)
        permit.attach(reply)
    try:
        async with reply:
            async for _ in reply.events():
                pass
    except ReplyFailedError:
        pass
    limiter.admit(WHO, RequestCost(0, max_tokens=0)).refund()  # its place is free again
    return int(limiter.headers(WHO)["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize(
    ("reported", "cost"),
    [
        pytest.param((), 100, id="the client has gone"),
        pytest.param((Finished("r", 1, 100, 0, 0, cancelled=True),), 100, id="cancelled"),
        pytest.param((Finished("r", 1, 100, 64, 0, cancelled=True),), 36, id="cancelled, with pages found"),
        pytest.param((Failed("r", 1, "the engine is gone", "engine_unavailable"),), 0, id="not its fault"),
    ],
)
async def test_disconnect_before_the_first_token_charges_the_prompt(
    reported: tuple[EngineEvent, ...], cost: int
) -> None:
    assert await num_left(*reported) == PER_MINUTE - cost


async def test_request_ended_by_the_server_is_refunded_and_retryable() -> None:
    engine: Any = OneReply(Finished("r", 1, 100, 0, 0, cancelled=True))
    asked = GenerateRequest(request_id="r", prompt=(1,) * 100, params=SamplingParams(max_tokens=10))
    reply = await ChatService(engine, tokenizer_with(CHATML)).start(asked)
    with pytest.raises(ShuttingDownError) as reported:
        async for _ in reply_events(reply, Metrics()):
            pass
    assert reported.value.status == 503 and "retry-after" in error_headers(reported.value)
