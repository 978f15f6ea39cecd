"""The contracts of the page pool."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.kv_cache.page_hash import (
    CacheScope,
    PageContent,
    PageHashChain,
    encode_tokens,
    hash_page,
    namespace_hash,
    root_hash,
)
from chatcache.kv_cache.pool import NULL_PAGE, InvariantError, PagePool

ROOT = namespace_hash(root_hash("digest", 4), "")


def chain(*pages: tuple[int, ...], parent: bytes = ROOT) -> list[PageContent]:
    contents: list[PageContent] = []
    for tokens in pages:
        contents.append(hash_page(parent, encode_tokens(tokens)))
        parent = contents[-1].key
    return contents


def lookup(pool: PagePool, contents: list[PageContent]) -> list[int]:
    data = b"".join(content.tokens for content in contents)
    parents = [content.parent for content in contents] + [contents[-1].key]
    chain = PageHashChain(data, len(contents[0].tokens), CacheScope(), [content.key for content in contents], parents)
    return pool.match_full_pages(chain, len(contents))


def published(pool: PagePool, contents: list[PageContent]) -> list[int]:
    pages = pool.allocate(len(contents))
    assert pages is not None
    for page, content in zip(pages, contents, strict=True):
        pool.publish(page, content)
    return pages


def test_allocate_returns_all_pages_or_none_and_never_the_null_page() -> None:
    pool = PagePool(5)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    pages = pool.allocate(4)
    assert pages is not None and sorted(pages) == [1, 2, 3, 4] and NULL_PAGE not in pages
    assert pool.allocate(1) is None and pool.allocate(0) == []
    pool.release(pages)
    pool.check_invariants()
    assert pool.num_in_use == 0


def test_allocate_evicts_least_recently_released_last_pages_first() -> None:
    pool = PagePool(8)
    old = published(pool, chain((1, 2, 3, 4), (5, 6, 7, 8)))
    new = published(pool, chain((9, 9, 9, 9), (8, 8, 8, 8)))
    unnamed = pool.allocate(1)
    assert unnamed is not None
    pool.release(old)
    pool.release(new)
    pool.release(unnamed)
    blank = {1, 2, 3, 4, 5, 6, 7} - set(old) - set(new)
    order = [page for _ in range(7) for page in pool.allocate(1) or ()]
    assert set(order[:3]) == blank
    assert order[3:] == [old[1], old[0], new[1], new[0]]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_eviction_follows_the_documented_order(seed: int) -> None:
    """Compare evictions with a list: blank pages, then idle ones, least recently released first, last page first."""
    rng = random.Random(seed)
    pool = PagePool(24)
    chains = {bytes([i]) * 32: chain(*((i, j) for j in range(rng.randint(1, 5))), parent=bytes([i]) * 32)
              for i in range(1, 7)}  # fmt: skip
    held: dict[bytes, list[int]] = {}
    order: list[int] = []  # idle pages in eviction order
    for _ in range(60):
        name = rng.choice(list(chains))
        if name in held:
            pages = held.pop(name)
            pool.release(pages)
            order += reversed(pages)
            continue
        found = lookup(pool, chains[name])
        pool.retain(found)
        order = [page for page in order if page not in found]
        num_lacking = len(chains[name]) - len(found)
        num_blank = pool.num_free - pool.num_idle
        fresh = pool.allocate(num_lacking)
        if fresh is None:
            assert num_lacking > num_blank + len(order)
            pool.release(found)
            order += reversed(found)
            continue
        evicted, order = order[: max(num_lacking - num_blank, 0)], order[max(num_lacking - num_blank, 0) :]
        assert set(evicted) <= set(fresh) and fresh[len(fresh) - len(evicted) :] == evicted
        for page, content in zip(fresh, chains[name][len(found) :], strict=True):
            pool.publish(page, content)
        held[name] = found + fresh
        assert list(pool._idle) == order
        pool.check_invariants()


def test_retain_makes_a_page_most_recently_used() -> None:
    pool = PagePool(3)
    a, b = published(pool, chain((1,)))[0], published(pool, chain((2,)))[0]
    pool.release([a])
    pool.release([b])
    pool.retain([a])
    pool.release([a])
    assert pool.allocate(1) == [b]


def test_match_finds_idle_pages_until_eviction() -> None:
    pool = PagePool(4)
    contents = chain((1, 2, 3, 4), (5, 6, 7, 8))
    pages = published(pool, contents)
    pool.release(pages)
    assert lookup(pool, contents) == pages and pool.num_idle == 2
    assert pool.allocate(2) is not None  # the blank one and the tail
    assert lookup(pool, contents) == pages[:1]
    pool.check_invariants()


def test_match_stops_at_the_first_unpublished_page() -> None:
    pool = PagePool(6)
    contents = chain((1,), (2,), (3,))
    pages = published(pool, contents)
    pool.unpublish(pages[1])
    assert lookup(pool, contents) == pages[:1]


def test_publish_of_an_equal_page_keeps_the_first() -> None:
    pool = PagePool(4)
    content = chain((1, 2))
    first, second = published(pool, content), published(pool, content)
    assert lookup(pool, content) == first
    pool.release(second)
    assert pool.num_idle == 0
    pool.release(first)
    assert pool.num_idle == 1
    pool.check_invariants()


def test_match_with_equal_keys_and_different_tokens_misses() -> None:
    """With keys of one bit, collisions are frequent, and no wrong page is returned."""
    pool = PagePool(64)
    weak = [PageContent(bytes([t % 2]), ROOT, encode_tokens([t])) for t in range(40)]
    for content in weak:
        published(pool, [content])
    hits = [content for content in weak if lookup(pool, [content])]
    assert hits == weak[:2]


def test_match_partial_page_finds_the_longest_common_prefix() -> None:
    pool = PagePool(8)
    (parent,) = chain((1, 2, 3, 4))
    long, short = chain((5, 6, 7, 8), parent=parent.key)[0], chain((5, 6, 9), parent=parent.key)[0]
    pages = published(pool, [parent, long, short])
    assert pool.match_partial_page(parent.key, encode_tokens([5, 6, 7, 1])) == (pages[1], 3)
    assert pool.match_partial_page(parent.key, encode_tokens([5, 6, 9, 9])) == (pages[2], 3)
    assert pool.match_partial_page(parent.key, encode_tokens([4])) is None
    assert pool.match_partial_page(ROOT, encode_tokens([5, 6])) is None


def test_pool_misuse_raises_invariant_error() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(InvariantError, match="released more often"):
        pool.release(pages)
    with pytest.raises(InvariantError, match="no holder"):
        pool.retain(pages)
    with pytest.raises(InvariantError, match="no holder"):
        pool.publish(pages[0], chain((1,))[0])
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(1)


def test_check_invariants_detects_a_wrong_reference_count() -> None:
    pool = PagePool(4)
    assert pool.allocate(2) is not None
    pool.refs[1] = 0
    with pytest.raises(InvariantError, match="page 1"):
        pool.check_invariants()


def test_unpublish_all_empties_the_index_and_keeps_holders() -> None:
    pool = PagePool(6)
    idle, held = published(pool, chain((1,))), published(pool, chain((2,)))
    pool.release(idle)
    pool.unpublish_all()
    pool.check_invariants()
    assert pool.num_idle == 0 and pool.num_in_use == 1
    assert lookup(pool, chain((2,))) == []
    pool.release(held)
    pool.check_invariants()
