"""Explanations of cache hits and misses: each reason, and random prompts against an oracle."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import CacheScope
from chatcache.kv_cache.pool import PagePool
from chatcache.kv_cache.prefix_match import MAX_DIVERGED_TOKENS
from chatcache.kv_cache.stats import page_cells, page_states
from chatcache.types.stats import Explanation
from tests.kv_cache.helpers import PrefixOracle, find_match, open_and_fill, token_range, write

P = 4


def cache(num_pages: int = 64) -> KVCache:
    return KVCache(num_pages, P, "digest")


def explain(kv: KVCache, tokens: list[int], scope: CacheScope | str = "", others: tuple[str, ...] = ()) -> Explanation:
    return kv.explain(kv.hash_pages(tokens, CacheScope(scope) if isinstance(scope, str) else scope), others)


def states(explanation: Explanation) -> list[tuple[str, int]]:
    return [(page.state, page.num_tokens) for page in explanation.pages]


def test_explain_full_hit_has_no_reason() -> None:
    kv = cache()
    scope = CacheScope("a", 9)
    held = open_and_fill(kv, token_range(10), scope)
    kv.close(open_and_fill(kv, token_range(14), scope))
    found = explain(kv, token_range(15), scope)
    assert (found.reason, found.at_token, found.num_tokens, found.num_cached_tokens) == ("", -1, 15, 14)
    assert states(found) == [("held", 4), ("held", 4), ("idle", 4), ("partial", 2)]
    assert [page.public for page in found.pages] == [True, True, False, False]
    assert held.num_tokens == 10


def test_explain_new_tokens_are_never_computed() -> None:
    kv = cache()
    found = explain(kv, token_range(9))
    assert (found.reason, found.at_token, found.num_cached_tokens) == ("never_computed", 0, 0)
    assert states(found) == [("missing", 4), ("missing", 4), ("missing", 1)]
    kv.close(open_and_fill(kv, token_range(9)))
    found = explain(kv, token_range(14))
    assert (found.reason, found.at_token) == ("never_computed", 9), (
        "the rest of the prompt is new, and nothing was lost"
    )
    assert states(found) == [("idle", 4), ("idle", 4), ("partial", 1), ("missing", 2)]
    assert explain(kv, [77, *token_range(9)]).reason == "never_computed", "no common first token"


def test_explain_map_index_is_the_place_of_the_page_in_the_page_map() -> None:
    kv = cache()
    other = open_and_fill(kv, token_range(6, 100))
    held = open_and_fill(kv, token_range(8))
    closed = open_and_fill(kv, token_range(14))
    pages = list(closed.pages())
    assert pages[:2] == list(held.pages())
    kv.close(closed)
    found = explain(kv, token_range(20))
    places = [page.map_index for page in found.pages]
    assert places == [*(page - 1 for page in pages), None], "the map does not have the null page"
    _, cells = page_cells(page_states(kv, [other, held]), None)
    assert [cells[place] for place in places if place is not None] == ["a", "a", "i", "i"]


def test_explain_diverged_reports_position_and_cached_tokens() -> None:
    kv = cache()
    kv.close(open_and_fill(kv, token_range(100)))
    found = explain(kv, [*token_range(6), 77, 78, 79, 80])
    assert (found.reason, found.at_token, found.num_cached_tokens) == ("diverged", 6, 6)
    assert found.diverged_tokens == tuple(token_range(MAX_DIVERGED_TOKENS, 7))
    found = explain(kv, [*token_range(8), 77, 78])
    assert (found.reason, found.at_token, found.diverged_tokens[:3]) == ("diverged", 8, (9, 10, 11))


def test_explain_diverged_reports_the_newest_nearest_continuation() -> None:
    kv = cache()
    for tail in ([50, 51, 52], [5, 60, 61], [5, 70, 71]):
        kv.close(open_and_fill(kv, [*token_range(4), *tail]))
    found = explain(kv, [*token_range(4), 5, 6, 7, 8])
    assert (found.reason, found.at_token, found.diverged_tokens) == ("diverged", 5, (70, 71))


def test_explain_evicted_pages_are_reported() -> None:
    kv = cache(num_pages=6)
    kv.close(open_and_fill(kv, token_range(11)))
    kv.close(open_and_fill(kv, token_range(12, 50)))
    found = explain(kv, token_range(12))
    assert (found.reason, found.at_token, found.num_cached_tokens) == ("evicted", 8, 8), (
        "the last page, with three tokens"
    )
    kv.close(open_and_fill(kv, token_range(20, 80)))
    found = explain(kv, token_range(12))
    assert (found.reason, found.at_token) == ("evicted", 0)
    assert explain(kv, token_range(12, 20)).reason == "never_computed"
    assert explain(kv, token_range(12), "other").reason == "never_computed", (
        "evictions of another tenant are not reported"
    )


def test_explain_recomputed_page_is_not_reported_as_evicted() -> None:
    kv = cache(num_pages=4)
    for start in (1, 50, 1):
        kv.close(open_and_fill(kv, token_range(12, start)))
    assert explain(kv, token_range(13)).reason == ""
    assert explain(kv, token_range(16)).reason == "never_computed"


def test_was_evicted_record_is_bounded() -> None:
    pool = PagePool(5)
    keys = [bytes([number]) * 32 for number in range(200)]
    kv = KVCache(5, P)
    for number in range(200):
        kv.close(open_and_fill(kv, [number] * 4))
    assert len(kv.pool._evicted) == 20 and len(pool._evicted) == 0
    assert not any(kv.pool.was_evicted(key) for key in keys)
    assert explain(kv, [0] * 5).reason == "never_computed", "too old for the record"
    assert explain(kv, [190] * 5).reason == "evicted"


def test_explain_names_other_namespaces_only_on_request() -> None:
    kv = cache()
    kv.close(open_and_fill(kv, token_range(11), CacheScope("a", 4)))
    found = explain(kv, token_range(12), CacheScope("b", 4))
    assert (found.reason, found.at_token) == ("never_computed", 4)
    found = explain(kv, token_range(12), CacheScope("b", 4), others=("", "a", "b"))
    assert (found.reason, found.at_token, found.diverged_tokens) == ("other_namespace", 4, ())
    assert "'a'" in found.detail
    assert explain(kv, token_range(12), CacheScope("a", 4), others=("a", "b")).reason == ""


def test_explain_reports_host_pages_as_cached() -> None:
    kv = KVCache(8, P, num_host_pages=8)
    table = open_and_fill(kv, token_range(10))
    assert kv.swap_out(kv.page_contents([table])) is not None
    kv.close(table)
    kv.complete_step()
    kv.close(open_and_fill(kv, token_range(20, 50)))
    found = explain(kv, token_range(13))
    assert (found.reason, found.num_cached_tokens) == ("never_computed", 10)
    assert states(found) == [("idle", 4), ("idle", 4), ("partial", 2), ("missing", 1)]
    kv.close(open_and_fill(kv, token_range(28, 100)))
    found = explain(kv, token_range(13))
    assert states(found) == [("host", 4), ("host", 4), ("partial", 2), ("missing", 1)]
    assert [page.map_index for page in found.pages] == [None] * 4, "not on the device"


def test_explain_without_prefix_caching_misses_everything() -> None:
    kv = KVCache(64, P, enable_prefix_caching=False)
    kv.close(open_and_fill(kv, token_range(11)))
    found = explain(kv, token_range(12))
    assert (found.reason, found.num_cached_tokens) == ("never_computed", 0)
    assert states(found) == [("missing", 4)] * 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]))
def test_explain_random_prompts_is_true_and_changes_nothing(seed: int, page_size: int) -> None:
    """Compare with a record of everything ever computed, on a pool that evicts often."""
    rng = random.Random(seed)
    kv, ever = KVCache(rng.randint(20, 60), page_size, "digest"), PrefixOracle(page_size)
    kv.pool._max_evicted = 10_000  # unbounded, like the oracle
    for _ in range(40):
        tokens = [rng.randint(1, 2) for _ in range(rng.randint(1, 18))]
        scope = CacheScope(rng.choice("ab"), rng.choice([0, rng.randint(0, len(tokens))]))
        num_public = scope.num_public_tokens // page_size
        match, before = find_match(kv, tokens, scope), snapshot(kv.pool)
        found = explain(kv, tokens, scope, others=("a", "b") if rng.random() < 0.3 else ())
        assert snapshot(kv.pool) == before and find_match(kv, tokens, scope) == match
        hits = sum(page.num_tokens for page in found.pages if page.state != "missing")
        assert found.num_cached_tokens == match.num_tokens == hits
        assert len(found.pages) == -(-len(tokens) // page_size)
        at = found.at_token
        if found.reason == "evicted":
            assert ever.contains(tokens[: at + 1], num_public, scope.namespace)
        elif found.reason == "diverged":
            there = [*tokens[:at], *found.diverged_tokens]
            assert found.diverged_tokens[0] != tokens[at] and at == match.num_tokens > 0
            assert any(ever.contains(there, k, scope.namespace) for k in range(len(there) + 1)), (
                "tokens of another tenant"
            )
        elif found.reason == "never_computed":
            page_end = (at // page_size + 1) * page_size
            assert page_end > len(tokens) or not ever.contains(tokens[:page_end], num_public, scope.namespace)
        elif found.reason == "other_namespace":
            assert ever.contains(tokens[: at + 1], num_public, "b" if scope.namespace == "a" else "a")
        else:
            assert match.num_tokens == len(tokens) - 1
        table = kv.open(match)
        write(kv, table, tokens[table.num_tokens :])
        ever.record(tokens, num_public, scope.namespace)
        kv.close(table)


def snapshot(pool: PagePool) -> object:
    """Return the whole state of the pool, including its orders."""
    children = dict(pool._children)
    return list(pool.refs), list(pool._blank), list(pool._idle), list(pool._index), list(pool._evicted), children
