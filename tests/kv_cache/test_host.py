"""The host cache, step by step: swapping out, loading, and what can be matched in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.kv_cache.host import HostKVCache
from chatcache.kv_cache.page_hash import PageContent, encode_tokens
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import InvariantError, PagePool
from tests.kv_cache.host_simulation import TOKENS, HostSimulation, P, start_table


@pytest.mark.parametrize("caching", [True, False])
def test_swap_out_and_load_restores_every_token(caching: bool) -> None:
    simulation = HostSimulation(caching=caching)
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    host_pages = simulation.swap_out([table])
    assert len(host_pages) == 3 and simulation.kv.pool.num_in_use == 0
    assert simulation.step() == (3, 0)
    simulation.evict_all()
    again = simulation.start([*TOKENS, 7], host_pages)
    assert again is not None and again.num_tokens == 11
    assert simulation.step() == (0, 3)
    assert simulation.read(again) == TOKENS
    simulation.drop(host_pages)
    simulation.check([again])
    simulation.write(again, [7, 8])
    assert simulation.read(again) == [*TOKENS, 7, 8]


def test_restore_of_pages_still_on_the_device_loads_nothing() -> None:
    simulation = HostSimulation()
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    simulation.swap_out([table])
    simulation.step()
    again = simulation.start([*TOKENS, 7])
    assert again is not None and again.num_tokens == 11 and simulation.step() == (0, 0)


def test_swap_out_pages_can_be_overwritten_in_the_same_step() -> None:
    simulation = HostSimulation(num_pages=4)
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    host_pages = simulation.swap_out([table])
    other = start_table(simulation, [1] * 9)
    simulation.write(other, [1] * 9)  # uses all three pages, in the same step
    assert simulation.read(other) == [1] * 9
    simulation.kv.close(other)
    again = simulation.start([*TOKENS, 7], host_pages)
    assert again is not None and simulation.step() == (0, 3) and simulation.read(again) == TOKENS


def test_swap_out_of_forks_copies_shared_pages_once() -> None:
    simulation = HostSimulation()
    a = start_table(simulation, TOKENS)
    simulation.write(a, TOKENS)
    b = simulation.kv.fork(a)
    copies = simulation.kv.reserve([(a, 12), (b, 12)])
    assert copies is not None and len(copies) == 1
    simulation.move(list(copies))
    for table, token in ((a, 1), (b, 2)):
        simulation.cells[table.page_at(2)][3] = token
        simulation.kv.commit(table, encode_tokens([token]))
    simulation.kv.complete_step()
    host_pages = simulation.swap_out([a, b])
    assert len(host_pages) == 4 and simulation.step() == (4, 0)
    simulation.evict_all()
    first = simulation.start([*TOKENS, 1, 5])
    assert first is not None and simulation.step() == (0, 3) and simulation.read(first) == [*TOKENS, 1]
    second = simulation.start([*TOKENS, 2, 5])
    assert second is not None and simulation.step() == (0, 1), "the full pages are on the device now"
    assert simulation.read(second) == [*TOKENS, 2]
    assert second.pages()[:2] == first.pages()[:2]


def test_extend_fork_loads_only_its_own_pages() -> None:
    """Without prefix caching the child shares the pages of its fork source and loads only its own."""
    simulation = HostSimulation(caching=False)
    a = start_table(simulation, TOKENS)
    simulation.write(a, TOKENS)
    b = simulation.kv.fork(a)
    simulation.write(b, [50, 51, 52])
    host_pages = simulation.swap_out([a, b])
    simulation.step()
    simulation.evict_all()
    again = simulation.start([*TOKENS, 1], host_pages)
    assert again is not None and simulation.step() == (0, 3)
    child = simulation.kv.fork(again)
    simulation.kv.truncate(child, 8)
    chain = simulation.kv.hash_pages([*TOKENS, 50, 51, 52, 53], swapped=True)
    match = simulation.kv.match(chain, host_pages=host_pages)
    assert match.num_tokens == 14 and simulation.kv.extend(child, match)
    assert simulation.step() == (0, 2)
    assert simulation.read(child) == [*TOKENS, 50, 51, 52] and simulation.read(again) == TOKENS
    assert child.pages()[:2] == again.pages()[:2]
    simulation.check([again, child])


def test_swap_without_free_pages_changes_nothing() -> None:
    simulation = HostSimulation(num_pages=8, num_host_pages=2)
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    assert simulation.kv.swap_out(simulation.kv.page_contents([table])) is None
    simulation.check([table])
    simulation.kv.truncate(table, 8)
    host_pages = simulation.swap_out([table])
    simulation.step()
    simulation.evict_all()
    taken = simulation.kv.pool.allocate(6)
    assert taken is not None
    assert simulation.start([*TOKENS, 7]) is None, "one page is free, and two have to be loaded"
    simulation.kv.pool.release(taken)
    simulation.drop(host_pages)
    simulation.check([])


def test_swapped_pages_match_only_after_the_step() -> None:
    simulation = HostSimulation()
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    simulation.swap_out([table])
    simulation.kv.pool.unpublish_all()
    assert simulation.kv.match(simulation.kv.hash_pages(TOKENS)).num_tokens == 0, "not copied out yet"
    simulation.step()
    again = simulation.start(TOKENS)
    assert again is not None and again.num_tokens == 10
    assert simulation.kv.pool.is_index_empty, "not loaded yet"
    simulation.step()
    assert not simulation.kv.pool.is_index_empty


def test_aborted_step_publishes_no_copies() -> None:
    simulation = HostSimulation()
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    host_pages = simulation.swap_out([table])
    simulation.kv.abort_step()
    simulation.kv.pool.unpublish_all()
    assert simulation.kv.match(simulation.kv.hash_pages(TOKENS)).num_tokens == 0
    simulation.drop(host_pages)
    simulation.check([])

    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    simulation.swap_out([table])
    simulation.step()
    simulation.evict_all()
    again = simulation.start([*TOKENS, 7])
    assert again is not None and again.num_tokens == 11
    simulation.kv.close(again)
    simulation.kv.abort_step()
    assert simulation.kv.pool.is_index_empty, "no page was loaded"
    simulation.check([])


def test_load_cancelled_before_the_step_is_not_made() -> None:
    simulation = HostSimulation()
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    host_pages = simulation.swap_out([table])
    simulation.step()
    simulation.evict_all()
    again = simulation.start([*TOKENS, 7])
    assert again is not None
    swapped_again = simulation.swap_out([again])
    assert sorted(swapped_again) == sorted(host_pages), "the host pages are still there, and are held twice"
    assert simulation.step() == (0, 0)
    simulation.check([])


def test_host_page_being_loaded_is_not_overwritten() -> None:
    simulation = HostSimulation(num_host_pages=3)
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    host_pages = simulation.swap_out([table])
    simulation.step()
    simulation.evict_all()
    other = start_table(simulation, [1] * 9)
    simulation.write(other, [1] * 9)
    again = simulation.start([*TOKENS, 7])
    assert again is not None
    simulation.drop(host_pages)
    assert simulation.kv.swap_out(simulation.kv.page_contents([other])) is None, "all host pages are being read"
    simulation.step()
    assert simulation.read(again) == TOKENS
    assert simulation.kv.swap_out(simulation.kv.page_contents([other])) is not None


def test_close_with_discard_unpublishes_host_pages() -> None:
    simulation = HostSimulation()
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    host_pages = simulation.swap_out([table])
    simulation.step()
    again = simulation.start([*TOKENS, 7, 8])
    assert again is not None
    again.num_matched_tokens = 0  # the request computed these pages before it was swapped out
    simulation.write(again, [7, 8])
    simulation.kv.close(again, discard=True)
    simulation.drop(host_pages)
    assert simulation.kv.match(simulation.kv.hash_pages([*TOKENS, 7, 8])).num_tokens == 0
    simulation.check([])


def test_close_with_discard_keeps_matched_pages_and_their_copies_on_the_host() -> None:
    simulation = HostSimulation()
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    simulation.swap_out([table])
    simulation.step()
    again = simulation.start([*TOKENS, 7, 8])
    assert again is not None and again.num_tokens == 11
    simulation.write(again, [7, 8])
    simulation.kv.close(again, discard=True)
    match = simulation.kv.match(simulation.kv.hash_pages([*TOKENS, 7, 8]))
    assert match.num_tokens == 11, "two full pages on the device, and the copy of the partly filled one"
    simulation.evict_all()
    match = simulation.kv.match(simulation.kv.hash_pages([*TOKENS, 7, 8]))
    assert match.num_tokens == 11 and len(match.loads) == 3
    simulation.check([])


def test_check_invariants_detects_unaccounted_host_pages() -> None:
    simulation = HostSimulation()
    table = start_table(simulation, TOKENS)
    simulation.write(table, TOKENS)
    simulation.swap_out([table])
    simulation.step()
    simulation.held.clear()
    with pytest.raises(InvariantError, match="host page"):
        simulation.check([])


def loads_outlive_their_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostKVCache, "cancel_unreferenced_loads", lambda self, refs: None)


def pages_yet_to_come_are_copied_out(patch: pytest.MonkeyPatch) -> None:
    original = HostKVCache._partition

    def sort(self: HostKVCache, contents: dict[int, PageContent]) -> object:
        coming, self._pending_loads = self._pending_loads, {}
        try:
            return original(self, contents)
        finally:
            self._pending_loads = coming

    def find(self: PagePool, content: PageContent) -> None:
        """Return None, as if the host had evicted the page."""

    patch.setattr(HostKVCache, "_partition", sort)
    patch.setattr(PagePool, "find", find)


def page_being_read_is_not_pinned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostKVCache, "load", lambda self, page, load: self._pending_loads.update({page: load}))
    patch.setattr(HostKVCache, "abort_step", lambda self: self._pending_loads.clear())


def beginnings_are_not_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "published_prefixes", lambda self, parent, tokens, min_tokens: [])


@pytest.mark.parametrize(
    ("bug", "detecting_test"),
    [
        (loads_outlive_their_pages, test_load_cancelled_before_the_step_is_not_made),
        (pages_yet_to_come_are_copied_out, test_load_cancelled_before_the_step_is_not_made),
        (page_being_read_is_not_pinned, test_host_page_being_loaded_is_not_overwritten),
        (beginnings_are_not_forgotten, test_close_with_discard_unpublishes_host_pages),
    ],
)
def test_injected_bug_is_detected(
    bug: Callable[[pytest.MonkeyPatch], None], detecting_test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, InvariantError)):
        detecting_test()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_swaps_read_what_was_written(data: st.DataObject) -> None:
    """Tables grow, fork, leave for the host and come back on tiny pools; each always reads its own tokens."""
    caching = data.draw(st.booleans())
    simulation = HostSimulation(data.draw(st.integers(10, 20)), data.draw(st.integers(2, 12)), caching)
    tables: list[tuple[PageTable, list[int]]] = []
    away: list[tuple[list[int], list[int]]] = []
    for _ in range(data.draw(st.integers(5, 25))):
        match data.draw(st.sampled_from(["new", "grow", "grow", "fork", "leave", "leave", "back", "back", "end"])):
            case "new" if len(tables) < 3:
                tokens = [data.draw(st.integers(0, 1))] * data.draw(st.integers(1, 9))
                table = simulation.start([*tokens, 9])
                if table is not None:
                    simulation.step()
                    known = tokens[: table.num_tokens]
                    tables.append((table, known))
                    grow(simulation, tables, len(tables) - 1, tokens[table.num_tokens :])
            case "grow" if tables:
                index = data.draw(st.integers(0, len(tables) - 1))
                grow(simulation, tables, index, data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)))
            case "fork" if tables and len(tables) < 4:
                table, tokens = tables[data.draw(st.integers(0, len(tables) - 1))]
                child = simulation.kv.fork(table)
                kept = data.draw(st.integers(0, child.num_tokens))
                simulation.kv.truncate(child, kept)
                tables.append((child, tokens[:kept]))
            case "leave" if tables:
                table, tokens = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
                host_pages = simulation.kv.swap_out(simulation.kv.page_contents([table]))
                simulation.kv.close(table)
                if host_pages is not None:
                    simulation.held.append(host_pages)
                    away.append((host_pages, tokens))
                simulation.step()
            case "back" if away:
                host_pages, tokens = away[data.draw(st.integers(0, len(away) - 1))]
                back = simulation.start([*tokens, 9], host_pages)
                if back is not None:
                    assert back.num_tokens == len(tokens), "nothing is computed again"
                    simulation.drop(host_pages)
                    away.remove((host_pages, tokens))
                    simulation.step()
                    tables.append((back, tokens))
            case "end" if tables:
                simulation.kv.close(tables.pop()[0])
        simulation.check([table for table, _ in tables])
        for table, tokens in tables:
            assert simulation.read(table) == tokens


def grow(simulation: HostSimulation, tables: list[tuple[PageTable, list[int]]], index: int, tokens: list[int]) -> None:
    table, known = tables[index]
    if not tokens:
        return
    copies = simulation.kv.reserve([(table, table.num_tokens + len(tokens))])
    if copies is None:
        return
    simulation.move(list(copies))
    pages = table.pages()
    for position, token in enumerate(tokens, table.num_tokens):
        simulation.cells[pages[position // P]][position % P] = token
    simulation.kv.commit(table, encode_tokens(tokens))
    simulation.kv.complete_step()
    tables[index] = (table, [*known, *tokens])
