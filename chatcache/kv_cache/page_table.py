"""Page tables: the pages of each branch, in order, with a front that forks share.

A fork moves the parent's full pages into a `SharedPrefix`, on which both tables then stand, so that it costs the same
whatever the length of the branch:

    table A  own_pages [30, 31] --.         page 30: A's copy of page 17, made because A wrote to it first
                                  +--> SharedPrefix: 62 full pages, refs = 2 --parent--> SharedPrefix or None
    table B  own_pages [17] ------'         page 17: the partly filled last page at the time of the fork

A shared prefix holds one reference to each of its pages, however many tables stand on it. Its pages never change; a
fork in its middle splits it into two prefixes. A table holds its own pages itself. Only the last own page can be partly
filled, and only full pages move into a prefix.

Each page also has an owner, the namespace that wrote it, which the page map shows to tenants. A page key does not say
for which namespace it was computed, so the owner is recorded when a table reserves cells to write and when a truncated
last page is published. It is therefore correct for held and idle pages; a blank page keeps the owner of its last use.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from chatcache.kv_cache.page_hash import TOKEN_BYTES, namespace_hash
from chatcache.kv_cache.pool import InvariantError, PagePool

PUBLIC_OWNER = 1
"""Owner id of public pages, which every namespace may match."""


class SharedPrefix:
    """Full pages that several tables share.

    `refs` counts the tables and prefixes that stand on it. It has the table entries from `start` up to, not including,
    `_stop`; `_list` begins with entry `_first`. The parts of a split prefix share the list, so that a split is O(1).
    """

    __slots__ = ("_first", "_list", "_stop", "parent", "refs", "start")

    def __init__(self, parent: SharedPrefix | None, start: int, pages: list[int]) -> None:
        self.parent = parent
        self.start = self._first = start
        self._stop = start + len(pages)
        self._list = pages
        self.refs = 1

    @property
    def pages(self) -> list[int]:
        """Return the pages. O(pages)."""
        return self._list[self.start - self._first : self._stop - self._first]

    def page_at(self, index: int) -> int:
        """Return the page of table entry `index`."""
        return self._list[index - self._first]

    def split(self, index: int) -> None:
        """Move the pages before table entry `index` into a new parent. O(1)."""
        parent = SharedPrefix(self.parent, self.start, [])
        parent._first, parent._list, parent._stop = self._first, self._list, index
        self.parent, self.start = parent, index


class PageTable:
    """The pages of one branch and the tokens computed into them. Only `KVCache` changes a table.

    `num_tokens` tokens are computed and stored; the cells from there up to `num_reserved` belong to this table alone
    and may be written. `key` is the key of the last full page and `tail_tokens` the tokens after it (little-endian
    int32), which are on the partly filled last page. The first `num_public_pages` pages get keys that all namespaces
    share, later pages keys of `namespace` and `salt`. Entries from `changed_from` on have not been sent to the runner
    yet. The first `num_matched_tokens` tokens were found in the cache; the request computed all others itself.

    For models with recurrent layers, `state` stands for the first `num_state_tokens` tokens when all planned steps are
    executed, and the last snapshot on the way for the first `num_snapshot_tokens`; see `states`.
    """

    __slots__ = (
        "changed_from",
        "key",
        "namespace",
        "num_matched_tokens",
        "num_prefix_pages",
        "num_public_pages",
        "num_reserved",
        "num_snapshot_tokens",
        "num_state_tokens",
        "num_tokens",
        "own_pages",
        "salt",
        "shared_prefix",
        "state",
        "tail_tokens",
    )

    def __init__(
        self,
        key: bytes,
        namespace: str = "",
        num_public_pages: int = 0,
        num_tokens: int = 0,
        tail_tokens: bytes = b"",
        own_pages: list[int] | None = None,
        shared_prefix: SharedPrefix | None = None,
        num_prefix_pages: int = 0,
        *,
        salt: str = "",
    ) -> None:
        self.key = key
        self.namespace = namespace
        self.salt = salt
        self.num_public_pages = num_public_pages
        self.num_tokens = self.num_reserved = self.num_matched_tokens = num_tokens
        self.tail_tokens = tail_tokens
        self.own_pages = own_pages or []
        self.shared_prefix = shared_prefix
        self.num_prefix_pages = num_prefix_pages
        self.changed_from = self.state = self.num_state_tokens = self.num_snapshot_tokens = 0

    @property
    def num_pages(self) -> int:
        return self.num_prefix_pages + len(self.own_pages)

    @property
    def num_tail_tokens(self) -> int:
        return len(self.tail_tokens) // TOKEN_BYTES

    def pages(self) -> list[int]:
        """Return every page in order. O(pages): for queries and tests, not for steps."""
        return [page for prefix in reversed(list(self.shared_prefixes())) for page in prefix.pages] + self.own_pages

    def shared_prefixes(self) -> Iterator[SharedPrefix]:
        """Yield the shared prefixes that this table stands on, from the last pages to the first."""
        prefix = self.shared_prefix
        while prefix is not None:
            yield prefix
            prefix = prefix.parent

    def page_at(self, index: int) -> int:
        """Return the page of table entry `index`."""
        if index >= self.num_prefix_pages:
            return self.own_pages[index - self.num_prefix_pages]
        return next(prefix.page_at(index) for prefix in self.shared_prefixes() if index >= prefix.start)

    def pop_changes(self) -> tuple[int, list[int]]:
        """Return (first index, pages from there on) of the entries changed since the last call."""
        first = self.changed_from
        self.changed_from = self.num_pages
        if first >= self.num_prefix_pages:
            return first, self.own_pages[first - self.num_prefix_pages :]
        return first, self.pages()[first:]


def freeze_prefix(table: PageTable, num_pages: int) -> None:
    """Move the first `num_pages` own pages, all of them full, into a new shared prefix."""
    pages = table.own_pages
    table.own_pages = pages[num_pages:]
    del pages[num_pages:]
    table.shared_prefix = SharedPrefix(table.shared_prefix, table.num_prefix_pages, pages)
    table.num_prefix_pages += num_pages


def cut_prefix(pool: PagePool, table: PageTable, num_pages: int) -> None:
    """Reduce the shared prefixes of a table to their first `num_pages` pages.

    A prefix that is cut in the middle is split in two, and the other tables on it stand on both parts.
    """
    prefix = table.shared_prefix
    while prefix is not None and prefix.start >= num_pages:
        prefix = _step_down(pool, table, prefix)
    if prefix is not None and num_pages < table.num_prefix_pages:
        prefix.split(num_pages)
        _step_down(pool, table, prefix)


def _step_down(pool: PagePool, table: PageTable, prefix: SharedPrefix) -> SharedPrefix | None:
    """Move a table from its last shared prefix to the one before; return that."""
    table.shared_prefix, table.num_prefix_pages = prefix.parent, prefix.start
    if prefix.parent is not None:
        prefix.parent.refs += 1
    release_prefix(pool, prefix)
    return table.shared_prefix


def release_prefix(pool: PagePool, prefix: SharedPrefix | None) -> None:
    """Remove one reference from a shared prefix.

    The pages of every prefix that has no reference left are released.
    """
    while prefix is not None:
        prefix.refs -= 1
        if prefix.refs:
            return
        pool.release(prefix.pages)
        prefix = prefix.parent


def rewind(pool: PagePool, table: PageTable, page_size: int, num_tokens: int, num_public_pages: int) -> None:
    """Reset the table's key and tail tokens to the state after its first `num_tokens` tokens.

    If public pages are cut off, at most `num_public_pages` of the table's pages stay or become public.
    """
    index, num_left = divmod(num_tokens, page_size)
    tokens = table.tail_tokens
    if index < table.num_tokens // page_size:
        content = pool.content(table.page_at(index))
        if content is None:
            raise InvariantError(f"table entry {index} is full but the contents of its page are not recorded")
        tokens, table.key = content.tokens, content.parent
    if index < table.num_public_pages:
        table.num_public_pages = max(index, num_public_pages)
        if table.num_public_pages == index:
            table.key = namespace_hash(table.key, table.namespace, table.salt)
    table.tail_tokens = tokens[: num_left * TOKEN_BYTES]


def owner_id(namespace: str) -> int:
    """Return the number of a namespace in `PagePool.owners`, valid within this process."""
    return hash(namespace)


def record_owner(owners: array[int], table: PageTable, first: int) -> None:
    """Record the owner of the table's own pages from entry `first` on."""
    pages, owner = table.own_pages[first - table.num_prefix_pages :], owner_id(table.namespace)
    num_public = table.num_public_pages - first
    for index, page in enumerate(pages):
        owners[page] = PUBLIC_OWNER if index < num_public else owner
