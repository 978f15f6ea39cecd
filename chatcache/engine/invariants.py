"""The books are checked whenever the engine falls idle: then every page must be free, and look it.

Between two requests nobody should wait for that. So a check looks at MAX_PAGES pages of each tier, well under a
millisecond, and the next one at those that follow: a large pool is gone through over many idle moments. `strict` looks
at everything every time, and raises.

The proof that branches and page tables agree on what is in the pages. For tests and self-checks: O(tokens).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import InvariantError
from chatcache.kv_cache.stats import check_invariants
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Scheduler

MAX_PAGES = 512

log = logging.getLogger(__name__)


class InvariantChecker:
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

        Raises: InvariantError if `strict`.
        """
        if self._scheduler.num_steps == self._num_steps:
            return
        self._num_steps = self._scheduler.num_steps
        self.num_checks += 1
        if self._strict:
            check_invariants(self._kv, self._scheduler.tables(), [])
        for claim in self._broken():
            self.num_broken += 1
            log.error("a broken invariant: %s", claim)
            if self._strict:
                raise InvariantError(claim)

    def _broken(self) -> Iterator[str]:
        yield from self._scheduler.idle_violations()
        pools = {"page": self._kv.pool} | ({"host page": self._kv.host.pool} if self._kv.host is not None else {})
        for name, pool in pools.items():
            if pool.num_in_use:
                yield f"{pool.num_in_use} {name}s are held though nobody runs"
            yield from (f"{name}: {claim}" for claim in pool.idle_violations(self._next_page, MAX_PAGES))
        self._next_page = (self._next_page + MAX_PAGES) % max(pool.num_pages for pool in pools.values())


def check_tokens(kv: KVCache, running: Iterable[LiveRequest]) -> None:
    """Verify that every table of these requests, all of them up to date, knows its branch's tokens, in order.

    Raises: InvariantError naming the first branch of which that is not so.
    """
    for request in running:
        for branch in request.branches.values():
            if branch.table is not None and _known_tokens(kv, branch.table) != branch.span(0, branch.table.num_tokens):
                raise InvariantError(f"branch {branch.id} of {request.request_id}: its pages know other tokens")


def _known_tokens(kv: KVCache, table: PageTable) -> bytes | None:
    """Return the tokens that the names of the full pages stand for, and the tail's."""
    contents = [kv.pool.content(page) for page in table.pages()[: table.num_tokens // kv.page_size]]
    if any(content is None for content in contents):
        return None
    return b"".join([content.tokens for content in contents if content is not None]) + table.tail_tokens
