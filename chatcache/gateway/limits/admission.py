"""Who is let in: requests are counted before anything is made of their text, so that a flood costs its refusals only.

    request --- door: its key's limits; counted by characters --- tokenised --- engine: counted by tokens, queued

The queue's limits are the engine's own (`max_queued_requests`, `max_queued_tokens`); the door adds what is on its way
there. A tenant may hold half of the queue. Everything that makes the engine work comes through here, however it came.

Texts that are only counted, or explained: nobody pays for that, so long ones wait for one another.

The engine has no part in it, and no limit of a key counts it. Minutes of it, sent within a second, would hold up every
thread, and so whatever of everybody's needs one: bodies to be read, prompts to be made, conversations to be shown.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from chatcache.conversations.replies.service import Reply, is_ranked, num_candidates
from chatcache.engine.protocols import EngineClient
from chatcache.errors import OverloadedError, RateLimitError
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.errors import ShuttingDownError
from chatcache.gateway.limits.rate_limits import RateLimiter, RequestCost, Reservation
from chatcache.types.queue_limits import QueueSize, check_queue, check_tenant_share
from chatcache.types.request import Params, num_branches
from chatcache.types.stats import EngineHealth

CHARS_PER_TOKEN = 4  # of text that nobody has tokenised yet; the engine counts again, exactly
EMPTY_QUEUE = QueueSize(0, 0)


def request_cost(params: Params, num_chars: int, num_prompts: int = 1) -> RequestCost:
    """What these parameters ask for, of so much text."""
    width = num_prompts * num_branches(params)
    return RequestCost(num_chars // CHARS_PER_TOKEN, num_prompts, width, params.max_tokens)


class AdmissionTicket:
    """Leave to submit: good for the block that it was got in, or until the replies that it covers are over."""

    def __init__(self, door: AdmissionController, tenant: str, work: RequestCost, hold: Reservation) -> None:
        self._door = door
        self._tenant = tenant
        self._hold = hold
        self._waiting = EMPTY_QUEUE if work.is_opportunistic else QueueSize(work.num_prompts, work.num_prompt_tokens)
        self._replies: set[Reply] = set()
        self._unstarted: set[Reply] = set()
        self._num_tokens: int | None = 0
        door.adjust_queue_size(tenant, self._waiting)

    @property
    def has_replies(self) -> bool:
        return bool(self._replies)

    def attach(self, *replies: Reply) -> None:
        """Tie it to replies under way: what they come to is what it costs."""
        self._replies |= set(replies)
        self._unstarted |= set(replies)
        for reply in replies:
            reply.observer = self

    def add_tokens(self, num_tokens: int) -> None:
        """Tokens that were computed without a reply."""
        if self._num_tokens is not None:
            self._num_tokens += num_tokens

    def on_started(self, reply: Reply) -> None:
        """The reply waits no more."""
        if reply in self._unstarted:
            self._unstarted.remove(reply)
            self._leave(QueueSize(1, 0) if self._unstarted else self._waiting)

    def on_ended(self, reply: Reply, *, is_whole: bool) -> None:
        """The reply is over. A search that is cut short has not told what it took: it costs what was reserved."""
        self.on_started(reply)
        params = reply.request.params
        if is_ranked(params) and not is_whole:
            self._num_tokens = None
        else:
            num_drawn = reply.num_tokens * num_branches(params) // num_candidates(params)
            self.add_tokens(reply.num_computed_prompt_tokens + num_drawn)
        self._replies.discard(reply)
        if not self._replies:
            self._hold.commit(self._num_tokens)

    def close(self) -> None:
        """Nothing came of it, or all that was counted."""
        self._leave(self._waiting)
        self._hold.commit(self._num_tokens)

    def refund(self) -> None:
        """It was not the request's fault: that costs nothing."""
        self._leave(self._waiting)
        self._hold.refund()

    def _leave(self, some: QueueSize) -> None:
        self._waiting = QueueSize(
            self._waiting.num_requests - some.num_requests, self._waiting.num_tokens - some.num_tokens
        )
        self._door.adjust_queue_size(self._tenant, QueueSize(-some.num_requests, -some.num_tokens))


class AdmissionController:
    """Counts what has come in: until it is the engine's, and for each tenant until it has started."""

    def __init__(self, engine: EngineClient, limiter: RateLimiter) -> None:
        self._engine = engine
        self._limiter = limiter
        self._entering = EMPTY_QUEUE
        self.is_closed = False
        self._tenants: dict[str, QueueSize] = {}

    @asynccontextmanager
    async def acquire(self, principal: Principal, work: RequestCost) -> AsyncIterator[AdmissionTicket]:
        """Make a prompt of so much text and submit it, inside the block; the permit must `cover` what comes of it.

        Raises, before it is entered: RateLimitError for the key's or the tenant's share, InvalidRequestError for more
        at once
        than the key may ever have, OverloadedError when the queue is full, ShuttingDownError.
        """
        if self.is_closed:
            raise ShuttingDownError("the server is shutting down; try again in a moment")
        await self._limiter.load_usage(principal)
        health = await self._engine.health()
        if not work.is_opportunistic:
            self._check_room(principal.tenant, work, health)
        permit = AdmissionTicket(self, principal.tenant, work, self._limiter.admit(principal, work))
        arriving = EMPTY_QUEUE if work.is_opportunistic else QueueSize(work.num_prompts, work.num_prompt_tokens)
        self._entering = _sum(self._entering, arriving)
        try:
            yield permit
        except (OverloadedError, RateLimitError):
            permit.refund()
            raise
        finally:
            self._entering = _sum(self._entering, QueueSize(*(-number for number in arriving)))
            if not permit.has_replies:
                permit.close()

    def close(self) -> None:
        """Let nobody in from now on."""
        self.is_closed = True

    @property
    def is_idle(self) -> bool:
        """Whether nobody is between the door and the engine."""
        return self._entering == EMPTY_QUEUE

    def queue_size(self, tenant: str) -> QueueSize:
        """What of a tenant has come in and not started."""
        return self._tenants.get(tenant, EMPTY_QUEUE)

    def adjust_queue_size(self, tenant: str, some: QueueSize) -> None:
        """Add to what waits of a tenant, or take from it."""
        waiting = _sum(self.queue_size(tenant), some)
        if waiting == EMPTY_QUEUE:
            self._tenants.pop(tenant, None)
        else:
            self._tenants[tenant] = waiting

    def _check_room(self, tenant: str, work: RequestCost, health: EngineHealth) -> None:
        """Raises: RateLimitError, OverloadedError."""
        most = QueueSize(health.max_queued_requests, health.max_queued_tokens)
        if not health.num_waiting or not most.num_requests:  # an idle engine takes what comes, and counts itself
            most = QueueSize(2**63, most.num_tokens)
        if not most.num_tokens:
            most = QueueSize(most.num_requests, 2**63)
        if tenant:
            check_tenant_share(self.queue_size(tenant), work.num_prompt_tokens, most)
        here = QueueSize(health.num_waiting, health.num_waiting_tokens)
        check_queue(_sum(here, self._entering), work.num_prompt_tokens, most)


def _sum(a: QueueSize, b: QueueSize) -> QueueSize:
    return QueueSize(a.num_requests + b.num_requests, a.num_tokens + b.num_tokens)


UNTHROTTLED_BYTES = 16_384
MAX_CONCURRENT_TEXTS = 2
MAX_QUEUED_BYTES = 32 << 20  # of an owner, the one whose turn it is included


class TokenizeThrottle:
    """One at a time for each owner, `MAX_CONCURRENT_TEXTS` for all."""

    def __init__(self) -> None:
        self._lines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._places = asyncio.Semaphore(MAX_CONCURRENT_TEXTS)
        self._num_bytes: Counter[str] = Counter()

    @asynccontextmanager
    async def acquire(self, owner: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait for it, with a text of so many bytes; a short one need not.

        Raises: RateLimitError when too much of the owner waits already.
        """
        if num_bytes <= UNTHROTTLED_BYTES:
            yield
            return
        if self._num_bytes[owner] + num_bytes > MAX_QUEUED_BYTES and self._num_bytes[owner]:
            raise RateLimitError(f"{self._num_bytes[owner]} bytes of text are being counted already; try again later")
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = asyncio.Lock()
        self._num_bytes[owner] += num_bytes
        try:
            async with line, self._places:
                yield
        finally:
            self._num_bytes[owner] -= num_bytes
            if not self._num_bytes[owner]:
                del self._num_bytes[owner]
