"""The worst case in pages, compared with a run that reserves page by page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatcache.engine.admission import max_tokens_that_fit, worst_case_pages
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import encode_tokens


def pages_used(num_prompt_tokens: int, max_tokens: int, num_branches: int, page_size: int) -> int:
    """Run all branches of a request to their end on a large cache; return the max_used pages in use."""
    kv = KVCache(2000, page_size)
    root = kv.open(kv.match(kv.hash_pages([0])))
    kv.reserve([(root, num_prompt_tokens)])
    kv.commit(root, encode_tokens([1] * num_prompt_tokens))
    tables = [root, *(kv.fork(root) for _ in range(num_branches - 1))]
    max_used = kv.pool.num_in_use
    for _ in range(max_tokens - 1):
        kv.reserve([(table, table.num_tokens + 1) for table in tables])
        for lane, table in enumerate(tables):
            kv.commit(table, encode_tokens([2 + lane]))
        kv.complete_step()
        max_used = max(max_used, kv.pool.num_in_use)
    return max_used


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6), st.sampled_from([1, 2, 4, 16]))
def test_worst_case_pages_equals_a_full_run(prompt: int, max_tokens: int, branches: int, page_size: int) -> None:
    assert pages_used(prompt, max_tokens, branches, page_size) == worst_case_pages(
        prompt, max_tokens, branches, page_size
    )


@given(st.integers(1, 100), st.integers(1, 6), st.sampled_from([1, 4, 16]), st.integers(1, 60))
def test_max_tokens_that_fit_is_the_largest(prompt: int, branches: int, page_size: int, pages: int) -> None:
    max_used = max_tokens_that_fit(prompt, branches, page_size, pages)
    if max_used >= 1:
        assert worst_case_pages(prompt, max_used, branches, page_size) <= pages
    assert worst_case_pages(prompt, max(max_used, 0) + 1, branches, page_size) > pages
