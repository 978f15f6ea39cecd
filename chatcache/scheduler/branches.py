"""Operations on branches, which change their page tables and runner rows as well.

    the strategy forks a branch   fork the page table (no page is copied), and copy the runner's row
    the request is preempted      detach: each branch releases its pages and chooses the branch to fork from later
    pages run out                 suspend_last: one branch releases its pages, and is forked again as below
    the request starts again      its leader computes; each other branch is forked again (reattach) when its fork source
                                  has computed the tokens they share, so that the request shares as many pages as before

The runner keeps one page-table row per branch, its slot. It copies rows in the order of the plan and before it applies
any update, so a row that is released and acquired again is still intact when an earlier copy reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.errors import EngineError
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import InvariantError
from chatcache.kv_cache.prefix_match import PrefixMatch
from chatcache.scheduler.decode_batch import DecodeBatch
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.scheduler.snapshots import max_start_tokens
from chatcache.types.actions import BranchAction, Extend, Fork, Release, Reorder


class RowAllocator:
    """The runner's page-table rows: which are free, and which to copy before the next step.

    `num_reserved` counts the rows that all running requests may need at once. `forks`: the row copies to make.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_reserved = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self.forks: list[tuple[int, int, int]] = []

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def num_unreserved(self) -> int:
        return self.num_slots - self.num_reserved

    def acquire(self) -> int:
        return self._free.pop()

    def release(self, slot: int) -> None:
        if slot >= 0:
            self._free.append(slot)

    def fork(self, src: int, num_pages: int) -> int:
        """Acquire a row that starts with the first `num_pages` entries of row `src`."""
        slot = self.acquire()
        if num_pages:
            self.forks.append((src, slot, num_pages))
        return slot

    def pop_forks(self) -> list[tuple[int, int, int]]:
        """Return the recorded row copies (src slot, dst slot, num_pages), in order, and forget them."""
        forks, self.forks = self.forks, []
        return forks


def num_missing_pages(kv: KVCache, branch: Branch) -> int:
    """Count the pages that the present tokens of a branch need, beyond those it has or will share."""
    num_pages = branch.num_shared_tokens // kv.page_size if branch.table is None else branch.table.num_pages
    return max(kv.num_pages_for(branch.num_tokens) - num_pages, 0)


class BranchManager:
    """The operations on branches, over one KV cache and one set of runner rows.

    A branch leaves the decode batch before its page table is changed, except by a `Reorder`.
    """

    def __init__(self, kv: KVCache, rows: RowAllocator, decode_batch: DecodeBatch) -> None:
        self._kv = kv
        self._rows = rows
        self._decode_batch = decode_batch

    def start(self, branch: Branch, match: PrefixMatch) -> None:
        """Give a branch a page table on the tokens that are already computed, and a row."""
        table = self._kv.restore(match)  # None: too few pages to load from the host, so all tokens are computed again
        self._attach(branch, table or self._kv.open(self._kv.empty_match(match.scope)), self._rows.acquire())

    def start_as_fork(self, branch: Branch, source: Branch, num_tokens: int) -> None:
        """Give a branch a fork of the first `num_tokens` tokens of `source`, and a row.

        `source` must not have been granted tokens in the step being planned.
        """
        self._decode_batch.remove(source)
        if source.table is None:
            raise InvariantError(f"branch {source.id} of {source.request.request_id} has no pages to fork")
        table = self._kv.fork(source.table)
        self._kv.truncate(table, num_tokens, branch.request.scope)
        if source.request is not branch.request:
            table.num_matched_tokens = table.num_tokens
        self._attach(branch, table, self._rows.fork(source.slot, table.changed_from))

    def _attach(self, branch: Branch, table: PageTable, slot: int) -> None:
        """Set the table and the row of a branch.

        Tokens that the request itself computed before it was preempted count as computed, not as matched.
        """
        table.num_matched_tokens = min(table.num_matched_tokens, branch.request.num_matched_tokens)
        branch.table, branch.slot = table, slot

    def close(self, branch: Branch, *, discard: bool = False, keep_tail: bool = True) -> None:
        """Release a branch's pages and row, if it has any.

        `discard`: the pages that it computed must not be matched afterwards. `keep_tail=False`: the last one must not.
        """
        self._close_table(branch, discard=discard, keep_tail=keep_tail)
        self._release_rows([branch])

    def _close_table(self, branch: Branch, *, discard: bool = False, keep_tail: bool = True) -> None:
        self._decode_batch.remove(branch, discard=discard, keep_tail=keep_tail, is_closing=True)
        if (table := branch.table) is not None:
            if table.num_tokens > table.num_matched_tokens:
                branch.request.num_matched_tokens = min(branch.request.num_matched_tokens, table.num_matched_tokens)
            self._kv.close(table, discard=discard, keep_tail=keep_tail)
            branch.table = None

    def drop(self, request: LiveRequest, branch_id: int) -> None:
        """Remove a branch from a request that continues with its other branches.

        Branches that wait without pages choose a fork source again, as this one may have been it. If the whole request
        waits, its hash chain is reset, as it may have a new leader with other pages.
        """
        branch = request.branches.pop(branch_id)
        if branch.table is None:
            request.num_waiting_branches = max(request.num_waiting_branches - 1, 0)  # 0 where the whole request waits
        self.close(branch)
        request.choose_fork_sources()
        request.hash_chain = None

    def detach(self, request: LiveRequest) -> None:
        """Release all pages and rows of a request, and choose fork sources for the next start."""
        for branch in request.branches.values():
            self.close(branch)
        request.num_waiting_branches = 0
        request.choose_fork_sources()

    def suspend_last(self, request: LiveRequest, *, keep_tail: bool) -> None:
        """Release the pages and the row of the last branch that has any, as `close` does; the others continue."""
        last = next(branch for branch in reversed(request.branches.values()) if branch.table is not None)
        self.close(last, keep_tail=keep_tail)
        request.num_waiting_branches += 1
        request.choose_fork_sources()

    def reattach(self, request: LiveRequest, num_free_pages: int) -> int:
        """Start waiting branches whose fork source has computed the tokens they share.

        Those of a lockstep request all start. Others start while their present tokens and one more page each fit into
        `num_free_pages`; returns how many of these are left.
        """
        for branch in request.branches.values():
            if branch.table is not None:
                continue
            num_pages = num_missing_pages(self._kv, branch) + 1
            if self._kv.states is not None:
                num_pages += self._num_lost_pages(branch)
            if not request.lockstep and num_pages > num_free_pages:
                break
            source = branch.fork_source
            if source is None:  # all branches that it could have been forked from have ended
                self.start(branch, self._match(branch))
            elif source.table is not None and source.table.num_tokens >= branch.num_shared_tokens:
                self._reattach(branch, source)
            else:
                continue
            branch.fork_source, branch.num_shared_tokens = None, 0
            request.num_waiting_branches -= 1
            num_free_pages -= num_pages
        return num_free_pages

    def _reattach(self, branch: Branch, source: Branch) -> None:
        """Fork a waiting branch from its source, and extend it by its own pages if still cached."""
        if self._kv.states is not None:
            self._reattach_state(branch, source)
            return
        if branch.num_tokens - branch.num_shared_tokens > self._kv.page_size or branch.request.host_pages:
            match = self._match(branch)
            num_shared = branch.num_shared_tokens // self._kv.page_size * self._kv.page_size
            if match.num_tokens > branch.num_shared_tokens:
                self.start_as_fork(branch, source, num_shared)
                if branch.table is not None and self._kv.extend(branch.table, match):
                    return
                self.close(branch)
        self.start_as_fork(branch, source, branch.num_shared_tokens)

    def _num_lost_pages(self, branch: Branch) -> int:
        """Count the pages that a waiting branch does not share with its fork source, as the state there is gone."""
        table = branch.fork_source.table if branch.fork_source is not None else None
        if table is None:
            return 0
        num_tokens = branch.num_shared_tokens
        return self._kv.num_pages_for(num_tokens - self._kv.num_fork_tokens(table, num_tokens))

    def _reattach_state(self, branch: Branch, source: Branch) -> None:
        """Fork a waiting branch from its source, or start it on a longer match.

        Beams have to share pages to fit the pool; their source has stopped exactly where they are forked.
        """
        if source.table is not None and not branch.request.lockstep:
            match = self._match(branch)
            if match.num_tokens > self._kv.num_fork_tokens(source.table, branch.num_shared_tokens):
                self.start(branch, match)
                return
        self.start_as_fork(branch, source, branch.num_shared_tokens)

    def _match(self, branch: Branch) -> PrefixMatch:
        request = branch.request
        chain = self._kv.hash_pages(branch.tokens(), request.scope, swapped=bool(request.host_pages))
        max_tokens = max_start_tokens(branch) if self._kv.states is not None else None
        return self._kv.match(chain, max_tokens=max_tokens, host_pages=request.host_pages)

    def apply(self, request: LiveRequest, actions: Sequence[BranchAction]) -> None:
        """Apply the actions of the request's decoding strategy to its branches.

        Raises: EngineError if the actions break the contract of `types.actions`; the request must then be finished.
        """
        forks: list[tuple[Branch, Branch]] = []  # (parent, child)
        released: list[Branch] = []
        num_added, batch = 0, self._decode_batch
        try:
            for action in actions:
                if isinstance(action, Extend):
                    branch = request.branches.get(action.branch)
                    if branch is None or not (branch.in_decode_batch and batch.extend(branch, action.token)):
                        self._drawn_branch(request, action.branch).append(action.token)
                    num_added += 1
                elif isinstance(action, Fork):
                    forks.append(self._fork(request, action))
                    num_added += 1
                elif isinstance(action, Release):
                    released.append(self._release(request, action))
                else:
                    raise EngineError("a Reorder must be the only action of its step")
            if len(request.branches) != num_added or len(request.branches) > request.max_branches:
                self._check_all_advanced(request)
            if forks:
                self._assign_rows(forks, released)
        finally:
            self._release_rows(released)

    def _release_rows(self, released: list[Branch]) -> None:
        for branch in released:
            self._rows.release(branch.slot)
            branch.slot = -1

    def reorder(self, request: LiveRequest, action: Reorder) -> bool:
        """Reorder the branches of a request within the decode batch; False, and no change, if not all are in it.

        Raises: as `apply`.
        """
        if not self._decode_batch.can_reorder(request):
            return False
        if request.branches.keys() != set(action.branches):
            raise EngineError(f"an action names the branches {action.branches}, not {(*request.branches,)}")
        find = request.branches.__getitem__
        steps = zip(map(find, action.branches), map(find, action.parents), action.tokens, strict=True)
        self._rows.forks += self._decode_batch.reorder(steps)
        return True

    def _fork(self, request: LiveRequest, action: Fork) -> tuple[Branch, Branch]:
        """Create the child branch with a fork of its parent's table; return parent and child."""
        parent = self._drawn_branch(request, action.parent)
        if action.child in request.branches or parent.table is None:
            raise EngineError(f"branch {action.child} already exists")
        self._decode_batch.remove(parent)
        child = request.branches[action.child] = parent.fork(action.child, action.token)
        child.table = self._kv.fork(parent.table)
        return parent, child

    def _release(self, request: LiveRequest, action: Release) -> Branch:
        """Remove the branch and release its pages; `_assign_rows` releases its row, or gives it to a child."""
        branch = request.branches.pop(action.branch, None)
        if branch is None:
            raise EngineError(f"branch {action.branch} was released but does not exist")
        if branch.table is None:
            request.num_waiting_branches -= 1
        self._close_table(branch, keep_tail=action.keep_tail)
        if request.num_waiting_branches:
            request.choose_fork_sources()
        return branch

    def _assign_rows(self, forks: list[tuple[Branch, Branch]], released: list[Branch]) -> None:
        """Give every child a row.

        The row of a released parent goes to its first child; other children get a copy of the parent's row. So no row
        is written that another child still has to be copied from.
        """
        rows = [parent.slot for parent, _ in forks]
        for parent, child in forks:
            if parent.table is None and parent.slot >= 0:  # it was released
                child.slot, parent.slot = parent.slot, -1
        self._release_rows(released)
        for (_, child), row in zip(forks, rows, strict=True):
            if child.slot < 0 and child.table is not None:
                child.slot = self._rows.fork(row, child.table.changed_from)

    def _drawn_branch(self, request: LiveRequest, branch_id: int) -> Branch:
        branch = request.branches.get(branch_id)
        if branch is None or not self._awaits_token(branch):
            raise EngineError(f"an action names branch {branch_id}, which was not sampled")
        return branch

    def _awaits_token(self, branch: Branch) -> bool:
        """Return whether the branch was sampled and not extended since: all its tokens are computed."""
        if branch.in_decode_batch:
            return self._decode_batch.awaits_token(branch)
        return branch.table is not None and branch.table.num_tokens == branch.num_tokens

    def _check_all_advanced(self, request: LiveRequest) -> None:
        """Verify that the actions gave every branch a next token, within the branch limit."""
        if len(request.branches) > request.max_branches:
            raise EngineError(
                f"{len(request.branches)} branches exist, but the strategy announced at most {request.max_branches}"
            )
        for branch in request.branches.values():
            if self._awaits_token(branch):
                raise EngineError(f"branch {branch.id} was left without a next token")
