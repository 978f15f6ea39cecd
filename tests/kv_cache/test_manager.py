"""The operations of the KV cache on page tables."""

from __future__ import annotations

import pytest

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import encode_tokens
from chatcache.kv_cache.pool import InvariantError
from chatcache.kv_cache.stats import check_invariants, fractional_pages, page_usage
from tests.kv_cache.helpers import find_match, open_and_fill, token_range, write

P = 4


def cache(num_pages: int = 32) -> KVCache:
    return KVCache(num_pages, P, "digest")


def test_match_after_close_finds_all_but_the_last_token() -> None:
    kv = cache()
    kv.close(open_and_fill(kv, token_range(11)))
    match = find_match(kv, [*token_range(11), 99])
    assert match.num_tokens == 11 and len(match.pages) == 3 and match.num_idle == 3
    assert find_match(kv, token_range(11)).num_tokens == 10, "never the last token: its logits are needed"
    assert find_match(kv, token_range(8)).num_tokens == 7
    assert find_match(kv, []).num_tokens == 0 and find_match(kv, [1]).num_tokens == 0


def test_match_ends_at_the_first_different_token() -> None:
    kv = cache()
    kv.close(open_and_fill(kv, token_range(12)))
    assert find_match(kv, [*token_range(6), 77, 78, 79]).num_tokens == 6
    assert find_match(kv, [77, *token_range(6)]).num_tokens == 0


def test_match_in_another_namespace_finds_nothing() -> None:
    kv = cache()
    kv.close(open_and_fill(kv, token_range(11), "tenant:a"))
    assert find_match(kv, [*token_range(11), 99], "tenant:b").num_tokens == 0
    assert find_match(kv, [*token_range(11), 99]).num_tokens == 0
    assert find_match(kv, [*token_range(11), 99], "tenant:a").num_tokens == 11


def test_match_before_commit_finds_nothing() -> None:
    kv = cache()
    table = kv.open(find_match(kv, token_range(9)))
    assert kv.reserve([(table, 8)]) == ()
    assert find_match(kv, token_range(9)).num_tokens == 0
    kv.commit(table, encode_tokens(token_range(8)))
    assert find_match(kv, token_range(9)).num_tokens == 8


def test_match_without_prefix_caching_finds_nothing() -> None:
    kv = KVCache(32, P, "digest", enable_prefix_caching=False)
    kv.close(open_and_fill(kv, token_range(11)))
    assert find_match(kv, token_range(12)).num_tokens == 0 and kv.pool.num_idle == 0
    check_invariants(kv, [])


def test_fork_copies_a_page_only_on_write() -> None:
    kv = cache()
    parent = open_and_fill(kv, token_range(10))
    children = [kv.fork(parent) for _ in range(7)]
    assert kv.pool.num_in_use == 3
    check_invariants(kv, [parent, *children])
    for child in children:
        assert child.pages() == parent.pages()
        (copy,) = write(kv, child, [50])
        assert copy.src == parent.own_pages[0] and copy.dst == child.own_pages[0]
    assert write(kv, parent, [60]) == (), "the last holder writes in place"
    assert kv.pool.num_in_use == 2 + 8
    usage = page_usage(kv, [parent, *children])
    assert usage.num_shared == 2 and usage.num_in_use == 10
    assert sum(fractional_pages([[parent], children])) == pytest.approx(10)
    check_invariants(kv, [parent, *children])


def test_reserve_of_forks_in_one_step_leaves_the_page_to_the_last() -> None:
    kv = cache()
    parent = open_and_fill(kv, token_range(6))
    group = [parent, kv.fork(parent), kv.fork(parent)]
    copies = kv.reserve([(table, 7) for table in group])
    assert copies is not None and len(copies) == 2
    assert not {copy.src for copy in copies} & {copy.dst for copy in copies}
    for table in group:
        kv.commit(table, encode_tokens([9]))
    kv.complete_step()
    assert kv.pool.num_in_use == 1 + 3
    check_invariants(kv, group)


def test_fork_of_a_long_table_changes_no_reference_count() -> None:
    kv = KVCache(3000, P)
    short, long = open_and_fill(kv, token_range(10)), open_and_fill(kv, token_range(10_000))
    kv.fork(short), kv.fork(long)  # the first fork moves the full pages into a shared prefix
    held = list(kv.pool.refs)
    children = [kv.fork(long) for _ in range(1000)]
    changed = [page for page, refs in enumerate(kv.pool.refs) if refs != held[page]]
    assert changed == [] and len(children[0].own_pages) == 0, (
        "10,000 tokens fill whole pages: a fork changes no reference count"
    )
    child = kv.fork(short)
    assert kv.pool.refs != held and len(child.own_pages) == 1, "only the shared last page gets another reference"


def test_reserve_copies_a_published_tail_or_unpublishes_it_when_pages_are_scarce() -> None:
    kv = cache(num_pages=6)
    kv.close(open_and_fill(kv, token_range(8)))
    table = kv.open(find_match(kv, [*token_range(6), 99, 98]))
    assert table.num_tokens == 6
    (copy,) = write(kv, table, [99])
    assert find_match(kv, [*token_range(8), 0]).num_tokens == 8, "the copied page can still be matched"
    kv.close(table)

    tight = cache(num_pages=3)
    tight.close(open_and_fill(tight, token_range(8)))
    table = tight.open(find_match(tight, [*token_range(6), 99, 98]))
    assert write(tight, table, [99]) == ()
    assert find_match(tight, [*token_range(8), 0]).num_tokens == 4, "the page was unpublished before the write"
    check_invariants(tight, [table])
    assert copy.src != copy.dst


def test_reserve_after_a_full_match_writes_the_tail_in_place() -> None:
    kv = cache()
    kv.close(open_and_fill(kv, token_range(6)))
    table = kv.open(find_match(kv, [*token_range(6), 7]))
    assert write(kv, table, [7]) == ()
    kv.close(table)
    assert kv.pool.num_idle == 2
    check_invariants(kv, [])


def test_reserve_with_too_few_pages_changes_nothing() -> None:
    kv = cache(num_pages=5)
    a, b = open_and_fill(kv, token_range(4)), open_and_fill(kv, token_range(4, 50))
    before = list(kv.pool.refs), a.pages(), b.pages()
    assert kv.reserve([(a, 8), (b, 13)]) is None
    assert (list(kv.pool.refs), a.pages(), b.pages()) == before
    assert kv.reserve([(a, 8), (b, 8)]) == ()
    check_invariants(kv, [a, b])


def test_copy_source_is_held_until_the_step_completes() -> None:
    kv = cache(num_pages=5)
    kv.close(open_and_fill(kv, token_range(4)))
    table = kv.open(find_match(kv, [1, 2, 99]))
    copies = kv.reserve([(table, 3)])
    assert copies is not None and len(copies) == 1
    assert kv.pool.refs[copies[0].src] == 1
    assert kv.pool.allocate(3) is None, "the source must not be allocated while it is copied"
    kv.commit(table, encode_tokens([99]))
    kv.complete_step()
    check_invariants(kv, [table])


def test_close_with_discard_unpublishes_the_pages() -> None:
    kv = cache()
    table = open_and_fill(kv, token_range(11))
    kv.close(table, discard=True)
    assert find_match(kv, token_range(12)).num_tokens == 0 and kv.pool.num_idle == 0
    check_invariants(kv, [])


@pytest.mark.parametrize("num_matched", [4, 6, 8, 11])
def test_close_with_discard_keeps_the_matched_pages(num_matched: int) -> None:
    kv = cache()
    kv.close(open_and_fill(kv, token_range(11)))
    prompt = [*token_range(num_matched), 90, 91, 92, 93, 94]
    table = kv.open(find_match(kv, prompt))
    assert table.num_tokens == table.num_matched_tokens == num_matched
    write(kv, table, prompt[num_matched:])
    fork = kv.fork(table)
    is_tail_reused = num_matched == 11  # the partly filled page was written in place, and is lost
    for failed in (table, fork):
        kv.close(failed, discard=True)
        assert find_match(kv, prompt).num_tokens == (8 if is_tail_reused else num_matched)
    assert find_match(kv, token_range(12)).num_tokens == (8 if is_tail_reused else 11)
    check_invariants(kv, [])


def test_close_with_discard_of_a_table_that_computed_nothing_keeps_all_pages() -> None:
    kv = cache()
    kv.close(open_and_fill(kv, token_range(11)))
    kv.close(kv.open(find_match(kv, [*token_range(6), 90])), discard=True)
    assert find_match(kv, token_range(12)).num_tokens == 11
    check_invariants(kv, [])


@pytest.mark.parametrize("num_kept", [0, 3, 4, 7, 8, 9, 10, 11])
def test_truncate_then_write_keeps_the_first_tokens(num_kept: int) -> None:
    kv = cache()
    parent = open_and_fill(kv, token_range(11))
    child = kv.fork(parent)
    kv.truncate(child, num_kept)
    check_invariants(kv, [parent, child])
    assert child.num_tokens == num_kept and child.pages() == parent.pages()[: -(-num_kept // P)]
    write(kv, child, token_range(9, 70))
    check_invariants(kv, [parent, child])
    kv.close(child)
    assert find_match(kv, [*token_range(num_kept), *token_range(9, 70), 0]).num_tokens == num_kept + 9
    assert parent.pages() and find_match(kv, token_range(9)).num_tokens == 8
    kv.close(parent)
    check_invariants(kv, [])
    with pytest.raises(InvariantError, match="truncate"):
        kv.truncate(parent, 1)


def test_commit_beyond_the_reservation_raises() -> None:
    kv = cache()
    table = kv.open(find_match(kv, [1]))
    with pytest.raises(InvariantError, match="reserved"):
        kv.commit(table, encode_tokens([1]))


def test_page_usage_divides_all_slots_by_use() -> None:
    kv = cache(num_pages=13)
    kv.close(open_and_fill(kv, token_range(8, 70)))
    a, b = open_and_fill(kv, token_range(6)), open_and_fill(kv, token_range(3, 40))
    child = kv.fork(a)
    slots = page_usage(kv, [a, b, child], num_kept_free=4).slots
    assert (slots.token, slots.empty, slots.cached) == (9, 3, 8), "shared tokens count once"
    assert (slots.kept_free, slots.free) == (16, 12)
    assert sum(slots.shares().values()) == pytest.approx(1) and slots.waste == pytest.approx(3 / 12)
    slots = page_usage(kv, [a, b, child], num_kept_free=8).slots
    assert (slots.kept_free, slots.free, slots.cached) == (32, 0, 4), "cached pages are evicted after all blank pages"
    slots = page_usage(kv, [a, b, child], num_kept_free=99).slots
    assert (slots.kept_free, slots.free, slots.cached) == (36, 0, 0)


def test_pop_changes_returns_each_change_once() -> None:
    kv = cache()
    table = open_and_fill(kv, token_range(6))
    assert table.pop_changes() == (0, table.pages())
    assert table.pop_changes() == (2, [])
    child = kv.fork(table)
    assert child.pop_changes() == (2, []), "the runner copies the row"
    write(kv, child, [9])
    assert child.pop_changes() == (1, child.pages()[1:])
