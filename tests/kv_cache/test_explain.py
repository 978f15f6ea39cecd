"""Why not more of a prompt hits: every reason in the situation it is for."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import CacheScope
from chatcache.kv_cache.pool import PagePool
from chatcache.kv_cache.prefix_match import MAX_DIVERGED_TOKENS
from chatcache.types.stats import Explanation
from tests.kv_cache.kv_tools import PrefixOracle, find, opened, text, write

P = 4


def cache(num_pages: int = 64) -> KVCache:
    return KVCache(num_pages, P, "digest")


def explain(kv: KVCache, tokens: list[int], scope: CacheScope | str = "", others: tuple[str, ...] = ()) -> Explanation:
    return kv.explain(kv.hash_pages(tokens, CacheScope(scope) if isinstance(scope, str) else scope), others)


def states(explanation: Explanation) -> list[tuple[str, int]]:
    return [(page.state, page.num_tokens) for page in explanation.pages]


def test_everything_but_the_last_token_hits() -> None:
    kv = cache()
    scope = CacheScope("a", 9)
    held = opened(kv, text(10), scope)
    kv.close(opened(kv, text(14), scope))
    told = explain(kv, text(15), scope)
    assert (told.reason, told.at_token, told.num_tokens, told.num_cached_tokens) == ("", -1, 15, 14)
    assert states(told) == [("held", 4), ("held", 4), ("idle", 4), ("partial", 2)]
    assert [page.public for page in told.pages] == [True, True, False, False]
    assert held.num_tokens == 10


def test_never_computed() -> None:
    kv = cache()
    told = explain(kv, text(9))
    assert (told.reason, told.at_token, told.num_cached_tokens) == ("never_computed", 0, 0)
    assert states(told) == [("missing", 4), ("missing", 4), ("missing", 1)]
    kv.close(opened(kv, text(9)))
    told = explain(kv, text(14))
    assert (told.reason, told.at_token) == ("never_computed", 9), "the conversation goes on: nothing is lost"
    assert states(told) == [("idle", 4), ("idle", 4), ("partial", 1), ("missing", 2)]
    assert explain(kv, [77, *text(9)]).reason == "never_computed", "strangers from the first token on"


def test_diverged_says_where_and_what_is_there_instead() -> None:
    kv = cache()
    kv.close(opened(kv, text(100)))
    told = explain(kv, [*text(6), 77, 78, 79, 80])
    assert (told.reason, told.at_token, told.num_cached_tokens) == ("diverged", 6, 6)
    assert told.diverged_tokens == tuple(text(MAX_DIVERGED_TOKENS, 7))
    told = explain(kv, [*text(8), 77, 78])
    assert (told.reason, told.at_token, told.diverged_tokens[:3]) == ("diverged", 8, (9, 10, 11))


def test_the_newest_of_the_nearest_continuations_is_shown() -> None:
    kv = cache()
    for tail in ([50, 51, 52], [5, 60, 61], [5, 70, 71]):
        kv.close(opened(kv, [*text(4), *tail]))
    told = explain(kv, [*text(4), 5, 6, 7, 8])
    assert (told.reason, told.at_token, told.diverged_tokens) == ("diverged", 5, (70, 71))


def test_evicted() -> None:
    kv = cache(num_pages=6)
    kv.close(opened(kv, text(11)))
    kv.close(opened(kv, text(12, 50)))
    told = explain(kv, text(12))
    assert (told.reason, told.at_token, told.num_cached_tokens) == ("evicted", 8, 8), "the tail of three tokens"
    kv.close(opened(kv, text(20, 80)))
    told = explain(kv, text(12))
    assert (told.reason, told.at_token) == ("evicted", 0)
    assert explain(kv, text(12, 20)).reason == "never_computed"
    assert explain(kv, text(12), "other").reason == "never_computed", "what a tenant lost is nobody else's business"


def test_a_page_computed_again_is_not_evicted_any_more() -> None:
    kv = cache(num_pages=4)
    for start in (1, 50, 1):
        kv.close(opened(kv, text(12, start)))
    assert explain(kv, text(13)).reason == ""
    assert explain(kv, text(16)).reason == "never_computed"


def test_the_record_of_evictions_is_bounded() -> None:
    pool = PagePool(5)
    keys = [bytes([number]) * 32 for number in range(200)]
    kv = KVCache(5, P)
    for number in range(200):
        kv.close(opened(kv, [number] * 4))
    assert len(kv.pool._evicted) == 20 and len(pool._evicted) == 0
    assert not any(kv.pool.was_evicted(key) for key in keys)
    assert explain(kv, [0] * 5).reason == "never_computed", "forgotten long ago"
    assert explain(kv, [190] * 5).reason == "evicted"


def test_another_namespace_is_named_to_operators_only() -> None:
    kv = cache()
    kv.close(opened(kv, text(11), CacheScope("a", 4)))
    told = explain(kv, text(12), CacheScope("b", 4))
    assert (told.reason, told.at_token) == ("never_computed", 4)
    told = explain(kv, text(12), CacheScope("b", 4), others=("", "a", "b"))
    assert (told.reason, told.at_token, told.diverged_tokens) == ("other_namespace", 4, ())
    assert "'a'" in told.detail
    assert explain(kv, text(12), CacheScope("a", 4), others=("a", "b")).reason == ""


def test_pages_on_the_host_count_as_cached() -> None:
    kv = KVCache(8, P, num_host_pages=8)
    table = opened(kv, text(10))
    assert kv.swap_out(kv.page_contents([table])) is not None
    kv.close(table)
    kv.complete_step()
    kv.close(opened(kv, text(20, 50)))
    told = explain(kv, text(13))
    assert (told.reason, told.num_cached_tokens) == ("never_computed", 10)
    assert states(told) == [("idle", 4), ("idle", 4), ("partial", 2), ("missing", 1)]
    kv.close(opened(kv, text(28, 100)))
    assert states(explain(kv, text(13))) == [("host", 4), ("host", 4), ("partial", 2), ("missing", 1)]


def test_without_matching_nothing_is_kept() -> None:
    kv = KVCache(64, P, enable_matching=False)
    kv.close(opened(kv, text(11)))
    told = explain(kv, text(12))
    assert (told.reason, told.num_cached_tokens) == ("never_computed", 0)
    assert states(told) == [("missing", 4)] * 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]))
def test_any_explanation_is_true_and_changes_nothing(seed: int, page_size: int) -> None:
    """Against a record of everything ever computed, on a pool that evicts all the time."""
    rng = random.Random(seed)
    kv, ever = KVCache(rng.randint(20, 60), page_size, "digest"), PrefixOracle(page_size)
    kv.pool._max_evicted = 10_000  # the oracle forgets nothing either
    for _ in range(40):
        tokens = [rng.randint(1, 2) for _ in range(rng.randint(1, 18))]
        scope = CacheScope(rng.choice("ab"), rng.choice([0, rng.randint(0, len(tokens))]))
        num_public = scope.num_public_tokens // page_size
        match, before = find(kv, tokens, scope), snapshot(kv.pool)
        told = explain(kv, tokens, scope, others=("a", "b") if rng.random() < 0.3 else ())
        assert snapshot(kv.pool) == before and find(kv, tokens, scope) == match
        hits = sum(page.num_tokens for page in told.pages if page.state != "missing")
        assert told.num_cached_tokens == match.num_tokens == hits
        assert len(told.pages) == -(-len(tokens) // page_size)
        at = told.at_token
        if told.reason == "evicted":
            assert ever.knows(tokens[: at + 1], num_public, scope.namespace)
        elif told.reason == "diverged":
            there = [*tokens[:at], *told.diverged_tokens]
            assert told.diverged_tokens[0] != tokens[at] and at == match.num_tokens > 0
            assert any(ever.knows(there, k, scope.namespace) for k in range(len(there) + 1)), "not the tenant's own"
        elif told.reason == "never_computed":
            page_end = (at // page_size + 1) * page_size
            assert page_end > len(tokens) or not ever.knows(tokens[:page_end], num_public, scope.namespace)
        elif told.reason == "other_namespace":
            assert ever.knows(tokens[: at + 1], num_public, "b" if scope.namespace == "a" else "a")
        else:
            assert match.num_tokens == len(tokens) - 1
        table = kv.open(match)
        write(kv, table, tokens[table.num_tokens :])
        ever.learn(tokens, num_public, scope.namespace)
        kv.close(table)


def snapshot(pool: PagePool) -> object:
    """Everything the pool knows, orders included."""
    children = dict(pool._children)
    return list(pool.refs), list(pool._blank), list(pool._idle), list(pool._index), list(pool._evicted), children
