"""Branches that decode steadily, as arrays: what a step asks of thousands of them becomes a few array operations.

A branch is *steady* while nothing about its next step has to be decided: only its newest token is missing from its
pages, the cell for it is the branch's own, and its strategy will draw as it drew last time. Then nobody is asked and
nothing is looked up; once in `page_size` steps its page is full, which `turn_pages` sees to for all such branches.

    enter   a drawn branch has been extended, and its next step is clear
    leave   somebody is about to touch its pages: fork, close, preempt; or there is no page left for it

The page table of a steady branch lags behind by up to a page: what has been computed of the page being filled is kept
here, and told to the table when the page is full or somebody wants to know (`flush`). Whoever reads what a table says
of its tokens flushes first; whoever changes a table lets the branch leave first, which flushes, too.

    kept    who is still here of those whose rows were planned last: a row of somebody who left since does not count,
            even if he came back, and what it drew is drawn again

A step may be planned while the tokens that the one before draws are still on the device. Then the rows say
PENDING_TOKEN, and what they have computed is noted (`advance`) when the tokens are known, before the next step is
planned. So whatever is told to a table between two steps has been computed and its result has been seen.

    place         0    1    2    3    4              who leaves, leaves a hole; before the next step the rest moves up,
    branch       b7   b9    -   b4   b12             sorted by the order of service
    num_computed 31   80    .   64   17

What to draw, as arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.types.actions import DrawSpec
from chatcache.types.plan import I32, PENDING_TOKEN, Draws, LogitEdit, LogitMask, Rows

MASK_64 = 2**64 - 1


def pack_draws(specs: Sequence[DrawSpec], rows: Sequence[int], positions: Sequence[int]) -> Draws:
    """Lay out `specs`, drawn from `rows` at `positions`, as arrays. All have length D."""
    return Draws(
        row=np.array(rows, np.int32),
        width=np.array([spec.width for spec in specs], np.int32),
        seed=np.array([spec.seed & MASK_64 for spec in specs], np.uint64),
        lane=np.array([spec.lane for spec in specs], np.int32),
        position=np.array(positions, np.int32),
        temperature=np.array([spec.temperature for spec in specs], np.float32),
        top_k=np.array([spec.top_k for spec in specs], np.int32),
        top_p=np.array([spec.top_p for spec in specs], np.float32),
        min_p=np.array([spec.min_p for spec in specs], np.float32),
        num_top=np.array([spec.num_top for spec in specs], np.int32),
        edits=tuple(LogitEdit(draw, *spec.edit) for draw, spec in enumerate(specs) if spec.edit is not None),
        masks=tuple(LogitMask(draw, spec.mask) for draw, spec in enumerate(specs) if spec.mask is not None),
    )


def concat_draws(first: Draws, second: Draws) -> Draws:
    """Put `second`, which has neither edits nor masks, after `first`."""
    pairs = zip(draw_arrays(first), draw_arrays(second), strict=True)
    return replace(_draws([np.concatenate(pair) for pair in pairs]), edits=first.edits, masks=first.masks)


def relocate_draws(draws: Draws, row: I32, position: I32) -> Draws:
    """Return draws without edits and masks from other rows and positions; they share all other arrays."""
    _, width, seed, lane, _, *rest = draw_arrays(draws)
    return _draws((row, width, seed, lane, position, *rest))


def select_draws(draws: Draws, which: I32) -> Draws:
    """Return these of the draws, without edits and masks, each from a row of its own."""
    _, *rest = draw_arrays(draws)
    return _draws((np.arange(len(which), dtype=np.int32), *(array[which] for array in rest)))


def draw_arrays(draws: Draws) -> tuple[NDArray[Any], ...]:
    """Return the arrays in the order in which `Draws` takes them."""
    return (
        *(draws.row, draws.width, draws.seed, draws.lane, draws.position),
        *(draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.num_top),
    )


def _draws(arrays: Sequence[NDArray[Any]]) -> Draws:
    row, width, seed, lane, position, temperature, top_k, top_p, min_p, num_top = arrays
    return Draws(row, width, seed, lane, position, temperature, top_k, top_p, min_p, num_top)


# A table of draws: one `Draws` whose cells are written one by one, and from which plans are copied.


def default_draws(num_draws: int) -> Draws:
    return pack_draws([DrawSpec()] * num_draws, [0] * num_draws, [0] * num_draws)


def write_draw(table: Draws, place: int, spec: DrawSpec) -> None:
    """Write a spec without edit and mask into a table."""
    table.width[place] = spec.width
    table.seed[place] = spec.seed & MASK_64
    table.lane[place] = spec.lane
    table.temperature[place] = spec.temperature
    table.top_k[place] = spec.top_k
    table.top_p[place] = spec.top_p
    table.min_p[place] = spec.min_p
    table.num_top[place] = spec.num_top


def copy_draws(table: Draws, count: int) -> Draws:
    """Copy the first `count` draws of a table."""
    return _draws([array[:count].copy() for array in draw_arrays(table)])


AWAITING_TOKEN = PENDING_TOKEN  # drawn, and not extended since
NO_ROW = -1
ORDINAL_BITS = 20
_NO_UPDATES = np.zeros((0, 3), np.int32)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The steady branches of one step, the oldest request's first: one row of one token, and one draw of it, each.

    Everything is parallel to `branches`; `draws.row` counts from 0.
    """

    branches: list[Branch]
    rows: Rows
    draws: Draws


class DecodeBatch:
    """Those of the branches with a slot that are steady. Arrays are by place, but for the two that say otherwise.

    `unsettled`: running requests with a branch that is not steady; they have to be served branch by branch.
    """

    def __init__(self, kv: KVCache, num_slots: int) -> None:
        self.unbatched_requests: set[LiveRequest] = set()
        self.num_branches = 0
        self._kv = kv
        self._num_entries = 0
        self._is_used = np.zeros(num_slots, bool)
        self._branches = np.full(num_slots, None, object)
        self._tables = np.full(num_slots, None, object)
        self._slot = np.zeros(num_slots, np.int32)
        self._service_order = np.zeros(num_slots, np.int64)
        self._num_computed = np.zeros(num_slots, np.int32)
        self._num_reported = np.zeros(num_slots, np.int32)  # how many of those its request was told of
        self._num_pages = np.zeros(num_slots, np.int32)
        self._next_token = np.zeros(num_slots, np.int32)
        self._cell = np.zeros(num_slots, np.int64)  # the cell of `_page_tokens` where the next token goes
        self._end = np.zeros(num_slots, np.int64)  # the one after the last of its page
        self._row = np.full(num_slots, NO_ROW, np.int32)  # in the step planned last
        self._draws = default_draws(num_slots)
        self._page_tokens = np.zeros((num_slots, kv.page_size), "<i4")  # by slot: those of the page being filled
        self._cells = self._page_tokens.reshape(-1)
        self._entry = np.zeros(num_slots, np.int32)  # by slot
        self._entry_view, self._next_token_view = (
            self._entry.data,
            self._next_token.data,
        )  # the same: one cell is faster so
        self._arrays: list[NDArray[Any]] = [
            *(self._branches, self._tables, self._slot, self._service_order, self._num_computed, self._num_reported),
            *(self._num_pages, self._next_token, self._cell, self._end, self._row),
        ]
        self._arrays += draw_arrays(self._draws)
        self._flushed_full: list[Branch] = []  # their tables know of the full page already
        self._is_compact = True
        self._cached_rows: DecodeRows | None = None  # what stays the same of `rows` while nobody comes or goes

    # -- who is steady --------------------------------------------------------------------------------------------

    def add_if_eligible(self, branch: Branch) -> None:
        """Take the branch in, if its next step is clear. Asks its strategy once what to draw from now on."""
        request, table = branch.request, branch.table
        if table is None or branch.num_tokens != table.num_tokens + 1 or not request.strategy.has_fixed_draws:
            return
        if table.changed_from < table.num_pages or table.num_reserved == table.num_tokens:
            return  # the runner has yet to hear of its pages, or it has no cell of its own for the token
        specs = request.strategy.draws(branch.id)
        if len(specs) != 1 or specs[0].edit is not None or specs[0].mask is not None:
            return
        if self._num_entries == len(self._slot):
            self._compact()
        place, slot, size = self._num_entries, branch.slot, self._kv.page_size
        write_draw(self._draws, place, specs[0])  # first, as a faulty spec may not fit the arrays
        self._is_used[place] = branch.in_decode_batch = True
        self._branches[place], self._tables[place] = branch, table
        self._slot[place], self._entry[slot] = slot, place
        self._service_order[place] = (request.service_order << ORDINAL_BITS) + min(branch.ordinal, 2**ORDINAL_BITS - 1)
        self._num_computed[place] = self._num_reported[place] = table.num_tokens
        self._num_pages[place] = table.num_pages
        self._row[place] = NO_ROW
        self._next_token[place] = int.from_bytes(branch.outputs[-TOKEN_BYTES:], "little", signed=True)
        self._end[place] = end = (slot + 1) * size
        self._cell[place] = end - (table.num_reserved - table.num_tokens)
        self._page_tokens[slot, : table.num_tail_tokens] = np.frombuffer(table.tail_tokens, "<i4")
        self._is_compact = self._is_compact and (
            place == 0 or bool(self._service_order[place - 1] < self._service_order[place])
        )
        self._cached_rows = None
        self._num_entries += 1
        self.num_branches += 1
        request.num_batched += 1

    def remove(self, branch: Branch, *, discard: bool = False) -> None:
        """Let the branch go if it is steady, its table up to date; not so if the table is to be forgotten anyway."""
        if not branch.in_decode_batch:
            return
        place = self._entry_view[branch.slot]
        if not discard:
            self._commit_to_table(branch, place)
        self._branches[place] = self._tables[place] = None
        self._is_used[place] = branch.in_decode_batch = self._is_compact = False
        self._cached_rows = None
        self.num_branches -= 1
        branch.request.num_batched -= 1
        self.unbatched_requests.add(branch.request)

    def flush(self, branch: Branch) -> None:
        """Tell a steady branch's table of all that has been computed."""
        if not branch.in_decode_batch:
            return
        place = self._entry_view[branch.slot]
        self._commit_to_table(branch, place)
        if self._cell[place] == self._end[place]:
            self._flushed_full.append(branch)

    def _commit_to_table(self, branch: Branch, place: int) -> None:
        table, num_computed, stop = self._tables[place], int(self._num_computed[place]), int(self._cell[place])
        self._kv.commit(table, self._cells[stop - (num_computed - table.num_tokens) : stop].tobytes())
        branch.request.num_computed_tokens += num_computed - int(self._num_reported[place])
        self._num_reported[place] = num_computed

    def flush_all(self) -> None:
        for branch in self._batched_branches():
            self.flush(branch)

    def remove_all(self) -> None:
        for branch in self._batched_branches():
            self.remove(branch)

    def awaits_token(self, branch: Branch) -> bool:
        """Say whether a steady branch waits for its next token."""
        return self._next_token_view[self._entry_view[branch.slot]] == AWAITING_TOKEN

    def extend(self, branch: Branch, token: int) -> None:
        """Append `token` to a steady branch that was drawn."""
        self._next_token_view[self._entry_view[branch.slot]] = token
        branch.append(token)

    def num_missing_pages(self) -> int:
        """Count the branches that need another page for the token they have."""
        self._compact()
        return int(np.count_nonzero(self._cell[: self._num_entries] == self._end[: self._num_entries]))

    # -- a step ---------------------------------------------------------------------------------------------------

    def remove_ineligible(self) -> None:
        """Let two kinds go that are rare enough to be left to others: those whose full page was flushed already, and
        those that nobody extended since they were drawn, who have nothing to compute."""
        for branch in self._flushed_full:
            self.remove(branch)
        self._flushed_full.clear()
        self._compact()
        undecided = (self._next_token[: self._num_entries] == AWAITING_TOKEN).nonzero()[0]
        if len(undecided):
            for branch in self._branches[undecided].tolist():
                self.remove(branch)

    def advance_pages(self) -> I32:
        """Give a page to each branch whose last one is full, or let all of these go; return table updates [U, 3]."""
        self._compact()
        count = self._num_entries
        full = (self._cell[:count] == self._end[:count]).nonzero()[0]
        if not len(full):
            return _NO_UPDATES
        slots = self._slot[full]
        pages = self._kv.advance_pages(self._tables[full].tolist(), self._page_tokens[slots].tobytes())
        if pages is None:
            for branch in self._branches[full].tolist():
                self.remove(branch)
            return _NO_UPDATES
        num_pages = self._num_pages[full]
        self._num_pages[full] = num_pages + 1
        self._cell[full] -= self._kv.page_size
        updates = np.empty((len(full), 3), np.int32)
        updates[:, 0], updates[:, 1], updates[:, 2] = slots, num_pages, pages
        return updates

    def plan_rows(self) -> DecodeRows:
        """Lay out one row and one draw of every steady branch."""
        self._compact()
        count, standing = self._num_entries, self._cached_rows
        if standing is None:
            slots, ones, numbers = self._slot[:count].copy(), np.ones(count, np.int32), np.arange(count, dtype=np.int32)
            draws = relocate_draws(copy_draws(self._draws, count), numbers, numbers)
            standing = DecodeRows(self._branches[:count].tolist(), Rows(slots, ones, ones, ones), draws)
            self._cached_rows = standing
            self._row[:count] = numbers
        start, rows, draws = self._num_computed[:count].copy(), standing.rows, standing.draws
        return DecodeRows(
            standing.branches,
            Rows(rows.slot, start, rows.num_tokens, self._next_token[:count].copy()),
            relocate_draws(draws, draws.row, start + 1),
        )

    def active_rows(self, rows: DecodeRows) -> I32 | None:
        """Say which of the rows planned last still count; None for all. A query."""
        return None if self._is_unchanged_since(rows) else self._row[self._planned_entries()]

    def advance(self, rows: DecodeRows) -> None:
        """Note that the rows planned last, those that still count, have been computed with the tokens known now."""
        places = slice(len(rows.branches)) if self._is_unchanged_since(rows) else self._planned_entries()
        self._cells[self._cell[places]] = self._next_token[places]
        self._cell[places] += 1
        self._num_computed[places] += 1
        self._next_token[places] = AWAITING_TOKEN

    def can_schedule_ahead(self) -> bool:
        """Say whether all these branches can run again before anybody knows what the step planned last draws of them:
        it draws one token of each, and there are pages for those whose last one it fills. A query."""
        self._compact()
        count = self._num_entries
        if (
            not count
            or self._flushed_full
            or (self._row[:count] == NO_ROW).any()
            or (self._draws.width[:count] != 1).any()
        ):
            return False
        return int(np.count_nonzero(self._cell[:count] + 1 == self._end[:count])) <= self._kv.pool.num_free

    def reconcile(self, slots: I32, drawn: I32) -> None:
        """Let those go that went on with another token than was drawn: the row planned last computes the one drawn."""
        drawn_at = np.full(len(self._slot), AWAITING_TOKEN, np.int32)
        drawn_at[slots] = drawn
        places = self._planned_entries()
        others = places[self._next_token[places] != drawn_at[self._slot[places]]]
        for branch in self._branches[others].tolist():
            self.remove(branch)

    def _is_unchanged_since(self, rows: DecodeRows) -> bool:
        """Say whether nobody has come or gone since these rows were planned; they are those planned last."""
        return self._cached_rows is not None and self._cached_rows.branches is rows.branches

    def _planned_entries(self) -> NDArray[np.intp]:
        """Find the places of those that have a row in the step planned last."""
        return np.flatnonzero(self._is_used & (self._row != NO_ROW))

    def _batched_branches(self) -> list[Branch]:
        members: list[Branch] = self._branches[self._is_used].tolist()
        return members

    def _compact(self) -> None:
        """Close the holes and restore the order of service: the oldest request first, its branches as they came."""
        if self._is_compact:
            return
        places = np.flatnonzero(self._is_used)
        turns = self._service_order[places]
        if (turns[1:] < turns[:-1]).any():
            places = places[np.argsort(turns)]
        count = self._num_entries = len(places)
        for array in self._arrays:
            array[:count] = array[places]
        self._branches[count:] = self._tables[count:] = None
        self._is_used[:count], self._is_used[count:] = True, False
        self._entry[self._slot[:count]] = np.arange(count, dtype=np.int32)
        self._is_compact = True
