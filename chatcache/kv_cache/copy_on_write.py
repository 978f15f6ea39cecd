"""Copy on write for the partly filled last pages of page tables.

A fork shares the parent's last page, too. The first branch that writes to it gets a copy; the last branch that still
holds the original writes in place:

    A: [p0 p1 p2 | t]   fork    A: [p0 p1 p2 | t]   A writes    A: [p0 p1 p2 | u]   page copy t -> u, then A writes u
                                B: [p0 p1 p2 | t]               B: [p0 p1 p2 | t]   B is the last holder of t
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from chatcache.kv_cache.host import HostKVCache
from chatcache.kv_cache.page_hash import hash_page
from chatcache.kv_cache.page_table import PageTable, record_owner
from chatcache.kv_cache.pool import PagePool


class PageCopy(NamedTuple):
    """A copy of page `src` to page `dst`, to be made before this step writes to any page."""

    src: int
    dst: int


class CopyOnWrite:
    """Copy-on-write state of one pool for the step being planned.

    `sources`: the source pages of the copies. They are retained until the step is over, so that they cannot be evicted
    before they are read, even if all their tables are closed meanwhile.
    """

    def __init__(self, pool: PagePool, host: HostKVCache | None, page_size: int) -> None:
        self._pool = pool
        self._host = host
        self._page_size = page_size
        self.sources: set[int] = set()

    def tail_page(self, table: PageTable) -> int:
        """Return the table's partly filled last page."""
        return table.own_pages[table.num_tokens // self._page_size - table.num_prefix_pages]

    def tables_to_copy(self, tables: Iterable[PageTable]) -> tuple[set[int], set[int]]:
        """Decide for tables that are about to write which of their last pages to copy first.

        Returns two sets of `id(table)`: those that must be copied, because another table holds the page, and those that
        should be, because the page is published with more tokens than this table has: without the copy, the table has
        to unpublish the page before it writes.
        """
        forced: set[int] = set()
        optional: set[int] = set()
        num_left: dict[int, int] = {}  # by page: the tables that hold it and get no copy
        for table in tables:
            if not table.tail_tokens or table.num_reserved > table.num_tokens:
                continue
            page = self.tail_page(table)
            num_holders = num_left.get(page) or self._num_holders(page)
            if num_holders > 1:
                forced.add(id(table))
                num_left[page] = num_holders - 1
                continue
            content = self._pool.content(page)
            if content is not None and content.tokens != table.tail_tokens and self._pool.is_published(page):
                optional.add(id(table))
        return forced, optional

    def copy_tail(self, table: PageTable, dst: int) -> PageCopy:
        """Replace the table's last page by page `dst`; return the page copy for the step."""
        index = table.num_tokens // self._page_size
        src = table.own_pages[index - table.num_prefix_pages]
        self.hold_sources((src,))
        self._pool.release((src,))
        table.own_pages[index - table.num_prefix_pages] = dst
        table.changed_from = min(table.changed_from, index)
        return PageCopy(src, dst)

    def hold_sources(self, pages: Iterable[int]) -> None:
        """Retain the source pages of copies until the step is over."""
        for page in pages:
            if page not in self.sources:
                self.sources.add(page)
                self._pool.refs[page] += 1  # the page is held, so `retain` has nothing else to do

    def unpublish_tail(self, table: PageTable) -> None:
        """Remove the table's last page from the index before the table writes to it in place."""
        page = self.tail_page(table)
        self._pool.unpublish(page)
        if self._host is not None:
            self._host.invalidate_load(page)

    def publish_tail(self, table: PageTable) -> None:
        """Publish the partly filled last page of a table that is being closed.

        A page that other tables hold is left to the last of them. A page that is still being loaded from the host is
        published after the step.
        """
        page = self.tail_page(table)
        if self._host is not None and self._host.is_loading(page):
            return
        if self._num_holders(page) == 1 and not self._pool.is_published(page):
            # The table may have been truncated, and be private now, since the owner was recorded.
            record_owner(self._pool.owners, table, table.num_tokens // self._page_size)
            self._pool.publish(page, hash_page(table.key, table.tail_tokens))

    def release_sources(self, kept: Collection[int] = ()) -> None:
        """Release the source pages of copies that were made, aborted or dropped: all but the `kept` ones."""
        for page in self.sources.difference(kept):
            self._pool.release((page,))
        self.sources.intersection_update(kept)

    def _num_holders(self, page: int) -> int:
        """Count the tables that hold the page; the reference that a pending copy holds is left out."""
        return self._pool.refs[page] - (page in self.sources)
