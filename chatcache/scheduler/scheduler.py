"""The two halves of the engine's loop around the runner: plan() before it, commit() and apply() after it. Where
the runner runs ahead, commit() and plan_ahead() may come before its results (see `ahead`).

Running requests are served in turn: by priority, then oldest first. When pages run out the last one in turn gives all
of its pages back and comes back later, with copies in host memory (swap) or by computing them again (recompute). The
first in turn is never preempted, so some request always gets on, and a request that could not run alone is refused
before it gets here. Hence no deadlock and no livelock; and nobody is preempted more than a few times (see `queue`).

How what is left of a step's budget is split over the branches of one request.

What a request that asks for it is told of its start: why no more of its prompt was found.

Planning behind a step whose results are still on the device: when, and why it comes to the same.

    launch n | note n as computed | plan n+1, its tokens NOT_YET | launch n+1 | collect n: tokens, ends, faults
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
from chatcache.scheduler.batch import Batch, Step
from chatcache.scheduler.branches import Branches, RowAllocator
from chatcache.scheduler.decode_batch import DecodeBatch
from chatcache.scheduler.fairness import VirtualTokenCounter
from chatcache.scheduler.preemption import CostModel, SwapTracker
from chatcache.scheduler.queue import Start, WaitingQueue
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.types.actions import BranchAction
from chatcache.types.events import Miss
from chatcache.types.plan import I32


def tokens_wanted(request: LiveRequest, budget: int, num_later: int) -> list[tuple[Branch, int]]:
    """Split what is left of the budget over the request's branches, the steady ones aside: they have theirs.

    A chunk of a long prompt leaves one token for every branch that comes after it (`num_later`). The last tokens of a
    lockstep request are computed in one step or not at all, so that its branches are drawn together.
    """
    branches = request.branches.values()
    gaps = [(b, b.num_tokens - b.table.num_tokens) for b in branches if b.table is not None and not b.is_steady]
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


def cache_miss_reason(kv: KVCache, start: Start) -> Miss | None:
    """Say why the first token that misses does, as the cache stands now. A query; O(prompt)."""
    request, fork = start.request, start.fork
    if fork is not None:  # of what a running branch has, which need not have a name yet
        at = fork.num_tokens
        if at >= request.num_prompt_tokens - 1:
            return None
        detail = f"the running branch that this prompt begins like goes on otherwise from token {at} on"
        return Miss(NEVER_COMPUTED, at, detail, kv.page_size)
    told = kv.explain(request.chain or kv.chain(request.prompt_bytes, request.scope))
    return Miss(told.reason, told.at_token, told.detail, kv.page_size) if told.reason else None


class AsyncScheduling:
    """Knows whether anything is to be decided before the next step."""

    def __init__(self, steady: DecodeBatch, waiting: WaitingQueue, slots: RowAllocator) -> None:
        self._steady = steady
        self._waiting = waiting
        self._slots = slots

    def is_clear(self, step: Step, running: Sequence[LiveRequest], budget: int) -> bool:
        """Say whether the step behind this one, the last planned, is the same whatever this one draws. A query.

        `budget`: tokens of a step.
        """
        if step.granted or step.moves_pages or self._steady.unsettled or self._slots.has_forks:
            return False
        return self._steady.can_follow() and not self._may_start(running, budget)

    def _may_start(self, running: Sequence[LiveRequest], budget: int) -> bool:
        if not len(self._waiting):
            return False
        ways = [False] * (budget > self._steady.num_branches) + [True] * (self._waiting.num_forks > 0)
        free = self._slots.num_unpromised
        return any(self._waiting.next(running, free, forks=forks) is not None for forks in ways)


class FairnessAccounting:
    """Charges requests for their prompts and steps for their draws."""

    def __init__(self, counters: VirtualTokenCounter) -> None:
        self._counters = counters
        self._steady: list[Branch] = []
        self._num_steady: Counter[str] = Counter()

    def charge_start(self, request: LiveRequest) -> None:
        """Charge for the part of the prompt that was not found, when a request first starts."""
        self._counters.charge_input(request.namespace, request.num_prompt_tokens - (request.num_cached_tokens or 0))

    def charge_step(self, step: Step) -> None:
        """Charge for every token that was drawn."""
        for branch, _, num_draws in step.drawn:
            self._counters.charge_output(branch.request.namespace, num_draws)
        if step.steady.branches is not self._steady:  # mostly the same list as in the step before
            self._steady = step.steady.branches
            self._num_steady = Counter(branch.request.namespace for branch in self._steady)
        for namespace, count in self._num_steady.items():
            self._counters.charge_output(namespace, count)


_turn = attrgetter("turn")


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
        self._meter = FairnessAccounting(counters) if counters is not None else None
        self._slots = RowAllocator(num_slots)
        self._steady = DecodeBatch(kv, num_slots)
        self.waiting = WaitingQueue(kv, self._steady, counters)
        self._ahead = AsyncScheduling(self._steady, self.waiting, self._slots)
        self._branches = Branches(kv, self._slots, self._steady)
        self._num_branches = 0  # live branches of the running requests
        self._started: set[LiveRequest] = set()  # in this plan

    def add(self, request: LiveRequest) -> None:
        self.waiting.push(request)

    # -- before the step ------------------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """Grant tokens, pages and slots for one step; None if nobody can run (then nobody is here at all)."""
        if self._tight:
            self._steady.leave_all()
        self._started.clear()
        if self.waiting.num_forks:
            self._start_forks()
        batch = Batch(self.max_num_batched_tokens, self._steady)
        self._steady.dismiss()
        turned = self._steady.turn_pages()
        unsettled = sorted(self._steady.unsettled, key=_turn)
        for request in unsettled:
            if request.num_waiting_branches:
                self._branches.rejoin(request)
        if not self._serve(unsettled, batch):
            self._admit(batch)
        if batch.empty:
            return None
        self.num_steps += 1
        moves = self.kv.host.moves() if self.kv.host is not None else ((), ())
        return batch.finish(self.num_steps, self._slots.take_forks(), turned, moves)

    def may_run_ahead(self, step: Step) -> bool:
        """Say whether a step can be planned behind this one, the last planned, before its results are here. A query."""
        return not self._tight and self._ahead.is_clear(step, self.running, self.max_num_batched_tokens)

    def plan_ahead(self) -> Step:
        """Plan the step behind one that `may_run_ahead` and was committed; its tokens are NOT_YET."""
        self.num_steps += 1
        turned = self._steady.turn_pages()
        return Batch(self.max_num_batched_tokens, self._steady).finish(self.num_steps, [], turned)

    @property
    def _tight(self) -> bool:
        """Say whether a step may be too short to serve all branches: then who gets what is decided one by one."""
        return self._num_branches > self.max_num_batched_tokens

    def _serve(self, requests: list[LiveRequest], batch: Batch) -> bool:
        """Grant to these running requests, oldest first; return whether one had to be preempted.

        Tokens of steady branches are not part of the batch's budget, so whoever comes later is one that is not steady.
        """
        num_preemptions = self.num_preemptions
        num_later = sum(request.num_unsteady for request in requests)
        for request in requests:
            if request not in self._steady.unsettled:
                continue  # preempted for the sake of an older one
            num_later -= request.num_unsteady
            while not self._grant(request, batch, num_later):
                victim = self.running[-1]
                if victim is self.running[0]:
                    raise InvariantError(f"request {request.request_id} does not fit an otherwise empty pool")
                num_later -= victim.num_unsteady if victim is not request else 0
                self._preempt(victim)
                if victim is request:
                    return True
        return self.num_preemptions > num_preemptions

    def _grant(self, request: LiveRequest, batch: Batch, num_later: int = 0) -> bool:
        """Grant the request its next tokens, all its branches or none; False if pages are lacking."""
        wants = tokens_wanted(request, batch.budget, num_later)
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

    def _admit(self, batch: Batch) -> None:
        while batch.budget > 0 and len(self.waiting):
            start = self.waiting.next(self.running, self._slots.num_unpromised)
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
        while (start := self.waiting.next(self.running, self._slots.num_unpromised, forks=True)) is not None:
            self._start(start)

    def _start(self, start: Start) -> None:
        request, match, fork = start
        if request.explain and request.num_cached_tokens is None:
            request.miss = cache_miss_reason(self.kv, start)
        self.waiting.remove(request)
        self._started.add(request)
        request.admitted_s = request.admitted_s or time.perf_counter()
        self.swaps.start(request)
        self._steady.unsettled.add(request)
        insort(self.running, request, key=_turn)
        self._slots.promised += request.max_branches
        self._num_branches += len(request.branches)
        if fork is not None:
            self.num_live_forks += 1
            self._branches.start_as_fork(request.leader, fork.branch, fork.num_tokens)
        else:
            self._branches.start(request.leader, match)
        request.num_waiting_branches = len(request.branches) - 1
        if request.num_waiting_branches:
            self._branches.rejoin(request)  # those whose partner needs nothing computed for it
        num_matched = match.num_tokens // self.kv.page_size
        request.in_flight = frozenset(request.chain.keys[num_matched:] if request.chain else ())
        request.chain = None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = match.num_tokens if fork is None else fork.num_tokens
            if self._meter is not None:
                self._meter.charge_start(request)

    def _stop(self, request: LiveRequest) -> None:
        """Take the request out of the running; its branches have gone their way."""
        del self.running[bisect_left(self.running, request.turn, key=_turn)]
        self.swaps.stop(request)
        self._steady.unsettled.discard(request)
        self._slots.promised -= request.max_branches
        self._num_branches -= len(request.branches)
        request.in_flight = frozenset()

    def _is_running(self, request: LiveRequest) -> bool:
        place = bisect_left(self.running, request.turn, key=_turn)
        return place < len(self.running) and self.running[place] is request

    def _preempt(self, request: LiveRequest) -> None:
        """Take all pages from a request. One that was only just started has nothing to lose: that does not count."""
        if request not in self._started:
            for branch in request.branches.values():
                self._steady.leave(branch)
            self.swaps.keep(request)
            self.num_preemptions += 1
            request.num_preemptions += 1
        self._send_back(request)

    def _send_back(self, request: LiveRequest) -> None:
        self._branches.part(request)
        self._stop(request)
        self.waiting.push(request, is_new=False)

    # -- after the step -------------------------------------------------------------------------------------------

    def current(self, step: Step) -> Step:
        """Return the step planned last without the rows of branches that have gone since. A query."""
        rows = self._steady.kept(step.steady)
        return step if rows is None else step.keeping(rows)

    def commit(self, step: Step, faulty: Collection[LiveRequest] = ()) -> None:
        """Note that the `current` step was executed, or launched and `may_run_ahead`. Full pages become matchable now,
        those of `faulty` requests never."""
        for branch, tokens in step.granted:
            request, table = branch.request, branch.table
            request.num_computed_tokens += len(tokens) // TOKEN_BYTES
            if request in faulty or table is None:
                continue
            self.kv.commit(table, tokens)
            if request.in_flight and table.num_tokens == branch.num_tokens:
                request.in_flight = frozenset()
        self._steady.advance(step.steady)
        self.kv.settle()
        self.swaps.settle()
        if self._meter is not None:
            self._meter.charge_step(step)

    def apply(self, request: LiveRequest, actions: Sequence[BranchAction]) -> None:
        """Move the request's branches as its strategy decided.

        Raises: EngineError if the actions break the contract of `decode.actions`; the request must then be finished.
        """
        if self._branches.go_on(request, actions):
            return
        num_before = len(request.branches)
        try:
            self._branches.apply(request, actions)
        finally:
            self._num_branches += len(request.branches) - num_before
        if request.num_unsteady and not self._tight:
            self._branches.settle(request)
        if not request.num_unsteady:
            self._steady.unsettled.discard(request)

    def confirm(self, step: Step, drawn: I32) -> None:
        """Note what a step of steady rows drew, once all its branches have moved and another step runs behind it."""
        self._steady.confirm(step.plan.rows.slot, drawn)

    def finish(self, request: LiveRequest, *, forget: bool = False) -> int:
        """End a request, wherever it is; return how many pages nobody holds any more."""
        num_in_use = self.kv.pool.num_in_use
        for branch in request.branches.values():
            self._branches.close(branch, forget=forget)
        if self._is_running(request):
            self._stop(request)
        else:
            self.waiting.remove(request)
        self.swaps.drop(request)
        self.waiting.forget(request)
        return num_in_use - self.kv.pool.num_in_use

    def drop(self, request: LiveRequest, branch_id: int | None) -> int:
        """End one branch of a request that goes on, wherever it is; None: one that would have been born yet.

        Return how many pages nobody holds any more.
        """
        num_in_use = self.kv.pool.num_in_use
        is_running = self._is_running(request)
        if branch_id is not None:
            self._branches.drop(request, branch_id)
            self._num_branches -= is_running
            if not request.num_unsteady:
                self._steady.unsettled.discard(request)
        request.max_branches -= 1
        self._slots.promised -= is_running
        return num_in_use - self.kv.pool.num_in_use

    def abandon(self, *steps: Step) -> list[LiveRequest]:
        """Give up a step whose execution failed, and the one behind it; return the requests that fail with them.

        What the runner did of them is unknown. So their requests end, forgotten, and all others start over: their
        pages are intact, but their rows in the runner may lack changes that these steps carried.
        """
        requests = dict.fromkeys(request for step in steps for request in step.requests())
        failed = [request for request in requests if self._is_running(request)]
        for request in failed:
            self.finish(request, forget=True)
        self.start_over()
        return failed

    def start_over(self) -> None:
        """Send every running request back, for a step that was planned and not executed, or nobody knows how far."""
        for request in list(self.running):
            self._send_back(request)
        self.kv.abandon()

    # -- queries --------------------------------------------------------------------------------------------------

    def broken_when_idle(self) -> Iterator[str]:
        """Yield what is wrong, given that no request is here."""
        if self.running or len(self.waiting):
            yield f"{len(self.running)} requests run and {len(self.waiting)} wait though none is known"
        if self._slots.num_free != self._slots.num_slots or self._slots.promised:
            yield f"{self._slots.num_free} slots are free, {self._slots.promised} promised, of {self._slots.num_slots}"
        if self._num_branches or self._steady.num_branches or self._steady.unsettled:
            yield f"{self._num_branches} branches are counted, {self._steady.num_branches} of them steady"

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    def requests(self) -> Iterator[LiveRequest]:
        yield from self.running
        yield from self.waiting

    def tables(self) -> list[PageTable]:
        """List every open page table, up to date with what has been computed."""
        self._steady.flush_all()
        return [table for request in self.running for table in request.tables()]
