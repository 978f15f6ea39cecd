"""Admission: whole requests only, in turn, and never twice the same work at once.

In turn means first come, first served within a priority; or, between namespaces, whoever was served least goes first.

Forking a request that still runs: what is computed of it is shared as it is, without a name being worked out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.kv_cache.prefix_match import PrefixMatch
from chatcache.scheduler.decode_batch import DecodeBatch
from chatcache.scheduler.fairness import VirtualTokenCounter
from chatcache.scheduler.request import Branch, LiveRequest


class LiveFork(NamedTuple):
    """The first `num_tokens` tokens of `branch` are computed and begin the prompt. `is_whole`: no more is possible."""

    branch: Branch
    num_tokens: int
    is_whole: bool


def find_fork(request: LiveRequest, running: Sequence[LiveRequest], steady: DecodeBatch) -> LiveFork | None:
    """Find the branch that `request.fork_of` hints at, or a sibling with more in common; None if there is none.

    Only when it first starts. The hint is about cost alone: a fork is taken for what its tokens are, never for what a
    client says they are.
    Which sibling carries a candidate is its strategy's affair, so the longest beginning decides.
    """
    point = request.fork_of
    if point is None or request.num_cached_tokens is not None or request.num_prompt_top is not None:
        return None
    same = (other for other in running if other.request_id == point.request_id)
    source = next((other for other in same if other.namespace == request.namespace), None)
    best: LiveFork | None = None
    for branch in source.branches.values() if source is not None else ():
        if branch.table is None:
            continue
        steady.flush(branch)
        longest = min(branch.table.num_tokens, request.num_prompt_tokens - 1)
        num_tokens = _num_common(branch.span(0, longest), request.prompt_bytes)
        better = best is None or (num_tokens, branch.id == point.index) > (best.num_tokens, False)
        if num_tokens and better:
            best = LiveFork(branch, num_tokens, num_tokens == longest)
    return best


def _num_common(head: bytes, tokens: bytes) -> int:
    """Count the tokens of `head` with which `tokens` begins."""
    if tokens.startswith(head):
        return len(head) // TOKEN_BYTES
    different = np.frombuffer(head, "<i4") != np.frombuffer(tokens[: len(head)], "<i4")
    return int(np.argmax(different))


MAX_EXAMINED = 32
PREEMPTIONS_BEFORE_PROTECTION = 3

_service_order = attrgetter("service_order")


class Start(NamedTuple):
    """A request that may start now, on what is computed of it: a fork of a running branch, or a match."""

    request: LiveRequest
    match: PrefixMatch
    fork: LiveFork | None


class WaitingQueue:
    """Requests without pages: new ones and preempted ones alike. One line, or with `counters` one per namespace."""

    def __init__(self, kv: KVCache, steady: DecodeBatch, counters: VirtualTokenCounter | None = None) -> None:
        self._kv = kv
        self._decode_batch = steady
        self._counters = counters
        self._queues: dict[str, list[LiveRequest]] = {}  # each in turn, none empty
        self._num_requests = 0
        self.num_prompt_tokens = 0
        self._sizes: dict[str, tuple[int, int]] = {}  # of each namespace that waits: requests, tokens of their prompts
        self.num_forks = 0  # requests that hope to fork a running one
        self._protected: set[LiveRequest] = set()  # living ones that were preempted often, running or not

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[LiveRequest]:
        for line in self._queues.values():
            yield from line

    def namespace_size(self, namespace: str) -> tuple[int, int]:
        """Count a namespace's requests, and the tokens of their prompts."""
        return self._sizes.get(namespace, (0, 0))

    def push(self, request: LiveRequest, *, is_new: bool = True) -> None:
        """Queue a request that is new, or was sent back: its namespace then does not count as having been away."""
        name = self._queue_name(request)
        if self._counters is not None and name not in self._queues and is_new:
            self._counters.on_namespace_queued(name, self._queues.keys())
        insort(self._queues.setdefault(name, []), request, key=_service_order)
        self._num_requests += 1
        self.num_prompt_tokens += len(request.prompt)
        num_requests, num_tokens = self.namespace_size(request.namespace)
        self._sizes[request.namespace] = num_requests + 1, num_tokens + len(request.prompt)
        self.num_forks += request.fork_of is not None
        if request.num_preemptions >= PREEMPTIONS_BEFORE_PROTECTION:
            self._protected.add(request)

    def forget(self, request: LiveRequest) -> None:
        """Note that a request has ended."""
        self._protected.discard(request)

    def remove(self, request: LiveRequest) -> None:
        name = self._queue_name(request)
        line = self._queues[name]
        line.remove(request)
        self._num_requests -= 1
        self.num_prompt_tokens -= len(request.prompt)
        num_requests, num_tokens = self.namespace_size(request.namespace)
        self._sizes[request.namespace] = num_requests - 1, num_tokens - len(request.prompt)
        if num_requests == 1:
            del self._sizes[request.namespace]
        self.num_forks -= request.fork_of is not None
        if not line:
            del self._queues[name]
            if self._counters is not None:
                self._counters.on_namespace_drained(name)

    def _queue_name(self, request: LiveRequest) -> str:
        return "" if self._counters is None else request.namespace

    def find_start(self, running: Sequence[LiveRequest], num_slots: int, *, forks: bool = False) -> Start | None:
        """Find the request whose turn it is and that may start now, with what is already computed of it. A query.

        A request that lacks room or slots holds up those behind it. One whose next page is just being computed by a
        running request (a twin) waits without holding up anybody: soon it will find that page.

        A running branch can be forked only while nothing of the step has been granted: ask for `forks` before, and
        for the others after.
        """
        for request in self._in_service_order():
            if request.max_branches > num_slots:
                return None
            start = self._resolve_start(request, running)
            if start.fork is None and self._awaits_running_prefill(start):
                continue
            if running and not (self._fits(start) and self._protects_preempted(request, running)):
                return None
            return start if forks == (start.fork is not None) else None
        return None

    def _in_service_order(self) -> Iterator[LiveRequest]:
        """Yield the requests to examine, MAX_EXAMINED at most: of each namespace the first, then the second ones, ...

        So a namespace whose requests are all twins cannot keep the others from being looked at.
        """
        counters = self._counters
        if counters is None:
            yield from islice(self, MAX_EXAMINED)
            return
        names = nsmallest(
            MAX_EXAMINED, self._queues, key=lambda name: (counters[name], self._queues[name][0].service_order)
        )
        lines = [self._queues[name] for name in names]
        place = num_examined = 0
        while lines and num_examined < MAX_EXAMINED:
            for line in lines:
                yield line[place]
            num_examined += len(lines)
            place += 1
            lines = [line for line in lines if len(line) > place]

    def _resolve_start(self, request: LiveRequest, running: Sequence[LiveRequest]) -> Start:
        fork = find_fork(request, running, self._decode_batch) if self._kv.enable_matching else None
        if fork is not None and fork.is_whole:
            return Start(request, self._kv.empty_match(request.scope), fork)
        match = self._match(request)
        return Start(request, match, fork if fork is not None and fork.num_tokens >= match.num_tokens else None)

    def _match(self, request: LiveRequest) -> PrefixMatch:
        if request.hash_chain is None:
            tokens, swapped = request.leader.tokens(), bool(request.host_pages)
            request.hash_chain = self._kv.hash_pages(tokens, request.scope, swapped=swapped)
        return self._kv.match(request.hash_chain, max_tokens=request.max_matched_tokens, host_pages=request.host_pages)

    def _awaits_running_prefill(self, start: Start) -> bool:
        request, num_matched = start.request, start.match.num_tokens // self._kv.page_size
        keys = request.hash_chain.keys if request.hash_chain else []
        if num_matched >= len(keys) or request.max_matched_tokens is not None:
            return False
        key = keys[num_matched]
        return any(key in other.pending_keys for other in self._decode_batch.unbatched_requests)

    def _fits(self, start: Start) -> bool:
        return self._num_pages_needed(start) <= self._kv.pool.num_free

    def _num_pages_needed(self, start: Start) -> int:
        """Count the free pages it takes to start: its own, those that running branches still lack for the tokens they
        have, and one for every branch to grow into."""
        request, match, steady, page_size = start.request, start.match, self._decode_batch, self._kv.page_size
        num_full = (match.num_tokens if start.fork is None else start.fork.num_tokens) // page_size
        num_here = num_full - sum(1 for entry, _ in match.loads if entry < num_full)
        lacking = sum(num_missing_pages(self._kv, other) for other in (request, *steady.unbatched_requests))
        growth = (
            request.max_branches + sum(other.num_unbatched for other in steady.unbatched_requests) + steady.num_branches
        )
        return lacking + steady.num_missing_pages() - num_here + match.num_idle + growth

    def _protects_preempted(self, request: LiveRequest, running: Sequence[LiveRequest]) -> bool:
        """Say whether no request that was preempted often would have to be once more.

        Whoever is preempted makes room for somebody before it. So one is safe if it and all before it fit at their
        worst, together; it does not start unless it is, and nobody starts who would change that.
        """
        if not self._protected:
            return True
        total = needed = 0
        for other in sorted((request, *running), key=_service_order):
            total += other.max_pages
            if other.num_preemptions >= PREEMPTIONS_BEFORE_PROTECTION:
                needed = total
        return needed <= self._kv.pool.num_usable


def num_missing_pages(kv: KVCache, request: LiveRequest) -> int:
    """Count the pages that the request's present tokens still need, what it has and what its branches share apart;
    those of steady branches are counted elsewhere."""
    total = 0
    for branch in request.branches.values():
        if branch.in_decode_batch:
            continue
        has = branch.num_shared_tokens // kv.page_size if branch.table is None else branch.table.num_pages
        total += max(kv.num_pages_for(branch.num_tokens) - has, 0)
    return total
