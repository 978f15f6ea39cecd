"""The waiting queue: which request starts next, and on which computed tokens.

Requests start in service order: by priority, then first come, first served; with fair scheduling, the namespace that
was served least goes first. A request starts as a whole, with rows for all its branches, on the longest computed prefix
of its prompt. The same prefix is not computed twice at once: a request whose next page is being computed by a running
request waits for that page. A request can also fork a running one, and share its pages before they have keys.

How often a request is preempted. Nothing is known about the length of an answer, so a request starts when its present
tokens fit, and requests are preempted when the running ones outgrow the pool (`preemption_key`):

1. The first running request in service order is never preempted. All others are, the last in service order first, but
   those preempted PREEMPTIONS_BEFORE_PROTECTION times (protected) only when no other is left.
2. A request that was preempted MAX_PREEMPTIONS times starts only if it precedes all running requests, and while it runs
   no request that precedes it starts.

Bound: no request is preempted more than MAX_PREEMPTIONS times. After so many it starts as the first running request, by
rule 2 it remains the first until it ends, and by rule 1 the first is not preempted. This assumes only that service
order is total and constant; it holds for priorities and fair scheduling, where later requests can precede earlier ones.

Candidates of one request do not need their pages together. When even the first running request alone outgrows the pool,
its last branches wait without pages until other branches of it have ended (`BranchManager.suspend_last`). Beams are
drawn together, so a beam search whose branches cannot fit the pool together is rejected.

Progress: each step computes tokens of the first running request, of which one branch fits an otherwise empty pool. With
the bound, a finite number of requests computes a finite number of tokens, so there is neither deadlock nor livelock. A
request waits forever only if requests that precede it arrive forever, which first come, first served excludes.

States of recurrent layers add nothing to this: there are as many rows as the pool of states can give to branches
(`StatePool.max_live`), a request starts only with rows for all its branches, and a branch without a row has no state.
Snapshots use what is left, and are evicted when a branch needs a state.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.pool import num_common_tokens
from chatcache.kv_cache.prefix_match import PrefixMatch
from chatcache.scheduler.branches import num_missing_pages
from chatcache.scheduler.decode_batch import DecodeBatch
from chatcache.scheduler.fairness import VirtualTokenCounter
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.scheduler.snapshots import max_start_tokens

MAX_EXAMINED = 32
"""How many waiting requests one search examines at most."""

PREEMPTIONS_BEFORE_PROTECTION = 3
"""After this many preemptions a request is preempted only when no other one is left, see `preemption_key`."""

MAX_PREEMPTIONS = 5
"""The most preemptions of one request: after them it starts only to run as the first one."""

_service_order = attrgetter("service_order")


class LiveFork(NamedTuple):
    """A running branch that a waiting request can fork.

    Its first `num_tokens` tokens are computed, and are the first tokens of the prompt. `is_whole`: the prompt cannot
    share more tokens with any branch.
    """

    branch: Branch
    num_tokens: int
    is_whole: bool


class Start(NamedTuple):
    """A request that can start now, on a fork of a running branch or on a cache match."""

    request: LiveRequest
    match: PrefixMatch
    fork: LiveFork | None

    @property
    def num_tokens(self) -> int:
        """The number of computed tokens to start on."""
        return self.match.num_tokens if self.fork is None else self.fork.num_tokens


class WaitingQueue:
    """All requests without pages, new and preempted.

    One queue, or with fair scheduling (`counters`) one per namespace. `num_prompt_tokens` counts the tokens of all
    waiting prompts.
    """

    def __init__(self, kv: KVCache, decode_batch: DecodeBatch, counters: VirtualTokenCounter | None = None) -> None:
        self._kv = kv
        self._decode_batch = decode_batch
        self._counters = counters
        self._queues: dict[str, list[LiveRequest]] = {}  # by namespace, or under ""; each in service order, none empty
        self._num_requests = 0
        self.num_prompt_tokens = 0
        self._sizes: dict[str, tuple[int, int]] = {}  # by namespace: waiting requests and their prompt tokens

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[LiveRequest]:
        for queue in self._queues.values():
            yield from queue

    def namespace_size(self, namespace: str) -> tuple[int, int]:
        """Return the number of a namespace's waiting requests and of their prompt tokens."""
        return self._sizes.get(namespace, (0, 0))

    def push(self, request: LiveRequest, *, is_new: bool = True) -> None:
        """Queue a request.

        `is_new=False` for a preempted request, whose namespace was never without requests.
        """
        name = self._queue_name(request)
        if self._counters is not None and name not in self._queues and is_new:
            self._counters.on_namespace_queued(name, self._queues.keys())
        insort(self._queues.setdefault(name, []), request, key=_service_order)
        self._count(request, 1)

    def remove(self, request: LiveRequest) -> None:
        name = self._queue_name(request)
        queue = self._queues[name]
        queue.remove(request)
        self._count(request, -1)
        if not queue:
            del self._queues[name]
            if self._counters is not None:
                self._counters.on_namespace_drained(name)

    def _count(self, request: LiveRequest, change: int) -> None:
        self._num_requests += change
        self.num_prompt_tokens += change * len(request.prompt)
        num_requests, num_tokens = self._sizes.pop(request.namespace, (0, 0))
        if num_requests + change:
            self._sizes[request.namespace] = num_requests + change, num_tokens + change * len(request.prompt)

    def _queue_name(self, request: LiveRequest) -> str:
        return "" if self._counters is None else request.namespace

    def find_start(self, running: Sequence[LiveRequest], num_slots: int, max_tokens: int | None = None) -> Start | None:
        """Find the next request in service order, if it can start now. A query.

        A request for which too few pages or rows are free blocks all requests after it. Two kinds are skipped without
        blocking others: a request whose next page is being computed by a running request, as it will soon find that
        page, and a request that must not start now so that no request is preempted more than MAX_PREEMPTIONS times.
        With `max_tokens`, requests that have more tokens to compute are skipped, too.
        """
        for request in self._in_service_order():
            if running and max(request, running[0], key=_service_order).num_preemptions >= MAX_PREEMPTIONS:
                continue
            if request.max_branches > num_slots:
                return None
            start = self._resolve_start(request, running)
            if start.fork is None and self._awaits_running_prefill(start):
                continue
            if max_tokens is not None and request.leader.num_tokens - start.num_tokens > max_tokens:
                continue
            if running and self._num_pages_needed(start) > self._kv.pool.num_free:
                return None
            return start
        return None

    def _in_service_order(self) -> Iterator[LiveRequest]:
        """Yield the requests to examine: the first of each namespace, the second of each, etc.

        So the requests of a namespace that all wait for a running prefill do not hide those of other namespaces. At
        most about MAX_EXAMINED requests.
        """
        counters = self._counters
        if counters is None:
            yield from islice(self, MAX_EXAMINED)
            return
        names = nsmallest(
            MAX_EXAMINED, self._queues, key=lambda name: (counters[name], self._queues[name][0].service_order)
        )
        queues = [self._queues[name] for name in names]
        index = num_examined = 0
        while queues and num_examined < MAX_EXAMINED:
            for queue in queues:
                yield queue[index]
            num_examined += len(queues)
            index += 1
            queues = [queue for queue in queues if len(queue) > index]

    def _resolve_start(self, request: LiveRequest, running: Sequence[LiveRequest]) -> Start:
        """Find the computed tokens to start on: the longer of a running fork and a cache match."""
        fork = find_fork(request, running, self._decode_batch) if self._kv.enable_prefix_caching else None
        if fork is not None and fork.branch.table is not None and self._kv.states is not None:
            num_tokens = self._kv.num_fork_tokens(fork.branch.table, fork.num_tokens)
            is_whole = fork.is_whole and num_tokens == fork.num_tokens
            fork = LiveFork(fork.branch, num_tokens, is_whole) if num_tokens else None
        if fork is not None and fork.is_whole:
            return Start(request, self._kv.empty_match(request.scope), fork)
        match = self._match(request)
        return Start(request, match, fork if fork is not None and fork.num_tokens >= match.num_tokens else None)

    def _match(self, request: LiveRequest) -> PrefixMatch:
        if request.hash_chain is None:
            tokens, swapped = request.leader.tokens(), bool(request.host_pages)
            request.hash_chain = self._kv.hash_pages(tokens, request.scope, swapped=swapped)
        max_tokens = request.max_matched_tokens
        if self._kv.states is not None and max_tokens is None:
            max_tokens = max_start_tokens(request.leader)
        return self._kv.match(request.hash_chain, max_tokens=max_tokens, host_pages=request.host_pages)

    def _awaits_running_prefill(self, start: Start) -> bool:
        """Return whether a running request is computing the first page that this request misses."""
        request, num_matched = start.request, start.match.num_tokens // self._kv.page_size
        keys = request.hash_chain.keys if request.hash_chain else []
        if num_matched >= len(keys) or request.max_matched_tokens is not None:
            return False
        key = keys[num_matched]
        return any(key in other.pending_keys for other in self._decode_batch.unbatched_requests)

    def _num_pages_needed(self, start: Start) -> int:
        """Count the free pages needed to start a request without preempting another soon.

        These are the pages for its own tokens, those kept free for the running branches, and one page per branch for
        later tokens. Of candidates that do not fit the pool together, the first counts.
        """
        request, match, page_size = start.request, start.match, self._kv.page_size
        num_full = start.num_tokens // page_size
        num_here = num_full - sum(1 for entry, _ in match.loads if entry < num_full)
        own = sum(num_missing_pages(self._kv, branch) for branch in request.branches.values()) + request.max_branches
        if own > self._kv.pool.num_usable and not request.lockstep:
            own = num_missing_pages(self._kv, request.leader) + 1
        return own + self.num_pages_kept_free(request) - num_here + match.num_idle

    def num_pages_kept_free(self, request: LiveRequest | None = None) -> int:
        """Count the free pages that admission keeps for running branches. A query.

        These are the pages that they still need for the tokens they have, and one page per branch for later tokens.
        Waiting branches of running requests count if their request precedes `request`, or if that is None.
        """
        batch = self._decode_batch
        running = [
            branch
            for other in batch.unbatched_requests
            for branch in other.branches.values()
            if not branch.in_decode_batch
            and (branch.table is not None or request is None or other.service_order < request.service_order)
        ]
        missing = sum(num_missing_pages(self._kv, branch) for branch in running)
        growth = len(running) + batch.num_branches
        return missing + batch.num_missing_pages() + growth


def preemption_key(request: LiveRequest, first: LiveRequest) -> tuple[bool, bool, int]:
    """Sort key of running requests: the last one is preempted first, and `first`, the first in service order, never."""
    return request is not first, request.num_preemptions < PREEMPTIONS_BEFORE_PROTECTION, request.service_order


def find_fork(request: LiveRequest, running: Sequence[LiveRequest], decode_batch: DecodeBatch) -> LiveFork | None:
    """Find the branch of the hinted request that shares the most tokens with a prompt.

    The hint `request.fork_of` names a running request. It only says where to look: the tokens are compared, so a wrong
    hint costs time and changes no result. The branch with the longest common prefix is chosen, as
    the scheduler does not know which branch carries the hinted candidate. Returns None if there is none, or if the
    request was started before.
    """
    point = request.fork_of
    if point is None or request.num_cached_tokens is not None or request.max_matched_tokens is not None:
        return None
    same = (other for other in running if other.request_id == point.request_id)
    scope = request.namespace, request.cache_salt
    source = next((other for other in same if (other.namespace, other.cache_salt) == scope), None)
    best: LiveFork | None = None
    for branch in source.branches.values() if source is not None else ():
        if branch.table is None:
            continue
        decode_batch.flush(branch)
        longest = min(branch.table.num_tokens, request.num_prompt_tokens - 1)
        num_tokens = num_common_tokens(branch.span(0, longest), request.prompt_bytes)
        better = best is None or (num_tokens, branch.id == point.index) > (best.num_tokens, False)
        if num_tokens and better:
            best = LiveFork(branch, num_tokens, num_tokens == longest)
    return best
