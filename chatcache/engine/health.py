"""What the engine tells of itself, put together from those who know."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from chatcache.config import EngineConfig
from chatcache.engine.durations import RequestTimes
from chatcache.kv.audit import PageUsage
from chatcache.kv.cache import KVCache
from chatcache.sched.plan import KVCapacity
from chatcache.sched.request import LiveRequest
from chatcache.sched.scheduler import Scheduler
from chatcache.types.health import EngineHealth
from chatcache.types.model import ModelFacts


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
        num_forks = request.num_branches_born - 1
        if request.lockstep:
            self.num_beam_forks += num_forks
        else:
            self.num_candidate_forks += num_forks


def lasting(facts: ModelFacts, config: EngineConfig, capacity: KVCapacity, max_model_len: int) -> EngineHealth:
    """State what stays the same."""
    return EngineHealth(
        ready=True,
        model=config.served_model_name or facts.name,
        max_model_len=max_model_len,
        scheduling_policy=config.scheduling_policy,
        page_size=capacity.page_size,
        kv_bytes=capacity.kv_bytes,
        max_num_waiting=config.max_num_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
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
