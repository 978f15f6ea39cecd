"""Every page in one letter: what a person looks at to see the cache at work.

    f  free     nobody holds it, nothing is known of it
    i  idle     nobody holds it; it may be matched, and goes when room is needed
    o  other    of another namespace, held or idle
    p  pinned   kept for good (no page is, so far)
    a  active   in the table of one branch
    s  shared   in the tables of several

A query: O(pages held or idle), about 20 ns each.

What the pages are used for, counted from the tables; and the proof that pool and tables agree.

Queries for tests, /metrics and idle self-checks: O(pages held), never part of a step.
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


@dataclass(frozen=True, slots=True)
class PageUsage:
    """`num_shared` pages stand in more than one table. `waste_fraction`: cells of pages in use that hold no token."""

    num_pages: int
    num_in_use: int
    num_idle: int
    num_blank: int
    num_shared: int
    waste_fraction: float


def page_usage(kv: KVCache, tables: Collection[PageTable]) -> PageUsage:
    """Count pages over the tables of all live branches. O(pages held), about 30 ns each."""
    pool, size = kv.pool, kv.page_size
    num_tables = num_tables_by_page(pool.num_pages, tables)
    num_filled: dict[int, int] = {}  # of pages at the end of a table
    num_ends: Counter[int] = Counter()
    for table in tables:
        full = table.num_tokens // size
        for index, page in enumerate(table.own_pages[full - table.num_prefix_pages :], full):
            num_filled[page] = max(num_filled.get(page, 0), table.num_tokens - index * size)
            num_ends[page] += 1
    num_held = int(np.count_nonzero(num_tables))
    num_empty = sum(size - max(n, 0) for page, n in num_filled.items() if num_ends[page] == num_tables[page])
    return PageUsage(
        num_pages=pool.num_usable,
        num_in_use=pool.num_in_use,
        num_idle=pool.num_idle,
        num_blank=pool.num_free - pool.num_idle,
        num_shared=int(np.count_nonzero(num_tables > 1)),
        waste_fraction=num_empty / (num_held * size) if num_held else 0.0,
    )


def num_tables_by_page(num_pages: int, tables: Collection[PageTable]) -> NDArray[np.int64]:
    """Count in how many tables each page stands. Shape [num_pages]."""
    runs = [(table.own_pages, 1) for table in tables]
    standing: dict[SharedPrefix, int] = {}
    for table in tables:
        for segment in table.shared_prefixes():
            standing[segment] = standing.get(segment, 0) + 1
    runs += [(segment.pages, count) for segment, count in standing.items()]
    lengths = [len(run) for run, _ in runs]
    pages = np.fromiter(chain.from_iterable(run for run, _ in runs), np.int64, sum(lengths))
    counts = np.repeat([count for _, count in runs], lengths)
    return np.bincount(pages, counts, num_pages).astype(np.int64)


def fractional_pages(groups: Sequence[Collection[PageTable]]) -> list[float]:
    """Charge pages to groups of tables (requests, tenants): a page shared by k groups costs each 1/k of it.

    The charges sum to the pages in use.
    """
    held = [{page for table in group for page in table.pages()} for group in groups]
    sharers = Counter(page for pages in held for page in pages)
    return [sum(1 / sharers[page] for page in pages) for pages in held]


def check_invariants(kv: KVCache, tables: Collection[PageTable], host_pages: Iterable[Sequence[int]] = ()) -> None:
    """Verify the pool alone, and that its reference counts are exactly what `tables` (all open ones) hold.

    `host_pages`: what each preempted request holds of the host tier. Call between steps.

    Raises: InvariantError naming the first claim that does not hold.
    """
    kv.pool.check_invariants()
    if kv.host is not None:
        _check_host(kv.host, host_pages)
    segments: dict[int, SharedPrefix] = {}
    standing: Counter[int] = Counter()
    holds: Counter[int] = Counter()
    for table in tables:
        _check_table(kv, table)
        holds.update(table.own_pages)
        if table.shared_prefix is not None:
            standing[id(table.shared_prefix)] += 1
        segments.update((id(segment), segment) for segment in table.shared_prefixes())
    for segment in segments.values():
        holds.update(segment.pages)
        if segment.parent is not None:
            standing[id(segment.parent)] += 1
    for key, segment in segments.items():
        if segment.refs != standing[key]:
            raise InvariantError(f"a segment counts {segment.refs} holders and has {standing[key]}")
    for page, refs in enumerate(kv.pool.refs):
        if refs != holds[page]:
            raise InvariantError(f"page {page} counts {refs} holders and has {holds[page]}")


def _check_host(host: HostKVCache, host_pages: Iterable[Sequence[int]]) -> None:
    host.pool.check_invariants()
    if any(host.pending_copies()):
        raise InvariantError("copies from or to the host outlived their step")
    holds = Counter(page for pages in host_pages for page in pages)
    for page, refs in enumerate(host.pool.refs):
        if refs != holds[page]:
            raise InvariantError(f"host page {page - 1} counts {refs} holders and has {holds[page]}")


def _check_table(kv: KVCache, table: PageTable) -> None:
    pages = table.pages()
    if len(set(pages)) != len(pages) or len(pages) < kv.num_pages_for(max(table.num_tokens, table.num_reserved)):
        raise InvariantError(f"a table of {table.num_tokens} tokens, room for {table.num_reserved}, holds {pages}")
    if table.num_tail_tokens != table.num_tokens % kv.page_size:
        raise InvariantError(f"a table of {table.num_tokens} tokens knows {table.num_tail_tokens} of its tail")
    for index in range(table.num_tokens // kv.page_size, kv.num_pages_for(table.num_reserved)):
        page = pages[index]
        private = kv.pool.refs[page] == 1 and not kv.pool.is_published(page)
        if table.num_reserved > table.num_tokens and not private:
            raise InvariantError(f"page {page} is reserved for writing but shared or published")
    full = pages[: table.num_tokens // kv.page_size]
    if full and (content := kv.pool.content(full[-1])) is not None:
        at_border = len(full) == table.num_public_pages
        if table.key != (namespace_hash(content.key, table.namespace) if at_border else content.key):
            raise InvariantError(f"a table of {table.num_tokens} tokens names its full pages wrongly")


LETTERS = "fiopas"  # the later a letter, the busier the page
FREE, IDLE, OTHER, PINNED, ACTIVE, SHARED = range(len(LETTERS))
MAX_CELLS = 4096


@dataclass(frozen=True, slots=True)
class PageStates:
    """One state and one owner (see `owners`) per page but the null page. Shapes: [num_pages - 1]."""

    states: NDArray[np.uint8]
    owners: NDArray[np.int64]


def page_states(kv: KVCache, tables: Collection[PageTable]) -> PageStates:
    """Look at all pages; `tables` are those of all live branches."""
    pool = kv.pool
    states = np.zeros(pool.num_pages, np.uint8)
    states[pool.idle_pages()] = IDLE
    num_tables = num_tables_by_page(pool.num_pages, tables)
    states[num_tables == 1] = ACTIVE
    states[num_tables > 1] = SHARED
    return PageStates(states[1:], np.frombuffer(pool.owners, np.int64)[1:].copy())


def page_cells(pages: PageStates, namespace: str | None, max_cells: int = MAX_CELLS) -> tuple[int, str]:
    """Draw the pages as a namespace may see them, or (None) as they are: (pages per cell, one letter per cell).

    The busiest page of a cell gives it its letter.
    """
    states = pages.states
    if namespace is not None:
        foreign = (pages.owners != owner_id(namespace)) & (pages.owners != PUBLIC_OWNER)
        states = np.where(foreign & (states != FREE), OTHER, states).astype(np.uint8)
    per_cell = -(-len(states) // max_cells)
    num_cells = -(-len(states) // per_cell)
    padded = np.zeros(num_cells * per_cell, np.uint8)
    padded[: len(states)] = states
    busiest = padded.reshape(num_cells, per_cell).max(axis=1)
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    return per_cell, letters[busiest].tobytes().decode("ascii")
