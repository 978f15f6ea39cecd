"""The KV cache: all operations on page tables, in the order of a branch's life.

    match --> open --> ( reserve --> [the step executes] --> commit )* --> close
                                  fork, truncate at any time between steps

`match` finds computed pages, and `open` starts a table on them. `reserve` allocates pages for the tokens of the next
step. Copy on write happens there: a table that is about to write to a last page that another table holds, or that is
published with other tokens, gets a fresh page and a `PageCopy`; the last holder of an unpublished page writes in place.
`commit` records the tokens that the step computed, and publishes the pages that became full. `close` releases the
pages, which stay published, and can be matched until they are evicted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
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
    cut_prefix,
    freeze_prefix,
    owner_id,
    record_owner,
    release_prefix,
    rewind,
)
from chatcache.kv_cache.pool import NULL_PAGE, InvariantError, PagePool
from chatcache.kv_cache.prefix_match import (
    NO_STATE,
    PrefixMatch,
    cut_match,
    empty_match,
    explain,
    match_device,
    match_device_and_host,
)
from chatcache.kv_cache.states import StatePool
from chatcache.types.stats import Explanation

Tokens = Sequence[int] | NDArray[np.int32]
DEFAULT_SCOPE = CacheScope()
PROBE_PAGES = 64
"""How many pages `count_cached_tokens` hashes first, before it hashes all of a prompt."""


class KVCache:
    """Page tables over one page pool and, optionally, a host cache and the states of recurrent layers.

    With `enable_prefix_caching=False` (no prefix caching) a prompt never reuses pages that another request computed.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        model_digest: str = "",
        enable_prefix_caching: bool = True,
        num_host_pages: int = 0,
        num_states: int = 0,
        num_host_states: int = 0,
    ) -> None:
        self.pool = PagePool(num_pages)
        self.states = StatePool(num_states, num_host_states) if num_states else None
        self.host = HostKVCache(num_host_pages) if num_host_pages else None
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._root = root_hash(model_digest, page_size)
        self._enable_prefix_caching = enable_prefix_caching
        self._ahead: list[tuple[int, bytes]] = []  # pages with a token of a launched step, and the keys before them
        self._copy_on_write = CopyOnWrite(self.pool, self.host, page_size)

    def reset_prefix_cache(self) -> None:
        """Remove all pages from the index, so that nothing computed so far can be matched."""
        for pool in (self.pool, self.host.pool) if self.host is not None else (self.pool,):
            pool.unpublish_all()
        if self.states is not None:
            self.states.unname_all()

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # -- matching -------------------------------------------------------------------------------------------------

    def hash_pages(
        self, tokens: Tokens | bytes, scope: CacheScope = DEFAULT_SCOPE, *, swapped: bool = False
    ) -> PageHashChain:
        """Hash the full pages of `tokens`: O(tokens), so keep the result while a request waits.

        Without prefix caching no page is hashed, except for a request that has host pages to find again (`swapped`).
        """
        data = tokens if isinstance(tokens, bytes) else encode_tokens(tokens)
        if self._enable_prefix_caching or swapped:
            return hash_pages(self._root, data, self._page_bytes, scope)
        return replace(hash_pages(self._root, b"", self._page_bytes, scope), data=data)

    @property
    def enable_prefix_caching(self) -> bool:
        return self._enable_prefix_caching

    def match(
        self, chain: PageHashChain, *, max_tokens: int | None = None, host_pages: Collection[int] = ()
    ) -> PrefixMatch:
        """Find the longest computed prefix of a prompt, without its last token. A query.

        At most `max_tokens` tokens match. Without prefix caching only `host_pages`, which the request itself holds, can
        be matched. A model with recurrent layers also needs a snapshot of its state at the end of the match.
        """
        match = self._match_pages(chain, max_tokens, host_pages)
        if self.states is None or not match.num_tokens:
            return match
        return cut_match(match, chain, *self.states.last_in_chain(chain, match.num_tokens), self.pool)

    def _match_pages(
        self, chain: PageHashChain, max_tokens: int | None = None, host_pages: Collection[int] = ()
    ) -> PrefixMatch:
        if not self._enable_prefix_caching:
            if self.host is None or not host_pages:
                return empty_match(chain)
            return match_device_and_host(None, self.host.pool, chain, max_tokens, host_pages)
        if self.host is None or self.host.pool.is_index_empty:
            return match_device(self.pool, chain, max_tokens)
        return match_device_and_host(self.pool, self.host.pool, chain, max_tokens)

    def count_cached_tokens(self, tokens: bytes, scope: CacheScope = DEFAULT_SCOPE) -> int:
        """Count the tokens of a prompt that `match` would find. A query.

        A prompt that misses within its first PROBE_PAGES pages is not hashed to its end.
        """
        num_bytes = PROBE_PAGES * self._page_bytes
        if self.states is not None:  # the last snapshot in the pages that match may be anywhere
            return self.match(self.hash_pages(tokens, scope)).num_tokens
        found = self.match(self.hash_pages(tokens[: num_bytes + TOKEN_BYTES], scope)).num_tokens
        if found * TOKEN_BYTES < num_bytes or len(tokens) <= num_bytes + TOKEN_BYTES:
            return found
        return self.match(self.hash_pages(tokens, scope)).num_tokens

    def empty_match(self, scope: CacheScope = DEFAULT_SCOPE) -> PrefixMatch:
        """Return the match of a prompt of which nothing is computed."""
        return empty_match(hash_pages(self._root, b"", self._page_bytes, scope))

    def explain(self, chain: PageHashChain, other_namespaces: Iterable[str] = ()) -> Explanation:
        """Explain which pages of a prompt are cached, and why the rest is not. A query.

        `other_namespaces` are searched, too: for operators only, as a tenant must not learn what other tenants cached.
        """
        match, scope = self._match_pages(chain), chain.scope
        others = (replace(scope, namespace=name) for name in other_namespaces if name != scope.namespace)
        found = explain(self.pool, chain, match, (self.match(self.hash_pages(chain.data, other)) for other in others))
        num_tokens = self.match(chain).num_tokens
        if num_tokens == match.num_tokens:
            return found
        detail = (
            f"the pages of the first {match.num_tokens} tokens are cached, but the state of the recurrent layers only "
            f"up to token {num_tokens}"
        )
        return msgspec.structs.replace(
            found, num_cached_tokens=num_tokens, reason=NO_STATE, at_token=num_tokens, detail=detail, diverged_tokens=()
        )

    def open(self, match: PrefixMatch) -> PageTable:
        """Create a page table that starts with the pages of a match.

        The match must be newer than the last change of the cache.
        """
        self.pool.retain(match.pages)
        scope = match.scope
        table = PageTable(
            match.key,
            scope.namespace,
            scope.num_public_tokens // self.page_size,
            match.num_tokens,
            match.tail_tokens,
            list(match.pages),
            salt=scope.salt,
        )
        if self.states is not None:
            self.states.assign(table, match.state, match.num_tokens)
        return table

    def restore(self, match: PrefixMatch) -> PageTable | None:
        """Create a page table from a match, and load its pages that are only on the host.

        Returns None if too few pages are free for the loads.
        """
        scope = match.scope
        table = PageTable(match.key, scope.namespace, scope.num_public_tokens // self.page_size, salt=scope.salt)
        return table if self.extend(table, match) else None

    def extend(self, table: PageTable, match: PrefixMatch) -> bool:
        """Append the rest of a prefix match to a page table that holds the first pages of the match.

        Pages that are only in host memory are loaded into new device pages. Returns False, and changes nothing, if too
        few pages are free for that.
        """
        first = table.num_pages
        if not first:
            table.num_matched_tokens = match.num_tokens
        pages = match.pages[first:]
        loads = [(index - first, host_page) for index, host_page in match.loads if index >= first]
        on_device = [page for page in pages if page != NULL_PAGE]
        self.pool.retain(on_device)
        fresh = self.pool.allocate(len(loads))
        if fresh is None:
            self.pool.release(on_device)
            return False
        num_full = match.num_tokens // self.page_size - first
        num_public = match.scope.num_public_tokens // self.page_size - first
        for page, (index, host_page) in zip(fresh, loads, strict=True):
            pages[index] = page
            self.pool.owners[page] = PUBLIC_OWNER if index < num_public else owner_id(table.namespace)
            self._load(page, host_page, is_full=index < num_full)
        table.own_pages += pages
        table.num_tokens = table.num_reserved = match.num_tokens
        table.key, table.tail_tokens = match.key, match.tail_tokens
        table.num_public_pages = match.scope.num_public_tokens // self.page_size
        if self.states is not None:
            self.states.assign(table, match.state, match.num_tokens)
        return True

    def _load(self, page: int, host_page: int, *, is_full: bool) -> None:
        """Fill a newly allocated page from the host in this step.

        Its contents are recorded at once if all tokens of the page match.
        """
        if self.host is None:
            raise InvariantError("there is no host cache to load from")
        content = self.host.pool.content(host_page) if is_full else None
        if content is not None:
            self.pool.set_content(page, content)
        self.host.load(page, PendingLoad(host_page, content))

    # -- a step ---------------------------------------------------------------------------------------------------

    def reserve(self, wants: Sequence[tuple[PageTable, int]]) -> tuple[PageCopy, ...] | None:
        """Make the cells of each (table, num_tokens) writable, for all tables or for none.

        Returns the page copies that the step has to make first; None, and no change, if too few pages are free.
        Each table is named once, with more than its present tokens. Copy sources stay held until `complete_step`.
        """
        wants = [want for want in wants if want[1] > want[0].num_reserved]
        if not wants:
            return ()
        size = self.page_size
        fresh = [max(-(-goal // size) - table.num_prefix_pages - len(table.own_pages), 0) for table, goal in wants]
        forced, optional = self._copy_on_write.tables_to_copy([table for table, _ in wants])
        pages = self.pool.allocate(sum(fresh) + len(forced) + len(optional))
        copying = forced | optional
        if pages is None and optional:  # too few pages: sole holders write in place, and their pages are unpublished
            pages, copying = self.pool.allocate(sum(fresh) + len(forced)), forced
        if pages is None:
            return None
        copies: list[PageCopy] = []
        for (table, _), num_fresh in zip(wants, fresh, strict=True):
            if id(table) in copying:
                copies.append(self._copy_on_write.copy_tail(table, pages.pop()))
            elif table.tail_tokens:
                self._copy_on_write.unpublish_tail(table)
            if num_fresh:
                table.own_pages += [pages.pop() for _ in range(num_fresh)]
            table.num_reserved = (table.num_prefix_pages + len(table.own_pages)) * size
            record_owner(self.pool.owners, table, table.num_tokens // size)
        return tuple(copies)

    @property
    def copy_sources(self) -> Collection[int]:
        """The pages that the step being planned, or launched, copies and holds until it is over."""
        return self._copy_on_write.sources

    def held_copies(self, copies: Sequence[PageCopy]) -> list[PageCopy]:
        """Return the planned copies whose target a table still holds, and release the sources of the others."""
        held = [copy for copy in copies if self.pool.refs[copy.dst]]
        self._copy_on_write.release_sources([copy.src for copy in held])
        return held

    def complete_step(self) -> None:
        """Publish the pages that an executed step loaded, and release its copy sources."""
        for page, content in self.host.complete_step() if self.host is not None else ():
            if self.pool.refs[page]:
                self._publish(page, content)
        if self._copy_on_write.sources:
            self._copy_on_write.release_sources()
        if self.states is not None:
            self.states.complete_step()

    def confirm_ahead(self) -> None:
        """Keep the tokens of `commit_ahead`, as the result of their step was seen."""
        self._ahead.clear()

    def abort_step(self) -> None:
        """Cancel the copies of a failed step.

        Every table that the step would have changed must be closed before.
        """
        if self.host is not None:
            self.host.abort_step()
        self._copy_on_write.release_sources()
        if self.states is not None:
            self.states.abort_step()
            for page, parent in self._ahead:
                content = self.pool.content(page)
                if content is not None and content.parent == parent:
                    self.pool.unpublish(page)
                    self.states.forget(content.key)
                self.states.forget(parent)
            self._ahead.clear()

    # -- swapping to the host -------------------------------------------------------------------------------------

    def page_contents(self, tables: Iterable[PageTable]) -> dict[int, PageContent]:
        """Return the contents of the distinct pages of these tables. O(pages).

        Includes partly filled last pages.
        """
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
        """Copy pages to the host in this step and return the retained host pages.

        Returns None if too few host pages are free. The device pages may be released at once: a step makes its copies
        to the host before it writes any page.
        """
        return self.host.store(contents) if self.host is not None else None

    # -- after execution ------------------------------------------------------------------------------------------

    def commit(self, table: PageTable, tokens: bytes) -> None:
        """Record that `tokens` were computed into the table, and publish pages that became full.

        `tokens` are little-endian int32.
        """
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
            table.key = content.key
            if index == table.num_public_pages:
                table.key = namespace_hash(content.key, table.namespace, table.salt)
        table.tail_tokens = tail[len(tail) // size * size :]

    def commit_ahead(self, table: PageTable, token: bytes) -> None:
        """Commit a token that a launched step computes, to a table that is closed next.

        It is published at once, as no prompt is matched before the step's result is known, and unpublished if the step
        fails. `confirm_ahead` follows when the result is known.
        """
        self._ahead.append((table.page_at(table.num_tokens // self.page_size), table.key))
        self.commit(table, token)

    def _publish(self, page: int, content: PageContent) -> None:
        if self._enable_prefix_caching:
            self.pool.publish(page, content)
        else:
            self.pool.set_content(page, content)

    def advance_pages(self, tables: Sequence[PageTable], tokens: bytes) -> list[int] | None:
        """Commit the full last page of each table and append a new page, for all tables or none.

        A batched `commit` and `reserve` for tables whose last reserved page, a private one, is full. `tokens` holds all
        tokens of these pages, one page after another, including those committed before. Returns the new pages, which
        the caller must send to the runner (`pop_changes` does not report them); None, and no change, if too few are
        free.
        """
        pages = self.pool.allocate(len(tables))
        if pages is None:
            return None
        contents = hash_next_pages([table.key for table in tables], tokens, self._page_bytes)
        filled = [table.own_pages[-1] for table in tables]
        if self._enable_prefix_caching:
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

    def adopt(self, table: PageTable, child: PageTable) -> bool:
        """Let `child` take over the full pages of `table`; return False if it has them already.

        Both have a partly filled page of their own at the same index. That of the child is to be overwritten by a copy
        of the other one, see `copy_tails`.
        """
        if len(table.own_pages) > 1:
            freeze_prefix(table, len(table.own_pages) - 1)
        is_changed = child.shared_prefix is not table.shared_prefix or len(child.own_pages) > 1
        if is_changed:
            if table.shared_prefix is not None:
                table.shared_prefix.refs += 1
            self.pool.release(child.own_pages[:-1])
            release_prefix(self.pool, child.shared_prefix)
            child.own_pages, child.shared_prefix = child.own_pages[-1:], table.shared_prefix
            child.num_prefix_pages, child.changed_from = table.num_prefix_pages, table.num_pages
            child.key, child.num_public_pages = table.key, table.num_public_pages
        child.num_tokens, child.tail_tokens = table.num_tokens, table.tail_tokens
        child.num_matched_tokens = table.num_matched_tokens
        return is_changed

    def copy_tails(self, pairs: Iterable[tuple[PageTable, PageTable]]) -> list[PageCopy]:
        """Return the page copies of this step that complete `adopt` for each (table, child)."""
        copies = [PageCopy(table.own_pages[-1], child.own_pages[-1]) for table, child in pairs]
        self._copy_on_write.hold_sources(copy.src for copy in copies)
        return copies

    def fork(self, table: PageTable, replaced: PageTable | None = None) -> PageTable:
        """Return a new table with everything that `table` has computed, copying no page.

        O(1) in the length of the table. With `replaced`, this table is closed, without its partly filled page, and
        becomes the fork.
        """
        num_own_full = table.num_tokens // self.page_size - table.num_prefix_pages
        if num_own_full > 0:
            freeze_prefix(table, num_own_full)
        prefix, num_prefix_pages = table.shared_prefix, table.num_prefix_pages
        own_pages: list[int] = []
        if prefix is not None:
            prefix.refs += 1
        if table.tail_tokens:
            page = table.own_pages[0]
            own_pages.append(page)
            self.pool.refs[page] += 1  # the page is held, so `retain` has nothing else to do
            table.num_reserved = table.num_tokens
        if replaced is not None:
            self.pool.release(replaced.own_pages)
            release_prefix(self.pool, replaced.shared_prefix)
            child = replaced
        else:
            child = PageTable.__new__(PageTable)  # all its fields are set here
            child.state = child.num_state_tokens = child.num_snapshot_tokens = 0
        child.key, child.namespace, child.salt = table.key, table.namespace, table.salt
        child.tail_tokens, child.num_public_pages = table.tail_tokens, table.num_public_pages
        child.num_tokens = child.num_reserved = table.num_tokens
        child.own_pages, child.shared_prefix, child.num_prefix_pages = own_pages, prefix, num_prefix_pages
        child.num_matched_tokens = table.num_matched_tokens
        child.changed_from = min(table.changed_from, num_prefix_pages + len(own_pages))
        if self.states is not None:
            self.states.assign(child, table.state, table.num_state_tokens)
            child.num_snapshot_tokens = table.num_snapshot_tokens
        return child

    def num_fork_tokens(self, table: PageTable, num_tokens: int) -> int:
        """Return how many of a table's first `num_tokens` tokens a fork keeps: fewer if their state is gone."""
        if self.states is None or num_tokens == table.num_state_tokens:
            return num_tokens
        return self.states.last_in_table(self.pool, table, num_tokens, self.page_size)[0]

    def truncate(self, table: PageTable, num_tokens: int, scope: CacheScope | None = None) -> None:
        """Remove all but the first `num_tokens` tokens of the table; later tokens belong to `scope`.

        O(own pages removed). A fork in the middle of a branch is O(1): it owns one page and cuts the shared prefix.
        Without a scope later tokens are private, even if public tokens were removed, as other tokens may follow.
        A table with a state that has consumed more tokens keeps only those up to its last snapshot.
        """
        if not 0 <= num_tokens <= table.num_tokens:
            raise InvariantError(f"cannot truncate a table of {table.num_tokens} tokens to {num_tokens}")
        if scope is not None and (scope.namespace, scope.salt) != (table.namespace, table.salt):
            raise InvariantError(f"a table of namespace {table.namespace!r} cannot continue in {scope.namespace!r}")
        if self.states is not None and num_tokens != table.num_state_tokens:
            num_tokens, state = self.states.last_in_table(self.pool, table, num_tokens, self.page_size)
            self.states.assign(table, state, num_tokens)
        if num_tokens < table.num_tokens or scope is not None:
            num_public_pages = scope.num_public_tokens // self.page_size if scope is not None else 0
            rewind(self.pool, table, self.page_size, num_tokens, num_public_pages)
        num_full, num_pages = num_tokens // self.page_size, self.num_pages_for(num_tokens)
        if num_full < table.num_prefix_pages:
            tail = [table.page_at(num_full)] if num_pages > num_full else []
            self.pool.retain(tail)
            self.pool.release(table.own_pages)
            table.own_pages = tail
            cut_prefix(self.pool, table, num_full)
        else:
            self.pool.release(table.own_pages[num_pages - table.num_prefix_pages :])
            del table.own_pages[num_pages - table.num_prefix_pages :]
        table.num_tokens = table.num_reserved = num_tokens
        table.num_matched_tokens = min(table.num_matched_tokens, num_tokens)
        table.changed_from = min(table.changed_from, table.num_pages)
        self._cancel_unreferenced_loads()

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self, table: PageTable, *, discard: bool = False, keep_tail: bool = True) -> None:
        """Release every page of a table.

        Its pages can still be matched, the partly filled one only if `keep_tail`. With `discard` the pages that it
        computed are unpublished instead: results of a failed step must not be matched. Matched pages stay published.
        """
        if self.states is not None:
            self.states.close(table, keep=keep_tail and not discard and self._enable_prefix_caching)
        if discard:
            self._unpublish_computed(table)
        elif table.tail_tokens and keep_tail and self._enable_prefix_caching:
            self._copy_on_write.publish_tail(table)
        self.pool.release(table.own_pages)
        if table.shared_prefix is not None:
            release_prefix(self.pool, table.shared_prefix)
        table.own_pages, table.shared_prefix, table.num_prefix_pages = [], None, 0
        table.num_tokens = table.num_reserved = table.changed_from = 0
        table.tail_tokens = b""  # now closing the table again has no effect
        self._cancel_unreferenced_loads()

    def _cancel_unreferenced_loads(self) -> None:
        if self.host is not None:
            self.host.cancel_unreferenced_loads(self.pool.refs)

    def _unpublish_computed(self, table: PageTable) -> None:
        """Remove the pages after the matched tokens, and their copies on the host, from the index."""
        num_matched = table.num_matched_tokens
        if max(table.num_tokens, table.num_reserved) <= num_matched:
            return  # nothing was written: the last page is still the one that was matched
        first, num_kept = divmod(num_matched, self.page_size)
        computed = table.pages()[first:]
        if self.states is not None:
            found = [content for page in computed if (content := self.pool.content(page)) is not None]
            for index, parent in enumerate([*(content.parent for content in found), table.key]):
                self.states.forget(parent, -1 if index else num_kept * TOKEN_BYTES)
        if self.host is not None:
            contents = self.page_contents([table])
            for index, page in enumerate(computed):
                if page in contents:
                    self.host.unpublish(contents[page], 0 if index else num_kept)
        for page in computed:
            self.pool.unpublish(page)
