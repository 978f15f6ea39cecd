"""Prometheus metrics: the gateway's own, and the engine's as of its last health."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chatcache.types import EngineHealth

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """One registry per application, so that several may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Finished HTTP requests and responses.", ("route", "status"))
        self.finished = self._counter("candidates", "Finished candidates.", ("finish_reason",))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests.", ("source",))
        self.generation_tokens = self._counter("generation_tokens", "Tokens returned to clients.")
        self.disconnects = self._counter("client_disconnects", "Requests aborted because their client left.")
        self.tokens_after_stop = self._counter("tokens_after_stop", "Tokens that came after a cancel.")
        self.duration = self._histogram("request_duration_seconds", "Request to last byte.", _LATENCY_S, ("route",))
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "Accepted to first token, by prefix cache outcome.", _LATENCY_S, ("cache",)
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between deltas of one request.", _INTER_TOKEN_S
        )
        self.stop_latency = self._histogram("stop_latency_seconds", "Cancel to its receipt.", _LATENCY_S)
        self.sockets = Gauge("chatcache_ws_connections", "Open WebSockets.", registry=self.registry)
        self._engine = _EngineCollector()
        self.registry.register(self._engine)

    def render(self, health: EngineHealth) -> bytes:
        """The exposition text."""
        self._engine.health = health
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"chatcache_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"chatcache_{name}", text, labels, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """Translates `EngineHealth`, the engine's own counters, at scrape time."""

    def __init__(self) -> None:
        self.health = EngineHealth(ready=False)

    def collect(self) -> Iterator[Metric]:
        health = self.health
        yield GaugeMetricFamily("chatcache_engine_ready", "1 while the engine generates.", int(health.ready))
        yield GaugeMetricFamily("chatcache_requests_running", "Requests with pages.", health.num_running)
        yield GaugeMetricFamily("chatcache_requests_waiting", "Requests queued.", health.num_waiting)
        pages = GaugeMetricFamily("chatcache_kv_pages", "KV pages by state.", labels=["state"])
        pages.add_metric(["active"], health.num_pages_in_use)
        pages.add_metric(["cached"], health.num_pages_idle)
        pages.add_metric(["free"], max(0, health.num_pages - health.num_pages_in_use - health.num_pages_idle))
        yield pages
        yield GaugeMetricFamily("chatcache_kv_bytes", "Bytes of the page pool.", health.kv_bytes)
        yield CounterMetricFamily("chatcache_engine_steps", "Steps executed.", health.num_steps)
        yield CounterMetricFamily("chatcache_preemptions", "Requests preempted.", health.num_preemptions)
        yield CounterMetricFamily("chatcache_cow_copies", "Pages copied on write.", health.num_page_copies)
        yield CounterMetricFamily("chatcache_prefix_lookup_tokens", "Prompt tokens sought.", health.num_prompt_tokens)
        yield CounterMetricFamily("chatcache_prefix_hit_tokens", "Prompt tokens found.", health.num_cached_tokens)
        yield CounterMetricFamily("chatcache_output_tokens", "Tokens generated.", health.num_output_tokens)
