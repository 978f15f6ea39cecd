"""Whose each page is: told by who may write it, since a name does not say for whom it was made.

Noted whenever a table is given cells to write, and when a cut tail gets its name: so it is right of held and of idle
pages alike. A blank page keeps the mark of whoever wrote it last.
"""

from __future__ import annotations

from array import array

from chatcache.kv.table import PageTable

PUBLIC_OWNER = 1  # of the pages that every namespace may match


def owner_of(namespace: str) -> int:
    """Return the mark of a namespace. Good within this process."""
    return hash(namespace)


def note_owner(owners: array[int], table: PageTable, first: int) -> None:
    """Mark the table's own pages from entry `first` on."""
    pages, owner = table.own[first - table.num_base_pages :], owner_of(table.namespace)
    num_public = table.num_public_pages - first
    for place, page in enumerate(pages):
        owners[page] = PUBLIC_OWNER if place < num_public else owner
