"""The placement index: chosen boundaries, what a next turn finds, expiry, limits, corrections."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.cluster.placement import (
    MAX_BOUNDARIES,
    MAX_CONTINUATIONS,
    Boundary,
    MemoryPlacementIndex,
    boundaries_of,
    boundary_pages,
)
from chatcache.kv_cache.page_hash import encode_tokens, hash_page_run, namespace_hash, root_hash

PAGE = 16


def page_keys(tokens: list[int], tenant: str = "a") -> list[bytes]:
    """Return the keys of the full pages of tokens."""
    pages = [encode_tokens(tokens[start : start + PAGE]) for start in range(0, len(tokens) - PAGE + 1, PAGE)]
    return hash_page_run(namespace_hash(root_hash("model", PAGE), tenant), pages)


@settings(max_examples=40)
@given(st.integers(0, 4000), st.lists(st.integers(1, 4000), max_size=60).map(sorted))
def test_boundary_pages_are_few_ascending_and_include_the_ends_that_matter(num_pages: int, ends: list[int]) -> None:
    pages = boundary_pages(num_pages, ends)
    assert pages == sorted(set(pages)) and len(pages) <= MAX_BOUNDARIES
    assert all(1 <= page <= num_pages for page in pages)
    inside = [end for end in ends if end <= num_pages]
    if num_pages:
        assert num_pages in pages
        assert not inside or (inside[0] in pages and inside[-1] in pages)


def test_boundary_pages_without_messages_miss_less_than_a_quarter_of_any_shared_prefix() -> None:
    for num_pages, first in ((2000, 16), (200, 4)):
        for shared in range(first, num_pages, 7):
            found = max(page for page in boundary_pages(num_pages) if page <= shared)
            assert found > 0.75 * shared


def test_next_turn_finds_the_reply_of_the_turn_before_and_another_tenant_nothing() -> None:
    index = MemoryPlacementIndex()
    first = list(range(1000))  # system prompt of 300 tokens, question, reply
    index.record(boundaries_of(page_keys(first), PAGE, [300, 340, 1000]), "w", 7, now_s=0.0)
    second = [*first, 5000, 5001, *range(2000, 2100)]  # the template appends two tokens to the reply
    boundaries = boundaries_of(page_keys(second), PAGE, [300, 340, 1002, 1102])
    found = [
        boundary.num_tokens
        for boundary, place in zip(boundaries, index.lookup(boundaries, 1.0), strict=True)
        if place is not None and place.holders == {"w": 7}
    ]
    assert max(found) == 992  # all full pages of the first turn
    stranger = boundaries_of(page_keys(second, "b"), PAGE, [300, 340, 1002, 1102])
    assert index.lookup(stranger, 1.0) == [None] * len(stranger)


def test_next_turn_whose_end_moves_to_the_following_page_finds_the_reply() -> None:
    index = MemoryPlacementIndex()
    first = list(range(3199))
    index.record(boundaries_of(page_keys(first), PAGE, [300, 3199]), "w", 7, now_s=0.0)
    second = [*first, 5000, *range(9000, 9200)]
    boundaries = boundaries_of(page_keys(second), PAGE, [300, 3200, 3400])
    known = [place is not None for place in index.lookup(boundaries, 1.0)]
    assert max(b.num_tokens for b, here in zip(boundaries, known, strict=True) if here) == 199 * PAGE


def test_record_counts_different_continuations_up_to_the_limit() -> None:
    index = MemoryPlacementIndex()
    for number in range(40):
        index.record([Boundary("s", 64, number % 20)], "w", 1, 0.0)
        (place,) = index.lookup([Boundary("s", 64)], 0.0)
        assert place is not None and len(place.continuations) == min(number + 1, MAX_CONTINUATIONS)


def test_record_drops_the_least_recent_holder_beyond_the_limit() -> None:
    index = MemoryPlacementIndex(max_holders=3)
    for worker in ("a", "b", "c", "a", "d"):
        index.record([Boundary("s", 64)], worker, 1, 0.0)
    (place,) = index.lookup([Boundary("s", 64)], 0.0)
    assert place is not None and list(place.holders) == ["c", "a", "d"]


def test_places_expire_and_an_expired_place_starts_anew() -> None:
    index = MemoryPlacementIndex(ttl_s=10.0)
    index.record([Boundary("s", 64, "x")], "a", 1, 0.0)
    assert index.lookup([Boundary("s", 64)], 10.0) != [None]
    assert index.lookup([Boundary("s", 64)], 10.1) == [None]
    index.record([Boundary("s", 64, "y")], "b", 1, 11.0)
    (place,) = index.lookup([Boundary("s", 64)], 11.0)
    assert place is not None and place.holders == {"b": 1} and place.continuations == {"y"}


def test_number_of_places_is_bounded_and_the_least_recent_go_first() -> None:
    index = MemoryPlacementIndex(max_places=5)
    for key in range(20):
        index.record([Boundary("system", 1), Boundary(key, 64)], "a", 1, float(key))
    assert len(index) == 5
    assert index.lookup([Boundary("system", 1), Boundary(19, 64), Boundary(3, 64)], 20.0)[2] is None
    assert index.lookup([Boundary("system", 1)], 20.0) != [None]
