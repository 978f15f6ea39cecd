"""Page keys: stable, distinct, and visible across tenants for public pages only."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import (
    CacheScope,
    PageContent,
    encode_tokens,
    hash_page,
    hash_page_run,
    namespace_hash,
    root_hash,
)
from chatcache.kv_cache.stats import check_invariants
from tests.kv_cache.helpers import PrefixOracle, find_match, open_and_fill, token_range, write

P = 4
ROOT = namespace_hash(root_hash("digest", 4), "")


def compute_and_close(kv: KVCache, tokens: Sequence[int], scope: CacheScope) -> list[int]:
    """Compute the uncached tokens, close the table, and return its pages."""
    table = open_and_fill(kv, tokens, scope)
    check_invariants(kv, [table])
    pages = table.pages()
    kv.close(table)
    return pages


def test_match_of_two_tenants_shares_only_public_pages() -> None:
    kv = KVCache(64, P, "digest")
    a, b = CacheScope("a", 10), CacheScope("b", 10)
    first = compute_and_close(kv, token_range(19), a)
    assert find_match(kv, token_range(19), b).num_tokens == 8, "not even the two public tokens on the third page"
    second = compute_and_close(kv, token_range(19), b)
    assert second[:2] == first[:2] and not set(second[2:]) & set(first[2:])
    assert find_match(kv, token_range(20), a).pages == first and find_match(kv, token_range(20), b).pages == second
    assert find_match(kv, token_range(20), CacheScope("c", 10)).pages == first[:2]
    assert find_match(kv, token_range(20), CacheScope("a")).num_tokens == 0, (
        "a scope without public tokens finds no public page"
    )


@pytest.mark.parametrize("num_public_tokens", [0, 1, 3])
def test_match_of_a_partly_public_page_stays_private(num_public_tokens: int) -> None:
    kv = KVCache(64, P, "digest")
    compute_and_close(kv, token_range(11), CacheScope("a", num_public_tokens))
    assert find_match(kv, token_range(11), CacheScope("b", num_public_tokens)).num_tokens == 0
    assert find_match(kv, token_range(12), CacheScope("a", num_public_tokens)).num_tokens == 11


def test_match_of_a_shortened_public_prompt_works_across_tenants() -> None:
    kv = KVCache(64, P, "digest")
    compute_and_close(kv, token_range(7), CacheScope("a", 12))
    assert find_match(kv, token_range(12), CacheScope("b", 12)).num_tokens == 7
    assert find_match(kv, token_range(12), CacheScope("b", 4)).num_tokens == 4


@pytest.mark.parametrize("num_kept", range(13))
def test_truncate_of_public_tokens_makes_later_tokens_private(num_kept: int) -> None:
    kv = KVCache(64, P, "digest")
    scope = CacheScope("a", 12)
    parent = kv.open(find_match(kv, token_range(14), scope))
    write(kv, parent, token_range(14))
    child = kv.fork(parent)
    kv.truncate(child, num_kept)
    check_invariants(kv, [parent, child])
    other = [*token_range(num_kept), *token_range(9, 70)]
    write(kv, child, token_range(9, 70))
    check_invariants(kv, [parent, child])
    kv.close(child)
    kv.close(parent)
    num_public = num_kept // P * P
    assert find_match(kv, [*other, 0], CacheScope("b", 12)).num_tokens == num_kept
    assert find_match(kv, [*other, 0], CacheScope("b", num_public)).num_tokens == num_public
    assert find_match(kv, [*other, 0], CacheScope("a", num_public)).num_tokens == num_kept + 9
    assert find_match(kv, [*token_range(14), 0], scope).num_tokens == 14


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4, 8]))
@pytest.mark.slow
def test_match_equals_everything_the_tenant_may_see(seed: int, page_size: int) -> None:
    rng = random.Random(seed)
    kv, oracle = KVCache(1000, page_size, "digest"), PrefixOracle(page_size)
    for _ in range(25):
        tokens = [rng.randint(1, 2) for _ in range(rng.randint(1, 24))]
        scope = CacheScope(rng.choice("ab"), rng.choice([0, rng.randint(0, len(tokens))]))
        num_public = scope.num_public_tokens // page_size
        table = kv.open(find_match(kv, tokens, scope))
        assert table.num_tokens == oracle.longest_match(tokens, num_public, scope.namespace)
        write(kv, table, tokens[table.num_tokens :])
        oracle.record(tokens, num_public, scope.namespace)
        tables = [table]
        if rng.random() < 0.3:  # fork, truncate and continue differently
            num_kept = rng.randint(0, len(tokens))
            new = [rng.randint(1, 2) for _ in range(rng.randint(1, 9))]
            tables.append(kv.fork(table))
            kv.truncate(tables[1], num_kept)
            write(kv, tables[1], new)
            num_public = min(num_public, num_kept // page_size) if num_kept < len(tokens) else num_public
            oracle.record(tokens[:num_kept] + new, num_public, scope.namespace)
        check_invariants(kv, tables)
        for table in tables:
            kv.close(table)
    check_invariants(kv, [])


@pytest.mark.slow
def test_match_10_000_probes_find_no_foreign_page() -> None:
    """Every tenant computes the same texts after the same public prompt; no tenant gets a page of another."""
    rng = random.Random(19)
    tenants = [f"tenant:{number}" for number in range(8)]
    prompt = [rng.randrange(100) for _ in range(37)]
    texts = [prompt + [rng.randrange(3) for _ in range(rng.randint(1, 24))] for _ in range(40)]
    kv = KVCache(20_000, P, "digest")
    owner: dict[int, str] = {}
    probes = [(tenant, tokens) for tenant in tenants for tokens in texts]
    rng.shuffle(probes)
    num_hits = num_foreign = num_probes = 0
    for tenant, tokens in probes:
        for prober in (*tenants, *tenants, *tenants, "stranger", ""):  # before it, after it, and again
            for page in find_match(kv, tokens, CacheScope(prober, 37)).pages[37 // P :]:
                num_hits += owner[page] == prober
                num_foreign += owner[page] != prober
            num_probes += 1
        for page in compute_and_close(kv, tokens, CacheScope(tenant, 37))[37 // P :]:
            assert owner.setdefault(page, tenant) == tenant
        num_probes += 6
        assert all(
            find_match(kv, tokens, CacheScope(other, 37)).num_tokens >= 36 for other in (*tenants[:5], "stranger")
        )
    print(f"{num_probes} probes, {num_hits} own hits beyond the public prompt, {num_foreign} foreign ones")
    assert num_probes >= 10_000 and num_hits > 10_000 and num_foreign == 0


@pytest.mark.parametrize("other", [("digest", 4, "tenant"), ("digest", 8, ""), ("other", 4, ""), ("digest4", 4, "")])
def test_page_keys_differ_by_model_page_size_and_namespace(other: tuple[str, int, str]) -> None:
    digest, page_size, namespace = other
    assert namespace_hash(root_hash(digest, page_size), namespace) != ROOT


def test_page_keys_are_stable_across_processes() -> None:
    content = hash_page(ROOT, encode_tokens([1, 2, 3, 4]))
    assert content.key.hex() == "27d3eec07908dd7ca8845f788fa49e4d4b71ed40568d7cdfd75372ea018293ba"


def test_hash_page_run_equals_repeated_hash_page() -> None:
    contents: list[PageContent] = []
    for tokens in ((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)):
        contents.append(hash_page(contents[-1].key if contents else ROOT, encode_tokens(tokens)))
    assert hash_page_run(ROOT, [content.tokens for content in contents]) == [content.key for content in contents]


def test_namespace_hash_of_similar_names_differs() -> None:
    names = ["", "?", "\ud800", "\ud801", "a", "A", "a\0", "page", "\ufffd"]
    assert len({namespace_hash(ROOT, name) for name in names}) == len(names)


def test_salts_give_other_keys_than_any_namespace() -> None:
    names = ["", "a", "b", "ab", "=a", "a\0b"]
    keys = {namespace_hash(ROOT, name, salt) for name in names for salt in names}
    assert len(keys) == len(names) ** 2, "an empty salt is no salt"
    assert namespace_hash(ROOT, "a") == namespace_hash(ROOT, "a", "")


def test_pages_of_a_salt_are_found_with_it_only() -> None:
    kv = KVCache(64, 4, "digest")
    tokens = list(range(1, 20))
    scopes = [CacheScope(name, num_public, salt) for name in "ab" for salt in ("", "s", "t") for num_public in (0, 8)]
    for num_public in (0, 8):
        for scope in scopes:
            if scope.num_public_tokens != num_public:
                continue
            assert find_match(kv, [*tokens, 0], scope).num_tokens == (8 if kv.pool.num_idle and num_public else 0)
            table = open_and_fill(kv, tokens, scope)
            check_invariants(kv, [table])
            fork = kv.fork(table)
            kv.truncate(fork, 6, scope)
            write(kv, fork, [90, 91, 92])
            kv.close(fork)
            kv.close(table)
            check_invariants(kv, [])
            assert find_match(kv, [*tokens, 0], scope).num_tokens == len(tokens)
            assert find_match(kv, [*tokens[:6], 90, 91, 92, 0], scope).num_tokens == 9
        kv = KVCache(64, 4, "digest")
