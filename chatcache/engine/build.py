"""The scheduler that a configuration and a runner ask for."""

from __future__ import annotations

from chatcache.config import EngineConfig
from chatcache.engine.admission import check_policies
from chatcache.kv.cache import KVCache
from chatcache.sched.cost import RECOMPUTE, CostModel
from chatcache.sched.fairness import FAIR, VirtualCounters
from chatcache.sched.plan import KVCapacity
from chatcache.sched.scheduler import Scheduler


def build_scheduler(config: EngineConfig, capacity: KVCapacity, digest: str) -> Scheduler:
    """Build the scheduler over empty pages. `digest`: the model's, which names its pages.

    Raises: InvalidRequest for a policy that does not exist, or that this runner cannot follow.
    """
    check_policies(config, capacity)
    num_host_pages = capacity.num_host_pages if config.preemption != RECOMPUTE else 0
    return Scheduler(
        KVCache(capacity.num_pages, capacity.page_size, digest, config.enable_prefix_caching, num_host_pages),
        num_slots=min(config.max_num_seqs, capacity.num_slots),
        max_num_batched_tokens=config.max_num_batched_tokens,
        cost=CostModel(config.preemption, capacity.swap_page_s),
        counters=VirtualCounters() if config.scheduling_policy == FAIR else None,
    )
