"""The page map: the letter of each page as a tenant or an operator sees it, also during random operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatcache.kv_cache import copy_on_write, manager, stats
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import CacheScope
from chatcache.kv_cache.page_table import PageTable, record_owner
from chatcache.kv_cache.pool import PagePool
from chatcache.kv_cache.stats import LETTERS, PageStates, page_cells, page_states
from tests.kv_cache.helpers import open_and_fill, token_range
from tests.kv_cache.simulation import run_simulation
from tests.kv_cache.test_simulation import NUM_STEPS

MAX_RUNS = 250
Patch = pytest.MonkeyPatch


def cells(kv: KVCache, tables: Sequence[PageTable], namespace: str | None = None) -> str:
    return page_cells(page_states(kv, tables), namespace)[1]


def test_page_cells_show_each_state_as_its_letter() -> None:
    kv = KVCache(12, 4, "digest")
    idle = open_and_fill(kv, token_range(8, 50))
    first, own = idle.pages(), open_and_fill(kv, token_range(6), CacheScope("a", 4))
    kv.close(idle)
    shared = open_and_fill(kv, token_range(9, 20), "b")
    fork = kv.fork(shared)
    tables = [own, shared, fork]
    shown = cells(kv, tables)
    assert [shown[page - 1] for page in first] == ["i", "i"]
    assert [shown[page - 1] for page in own.pages()] == ["a", "a"]
    assert {shown[page - 1] for page in fork.pages()} == {"s"}
    assert shown.count("f") == 11 - 2 - 2 - 3
    theirs = cells(kv, tables, "b")
    public, private = own.pages()
    assert (theirs[public - 1], theirs[private - 1]) == ("a", "o"), "a public page belongs to all namespaces"
    assert [theirs[page - 1] for page in first] == ["o", "o"]
    assert [theirs[page - 1] for page in shared.pages()] == ["s", "s", "s"]


@given(st.lists(st.integers(0, len(LETTERS) - 1), min_size=1, max_size=300), st.integers(1, 40))
def test_page_cells_show_the_most_used_page_of_a_cell(states: list[int], max_cells: int) -> None:
    pages = PageStates(np.array(states, np.uint8), np.zeros(len(states), np.int64))
    per_cell, drawn = page_cells(pages, None, max_cells)
    groups = [states[start : start + per_cell] for start in range(0, len(states), per_cell)]
    assert drawn == "".join(LETTERS[max(group)] for group in groups)
    assert len(drawn) <= max_cells and (per_cell == 1) == (len(states) <= max_cells)
    assert per_cell == 1 or -(-len(states) // (per_cell - 1)) > max_cells, "as fine as possible"


def new_pages_unmarked(patch: Patch) -> None:
    patch.setattr(manager, "record_owner", lambda owners, table, first: None)


def advanced_pages_unmarked(patch: Patch) -> None:
    original = KVCache.advance_pages

    def advance_pages(self: KVCache, tables: Sequence[PageTable], tokens: bytes) -> list[int] | None:
        owners = self.pool.owners[:]
        pages = original(self, tables, tokens)
        self.pool.owners[:] = owners
        return pages

    patch.setattr(KVCache, "advance_pages", advance_pages)


def loaded_pages_marked_private(patch: Patch) -> None:
    patch.setattr(manager, "PUBLIC_OWNER", 5)


def loaded_pages_unmarked(patch: Patch) -> None:
    patch.setattr(manager, "owner_id", lambda namespace: 5)


def truncated_tails_unmarked(patch: Patch) -> None:
    patch.setattr(copy_on_write, "record_owner", lambda owners, table, first: None)


def border_page_marked_public(patch: Patch) -> None:
    def note(owners: object, table: PageTable, first: int) -> None:
        table.num_public_pages += 1
        record_owner(owners, table, first)  # type: ignore[arg-type]
        table.num_public_pages -= 1

    patch.setattr(manager, "record_owner", note)


def idle_pages_shown_free(patch: Patch) -> None:
    patch.setattr(PagePool, "idle_pages", lambda self: np.array(list(self._idle)[1:], np.int64))


def shared_prefixes_counted_once(patch: Patch) -> None:
    """A page of a shared prefix counts as if only one table held it."""
    original = stats.num_tables_by_page
    patch.setattr(stats, "num_tables_by_page", lambda n, tables: np.minimum(original(n, tables), 1))


BUGS: list[Callable[[Patch], None]] = [
    new_pages_unmarked,
    advanced_pages_unmarked,
    loaded_pages_marked_private,
    loaded_pages_unmarked,
    truncated_tails_unmarked,
    border_page_marked_public,
    idle_pages_shown_free,
    shared_prefixes_counted_once,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.slow
def test_injected_bug_is_detected(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    for num_runs in range(MAX_RUNS):
        try:
            run_simulation(num_runs, NUM_STEPS, audit=False)
        except AssertionError as error:
            caught = str(error)
            break
    else:
        pytest.fail(f"{bug.__name__} was not detected in {MAX_RUNS} runs")
    assert "map" in caught or "owner recorded" in caught
