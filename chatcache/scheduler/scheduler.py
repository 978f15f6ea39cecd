"""The scheduler: `plan` before the runner executes a step; `commit` and `apply` after it.

Running requests are ordered by priority, then oldest first (service order). When pages run out, one of the last is
preempted: it releases all its pages and starts again later, with copies from host memory (swap) or by computing its
tokens again (recompute). The first request is never preempted, so at least one always makes progress, and a request
that does not fit an empty pool is rejected before it gets here. `queue` bounds how often one request is preempted, and
shows that there is neither deadlock nor livelock.

Asynchronous scheduling plans a step while the previous one is still on the device:

    launch n | commit n | plan n+1 with PENDING_TOKENs | launch n+1 | collect n: tokens, ends, faults
             | commit n+1, whose tokens are now known  | plan n+2 ...

Which cells step n writes is known at its launch; only the tokens it samples are not. So n+1 can be planned if nothing
in it depends on those tokens: every branch that n samples is in the decode batch and samples one token, and no start,
fork, swap or preemption would be planned. Prompts may be computed in both steps, but n must not complete one, as the
strategy then decides what follows. Nor may only some branches of a request be in the decode batch: the actions after n
could move another one there, while its last token is computed in n+1. Otherwise the engine collects step n first, and
plans as usual.

- A branch can end while its next row is on the device. The row then computes cells that are not used. The branch's
  pages can be freed, matched, swapped or allocated again at once, because all later steps execute after that row, and
  because the row writes after the tokens that the page's key stands for. The row's result is dropped
  (`drop_finished_rows`). A branch that continues with a token other than the sampled one also loses its row
  (`reconcile`), and computes its own token in a later step.
- No step is planned ahead of one that swaps pages: if that step failed, the requests that were swapped out would have
  lost the copies from which they are to start again.
- A page that step n fills is published when n+1 is planned. No request is matched before n is collected, so none can
  use the page before the result was seen. If n fails, or its logits are not finite, the page is unpublished.
- A branch at the end of its page gets the next page before it is known whether it needs one, from free pages only. If
  it ends with step n, the page is released in the same call of the engine, and counted in `num_pages_freed`.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import Protocol

import numpy as np

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import InvariantError
from chatcache.kv_cache.prefix_match import NEVER_COMPUTED
from chatcache.kv_cache.stats import PageUsage, page_usage
from chatcache.scheduler.batch import BatchBuilder, Step
from chatcache.scheduler.branches import BranchManager, RowAllocator
from chatcache.scheduler.decode_batch import DecodeBatch
from chatcache.scheduler.fairness import DecodeShares, VirtualTokenCounter
from chatcache.scheduler.preemption import CostModel, SwapTracker
from chatcache.scheduler.queue import Start, WaitingQueue, preemption_key
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.snapshots import add_divergence, cut_at_snapshots
from chatcache.scheduler.token_budget import (
    MAX_PARTIAL_PREFILLS,
    MIN_PREFILL_TOKENS,
    share_tokens,
    split_among_branches,
    token_demand,
)
from chatcache.types.actions import BranchAction, Extend, Reorder
from chatcache.types.events import CacheMiss
from chatcache.types.plan import I32

_service_order = attrgetter("service_order")


class Reservation(Protocol):
    """A further condition for running requests, besides free pages and rows: contiguous memory, a fixed batch.

    It lets studies compare other memory management under the same scheduling; servers have none.
    """

    def reserve(self, request: LiveRequest) -> bool:
        """Reserve for a request that is about to start; False if it must wait, and all after it.

        Invariant: a reservation that holds nothing accepts any request, otherwise no step could be planned.
        """
        ...

    def release(self, request: LiveRequest) -> None:
        """Release what a running request holds, because it ended or was preempted."""
        ...


class Scheduler:
    """Schedules requests over one KV cache and the runner's page-table rows. Single-threaded.

    `max_prefill_time_s`: limits the part of prompts in a step, see `token_budget`; 0 for no limit.
    `reservation`: a further condition for running requests, or None.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        num_slots: int,
        max_num_batched_tokens: int,
        max_prefill_time_s: float = 0.0,
        cost: CostModel | None = None,
        counters: VirtualTokenCounter | None = None,
        reservation: Reservation | None = None,
    ) -> None:
        self.kv = kv
        self._reservation = reservation
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_prefill_time_s = max_prefill_time_s
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_page_copies = 0
        self.num_live_forks = 0  # requests that started as a fork of a running branch
        self.running: list[LiveRequest] = []  # in service order
        self.swaps = SwapTracker(kv, cost or CostModel())
        self._counters = counters
        self._rows = RowAllocator(num_slots)
        self._decode_shares = None if counters is None else DecodeShares(self.swaps.cost.decode)
        choose_branches = None if self._decode_shares is None else self._decode_shares.choose
        self._decode_batch = DecodeBatch(kv, num_slots, choose_branches)
        self.waiting = WaitingQueue(kv, self._decode_batch, counters)
        self._branches = BranchManager(kv, self._rows, self._decode_batch)
        self._started: set[LiveRequest] = set()  # requests started in this plan

    def add(self, request: LiveRequest) -> None:
        self.waiting.push(request)

    # -- before the step ------------------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """Plan one step: grant tokens, pages and rows. None if there is no request."""
        if self._decode_batch.unbatched_requests and self._is_budget_tight:
            self._decode_batch.remove_all()
        self._started.clear()
        for request in list(self._decode_batch.unbatched_requests):
            if not request.num_attached:
                self._requeue(request)  # its branches with pages have ended
        if self.kv.states is not None:
            self._rewind_states()
        if len(self.waiting):
            self._admit()
        batch = BatchBuilder(self.kv, self.max_num_batched_tokens, self._decode_batch)
        self._decode_batch.remove_ineligible()
        self._decode_batch.copied_requests.clear()
        decode_updates = self._reserve_decode_batch(batch)
        if self._decode_batch.unbatched_requests:
            self._grant_running(batch)
        return self._build(batch, decode_updates)

    def _rewind_states(self) -> None:
        """Shorten the tables whose state has consumed a token that their branch did not continue with."""
        for request in self._decode_batch.unbatched_requests:
            for branch in request.branches.values():
                table = branch.table
                if table is not None and not branch.in_decode_batch and table.num_state_tokens != table.num_tokens:
                    self.kv.truncate(table, table.num_tokens)

    def can_schedule_ahead(self, step: Step) -> bool:
        """Return whether the next step is the same whatever tokens `step`, the last planned one, samples. A query."""
        if step.drawn or step.scored or step.pooled or step.has_swaps or self._rows.forks or self._is_budget_tight:
            return False
        unbatched = self._decode_batch.unbatched_requests
        if not self.running or any(r.num_waiting_branches or r.num_batched or token_demand(r)[0] for r in unbatched):
            return False  # a branch waits, decodes outside the batch, or may enter it with its siblings' tokens
        if not self._decode_batch.can_schedule_ahead():
            return False
        can_start = len(self.waiting) and self._decode_batch.num_branches < self.max_num_batched_tokens
        return not can_start or self.waiting.find_start(self.running, self._rows.num_unreserved) is None

    def plan_ahead(self) -> Step | None:
        """Plan the next step before the results of the last one; tokens sampled by that one are PENDING_TOKEN.

        Requires that `can_schedule_ahead` holds for the last step, and that it is committed. Prompts get tokens as far
        as pages are free. None if nothing can be computed.
        """
        batch = BatchBuilder(self.kv, self.max_num_batched_tokens, self._decode_batch)
        decode_updates = self._reserve_decode_batch(batch)
        requests = sorted(self._decode_batch.unbatched_requests, key=self._preemption_key)
        shares = self._share_prefill(requests)
        for request in requests:
            self._grant(request, batch, shares.get(request, 0))
        return self._build(batch, decode_updates)

    def _reserve_decode_batch(self, batch: BatchBuilder) -> I32:
        """Give each branch of the decode batch a cell for its next token, or remove it; return the table updates."""
        if self._decode_batch.has_unreserved:
            copies, updates = self._decode_batch.reserve()
            batch.add_copies(copies, updates)
            self.num_page_copies += len(copies)
        return self._decode_batch.advance_pages()

    def _build(self, batch: BatchBuilder, decode_updates: I32) -> Step | None:
        """Build the planned step; None if nothing is computed in it."""
        if not batch.granted and not self._decode_batch.num_branches:
            return None
        self.num_steps += 1
        forks = self._rows.pop_forks() if self._rows.forks else []
        return batch.build(self.num_steps, forks, decode_updates)

    @property
    def _is_budget_tight(self) -> bool:
        """Whether more branches have pages than a step has tokens, so that the decode batch cannot be used."""
        return self._rows.num_used > self.max_num_batched_tokens

    def _reattach(self, requests: list[LiveRequest]) -> None:
        """Start waiting branches of running requests, if their fork source is ready and enough pages are free."""
        requests = [request for request in requests if request.num_waiting_branches]
        if requests:
            num_free = self.kv.pool.num_free - self.waiting.num_pages_kept_free(self.running[0])
            for request in requests:
                num_free = self._branches.reattach(request, num_free)

    def _admit(self) -> None:
        """Start waiting requests while this step has tokens for them.

        Before any token is granted, because a running branch can be forked only then.
        """
        demands = [token_demand(request) for request in self._decode_batch.unbatched_requests]
        prompts = [num_tokens for _, num_tokens in demands if num_tokens]
        num_decoding = self._decode_batch.num_branches + sum(num_single for num_single, _ in demands)
        while num_decoding < self.max_num_batched_tokens:
            num_tokens = self._num_prefill_tokens(num_decoding, is_shared=bool(prompts))
            is_full = len(prompts) >= MAX_PARTIAL_PREFILLS and sum(prompts) >= num_tokens
            max_tokens = num_tokens if is_full else None
            start = self.waiting.find_start(self.running, self._rows.num_unreserved, max_tokens)
            if start is None or not (self._reservation is None or self._reservation.reserve(start.request)):
                return
            self._start(start)
            num_single, num_wanted = token_demand(start.request)
            num_decoding += num_single
            prompts += [num_wanted] if num_wanted else []

    def _num_prefill_tokens(self, num_decoding: int, *, is_shared: bool) -> int:
        """Return how many tokens of a step can go to prompts, while `num_decoding` branches decode."""
        num_tokens = max(self.max_num_batched_tokens - num_decoding, 1)
        if not self._max_prefill_time_s or not (num_decoding or is_shared):
            return num_tokens
        seconds_per_token = self.swaps.cost.prefill.seconds_per_token()
        if seconds_per_token is None:  # nothing was measured yet
            return num_tokens
        return min(num_tokens, max(int(self._max_prefill_time_s / seconds_per_token), MIN_PREFILL_TOKENS))

    def _share_prefill(self, requests: list[LiveRequest]) -> dict[LiveRequest, int]:
        """Return how many tokens each request gets in this step, besides those of branches that decode one."""
        demands = [token_demand(request) for request in requests]
        prompts = [(request, wanted) for request, (_, wanted) in zip(requests, demands, strict=True) if wanted]
        if not prompts:
            return {}
        num_decoding = self._decode_batch.num_branches + sum(num_single for num_single, _ in demands)
        num_tokens = self._num_prefill_tokens(num_decoding, is_shared=len(prompts) > 1)
        groups = [request.namespace if self._counters is not None else "" for request, _ in prompts]
        shares = share_tokens([wanted for _, wanted in prompts], num_tokens, groups)
        return {request: share for (request, _), share in zip(prompts, shares, strict=True)}

    def _grant_running(self, batch: BatchBuilder) -> None:
        """Grant tokens to the requests outside the decode batch, and preempt the last if pages run out."""
        requests = sorted(self._decode_batch.unbatched_requests, key=self._preemption_key)
        self._reattach(requests)
        shares = self._share_prefill(requests)
        for request in requests:
            while request in self._decode_batch.unbatched_requests:  # not preempted
                if self._grant(request, batch, shares.get(request, 0)):
                    break
                victim = max(self.running, key=self._preemption_key)
                if victim is not self.running[0]:
                    self._preempt(victim)
                elif victim.num_attached > 1 and not victim.lockstep:
                    self._branches.suspend_last(victim, keep_tail=victim not in self._decode_batch.copied_requests)
                else:
                    raise InvariantError(f"request {request.request_id} does not fit an otherwise empty pool")
                batch.drop_unused_copies()

    def _grant(self, request: LiveRequest, batch: BatchBuilder, num_prefill: int) -> bool:
        """Grant tokens to all branches of a request; False, and none, if too few pages are free."""
        wants = split_among_branches(request, batch.budget, num_prefill)
        if (states := self.kv.states) is not None:
            wants = cut_at_snapshots(states, wants, self.kv.page_size)
        goals = [(t, t.num_tokens + n) for b, n in wants if (t := b.table) and t.num_tokens + n > t.num_reserved]
        if goals:
            copies = self.kv.reserve(goals)
            if copies is None:
                return False
            self.num_page_copies += len(copies)
            request.num_copied_pages += len(copies)
            batch.add_copies(copies)
        if states is not None:
            states.reserve(branch.table for branch, _ in wants if branch.table is not None)
        for branch, num_tokens in wants:
            batch.add(branch, num_tokens)
        return True

    def _start(self, start: Start) -> None:
        """Move a request from the queue to the running ones, on its fork or match."""
        request, match, fork = start
        if request.explain and request.num_cached_tokens is None:
            request.miss = cache_miss_reason(self.kv, start)
        self.waiting.remove(request)
        self._started.add(request)
        if self._decode_shares is not None:
            self._decode_shares.record_start(request.namespace)
        request.admitted_s = request.admitted_s or time.perf_counter()
        if request.host_pages:
            self.swaps.returning.add(request)
        self._decode_batch.unbatched_requests.add(request)
        insort(self.running, request, key=_service_order)
        self._rows.num_reserved += request.max_branches
        if fork is not None:
            self.num_live_forks += 1
            self._branches.start_as_fork(request.leader, fork.branch, fork.num_tokens)
        else:
            self._branches.start(request.leader, match)
        request.num_waiting_branches = len(request.branches) - 1
        num_matched = match.num_tokens // self.kv.page_size
        request.pending_keys = frozenset(request.hash_chain.keys[num_matched:] if request.hash_chain else ())
        request.hash_chain = None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = start.num_tokens
            add_divergence(request, match, self.kv.page_size)
            if self._counters is not None:
                self._counters.charge_start(request)

    def _stop(self, request: LiveRequest) -> None:
        """Remove a request, whose branches were closed or detached, from the running ones."""
        del self.running[bisect_left(self.running, request.service_order, key=_service_order)]
        if self._reservation is not None:
            self._reservation.release(request)
        self.swaps.returning.discard(request)
        self._decode_batch.unbatched_requests.discard(request)
        self._rows.num_reserved -= request.max_branches
        request.pending_keys = frozenset()

    def _is_running(self, request: LiveRequest) -> bool:
        index = bisect_left(self.running, request.service_order, key=_service_order)
        return index < len(self.running) and self.running[index] is request

    def _preemption_key(self, request: LiveRequest) -> tuple[bool, bool, int]:
        return preemption_key(request, self.running[0])

    def _preempt(self, request: LiveRequest) -> None:
        """Preempt a request: release all its pages and put it back into the queue.

        A request that was started in the same plan has computed nothing yet; this is not counted as a preemption.
        """
        if request not in self._started:
            for branch in request.branches.values():
                self._decode_batch.remove(branch)
            if request in self._decode_batch.copied_requests:  # the contents of its last pages are not there yet
                for branch in request.branches.values():
                    self._branches.close(branch, keep_tail=False)
            else:
                self.swaps.swap_out_if_cheaper(request)
            self.num_preemptions += 1
            request.num_preemptions += 1
        self._requeue(request)

    def _requeue(self, request: LiveRequest) -> None:
        """Release everything that a running request holds, and put it back into the queue."""
        self._branches.detach(request)
        self._stop(request)
        self.waiting.push(request, is_new=False)

    # -- after the step -------------------------------------------------------------------------------------------

    def drop_finished_rows(self, step: Step) -> Step:
        """Return the last planned step without rows of branches that ended or left. A query."""
        rows = self._decode_batch.active_rows(step.decode_branches)
        if rows is None and all(branch.table is not None for branch, _ in step.granted):
            return step
        all_rows = np.arange(len(step.decode_branches), dtype=np.int32)
        return step.without_ended_rows(all_rows if rows is None else rows)

    def commit(self, step: Step, faulty: Collection[LiveRequest] = ()) -> None:
        """Record a step as executed, or as launched if the next one is planned ahead.

        `step` must have passed `drop_finished_rows`. Publishes the pages that became full, except those of `faulty`
        requests.
        """
        for branch, tokens in step.granted:
            request, table = branch.request, branch.table
            request.num_computed_tokens += len(tokens) // TOKEN_BYTES
            if request in faulty or table is None:
                continue
            self.kv.commit(table, tokens)
            if request.pending_keys and table.num_tokens == branch.num_tokens:
                request.pending_keys = frozenset()
        self._decode_batch.advance(step.decode_branches)
        for branch in step.saved:
            self._decode_batch.flush(branch)
        self.kv.complete_step()
        if self.swaps.returning:
            self.swaps.release_returned()
        if self._counters is not None:
            self._counters.charge_step(step)

    def apply(self, request: LiveRequest, actions: Sequence[BranchAction]) -> None:
        """Apply the actions of the request's decoding strategy to its branches.

        Raises: EngineError if the actions break the contract of `types.actions`; the request must then be finished.
        """
        if len(actions) == 1 and len(request.branches) == 1 and isinstance(action := actions[0], Extend):
            branch = request.branches.get(action.branch)
            if branch is not None and branch.in_decode_batch and self._decode_batch.extend(branch, action.token):
                return
        if len(actions) == 1 and isinstance(action := actions[0], Reorder):
            if request.num_unbatched:
                self._move_to_decode_batch(request)
            if self._branches.reorder(request, action):
                return
            actions = action.as_actions()
        self._branches.apply(request, actions)
        self._move_to_decode_batch(request)

    def _move_to_decode_batch(self, request: LiveRequest) -> None:
        """Move the request's eligible branches into the decode batch."""
        if request.num_unbatched and not self._is_budget_tight:
            for branch in request.branches.values():
                if not branch.in_decode_batch:
                    self._decode_batch.add_if_eligible(branch)
        if not request.num_unbatched:
            self._decode_batch.unbatched_requests.discard(request)

    def record_drawn(self, step: Step, drawn: I32) -> None:
        """Record what a step sampled, before its tokens are applied, when the next step is already launched."""
        if self.kv.states is not None:
            self._decode_batch.record_drawn(step.plan.rows.slot[step.plan.draws.row], drawn)

    def reconcile(self, step: Step, drawn: I32) -> None:
        """Compare sampled with applied tokens, when the next step is already launched.

        Branches that continue with another token leave the decode batch, and lose their row in that next step.
        """
        self._decode_batch.reconcile(step.plan.rows.slot[step.plan.draws.row], drawn)

    def finish(self, request: LiveRequest, *, discard: bool = False) -> int:
        """End a running or waiting request; return how many pages became free.

        With `discard` the pages that it computed are unpublished; those that it matched stay published.
        """
        num_in_use = self.kv.pool.num_in_use
        for branch in request.branches.values():
            self._branches.close(branch, discard=discard)
        if self._is_running(request):
            self._stop(request)
        else:
            self.waiting.remove(request)
        self.swaps.release(request)
        return num_in_use - self.kv.pool.num_in_use

    def drop_branch(self, request: LiveRequest, branch_id: int | None) -> int:
        """End one branch of a request that continues; return how many pages became free.

        `branch_id=None`: a branch that was not created yet; only the request's maximum number of branches decreases.
        """
        num_in_use = self.kv.pool.num_in_use
        is_running = self._is_running(request)
        if branch_id is not None:
            self._branches.drop(request, branch_id)
            if not request.num_unbatched:
                self._decode_batch.unbatched_requests.discard(request)
        request.max_branches -= 1
        self._rows.num_reserved -= is_running
        return num_in_use - self.kv.pool.num_in_use

    def abort_steps(self, *steps: Step) -> list[LiveRequest]:
        """Abort a failed step and the step launched after it; return the requests that fail.

        How much of the steps was executed is unknown. So the requests with rows in them end, and the pages that they
        computed are unpublished. All other requests are preempted and start again: their rows in the runner may lack
        updates that these steps carried. Their pages are intact, except the targets of page copies, which branches that
        rested have, too. These are unpublished.
        """
        requests = dict.fromkeys(request for step in steps for request in step.requests())
        failed = [request for request in requests if self._is_running(request)]
        for request in failed:
            self.finish(request, discard=True)
        self.restart_all()
        for step in steps:
            for page in step.plan.copies[:, 1].tolist():
                self.kv.pool.unpublish(page)
        return failed

    def restart_all(self) -> None:
        """Preempt every running request, after a step that was not, or only partly, executed."""
        for request in list(self.running):
            self._requeue(request)
        self.kv.abort_step()

    # -- queries --------------------------------------------------------------------------------------------------

    def idle_violations(self) -> Iterator[str]:
        """Yield the violated invariants of an idle scheduler, which has no request."""
        if self.running or len(self.waiting):
            yield f"{len(self.running)} requests run and {len(self.waiting)} wait, but the engine has none"
        if self._rows.num_used or self._rows.num_reserved:
            yield f"{self._rows.num_used} rows are used, {self._rows.num_reserved} reserved"
        if self._decode_batch.num_branches or self._decode_batch.unbatched_requests:
            yield f"{self._decode_batch.num_branches} branches are in the decode batch"

    @property
    def num_slots(self) -> int:
        return self._rows.num_slots

    def requests(self) -> Iterator[LiveRequest]:
        yield from self.running
        yield from self.waiting

    def tables(self) -> list[PageTable]:
        """Return every open page table, with all computed tokens committed."""
        self._decode_batch.flush_all()
        return [table for request in self.running for table in request.tables()]

    @property
    def num_owed_tokens(self) -> int:
        """Prompt tokens to compute: those of running requests, and all of waiting ones. O(prompts that run)."""
        return self.waiting.num_prompt_tokens + sum(
            token_demand(request)[1] for request in self._decode_batch.unbatched_requests
        )

    def page_usage(self) -> PageUsage:
        """Return how pages and slots are used. O(pages held): for metrics and tests."""
        return page_usage(self.kv, self.tables(), self.waiting.num_pages_kept_free())


def cache_miss_reason(kv: KVCache, start: Start) -> CacheMiss | None:
    """Explain why a request cannot start on more cached tokens. A query; O(prompt)."""
    request, fork = start.request, start.fork
    if fork is not None:  # the tokens of a running branch, whose last page has no key yet
        at = fork.num_tokens
        if at >= request.num_prompt_tokens - 1:
            return None
        detail = f"the running branch that shares this prompt's first tokens differs from token {at} on"
        return CacheMiss(NEVER_COMPUTED, at, detail, kv.page_size)
    found = kv.explain(request.hash_chain or kv.hash_pages(request.prompt_bytes, request.scope))
    return CacheMiss(found.reason, found.at_token, found.detail, kv.page_size) if found.reason else None
