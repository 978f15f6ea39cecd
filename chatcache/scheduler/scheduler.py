"""The two halves of the engine's loop around the runner: plan() before it, commit() and apply() after it. Where
the runner runs ahead, commit() and plan_ahead() may come before its results (see `ahead`).

Running requests are served in turn: by priority, then oldest first. When pages run out the last one in turn gives all
of its pages back and comes back later, with copies in host memory (swap) or by computing them again (recompute). The
first in turn is never preempted, so some request always gets on, and a request that could not run alone is refused
before it gets here. Hence no deadlock and no livelock; and nobody is preempted more than a few times (see `queue`).

How what is left of a step's budget is split over the branches of one request.

What a request that asks for it is told of its start: why no more of its prompt was found.

Planning behind a step whose results are still on the device: when, and why it comes to the same.

    launch n | note n as computed | plan n+1, its tokens PENDING_TOKEN | launch n+1 | collect n: tokens, ends, faults
             | note n+1, whose tokens are known now | plan n+2 | ...

Which cells step n writes is known when it is launched, only what it draws is not. So n+1 can be planned if nothing in
it depends on what n draws: every branch is steady and draws one token, and nothing but that would be planned: no start,
no fork, no copy or swap, no preemption. Otherwise the results are collected first, and all is as without this.

A branch that ends, or is let go of, while its next row is on the device: the row computes one cell more, for nobody.
Its pages may be freed, matched, swapped out and given to others at once, since every later step runs behind that row;
and the row writes behind the tokens that the page's name tells of. Its result is dropped (`Scheduler.current`). A
branch that goes on with another token than was drawn (`Scheduler.confirm`) loses its row, too, and computes that token.

Nor is n followed blindly if it copies pages to or from the host: whoever left with those copies has no row in n, and
if n fails, they are nothing to come back to.

A page that n fills gets its name when n+1 is planned. Until n is collected nobody is matched, so nobody builds on it;
if n fails, or its numbers are not finite, the request is forgotten and the name with it. Between two calls of the
engine one step may be on the device, not noted yet: what tables and audits say then has been computed and seen.

A branch at the end of its page is given another before it is known whether it needs one: only from free pages, and if
it does not, they are back within the same call. A receipt (`num_pages_freed`) counts such a page, for it was held.

What each namespace was served in a step, put on its counter.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import InvariantError
from chatcache.kv_cache.prefix_match import NEVER_COMPUTED
from chatcache.scheduler.batch import BatchBuilder, Step
from chatcache.scheduler.branches import BranchManager, RowAllocator
from chatcache.scheduler.decode_batch import DecodeBatch
from chatcache.scheduler.fairness import VirtualTokenCounter
from chatcache.scheduler.preemption import CostModel, SwapTracker
from chatcache.scheduler.queue import Start, WaitingQueue
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.types.actions import BranchAction
from chatcache.types.events import CacheMiss
from chatcache.types.plan import I32


def split_token_budget(request: LiveRequest, budget: int, num_later: int) -> list[tuple[Branch, int]]:
    """Split what is left of the budget over the request's branches, the steady ones aside: they have theirs.

    A chunk of a long prompt leaves one token for every branch that comes after it (`num_later`). The last tokens of a
    lockstep request are computed in one step or not at all, so that its branches are drawn together.
    """
    branches = request.branches.values()
    gaps = [(b, b.num_tokens - b.table.num_tokens) for b in branches if b.table is not None and not b.in_decode_batch]
    if len(gaps) == 1 and gaps[0][1] == 1 and budget > 0 and not request.num_waiting_branches:
        return gaps
    if request.lockstep:
        num_wanted = sum(gap for _, gap in gaps)
        longest = budget if num_wanted == len(gaps) else budget - num_later
        if num_wanted > longest or request.num_waiting_branches:
            gaps = [(branch, gap - 1) for branch, gap in gaps]
    wants: list[tuple[Branch, int]] = []
    for branch, gap in gaps:
        num_tokens = min(gap, 1 if gap == 1 else max(budget - num_later, 1), budget)
        if num_tokens > 0:
            wants.append((branch, num_tokens))
            budget -= num_tokens
    return wants


def cache_miss_reason(kv: KVCache, start: Start) -> CacheMiss | None:
    """Say why the first token that misses does, as the cache stands now. A query; O(prompt)."""
    request, fork = start.request, start.fork
    if fork is not None:  # of what a running branch has, which need not have a name yet
        at = fork.num_tokens
        if at >= request.num_prompt_tokens - 1:
            return None
        detail = f"the running branch that this prompt begins like goes on otherwise from token {at} on"
        return CacheMiss(NEVER_COMPUTED, at, detail, kv.page_size)
    told = kv.explain(request.hash_chain or kv.hash_pages(request.prompt_bytes, request.scope))
    return CacheMiss(told.reason, told.at_token, told.detail, kv.page_size) if told.reason else None


class AsyncScheduling:
    """Knows whether anything is to be decided before the next step."""

    def __init__(self, steady: DecodeBatch, waiting: WaitingQueue, slots: RowAllocator) -> None:
        self._decode_batch = steady
        self._waiting = waiting
        self._rows = slots

    def can_schedule_ahead(self, step: Step, running: Sequence[LiveRequest], budget: int) -> bool:
        """Say whether the step behind this one, the last planned, is the same whatever this one draws. A query.

        `budget`: tokens of a step.
        """
        if step.granted or step.has_swaps or self._decode_batch.unbatched_requests or self._rows.has_forks:
            return False
        return self._decode_batch.can_schedule_ahead() and not self._can_start_request(running, budget)

    def _can_start_request(self, running: Sequence[LiveRequest], budget: int) -> bool:
        if not len(self._waiting):
            return False
        ways = [False] * (budget > self._decode_batch.num_branches) + [True] * (self._waiting.num_forks > 0)
        free = self._rows.num_unreserved
        return any(self._waiting.find_start(running, free, forks=forks) is not None for forks in ways)


class FairnessAccounting:
    """Charges requests for their prompts and steps for their draws."""

    def __init__(self, counters: VirtualTokenCounter) -> None:
        self._counters = counters
        self._decode_branches: list[Branch] = []
        self._num_decode_branches: Counter[str] = Counter()

    def charge_start(self, request: LiveRequest) -> None:
        """Charge for the part of the prompt that was not found, when a request first starts."""
        self._counters.charge_input(request.namespace, request.num_prompt_tokens - (request.num_cached_tokens or 0))

    def charge_step(self, step: Step) -> None:
        """Charge for every token that was drawn."""
        for branch, _, num_draws in step.drawn:
            self._counters.charge_output(branch.request.namespace, num_draws)
        if step.decode_rows.branches is not self._decode_branches:  # mostly the same list as in the step before
            self._decode_branches = step.decode_rows.branches
            self._num_decode_branches = Counter(branch.request.namespace for branch in self._decode_branches)
        for namespace, count in self._num_decode_branches.items():
            self._counters.charge_output(namespace, count)


_service_order = attrgetter("service_order")


class Scheduler:
    """Decides over one KV cache and `num_slots` page-table rows of the runner. Single-threaded."""

    def __init__(
        self,
        kv: KVCache,
        *,
        num_slots: int,
        max_num_batched_tokens: int,
        cost: CostModel | None = None,
        counters: VirtualTokenCounter | None = None,
    ) -> None:
        self.kv = kv
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_page_copies = 0
        self.num_live_forks = 0  # requests that began with what a running branch had, forked off it
        self.running: list[LiveRequest] = []  # oldest first
        self.swaps = SwapTracker(kv, cost or CostModel())
        self._fairness = FairnessAccounting(counters) if counters is not None else None
        self._rows = RowAllocator(num_slots)
        self._decode_batch = DecodeBatch(kv, num_slots)
        self.waiting = WaitingQueue(kv, self._decode_batch, counters)
        self._async_scheduling = AsyncScheduling(self._decode_batch, self.waiting, self._rows)
        self._branches = BranchManager(kv, self._rows, self._decode_batch)
        self._num_branches = 0  # live branches of the running requests
        self._started: set[LiveRequest] = set()  # in this plan

    def add(self, request: LiveRequest) -> None:
        self.waiting.push(request)

    # -- before the step ------------------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """Grant tokens, pages and slots for one step; None if nobody can run (then nobody is here at all)."""
        if self._is_budget_tight:
            self._decode_batch.remove_all()
        self._started.clear()
        if self.waiting.num_forks:
            self._start_forks()
        batch = BatchBuilder(self.max_num_batched_tokens, self._decode_batch)
        self._decode_batch.remove_ineligible()
        turned = self._decode_batch.advance_pages()
        unsettled = sorted(self._decode_batch.unbatched_requests, key=_service_order)
        for request in unsettled:
            if request.num_waiting_branches:
                self._branches.reattach(request)
        if not self._grant_running(unsettled, batch):
            self._admit(batch)
        if batch.is_empty:
            return None
        self.num_steps += 1
        moves = self.kv.host.pending_copies() if self.kv.host is not None else ((), ())
        return batch.build(self.num_steps, self._rows.pop_forks(), turned, moves)

    def can_schedule_ahead(self, step: Step) -> bool:
        """Say whether a step can be planned behind this one, the last planned, before its results are here. A query."""
        return not self._is_budget_tight and self._async_scheduling.can_schedule_ahead(
            step, self.running, self.max_num_batched_tokens
        )

    def plan_ahead(self) -> Step:
        """Plan the step behind one that `may_run_ahead` and was committed; its tokens are PENDING_TOKEN."""
        self.num_steps += 1
        turned = self._decode_batch.advance_pages()
        return BatchBuilder(self.max_num_batched_tokens, self._decode_batch).build(self.num_steps, [], turned)

    @property
    def _is_budget_tight(self) -> bool:
        """Say whether a step may be too short to serve all branches: then who gets what is decided one by one."""
        return self._num_branches > self.max_num_batched_tokens

    def _grant_running(self, requests: list[LiveRequest], batch: BatchBuilder) -> bool:
        """Grant to these running requests, oldest first; return whether one had to be preempted.

        Tokens of steady branches are not part of the batch's budget, so whoever comes later is one that is not steady.
        """
        num_preemptions = self.num_preemptions
        num_later = sum(request.num_unbatched for request in requests)
        for request in requests:
            if request not in self._decode_batch.unbatched_requests:
                continue  # preempted for the sake of an older one
            num_later -= request.num_unbatched
            while not self._grant(request, batch, num_later):
                victim = self.running[-1]
                if victim is self.running[0]:
                    raise InvariantError(f"request {request.request_id} does not fit an otherwise empty pool")
                num_later -= victim.num_unbatched if victim is not request else 0
                self._preempt(victim)
                if victim is request:
                    return True
        return self.num_preemptions > num_preemptions

    def _grant(self, request: LiveRequest, batch: BatchBuilder, num_later: int = 0) -> bool:
        """Grant the request its next tokens, all its branches or none; False if pages are lacking."""
        wants = split_token_budget(request, batch.budget, num_later)
        goals = [(t, t.num_tokens + n) for b, n in wants if (t := b.table) and t.num_tokens + n > t.num_reserved]
        if goals:
            copies = self.kv.reserve(goals)
            if copies is None:
                return False
            self.num_page_copies += len(copies)
            request.num_copied_pages += len(copies)
            batch.add_copies(copies)
        for branch, num_tokens in wants:
            batch.add(branch, num_tokens)
        return True

    def _admit(self, batch: BatchBuilder) -> None:
        while batch.budget > 0 and len(self.waiting):
            start = self.waiting.find_start(self.running, self._rows.num_unreserved)
            if start is None:
                return
            self._start(start)
            if not self._grant(start.request, batch):
                if len(self.running) == 1:
                    raise InvariantError(f"request {start.request.request_id} does not fit an empty pool")
                self._preempt(start.request)
                return

    def _start_forks(self) -> None:
        """Start those whose turn it is that fork a running branch, before anybody writes in this step."""
        while (start := self.waiting.find_start(self.running, self._rows.num_unreserved, forks=True)) is not None:
            self._start(start)

    def _start(self, start: Start) -> None:
        request, match, fork = start
        if request.explain and request.num_cached_tokens is None:
            request.miss = cache_miss_reason(self.kv, start)
        self.waiting.remove(request)
        self._started.add(request)
        request.admitted_s = request.admitted_s or time.perf_counter()
        self.swaps.on_start(request)
        self._decode_batch.unbatched_requests.add(request)
        insort(self.running, request, key=_service_order)
        self._rows.num_reserved += request.max_branches
        self._num_branches += len(request.branches)
        if fork is not None:
            self.num_live_forks += 1
            self._branches.start_as_fork(request.leader, fork.branch, fork.num_tokens)
        else:
            self._branches.start(request.leader, match)
        request.num_waiting_branches = len(request.branches) - 1
        if request.num_waiting_branches:
            self._branches.reattach(request)  # those whose partner needs nothing computed for it
        num_matched = match.num_tokens // self.kv.page_size
        request.pending_keys = frozenset(request.hash_chain.keys[num_matched:] if request.hash_chain else ())
        request.hash_chain = None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens if fork is None else fork.num_tokens
            if self._fairness is not None:
                self._fairness.charge_start(request)

    def _stop(self, request: LiveRequest) -> None:
        """Take the request out of the running; its branches have gone their way."""
        del self.running[bisect_left(self.running, request.service_order, key=_service_order)]
        self.swaps.on_stop(request)
        self._decode_batch.unbatched_requests.discard(request)
        self._rows.num_reserved -= request.max_branches
        self._num_branches -= len(request.branches)
        request.pending_keys = frozenset()

    def _is_running(self, request: LiveRequest) -> bool:
        place = bisect_left(self.running, request.service_order, key=_service_order)
        return place < len(self.running) and self.running[place] is request

    def _preempt(self, request: LiveRequest) -> None:
        """Take all pages from a request. One that was only just started has nothing to lose: that does not count."""
        if request not in self._started:
            for branch in request.branches.values():
                self._decode_batch.remove(branch)
            self.swaps.swap_out_if_cheaper(request)
            self.num_preemptions += 1
            request.num_preemptions += 1
        self._requeue(request)

    def _requeue(self, request: LiveRequest) -> None:
        self._branches.detach(request)
        self._stop(request)
        self.waiting.push(request, is_new=False)

    # -- after the step -------------------------------------------------------------------------------------------

    def drop_finished_rows(self, step: Step) -> Step:
        """Return the step planned last without the rows of branches that have gone since. A query."""
        rows = self._decode_batch.active_rows(step.decode_rows)
        return step if rows is None else step.select_decode_rows(rows)

    def commit(self, step: Step, faulty: Collection[LiveRequest] = ()) -> None:
        """Note that the `current` step was executed, or launched and `may_run_ahead`. Full pages become matchable now,
        those of `faulty` requests never."""
        for branch, tokens in step.granted:
            request, table = branch.request, branch.table
            request.num_computed_tokens += len(tokens) // TOKEN_BYTES
            if request in faulty or table is None:
                continue
            self.kv.commit(table, tokens)
            if request.pending_keys and table.num_tokens == branch.num_tokens:
                request.pending_keys = frozenset()
        self._decode_batch.advance(step.decode_rows)
        self.kv.complete_step()
        self.swaps.release_returned()
        if self._fairness is not None:
            self._fairness.charge_step(step)

    def apply(self, request: LiveRequest, actions: Sequence[BranchAction]) -> None:
        """Move the request's branches as its strategy decided.

        Raises: EngineError if the actions break the contract of `decode.actions`; the request must then be finished.
        """
        if self._branches.extend_in_batch(request, actions):
            return
        num_before = len(request.branches)
        try:
            self._branches.apply(request, actions)
        finally:
            self._num_branches += len(request.branches) - num_before
        if request.num_unbatched and not self._is_budget_tight:
            self._branches.move_to_decode_batch(request)
        if not request.num_unbatched:
            self._decode_batch.unbatched_requests.discard(request)

    def reconcile(self, step: Step, drawn: I32) -> None:
        """Note what a step of steady rows drew, once all its branches have moved and another step runs behind it."""
        self._decode_batch.reconcile(step.plan.rows.slot, drawn)

    def finish(self, request: LiveRequest, *, discard: bool = False) -> int:
        """End a request, wherever it is; return how many pages nobody holds any more."""
        num_in_use = self.kv.pool.num_in_use
        for branch in request.branches.values():
            self._branches.close(branch, discard=discard)
        if self._is_running(request):
            self._stop(request)
        else:
            self.waiting.remove(request)
        self.swaps.release(request)
        self.waiting.forget(request)
        return num_in_use - self.kv.pool.num_in_use

    def drop_branch(self, request: LiveRequest, branch_id: int | None) -> int:
        """End one branch of a request that goes on, wherever it is; None: one that would have been born yet.

        Return how many pages nobody holds any more.
        """
        num_in_use = self.kv.pool.num_in_use
        is_running = self._is_running(request)
        if branch_id is not None:
            self._branches.drop(request, branch_id)
            self._num_branches -= is_running
            if not request.num_unbatched:
                self._decode_batch.unbatched_requests.discard(request)
        request.max_branches -= 1
        self._rows.num_reserved -= is_running
        return num_in_use - self.kv.pool.num_in_use

    def abort_steps(self, *steps: Step) -> list[LiveRequest]:
        """Give up a step whose execution failed, and the one behind it; return the requests that fail with them.

        What the runner did of them is unknown. So their requests end, forgotten, and all others start over: their
        pages are intact, but their rows in the runner may lack changes that these steps carried.
        """
        requests = dict.fromkeys(request for step in steps for request in step.requests())
        failed = [request for request in requests if self._is_running(request)]
        for request in failed:
            self.finish(request, discard=True)
        self.restart_all()
        return failed

    def restart_all(self) -> None:
        """Send every running request back, for a step that was planned and not executed, or nobody knows how far."""
        for request in list(self.running):
            self._requeue(request)
        self.kv.abort_step()

    # -- queries --------------------------------------------------------------------------------------------------

    def idle_violations(self) -> Iterator[str]:
        """Yield what is wrong, given that no request is here."""
        if self.running or len(self.waiting):
            yield f"{len(self.running)} requests run and {len(self.waiting)} wait though none is known"
        if self._rows.num_free != self._rows.num_slots or self._rows.num_reserved:
            yield f"{self._rows.num_free} slots are free, {self._rows.num_reserved} promised, of {self._rows.num_slots}"
        if self._num_branches or self._decode_batch.num_branches or self._decode_batch.unbatched_requests:
            yield f"{self._num_branches} branches are counted, {self._decode_batch.num_branches} of them steady"

    @property
    def num_slots(self) -> int:
        return self._rows.num_slots

    def requests(self) -> Iterator[LiveRequest]:
        yield from self.running
        yield from self.waiting

    def tables(self) -> list[PageTable]:
        """List every open page table, up to date with what has been computed."""
        self._decode_batch.flush_all()
        return [table for request in self.running for table in request.tables()]
