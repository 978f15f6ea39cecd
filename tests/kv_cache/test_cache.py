"""The operations on tables, each in the situation it is for."""

from __future__ import annotations

import pytest

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import encode_tokens
from chatcache.kv_cache.pool import InvariantError
from chatcache.kv_cache.stats import check_invariants, fractional_pages, page_usage
from tests.kv_cache.kv_tools import find, opened, text, write

P = 4


def cache(num_pages: int = 32) -> KVCache:
    return KVCache(num_pages, P, "digest")


def test_a_closed_table_is_found_again_to_the_last_token() -> None:
    kv = cache()
    kv.close(opened(kv, text(11)))
    match = find(kv, [*text(11), 99])
    assert match.num_tokens == 11 and len(match.pages) == 3 and match.num_idle == 3
    assert find(kv, text(11)).num_tokens == 10, "never the last token: its logits are needed"
    assert find(kv, text(8)).num_tokens == 7
    assert find(kv, []).num_tokens == 0 and find(kv, [1]).num_tokens == 0


def test_a_match_ends_where_the_tokens_part() -> None:
    kv = cache()
    kv.close(opened(kv, text(12)))
    assert find(kv, [*text(6), 77, 78, 79]).num_tokens == 6
    assert find(kv, [77, *text(6)]).num_tokens == 0


def test_namespaces_never_meet() -> None:
    kv = cache()
    kv.close(opened(kv, text(11), "tenant:a"))
    assert find(kv, [*text(11), 99], "tenant:b").num_tokens == 0
    assert find(kv, [*text(11), 99]).num_tokens == 0
    assert find(kv, [*text(11), 99], "tenant:a").num_tokens == 11


def test_nothing_is_found_before_it_is_computed() -> None:
    kv = cache()
    table = kv.open(find(kv, text(9)))
    assert kv.reserve([(table, 8)]) == ()
    assert find(kv, text(9)).num_tokens == 0
    kv.commit(table, encode_tokens(text(8)))
    assert find(kv, text(9)).num_tokens == 8


def test_matching_switched_off() -> None:
    kv = KVCache(32, P, "digest", enable_matching=False)
    kv.close(opened(kv, text(11)))
    assert find(kv, text(12)).num_tokens == 0 and kv.pool.num_idle == 0
    check_invariants(kv, [])


def test_a_fork_copies_nothing_until_somebody_writes() -> None:
    kv = cache()
    parent = opened(kv, text(10))
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


def test_a_group_that_writes_together_leaves_the_page_to_its_last_member() -> None:
    kv = cache()
    parent = opened(kv, text(6))
    group = [parent, kv.fork(parent), kv.fork(parent)]
    copies = kv.reserve([(table, 7) for table in group])
    assert copies is not None and len(copies) == 2
    assert not {copy.src for copy in copies} & {copy.dst for copy in copies}
    for table in group:
        kv.commit(table, encode_tokens([9]))
    kv.complete_step()
    assert kv.pool.num_in_use == 1 + 3
    check_invariants(kv, group)


def test_a_fork_is_as_cheap_on_a_long_table_as_on_a_short_one() -> None:
    kv = KVCache(3000, P)
    short, long = opened(kv, text(10)), opened(kv, text(10_000))
    kv.fork(short), kv.fork(long)  # the first fork moves the full pages into a segment
    held = list(kv.pool.refs)
    children = [kv.fork(long) for _ in range(1000)]
    changed = [page for page, refs in enumerate(kv.pool.refs) if refs != held[page]]
    assert changed == [] and len(children[0].own_pages) == 0, (
        "10,000 tokens end on a page: a fork touches no page at all"
    )
    child = kv.fork(short)
    assert kv.pool.refs != held and len(child.own_pages) == 1, "only the shared tail is held once more"


def test_a_published_tail_is_copied_on_use_and_taken_over_when_memory_is_tight() -> None:
    kv = cache(num_pages=6)
    kv.close(opened(kv, text(8)))
    table = kv.open(find(kv, [*text(6), 99, 98]))
    assert table.num_tokens == 6
    (copy,) = write(kv, table, [99])
    assert find(kv, [*text(8), 0]).num_tokens == 8, "the page that was copied is still found"
    kv.close(table)

    tight = cache(num_pages=3)
    tight.close(opened(tight, text(8)))
    table = tight.open(find(tight, [*text(6), 99, 98]))
    assert write(tight, table, [99]) == ()
    assert find(tight, [*text(8), 0]).num_tokens == 4, "the page was taken out of the index before it was written"
    check_invariants(tight, [table])
    assert copy.src != copy.dst


def test_a_conversation_goes_on_in_its_own_tail_without_a_copy() -> None:
    kv = cache()
    kv.close(opened(kv, text(6)))
    table = kv.open(find(kv, [*text(6), 7]))
    assert write(kv, table, [7]) == ()
    kv.close(table)
    assert kv.pool.num_idle == 2
    check_invariants(kv, [])


def test_reserve_is_all_or_nothing() -> None:
    kv = cache(num_pages=5)
    a, b = opened(kv, text(4)), opened(kv, text(4, 50))
    before = list(kv.pool.refs), a.pages(), b.pages()
    assert kv.reserve([(a, 8), (b, 13)]) is None
    assert (list(kv.pool.refs), a.pages(), b.pages()) == before
    assert kv.reserve([(a, 8), (b, 8)]) == ()
    check_invariants(kv, [a, b])


def test_a_copy_source_is_kept_until_the_step_is_over() -> None:
    kv = cache(num_pages=5)
    kv.close(opened(kv, text(4)))
    table = kv.open(find(kv, [1, 2, 99]))
    copies = kv.reserve([(table, 3)])
    assert copies is not None and len(copies) == 1
    assert kv.pool.refs[copies[0].src] == 1
    assert kv.pool.allocate(3) is None, "the source may not be handed out while it is being copied"
    kv.commit(table, encode_tokens([99]))
    kv.complete_step()
    check_invariants(kv, [table])


def test_what_a_faulty_request_computed_is_forgotten() -> None:
    kv = cache()
    table = opened(kv, text(11))
    kv.close(table, discard=True)
    assert find(kv, text(12)).num_tokens == 0 and kv.pool.num_idle == 0
    check_invariants(kv, [])


@pytest.mark.parametrize("num_kept", [0, 3, 4, 7, 8, 9, 10, 11])
def test_truncate_and_go_on(num_kept: int) -> None:
    kv = cache()
    parent = opened(kv, text(11))
    child = kv.fork(parent)
    kv.truncate(child, num_kept)
    check_invariants(kv, [parent, child])
    assert child.num_tokens == num_kept and child.pages() == parent.pages()[: -(-num_kept // P)]
    write(kv, child, text(9, 70))
    check_invariants(kv, [parent, child])
    kv.close(child)
    assert find(kv, [*text(num_kept), *text(9, 70), 0]).num_tokens == num_kept + 9
    assert parent.pages() and find(kv, text(9)).num_tokens == 8
    kv.close(parent)
    check_invariants(kv, [])
    with pytest.raises(InvariantError, match="truncate"):
        kv.truncate(parent, 1)


def test_committing_more_than_was_reserved_is_misuse() -> None:
    kv = cache()
    table = kv.open(find(kv, [1]))
    with pytest.raises(InvariantError, match="reserved"):
        kv.commit(table, encode_tokens([1]))


def test_waste_is_what_the_tails_leave_empty() -> None:
    kv = cache()
    a, b = opened(kv, text(6)), opened(kv, text(3, 40))
    assert page_usage(kv, [a, b]).waste_fraction == pytest.approx(3 / 12)


def test_changes_are_told_once() -> None:
    kv = cache()
    table = opened(kv, text(6))
    assert table.pop_changes() == (0, table.pages())
    assert table.pop_changes() == (2, [])
    child = kv.fork(table)
    assert child.pop_changes() == (2, []), "the runner copies the row"
    write(kv, child, [9])
    assert child.pop_changes() == (1, child.pages()[1:])
