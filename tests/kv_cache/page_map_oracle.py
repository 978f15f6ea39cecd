"""Oracle of the page map: the expected letter of each page, derived from page keys and page tables."""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import PageContent, namespace_hash
from chatcache.kv_cache.page_table import PUBLIC_OWNER, PageTable, owner_id
from chatcache.kv_cache.stats import page_cells, page_states

PUBLIC = "public"


class KeyOwners:
    """The namespace that each page key belongs to, derived from the keys: the first private key depends on it."""

    def __init__(self, kv: KVCache, namespaces: Sequence[str]) -> None:
        self._kv = kv
        self._namespaces = namespaces
        self._owners: dict[bytes, str] = {}  # by page key
        self._entries: dict[bytes, str] = {}  # owner by the key that its first page follows
        self._add_namespaces(kv._root)

    def _add_namespaces(self, public: bytes) -> None:
        self._entries[public] = PUBLIC
        self._entries |= {namespace_hash(public, name): name for name in self._namespaces}

    def read(self) -> None:
        """Derive the owners of all present keys, in whatever order their chains appear."""
        contents = [content for content in self._kv.pool._content if content is not None]
        while contents:
            left = [content for content in contents if not self._assign_owner(content)]
            assert len(left) < len(contents), "a key has no known parent"
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
        """Return the owner of a published page; None for other pages."""
        content = self._kv.pool.content(page)
        return self._owners[content.key] if content is not None and self._kv.pool.is_published(page) else None


def letter(kv: KVCache, key_owners: KeyOwners, page: int, tables: Sequence[PageTable], namespace: str | None) -> str:
    """Return the letter that a page must have on the map of a namespace."""
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
    """Compare the map with the expected letters, page by page, for all namespaces and for operators."""
    key_owners.read()
    for page in range(1, kv.pool.num_pages):
        owner = key_owners.owner(page)
        if owner is not None:
            mark = PUBLIC_OWNER if owner == PUBLIC else owner_id(owner)
            assert kv.pool.owners[page] == mark, f"page {page} is {owner!r}'s and has another owner recorded"
    pages = page_states(kv, tables)
    for namespace in (None, *namespaces):
        wanted = "".join(letter(kv, key_owners, page, tables, namespace) for page in range(1, kv.pool.num_pages))
        assert page_cells(pages, namespace) == (1, wanted), f"the map of {namespace!r}"
