"""One branch's pages, in order. A fork shares the front of the table itself, so it costs the same at any length.

    PageTable A ---base---> Segment (full pages 0..61, held by A and B) ---parent---> Segment or None
      own: [62, 63]                ^
    PageTable B ---base------------+
      own: [62, 90]                                        page 62: full, or the tail both still share (refs = 2)

A segment is immutable and holds its pages once, however many tables stand on it. A table's own pages are held by the
table. Only the last own page can be partly filled, and only full pages ever move into a segment.

Whose each page is: told by who may write it, since a name does not say for whom it was made.

Noted whenever a table is given cells to write, and when a cut tail gets its name: so it is right of held and of idle
pages alike. A blank page keeps the mark of whoever wrote it last.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from chatcache.kv_cache.page_hash import TOKEN_BYTES, namespace_hash
from chatcache.kv_cache.pool import InvariantError, PagePool


class SharedPrefix:
    """Full pages that several tables share. `refs` counts the tables and segments standing on it."""

    __slots__ = ("pages", "parent", "refs", "start")

    def __init__(self, parent: SharedPrefix | None, start: int, pages: list[int]) -> None:
        self.parent = parent
        self.start = start
        self.pages = pages
        self.refs = 1


class PageTable:
    """Pages of one branch and what is known of their contents. Only `KVCache` changes it.

    `num_tokens` tokens are computed and stored; cells up to `num_reserved` are this table's alone and may be written.
    The next page follows `key`, which names the full pages so far, and `tail` holds the tokens after them
    (little-endian int32). The first `num_public_pages` are named for everybody, the rest for `namespace` alone.
    Entries from `changed_from` on are news to the runner.
    """

    __slots__ = (
        "changed_from",
        "key",
        "namespace",
        "num_prefix_pages",
        "num_public_pages",
        "num_reserved",
        "num_tokens",
        "own_pages",
        "shared_prefix",
        "tail_tokens",
    )

    def __init__(
        self,
        key: bytes,
        namespace: str = "",
        num_public_pages: int = 0,
        num_tokens: int = 0,
        tail: bytes = b"",
        own: list[int] | None = None,
        base: SharedPrefix | None = None,
        num_base_pages: int = 0,
    ) -> None:
        self.key = key
        self.namespace = namespace
        self.num_public_pages = num_public_pages
        self.num_tokens = self.num_reserved = num_tokens
        self.tail_tokens = tail
        self.own_pages = own or []
        self.shared_prefix = base
        self.num_prefix_pages = num_base_pages
        self.changed_from = 0

    @property
    def num_pages(self) -> int:
        return self.num_prefix_pages + len(self.own_pages)

    @property
    def num_tail_tokens(self) -> int:
        return len(self.tail_tokens) // TOKEN_BYTES

    def pages(self) -> list[int]:
        """List every page in order. O(pages): for queries and tests, not for steps."""
        return [page for segment in reversed(list(self.shared_prefixes())) for page in segment.pages] + self.own_pages

    def shared_prefixes(self) -> Iterator[SharedPrefix]:
        """Yield the segments below this table, nearest first."""
        segment = self.shared_prefix
        while segment is not None:
            yield segment
            segment = segment.parent

    def page_at(self, index: int) -> int:
        """Return the page of table entry `index`."""
        if index >= self.num_prefix_pages:
            return self.own_pages[index - self.num_prefix_pages]
        return next(
            segment.pages[index - segment.start] for segment in self.shared_prefixes() if index >= segment.start
        )

    def pop_changes(self) -> tuple[int, list[int]]:
        """Return (first index, pages from there on) of what changed since the last call."""
        first = self.changed_from
        self.changed_from = self.num_pages
        if first >= self.num_prefix_pages:
            return first, self.own_pages[first - self.num_prefix_pages :]
        return first, self.pages()[first:]


def freeze_prefix(table: PageTable, num_pages: int) -> None:
    """Move the first of the table's own pages, all full, into a segment that others can stand on."""
    pages = table.own_pages
    table.own_pages = pages[num_pages:]
    del pages[num_pages:]
    table.shared_prefix = SharedPrefix(table.shared_prefix, table.num_prefix_pages, pages)
    table.num_prefix_pages += num_pages


def thaw_prefix(pool: PagePool, table: PageTable) -> None:
    """Turn the table's nearest segment back into pages of its own."""
    segment = table.shared_prefix
    if segment is None:
        raise InvariantError("a table without a segment has no pages below its own")
    pool.retain(segment.pages)
    table.own_pages = segment.pages + table.own_pages
    table.shared_prefix, table.num_prefix_pages = segment.parent, segment.start
    if segment.parent is not None:
        segment.parent.refs += 1
    release_prefix(pool, segment)


def release_prefix(pool: PagePool, segment: SharedPrefix | None) -> None:
    """Take one holder off a segment; the pages of those that nobody stands on any more are released."""
    while segment is not None:
        segment.refs -= 1
        if segment.refs:
            return
        pool.release(segment.pages)
        segment = segment.parent


def rewind(pool: PagePool, table: PageTable, page_size: int, num_tokens: int, num_public_pages: int) -> None:
    """Take the table's names back to its first `num_tokens` tokens.

    Where public tokens have been cut, the table goes on in public only up to `num_public_pages`.
    """
    index, num_left = divmod(num_tokens, page_size)
    tokens = table.tail_tokens
    if index < table.num_tokens // page_size:
        content = pool.content(table.page_at(index))
        if content is None:
            raise InvariantError(f"table entry {index} is full but nothing is known of its contents")
        tokens, table.key = content.tokens, content.parent
    if index < table.num_public_pages:
        table.num_public_pages = max(index, num_public_pages)
        if table.num_public_pages == index:
            table.key = namespace_hash(table.key, table.namespace)
    table.tail_tokens = tokens[: num_left * TOKEN_BYTES]


PUBLIC_OWNER = 1  # of the pages that every namespace may match


def owner_id(namespace: str) -> int:
    """Return the mark of a namespace. Good within this process."""
    return hash(namespace)


def record_owner(owners: array[int], table: PageTable, first: int) -> None:
    """Mark the table's own pages from entry `first` on."""
    pages, owner = table.own_pages[first - table.num_prefix_pages :], owner_id(table.namespace)
    num_public = table.num_public_pages - first
    for place, page in enumerate(pages):
        owners[page] = PUBLIC_OWNER if place < num_public else owner
