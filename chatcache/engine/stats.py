"""What the engine tells of itself, put together from those who know.

How long requests waited, were prefilled and decoded: histograms that travel with the engine's health.

Who holds the pages, and how well they are filled: figures for people, worked out when asked.

The page map for whoever polls it, at a cost that steps do not feel.

The namespaces of the latest requests: where an operator's question is asked as well.

What an engine's pages hold, for those who ask.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from chatcache.config import EngineConfig
from chatcache.engine.admission import check_prompt
from chatcache.engine.invariants import check_tokens
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import CacheScope
from chatcache.kv_cache.stats import (
    PageStates,
    PageUsage,
    check_invariants,
    fractional_pages,
    page_cells,
    page_states,
    page_usage,
)
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.plan import KVCapacity
from chatcache.types.stats import (
    DURATION_BOUNDS_S,
    Durations,
    EngineHealth,
    Explanation,
    ModelInfo,
    PackedPrompt,
    PageAccounts,
    PageMap,
)


class Histogram:
    """Counts of seconds, one more than there are bounds: the last is of what lies beyond."""

    def __init__(self) -> None:
        self._counts = [0] * (len(DURATION_BOUNDS_S) + 1)
        self._total_s = 0.0

    def observe(self, duration_s: float) -> None:
        self._counts[bisect_left(DURATION_BOUNDS_S, duration_s)] += 1
        self._total_s += duration_s

    def read(self) -> Durations:
        return Durations(tuple(self._counts), self._total_s)


class RequestTimes:
    """Accepted to admitted (`queue`), to the first token (`prefill`), to the last (`decode`), of whoever got there."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.queue = Histogram()
        self.prefill = Histogram()
        self.decode = Histogram()

    def first_token(self, request: LiveRequest) -> None:
        """The first of its tokens, or of its candidates', is there."""
        request.first_token_s = self._clock()
        self.queue.observe(request.admitted_s - request.accepted_s)
        self.prefill.observe(request.first_token_s - request.admitted_s)

    def last_token(self, request: LiveRequest) -> None:
        self.decode.observe(self._clock() - request.first_token_s)


@dataclass(slots=True)
class Totals:
    """What has been done since the engine started; forks and times are of requests that came to that point."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_candidate_forks: int = 0
    num_beam_forks: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)

    def begin(self, request: LiveRequest) -> None:
        """Its first token is there."""
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens or 0
        self.times.first_token(request)

    def end(self, request: LiveRequest) -> None:
        """It has said all it has to say."""
        self.times.last_token(request)
        num_forks = request.num_branches_created - 1
        if request.lockstep:
            self.num_beam_forks += num_forks
        else:
            self.num_candidate_forks += num_forks


def lasting(facts: ModelInfo, config: EngineConfig, capacity: KVCapacity, max_model_len: int) -> EngineHealth:
    """State what stays the same."""
    return EngineHealth(
        ready=True,
        model=config.served_model_name or facts.name,
        max_model_len=max_model_len,
        scheduling_policy=config.scheduling_policy,
        page_size=capacity.page_size,
        kv_bytes=capacity.kv_bytes,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        load_fraction=1.0,
    )


def with_traffic(health: EngineHealth, scheduler: Scheduler, totals: Totals) -> EngineHealth:
    """Add who runs and waits, and what has been done since the start."""
    return replace(
        health,
        num_running=len(scheduler.running),
        num_waiting=health.num_waiting + len(scheduler.waiting),
        num_waiting_tokens=health.num_waiting_tokens + scheduler.waiting.num_prompt_tokens,
        num_steps=scheduler.num_steps,
        num_preemptions=scheduler.num_preemptions,
        num_swap_preemptions=scheduler.swaps.num_preemptions,
        num_page_copies=scheduler.num_page_copies,
        num_prompt_tokens=totals.num_prompt_tokens,
        num_cached_tokens=totals.num_cached_tokens,
        num_output_tokens=totals.num_output_tokens,
        num_candidate_forks=totals.num_candidate_forks,
        num_beam_forks=totals.num_beam_forks,
        num_live_forks=scheduler.num_live_forks,
        queue=totals.times.queue.read(),
        prefill=totals.times.prefill.read(),
        decode=totals.times.decode.read(),
    )


def with_pages(health: EngineHealth, kv: KVCache, usage: PageUsage) -> EngineHealth:
    """Add what the pages are used for, on the device and on the host."""
    health = replace(
        health,
        num_pages=kv.pool.num_usable,
        num_pages_in_use=kv.pool.num_in_use,
        num_pages_idle=kv.pool.num_idle,
        num_pages_shared=usage.num_shared,
        num_evictions=kv.pool.num_evictions,
        waste_fraction=usage.waste_fraction,
    )
    if kv.host is None:
        return health
    return replace(
        health,
        num_host_pages=kv.host.pool.num_usable,
        num_host_pages_in_use=kv.host.pool.num_in_use,
        num_pages_swapped_out=kv.host.num_pages_out,
        num_pages_swapped_in=kv.host.num_pages_in,
    )


USAGE_INTERVAL_S = 1.0


def page_accounts(kv: KVCache, requests: Sequence[LiveRequest], page_bytes: int) -> PageAccounts:
    """Charge every page in use to the requests that hold it, and sum up by conversation and namespace.

    O(pages held).
    """
    charges = fractional_pages([request.tables() for request in requests])
    conversations: dict[str, float] = {}
    namespaces: dict[str, float] = {}
    for request, charge in zip(requests, charges, strict=True):
        conversations[request.conversation_id] = conversations.get(request.conversation_id, 0.0) + charge
        namespaces[request.namespace] = namespaces.get(request.namespace, 0.0) + charge
    return PageAccounts(
        num_pages_in_use=kv.pool.num_in_use,
        page_bytes=page_bytes,
        requests={request.request_id: charge for request, charge in zip(requests, charges, strict=True)},
        conversations=conversations,
        namespaces=namespaces,
    )


class UsageGauge:
    """Page usage for who asks often: counted anew at most once in USAGE_INTERVAL_S, since counting is O(pages held)."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._usage: PageUsage | None = None
        self._counted_at = 0.0

    def read(self) -> PageUsage:
        now = self._clock()
        if self._usage is None or now - self._counted_at >= USAGE_INTERVAL_S:
            self._usage = page_usage(self._scheduler.kv, self._scheduler.tables())
            self._counted_at = now
        return self._usage


MAX_SHARE = 0.01  # of the engine's time


class PageGauge:
    """All see the same look at the pages. A new one is taken once MAX_SHARE of the time since the last one covers it:
    where it takes 3 ms (100,000 pages), three times a second; of a small pool, whenever somebody asks."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._pages: PageStates | None = None
        self._stale_at_s = 0.0

    def read(self, namespace: str | None) -> PageMap:
        """Draw the pages as a namespace may see them, or (None) as they are."""
        now_s, kv = self._clock(), self._scheduler.kv
        pages = self._pages
        if pages is None or now_s >= self._stale_at_s:
            tables = [table for request in self._scheduler.running for table in request.tables()]
            pages = self._pages = page_states(kv, tables)
            then_s = self._clock()
            self._stale_at_s = then_s + (then_s - now_s) / MAX_SHARE
        per_cell, cells = page_cells(pages, namespace)
        return PageMap(page_size=kv.page_size, num_pages=len(pages.states), num_pages_per_cell=per_cell, cells=cells)


MAX_REMEMBERED_NAMESPACES = 1024


class Namespaces:
    """The latest MAX_REMEMBERED_NAMESPACES, oldest first."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def remember(self, namespace: str) -> None:
        self._names.pop(namespace, None)
        self._names[namespace] = None
        if len(self._names) > MAX_REMEMBERED_NAMESPACES:
            del self._names[next(iter(self._names))]


class EnginePages:
    """Answers out of the books of one engine: all are queries, but for `reset_prefix_cache`."""

    def __init__(
        self, scheduler: Scheduler, capacity: KVCapacity, namespaces: Namespaces, *, vocab_size: int, max_model_len: int
    ) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._gauge = PageGauge(scheduler)
        self._page_bytes = capacity.kv_bytes // capacity.num_pages
        self._namespaces = namespaces
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def stats(self) -> PageUsage:
        """Count what the pages are used for. O(pages held): for metrics and tests."""
        return page_usage(self._kv, self._scheduler.tables())

    def accounts(self) -> PageAccounts:
        """Charge the pages in use to requests, conversations and namespaces. O(pages held)."""
        return page_accounts(self._kv, self._scheduler.running, self._page_bytes)

    def num_cached(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        """Count what of each prompt is already computed, as `explain` would."""
        return [
            self._kv.count_cached_tokens(each.tokens, CacheScope(namespace, each.num_public_tokens)) for each in prompts
        ]

    def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        """Show every page as the namespace may see it, or an `operator` all as they are. A moment old at most."""
        return self._gauge.read(None if operator else namespace)

    def explain(
        self, prompt: Sequence[int], namespace: str = "", num_public_tokens: int = 0, *, operator: bool = False
    ) -> Explanation:
        """Say what of a prompt is already computed, and why not more.

        An `operator` may also learn what (recently seen) other namespaces have computed; a tenant must not.
        Raises: InvalidRequestError, ContextLengthError.
        """
        check_prompt(prompt, num_public_tokens, self._vocab_size, self._max_model_len)
        chain = self._kv.hash_pages(prompt, CacheScope(namespace, num_public_tokens))
        return self._kv.explain(chain, self._namespaces if operator else ())

    def num_held(self, request_id: str) -> int:
        """Count the distinct pages a request holds; 0 if it is unknown or waiting."""
        requests = (request for request in self._scheduler.requests() if request.request_id == request_id)
        return len({page for request in requests for table in request.tables() for page in table.pages()})

    def check(self) -> None:
        """Verify pages, tables and reference counts against each other. Raises: InvariantError."""
        tables = self._scheduler.tables()
        check_invariants(self._kv, tables, [request.host_pages for request in self._scheduler.requests()])
        check_tokens(self._kv, self._scheduler.running)

    def reset_prefix_cache(self) -> bool:
        """Forget all that finished requests left behind; refused (False) while requests run."""
        if self._scheduler.running:
            return False
        self._kv.reset_prefix_cache()
        return True
