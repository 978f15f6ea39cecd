"""The decode batch loses nothing that it defers: the property detects these injected bugs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatcache.errors import EngineError
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import InvariantError
from chatcache.scheduler.decode_batch import DecodeBatch, DecodeRows
from chatcache.scheduler.fairness import DecodeShares
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.types.plan import I32
from tests.engine.generated_workloads import until_it_fails, workloads
from tests.engine.workloads import Workload, assert_equals_alone

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
Faults = list[tuple[LiveRequest, Exception]]


def table_not_updated(patch: Patch) -> None:
    patch.setattr(DecodeBatch, "_commit_to_table", lambda self, branch, place: None)


def table_not_updated_with_the_last_token(patch: Patch) -> None:
    original = DecodeBatch._commit_to_table

    def skip_last(self: DecodeBatch, branch: Branch, place: int) -> None:
        table = branch.table
        num_computed = int(self._num_computed[place])
        if table is not None and num_computed > table.num_tokens:
            self._num_computed[place] -= 1
        original(self, branch, place)
        if num_computed > self._num_computed[place]:
            self._num_computed[place] += 1

    patch.setattr(DecodeBatch, "_commit_to_table", skip_last)


def cached_parent_forked(patch: Patch) -> None:
    """The forked parent stays in the decode batch with a tail that it now shares."""
    original = KVCache.fork

    def fork(self: KVCache, table: PageTable, replaced: PageTable | None = None) -> PageTable:
        num_reserved = table.num_reserved
        child = original(self, table, replaced)
        if table.tail_tokens:
            table.num_reserved = num_reserved
        return child

    patch.setattr(KVCache, "fork", fork)


def shared_tail_taken_for_its_own(patch: Patch) -> None:
    original = DecodeBatch.add_if_eligible

    def enter(self: DecodeBatch, branch: Branch) -> None:
        table = branch.table
        if table is not None and table.tail_tokens and table.num_reserved == table.num_tokens:
            table.num_reserved = table.num_pages * self._kv.page_size
        original(self, branch)

    patch.setattr(DecodeBatch, "add_if_eligible", enter)


def new_rows_overlooked(patch: Patch) -> None:
    original = DecodeBatch.add_if_eligible

    def enter(self: DecodeBatch, branch: Branch) -> None:
        standing = self._cached_rows
        original(self, branch)
        self._cached_rows = standing

    patch.setattr(DecodeBatch, "add_if_eligible", enter)


def draws_of_before(patch: Patch) -> None:
    """Uses the draws of an earlier step after the batch changed."""
    original = DecodeBatch.plan_rows
    kept: dict[tuple[DecodeBatch, int], DecodeRows] = {}

    def rows(self: DecodeBatch, faults: Faults) -> DecodeRows:
        now = original(self, faults)
        before = kept.setdefault((self, len(now.branches)), now)
        draws = before.draws
        return replace(now, draws=replace(now.draws, seed=draws.seed, lane=draws.lane, width=draws.width))

    patch.setattr(DecodeBatch, "plan_rows", rows)


def edits_of_the_step_before(patch: Patch) -> None:
    """Edits and masks are asked for only when the batch changed."""
    original = DecodeBatch.add_if_eligible

    def enter(self: DecodeBatch, branch: Branch) -> None:
        original(self, branch)
        spec = self._changes[self._entry[branch.slot]] if branch.in_decode_batch else None
        if spec is not None and spec.next_changes is not None:
            edit, mask = spec.next_changes()
            self._changes[self._entry[branch.slot]] = replace(spec, edit=edit, mask=mask, next_changes=None)
            self._num_changing -= 1

    patch.setattr(DecodeBatch, "add_if_eligible", enter)


def edits_of_another_row(patch: Patch) -> None:
    original = DecodeBatch._compact

    def move_up(self: DecodeBatch) -> None:
        changes = self._changes.copy()
        original(self)
        self._changes[:] = changes

    patch.setattr(DecodeBatch, "_compact", move_up)


def drawn_at_the_position_before(patch: Patch) -> None:
    original = DecodeBatch.plan_rows

    def rows(self: DecodeBatch, faults: Faults) -> DecodeRows:
        rows = original(self, faults)
        return replace(rows, draws=replace(rows.draws, position=rows.draws.position - 1))

    patch.setattr(DecodeBatch, "plan_rows", rows)


def tokens_of_another_row(patch: Patch) -> None:
    original = DecodeBatch.plan_rows

    def rows(self: DecodeBatch, faults: Faults) -> DecodeRows:
        rows = original(self, faults)
        return replace(rows, rows=replace(rows.rows, tokens=np.roll(rows.rows.tokens, 1)))

    patch.setattr(DecodeBatch, "plan_rows", rows)


def slots_not_in_the_order_of_the_branches(patch: Patch) -> None:
    original = DecodeBatch.plan_rows

    def rows(self: DecodeBatch, faults: Faults) -> DecodeRows:
        rows = original(self, faults)
        return replace(rows, rows=replace(rows.rows, slot=np.sort(rows.rows.slot)[::-1].copy()))

    patch.setattr(DecodeBatch, "plan_rows", rows)


def row_moves_not_followed(patch: Patch) -> None:
    """Branches move to other rows without an update of their positions."""
    original = DecodeBatch._compact

    def move_up(self: DecodeBatch) -> None:
        places = self._entry.copy()
        original(self)
        self._entry[:] = places

    patch.setattr(DecodeBatch, "_compact", move_up)


def full_page_overlooked(patch: Patch) -> None:
    def turn_pages(self: DecodeBatch) -> I32:
        self._compact()
        return np.zeros((0, 3), np.int32)

    patch.setattr(DecodeBatch, "advance_pages", turn_pages)


def new_page_not_sent_to_the_runner(patch: Patch) -> None:
    original = DecodeBatch.advance_pages

    def turn_pages(self: DecodeBatch) -> I32:
        return original(self)[:0]

    patch.setattr(DecodeBatch, "advance_pages", turn_pages)


def new_page_of_another_row(patch: Patch) -> None:
    original = DecodeBatch.advance_pages

    def turn_pages(self: DecodeBatch) -> I32:
        updates = original(self)
        updates[:, 2] = np.roll(updates[:, 2], 1)
        return updates

    patch.setattr(DecodeBatch, "advance_pages", turn_pages)


def full_pool_not_noticed(patch: Patch) -> None:
    """The page table advances to a page that belongs to another branch."""
    original = KVCache.advance_pages

    def turn_pages(self: KVCache, tables: list[PageTable], tokens: bytes) -> list[int] | None:
        pages = original(self, tables, tokens)
        if pages is None:
            pages = [table.own_pages[-1] for table in tables]
            for table in tables:
                table.num_reserved += self.page_size
        return pages

    patch.setattr(KVCache, "advance_pages", turn_pages)


def _forget_tokens_of_full_pages(patch: Patch, index: int) -> None:
    original = KVCache.advance_pages

    def turn_pages(self: KVCache, tables: list[PageTable], tokens: bytes) -> list[int] | None:
        known = np.frombuffer(tokens, "<i4").reshape(len(tables), self.page_size).copy()
        known[:, index] = 1
        return original(self, tables, known.tobytes())

    patch.setattr(KVCache, "advance_pages", turn_pages)


def first_token_of_the_page_unknown(patch: Patch) -> None:
    _forget_tokens_of_full_pages(patch, 0)


def last_token_of_the_page_unknown(patch: Patch) -> None:
    _forget_tokens_of_full_pages(patch, -1)


def reordered_branch_keeps_its_cells(patch: Patch) -> None:
    """A branch that shares all pages of its parent writes on without pages of its own."""
    original = DecodeBatch._share_pages

    def share(self: DecodeBatch, parent: Branch, child: Branch) -> None:
        entry = self._entry[child.slot]
        reserved = int(self._num_reserved[entry])
        original(self, parent, child)
        self._num_reserved[entry] = reserved

    patch.setattr(DecodeBatch, "_share_pages", share)


def reordered_branch_keeps_the_contents_of_its_page(patch: Patch) -> None:
    patch.setattr(KVCache, "copy_tails", lambda self, pairs: [])


def reordered_branch_keeps_its_full_pages(patch: Patch) -> None:
    patch.setattr(KVCache, "adopt", lambda self, table, child: True)


BUGS: list[Callable[[Patch], None]] = [
    table_not_updated,
    table_not_updated_with_the_last_token,
    cached_parent_forked,
    shared_tail_taken_for_its_own,
    new_rows_overlooked,
    draws_of_before,
    edits_of_the_step_before,
    edits_of_another_row,
    drawn_at_the_position_before,
    tokens_of_another_row,
    slots_not_in_the_order_of_the_branches,
    row_moves_not_followed,
    full_page_overlooked,
    new_page_not_sent_to_the_runner,
    new_page_of_another_row,
    full_pool_not_noticed,
    first_token_of_the_page_unknown,
    last_token_of_the_page_unknown,
    reordered_branch_keeps_its_cells,
    reordered_branch_keeps_the_contents_of_its_page,
    reordered_branch_keeps_its_full_pages,
]


def resting_branches_taken_for_computed(patch: Patch) -> None:
    patch.setattr(DecodeBatch, "_planned_entries", lambda self: np.flatnonzero(self._is_used))


def rows_counted_as_if_none_rested(patch: Patch) -> None:
    original = DecodeRows.select

    def select(self: DecodeRows, which: I32) -> DecodeRows:
        rows = original(self, which)
        return replace(rows, draws=replace(rows.draws, row=which))

    patch.setattr(DecodeRows, "select", select)


def edits_of_all_rows(patch: Patch) -> None:
    original = DecodeRows.select

    def select(self: DecodeRows, which: I32) -> DecodeRows:
        return replace(original(self, which), changes=[change for change in self.changes if change[0] < len(which)])

    patch.setattr(DecodeRows, "select", select)


def beams_rest_one_by_one(patch: Patch) -> None:
    def order(self: DecodeShares, index: int) -> tuple[int, int]:
        branch = self._branches[index]
        return branch.request.service_order, branch.ordinal

    patch.setattr(DecodeShares, "_order", order)


RESTING_BUGS: list[Callable[[Patch], None]] = [
    resting_branches_taken_for_computed,
    rows_counted_as_if_none_rested,
    edits_of_all_rows,
    beams_rest_one_by_one,
]


@pytest.mark.parametrize("bug", RESTING_BUGS, ids=lambda bug: bug.__name__)
def test_random_workloads_detect_an_injected_bug_of_resting_branches(
    bug: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    @until_it_fails(max_examples=300)
    @given(st.one_of(workloads(), workloads(tight=True)))
    def property_holds(workload: Workload) -> None:
        assert_equals_alone(replace(workload, rests=True, policy="fair", crashes=frozenset(), swap_crashes=frozenset()))

    bug(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, KeyError, AttributeError, IndexError, EngineError)):
        property_holds()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_random_workloads_detect_an_injected_decode_batch_bug(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    where = st.one_of(workloads(), workloads(tight=True))
    if bug is full_pool_not_noticed:  # one in a few hundred of all, and of these nearly every other one
        where = workloads(tight=True, calm=True)

    @until_it_fails(max_examples=300)
    @given(where)
    def property_holds(workload: Workload) -> None:
        assert_equals_alone(workload)

    bug(monkeypatch)
    # KeyError: the queue is asked to remove a request that it no longer has. AttributeError: the decode batch looks for
    # a branch in the row of another one. IndexError: a page table lacks the page that another one was given.
    with pytest.raises((AssertionError, InvariantError, KeyError, AttributeError, IndexError)):
        property_holds()
