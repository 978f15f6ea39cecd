"""Every page in one letter: what a person looks at to see the cache at work.

    f  free     nobody holds it, nothing is known of it
    i  idle     nobody holds it; it may be matched, and goes when room is needed
    o  other    of another namespace, held or idle
    p  pinned   kept for good (no page is, so far)
    a  active   in the table of one branch
    s  shared   in the tables of several

A query: O(pages held or idle), about 20 ns each.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chatcache.kv.audit import num_tables_by_page
from chatcache.kv.cache import KVCache
from chatcache.kv.owners import PUBLIC_OWNER, owner_of
from chatcache.kv.table import PageTable

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
        foreign = (pages.owners != owner_of(namespace)) & (pages.owners != PUBLIC_OWNER)
        states = np.where(foreign & (states != FREE), OTHER, states).astype(np.uint8)
    per_cell = -(-len(states) // max_cells)
    num_cells = -(-len(states) // per_cell)
    padded = np.zeros(num_cells * per_cell, np.uint8)
    padded[: len(states)] = states
    busiest = padded.reshape(num_cells, per_cell).max(axis=1)
    letters = np.frombuffer(LETTERS.encode(), np.uint8)
    return per_cell, letters[busiest].tobytes().decode("ascii")
