"""The simulation detects bugs: each injected bug makes it fail within the steps of one test run.

With `audit` all reference counts are checked after every step. Without it, a bug must show in the tokens that tables
read, in the matches, or in the number of pages in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

from chatcache.kv_cache import manager, page_hash, page_table, prefix_match, stats
from chatcache.kv_cache.copy_on_write import CopyOnWrite, PageCopy
from chatcache.kv_cache.host import HostKVCache, PendingLoad
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES, PageContent, PageHashChain
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import InvariantError, PagePool
from chatcache.kv_cache.prefix_match import PrefixMatch
from tests.kv_cache.injected_bugs import (
    copied_page_not_sent_to_the_runner,
    double_free,
    duplicate_published_after_it_was_written,
    evicted_page_stays_in_the_index,
    fork_does_not_retain_the_last_page,
    missed_decrement,
    partial_match_too_long,
    shared_prefix_split_at_the_wrong_page,
    shared_tail_written_in_place,
)
from tests.kv_cache.simulation import run_simulation
from tests.kv_cache.test_simulation import NUM_STEPS

pytestmark = pytest.mark.slow

MAX_STEPS = 100_000
Patch = pytest.MonkeyPatch


def copy_skipped(patch: Patch) -> None:
    original = KVCache.reserve

    def reserve(self: KVCache, wants: Sequence[tuple[PageTable, int]]) -> tuple[PageCopy, ...] | None:
        copies = original(self, wants)
        return copies[1:] if copies else copies

    patch.setattr(KVCache, "reserve", reserve)


def last_holder_not_counted(patch: Patch) -> None:
    """Two branches that write to one page in the same step both get a copy decision as if they were alone."""

    def to_copy(self: CopyOnWrite, tables: Iterable[PageTable]) -> tuple[set[int], set[int]]:
        tables = [table for table in tables if table.tail_tokens and table.num_reserved == table.num_tokens]
        return {id(table) for table in tables if self._num_holders(self.tail_page(table)) > 2}, set()

    patch.setattr(CopyOnWrite, "tables_to_copy", to_copy)


def copy_source_not_kept(patch: Patch) -> None:
    def copy(self: CopyOnWrite, table: PageTable, dst: int) -> PageCopy:
        index = table.num_tokens // self._page_size
        src = table.own_pages[index - table.num_prefix_pages]
        self._pool.release((src,))
        table.own_pages[index - table.num_prefix_pages] = dst
        table.changed_from = min(table.changed_from, index)
        return PageCopy(src, dst)

    patch.setattr(CopyOnWrite, "copy_tail", copy)


def written_page_still_published(patch: Patch) -> None:
    patch.setattr(CopyOnWrite, "unpublish_tail", lambda self, table: None)


def held_page_evicted(patch: Patch) -> None:
    def retain(self: PagePool, pages: Iterable[int]) -> None:
        for page in pages:
            self.refs[page] += 1  # and the page remains idle

    patch.setattr(PagePool, "retain", retain)


def wrong_parent(patch: Patch) -> None:
    original = KVCache.commit

    def commit(self: KVCache, table: PageTable, tokens: bytes) -> None:
        key, num_full = table.key, table.num_tokens // self.page_size
        original(self, table, tokens)
        if table.num_tokens // self.page_size == num_full + 1:
            table.key = key

    patch.setattr(KVCache, "commit", commit)


def truncated_table_keeps_its_key(patch: Patch) -> None:
    original = page_table.rewind

    def rewind(pool: PagePool, table: PageTable, page_size: int, num_tokens: int, num_public_pages: int) -> None:
        key = table.key
        original(pool, table, page_size, num_tokens, num_public_pages)
        table.key = key

    patch.setattr(manager, "rewind", rewind)


def truncated_public_tokens_stay_public(patch: Patch) -> None:
    original = page_table.rewind

    def rewind(pool: PagePool, table: PageTable, page_size: int, num_tokens: int, num_public_pages: int) -> None:
        num_public, table.num_public_pages = table.num_public_pages, 0
        original(pool, table, page_size, num_tokens, num_public_pages)
        table.num_public_pages = num_public

    patch.setattr(manager, "rewind", rewind)


def fork_keeps_the_public_part_of_its_source(patch: Patch) -> None:
    original = KVCache.truncate

    def truncate(self: KVCache, table: PageTable, num_tokens: int, scope: page_hash.CacheScope | None = None) -> None:
        original(self, table, num_tokens, scope if num_tokens < table.num_tokens else None)

    patch.setattr(KVCache, "truncate", truncate)


def fork_does_not_retain_the_shared_prefix(patch: Patch) -> None:
    original = KVCache.fork

    def fork(self: KVCache, table: PageTable) -> PageTable:
        child = original(self, table)
        if child.shared_prefix is not None:
            child.shared_prefix.refs -= 1
        return child

    patch.setattr(KVCache, "fork", fork)


def fork_keeps_the_parents_reservation(patch: Patch) -> None:
    original = KVCache.fork

    def fork(self: KVCache, table: PageTable) -> PageTable:
        num_reserved = table.num_reserved
        child = original(self, table)
        table.num_reserved = num_reserved
        return child

    patch.setattr(KVCache, "fork", fork)


def last_token_matched(patch: Patch) -> None:
    original = prefix_match.match_device

    def match_device(pool: PagePool, chain: PageHashChain, max_tokens: int | None = None) -> PrefixMatch:
        data = chain.data + chain.data[-TOKEN_BYTES:]
        return original(pool, PageHashChain(data, chain.page_bytes, chain.scope, chain.keys, chain.parents), max_tokens)

    patch.setattr(manager, "match_device", match_device)


def namespace_not_mixed_in(patch: Patch) -> None:
    for module in (stats, manager, page_hash, page_table):
        patch.setattr(module, "namespace_hash", lambda key, namespace, salt="": key)


def border_page_public(patch: Patch) -> None:
    """A page of which only a part is public gets a public key."""
    original = page_hash.hash_pages

    def name_pages(root: bytes, data: bytes, page_bytes: int, scope: page_hash.CacheScope) -> PageHashChain:
        page_size = page_bytes // TOKEN_BYTES
        num_public = -(-scope.num_public_tokens // page_size) * page_size
        return original(root, data, page_bytes, page_hash.CacheScope(scope.namespace, num_public))

    patch.setattr(manager, "hash_pages", name_pages)


def forgotten_page_still_found(patch: Patch) -> None:
    patch.setattr(KVCache, "_unpublish_computed", lambda self, table: None)


def published_before_the_copy_to_the_host(patch: Patch) -> None:
    original = HostKVCache.store

    def hold(self: HostKVCache, contents: Mapping[int, PageContent]) -> list[int] | None:
        host_pages = original(self, contents)
        for _, host_page, content in self._pending_stores.values():
            self.pool.publish(host_page, content)
        return host_pages

    patch.setattr(HostKVCache, "store", hold)


def published_before_the_copy_from_the_host(patch: Patch) -> None:
    def load(self: KVCache, page: int, host_page: int, *, is_full: bool) -> None:
        assert self.host is not None
        content = self.host.pool.content(host_page) if is_full else None
        if content is not None:
            self.pool.publish(page, content)
        self.host.load(page, PendingLoad(host_page, content))

    patch.setattr(KVCache, "_load", load)


def tail_published_before_it_came_from_the_host(patch: Patch) -> None:
    patch.setattr(HostKVCache, "is_loading", lambda self, page: False)


def host_page_overwritten_while_it_is_read(patch: Patch) -> None:
    def load(self: HostKVCache, page: int, load: PendingLoad) -> None:
        self._pending_loads[page] = load  # and the host page is not retained

    def cancel_unheld(self: HostKVCache, refs: Sequence[int]) -> None:
        self._pending_loads = {page: load for page, load in self._pending_loads.items() if refs[page]}

    def abandon(self: HostKVCache) -> None:
        self._pending_stores.clear()
        self._pending_loads.clear()

    patch.setattr(HostKVCache, "load", load)
    patch.setattr(HostKVCache, "cancel_unreferenced_loads", cancel_unheld)
    patch.setattr(HostKVCache, "abort_step", abandon)


BUGS: list[Callable[[Patch], None]] = [
    double_free,
    missed_decrement,
    copy_skipped,
    shared_tail_written_in_place,
    last_holder_not_counted,
    copy_source_not_kept,
    copied_page_not_sent_to_the_runner,
    written_page_still_published,
    held_page_evicted,
    evicted_page_stays_in_the_index,
    wrong_parent,
    truncated_table_keeps_its_key,
    truncated_public_tokens_stay_public,
    fork_keeps_the_public_part_of_its_source,
    fork_does_not_retain_the_last_page,
    fork_does_not_retain_the_shared_prefix,
    fork_keeps_the_parents_reservation,
    duplicate_published_after_it_was_written,
    shared_prefix_split_at_the_wrong_page,
    partial_match_too_long,
    last_token_matched,
    namespace_not_mixed_in,
    border_page_public,
    forgotten_page_still_found,
    published_before_the_copy_to_the_host,
    published_before_the_copy_from_the_host,
    tail_published_before_it_came_from_the_host,
    host_page_overwritten_while_it_is_read,
]


SLOW_BUGS = {copy_source_not_kept, published_before_the_copy_to_the_host, host_page_overwritten_while_it_is_read}
"""Bugs that need more than about a second of simulation to show."""


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, id=bug.__name__, marks=[pytest.mark.slow] * (bug in SLOW_BUGS)) for bug in BUGS]
)
@pytest.mark.parametrize("audit", [False, True], ids=["without_audit", "with_audit"])
def test_injected_bug_is_detected(bug: Callable[[Patch], None], audit: bool, monkeypatch: Patch) -> None:
    bug(monkeypatch)
    for num_runs in range(MAX_STEPS // NUM_STEPS):
        try:
            run_simulation(num_runs, NUM_STEPS, audit=audit)
        except (AssertionError, InvariantError, IndexError, KeyError, ValueError) as error:
            print(f"{bug.__name__} after {num_runs} runs and {error.__notes__[0]}: {error}")
            return
    pytest.fail(f"{bug.__name__} was not detected in {MAX_STEPS} steps")
