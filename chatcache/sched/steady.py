"""Branches that decode steadily, as arrays: what a step asks of thousands of them becomes a few array operations.

A branch is *steady* while nothing about its next step has to be decided: only its newest token is missing from its
pages, the cell for it is the branch's own, and its strategy will draw as it drew last time. Then nobody is asked and
nothing is looked up; once in `page_size` steps its page is full, which `turn_pages` sees to for all such branches.

    enter   a drawn branch has been extended, and its next step is clear
    leave   somebody is about to touch its pages: fork, close, preempt; or there is no page left for it

The page table of a steady branch lags behind: the tokens computed since it was last told are in `branch.outputs` and
counted here; `flush` tells it. Whoever reads what a table says of its tokens flushes first, whoever changes a table
lets the branch leave first (which flushes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatcache.kv.cache import KVCache
from chatcache.kv.keys import TOKEN_BYTES
from chatcache.kv.pool import BrokenInvariant
from chatcache.kv.table import PageTable
from chatcache.sched.draws import DrawTable, placed
from chatcache.sched.plan import I32, Draws, Rows
from chatcache.sched.request import Branch, LiveRequest

NO_TOKEN = -1  # drawn, and not extended since
ORDINAL_BITS = 20

_NO_UPDATES = np.zeros((0, 3), np.int32)
_NO_POSITIONS = np.zeros(0, np.int32)

Slots = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SteadyRows:
    """The steady branches of one step in the order of service: one row of one token, and one draw of it, each.

    Shapes: slots [B], and so are the arrays of `rows` and `draws`. `draws.row` counts from 0.
    """

    slots: Slots
    branches: list[Branch]
    rows: Rows
    draws: Draws


@dataclass(frozen=True, slots=True)
class _Order:
    """What stays the same from step to step while nobody enters or leaves; in the order of service, [B] each."""

    slots: Slots
    branches: list[Branch]
    row_slots: I32
    ones: I32
    draws: Draws


class SteadyBranches:
    """Those of the branches with a slot that are steady. Arrays are by slot.

    `unsettled`: running requests with a branch that is not steady; they have to be served branch by branch.
    """

    def __init__(self, kv: KVCache, num_slots: int) -> None:
        self.unsettled: set[LiveRequest] = set()
        self.num_branches = 0
        self._kv = kv
        self._branches = np.full(num_slots, None, object)
        self._is_steady = np.zeros(num_slots, bool)
        self._turn = np.zeros(num_slots, np.int64)
        self._num_computed = np.zeros(num_slots, np.int32)
        self._num_counted = np.zeros(num_slots, np.int32)  # of those, how many its request was told of
        self._num_reserved = np.zeros(num_slots, np.int32)
        self._next_token = np.zeros(num_slots, np.int32)
        self._token_at = self._next_token.data  # the same cells: one is reached faster so
        self._specs = DrawTable(num_slots)
        self._known_order: _Order | None = None

    # -- who is steady --------------------------------------------------------------------------------------------

    def enter(self, branch: Branch) -> None:
        """Take the branch in, if its next step is clear. Asks its strategy once what to draw from now on."""
        request, table = branch.request, branch.table
        if table is None or branch.num_tokens != table.num_tokens + 1 or not request.strategy.steady:
            return
        if table.changed_from < table.num_pages or (table.tail and table.num_reserved == table.num_tokens):
            return  # the runner has yet to hear of its pages, or its tail may be others' too
        specs = request.strategy.draws(branch.id)
        if len(specs) != 1 or specs[0].edit is not None or specs[0].mask is not None:
            return
        slot = branch.slot
        self._specs.put(slot, specs[0])
        self._branches[slot] = branch
        self._is_steady[slot] = branch.is_steady = True
        self._turn[slot] = (request.turn << ORDINAL_BITS) + min(branch.ordinal, 2**ORDINAL_BITS - 1)
        self._num_computed[slot] = self._num_counted[slot] = table.num_tokens
        self._num_reserved[slot] = table.num_reserved
        self._next_token[slot] = int.from_bytes(branch.outputs[-TOKEN_BYTES:], "little", signed=True)
        self._known_order = None
        self.num_branches += 1
        request.num_steady += 1

    def leave(self, branch: Branch, *, forget: bool = False) -> None:
        """Let the branch go if it is steady, its table up to date; not so if the table is to be forgotten anyway."""
        if not branch.is_steady:
            return
        if not forget:
            self.flush(branch)
        self._branches[branch.slot] = None
        self._is_steady[branch.slot] = branch.is_steady = False
        self._known_order = None
        self.num_branches -= 1
        branch.request.num_steady -= 1
        self.unsettled.add(branch.request)

    def flush(self, branch: Branch) -> None:
        """Tell a steady branch's table of all that has been computed."""
        table = branch.table
        if branch.is_steady and table is not None:
            num_computed = int(self._num_computed[branch.slot])
            self._kv.commit(table, branch.span(table.num_tokens, num_computed))
            branch.request.num_computed_tokens += num_computed - int(self._num_counted[branch.slot])
            self._num_counted[branch.slot] = num_computed

    def flush_all(self) -> None:
        for branch in self._members():
            self.flush(branch)

    def leave_all(self) -> None:
        for branch in self._members():
            self.leave(branch)

    def _members(self) -> list[Branch]:
        members: list[Branch] = self._branches[self._is_steady].tolist()
        return members

    def is_drawn(self, branch: Branch) -> bool:
        """Say whether a steady branch waits for its next token."""
        return self._token_at[branch.slot] == NO_TOKEN

    def extend(self, branch: Branch, token: int) -> None:
        """Append `token` to a steady branch that was drawn."""
        self._token_at[branch.slot] = token
        branch.append(token)

    # -- a step ---------------------------------------------------------------------------------------------------

    def turn_pages(self) -> I32:
        """Give a page to each branch whose last one is full, or let all of these go; return table updates [U, 3].

        Branches that nobody extended since they were drawn have nothing to compute: they go, too.
        """
        slots = self._order().slots
        for branch in self._branches[slots[self._next_token[slots] == NO_TOKEN]].tolist():
            self.leave(branch)
        slots = self._order().slots
        full = slots[self._num_computed[slots] == self._num_reserved[slots]]
        if not len(full):
            return _NO_UPDATES
        branches: list[Branch] = self._branches[full].tolist()
        pages = self._kv.turn_pages([_filled(branch) for branch in branches])
        if pages is None:
            for branch in branches:
                self.leave(branch)
            return _NO_UPDATES
        index = self._num_reserved[full] // self._kv.page_size
        self._num_reserved[full] += self._kv.page_size
        return np.stack((full, index, pages), axis=1).astype(np.int32)

    def rows(self) -> SteadyRows:
        """Lay out one row and one draw of every steady branch."""
        order = self._order()
        start = self._num_computed[order.slots]
        return SteadyRows(
            order.slots,
            order.branches,
            Rows(order.row_slots, start, order.ones, self._next_token[order.slots]),
            placed(order.draws, order.draws.row, start + 1),
        )

    def advance(self, rows: SteadyRows) -> None:
        """Note that the rows have been computed and drawn."""
        slots = rows.slots[self._is_steady[rows.slots]]  # nobody enters between plan and commit, but some may leave
        self._num_computed[slots] += 1
        self._next_token[slots] = NO_TOKEN

    def _order(self) -> _Order:
        """Return the steady branches in the order of service: oldest request first, its branches as they came."""
        order = self._known_order
        if order is None:
            slots = np.flatnonzero(self._is_steady)
            slots = slots[np.argsort(self._turn[slots])]
            count = len(slots)
            draws = placed(self._specs.take(slots), np.arange(count, dtype=np.int32), _NO_POSITIONS)
            order = _Order(
                slots, self._branches[slots].tolist(), slots.astype(np.int32), np.ones(count, np.int32), draws
            )
            self._known_order = order
        return order


def _filled(branch: Branch) -> tuple[PageTable, bytes]:
    """Return the table and the tokens it has yet to hear of: all but the newest, which is yet to be computed."""
    table = branch.table
    if table is None:
        raise BrokenInvariant(f"branch {branch.id} of {branch.request.request_id} is steady without pages")
    return table, branch.span(table.num_tokens, branch.num_tokens - 1)
