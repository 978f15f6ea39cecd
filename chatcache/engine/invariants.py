"""Consistency checks of an idle engine: no page is held, and the page pools are intact.

No request should wait for a check. Therefore one check covers MAX_PAGES_PER_CHECK pages of each pool, which takes well
under a millisecond, and the next check continues after them: a large pool is covered over many idle moments. With
`strict`, every check covers everything and raises on the first violation.

`check_page_tokens` also compares pages with the tokens of running requests. It costs O(tokens) and serves tests.
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

MAX_PAGES_PER_CHECK = 512

log = logging.getLogger(__name__)


class InvariantChecker:
    """Checks the idle engine and counts its checks and the violations that it found."""

    def __init__(self, kv: KVCache, scheduler: Scheduler, *, strict: bool = False) -> None:
        self.num_checks = 0
        self.num_broken = 0
        self._kv = kv
        self._scheduler = scheduler
        self._strict = strict
        self._num_steps = 0
        self._next_page = 1

    def run_if_due(self) -> None:
        """Check the idle engine if it has run a step since the last check.

        Raises: InvariantError if `strict`.
        """
        if self._scheduler.num_steps == self._num_steps:
            return
        self._num_steps = self._scheduler.num_steps
        self.num_checks += 1
        if self._strict:
            check_invariants(self._kv, self._scheduler.tables(), [])
        for violation in self._violations():
            self.num_broken += 1
            log.error("broken invariant: %s", violation)
            if self._strict:
                raise InvariantError(violation)

    def _violations(self) -> Iterator[str]:
        yield from self._scheduler.idle_violations()
        if self._kv.states is not None:
            yield from self._kv.states.violations(())
            if self._kv.states.num_in_use:
                yield f"{self._kv.states.num_in_use} states are held although no request is running"
            if self._kv.states.host.num_in_use:
                yield f"{self._kv.states.host.num_in_use} host states are held although no request is running"
        pools = {"page": self._kv.pool} | ({"host page": self._kv.host.pool} if self._kv.host is not None else {})
        for name, pool in pools.items():
            if pool.num_in_use:
                yield f"{pool.num_in_use} {name}s are held although no request is running"
            yield from (
                f"{name}: {violation}" for violation in pool.idle_violations(self._next_page, MAX_PAGES_PER_CHECK)
            )
        self._next_page = (self._next_page + MAX_PAGES_PER_CHECK) % max(pool.num_pages for pool in pools.values())


def check_page_tokens(kv: KVCache, running: Iterable[LiveRequest]) -> None:
    """Verify that the pages of these requests hold the tokens of their branches, in order.

    All branches must be up to date. Raises: InvariantError naming the first branch whose pages differ.
    """
    for request in running:
        for branch in request.branches.values():
            if branch.table is not None and _page_tokens(kv, branch.table) != branch.span(0, branch.table.num_tokens):
                raise InvariantError(f"branch {branch.id} of {request.request_id}: its pages hold other tokens")


def _page_tokens(kv: KVCache, table: PageTable) -> bytes | None:
    """Return the tokens of the table's full pages and tail; None if a page has no hash."""
    contents = [kv.pool.content(page) for page in table.pages()[: table.num_tokens // kv.page_size]]
    if any(content is None for content in contents):
        return None
    return b"".join([content.tokens for content in contents if content is not None]) + table.tail_tokens
