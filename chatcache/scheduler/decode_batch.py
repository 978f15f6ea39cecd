"""The persistent decode batch: all branches that decode one token per step, kept as arrays.

A branch is in the decode batch while nothing about its next step has to be decided: all its tokens but the newest are
computed, the cell for that token is the branch's own, and its strategy will ask for the same draw as last time, apart
from edits and masks of the logits (penalties, grammars). Its steps are then planned with a few array operations for the
whole batch, without calls to its page table, and to its strategy only for those edits and masks:

    entry             0    1    2    3    4
    branch           b7   b9    -   b4  b12      a removed branch leaves a hole; before the next step the entries are
    num_computed     31   80    -   64   17      compacted and sorted by service order
    next_token       52    3    -   11   90

    add_if_eligible   a sampled branch was extended, or is about to be, and needs no decision in its next step
    reorder           a beam search chose its next beams: some branches continue as copies of others
    remove            the branch is about to be closed or preempted, or there is no page left for it

Once in `page_size` steps the page of a branch is full; `advance_pages` then appends a page for all such branches.
`reserve` gives pages to all branches without a cell of their own, as they share their last page with a fork.

The page table of a branch in the batch lags by up to one page. The tokens computed into its last page are committed to
the table when the page is full or on `flush`. Code that reads the number of tokens of a table flushes first; code that
changes a table removes its branch from the batch first, which flushes as well.

After `reorder` the partly filled page of a parent is copied onto the child's own page, without an allocation. A flush
before the next step is planned finds both tables on the parent's page instead, as after any fork.

Asynchronous scheduling: a step can be planned while the tokens sampled by the previous step are still on the device.
The rows of its plan then contain PENDING_TOKEN, and `advance` records their tokens when they are known, before the next
step is planned. Hence everything committed to a table between two steps was computed, and its result was seen.
A branch that left the batch since its row was planned loses that row (`active_rows`), even if it has returned since;
its token is sampled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatcache.errors import EngineError
from chatcache.kv_cache.copy_on_write import PageCopy
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.states import StatePool
from chatcache.scheduler.request import Branch, LiveRequest, encode_token
from chatcache.types.actions import MASK_64, DrawSpec, pack_draws
from chatcache.types.plan import I32, PENDING_TOKEN, Draws, LogitEdit, LogitMask, Rows

AWAITING_TOKEN = PENDING_TOKEN  # drawn, and not extended since
NO_ROW = -1
RESTING = -2  # no row either, as the branch waits for its turn
ORDINAL_BITS = 20
_NO_UPDATES = np.zeros((0, 3), np.int32)


_DRAW_FIELDS = tuple(field.name for field in fields(Draws))[:10]  # the arrays
_ENTRY = np.dtype(
    [
        *((name, array.dtype) for name, array in zip(_DRAW_FIELDS, pack_draws((), (), ()).arrays(), strict=True)),
        ("slot", np.int32),
        ("service_order", np.int64),
        ("num_computed", np.int32),
        ("num_reserved", np.int32),  # as in its table
        ("num_before", np.int32),  # tokens that were computed when the branch was added
        ("next_token", np.int32),
        ("planned_row", np.int32),  # in the last planned step
        ("state", np.int32),  # of models with recurrent layers
        ("is_used", np.bool_),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode batch's part of one step: for each branch one row of one token, and one draw.

    In service order, and parallel to `branches`; `draws.row` counts from 0. `changes`: the draws with edits or masks.
    """

    branches: list[Branch]
    rows: Rows
    draws: Draws
    changes: Sequence[tuple[int, DrawSpec]] = ()

    def select(self, which: I32) -> DecodeRows:
        """Return these rows, with arrays of their own."""
        row_after = {row: index for index, row in enumerate(which.tolist())}
        return DecodeRows(
            [self.branches[row] for row in row_after],
            self.rows.select(which),
            replace(self.draws.select(which), row=np.arange(len(which), dtype=np.int32)),
            [(row_after[draw], spec) for draw, spec in self.changes if draw in row_after],
        )


class DecodeBatch:
    """The branches in the decode batch, as arrays.

    An array has one entry per branch, or one per runner row where a comment says so; those of `_ENTRY` are columns of
    `_entries`. `unbatched_requests`: running requests with a branch outside the batch, which the scheduler serves one
    by one. `has_unreserved`: some branches have committed all cells of their own; call `reserve`. `copied_requests`:
    those for which it returned page copies in this plan, which are not made yet. `choose_branches`: given all branches,
    returns the indices of those that decode in the next step, None for all; the others rest, with all they hold.
    """

    def __init__(
        self, kv: KVCache, num_slots: int, choose_branches: Callable[[list[Branch]], list[int] | None] | None = None
    ) -> None:
        self.unbatched_requests: set[LiveRequest] = set()
        self.copied_requests: set[LiveRequest] = set()
        self.num_branches = 0
        self.has_unreserved = False
        self._kv = kv
        self._choose_branches = choose_branches
        self._num_entries = 0
        capacity = 2 * num_slots  # with holes, so that the entries are not compacted for each fork of a step
        self._branches = np.full(capacity, None, object)
        self._tables = np.full(capacity, None, object)
        self._changes = np.full(capacity, None, object)  # the `DrawSpec`, if it has edits or masks
        self._entries = entries = np.zeros(capacity, _ENTRY)
        self._is_used, self._slot, self._service_order = entries["is_used"], entries["slot"], entries["service_order"]
        self._num_computed, self._num_reserved = entries["num_computed"], entries["num_reserved"]
        self._num_before, self._next_token = entries["num_before"], entries["next_token"]
        self._row, self._state = entries["planned_row"], entries["state"]
        self._is_in_flight = False  # the last planned rows are not committed
        self._drawn = np.zeros(num_slots if kv.states is not None else 0, np.int32)  # by slot, see `record_drawn`
        self._draws, self._width = Draws.of([entries[name] for name in _DRAW_FIELDS]), entries["width"]
        self._num_changing = 0  # entries whose edit or mask may differ from step to step
        self._entry = np.zeros(num_slots, np.int32)  # entry of the branch, by slot
        self._entry_view, self._next_token_view = self._entry.data, self._next_token.data  # faster for single cells
        self._num_computed_view, self._num_reserved_view = self._num_computed.data, self._num_reserved.data
        self._uncopied_pages: dict[LiveRequest, list[tuple[Branch, Branch]]] = {}  # (parent, child), see `reorder`
        self._arrays: list[NDArray[Any]] = [self._entries, self._branches, self._tables, self._changes]
        self._is_compact = True
        self._cached_rows: DecodeRows | None = None  # reused until a branch is added or removed

    # -- adding and removing branches -----------------------------------------------------------------------------

    def add_if_eligible(self, branch: Branch) -> None:
        """Add a branch if its next step needs no decision; ask once what to draw in all steps."""
        request, table, slot = branch.request, branch.table, branch.slot
        if table is None or not self._is_eligible(branch, table):
            return
        specs = request.strategy.draws(branch.id)
        if len(specs) != 1:
            return
        if self._num_entries == len(self._slot):
            self._compact()
        entry, spec = self._num_entries, specs[0]
        next_token = branch.last_token if branch.num_tokens > table.num_tokens else AWAITING_TOKEN
        order = (request.service_order << ORDINAL_BITS) + min(branch.ordinal, 2**ORDINAL_BITS - 1)
        self._entries[entry] = (  # raises, before the entry is in use, for a spec that does not fit the arrays
            *(0, spec.width, spec.seed & MASK_64, spec.lane, 0, spec.temperature),
            *(spec.top_k, spec.top_p, spec.min_p, spec.num_top),
            *(slot, order, table.num_tokens, table.num_reserved, table.num_tokens, next_token, NO_ROW, table.state),
            True,
        )
        self._branches[entry], self._tables[entry], self._entry[slot] = branch, table, entry
        if spec.edit is not None or spec.mask is not None or spec.next_changes is not None:
            self._changes[entry] = spec
            self._num_changing += spec.next_changes is not None
        self._is_compact = self._is_compact and (entry == 0 or bool(self._service_order[entry - 1] < order))
        self._cached_rows = None
        self._num_entries += 1
        self.num_branches += 1
        request.num_batched += 1
        branch.in_decode_batch = True

    def _is_eligible(self, branch: Branch, table: PageTable) -> bool:
        if table.num_reserved == table.num_tokens or branch.num_tokens > table.num_tokens + 1:
            return False  # it has no cell of its own for the token, or more tokens to compute
        if table.changed_from < table.num_pages or not branch.request.strategy.has_fixed_draws:
            return False  # its pages are not sent to the runner yet
        return self._kv.states is None or self._kv.states.is_writable(table)

    def can_reorder(self, request: LiveRequest) -> bool:
        """Return whether all branches of a lockstep request can be reordered here: no step is planned ahead of them."""
        if request.num_unbatched or not request.lockstep or self._kv.states is not None:
            return False
        return bool(self._width[self._entry_view[request.leader.slot]] > 1)

    def reorder(self, steps: Iterable[tuple[Branch, Branch, int]]) -> list[tuple[int, int, int]]:
        """Turn each branch of (branch, parent, token) into a copy of its parent with one more token.

        Returns the row copies. The branch shares the parent's full pages at once; `reserve` copies the partly filled
        one onto its own. Raises: EngineError if a branch was not sampled, or named before its child.
        """
        rows: list[tuple[int, int, int]] = []
        entries, next_token = self._entry_view, self._next_token_view
        num_computed, num_reserved = self._num_computed_view, self._num_reserved_view
        for branch, parent, token in steps:
            entry = entries[branch.slot]
            source = entry if branch is parent else entries[parent.slot]
            if next_token[entry] != AWAITING_TOKEN or next_token[source] != AWAITING_TOKEN:
                raise EngineError(f"an action names branch {branch.id}, which was not sampled")
            if branch is not parent:
                branch.outputs, table = parent.outputs[:], self._tables[entry]
                if num_computed[entry] == num_reserved[entry]:
                    self._share_pages(parent, branch)
                    rows.append((parent.slot, branch.slot, table.num_pages))
                else:
                    self._uncopied_pages.setdefault(branch.request, []).append((parent, branch))
                    if self._kv.adopt(self._tables[source], table):
                        rows.append((parent.slot, branch.slot, table.num_prefix_pages))
                self.has_unreserved = True
            next_token[entry] = token
            branch.outputs += encode_token(token)
            branch.num_tokens += 1
        return rows

    def _share_pages(self, parent: Branch, child: Branch) -> None:
        """Let a branch share all pages of its parent, and none of its own; `reserve` gives cells to both."""
        source, entry = self._entry_view[parent.slot], self._entry_view[child.slot]
        self._commit_to_table(parent, source)
        table = self._kv.fork(self._tables[source], self._tables[entry])
        table.changed_from = table.num_prefix_pages
        for each in (source, entry):
            self._num_reserved_view[each] = self._num_computed_view[each]
        self.has_unreserved = True

    def _share_uncopied_pages(self, request: LiveRequest) -> None:
        """Replace page copies that are not planned yet by shared pages, as the tables are read or closed."""
        for parent, child in self._uncopied_pages.pop(request, ()):
            self._share_pages(parent, child)

    def remove(
        self, branch: Branch, *, discard: bool = False, keep_tail: bool = True, is_closing: bool = False
    ) -> None:
        """Remove a branch, if it is in the batch.

        Its page table is updated, unless it is to be discarded, or closed without keeping its partly filled page. A
        table that is to be closed (`is_closing`) also gets the token that a launched row has added to its state.
        """
        if not branch.in_decode_batch:
            return
        self._share_uncopied_pages(branch.request)
        entry = self._entry_view[branch.slot]
        if not discard:
            if keep_tail or self._num_computed[entry] == self._num_reserved[entry]:
                self._commit_to_table(branch, entry)
                if is_closing and self._kv.states is not None:
                    self._commit_ahead(branch, entry)
            branch.request.num_computed_tokens += int(self._num_computed[entry] - self._num_before[entry])
        spec: DrawSpec | None = self._changes[entry]
        self._num_changing -= spec is not None and spec.next_changes is not None
        self._branches[entry] = self._tables[entry] = self._changes[entry] = None
        self._is_used[entry] = branch.in_decode_batch = self._is_compact = False
        self._cached_rows = None
        self.num_branches -= 1
        branch.request.num_batched -= 1
        self.unbatched_requests.add(branch.request)

    def flush(self, branch: Branch) -> None:
        """Commit all computed tokens of a branch in the batch to its page table."""
        if branch.in_decode_batch:
            self._share_uncopied_pages(branch.request)
            entry = self._entry_view[branch.slot]
            self._commit_to_table(branch, entry)
            self.has_unreserved |= bool(self._num_computed[entry] == self._num_reserved[entry])

    def _commit_to_table(self, branch: Branch, entry: int) -> None:
        table, num_computed = self._tables[entry], self._num_computed_view[entry]
        if num_computed > table.num_tokens:
            self._kv.commit(table, branch.span(table.num_tokens, num_computed))
        table.num_state_tokens = num_computed + (self._is_in_flight and self._row[entry] >= 0)

    def _commit_ahead(self, branch: Branch, entry: int) -> None:
        """Commit the token of a row on the device to a table that ends, so that its state can be named."""
        table = self._tables[entry]
        if table.num_state_tokens == table.num_tokens + 1 <= table.num_reserved:
            token = int(self._next_token[entry])
            token = int(self._drawn[branch.slot]) if token == AWAITING_TOKEN else token
            self._kv.commit_ahead(table, encode_token(token))

    def record_drawn(self, slots: I32, drawn: I32) -> None:
        """Record the tokens that a step sampled, which the rows of the next step, already launched, read."""
        self._drawn[slots] = drawn

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
        return len(self._full_entries())

    def _full_entries(self) -> NDArray[np.intp]:
        """Return the entries of the branches without a cell of their own for the next token."""
        count = self._num_entries
        full: NDArray[np.intp] = (self._num_computed[:count] == self._num_reserved[:count]).nonzero()[0]
        return full

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
        """Allocate pages for branches without a cell of their own whose tables do not lag: forks, and full pages.

        Returns page copies and table updates. If too few pages are free, all these branches are removed from the batch.
        Also returns the copies that reordered branches need.
        """
        self.has_unreserved = False
        tail_copies = self._copy_tails() if self._uncopied_pages else []
        if not self._is_compact:
            self._compact()
        entries = self._full_entries()
        entries = entries[[table.num_tokens == table.num_reserved for table in self._tables[entries].tolist()]]
        if not len(entries):
            return tail_copies, []
        branches, tables = self._branches[entries].tolist(), self._tables[entries].tolist()
        copies = self._kv.reserve([(table, table.num_tokens + 1) for table in tables])
        if copies is None:
            for branch in branches:
                self.remove(branch)
            return tail_copies, []
        copied = {copy.dst for copy in copies}
        updates: list[tuple[int, int, int]] = []
        for branch, table in zip(branches, tables, strict=True):
            if table.changed_from < table.num_pages:
                first, pages = table.pop_changes()
                updates += [(branch.slot, index, page) for index, page in enumerate(pages, first)]
                if table.own_pages[-1] in copied:
                    branch.request.num_copied_pages += 1
                    self.copied_requests.add(branch.request)
        self._num_reserved[entries] = [table.num_reserved for table in tables]
        return [*copies, *tail_copies], updates

    def _copy_tails(self) -> list[PageCopy]:
        """Return the page copies that reordered branches need."""
        slots = [(parent.slot, child.slot) for pairs in self._uncopied_pages.values() for parent, child in pairs]
        for request, pairs in self._uncopied_pages.items():
            request.num_copied_pages += len(pairs)
        self.copied_requests.update(self._uncopied_pages)
        self._uncopied_pages.clear()
        return self._kv.copy_tails(self._tables[self._entry[slots]].tolist())

    def advance_pages(self) -> I32:
        """Append a page to each branch whose last page is full; return table updates [U, 3].

        If too few pages are free, all these branches are removed from the batch instead.
        """
        if not self._is_compact:
            self._compact()
        full, size = self._full_entries(), self._kv.page_size
        if not len(full):
            return _NO_UPDATES
        branches, stops = self._branches[full].tolist(), self._num_computed[full]
        tokens = [branch.span(stop - size, stop) for branch, stop in zip(branches, stops.tolist(), strict=True)]
        pages = self._kv.advance_pages(self._tables[full].tolist(), b"".join(tokens))
        if pages is None:
            for branch in branches:
                self.remove(branch)
            return _NO_UPDATES
        self._num_reserved[full] = stops + size
        updates = np.empty((len(full), 3), np.int32)
        updates[:, 0], updates[:, 1], updates[:, 2] = self._slot[full], stops // size, pages
        return updates

    def plan_rows(self, faults: list[tuple[LiveRequest, Exception]]) -> DecodeRows:
        """Plan one row and one draw for every branch in the batch that does not rest.

        Appends to `faults` the requests whose strategy raised when asked for edits and masks.
        """
        if not self._is_compact:
            self._compact()
        planned = self._cached_rows
        if planned is None:
            planned = self._cached_rows = self._plan_all_rows()
        at: slice | I32 = slice(self._num_entries)
        if self._choose_branches is not None:
            chosen = self._choose_branches(planned.branches)
            if chosen is not None:
                self._row[at] = RESTING
                at = np.array(chosen, np.int32)
                planned = planned.select(at)
            self._row[at] = planned.draws.row
        start, rows = self._num_computed[at].copy(), planned.rows
        edits, masks = _edits_and_masks(planned, faults) if planned.changes else ((), ())
        draws = replace(planned.draws, position=start + 1, edits=edits, masks=masks)
        states = rows.state if self._kv.states is None else self._state[at].copy()
        rows = Rows(rows.slot, start, rows.num_tokens, self._next_token[at].copy(), states)
        self._is_in_flight = True
        return DecodeRows(planned.branches, rows, draws, planned.changes)

    def _plan_all_rows(self) -> DecodeRows:
        """Plan a row and a draw for every branch, apart from what changes with each step."""
        count = self._num_entries
        branches: list[Branch] = self._branches[:count].tolist()
        slots, ones, numbers = self._slot[:count].copy(), np.ones(count, np.int32), np.arange(count, dtype=np.int32)
        draws = Draws.of([numbers, *(array[:count].copy() for array in self._draws.arrays()[1:])])
        changes = [each for each in enumerate(self._changes[:count].tolist()) if each[1] is not None]
        self._row[:count] = numbers
        return DecodeRows(branches, Rows(slots, ones, ones, ones), draws, changes)

    def active_rows(self, planned: list[Branch]) -> I32 | None:
        """Return the indices of the rows of the last step, `planned`, that are still valid; None for all. A query.

        A row is valid as long as its branch stays in the batch.
        """
        if self._is_unchanged_since(planned):
            return None
        entries = self._planned_entries()
        return None if len(entries) == len(planned) else self._row[entries]

    def advance(self, planned: list[Branch]) -> None:
        """Record that the active rows of the last step, `planned`, were computed: their tokens are known."""
        entries = slice(len(planned)) if self._is_unchanged_since(planned) else self._planned_entries()
        self._num_computed[entries] += 1
        self._next_token[entries] = AWAITING_TOKEN
        self._is_in_flight = False

    def save_states(self, states: StatePool) -> list[Branch]:
        """Take the snapshots that are due after the planned step; return their branches."""
        entries = self._planned_entries()
        due = entries[(self._num_computed[entries] + 1) % states.interval == 0].tolist()
        for entry in due:
            states.save(self._tables[entry], int(self._num_computed[entry]) + 1)
        return [self._branches[entry] for entry in due]

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
            or (self._width[:count] != 1).any()
        ):
            return False
        num_full = np.count_nonzero(self._num_computed[:count] + 1 == self._num_reserved[:count])
        return int(num_full) <= self._kv.pool.num_free

    def _changes_stay(self) -> bool:
        """Return whether no edit or mask of the next step depends on the tokens of the last one."""
        specs: list[DrawSpec | None] = self._changes[: self._num_entries].tolist()
        changing = [spec.changes_stay for spec in specs if spec is not None and spec.next_changes is not None]
        return all(stay is not None and stay() for stay in changing)

    def reconcile(self, slots: I32, drawn: I32) -> None:
        """Remove branches that were extended by a token other than the sampled one.

        The next step, planned ahead, computes the sampled token in their row; they compute their own token later.
        """
        drawn_at = np.full(len(self._slot), RESTING, np.int32)
        drawn_at[slots] = drawn
        entries = self._planned_entries()
        sampled = drawn_at[self._slot[entries]]
        others = entries[(sampled != RESTING) & (sampled != self._next_token[entries])]
        for branch in self._branches[others].tolist():
            self.remove(branch)

    def _is_unchanged_since(self, planned: list[Branch]) -> bool:
        """Return whether the batch is unchanged since the last step, with rows of these branches, was planned."""
        return self._cached_rows is not None and self._cached_rows.branches is planned

    def _planned_entries(self) -> NDArray[np.intp]:
        """Return the entries of the branches with a row in the last planned step."""
        return np.flatnonzero(self._is_used & (self._row >= 0))

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
        self._branches[count:] = self._tables[count:] = self._changes[count:] = None
        self._is_used[count:] = False
        self._entry[self._slot[:count]] = np.arange(count, dtype=np.int32)
        self._is_compact = True


def _edits_and_masks(
    rows: DecodeRows, faults: list[tuple[LiveRequest, Exception]]
) -> tuple[tuple[LogitEdit, ...], tuple[LogitMask, ...]]:
    """Ask for the edits and masks of a step; append to `faults` the requests whose strategy raises."""
    edits: list[LogitEdit] = []
    masks: list[LogitMask] = []
    for draw, spec in rows.changes:
        try:
            edit, mask = (spec.edit, spec.mask) if spec.next_changes is None else spec.next_changes()
        except Exception as error:
            faults.append((rows.branches[draw].request, error))
            continue
        if edit is not None:
            edits.append(LogitEdit(draw, edit))
        if mask is not None:
            masks.append(LogitMask(draw, mask))
    return tuple(edits), tuple(masks)
