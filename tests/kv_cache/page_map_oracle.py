"""What a map of the pages must show, worked out one page at a time: from the names, and from who holds what."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import PageContent, namespace_hash
from chatcache.kv_cache.page_table import PUBLIC_OWNER, PageTable, owner_id
from chatcache.kv_cache.stats import page_cells, page_states

PUBLIC = "public"


class KeyOwners:
    """For whom each name was made, read off the names themselves: the first private one mixes a namespace in."""

    def __init__(self, kv: KVCache, namespaces: Sequence[str]) -> None:
        self._kv = kv
        self._namespaces = namespaces
        self._owners: dict[bytes, str] = {}  # of pages by key
        self._entries: dict[bytes, str] = {}  # what the first page for an owner follows
        self._add_namespaces(kv._root)

    def _add_namespaces(self, public: bytes) -> None:
        self._entries[public] = PUBLIC
        self._entries |= {namespace_hash(public, name): name for name in self._namespaces}

    def read(self) -> None:
        """Note all names there are now; a chain may be met from any end."""
        contents = [content for content in self._kv.pool._content if content is not None]
        while contents:
            left = [content for content in contents if not self._assign_owner(content)]
            assert len(left) < len(contents), "names that follow from nothing"
            contents = left

    def _assign_owner(self, content: PageContent) -> bool:
        owner = self._owners.get(content.key) or self._entries.get(content.parent, self._owners.get(content.parent))
        if owner is None:
            return False
        self._owners[content.key] = owner
        if owner == PUBLIC:
            self._add_namespaces(content.key)
        return True

    def owner(self, page: int) -> str | None:
        """Return for whom the page may be found; None if it may not be."""
        content = self._kv.pool.content(page)
        return self._owners[content.key] if content is not None and self._kv.pool.is_published(page) else None


def letter(kv: KVCache, key_owners: KeyOwners, page: int, tables: Sequence[PageTable], namespace: str | None) -> str:
    """Return what a page must be shown as."""
    num_holders = sum(page in table.pages() for table in tables)
    if not num_holders and not kv.pool.is_published(page):
        return "f"
    holders = {table.namespace for table in tables if page in table.pages()}
    owner = key_owners.owner(page)
    if namespace is not None and owner not in (PUBLIC, namespace) and (owner is not None or namespace not in holders):
        mark = kv.pool.owners[page]
        if owner is not None or mark != PUBLIC_OWNER:
            return "o"
    return "as"[num_holders > 1] if num_holders else "i"


def check_map(kv: KVCache, key_owners: KeyOwners, tables: Sequence[PageTable], namespaces: Sequence[str]) -> None:
    """Compare the map with the letters, page by page, as everybody sees it."""
    key_owners.read()
    for page in range(1, kv.pool.num_pages):
        owner = key_owners.owner(page)
        if owner is not None:
            mark = PUBLIC_OWNER if owner == PUBLIC else owner_id(owner)
            assert kv.pool.owners[page] == mark, f"page {page} is {owner!r}'s and marked otherwise"
    pages = page_states(kv, tables)
    for namespace in (None, *namespaces):
        wanted = "".join(letter(kv, key_owners, page, tables, namespace) for page in range(1, kv.pool.num_pages))
        assert page_cells(pages, namespace) == (1, wanted), f"the map of {namespace!r}"
