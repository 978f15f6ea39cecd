"""States of recurrent layers: copies, snapshots, matches, eviction and the budget."""

from __future__ import annotations

import pytest

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import encode_tokens
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import InvariantError
from chatcache.kv_cache.states import ZERO_STATE, StatePool
from chatcache.kv_cache.stats import check_invariants
from tests.kv_cache.helpers import find_match, token_range

PAGE = 4
TEXT = token_range(30)


def cache(num_states: int = 13) -> tuple[KVCache, StatePool]:
    kv = KVCache(64, PAGE, num_states=num_states)
    assert kv.states is not None
    return kv, kv.states


def compute(kv: KVCache, table: PageTable, num_tokens: int, *, save: bool = False) -> list[tuple[int, int]]:
    """Compute tokens of TEXT up to `num_tokens`; return the copies of states before the step."""
    assert kv.states is not None
    assert kv.reserve([(table, num_tokens)]) is not None
    kv.states.reserve([table])
    start, table.num_state_tokens = table.num_tokens, num_tokens
    if save:
        kv.states.save(table, num_tokens)
    copies, saves = kv.states.pending_copies()
    assert len(saves) <= save and not {source for source, _ in copies} & {target for _, target in copies}
    kv.commit(table, encode_tokens(TEXT[start:num_tokens]))
    kv.complete_step()
    return copies


def opened(kv: KVCache, num_tokens: int = len(TEXT), scope: str = "") -> PageTable:
    return kv.open(find_match(kv, TEXT[:num_tokens], scope))


def test_branch_starts_with_a_copy_of_the_zero_state_and_continues_in_place() -> None:
    kv, _ = cache()
    table = opened(kv)
    assert table.state == ZERO_STATE
    assert compute(kv, table, 5) == [(ZERO_STATE, table.state)]
    assert compute(kv, table, 9) == []
    check_invariants(kv, [table])


def test_closed_branch_is_matched_at_exactly_its_last_token() -> None:
    kv, states = cache()
    table = opened(kv)
    compute(kv, table, 10)
    state = table.state
    kv.close(table)
    again = opened(kv)
    assert (again.num_tokens, again.state, states.num_copies) == (10, state, 1)
    check_invariants(kv, [again])


def test_match_ends_where_a_snapshot_is_though_more_pages_are_cached() -> None:
    kv, _ = cache()
    table = opened(kv)
    compute(kv, table, 6, save=True)
    compute(kv, table, 17)
    kv.close(table, keep_tail=False)  # the pages of 16 tokens stay; the state is not kept
    match = find_match(kv, TEXT)
    assert (match.num_tokens, len(match.pages), match.tail_tokens) == (6, 2, encode_tokens(TEXT[4:6]))
    assert find_match(kv, TEXT[:6]).num_tokens == 0  # its last token has to be computed, for its logits


def test_snapshot_of_another_namespace_or_other_tokens_is_not_matched() -> None:
    kv, _ = cache()
    table = opened(kv, scope="a")
    compute(kv, table, 10)
    kv.close(table)
    assert find_match(kv, TEXT, "a").num_tokens == 10
    assert find_match(kv, TEXT, "b").num_tokens == 0
    assert find_match(kv, [*TEXT[:9], 99, 98], "a").num_tokens == 0


def test_n_branches_after_a_prompt_take_n_minus_one_copies() -> None:
    kv, states = cache()
    tables = [opened(kv)]
    compute(kv, tables[0], 8)
    first = tables[0].state
    tables += [kv.fork(tables[0]) for _ in range(7)]
    assert {table.state for table in tables} == {first}
    num_before, num_pages = states.num_copies, kv.pool.num_in_use
    copies = [copy for table in tables for copy in compute(kv, table, 9)]
    assert len(copies) == states.num_copies - num_before == 7
    assert kv.pool.num_in_use == num_pages + 8  # at a page boundary no page is copied
    assert tables[-1].state == first and len({table.state for table in tables}) == 8
    check_invariants(kv, tables)


def test_truncated_table_falls_back_to_the_snapshot_before() -> None:
    kv, _ = cache()
    table = opened(kv)
    compute(kv, table, 6, save=True)
    compute(kv, table, 15)
    exact, shorter = kv.fork(table), kv.fork(table)
    kv.truncate(exact, 15)
    kv.truncate(shorter, 13)
    assert (exact.num_tokens, exact.state) == (15, table.state)
    assert shorter.num_tokens == 6 and shorter.state not in (ZERO_STATE, table.state)
    none = kv.fork(table)
    kv.truncate(none, 5)
    assert (none.num_tokens, none.state) == (0, ZERO_STATE)
    check_invariants(kv, [table, exact, shorter, none])


def test_state_that_is_ahead_of_its_table_is_not_named() -> None:
    kv, states = cache()
    table = opened(kv)
    compute(kv, table, 9)
    table.num_state_tokens = 10  # a row that was launched and is not committed
    kv.close(table)
    assert (states.num_snapshots, states.num_in_use) == (0, 0)


def test_discarded_branch_leaves_no_snapshot_of_what_it_computed() -> None:
    kv, _ = cache()
    first = opened(kv)
    compute(kv, first, 10)
    kv.close(first)
    second = opened(kv)
    compute(kv, second, 12, save=True)
    compute(kv, second, 20, save=True)
    kv.close(second, discard=True)
    again = opened(kv)
    compute(kv, again, 25)  # computes the same pages again
    kv.close(again, keep_tail=False)
    assert find_match(kv, TEXT).num_tokens == 10


def test_failed_step_names_no_snapshot() -> None:
    kv, states = cache()
    table = opened(kv)
    kv.reserve([(table, 6)])
    states.reserve([table])
    table.num_state_tokens = 6
    states.save(table, 6)
    kv.close(table)
    kv.abort_step()
    assert (states.num_snapshots, states.num_in_use) == (0, 0)
    check_invariants(kv, [])


def test_eviction_keeps_the_snapshot_that_costs_most_to_compute_again() -> None:
    kv, states = cache(num_states=5)  # 3 live, 1 in flight
    table = opened(kv)
    for num_tokens in (20, 22, 24):
        compute(kv, table, num_tokens, save=True)
    assert states.num_snapshots == 3 and states.num_evictions == 0
    compute(kv, table, 30, save=True)
    assert states.num_evictions == 1
    kv.close(table, keep_tail=False)
    assert find_match(kv, TEXT[:24]).num_tokens == 20  # the oldest, which saves 20 tokens, while 22 saves two


def test_snapshots_never_take_the_state_of_a_branch() -> None:
    kv, states = cache(num_states=5)
    tables = [opened(kv)]
    compute(kv, tables[0], 4, save=True)
    assert (states.max_live, states.max_in_flight) == (3, 1)
    tables += [opened(kv, 4) for _ in range(states.max_live - 1)]
    for table in tables[1:]:
        compute(kv, table, 4, save=True)
    check_invariants(kv, tables)
    assert states.num_in_use == 3
    more = [opened(kv, 4), opened(kv, 4)]
    compute(kv, more[0], 4)
    with pytest.raises(InvariantError, match="no state is free"):
        compute(kv, more[1], 4)


def test_model_without_recurrent_layers_has_no_states() -> None:
    kv = KVCache(8, PAGE)
    table = kv.open(find_match(kv, TEXT))
    assert kv.states is None and table.state == ZERO_STATE
