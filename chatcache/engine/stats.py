"""Counters, duration histograms, page usage and prefix cache queries of the engine.

`EngineHealth` is assembled from them. Values that cost O(pages) are computed on request and cached, so that frequent
readers (the gateway's health checks, the web interface) do not slow the steps down.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from chatcache.config import EngineConfig
from chatcache.engine.admission import check_prompt
from chatcache.engine.invariants import check_page_tokens
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import CacheScope
from chatcache.kv_cache.states import ZERO_STATE
from chatcache.kv_cache.stats import (
    PageStates,
    PageUsage,
    check_invariants,
    fractional_pages,
    page_cells,
    page_states,
)
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.plan import KVCapacity
from chatcache.types.stats import (
    DURATION_BOUNDS_S,
    Durations,
    EngineHealth,
    ExplainQuery,
    Explanation,
    ModelInfo,
    PackedPrompt,
    PageAccounts,
    PageMap,
)

USAGE_INTERVAL_S = 1.0
MAX_TIME_SHARE = 0.01  # of the engine's time
MAX_REMEMBERED_NAMESPACES = 1024


class Histogram:
    """Counts of durations per bucket of DURATION_BOUNDS_S; the last bucket counts longer ones."""

    def __init__(self) -> None:
        self._counts = [0] * (len(DURATION_BOUNDS_S) + 1)
        self._total_s = 0.0

    def observe(self, duration_s: float) -> None:
        self._counts[bisect_left(DURATION_BOUNDS_S, duration_s)] += 1
        self._total_s += duration_s

    def read(self) -> Durations:
        return Durations(tuple(self._counts), self._total_s)


class RequestTimes:
    """Histograms of how long requests spend in each phase.

    Phases: `queue` (until admitted), `prefill` (until the first token), `decode` (until the last one).
    A request counts in a phase when it completes the phase.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.queue = Histogram()
        self.prefill = Histogram()
        self.decode = Histogram()

    def record_first_token(self, request: LiveRequest) -> None:
        """Record the time of a request's first token, of any of its candidates."""
        request.first_token_s = self._clock()
        self.queue.observe(request.admitted_s - request.accepted_s)
        self.prefill.observe(request.first_token_s - request.admitted_s)

    def record_last_token(self, request: LiveRequest) -> None:
        """Record the decode time of a request that generated its last token."""
        self.decode.observe(self._clock() - request.first_token_s)


@dataclass(slots=True)
class Totals:
    """Counters since the engine started.

    Forks count when a request finishes, times when a phase ends.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_candidate_forks: int = 0
    num_beam_forks: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)

    def record_start(self, request: LiveRequest) -> None:
        """Count the prompt of a request that generated its first token."""
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens or 0
        self.times.record_first_token(request)

    def record_finish(self, request: LiveRequest) -> None:
        """Count the forks of a request that generated its last token."""
        self.times.record_last_token(request)
        num_forks = request.num_branches_created - 1
        if request.lockstep:
            self.num_beam_forks += num_forks
        else:
            self.num_candidate_forks += num_forks


def static_health(
    model_info: ModelInfo, config: EngineConfig, capacity: KVCapacity, max_model_len: int
) -> EngineHealth:
    """Return the fields of the health report that do not change."""
    return EngineHealth(
        ready=True,
        model=config.served_model_name or model_info.name,
        max_model_len=max_model_len,
        scheduling_policy=config.scheduling_policy,
        page_size=capacity.page_size,
        kv_bytes=capacity.kv_bytes,
        state_bytes=capacity.state_bytes,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        load_fraction=1.0,
    )


def with_request_counts(health: EngineHealth, scheduler: Scheduler, totals: Totals) -> EngineHealth:
    """Add the numbers of running and waiting requests, the measured speed, and the counters since the start."""
    speed = scheduler.swaps.cost
    seconds_per_prompt_token = speed.prefill.seconds_per_token() or 0.0
    return replace(
        health,
        seconds_per_prompt_token=seconds_per_prompt_token,
        seconds_per_step=speed.decode.seconds_per_step() or 0.0,
        seconds_per_branch=speed.decode.seconds_per_branch() or 0.0,
        owed_s=seconds_per_prompt_token * (scheduler.num_owed_tokens + health.num_waiting_tokens),
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


def with_page_usage(health: EngineHealth, kv: KVCache, usage: PageUsage) -> EngineHealth:
    """Add the usage of the page pools on the device and on the host, and of the states."""
    health = replace(
        health,
        num_pages=kv.pool.num_usable,
        num_pages_in_use=kv.pool.num_in_use,
        num_pages_idle=kv.pool.num_idle,
        num_pages_shared=usage.num_shared,
        num_evictions=kv.pool.num_evictions,
        slots=usage.slots,
    )
    if (states := kv.states) is not None:
        health = replace(
            health,
            num_states=states.num_usable,
            num_states_in_use=states.num_in_use,
            num_states_shared=states.num_shared,
            num_states_idle=states.num_idle,
            num_state_copies=states.num_copies,
            num_state_evictions=states.num_evictions,
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


def page_accounts(kv: KVCache, requests: Sequence[LiveRequest], page_bytes: int) -> PageAccounts:
    """Divide the pages in use among the requests, conversations and namespaces that hold them.

    A page shared by n requests counts 1/n for each. O(pages held).
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
        states=_fractional_states(requests) if kv.states is not None else {},
    )


def _fractional_states(requests: Sequence[LiveRequest]) -> dict[str, float]:
    """Count the states of each request; one that n requests share counts 1/n for each."""
    held = {each.request_id: {table.state for table in each.tables()} - {ZERO_STATE} for each in requests}
    num_holders = Counter(state for states in held.values() for state in states)
    return {name: sum(1 / num_holders[state] for state in states) for name, states in held.items()}


class PageUsageCache:
    """Page usage, computed at most once in USAGE_INTERVAL_S while requests run, because it costs O(pages held).

    Without running requests it is computed at every read: an idle engine reports no newer health.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._usage: PageUsage | None = None
        self._counted_at = 0.0

    def read(self) -> PageUsage:
        """Return the usage, at most USAGE_INTERVAL_S old, and without running requests the present one."""
        now = self._clock()
        if self._usage is None or not self._scheduler.running or now - self._counted_at >= USAGE_INTERVAL_S:
            self._usage = self._scheduler.page_usage()
            self._counted_at = now
        return self._usage


MAX_TIME_SHARE = 0.01  # of the engine's time


class PageMapCache:
    """Page map shared by all readers, refreshed in at most MAX_TIME_SHARE of the engine's time.

    A map of 100,000 pages takes 3 ms and is refreshed three times a second; one of a small pool at every read.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._pages: PageStates | None = None
        self._stale_at_s = 0.0

    def read(self, namespace: str | None) -> PageMap:
        """Return the page map as the namespace may see it, or for None the states of all pages."""
        now_s, kv = self._clock(), self._scheduler.kv
        pages = self._pages
        if pages is None or now_s >= self._stale_at_s:
            tables = [table for request in self._scheduler.running for table in request.tables()]
            pages = self._pages = page_states(kv, tables)
            then_s = self._clock()
            self._stale_at_s = then_s + (then_s - now_s) / MAX_TIME_SHARE
        per_cell, cells = page_cells(pages, namespace)
        return PageMap(page_size=kv.page_size, num_pages=len(pages.states), num_pages_per_cell=per_cell, cells=cells)


class RecentNamespaces:
    """Namespaces of the latest requests, oldest first: an operator's `explain` searches them."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, namespace: str) -> None:
        self._names.pop(namespace, None)
        self._names[namespace] = None
        if len(self._names) > MAX_REMEMBERED_NAMESPACES:
            del self._names[next(iter(self._names))]


class CacheInspector:
    """Queries about one engine's page cache. Only `reset_prefix_cache` changes it."""

    def __init__(
        self,
        scheduler: Scheduler,
        capacity: KVCapacity,
        recent_namespaces: RecentNamespaces,
        *,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self._scheduler = scheduler
        self._kv = scheduler.kv
        self._page_map = PageMapCache(scheduler)
        self._page_bytes = capacity.kv_bytes // capacity.num_pages
        self._recent_namespaces = recent_namespaces
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def stats(self) -> PageUsage:
        """Return the page usage. O(pages held): for metrics and tests."""
        return self._scheduler.page_usage()

    def page_accounts(self) -> PageAccounts:
        """Divide the pages in use among requests, conversations and namespaces. O(pages held)."""
        return page_accounts(self._kv, self._scheduler.running, self._page_bytes)

    def count_cached_tokens(self, prompts: Sequence[PackedPrompt], namespace: str = "") -> list[int]:
        """Return the number of cached tokens of each prompt, as `explain` does."""
        return [
            self._kv.count_cached_tokens(each.tokens, CacheScope(namespace, each.num_public_tokens)) for each in prompts
        ]

    def page_map(self, namespace: str = "", *, operator: bool = False) -> PageMap:
        """Return the page map as the namespace, or an `operator`, may see it.

        It may be a moment old.
        """
        return self._page_map.read(None if operator else namespace)

    def explain(self, query: ExplainQuery) -> Explanation:
        """Report which pages of a prompt are cached, and why the first missing page is not.

        Raises: InvalidRequestError, ContextLengthError.
        """
        check_prompt(query.prompt, query.num_public_tokens, self._vocab_size, self._max_model_len)
        scope = CacheScope(query.namespace, query.num_public_tokens, query.cache_salt)
        chain = self._kv.hash_pages(query.prompt, scope)
        return self._kv.explain(chain, self._recent_namespaces if query.operator else ())

    def num_pages_held(self, request_id: str) -> int:
        """Return the number of distinct pages that a request holds; 0 if it is unknown or waiting."""
        requests = (request for request in self._scheduler.requests() if request.request_id == request_id)
        return len({page for request in requests for table in request.tables() for page in table.pages()})

    def check(self) -> None:
        """Verify pages, tables and reference counts against each other. Raises: InvariantError."""
        tables = self._scheduler.tables()
        check_invariants(self._kv, tables, [request.host_pages for request in self._scheduler.requests()])
        check_page_tokens(self._kv, self._scheduler.running)

    def reset_prefix_cache(self) -> bool:
        """Remove all cached pages; return False, without a change, while requests run."""
        if self._scheduler.running:
            return False
        self._kv.reset_prefix_cache()
        return True
