"""Duplicate pages: several held pages with the same contents, of which one is published."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import encode_tokens
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.stats import check_invariants
from tests.kv_cache.helpers import find_match, open_and_fill, token_range, write

P = 4


def cache(num_pages: int = 32) -> KVCache:
    return KVCache(num_pages, P, "digest")


def fill_again(kv: KVCache, tokens: Sequence[int]) -> PageTable:
    """Compute `tokens` without a match, as a request for prompt log-probabilities does."""
    table = kv.open(kv.empty_match())
    write(kv, table, tokens)
    return table


def evict_idle(kv: KVCache, num_pages: int) -> None:
    pages = kv.pool.allocate(kv.pool.num_free - kv.pool.num_idle + num_pages)
    assert pages is not None
    kv.pool.release(pages)


def test_eviction_of_a_page_publishes_its_duplicate() -> None:
    kv = cache()
    first = open_and_fill(kv, token_range(12))
    again, third = fill_again(kv, token_range(20)), fill_again(kv, token_range(8))
    published = first.pages()
    kv.close(first)
    assert find_match(kv, token_range(21)).pages == [*published, *again.pages()[3:]]
    evict_idle(kv, 3)
    assert find_match(kv, token_range(21)).pages == again.pages()
    kv.close(again)
    assert find_match(kv, token_range(21)).num_tokens == 20
    kv.close(third)
    check_invariants(kv, [])


def test_release_of_a_duplicate_counts_as_a_use_of_the_published_page() -> None:
    kv = cache()
    first, again = open_and_fill(kv, token_range(8)), fill_again(kv, token_range(16))
    kv.close(first)
    kv.close(again)
    for num_left in (12, 8, 4, 0):
        evict_idle(kv, 1)
        assert find_match(kv, token_range(17)).num_tokens == num_left, "a chain is evicted from its end"


def test_unpublishing_a_page_publishes_its_duplicate_unless_it_is_discarded_too() -> None:
    kv = cache()
    first, again, failed = (fill_again(kv, token_range(8)) for _ in range(3))
    kv.close(failed, discard=True)
    kv.close(first, discard=True)
    assert find_match(kv, token_range(9)).pages == again.pages()
    kv.close(again, discard=True)
    assert find_match(kv, token_range(9)).num_tokens == 0 and kv.pool.num_idle == 0
    check_invariants(kv, [])


def test_a_duplicate_that_is_written_again_is_not_published() -> None:
    kv = cache()
    first, again, closed = (fill_again(kv, token_range(8)) for _ in range(3))
    kv.truncate(again, 6)
    kv.truncate(closed, 6)
    write(kv, again, [90, 91])
    kv.close(closed)
    kv.close(first, discard=True)
    match = find_match(kv, [*token_range(8), 1])
    assert match.num_tokens == 6, "the rest was computed by the discarded table only"
    assert find_match(kv, [*token_range(6), 90, 91, 1]).num_tokens == 8
    check_invariants(kv, [again])


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_cached_page_can_be_reached(seed: int) -> None:
    """The contract of the eviction order, for requests that match, and that compute the same tokens again."""
    rng = random.Random(seed)
    kv = cache(num_pages=rng.randint(8, 24))
    root = kv.hash_pages([]).parents[0]
    tables: list[PageTable] = []
    for _ in range(60):
        prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 24))]
        chain = kv.hash_pages(prompt)
        table = kv.open(kv.match(chain, max_tokens=rng.choice([None, 0, 0, 5])))
        if kv.reserve([(table, len(prompt))]) is None:
            kv.close(table)
        else:
            kv.commit(table, encode_tokens(prompt[table.num_tokens :]))
            kv.complete_step()
            tables.append(table)
        while len(tables) > 3 or (tables and rng.random() < 0.4):
            kv.close(tables.pop(rng.randrange(len(tables))))
        check_invariants(kv, tables)
        keys = {root, *kv.pool._index}
        for page in kv.pool._index.values():
            content = kv.pool.content(page)
            assert content is not None and content.parent in keys, "a page is cached, but the page before it is not"
