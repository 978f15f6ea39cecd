"""The operations on page tables: what the scheduler calls, in the order of a branch's life.

    match -> open -> (reserve -> [the step executes] -> commit)* -> close        and fork, truncate in between

Copy on write happens in `reserve`: whoever is about to write into a tail page that others hold, or that the index
names, gets a fresh page and a `PageCopy`; the last holder of an unpublished page writes in place.

Giving a table the pages of a match, those that only the host has included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from chatcache.kv_cache.copy_on_write import CopyOnWrite, PageCopy
from chatcache.kv_cache.host import HostKVCache, PendingLoad
from chatcache.kv_cache.page_hash import (
    TOKEN_BYTES,
    CacheScope,
    PageContent,
    PageHashChain,
    encode_tokens,
    hash_next_pages,
    hash_page,
    hash_pages,
    namespace_hash,
    root_hash,
)
from chatcache.kv_cache.page_table import (
    PUBLIC_OWNER,
    PageTable,
    freeze_prefix,
    owner_id,
    record_owner,
    release_prefix,
    rewind,
    thaw_prefix,
)
from chatcache.kv_cache.pool import NULL_PAGE, InvariantError, PagePool
from chatcache.kv_cache.prefix_match import PrefixMatch, empty_match, explain, match_device, match_device_and_host
from chatcache.types.stats import Explanation


def extend_table(
    pool: PagePool, host: HostKVCache | None, page_size: int, table: PageTable, match: PrefixMatch
) -> bool:
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
        pool.owners[page] = PUBLIC_OWNER if index < num_public else owner_id(table.namespace)
        load(pool, host, page, host_page, is_full=index < num_full)
    table.own_pages += pages
    table.num_tokens = table.num_reserved = match.num_tokens
    table.key, table.tail_tokens = match.key, match.tail_tokens
    table.num_public_pages = match.scope.num_public_tokens // page_size
    return True


def load(pool: PagePool, host: HostKVCache | None, page: int, host_page: int, *, is_full: bool) -> None:
    """Have a fresh page filled from the host; if all of it is wanted, its contents are known from now on."""
    if host is None:
        raise InvariantError("there is no host tier to load from")
    content = host.pool.content(host_page) if is_full else None
    if content is not None:
        pool.set_content(page, content)
    host.load(page, PendingLoad(host_page, content))


Tokens = Sequence[int] | NDArray[np.int32]
DEFAULT_SCOPE = CacheScope()
PROBE_PAGES = 64


class KVCache:
    """Page tables over one pool. Set `enable_matching=False` to never reuse what a finished branch computed."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        model_digest: str = "",
        enable_matching: bool = True,
        num_host_pages: int = 0,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.host = HostKVCache(num_host_pages) if num_host_pages else None
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._root = root_hash(model_digest, page_size)
        self._enable_matching = enable_matching
        self._copy_on_write = CopyOnWrite(self.pool, self.host, page_size)

    def reset_prefix_cache(self) -> None:
        """Let nothing be found any more that was computed until now."""
        for pool in (self.pool, self.host.pool) if self.host is not None else (self.pool,):
            pool.unpublish_all()

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # -- finding what is already there ----------------------------------------------------------------------------

    def hash_pages(
        self, tokens: Tokens | bytes, scope: CacheScope = DEFAULT_SCOPE, *, swapped: bool = False
    ) -> PageHashChain:
        """Hash the full pages of `tokens`: O(tokens), so keep the result while a request waits.

        Without prefix caching no page is hashed, except for a request that has host pages to find again (`swapped`).
        """
        data = tokens if isinstance(tokens, bytes) else encode_tokens(tokens)
        if self._enable_matching or swapped:
            return hash_pages(self._root, data, self._page_bytes, scope)
        return replace(hash_pages(self._root, b"", self._page_bytes, scope), data=data)

    @property
    def enable_matching(self) -> bool:
        return self._enable_matching

    def match(self, chain: PageHashChain, *, most: int | None = None, host_pages: Collection[int] = ()) -> PrefixMatch:
        """Find the longest computed prefix, never the last token (its logits are needed). A query.

        `most`: tokens that may be matched. `host_pages`: those that the asking request holds; without matching they
        are all that may be found.
        """
        if not self._enable_matching:
            if self.host is None or not host_pages:
                return empty_match(chain)
            return match_device_and_host(None, self.host.pool, chain, most, host_pages)
        if self.host is None or self.host.pool.is_index_empty:
            return match_device(self.pool, chain, most)
        return match_device_and_host(self.pool, self.host.pool, chain, most)

    def count_cached_tokens(self, tokens: bytes, scope: CacheScope = DEFAULT_SCOPE) -> int:
        """Count the tokens that `match` would find. What misses early is not named to its end. A query."""
        few = PROBE_PAGES * self._page_bytes
        found = self.match(self.hash_pages(tokens[: few + TOKEN_BYTES], scope)).num_tokens
        if found * TOKEN_BYTES < few or len(tokens) <= few + TOKEN_BYTES:
            return found
        return self.match(self.hash_pages(tokens, scope)).num_tokens

    def empty_match(self, scope: CacheScope = DEFAULT_SCOPE) -> PrefixMatch:
        """Return the match of something new."""
        return empty_match(hash_pages(self._root, b"", self._page_bytes, scope))

    def explain(self, chain: PageHashChain, other_namespaces: Iterable[str] = ()) -> Explanation:
        """Say which pages of a prompt hit, and why not more. A query; it leaves the eviction order alone.

        `other_namespaces` to look into as well: for operators only, since a tenant must not learn what others have.
        """
        match, scope = self.match(chain), chain.scope
        others = (replace(scope, namespace=name) for name in other_namespaces if name != scope.namespace)
        return explain(self.pool, chain, match, (self.match(self.hash_pages(chain.data, other)) for other in others))

    def open(self, match: PrefixMatch) -> PageTable:
        """Start a table on a match that was made since the last change of the cache."""
        self.pool.retain(match.pages)
        namespace, num_public_tokens = match.scope.namespace, match.scope.num_public_tokens
        num_public_pages = num_public_tokens // self.page_size
        return PageTable(match.key, namespace, num_public_pages, match.num_tokens, match.tail_tokens, list(match.pages))

    def restore(self, match: PrefixMatch) -> PageTable | None:
        """Start a table on a match, loading what only the host has; None if there is no room for that."""
        table = PageTable(match.key, match.scope.namespace, match.scope.num_public_tokens // self.page_size)
        return table if self.extend(table, match) else None

    def extend(self, table: PageTable, match: PrefixMatch) -> bool:
        """Lengthen a table of full pages, with which the match begins, to all of it; False if there is no room."""
        return extend_table(self.pool, self.host, self.page_size, table, match)

    # -- making room ----------------------------------------------------------------------------------------------

    def reserve(self, wants: Sequence[tuple[PageTable, int]]) -> tuple[PageCopy, ...] | None:
        """Make cells up to `num_tokens` of each (table, num_tokens) writable: all of them, or None and no change.

        Wants name each table once and lie beyond its `num_tokens`. Until `settle`, the source of a copy is kept.
        """
        wants = [want for want in wants if want[1] > want[0].num_reserved]
        if not wants:
            return ()
        fresh = [max(self.num_pages_for(goal) - table.num_pages, 0) for table, goal in wants]
        forced, optional = self._copy_on_write.tables_to_copy([table for table, _ in wants])
        pages = self.pool.allocate(sum(fresh) + len(forced) + len(optional))
        copying = forced | optional
        if pages is None and optional:  # tight: a sole holder does without the copy, and the index without the page
            pages, copying = self.pool.allocate(sum(fresh) + len(forced)), forced
        if pages is None:
            return None
        copies: list[PageCopy] = []
        for (table, _), num_fresh in zip(wants, fresh, strict=True):
            if id(table) in copying:
                copies.append(self._copy_on_write.copy_tail(table, pages.pop()))
            elif table.tail_tokens:
                self._copy_on_write.unpublish_tail(table)
            table.own_pages += [pages.pop() for _ in range(num_fresh)]
            table.num_reserved = table.num_pages * self.page_size
            record_owner(self.pool.owners, table, table.num_tokens // self.page_size)
        return tuple(copies)

    def complete_step(self) -> None:
        """Note that the step was executed: its copies have been made, pages from the host are here and can be found."""
        for page, content in self.host.complete_step() if self.host is not None else ():
            if self.pool.refs[page]:
                self._publish(page, content)
        self._copy_on_write.release_sources()

    def abort_step(self) -> None:
        """Note that the step was given up. Every table that it would have changed has to be closed before."""
        if self.host is not None:
            self.host.abort_step()
        self._copy_on_write.release_sources()

    # -- to the host ----------------------------------------------------------------------------------------------

    def page_contents(self, tables: Iterable[PageTable]) -> dict[int, PageContent]:
        """Say what the distinct pages of these tables hold, partly filled tails by their own names. O(pages)."""
        contents: dict[int, PageContent] = {}
        for table in tables:
            pages = table.pages()
            for page in pages[: table.num_tokens // self.page_size]:
                if page not in contents and (content := self.pool.content(page)) is not None:
                    contents[page] = content
            if table.tail_tokens:
                page = self._copy_on_write.tail_page(table)
                if page not in contents or len(contents[page].tokens) < len(table.tail_tokens):
                    contents[page] = hash_page(table.key, table.tail_tokens)
        return contents

    def swap_out(self, contents: Mapping[int, PageContent]) -> list[int] | None:
        """Copy pages to the host in this step; return the host pages, held, or None if there is no room.

        The pages may be let go of at once: a plan copies out before it writes anything.
        """
        return self.host.store(contents) if self.host is not None else None

    # -- after execution ------------------------------------------------------------------------------------------

    def commit(self, table: PageTable, tokens: bytes) -> None:
        """Note that `tokens` (little-endian int32) have been computed into the table; publish the pages now full."""
        num_tokens = table.num_tokens + len(tokens) // TOKEN_BYTES
        if num_tokens > table.num_reserved:
            raise InvariantError(
                f"{num_tokens} tokens were computed into a table that had reserved {table.num_reserved}"
            )
        table.num_tokens = num_tokens
        tail = table.tail_tokens + tokens
        size = self._page_bytes
        if len(tail) < size:
            table.tail_tokens = tail
            return
        index = (table.num_tokens - len(tail) // TOKEN_BYTES) // self.page_size
        for start in range(0, len(tail) - size + 1, size):
            content = hash_page(table.key, tail[start : start + size])
            self._publish(table.own_pages[index - table.num_prefix_pages], content)
            index += 1
            table.key = namespace_hash(content.key, table.namespace) if index == table.num_public_pages else content.key
        table.tail_tokens = tail[len(tail) // size * size :]

    def _publish(self, page: int, content: PageContent) -> None:
        if self._enable_matching:
            self.pool.publish(page, content)
        else:
            self.pool.set_content(page, content)

    def advance_pages(self, tables: Sequence[PageTable], tokens: bytes) -> list[int] | None:
        """Note that each table's last page is full, and give each one more page: all of them, or None and no change.

        For tables that are filling the last page they have reserved, a private one. `tokens` are the pages' tokens, one
        page after another, those included that the tables know: some or all. Returns the new pages; the tables take
        them for known to the runner, so the caller has to tell it.
        """
        pages = self.pool.allocate(len(tables))
        if pages is None:
            return None
        contents = hash_next_pages([table.key for table in tables], tokens, self._page_bytes)
        filled = [table.own_pages[-1] for table in tables]
        if self._enable_matching:
            self.pool.publish_all(filled, contents)
        else:
            self.pool.set_contents(filled, contents)
        owners = self.pool.owners
        for table, page, content, full in zip(tables, pages, contents, filled, strict=True):
            owners[page] = owners[full]
            table.num_tokens, table.key, table.tail_tokens = table.num_reserved, content.key, b""
            table.num_reserved += self.page_size
            table.own_pages.append(page)
            table.changed_from += 1
        return pages

    # -- forks ----------------------------------------------------------------------------------------------------

    def fork(self, table: PageTable) -> PageTable:
        """Give a second branch everything the table has computed. O(1) in its length; copies nothing."""
        num_own = table.num_tokens // self.page_size - table.num_prefix_pages
        if num_own > 0:
            freeze_prefix(table, num_own)
        base, num_base_pages, tail, own = table.shared_prefix, table.num_prefix_pages, table.tail_tokens, []
        if base is not None:
            base.refs += 1
        if tail:
            page = table.own_pages[0]
            own.append(page)
            self.pool.refs[page] += 1  # held already, so there is no idle page to revive
            table.num_reserved = table.num_tokens
        child = PageTable(
            table.key, table.namespace, table.num_public_pages, table.num_tokens, tail, own, base, num_base_pages
        )
        news, num_pages = table.changed_from, num_base_pages + len(own)
        child.changed_from = news if news < num_pages else num_pages
        return child

    def truncate(self, table: PageTable, num_tokens: int, scope: CacheScope | None = None) -> None:
        """Forget everything after the first `num_tokens` tokens of the table, which then goes on in `scope`.

        Without one what is then written is private, even where public tokens have been cut: it may be something else.
        """
        if not 0 <= num_tokens <= table.num_tokens:
            raise InvariantError(f"cannot truncate a table of {table.num_tokens} tokens to {num_tokens}")
        if scope is not None and scope.namespace != table.namespace:
            raise InvariantError(f"a table of namespace {table.namespace!r} cannot go on in {scope.namespace!r}")
        if num_tokens < table.num_tokens or scope is not None:
            num_public_pages = scope.num_public_tokens // self.page_size if scope is not None else 0
            rewind(self.pool, table, self.page_size, num_tokens, num_public_pages)
        while num_tokens < table.num_prefix_pages * self.page_size:
            thaw_prefix(self.pool, table)
        kept = self.num_pages_for(num_tokens) - table.num_prefix_pages
        self.pool.release(table.own_pages[kept:])
        del table.own_pages[kept:]
        table.num_tokens = table.num_reserved = num_tokens
        table.changed_from = min(table.changed_from, table.num_pages)
        self._cancel_unreferenced_loads()

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self, table: PageTable, *, discard: bool = False, keep_tail: bool = True) -> None:
        """Let go of every page. What was computed stays matchable, the partly filled tail too if `keep_tail`.

        `discard` takes it out of the index instead: what a faulty request computed must not be found again.
        """
        if discard:
            self._unpublish_contents(table)
        elif table.tail_tokens and keep_tail and self._enable_matching:
            self._copy_on_write.publish_tail(table)
        self.pool.release(table.own_pages)
        if table.shared_prefix is not None:
            release_prefix(self.pool, table.shared_prefix)
        table.own_pages, table.shared_prefix, table.num_prefix_pages = [], None, 0
        table.num_tokens = table.num_reserved = table.changed_from = 0
        table.tail_tokens = b""  # a closed table holds nothing; closing it again is harmless
        self._cancel_unreferenced_loads()

    def _cancel_unreferenced_loads(self) -> None:
        if self.host is not None:
            self.host.cancel_unreferenced_loads(self.pool.refs)

    def _unpublish_contents(self, table: PageTable) -> None:
        if self.host is not None:
            for content in self.page_contents([table]).values():
                self.host.unpublish(content)
        for page in table.pages():
            self.pool.unpublish(page)
