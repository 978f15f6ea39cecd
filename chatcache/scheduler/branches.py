"""What happens to the branches of one request: fork, extend, retire, part, rejoin. Pages and slots follow.

a strategy forks      fork the table (nothing is copied), copy the runner's row
a request is preempted  every branch lets its pages go and pairs with its closest relative
it starts again       the leader computes; each other branch forks from its partner once that has got far enough,
                      so that the request shares as many pages as it did before

Page-table rows of the runner: which are free, and which must be copied from which before the next step.

The runner copies rows in the order given, before it applies any update. A row that is freed and taken again in between
is therefore still intact when a fork listed earlier reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.errors import EngineError
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.pool import InvariantError
from chatcache.kv_cache.prefix_match import PrefixMatch
from chatcache.scheduler.decode_batch import DecodeBatch
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.types.actions import BranchAction, Extend, Fork, Release


class RowAllocator:
    """`num_slots` rows. `promised` counts those that running requests may come to need at once."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_reserved = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._forks: list[tuple[int, int, int]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_unreserved(self) -> int:
        return self.num_slots - self.num_reserved

    @property
    def has_forks(self) -> bool:
        return bool(self._forks)

    def acquire(self) -> int:
        return self._free.pop()

    def release(self, slot: int) -> None:
        if slot >= 0:
            self._free.append(slot)

    def fork(self, src: int, num_pages: int) -> int:
        """Take a slot whose row will begin with the first `num_pages` entries of row `src`."""
        slot = self.acquire()
        if num_pages:
            self._forks.append((src, slot, num_pages))
        return slot

    def pop_forks(self) -> list[tuple[int, int, int]]:
        """Return the row copies (src slot, dst slot, num_pages) since the last call, in order."""
        forks, self._forks = self._forks, []
        return forks


class BranchManager:
    """The operations, over one KV cache and one set of slots. Steady branches leave before their pages are touched."""

    def __init__(self, kv: KVCache, slots: RowAllocator, steady: DecodeBatch) -> None:
        self._kv = kv
        self._rows = slots
        self._decode_batch = steady

    def start(self, branch: Branch, match: PrefixMatch) -> None:
        """Give a branch a table on what is already computed of it, and a slot."""
        table = self._kv.restore(match)  # no room to load pages: then nothing is, and all is computed again
        branch.table = table or self._kv.open(self._kv.empty_match(match.scope))
        branch.slot = self._rows.acquire()

    def start_as_fork(self, branch: Branch, source: Branch, num_tokens: int) -> None:
        """Give a branch the first `num_tokens` tokens of another, and a slot. Not if `source` was granted a row."""
        self._decode_batch.remove(source)
        if source.table is None:
            raise InvariantError(f"branch {source.id} of {source.request.request_id} has no pages to fork")
        branch.table = self._kv.fork(source.table)
        self._kv.truncate(branch.table, num_tokens, branch.request.scope)
        branch.slot = self._rows.fork(source.slot, branch.table.changed_from)

    def close(self, branch: Branch, *, discard: bool = False) -> None:
        """Let go of a branch's pages and slot, if it has any."""
        self._decode_batch.remove(branch, discard=discard)
        if branch.table is not None:
            self._kv.close(branch.table, discard=discard)
            branch.table = None
        self._rows.release(branch.slot)
        branch.slot = -1

    def drop(self, request: LiveRequest, branch_id: int) -> None:
        """Take a branch out of a request that goes on with the others.

        Those that wait without pages pair anew: it may have been their partner. The new leader of a request that waits
        as a whole has other pages.
        """
        branch = request.branches.pop(branch_id)
        if branch.table is None:
            request.num_waiting_branches = max(request.num_waiting_branches - 1, 0)  # 0 where the whole request waits
        self.close(branch)
        request.choose_fork_sources()
        request.hash_chain = None

    def detach(self, request: LiveRequest) -> None:
        """Let go of everything the request holds, remembering who is related to whom."""
        for branch in request.branches.values():
            self.close(branch)
        request.choose_fork_sources()

    def reattach(self, request: LiveRequest) -> None:
        """Bring back the waiting branches of a running request whose time has come."""
        for branch in request.branches.values():
            if branch.table is not None:
                continue
            partner = branch.fork_source
            if partner is None:  # the branch it would have forked from is gone, and so are all others
                self.start(branch, self._match(branch))
            elif partner.table is not None and partner.table.num_tokens >= branch.num_shared_tokens:
                self._reattach(branch, partner)
            else:
                continue
            branch.fork_source, branch.num_shared_tokens = None, 0
            request.num_waiting_branches -= 1

    def _reattach(self, branch: Branch, partner: Branch) -> None:
        """Fork a waiting branch from its partner; go on with pages of its own, if some are still to be found."""
        if branch.num_tokens - branch.num_shared_tokens > self._kv.page_size or branch.request.host_pages:
            match = self._match(branch)
            num_shared = branch.num_shared_tokens // self._kv.page_size * self._kv.page_size
            if match.num_tokens > branch.num_shared_tokens:
                self.start_as_fork(branch, partner, num_shared)
                if branch.table is not None and self._kv.extend(branch.table, match):
                    return
                self.close(branch)
        self.start_as_fork(branch, partner, branch.num_shared_tokens)

    def _match(self, branch: Branch) -> PrefixMatch:
        request = branch.request
        chain = self._kv.hash_pages(branch.tokens(), request.scope, swapped=bool(request.host_pages))
        return self._kv.match(chain, host_pages=request.host_pages)

    def apply(self, request: LiveRequest, actions: Sequence[BranchAction]) -> None:
        """Move the request's branches as its strategy decided.

        Raises: EngineError if the actions break the contract of `decode.actions`; the request must then be finished.
        """
        families: list[tuple[Branch, Branch]] = []  # (parent, child)
        retired: list[Branch] = []
        try:
            for action in actions:
                if isinstance(action, Extend):
                    self._extend(request, action)
                elif isinstance(action, Fork):
                    families.append(self._fork(request, action))
                else:
                    retired.append(self._release(request, action))
            self._check_all_advanced(request)
            self._assign_rows(families, retired)
        finally:
            for branch in retired:
                self.close(branch)

    def extend_in_batch(self, request: LiveRequest, actions: Sequence[BranchAction]) -> bool:
        """Take the short way where a request's only branch is steady and extended; return whether that was so."""
        if len(actions) != 1 or len(request.branches) != 1 or not isinstance(action := actions[0], Extend):
            return False
        branch = request.branches.get(action.branch)
        if branch is None or not branch.in_decode_batch or not self._decode_batch.awaits_token(branch):
            return False
        self._decode_batch.extend(branch, action.token)
        return True

    def move_to_decode_batch(self, request: LiveRequest) -> None:
        """Let those branches be steady that can."""
        for branch in request.branches.values():
            if not branch.in_decode_batch:
                self._decode_batch.add_if_eligible(branch)

    def _extend(self, request: LiveRequest, action: Extend) -> None:
        branch = self._drawn_branch(request, action.branch)
        if branch.in_decode_batch:
            self._decode_batch.extend(branch, action.token)
        else:
            branch.append(action.token)

    def _fork(self, request: LiveRequest, action: Fork) -> tuple[Branch, Branch]:
        parent = self._drawn_branch(request, action.parent)
        if action.child in request.branches or parent.table is None:
            raise EngineError(f"branch {action.child} exists already")
        self._decode_batch.remove(parent)
        child = parent.fork(action.child, action.token)
        child.table = self._kv.fork(parent.table)
        request.branches[child.id] = child
        return parent, child

    def _release(self, request: LiveRequest, action: Release) -> Branch:
        """Remove the branch; its pages go now, its slot when the children are seated."""
        branch = request.branches.pop(action.branch, None)
        if branch is None:
            raise EngineError(f"branch {action.branch} was retired but does not exist")
        self._decode_batch.remove(branch)
        if branch.table is None:
            request.num_waiting_branches -= 1
        else:
            self._kv.close(branch.table, keep_tail=action.keep_tail)
            branch.table = None
        if request.num_waiting_branches:
            request.choose_fork_sources()
        return branch

    def _assign_rows(self, families: list[tuple[Branch, Branch]], retired: list[Branch]) -> None:
        """Give every child a slot. A retired parent's passes to its first child, so no row is written that another
        child has yet to be copied from; the others get a copy of their parent's row."""
        rows = {id(parent): parent.slot for parent, _ in families}
        heirs: set[int] = set()
        for parent, child in families:
            if parent in retired and parent.slot >= 0:
                child.slot, parent.slot = parent.slot, -1
                heirs.add(id(child))
        for branch in retired:
            self.close(branch)
        for parent, child in families:
            if id(child) not in heirs and child.table is not None:
                child.slot = self._rows.fork(rows[id(parent)], child.table.changed_from)

    def _drawn_branch(self, request: LiveRequest, branch_id: int) -> Branch:
        branch = request.branches.get(branch_id)
        if branch is None or not self._awaits_token(branch):
            raise EngineError(f"branch {branch_id} was acted on but had not been drawn")
        return branch

    def _awaits_token(self, branch: Branch) -> bool:
        """Say whether everything the branch has is computed: it was drawn, and not extended since."""
        if branch.in_decode_batch:
            return self._decode_batch.awaits_token(branch)
        return branch.table is not None and branch.table.num_tokens == branch.num_tokens

    def _check_all_advanced(self, request: LiveRequest) -> None:
        if len(request.branches) > request.max_branches:
            raise EngineError(
                f"{len(request.branches)} branches are alive, at most {request.max_branches} were announced"
            )
        for branch in request.branches.values():
            if self._awaits_token(branch):
                raise EngineError(f"branch {branch.id} was left without a next token")
