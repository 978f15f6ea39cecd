"""Work lists against brute force: every token attends to each of its keys exactly once.

The oracle expands an `AttentionWork` into (token, page, offset) triples and compares them with the tables.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from chatcache_kernels import prefix_sharing, work_list
from chatcache_kernels.prefix_sharing import SharingCost
from chatcache_kernels.types import AttentionWork
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

I32 = NDArray[np.int32]

SHARES: tuple[work_list.SharingMode, ...] = ("auto", "always", "never")


@dataclass(frozen=True, slots=True)
class Step:
    """Arguments of `plan_work`. Table entries after a row's end are invalid (-1)."""

    tables: I32
    start: I32
    num_tokens: I32
    page_size: int
    group: int

    def plan(self, share: work_list.SharingMode = "auto", cost: SharingCost = work_list.DEFAULT_COST) -> AttentionWork:
        """Return the plan of the step."""
        sizes = self.page_size, self.group
        return work_list.plan_work(self.tables, self.start, self.num_tokens, *sizes, share=share, cost=cost)

    def tokens(self) -> Iterator[tuple[int, int]]:
        """Yield (row, position) of each new token."""
        for row, (start, count) in enumerate(zip(self.start.tolist(), self.num_tokens.tolist(), strict=True)):
            yield from ((row, start + i) for i in range(count))


def check(step: Step, plan: AttentionWork) -> None:
    """Compare a plan with the keys that each token needs.

    Raises: AssertionError that names the first token with a missing, repeated or wrong key.
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
            assert one.max_members * step.group <= max(work_list.PREFILL_TILE_QUERIES, step.group)
            for n, token in enumerate(members[member : member + num_members]):
                own, position = tokens[token]
                stop = max(first, min(end, position + 1))  # the first tokens of a tile may see no key of its last item
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
    """Return the number of pages that the items read."""
    size = step.page_size
    return sum(-(-end // size) - first // size for one in plan.lists for _, first, end, *_ in one.items.tolist())


def make_unshared_step(rows: list[tuple[int, int]], page_size: int = 16, group: int = 3) -> Step:
    """Return rows of (start, new tokens) without shared pages."""
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
def test_every_token_is_planned_once_per_key(rows: list[tuple[int, int]], group: int) -> None:
    step = make_unshared_step(rows, group=group)
    check(step, step.plan())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1500), st.sampled_from((0, 1, 1, 1, 2, 5, 23, 90))), max_size=8),
    st.sampled_from((1, 8, 16, 64)),
    st.integers(1, 17),
)
def test_random_rows_are_planned_once_per_key(rows: list[tuple[int, int]], page_size: int, group: int) -> None:
    step = make_unshared_step(rows, page_size, group)
    check(step, step.plan())


@pytest.mark.parametrize(
    ("cached", "new", "num_items", "num_merged"),
    [(0, 8192, 256, 0), (6144, 2048, 64, 0), (16_384, 512, 32, 512), (32_000, 64, 32, 64), (0, 100, 4, 0)],
)
def test_prefill_is_split_only_as_far_as_its_tiles_are_few(
    cached: int, new: int, num_items: int, num_merged: int
) -> None:
    plan = make_unshared_step([(cached, new)], group=4).plan("never")
    assert sum(len(one.items) for one in plan.lists) == num_items
    assert len(plan.merge_tokens) == num_merged


@st.composite
def forests(draw: st.DrawFn, decode: bool = False) -> Step:
    """Draw rows that share a prefix of any number of pages, including an unfinished last page."""
    page_size, group = draw(st.sampled_from((1, 4, 16, 64))), draw(st.integers(1, 17))
    fresh = itertools.count(1)
    tables: list[list[int]] = []
    start: list[int] = []
    num_tokens: list[int] = []
    for _ in range(draw(st.integers(0, 14))):
        pages: list[int] = []
        if draw(st.integers(0, 4)) and tables:
            parent = draw(st.sampled_from(tables))
            common: int = draw(st.integers(0, len(parent)))
            pages = parent[:common]
        pages = pages + [next(fresh) for _ in range(draw(st.sampled_from((0, 1, 2, 3, 700 // page_size))))]
        new = 1 if decode else draw(st.sampled_from((0, 1, 1, 1, 2, 30)))
        first = max(0, len(pages) * page_size - new - draw(st.integers(0, page_size - 1)))
        needed = -(-(first + new) // page_size)
        tables.append((pages + [next(fresh) for _ in range(needed - len(pages))])[:needed])
        start.append(first)
        num_tokens.append(new)
    shape = len(tables), max(map(len, tables), default=0) + 1
    table = np.full(shape, -1, np.int32)
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = pages
    order = draw(st.permutations(list(range(len(tables)))))
    starts, news = np.array(start, np.int32)[order], np.array(num_tokens, np.int32)[order]
    return Step(table[order], starts, news, page_size, group)


def ideal_reads(step: Step) -> int:
    """Return the pages read if each shared page is read once per full tile of rows."""
    small, large = work_list.tokens_per_tile(step.group)

    def reads(rows: list[int], page: int) -> int:
        if not rows:
            return 0
        total, groups = 0, defaultdict(list)
        for row in rows:
            if step.num_tokens[row] == 1 and page < step.start[row] // step.page_size:
                groups[step.tables[row, page]].append(row)
            else:
                total += pages_of(row) - page
        for members in groups.values():
            if len(members) > 1:
                total += (1 if len(members) <= small else -(-len(members) // large)) + reads(members, page + 1)
            else:
                total += pages_of(members[0]) - page
        return total

    def pages_of(row: int) -> int:
        return -(-int(step.start[row] + step.num_tokens[row]) // step.page_size)

    return reads([row for row, new in enumerate(step.num_tokens) if new == 1], 0)


@settings(max_examples=80, deadline=None)
@given(forests(), st.sampled_from(SHARES))
def test_random_forests_are_planned_once_per_key(step: Step, share: work_list.SharingMode) -> None:
    check(step, step.plan(share))


@settings(max_examples=60, deadline=None)
@given(forests(decode=True))
def test_sharing_always_reads_each_tree_page_once(step: Step) -> None:
    with mock.patch.object(
        work_list, "SPLIT_TOKENS", 64 * step.page_size
    ):  # splits are between pages: no page counts twice
        assert page_reads(step, step.plan("always")) == ideal_reads(step)


def cost_of_plan(step: Step, plan: AttentionWork, cost: SharingCost) -> float:
    """Return the cost of a decode step's items in keys, by the formula in `prefix_sharing`."""
    small, _ = work_list.tokens_per_tile(step.group)
    total = cost.per_query * step.group * plan.num_states
    for one in plan.lists:
        total += cost.per_launch if one.max_members > small else 0.0
        total += sum(cost.reread * (end - first) + cost.per_item for _, first, end, *_ in one.items.tolist())
    return float(total)


COSTS = st.builds(
    SharingCost,
    st.sampled_from((0.25, 1.0)),
    st.sampled_from((0.0, 10.0, 64.0)),
    st.sampled_from((0.0, 2.0)),
    st.sampled_from((0.0, 100.0, 3000.0)),
)


@settings(max_examples=80, deadline=None)
@given(forests(decode=True), COSTS)
def test_choice_costs_at_most_all_or_nothing(step: Step, cost: SharingCost) -> None:
    all_shared, none, chosen = (
        cost_of_plan(step, step.plan(share, cost), cost) for share in ("always", "never", "auto")
    )
    assert chosen <= min(all_shared, none) + 1e-6


@settings(max_examples=60, deadline=None)
@given(forests(decode=True), COSTS)
def test_choice_is_optimal_when_launches_are_free(step: Step, cost: SharingCost) -> None:
    """Compare with brute force over every subset of the forest's nodes."""
    cost = replace(cost, per_launch=0.0)
    levels = prefix_sharing.build_prefix_forest(
        step.tables, np.where(step.num_tokens == 1, step.start // step.page_size, 0)
    )
    nodes = sum(len(level.sizes) for level in levels)
    if nodes > 6:
        return
    costs = []
    begins = prefix_sharing._possible_starts(levels, step.page_size) if levels else []
    for chosen in itertools.product((False, True), repeat=nodes):
        flags = iter(chosen)
        kept: list[NDArray[np.bool_]] = []
        places: list[NDArray[np.int64]] = []
        for depth, level in enumerate(levels):
            kept.append(np.array([next(flags) for _ in level.sizes], bool))
            above = level.parent
            places.append(
                np.where(kept[-2][above], depth, places[-1][above]) if depth else np.zeros(len(above), np.int64)
            )
        ranges = prefix_sharing._select_ranges(levels, begins, places, kept, step.page_size) if levels else None
        with mock.patch.object(work_list, "choose_ranges", lambda *_, ranges=ranges, **__: (ranges, True)):
            costs.append(cost_of_plan(step, step.plan("always"), cost))
    assert cost_of_plan(step, step.plan("auto", cost), cost) <= min(costs) + 1e-6


# -- injected bugs: each is a change to one step of the planning -------------------------------------------------------


def make_branching_step() -> Step:
    """Return 20 rows: a system prompt, two conversations, branches; one shared page is not full."""
    tables = np.arange(1, 20 * 80 + 1, dtype=np.int32).reshape(20, 80)
    tables[:, :20] = tables[0, :20]
    tables[:12, :60] = tables[0, :60]
    tables[12:, :41] = tables[12, :41]
    start = np.full(20, 70 * 16 + 3, np.int32)
    start[12:] = 40 * 16 + 7  # within page 40, which they share
    return Step(tables, start, np.ones(20, np.int32), 16, 4)


def full_too_early(original: Any) -> Any:
    return lambda tables, full_pages: original(tables, full_pages + 1)


def foreign_table(original: Any) -> Any:
    def injected(*args: Any) -> list[work_list.QueryTiles]:
        return [replace(part, row=np.roll(part.row, 1)) for part in original(*args)]

    return injected


def too_many_members(original: Any) -> Any:
    def injected(ranges: Any, offsets: I32, small: int, large: int) -> list[work_list.QueryTiles]:
        return [replace(part, height=part.height // 2) for part in original(ranges, offsets, small, large)]

    return injected


def lost_member(original: Any) -> Any:
    def injected(*args: Any) -> list[work_list.QueryTiles]:
        return [replace(part, members=np.where(part.members == 5, 4, part.members)) for part in original(*args)]

    return injected


def keys_read_twice(original: Any) -> Any:
    return lambda start, own, *args: original(start, own * 0, *args)


def lost_key(original: Any) -> Any:
    def injected(*args: Any) -> work_list.QueryTiles:
        tiles: work_list.QueryTiles = original(*args)
        return replace(tiles, end_key=tiles.end_key - 1)

    return injected


def lost_state(original: Any) -> Any:
    def injected(*args: Any) -> Any:
        tokens, offsets, states = original(*args)
        return tokens, np.minimum(offsets, offsets[-1] - 1), states[:-1]

    return injected


def other_order(original: Any) -> Any:
    def injected(*args: Any) -> Any:
        tokens, offsets, states = original(*args)
        swapped = states.copy()
        swapped[[0, 1]] = states[[1, 0]]
        return tokens, offsets, swapped

    return injected


@pytest.mark.parametrize(
    ("function", "inject"),
    [
        ("build_prefix_forest", full_too_early),
        ("_shared_tiles", foreign_table),
        ("_shared_tiles", too_many_members),
        ("_shared_tiles", lost_member),
        ("_decode_tiles", keys_read_twice),
        ("_decode_tiles", lost_key),
        ("_plan_merges", lost_state),
        ("_plan_merges", other_order),
    ],
)
def test_injected_bugs_are_caught(monkeypatch: pytest.MonkeyPatch, function: str, inject: Callable[[Any], Any]) -> None:
    step = make_branching_step()
    for share in SHARES:
        check(step, step.plan(share))
    monkeypatch.setattr(work_list, function, inject(getattr(work_list, function)))
    with pytest.raises((AssertionError, ValueError)):
        check(step, step.plan("always"))


def test_choice_that_ignores_the_cost_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows share one page of many: reading it together costs more than it saves."""
    step = make_unshared_step([(900, 1), (900, 1)])
    step.tables[1, 0] = step.tables[0, 0]
    cost = SharingCost(per_launch=0.0)
    price = cost_of_plan(step, step.plan("auto", cost), cost)
    monkeypatch.setattr(
        prefix_sharing.CostModel, "shared_cost", lambda self, num_keys, num_rows: np.zeros(num_keys.shape)
    )
    assert cost_of_plan(step, step.plan("auto", cost), cost) > price
