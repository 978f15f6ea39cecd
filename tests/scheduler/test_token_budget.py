"""Shares of a step: bounded by what each request wants, half to the first, the rest equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatcache.scheduler.token_budget import share_tokens

REQUESTS = st.lists(st.tuples(st.integers(1, 500), st.sampled_from("abc")), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("wanted", "num_tokens", "groups", "shares"),
    [
        ([6000, 30], 2048, "aa", [2018, 30]),
        ([6000, 30], 100, "aa", [75, 25]),
        ([6000, 6000, 6000], 120, "aaa", [80, 20, 20]),
        ([6000, 6000, 6000, 30], 120, "aaab", [70, 10, 10, 30]),
        ([5, 7], 100, "ab", [5, 7]),
        ([6000], 1, "a", [1]),
    ],
)
def test_share_tokens_of_examples(wanted: list[int], num_tokens: int, groups: str, shares: list[int]) -> None:
    assert share_tokens(wanted, num_tokens, groups) == shares


@given(REQUESTS, st.integers(1, 2048))
def test_share_tokens_uses_all_tokens_and_prefers_the_smaller_request(
    requests: list[tuple[int, str]], num_tokens: int
) -> None:
    wanted, groups = [size for size, _ in requests], [group for _, group in requests]
    shares = share_tokens(wanted, num_tokens, groups)
    assert all(0 <= share <= size for share, size in zip(shares, wanted, strict=True))
    assert sum(shares) == min(sum(wanted), num_tokens)
    assert shares[0] >= min(wanted[0], num_tokens // 2)
    equal = num_tokens // 2 // len(set(groups))  # what a group gets at least, if it wants so much
    for group in set(groups):
        mine = [index for index, each in enumerate(groups) if each == group]
        assert sum(shares[i] for i in mine) >= min(sum(wanted[i] for i in mine), equal)
        for index in mine:
            assert shares[index] >= min(wanted[index], equal // len(mine))
