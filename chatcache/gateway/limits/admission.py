"""Admission control: reject requests over a limit before their text is tokenised.

    acquire: limits of the key and the queue (tokens estimated from characters) -> tokenise -> engine: exact limits

The limits of the queue are those of the engine (`max_queued_requests`, `max_queued_tokens`). The controller adds the
requests that have been admitted but have not reached the engine yet. One tenant may hold half of the queue. All work
for the engine passes through `AdmissionController.acquire`, whatever its route.

`TextThrottle` limits work on long texts that no key limit covers: decoding large bodies, and tokenising for requests
that never reach the engine, such as token counts. Without it, a burst of long texts would occupy all worker threads and
keep the event loop waiting for the interpreter lock. `SocketLimiter` limits the WebSockets of an owner, their frames,
and what they queue; `LoopTurns` limits how much of the event loop's time an owner gets for large frames and answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from chatcache.conversations.replies.service import Reply, is_ranked, num_candidates
from chatcache.engine.protocols import EngineClient
from chatcache.errors import OverloadedError, RateLimitError
from chatcache.gateway.auth.principal import Principal
from chatcache.gateway.errors import ShuttingDownError
from chatcache.gateway.limits.rate_limits import SECOND_NS, RateLimiter, RequestCost, Reservation, TokenBucket
from chatcache.types.queue_limits import QueueSize, check_queue, check_tenant_share
from chatcache.types.request import Params, num_branches
from chatcache.types.stats import EngineHealth

Result = TypeVar("Result")

CHARS_PER_TOKEN = 4  # estimate before tokenising; the engine counts exactly
UNTHROTTLED_BYTES = 16_384  # texts up to this size do not wait
MAX_CONCURRENT_TEXTS = 2
MAX_QUEUED_BYTES = 32 << 20  # per owner, including the text being processed
MAX_OWNER_SOCKETS = 256
MAX_OWNER_FRAME_BYTES = 16 << 20
MAX_OWNER_FRAMES_PER_S, MAX_OWNER_FRAME_BURST = 400, 4000  # of all WebSockets of an owner
TURN_S = 0.001
PAUSE_FACTOR = 4  # an owner's work takes at most a fifth of the time
EMPTY_QUEUE = QueueSize(0, 0)


def request_cost(params: Params, num_chars: int, num_prompts: int = 1) -> RequestCost:
    """Estimate the cost of a request from its parameters and the length of its text."""
    width = num_prompts * num_branches(params)
    return RequestCost(num_chars // CHARS_PER_TOKEN, num_prompts, width, params.max_tokens)


class AdmissionTicket:
    """One admitted request: counts in the queue size and holds a rate limit reservation.

    Both are released when the `acquire` block ends, or, if replies were attached, when the last of them ends.
    """

    def __init__(
        self, controller: AdmissionController, tenant: str, cost: RequestCost, reservation: Reservation
    ) -> None:
        self._controller = controller
        self._tenant = tenant
        self._reservation = reservation
        self._waiting = EMPTY_QUEUE if cost.is_opportunistic else QueueSize(cost.num_prompts, cost.num_prompt_tokens)
        self._replies: set[Reply] = set()
        self._unstarted: set[Reply] = set()
        self._num_tokens: int | None = 0
        controller.adjust_queue_size(tenant, self._waiting)

    @property
    def has_replies(self) -> bool:
        return bool(self._replies)

    def attach(self, *replies: Reply) -> None:
        """Charge what these replies compute, and keep the reservation until they end."""
        self._replies |= set(replies)
        self._unstarted |= set(replies)
        for reply in replies:
            reply.observer = self

    def add_tokens(self, num_tokens: int) -> None:
        """Add computed tokens that belong to no reply."""
        if self._num_tokens is not None:
            self._num_tokens += num_tokens

    def on_started(self, reply: Reply) -> None:
        """Remove a reply from the queue size: the engine has started it."""
        if reply in self._unstarted:
            self._unstarted.remove(reply)
            self._release(QueueSize(1, 0) if self._unstarted else self._waiting)

    def on_ended(self, reply: Reply, *, is_whole: bool) -> None:
        """Add the tokens of a finished reply, and commit the reservation after the last reply.

        A cancelled beam search has not reported its tokens: it is charged what was reserved.
        """
        self.on_started(reply)
        params = reply.request.params
        if is_ranked(params) and not is_whole:
            self._num_tokens = None
        else:
            num_drawn = reply.num_tokens * num_branches(params) // num_candidates(params)
            self.add_tokens(reply.num_computed_prompt_tokens + num_drawn)
        self._replies.discard(reply)
        if not self._replies:
            self._reservation.commit(self._num_tokens)

    def close(self) -> None:
        """End an admitted request to which no reply was attached; charge the tokens counted so far."""
        self._release(self._waiting)
        self._reservation.commit(self._num_tokens)

    def refund(self) -> None:
        """End the ticket without any charge: the server could not do the work."""
        self._release(self._waiting)
        self._reservation.refund()

    def hand_over(self) -> None:
        """End the ticket: another gateway continues the request and charges all of it."""
        self._release(self._waiting)
        self._reservation.hand_over()

    def _release(self, some: QueueSize) -> None:
        self._waiting = QueueSize(
            self._waiting.num_requests - some.num_requests, self._waiting.num_tokens - some.num_tokens
        )
        self._controller.adjust_queue_size(self._tenant, QueueSize(-some.num_requests, -some.num_tokens))


class AdmissionController:
    """Admits requests while the queue has space, in total and for each tenant.

    Counts the requests that were admitted and are not in the engine's queue yet and, for each tenant, those that the
    engine has not started.
    """

    def __init__(self, engine: EngineClient, limiter: RateLimiter) -> None:
        self._engine = engine
        self._limiter = limiter
        self._arriving_size = EMPTY_QUEUE
        self.is_closed = False
        self._tenants: dict[str, QueueSize] = {}

    @asynccontextmanager
    async def acquire(self, principal: Principal, cost: RequestCost) -> AsyncIterator[AdmissionTicket]:
        """Admit a request; the block tokenises and submits it and attaches its replies.

        Raises on entry: RateLimitError (limits of the key, or the tenant's share of the queue), InvalidRequestError
        (more candidates than the key may ever run), OverloadedError (queue full), ShuttingDownError.
        """
        if self.is_closed:
            raise ShuttingDownError("the server is shutting down; try again in a moment")
        await self._limiter.load_usage(principal)
        health = await self._engine.health()
        if not cost.is_opportunistic:
            self._check_capacity(principal.tenant, cost, health)
        ticket = AdmissionTicket(self, principal.tenant, cost, self._limiter.admit(principal, cost))
        size = EMPTY_QUEUE if cost.is_opportunistic else QueueSize(cost.num_prompts, cost.num_prompt_tokens)
        self._arriving_size = _add(self._arriving_size, size)
        try:
            yield ticket
        except (OverloadedError, RateLimitError):
            ticket.refund()
            raise
        finally:
            self._arriving_size = _add(self._arriving_size, QueueSize(*(-number for number in size)))
            if not ticket.has_replies:
                ticket.close()

    def adopt(self, principal: Principal, cost: RequestCost) -> AdmissionTicket:
        """Continue a request that another gateway has admitted."""
        return AdmissionTicket(self, principal.tenant, cost, self._limiter.adopt(principal, cost))

    def close(self) -> None:
        """Reject all further requests."""
        self.is_closed = True

    @property
    def is_idle(self) -> bool:
        """Whether no admitted request is still on its way to the engine."""
        return self._arriving_size == EMPTY_QUEUE

    def queue_size(self, tenant: str) -> QueueSize:
        """Return the size of the requests of a tenant that were admitted and have not started."""
        return self._tenants.get(tenant, EMPTY_QUEUE)

    def adjust_queue_size(self, tenant: str, some: QueueSize) -> None:
        """Add `some` to the queue size of a tenant; negative numbers subtract."""
        waiting = _add(self.queue_size(tenant), some)
        if waiting == EMPTY_QUEUE:
            self._tenants.pop(tenant, None)
        else:
            self._tenants[tenant] = waiting

    def _check_capacity(self, tenant: str, cost: RequestCost, health: EngineHealth) -> None:
        """Check the queue limits. Raises: RateLimitError, OverloadedError."""
        limits = QueueSize(health.max_queued_requests, health.max_queued_tokens)
        # An engine with an empty queue accepts any number and checks its own limit.
        if not health.num_waiting or not limits.num_requests:
            limits = QueueSize(2**63, limits.num_tokens)
        if not limits.num_tokens:
            limits = QueueSize(limits.num_requests, 2**63)
        if tenant:
            check_tenant_share(self.queue_size(tenant), cost.num_prompt_tokens, limits)
        waiting = QueueSize(health.num_waiting, health.num_waiting_tokens)
        check_queue(_add(waiting, self._arriving_size), cost.num_prompt_tokens, limits)


def _add(a: QueueSize, b: QueueSize) -> QueueSize:
    return QueueSize(a.num_requests + b.num_requests, a.num_tokens + b.num_tokens)


class TextThrottle:
    """Limits concurrent work on long texts.

    One text per owner is processed at a time, and `max_concurrent` in total. `activity`: the work, in errors.
    """

    def __init__(self, max_concurrent: int = MAX_CONCURRENT_TEXTS, activity: str = "tokenised") -> None:
        self._activity = activity
        self._owner_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(max_concurrent)
        self._threads = ThreadPoolExecutor(max_concurrent)
        self._num_bytes: Counter[str] = Counter()

    @asynccontextmanager
    async def acquire(self, owner: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait until a text of this size may be processed; short texts do not wait.

        Raises: RateLimitError if texts of more than `MAX_QUEUED_BYTES` of the owner are waiting.
        """
        if num_bytes <= UNTHROTTLED_BYTES:
            yield
            return
        if self._num_bytes[owner] + num_bytes > MAX_QUEUED_BYTES and self._num_bytes[owner]:
            raise RateLimitError(
                f"{self._num_bytes[owner]} bytes of text already wait to be {self._activity}; try again later"
            )
        lock = self._owner_locks.get(owner)
        if lock is None:
            lock = self._owner_locks[owner] = asyncio.Lock()
        self._num_bytes[owner] += num_bytes
        try:
            async with lock, self._slots:
                yield
        finally:
            _subtract(self._num_bytes, owner, num_bytes)

    async def run(self, owner: str, text: str | bytes, work: Callable[[str | bytes], Result]) -> Result:
        """Wait for the turn of a text and process it in one of the throttle's own threads.

        The allocator keeps some free memory for each thread that has processed a large text.

        Raises: as `acquire` and `work`.
        """
        async with self.acquire(owner, len(text)):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, text)


class SocketLimiter:
    """Limits the WebSockets of each owner, their frames, and the bytes that wait to become responses.

    On an open server, where all clients are one owner, sockets are not limited, and frames only on each of them.
    """

    def __init__(self) -> None:
        self._num_sockets: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._frames: dict[str, TokenBucket] = {}

    @contextmanager
    def connect(self, owner: str) -> Iterator[None]:
        """Count a WebSocket while it is open. Raises: RateLimitError."""
        if owner and self._num_sockets[owner] >= MAX_OWNER_SOCKETS:
            raise RateLimitError(f"{MAX_OWNER_SOCKETS} WebSockets of this user are open; close one first")
        self._num_sockets[owner] += 1
        try:
            yield
        finally:
            _subtract(self._num_sockets, owner, 1)
            if len(self._frames) > len(self._num_sockets):
                self._forget_full()

    def take_frame(self, owner: str) -> None:
        """Count a frame of any WebSocket of the owner. Raises: RateLimitError."""
        if not owner:
            return
        now_ns = time.monotonic_ns()
        bucket = self._frames.get(owner)
        if bucket is None:
            bucket = self._frames[owner] = TokenBucket(
                MAX_OWNER_FRAMES_PER_S, now_ns, period_ns=SECOND_NS, burst=MAX_OWNER_FRAME_BURST
            )
        if not bucket.try_consume(1, now_ns):
            raise RateLimitError(
                f"the WebSockets of this user send more than {MAX_OWNER_FRAMES_PER_S} frames a second in all, "
                f"{MAX_OWNER_FRAME_BURST} at once; send fewer, then connect again"
            )

    def _forget_full(self) -> None:
        """Drop the counts of owners without a WebSocket that may send a whole burst again."""
        now_ns = time.monotonic_ns()
        for owner, bucket in list(self._frames.items()):
            if owner not in self._num_sockets and not bucket.full_in_ns(now_ns):
                del self._frames[owner]

    def num_sockets(self, owner: str) -> int:
        """Return how many WebSockets are open."""
        return self._num_sockets[owner]

    def num_bytes(self, owner: str) -> int:
        """Return the bytes that wait."""
        return self._num_bytes[owner]

    def add_bytes(self, owner: str, num_bytes: int) -> None:
        """Count a frame that waits. A single one is never too large. Raises: RateLimitError."""
        if self._num_bytes[owner] and self._num_bytes[owner] + num_bytes > MAX_OWNER_FRAME_BYTES:
            raise RateLimitError(
                f"{self._num_bytes[owner]} bytes of response.create already wait on the WebSockets of this user, "
                f"at most {MAX_OWNER_FRAME_BYTES} may; try again later"
            )
        self._num_bytes[owner] += num_bytes

    def remove_bytes(self, owner: str, num_bytes: int) -> None:
        """Count a frame no longer."""
        _subtract(self._num_bytes, owner, num_bytes)


class LoopTurns:
    """Does work of owners on the event loop in turns, so that none of them delays the others for long.

    A turn of an owner lasts `TURN_S`, and the next follows after a pause of `PAUSE_FACTOR` times as long.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[float], bool]]] = {}

    def add(self, owner: str, work: Callable[[float], bool]) -> None:
        """Have `work(deadline)` called until it returns False: there is no more. It ends soon after the deadline."""
        if owner not in self._waiting:
            self._waiting[owner] = deque()
            asyncio.get_running_loop().call_soon(self._run, owner)
        self._waiting[owner].append(work)

    async def run(self, owner: str, work: Callable[[], Result]) -> Result:
        """Call `work`, which is short, in a turn of the owner and return its result. Raises: as `work`."""
        result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

        def work_in_turn(deadline_s: float) -> bool:
            if not result.done():  # the caller was not cancelled
                try:
                    result.set_result(work())
                except Exception as error:
                    result.set_exception(error)
            return False

        self.add(owner, work_in_turn)
        return await result

    def _run(self, owner: str) -> None:
        waiting = self._waiting[owner]
        if not waiting:
            del self._waiting[owner]
            return
        now_s = start_s = time.perf_counter()
        while waiting and now_s <= start_s + TURN_S:
            work = waiting.popleft()
            if work(start_s + TURN_S):
                waiting.append(work)
            now_s = time.perf_counter()
        pause_s = (now_s - start_s) * PAUSE_FACTOR
        asyncio.get_running_loop().call_later(pause_s, self._run, owner)


def _subtract(counts: Counter[str], owner: str, number: int) -> None:
    counts[owner] -= number
    if not counts[owner]:
        del counts[owner]
