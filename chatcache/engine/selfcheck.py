"""The books are checked whenever the engine falls idle: then every page must be free, and look it.

Between two requests nobody should wait for that. So a check looks at MAX_PAGES pages of each tier, well under a
millisecond, and the next one at those that follow: a large pool is gone through over many idle moments. `strict` looks
at everything every time, and raises.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from chatcache.kv.audit import check
from chatcache.kv.cache import KVCache
from chatcache.kv.pool import BrokenInvariant
from chatcache.sched.scheduler import Scheduler

MAX_PAGES = 512

log = logging.getLogger(__name__)


class SelfCheck:
    """Counts its checks and the claims that did not hold."""

    def __init__(self, kv: KVCache, scheduler: Scheduler, *, strict: bool = False) -> None:
        self.num_checks = 0
        self.num_broken = 0
        self._kv = kv
        self._scheduler = scheduler
        self._strict = strict
        self._num_steps = 0
        self._next_page = 1

    def run_if_due(self) -> None:
        """Check the idle engine, unless it has not run since the last time.

        Raises: BrokenInvariant if `strict`.
        """
        if self._scheduler.num_steps == self._num_steps:
            return
        self._num_steps = self._scheduler.num_steps
        self.num_checks += 1
        if self._strict:
            check(self._kv, self._scheduler.tables(), [])
        for claim in self._broken():
            self.num_broken += 1
            log.error("a broken invariant: %s", claim)
            if self._strict:
                raise BrokenInvariant(claim)

    def _broken(self) -> Iterator[str]:
        yield from self._scheduler.broken_when_idle()
        pools = {"page": self._kv.pool} | ({"host page": self._kv.host.pool} if self._kv.host is not None else {})
        for name, pool in pools.items():
            if pool.num_in_use:
                yield f"{pool.num_in_use} {name}s are held though nobody runs"
            yield from (f"{name}: {claim}" for claim in pool.broken_when_idle(self._next_page, MAX_PAGES))
        self._next_page = (self._next_page + MAX_PAGES) % max(pool.num_pages for pool in pools.values())
