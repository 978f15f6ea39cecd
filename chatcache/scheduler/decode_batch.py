"""The persistent decode batch: all branches that decode one token per step, kept as arrays.

A branch is in the decode batch while nothing about its next step has to be decided: all its tokens but the newest are
computed, the cell for that token is the branch's own, and its strategy will ask for the same draw as last time, apart
from edits and masks of the logits (penalties, grammars). Its steps are then planned with a few array operations for the
whole batch, without calls to its page table, and to its strategy only for those edits and masks:

    entry             0    1    2    3    4
    branch           b7   b9    -   b4  b12      a removed branch leaves a hole; before the next step the entries are
    num_computed     31   80    -   64   17      compacted and sorted by service order
    next_token       52    3    -   11   90

    add_if_eligible   a sampled branch was extended, and needs no decision in its next step
    fork              a branch of the batch was forked by its strategy: its entry is copied
    remove            the branch is about to be closed or preempted, or there is no page left for it

Once in `page_size` steps the page of a branch is full; `advance_pages` then appends a page for all such branches.
`reserve` gives pages to all branches that have no cell to write to, as they share their last page with a fork.

The page table of a branch in the batch lags by up to one page. The tokens computed into its last page are kept in this
module, and committed to the table when the page is full or on `flush`. Code that reads the number of tokens of a table
flushes first; code that changes a table removes its branch from the batch first, which flushes as well. A fork only
flushes: it changes nothing but what `reserve` reads.

Asynchronous scheduling: a step can be planned while the tokens sampled by the previous step are still on the device.
The rows of its plan then contain PENDING_TOKEN, and `advance` records their tokens when they are known, before the next
step is planned. Hence everything committed to a table between two steps was computed, and its result was seen.
A branch that left the batch since its row was planned loses that row (`active_rows`), even if it has returned since;
its token is sampled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatcache.kv_cache.copy_on_write import PageCopy
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.scheduler.request import Branch, LiveRequest, encode_token
from chatcache.types.actions import DrawSpec, LogitChanges
from chatcache.types.plan import I32, PENDING_TOKEN, Draws, LogitEdit, LogitMask, Rows

MASK_64 = 2**64 - 1
AWAITING_TOKEN = PENDING_TOKEN  # drawn, and not extended since
NO_ROW = -1
ORDINAL_BITS = 20
_NO_CHANGES = DrawSpec()
_NO_UPDATES = np.zeros((0, 3), np.int32)


def pack_draws(specs: Sequence[DrawSpec], rows: Sequence[int], positions: Sequence[int]) -> Draws:
    """Pack draw specs as arrays: one draw of each spec from its row at its position."""
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
    """Append `second` to `first`."""
    pairs, shift = zip(first.arrays(), second.arrays(), strict=True), len(first.row)
    edits = [LogitEdit(edit.draw + shift, edit.ids, edit.scale, edit.add) for edit in second.edits]
    masks = [LogitMask(mask.draw + shift, mask.words) for mask in second.masks]
    draws = Draws.of([np.concatenate(pair) for pair in pairs])
    return replace(draws, edits=(*first.edits, *edits), masks=(*first.masks, *masks))


_DRAW_FIELDS = tuple(field.name for field in fields(Draws))[:10]  # the arrays
_ENTRY = np.dtype(
    [
        ("is_used", np.bool_),
        ("is_unreserved", np.bool_),  # the table has no cell of its own for the next token
        ("slot", np.int32),
        ("service_order", np.int64),
        ("num_computed", np.int32),
        ("num_reported", np.int32),  # tokens counted in `LiveRequest.num_computed_tokens`
        ("num_pages", np.int32),
        ("next_token", np.int32),
        ("cell", np.int64),  # index into `_cells` of the next token
        ("end", np.int64),  # index into `_cells` after the last cell of its page
        ("planned_row", np.int32),  # in the last planned step
        *((name, array.dtype) for name, array in zip(_DRAW_FIELDS, pack_draws((), (), ()).arrays(), strict=True)),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode batch's part of one step: for each branch one row of one token, and one draw.

    In service order, and parallel to `branches`; `draws.row` counts from 0. `changes`: the draws with edits or masks,
    each with its `LogitChanges` or the function that returns them.
    """

    branches: list[Branch]
    rows: Rows
    draws: Draws
    changes: Sequence[tuple[int, LogitChanges | Callable[[], LogitChanges]]] = ()


class DecodeBatch:
    """The branches in the decode batch, as arrays.

    An array has one entry per branch, or one per runner row where a comment says so; those of `_ENTRY` are columns of
    `_entries`. `unbatched_requests`: running requests with a branch outside the batch, which the scheduler serves one
    by one. `has_unreserved`: some branches have no cell to write to; call `reserve`. `copied_requests`: those for which
    it returned page copies in this plan, which are not made yet.
    """

    def __init__(self, kv: KVCache, num_slots: int) -> None:
        self.unbatched_requests: set[LiveRequest] = set()
        self.copied_requests: set[LiveRequest] = set()
        self.num_branches = 0
        self.has_unreserved = False
        self._kv = kv
        self._num_entries = 0
        capacity = 2 * num_slots  # with holes, so that the entries are not compacted for each fork of a step
        self._branches = np.full(capacity, None, object)
        self._tables = np.full(capacity, None, object)
        self._changes = np.full(capacity, None, object)  # `LogitChanges`, or the function that returns them
        self._stay = np.full(capacity, None, object)  # `DrawSpec.changes_stay`
        self._entries = entries = np.zeros(capacity, _ENTRY)
        self._is_used, self._is_unreserved = entries["is_used"], entries["is_unreserved"]
        self._slot, self._service_order = entries["slot"], entries["service_order"]
        self._num_computed, self._num_reported = entries["num_computed"], entries["num_reported"]
        self._num_pages, self._next_token = entries["num_pages"], entries["next_token"]
        self._cell, self._end, self._row = entries["cell"], entries["end"], entries["planned_row"]
        self._draws = Draws.of([entries[name] for name in _DRAW_FIELDS])
        self._specs = entries[list(_DRAW_FIELDS)]
        self._num_changing = 0  # entries with such a function
        self._page_tokens = np.zeros((num_slots, kv.page_size), "<i4")  # by slot: the tokens of the page being filled
        self._cells = self._page_tokens.reshape(-1)
        self._entry = np.zeros(num_slots, np.int32)  # entry of the branch, by slot
        self._entry_view, self._next_token_view = self._entry.data, self._next_token.data  # faster for single cells
        self._arrays: list[NDArray[Any]] = [self._entries, self._branches, self._tables, self._changes, self._stay]
        self._is_compact = True
        self._cached_rows: DecodeRows | None = None  # reused until a branch is added or removed

    # -- adding and removing branches -----------------------------------------------------------------------------

    def add_if_eligible(self, branch: Branch) -> None:
        """Add a branch, if its next step needs no decision.

        Asks its strategy once, for all steps, what to draw.
        """
        request, table = branch.request, branch.table
        if table is None or table.num_reserved == table.num_tokens or branch.num_tokens != table.num_tokens + 1:
            return  # it has no cell of its own for the token, or more tokens to compute
        if table.changed_from < table.num_pages or not request.strategy.has_fixed_draws:
            return  # its pages are not sent to the runner yet
        specs = request.strategy.draws(branch.id)
        if len(specs) != 1:
            return
        if self._num_entries == len(self._slot):
            self._compact()
        entry, slot, size = self._num_entries, branch.slot, self._kv.page_size
        spec = specs[0]
        self._specs[entry] = (  # first, as it raises for a spec that does not fit the arrays
            *(0, spec.width, spec.seed & MASK_64, spec.lane, 0),
            *(spec.temperature, spec.top_k, spec.top_p, spec.min_p, spec.num_top),
        )
        self._num_computed[entry] = self._num_reported[entry] = table.num_tokens
        self._num_pages[entry] = table.num_pages
        self._row[entry], self._is_unreserved[entry] = NO_ROW, False
        self._end[entry] = end = (slot + 1) * size
        self._cell[entry] = end - (table.num_reserved - table.num_tokens)
        self._page_tokens[slot, : table.num_tail_tokens] = np.frombuffer(table.tail_tokens, "<i4")
        self._append(branch, spec)

    def can_fork(self, branch: Branch) -> bool:
        """Return whether a branch can be forked within the batch: it is in it, and no step is planned ahead of it."""
        return branch.in_decode_batch and bool(self._draws.width[self._entry_view[branch.slot]] > 1)

    def fork(self, parent: Branch, child: Branch) -> None:
        """Add a branch that was forked from a branch of the batch, which was flushed before.

        `reserve` gives cells to both of them. Asks the strategy for draws only if they have edits or masks.
        """
        if self._num_entries == len(self._slot):
            self._compact()
        entry, source, slot = self._num_entries, self._entry_view[parent.slot], child.slot
        has_changes = self._changes[source] is not None
        spec = child.request.strategy.draws(child.id)[0] if has_changes else _NO_CHANGES
        self._is_unreserved[source] = self.has_unreserved = True
        self._entries[entry] = self._entries[source]
        self._num_reported[entry], self._row[entry] = self._num_computed[source], NO_ROW
        end = (slot + 1) * self._kv.page_size
        self._cell[entry] += end - self._end[source]
        self._end[entry] = end
        self._page_tokens[slot] = self._page_tokens[parent.slot]
        self._append(child, spec)

    def _append(self, branch: Branch, spec: DrawSpec) -> None:
        """Complete the entry of a branch after the last one."""
        entry, slot, request = self._num_entries, branch.slot, branch.request
        has_changes = spec.edit is not None or spec.mask is not None
        self._changes[entry] = spec.next_changes or ((spec.edit, spec.mask) if has_changes else None)
        self._stay[entry] = spec.changes_stay
        self._num_changing += spec.next_changes is not None
        self._is_used[entry] = branch.in_decode_batch = True
        self._branches[entry], self._tables[entry] = branch, branch.table
        self._slot[entry], self._entry[slot] = slot, entry
        self._next_token[entry] = int.from_bytes(branch.outputs[-TOKEN_BYTES:], "little", signed=True)
        order = (request.service_order << ORDINAL_BITS) + min(branch.ordinal, 2**ORDINAL_BITS - 1)
        self._service_order[entry] = order
        self._is_compact = self._is_compact and (entry == 0 or bool(self._service_order[entry - 1] < order))
        self._cached_rows = None
        self._num_entries += 1
        self.num_branches += 1
        request.num_batched += 1

    def remove(self, branch: Branch, *, discard: bool = False, keep_tail: bool = True) -> None:
        """Remove a branch, if it is in the batch.

        Its page table is updated, unless it is to be discarded, or closed without keeping its partly filled page.
        """
        if not branch.in_decode_batch:
            return
        entry = self._entry_view[branch.slot]
        if not discard:
            if keep_tail or self._cell[entry] == self._end[entry]:
                self._commit_to_table(branch, entry)
            else:
                self._report(branch, entry)
        self._num_changing -= callable(self._changes[entry])
        self._branches[entry] = self._tables[entry] = self._changes[entry] = self._stay[entry] = None
        self._is_used[entry] = branch.in_decode_batch = self._is_compact = False
        self._cached_rows = None
        self.num_branches -= 1
        branch.request.num_batched -= 1
        self.unbatched_requests.add(branch.request)

    def flush(self, branch: Branch) -> None:
        """Commit all computed tokens of a branch in the batch to its page table."""
        if not branch.in_decode_batch:
            return
        entry = self._entry_view[branch.slot]
        self._commit_to_table(branch, entry)
        if self._cell[entry] == self._end[entry]:
            self._is_unreserved[entry] = self.has_unreserved = True

    def _commit_to_table(self, branch: Branch, entry: int) -> None:
        table, num_computed, stop = self._tables[entry], int(self._num_computed[entry]), int(self._cell[entry])
        self._kv.commit(table, self._cells[stop - (num_computed - table.num_tokens) : stop].tobytes())
        self._report(branch, entry)

    def _report(self, branch: Branch, entry: int) -> None:
        num_computed = int(self._num_computed[entry])
        branch.request.num_computed_tokens += num_computed - int(self._num_reported[entry])
        self._num_reported[entry] = num_computed

    def flush_all(self) -> None:
        for branch in self._batched_branches():
            self.flush(branch)

    def remove_all(self) -> None:
        for branch in self._batched_branches():
            self.remove(branch)

    def awaits_token(self, branch: Branch) -> bool:
        """Return whether a branch in the batch was sampled, and not extended since."""
        return self._next_token_view[self._entry_view[branch.slot]] == AWAITING_TOKEN

    def extend(self, branch: Branch, token: int) -> bool:
        """Append `token` to a branch in the batch; return False, and change nothing, if it was not sampled."""
        entry = self._entry_view[branch.slot]
        if self._next_token_view[entry] != AWAITING_TOKEN:
            return False
        self._next_token_view[entry] = token
        branch.outputs += encode_token(token)  # as `Branch.append`, without a call
        branch.num_tokens += 1
        return True

    def num_missing_pages(self) -> int:
        """Count the branches that need another page for their newest token."""
        self._compact()
        return int(np.count_nonzero(self._cell[: self._num_entries] == self._end[: self._num_entries]))

    # -- a step ---------------------------------------------------------------------------------------------------

    def remove_ineligible(self) -> None:
        """Remove branches that were not extended since they were sampled, as they have nothing to compute."""
        if not self._is_compact:
            self._compact()
        undecided = (self._next_token[: self._num_entries] == AWAITING_TOKEN).nonzero()[0]
        if len(undecided):
            for branch in self._branches[undecided].tolist():
                self.remove(branch)

    def reserve(self) -> tuple[Sequence[PageCopy], list[tuple[int, int, int]]]:
        """Allocate pages for branches without a cell of their own; return page copies and table updates.

        If too few pages are free, all these branches are removed from the batch instead.
        """
        self.has_unreserved = False
        if not self._is_compact:
            self._compact()
        entries = self._is_unreserved[: self._num_entries].nonzero()[0]
        if not len(entries):
            return (), []
        branches, tables = self._branches[entries].tolist(), self._tables[entries].tolist()
        copies = self._kv.reserve([(table, table.num_tokens + 1) for table in tables])
        if copies is None:
            for branch in branches:
                self.remove(branch)
            return (), []
        updates: list[tuple[int, int, int]] = []
        for branch, table in zip(branches, tables, strict=True):
            if table.changed_from < table.num_pages:
                first, pages = table.pop_changes()
                updates += [(branch.slot, first + i, page) for i, page in enumerate(pages)]
                if table.tail_tokens:
                    branch.request.num_copied_pages += 1
                    self.copied_requests.add(branch.request)
        self._num_pages[entries] = [table.num_pages for table in tables]
        self._cell[entries] = self._end[entries] - [table.num_reserved - table.num_tokens for table in tables]
        self._is_unreserved[entries] = False
        return copies, updates

    def advance_pages(self) -> I32:
        """Append a page to each branch whose last page is full; return table updates [U, 3].

        If too few pages are free, all these branches are removed from the batch instead.
        """
        if not self._is_compact:
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

    def plan_rows(self, faults: list[tuple[LiveRequest, Exception]]) -> DecodeRows:
        """Plan one row and one draw for every branch in the batch.

        Appends to `faults` the requests whose strategy raised when asked for edits and masks.
        """
        if not self._is_compact:
            self._compact()
        count, cached = self._num_entries, self._cached_rows
        if cached is None:
            slots, ones, numbers = self._slot[:count].copy(), np.ones(count, np.int32), np.arange(count, dtype=np.int32)
            draws = Draws.of([numbers, *(array[:count].copy() for array in self._draws.arrays()[1:])])
            changes = [each for each in enumerate(self._changes[:count].tolist()) if each[1] is not None]
            cached = DecodeRows(self._branches[:count].tolist(), Rows(slots, ones, ones, ones), draws, changes)
            self._cached_rows = cached
            self._row[:count] = numbers
        start, rows = self._num_computed[:count].copy(), cached.rows
        draws = replace(cached.draws, position=start + 1)
        if cached.changes:
            draws = _with_changes(draws, cached, faults)
        rows = Rows(rows.slot, start, rows.num_tokens, self._next_token[:count].copy())
        return DecodeRows(cached.branches, rows, draws, cached.changes)

    def active_rows(self, rows: DecodeRows) -> I32 | None:
        """Return the indices of the last planned rows that are still valid; None for all. A query.

        A row is valid as long as its branch stays in the batch.
        """
        return None if self._is_unchanged_since(rows) else self._row[self._planned_entries()]

    def advance(self, rows: DecodeRows) -> None:
        """Record that the active rows of the last planned step were computed.

        Their tokens are known now.
        """
        entries = slice(len(rows.branches)) if self._is_unchanged_since(rows) else self._planned_entries()
        self._cells[self._cell[entries]] = self._next_token[entries]
        self._cell[entries] += 1
        self._num_computed[entries] += 1
        self._next_token[entries] = AWAITING_TOKEN

    def can_schedule_ahead(self) -> bool:
        """Return whether the batch can be planned again before the last step returns its tokens.

        That is so if the step samples one token of each branch, no edit or mask depends on it, and pages are free for
        the branches whose last page it fills. So it is for an empty batch. A query.
        """
        self._compact()
        count = self._num_entries
        if (
            (self._num_changing and not self._changes_stay())
            or self.has_unreserved
            or (self._row[:count] == NO_ROW).any()
            or (self._draws.width[:count] != 1).any()
        ):
            return False
        return int(np.count_nonzero(self._cell[:count] + 1 == self._end[:count])) <= self._kv.pool.num_free

    def _changes_stay(self) -> bool:
        """Return whether no edit or mask of the next step depends on the tokens of the last one."""
        entries = range(self._num_entries)
        return all(
            (stay := self._stay[entry]) is not None and stay() for entry in entries if callable(self._changes[entry])
        )

    def reconcile(self, slots: I32, drawn: I32) -> None:
        """Remove branches that were extended by a token other than the sampled one.

        The next step, planned ahead, computes the sampled token in their row; they compute their own token later.
        """
        drawn_at = np.full(len(self._slot), AWAITING_TOKEN, np.int32)
        drawn_at[slots] = drawn
        entries = self._planned_entries()
        others = entries[self._next_token[entries] != drawn_at[self._slot[entries]]]
        for branch in self._branches[others].tolist():
            self.remove(branch)

    def _is_unchanged_since(self, rows: DecodeRows) -> bool:
        """Return whether the batch is unchanged since `rows`, the last planned rows, were planned."""
        return self._cached_rows is not None and self._cached_rows.branches is rows.branches

    def _planned_entries(self) -> NDArray[np.intp]:
        """Return the entries of the branches with a row in the last planned step."""
        return np.flatnonzero(self._is_used & (self._row != NO_ROW))

    def _batched_branches(self) -> list[Branch]:
        members: list[Branch] = self._branches[self._is_used].tolist()
        return members

    def _compact(self) -> None:
        """Close the holes left by removed branches and sort the entries by service order."""
        if self._is_compact:
            return
        entries = np.flatnonzero(self._is_used)
        turns = self._service_order[entries]
        if (turns[1:] < turns[:-1]).any():
            entries = entries[np.argsort(turns)]
        count = self._num_entries = len(entries)
        for array in self._arrays:
            array[:count] = array[entries]
        self._branches[count:] = self._tables[count:] = self._changes[count:] = self._stay[count:] = None
        self._is_used[count:] = False
        self._entry[self._slot[:count]] = np.arange(count, dtype=np.int32)
        self._is_compact = True


def _with_changes(draws: Draws, rows: DecodeRows, faults: list[tuple[LiveRequest, Exception]]) -> Draws:
    """Return the draws of `rows` with their edits and masks."""
    edits: list[LogitEdit] = []
    masks: list[LogitMask] = []
    for draw, changes in rows.changes:
        try:
            edit, mask = changes() if callable(changes) else changes
        except Exception as error:
            faults.append((rows.branches[draw].request, error))
            continue
        if edit is not None:
            edits.append(LogitEdit(draw, *edit))
        if mask is not None:
            masks.append(LogitMask(draw, mask))
    return replace(draws, edits=tuple(edits), masks=tuple(masks))
