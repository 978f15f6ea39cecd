"""Prometheus metrics of the gateway and the engine.

`Metrics` holds the gateway's own counters and translates `EngineHealth` at scrape time. `record_reply_metrics` counts
and times the events of a reply; `instrument_store` times the calls of a conversation store.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from chatcache.conversations.replies.events import ReplyDelta, ReplyDone, ReplyEvent, ReplyFinished, ReplyStarted
from chatcache.conversations.replies.service import Reply
from chatcache.conversations.store import ConversationStore, StoreUnavailableError
from chatcache.errors import ChatcacheError
from chatcache.gateway.tracing import Tracer
from chatcache.types.stats import DURATION_BOUNDS_S, Durations, EngineHealth

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_REASONS = 64
_LATENCY_S = DURATION_BOUNDS_S
_STORE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one application, in a registry of its own (a process may have several).

    `tracer`: set while spans are recorded.
    """

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Finished HTTP requests and responses.", ("route", "status"))
        self.finished = self._counter("candidates", "Finished candidates.", ("finish_reason",))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.", ("source",))
        self.generation_tokens = self._counter("generation_tokens", "Tokens returned to clients.")
        self.disconnects = self._counter("client_disconnects", "Requests aborted because their client left.")
        self.tokens_after_stop = self._counter("tokens_after_stop", "Tokens generated after a cancel.")
        self.snapshots = self._counter("ws_snapshots", "Snapshots sent in place of missed events.")
        self.resumed = self._counter("streams_resumed", "Resumed response streams.", ("transport",))
        self.taken_over = self._counter("responses_taken_over", "Responses taken over from gateways that ended.")
        self.duration = self._histogram(
            "request_duration_seconds", "Time from request to last byte.", _LATENCY_S, ("route",)
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds",
            "Time from acceptance to first token, by prefix cache outcome.",
            _LATENCY_S,
            ("cache",),
        )
        self.inter_token = UnlockedHistogram(
            "inter_token_latency_seconds", "Time between deltas of one request.", _INTER_TOKEN_S
        )
        self.registry.register(self.inter_token)
        self.stop_latency = self._histogram("stop_latency_seconds", "Time from cancel to receipt.", _LATENCY_S)
        self.sockets = self._gauge("ws_connections", "Open WebSockets.")
        self.streams = self._gauge("sse_streams", "Open SSE streams.")
        self.store_up = self._gauge("store_up", "1 if the last call of the conversation store succeeded.")
        self.store_failures = self._counter("store_failures", "Failed calls of the conversation store.")
        self.store_outages = self._counter("store_outages", "Outages of the conversation store.")
        self.store_seconds = self._histogram(
            "store_seconds", "Duration of conversation store calls.", _STORE_S, ("operation",)
        )
        self._refusals = self._counter("refusals", "Refused requests and frames, by error code.", ("reason",))
        self._reasons: set[str] = set()
        self._engine = _EngineCollector()
        self.registry.register(self._engine)

    def render(self, health: EngineHealth) -> bytes:
        """Return all metrics in the Prometheus text format."""
        self._engine.health = health
        return generate_latest(self.registry)

    def record_refusal(self, error: ChatcacheError) -> None:
        """Count an error response by its code; codes beyond `MAX_REASONS` are counted as "other"."""
        if error.code not in self._reasons and len(self._reasons) < MAX_REASONS:
            self._reasons.add(error.code)
        self._refusals.labels(reason=error.code if error.code in self._reasons else "other").inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"chatcache_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"chatcache_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"chatcache_{name}", text, labels, buckets=buckets, registry=self.registry)


class UnlockedHistogram(Collector):
    """Histogram without locks, for events of every token, recorded by one thread.

    The locks of `prometheus_client` would cost more than all other work per token.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = f"chatcache_{name}", text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        yield _histogram(self._name, self._text, self._bounds, self._counts, self._sum)


class _EngineCollector(Collector):
    """Translates `EngineHealth` into metrics when they are scraped."""

    def __init__(self) -> None:
        self.health = EngineHealth(ready=False)

    def collect(self) -> Iterator[Metric]:
        health = self.health
        yield GaugeMetricFamily("chatcache_engine_ready", "1 while the engine generates.", int(health.ready))
        yield GaugeMetricFamily("chatcache_requests_running", "Requests with pages.", health.num_running)
        yield GaugeMetricFamily("chatcache_requests_waiting", "Requests queued.", health.num_waiting)
        yield from _pages(health)
        yield CounterMetricFamily("chatcache_engine_steps", "Steps executed.", health.num_steps)
        yield CounterMetricFamily(
            "chatcache_engine_steps_ahead", "Steps launched before the previous one ended.", health.num_steps_ahead
        )
        swaps = health.num_swap_preemptions
        by_kind = {"recompute": health.num_preemptions - swaps, "swap": swaps}
        yield _labelled(CounterMetricFamily, "chatcache_preemptions", "Requests preempted.", "kind", by_kind)
        moved = {"out": health.num_pages_swapped_out, "in": health.num_pages_swapped_in}
        yield _labelled(
            CounterMetricFamily,
            "chatcache_kv_pages_swapped",
            "Pages swapped to and from host memory.",
            "direction",
            moved,
        )
        yield CounterMetricFamily("chatcache_self_checks", "Idle checks of all pages.", health.num_self_checks)
        yield CounterMetricFamily(
            "chatcache_broken_invariants", "Broken invariants found by them.", health.num_broken_invariants
        )
        yield CounterMetricFamily("chatcache_cow_copies", "Pages copied on write.", health.num_page_copies)
        yield CounterMetricFamily("chatcache_state_copies", "States copied for branches.", health.num_state_copies)
        yield CounterMetricFamily("chatcache_state_evictions", "Snapshots evicted.", health.num_state_evictions)
        yield CounterMetricFamily(
            "chatcache_prefix_lookup_tokens", "Prompt tokens looked up in the cache.", health.num_prompt_tokens
        )
        yield CounterMetricFamily(
            "chatcache_prefix_hit_tokens", "Prompt tokens found in the cache.", health.num_cached_tokens
        )
        yield CounterMetricFamily("chatcache_output_tokens", "Tokens generated.", health.num_output_tokens)
        yield CounterMetricFamily("chatcache_kv_evictions", "Cached pages evicted.", health.num_evictions)
        forks = {"n": health.num_candidate_forks, "beam": health.num_beam_forks, "branch": health.num_live_forks}
        yield _labelled(CounterMetricFamily, "chatcache_forks", "Forked branches.", "kind", forks)
        yield CounterMetricFamily("chatcache_engine_restarts", "Restarts of the engine process.", health.num_restarts)
        yield _durations("queue", "Time from acceptance to scheduling.", health.queue)
        yield _durations("prefill", "Time from scheduling to first token.", health.prefill)
        yield _durations("decode", "Time from first to last token.", health.decode)
        yield GaugeMetricFamily("chatcache_owed_seconds", "Time to compute the prompts that wait.", health.owed_s)
        yield from _workers(health)
        yield from _vllm(health)


def page_states(health: EngineHealth) -> dict[str, int]:
    """Count pages by state; the counts add up to the size of the pool.

    Several branches hold a `shared` page, one holds an `active` page.
    """
    num_shared = min(
        health.num_pages_shared, health.num_pages_in_use
    )  # the two counts are not read at the same instant
    return {
        "active": health.num_pages_in_use - num_shared,
        "shared": num_shared,
        "cached": health.num_pages_idle,
        "free": max(0, health.num_pages - health.num_pages_in_use - health.num_pages_idle),
    }


def state_counts(health: EngineHealth) -> dict[str, int]:
    """Count the states of recurrent layers by use; the counts add up to the number of states."""
    num_shared = min(health.num_states_shared, health.num_states_in_use)
    return {
        "active": health.num_states_in_use - num_shared,
        "shared": num_shared,
        "cached": health.num_states_idle,
        "free": health.num_states - health.num_states_in_use - health.num_states_idle,
    }


def _pages(health: EngineHealth) -> Iterator[Metric]:
    yield _labelled(GaugeMetricFamily, "chatcache_kv_pages", "KV pages by state.", "state", page_states(health))
    yield GaugeMetricFamily("chatcache_kv_bytes", "Bytes of the page pool.", health.kv_bytes)
    slots = msgspec.structs.asdict(health.slots)
    yield _labelled(GaugeMetricFamily, "chatcache_kv_slots", "Token slots of the page pool by use.", "state", slots)
    yield GaugeMetricFamily(
        "chatcache_kv_waste_ratio", "Share of token slots in held pages that hold no token.", health.slots.waste
    )
    num_held = health.num_host_pages_in_use
    host = {"active": num_held, "free": health.num_host_pages - num_held}
    yield _labelled(GaugeMetricFamily, "chatcache_kv_host_pages", "Host pages for swapping.", "state", host)
    states = state_counts(health)
    yield _labelled(GaugeMetricFamily, "chatcache_states", "States of recurrent layers by use.", "state", states)


def _vllm(health: EngineHealth) -> Iterator[Metric]:
    """Yield what routers in front of several servers read, under vLLM's names.

    Cached pages without a request do not count as used, because they are evicted when needed.
    Source: the model server protocol of the Gateway API inference extension, and vLLM's production stack.
    """
    used = health.num_pages_in_use / health.num_pages if health.num_pages else 0.0
    yield GaugeMetricFamily("vllm:num_requests_running", "Requests with pages.", health.num_running)
    yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests queued.", health.num_waiting)
    yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", used)
    yield GaugeMetricFamily("vllm:gpu_cache_usage_perc", "The same, under its former name.", used)
    yield CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens looked up.", health.num_prompt_tokens)
    yield CounterMetricFamily("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", health.num_cached_tokens)
    sizes = GaugeMetricFamily(
        "vllm:cache_config_info", "Tokens of a page and number of pages.", labels=("block_size", "num_gpu_blocks")
    )
    sizes.add_metric((str(health.page_size), str(health.num_pages)), 1)
    yield sizes


def _workers(health: EngineHealth) -> Iterator[Metric]:
    """Yield metrics by worker, without samples in a server that has its engine in a process of its own."""
    requests = CounterMetricFamily(
        "chatcache_worker_requests", "Requests sent to a worker.", labels=["worker", "reason"]
    )
    for worker in health.workers:
        for reason, number in worker.requests.items():
            requests.add_metric([worker.name, reason], number)
    yield requests
    for name, text, values in (
        (
            "prompt",
            "Prompt tokens of started requests.",
            {each.name: each.num_prompt_tokens for each in health.workers},
        ),
        ("predicted", "Prompt tokens believed to be cached.", {w.name: w.num_predicted_tokens for w in health.workers}),
        ("cached", "Prompt tokens that were cached.", {each.name: each.num_cached_tokens for each in health.workers}),
    ):
        yield _labelled(CounterMetricFamily, f"chatcache_worker_{name}_tokens", text, "worker", values)
    owed = {each.name: each.owed_s for each in health.workers}
    yield _labelled(
        GaugeMetricFamily,
        "chatcache_worker_owed_seconds",
        "Time to compute the prompts that wait there.",
        "worker",
        owed,
    )


def _durations(name: str, text: str, found: Durations) -> Metric:
    return _histogram(f"chatcache_{name}_seconds", text, DURATION_BOUNDS_S, found.counts, found.total_s)


def _histogram(name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return HistogramMetricFamily(name, text, list(zip(names, accumulate(counts), strict=True)), total)


def _labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def record_reply_metrics(reply: Reply, metrics: Metrics) -> AsyncIterator[ReplyEvent]:
    """Record metrics of a reply's events, and a span if there is a tracer, while passing them through."""
    events = _record_reply_metrics(reply, metrics)
    return events if metrics.tracer is None else metrics.tracer.trace(reply, events)


async def _record_reply_metrics(reply: Reply, metrics: Metrics) -> AsyncIterator[ReplyEvent]:
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
    """Classify the cached share of the prompt: "miss" for none, "hit" for at least half."""
    if started.num_cached_tokens == 0:
        return "miss"
    return "hit" if 2 * started.num_cached_tokens >= started.num_prompt_tokens else "partial"


def _count_tokens(metrics: Metrics, finished: ReplyFinished) -> None:
    metrics.prompt_tokens.labels(source="cached").inc(finished.num_cached_tokens)
    metrics.prompt_tokens.labels(source="computed").inc(finished.num_prompt_tokens - finished.num_cached_tokens)
    metrics.generation_tokens.inc(finished.num_output_tokens)


def instrument_store(store: ConversationStore, metrics: Metrics) -> ConversationStore:
    """Wrap a store so that its calls are timed and its outages counted."""
    return cast(ConversationStore, _InstrumentedStore(store, metrics))


class _InstrumentedStore:
    """Proxy of a conversation store that times the methods of the `ConversationStore` contract.

    Other attributes are those of the store itself.
    """

    def __init__(self, store: ConversationStore, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._is_up = True
        metrics.store_up.set(1)
        for name, call in vars(ConversationStore).items():
            if not name.startswith("_") and callable(call) and name != "close":
                setattr(self, name, self._timed(name, getattr(store, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _timed(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        duration = self._metrics.store_seconds.labels(operation=name)

        @wraps(call)
        async def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                result = await call(*args, **kwargs)
            except StoreUnavailableError:
                self._record_call(is_up=False)
                raise
            except Exception:
                self._record_call(is_up=True)
                raise
            finally:
                duration.observe(time.perf_counter() - started_s)
            self._record_call(is_up=True)
            return result

        return timed

    def _record_call(self, *, is_up: bool) -> None:
        if not is_up:
            self._metrics.store_failures.inc()
        if is_up != self._is_up:
            self._is_up = is_up
            self._metrics.store_up.set(int(is_up))
            if not is_up:
                self._metrics.store_outages.inc()
