"""Work lists against brute force: every token sees each of its keys once, through pages that are its own.

The oracle spells an `AttentionWork` out as (token, page, offset) triples and compares them with the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from chatcache_kernels import work
from chatcache_kernels.types import AttentionWork
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Step:
    """What a step adds: the arguments of `plan_work`. Table entries past a row's end are poison (-1)."""

    tables: I32
    start: I32
    num_tokens: I32
    page_size: int
    group: int

    def plan(self) -> AttentionWork:
        """Return the step's work."""
        return work.plan_work(self.tables, self.start, self.num_tokens, self.page_size, self.group)

    def tokens(self) -> Iterator[tuple[int, int]]:
        """Yield (row, position) of each of the T tokens."""
        for row, (start, count) in enumerate(zip(self.start.tolist(), self.num_tokens.tolist(), strict=True)):
            yield from ((row, start + i) for i in range(count))


def check(step: Step, plan: AttentionWork) -> None:
    """Compare the work with what the step needs.

    Raises: AssertionError naming the first token that misses, repeats or misreads a key.
    """
    tokens, size = list(step.tokens()), step.page_size
    assert plan.positions.tolist() == [position for _, position in tokens]
    parts: dict[int, list[tuple[int, int, int]]] = {token: [] for token in range(len(tokens))}  # (first, end, state)
    states: list[int] = []
    for one in plan.lists:
        items, members = one.items.tolist(), one.members.tolist()
        assert int(one.num_items) == len(items) > 0
        for row, first, end, member, num_members, state in items:
            assert 0 <= first < end
            assert 0 < num_members <= one.max_members
            assert 0 <= member <= len(members) - num_members
            assert one.max_members * step.group <= max(work.LARGE_QUERIES, step.group)
            for n, token in enumerate(members[member : member + num_members]):
                own, position = tokens[token]
                stop = max(first, min(end, position + 1))  # the first tokens of a tile may see none of its last piece
                assert stop > first or num_members > 1
                used = slice(first // size, -(-stop // size))
                assert (step.tables[row, used] == step.tables[own, used]).all(), f"token {token} reads foreign pages"
                if row != own:
                    assert stop <= min(step.start[own], step.start[row]) // size * size, (
                        "shares a page that is not full"
                    )
                parts[token].append((first, stop, state + n if state >= 0 else -1))
                states += [state + n] if state >= 0 else []
    assert sorted(states) == list(range(plan.num_states)), "states overlap, or one is never written"
    merges = dict(merge_lists(plan))
    for token, pieces in parts.items():
        ordered = sorted(pieces)
        seen = [(first, stop) for first, stop, _ in ordered if stop > first]
        cuts = [0, *(stop for _, stop in seen)]
        assert [first for first, _ in seen] == cuts[:-1] and cuts[-1] == tokens[token][1] + 1, f"{token} sees {seen}"
        expected = [state for _, _, state in ordered]
        assert merges.pop(token, [-1]) == expected, f"token {token} merges other states than {expected}"
        assert (expected == [-1]) == (len(expected) == 1)
    assert not merges


def merge_lists(plan: AttentionWork) -> Iterator[tuple[int, list[int]]]:
    """Yield each merged token and its states."""
    tokens, offsets, states = (x.tolist() for x in (plan.merge_tokens, plan.merge_offsets, plan.merge_states))
    assert int(plan.num_merges) == len(tokens) == len(set(tokens)) == len(offsets) - 1
    assert offsets[0] == 0 and offsets[-1] == len(states) == plan.num_states
    for token, first, end in zip(tokens, offsets, offsets[1:], strict=False):
        yield token, states[first:end]


def page_reads(step: Step, plan: AttentionWork) -> int:
    """Return how many pages the items read."""
    size = step.page_size
    return sum(-(-end // size) - first // size for one in plan.lists for _, first, end, *_ in one.items.tolist())


def separate(rows: list[tuple[int, int]], page_size: int = 16, group: int = 3) -> Step:
    """Return rows of (start, new tokens) that share nothing."""
    start, num_tokens = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    needed = -(-(start + num_tokens) // page_size)
    tables = np.full((len(rows), needed.max(initial=0) + 1), -1, np.int32)
    for row, count in enumerate(needed.tolist()):
        tables[row, :count] = 1000 * row + np.arange(1, count + 1)
    return Step(tables, start, num_tokens, page_size, group)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [(5, 0)],
        [(0, 1)],
        [(510, 1), (511, 1), (512, 1), (1023, 1), (1024, 1)],
        [(5000, 1), (0, 1), (7, 0), (4096, 1)],
        [(600, 3), (0, 40), (4090, 10), (100, 1), (0, 0), (8000, 200), (511, 2)],
        [(0, 300)],
    ],
)
@pytest.mark.parametrize("group", [1, 3, 8, 16, 70])
def test_every_token_sees_its_keys_once(rows: list[tuple[int, int]], group: int) -> None:
    step = separate(rows, group=group)
    check(step, step.plan())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1500), st.sampled_from((0, 1, 1, 1, 2, 5, 23, 90))), max_size=8),
    st.sampled_from((1, 8, 16, 64)),
    st.integers(1, 17),
)
def test_any_rows_see_their_keys_once(rows: list[tuple[int, int]], page_size: int, group: int) -> None:
    step = separate(rows, page_size, group)
    check(step, step.plan())
