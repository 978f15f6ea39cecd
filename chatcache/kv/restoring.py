"""Giving a table the pages of a match, those that only the host has included."""

from __future__ import annotations

from chatcache.kv.host import HostTier, Load
from chatcache.kv.matching import PrefixMatch
from chatcache.kv.owners import PUBLIC_OWNER, owner_of
from chatcache.kv.pool import NULL_PAGE, BrokenInvariant, PagePool
from chatcache.kv.table import PageTable


def lengthen(pool: PagePool, host: HostTier | None, page_size: int, table: PageTable, match: PrefixMatch) -> bool:
    """Lengthen a table of full pages, with which the match begins, to all of it; False if there is no room."""
    first = table.num_pages
    pages = match.pages[first:]
    loads = [(index - first, host_page) for index, host_page in match.loads if index >= first]
    present = [page for page in pages if page != NULL_PAGE]
    pool.retain(present)
    fresh = pool.allocate(len(loads))
    if fresh is None:
        pool.release(present)
        return False
    num_full = match.num_tokens // page_size - first
    num_public = match.scope.num_public_tokens // page_size - first
    for page, (index, host_page) in zip(fresh, loads, strict=True):
        pages[index] = page
        pool.owners[page] = PUBLIC_OWNER if index < num_public else owner_of(table.namespace)
        load(pool, host, page, host_page, is_full=index < num_full)
    table.own += pages
    table.num_tokens = table.num_reserved = match.num_tokens
    table.key, table.tail = match.key, match.tail
    table.num_public_pages = match.scope.num_public_tokens // page_size
    return True


def load(pool: PagePool, host: HostTier | None, page: int, host_page: int, *, is_full: bool) -> None:
    """Have a fresh page filled from the host; if all of it is wanted, its contents are known from now on."""
    if host is None:
        raise BrokenInvariant("there is no host tier to load from")
    content = host.pool.content(host_page) if is_full else None
    if content is not None:
        pool.describe(page, content)
    host.load(page, Load(host_page, content))
