"""Statistics of the pages: counts, shares, the page map, and checks of all invariants.

All functions are queries for /metrics, tests and the idle self-check: O(pages held), never part of a step.

The page map shows each page as one letter:

    f  free     no branch holds it and nothing is known of its contents (blank)
    i  idle     no branch holds it; it can be matched, and is evicted when space is needed
    o  other    it belongs to another namespace, held or idle
    p  pinned   never evicted (no page is pinned at present)
    a  active   in the page table of one branch
    s  shared   in the page tables of several branches
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from chatcache.kv_cache.host import HostKVCache
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import namespace_hash
from chatcache.kv_cache.page_table import PUBLIC_OWNER, PageTable, SharedPrefix, owner_id
from chatcache.kv_cache.pool import InvariantError
from chatcache.types.stats import SlotUsage

LETTERS = "fiopas"  # in ascending order of use: a cell of several pages shows the last of its letters
FREE, IDLE, OTHER, PINNED, ACTIVE, SHARED = range(len(LETTERS))
MAX_CELLS = 4096


@dataclass(frozen=True, slots=True)
class PageUsage:
    """Page counts of one cache.

    `num_shared`: pages in more than one table. `slots` divides the whole pool by use.
    """

    num_pages: int
    num_in_use: int
    num_idle: int
    num_blank: int
    num_shared: int
    slots: SlotUsage


def page_usage(kv: KVCache, tables: Collection[PageTable], num_kept_free: int = 0) -> PageUsage:
    """Count pages and slots by use, given the tables of all live branches. About 30 ns per held page.

    Admission keeps `num_kept_free` pages free for running requests: the pages that are allocated next.
    """
    pool, size = kv.pool, kv.page_size
    num_tables = num_tables_by_page(pool.num_pages, tables)
    num_filled: dict[int, int] = {}  # cells with a token, by last page of a table
    num_ends: Counter[int] = Counter()  # tables that end on the page
    for table in tables:
        full = table.num_tokens // size
        for index, page in enumerate(table.own_pages[full - table.num_prefix_pages :], full):
            num_filled[page] = max(num_filled.get(page, 0), table.num_tokens - index * size)
            num_ends[page] += 1
    num_held = int(np.count_nonzero(num_tables))
    num_empty = sum(size - max(n, 0) for page, n in num_filled.items() if num_ends[page] == num_tables[page])
    num_tokens, num_blank = num_held * size - num_empty, pool.num_free - pool.num_idle
    num_kept_free = min(num_kept_free, pool.num_free)
    return PageUsage(
        num_pages=pool.num_usable,
        num_in_use=pool.num_in_use,
        num_idle=pool.num_idle,
        num_blank=num_blank,
        num_shared=int(np.count_nonzero(num_tables > 1)),
        slots=SlotUsage(
            token=num_tokens,
            empty=pool.num_in_use * size - num_tokens,
            kept_free=num_kept_free * size,
            cached=min(pool.num_idle, pool.num_free - num_kept_free) * size,
            free=max(num_blank - num_kept_free, 0) * size,
        ),
    )


def num_tables_by_page(num_pages: int, tables: Collection[PageTable]) -> NDArray[np.int64]:
    """Count the tables that contain each page. Shape [num_pages]."""
    runs = [(table.own_pages, 1) for table in tables]
    num_tables: dict[SharedPrefix, int] = {}
    for table in tables:
        for prefix in table.shared_prefixes():
            num_tables[prefix] = num_tables.get(prefix, 0) + 1
    runs += [(prefix.pages, count) for prefix, count in num_tables.items()]
    lengths = [len(run) for run, _ in runs]
    pages = np.fromiter(chain.from_iterable(run for run, _ in runs), np.int64, sum(lengths))
    counts = np.repeat([count for _, count in runs], lengths)
    return np.bincount(pages, counts, num_pages).astype(np.int64)


def fractional_pages(groups: Sequence[Collection[PageTable]]) -> list[float]:
    """Divide the pages in use among groups of tables (requests, tenants).

    A page that k groups hold counts 1/k for each. The shares add up to the number of pages in use.
    """
    held = [{page for table in group for page in table.pages()} for group in groups]
    sharers = Counter(page for pages in held for page in pages)
    return [sum(1 / sharers[page] for page in pages) for pages in held]


@dataclass(frozen=True, slots=True)
class PageStates:
    """State and owner id of each page except the null page. Shapes: [num_pages - 1]."""

    states: NDArray[np.uint8]
    owners: NDArray[np.int64]


def page_states(kv: KVCache, tables: Collection[PageTable]) -> PageStates:
    """Return the state and owner of all pages. About 20 ns per page.

    `tables` are those of all live branches.
    """
    pool = kv.pool
    states = np.zeros(pool.num_pages, np.uint8)
    states[pool.idle_pages()] = IDLE
    num_tables = num_tables_by_page(pool.num_pages, tables)
    states[num_tables == 1] = ACTIVE
    states[num_tables > 1] = SHARED
    return PageStates(states[1:], np.frombuffer(pool.owners, np.int64)[1:].copy())


def page_cells(pages: PageStates, namespace: str | None, max_cells: int = MAX_CELLS) -> tuple[int, str]:
    """Draw the page map: (pages per cell, one letter per cell).

    A large pool has several pages per cell, and a cell shows its most used page. Pages of other namespaces show as "o",
    unless `namespace` is None (operators).
    """
    states = pages.states
    if namespace is not None:
        foreign = (pages.owners != owner_id(namespace)) & (pages.owners != PUBLIC_OWNER)
        states = np.where(foreign & (states != FREE), OTHER, states).astype(np.uint8)
    per_cell = -(-len(states) // max_cells)
    num_cells = -(-len(states) // per_cell)
    padded = np.zeros(num_cells * per_cell, np.uint8)
    padded[: len(states)] = states
    most_used = padded.reshape(num_cells, per_cell).max(axis=1)
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    return per_cell, letters[most_used].tobytes().decode("ascii")


def check_invariants(kv: KVCache, tables: Collection[PageTable], host_pages: Iterable[Sequence[int]] = ()) -> None:
    """Verify the pool, all tables, and that the tables hold exactly the counted references.

    `tables` are all open tables, `host_pages` the host pages of each preempted request. Call between steps;
    a launched step may hold the sources of its copies.

    Raises: InvariantError describing the first violation.
    """
    kv.pool.check_invariants()
    for violation in kv.states.violations(tables) if kv.states is not None else ():
        raise InvariantError(violation)
    if kv.host is not None:
        _check_host(kv.host, host_pages)
    prefixes: dict[int, SharedPrefix] = {}
    num_standing: Counter[int] = Counter()  # tables and prefixes on each shared prefix
    num_holders = Counter(kv.copy_sources)  # by page
    for table in tables:
        _check_table(kv, table)
        num_holders.update(table.own_pages)
        if table.shared_prefix is not None:
            num_standing[id(table.shared_prefix)] += 1
        prefixes.update((id(prefix), prefix) for prefix in table.shared_prefixes())
    for prefix in prefixes.values():
        num_holders.update(prefix.pages)
        if prefix.parent is not None:
            num_standing[id(prefix.parent)] += 1
    for key, prefix in prefixes.items():
        if prefix.refs != num_standing[key]:
            raise InvariantError(f"a shared prefix counts {prefix.refs} holders and has {num_standing[key]}")
    for page, refs in enumerate(kv.pool.refs):
        if refs != num_holders[page]:
            raise InvariantError(f"page {page} counts {refs} holders and has {num_holders[page]}")


def _check_host(host: HostKVCache, host_pages: Iterable[Sequence[int]]) -> None:
    """Verify that the host pool's reference counts are exactly those of the given host pages."""
    host.pool.check_invariants()
    if any(host.pending_copies()):
        raise InvariantError("copies from or to the host are pending after their step")
    num_holders = Counter(page for pages in host_pages for page in pages)
    for page, refs in enumerate(host.pool.refs):
        if refs != num_holders[page]:
            raise InvariantError(f"host page {page - 1} counts {refs} holders and has {num_holders[page]}")


def _check_table(kv: KVCache, table: PageTable) -> None:
    """Verify that a table's pages, reserved cells, tail tokens and key are consistent."""
    pages = table.pages()
    if len(set(pages)) != len(pages) or len(pages) < kv.num_pages_for(max(table.num_tokens, table.num_reserved)):
        raise InvariantError(
            f"a table of {table.num_tokens} tokens with {table.num_reserved} reserved holds pages {pages}"
        )
    if table.num_tail_tokens != table.num_tokens % kv.page_size:
        raise InvariantError(f"a table of {table.num_tokens} tokens records {table.num_tail_tokens} tail tokens")
    for index in range(table.num_tokens // kv.page_size, kv.num_pages_for(table.num_reserved)):
        page = pages[index]
        private = kv.pool.refs[page] == 1 and not kv.pool.is_published(page)
        if table.num_reserved > table.num_tokens and not private:
            raise InvariantError(f"page {page} is reserved for writing but shared or published")
    full = pages[: table.num_tokens // kv.page_size]
    if full and (content := kv.pool.content(full[-1])) is not None:
        at_border = len(full) == table.num_public_pages
        border_key = namespace_hash(content.key, table.namespace, table.salt)
        if table.key != (border_key if at_border else content.key):
            raise InvariantError(f"a table of {table.num_tokens} tokens has a wrong key")
