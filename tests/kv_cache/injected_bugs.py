"""Plausible bugs of pool and cache, injected by tests that must detect them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chatcache.kv_cache.copy_on_write import CopyOnWrite, PageCopy
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.kv_cache.page_table import PageTable, SharedPrefix
from chatcache.kv_cache.pool import PagePool

Patch = pytest.MonkeyPatch


def double_free(patch: Patch) -> None:
    original = KVCache.close

    def close(self: KVCache, table: PageTable, **how: bool) -> None:
        pages = table.pages()
        original(self, table, **how)
        self.pool.release([page for page in pages if self.pool.refs[page]][:1])

    patch.setattr(KVCache, "close", close)


def missed_decrement(patch: Patch) -> None:
    original = PagePool.release

    def release(self: PagePool, pages: Sequence[int]) -> None:
        original(self, pages[1:] if len(pages) > 2 else pages)

    patch.setattr(PagePool, "release", release)


def shared_tail_written_in_place(patch: Patch) -> None:
    patch.setattr(CopyOnWrite, "tables_to_copy", lambda self, tables: (set(), set()))


def copied_page_not_sent_to_the_runner(patch: Patch) -> None:
    original = CopyOnWrite.copy_tail

    def copy(self: CopyOnWrite, table: PageTable, dst: int) -> PageCopy:
        known = table.changed_from
        page_copy = original(self, table, dst)
        table.changed_from = known
        return page_copy

    patch.setattr(CopyOnWrite, "copy_tail", copy)


def evicted_page_stays_in_the_index(patch: Patch) -> None:
    def evict(self: PagePool) -> int:
        page, _ = self._idle.popitem(last=False)
        return page

    patch.setattr(PagePool, "_evict", evict)


def fork_does_not_retain_the_last_page(patch: Patch) -> None:
    original = KVCache.fork

    def fork(self: KVCache, table: PageTable) -> PageTable:
        child = original(self, table)
        self.pool.release(child.own_pages)
        return child

    patch.setattr(KVCache, "fork", fork)


def duplicate_published_after_it_was_written(patch: Patch) -> None:
    """A page stays the heir of a published page although its table was truncated and wrote other tokens to it."""
    patch.setattr(PagePool, "_remove_duplicate", lambda self, page, key: False)


def shared_prefix_split_at_the_wrong_page(patch: Patch) -> None:
    original = SharedPrefix.split
    patch.setattr(SharedPrefix, "split", lambda self, index: original(self, max(index - 1, self.start)))


def partial_match_too_long(patch: Patch) -> None:
    original = PagePool.match_partial_page

    def lookup_partial(self: PagePool, parent: bytes, tokens: bytes, *rest: object) -> tuple[int, int] | None:
        found = original(self, parent, tokens, *rest)  # type: ignore[arg-type]
        return (found[0], min(found[1] + 1, len(tokens) // TOKEN_BYTES)) if found else None

    patch.setattr(PagePool, "match_partial_page", lookup_partial)
