"""Admission: first come, first served, whole requests only, and never twice the same work at once."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from chatcache.kv.cache import KVCache
from chatcache.kv.matching import PrefixMatch
from chatcache.sched.request import LiveRequest

MAX_EXAMINED = 32


class WaitingQueue:
    """Requests without pages, oldest first: new ones and preempted ones alike."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._requests: list[LiveRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._requests)

    def push(self, request: LiveRequest) -> None:
        insort(self._requests, request, key=lambda waiting: waiting.arrival)

    def remove(self, request: LiveRequest) -> None:
        self._requests.remove(request)

    def next(self, running: Sequence[LiveRequest], num_slots: int) -> tuple[LiveRequest, PrefixMatch] | None:
        """Find the oldest request that may start now, with what is already computed of it. A query.

        A request that lacks room or slots holds up those behind it. One whose next page is just being computed by a
        running request (a twin) waits without holding up anybody: soon it will find that page.
        """
        for request in self._requests[:MAX_EXAMINED]:
            if request.max_branches > num_slots:
                return None
            match = self._match(request)
            if self._is_twin(request, match, running):
                continue
            fits = not running or self._num_pages_wanted(request, match, running) <= self._kv.pool.num_free
            return (request, match) if fits else None
        return None

    def _match(self, request: LiveRequest) -> PrefixMatch:
        if request.chain is None:
            request.chain = self._kv.chain(request.leader.tokens(), request.scope)
        return self._kv.match(request.chain)

    def _is_twin(self, request: LiveRequest, match: PrefixMatch, running: Sequence[LiveRequest]) -> bool:
        keys, num_matched = request.chain.keys if request.chain else [], match.num_tokens // self._kv.page_size
        if num_matched >= len(keys):
            return False
        key = keys[num_matched]
        return any(key in other.in_flight for other in running if other.in_flight)

    def _num_pages_wanted(self, request: LiveRequest, match: PrefixMatch, running: Sequence[LiveRequest]) -> int:
        """Count the free pages it takes to start: its own, those that running requests still lack for the tokens they
        have, and one for every branch to grow into."""
        own = num_pages_lacking(self._kv, request) - match.num_tokens // self._kv.page_size
        lacking = sum(num_pages_lacking(self._kv, other) for other in running)
        growth = request.max_branches + sum(len(other.branches) for other in running)
        return own + match.num_idle + lacking + growth


def num_pages_lacking(kv: KVCache, request: LiveRequest) -> int:
    """Count the pages that the request's present tokens still need, what it has and what its branches share apart."""
    total = 0
    for branch in request.branches.values():
        has = branch.num_common // kv.page_size if branch.table is None else branch.table.num_pages
        total += max(kv.num_pages_for(branch.num_tokens) - has, 0)
    return total
