"""The partly filled last pages of tables: who may write into one, and who has to copy it first.

A: [p0 p1 p2|tail t]   fork   A: [p0 p1 p2|t]   A writes   A: [p0 p1 p2|t']   copy (t -> t')
                              B: [p0 p1 p2|t]              B: [p0 p1 p2|t ]   B is now the last holder of t
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from chatcache.kv_cache.host import HostKVCache
from chatcache.kv_cache.page_hash import hash_page
from chatcache.kv_cache.page_table import PageTable, record_owner
from chatcache.kv_cache.pool import PagePool


class PageCopy(NamedTuple):
    """Copy the contents of page `src` to page `dst` before this step writes anything."""

    src: int
    dst: int


class CopyOnWrite:
    """Copy on write over one pool. Sources of copies are kept until the step is over, whoever lets go of them."""

    def __init__(self, pool: PagePool, host: HostKVCache | None, page_size: int) -> None:
        self._pool = pool
        self._host = host
        self._page_size = page_size
        self._sources: set[int] = set()

    def tail_page(self, table: PageTable) -> int:
        return table.own_pages[table.num_tokens // self._page_size - table.num_prefix_pages]

    def tables_to_copy(self, tables: Iterable[PageTable]) -> tuple[set[int], set[int]]:
        """Say which tables (by id), all about to write, must have their tail copied, and which only should.

        Must: others hold the page. Should: nobody else does, but it is published with more than this table's tokens.
        """
        forced: set[int] = set()
        optional: set[int] = set()
        given_up: dict[int, int] = {}
        for table in tables:
            if not table.tail_tokens or table.num_reserved > table.num_tokens:
                continue
            page = self.tail_page(table)
            content = self._pool.content(page)
            if self._num_holders(page) - given_up.get(page, 0) > 1:
                forced.add(id(table))
                given_up[page] = given_up.get(page, 0) + 1
            elif content is not None and content.tokens != table.tail_tokens and self._pool.is_published(page):
                optional.add(id(table))
        return forced, optional

    def copy_tail(self, table: PageTable, dst: int) -> PageCopy:
        """Put `dst` in the place of the table's tail."""
        index = table.num_tokens // self._page_size
        src = table.own_pages[index - table.num_prefix_pages]
        if src not in self._sources:
            self._sources.add(src)
            self._pool.retain((src,))
        self._pool.release((src,))
        table.own_pages[index - table.num_prefix_pages] = dst
        table.changed_from = min(table.changed_from, index)
        return PageCopy(src, dst)

    def unpublish_tail(self, table: PageTable) -> None:
        """Take a tail that is about to be written out of the index."""
        page = self.tail_page(table)
        self._pool.unpublish(page)
        if self._host is not None:
            self._host.invalidate_load(page)

    def publish_tail(self, table: PageTable) -> None:
        """Publish a tail that is this table's alone; one that others hold will be published by the last of them."""
        page = self.tail_page(table)
        if self._host is not None and self._host.is_loading(page):
            return  # it will be here after the step only
        if self._num_holders(page) == 1 and not self._pool.is_published(page):
            record_owner(self._pool.owners, table, table.num_tokens // self._page_size)  # it may have been cut since
            self._pool.publish(page, hash_page(table.key, table.tail_tokens))

    def release_sources(self) -> None:
        """Let go of this step's sources: its copies have been made, or the step was given up."""
        for page in self._sources:
            self._pool.release((page,))
        self._sources.clear()

    def _num_holders(self, page: int) -> int:
        return self._pool.refs[page] - (page in self._sources)
