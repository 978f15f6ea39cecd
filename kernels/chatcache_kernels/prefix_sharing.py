"""Find prefixes that rows share in their page tables, and choose which to read together.

This is cascade attention over a prefix tree. A node is a set of rows and the range of pages that these rows, and no
larger set, have in common: a system prompt, the conversations after it and the n branches of a request are three
levels of one tree.

    node 0   rows 0 1 2 3   pages 0 .. 4        level 0
    node 1   rows 0 1       pages 5 .. 9        level 1, parent node 0
    node 2   rows 2 3       pages 5 .. 6        level 1, parent node 0

Nodes are found level by level, all nodes of a level in one pass: rows are compared with the first row of their node,
separated where pages differ, and grouped again by the next page. Only pages before every member's `start` count: they
are full and are not written any more.

Cost model. If a node is not chosen, its children read its keys separately, from the end of the nearest chosen ancestor.
The unit is one key read from memory:

    item     reread x its keys + per_item    another reader of the same pages finds many of them in a cache
    state    per_query x G                   for each member of an item, unless it has only one item: written, merged
    launch   per_launch                      if large tiles are used for shared prefixes only

The cheapest choice is computed from the leaves to the root: the cost of a node is the minimum of reading it together
and of leaving it to its children, for each possible first key. Afterwards large tiles are dropped if small ones cost
less than the extra launch, and sharing is dropped if it saves less than that; so the choice never costs more than all
nodes or none.

Source: prefix trees of pages (RadixAttention, Zheng et al. 2024), work lists over them (DeFT, Yao et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SharingCost:
    """Estimated costs of reading shared prefixes; the unit is reading one bfloat16 key.

    See the cost model in the module docstring.
    """

    reread: float = 0.5  # cost of a key that another item also reads: caches serve part of it
    per_item: float = 64.0  # start of an item: load queries and first pages, fill the pipeline
    per_query: float = 2.0  # a float32 state of D + 1 numbers, written and read
    per_launch: float = 3000.0  # about 3 us of reading, for 8 key heads of 128 dimensions


@dataclass(frozen=True, slots=True)
class ForestLevel:
    """The nodes at one depth of the prefix forest; a node is a set of rows that share pages.

    Shapes: rows [sum(sizes)], node after node; sizes, end_page [num_nodes]; parent [num_nodes]: nodes of the level
    above.
    """

    rows: I32
    sizes: I32
    end_page: I32
    parent: I32


@dataclass(frozen=True, slots=True)
class SharedRanges:
    """Ranges of keys that sets of rows read together: the chosen nodes of the prefix forest.

    Nodes on one path from the root are in order of their keys.
    Shapes: rows [sum(sizes)], node after node; sizes, first_key, end_key [num_nodes].
    """

    rows: I32
    sizes: I32
    first_key: I32
    end_key: I32


def build_prefix_forest(tables: I32, full_pages: I32) -> list[ForestLevel]:
    """Find the prefixes that rows share in their first `full_pages` pages; return the levels.

    The list is empty if nothing is shared.
    Shapes: tables [num_rows, max_pages]; full_pages [num_rows], 0 for rows that are left out.
    """
    rows = full_pages.nonzero()[0].astype(np.int32)
    if len(rows) < 2:
        return []
    pages = tables[rows, 0]
    ordered = np.sort(pages)
    if not (ordered[1:] == ordered[:-1]).any():
        return []
    levels: list[ForestLevel] = []
    order, sizes = _group_equal(pages)
    rows, parent = rows[order], np.zeros(len(sizes), np.int32)
    while len(sizes):
        firsts = sizes.cumsum() - sizes
        end = _count_common_pages(tables, rows, full_pages[rows], sizes, firsts)
        levels.append(ForestLevel(rows, sizes, end, parent))
        node = np.repeat(np.arange(len(sizes)), sizes)
        longer = np.flatnonzero(full_pages[rows] > end[node])
        rows, node = rows[longer], node[longer]
        if not len(rows):
            break
        order, sizes = _group_equal((node << 32) + tables[rows, end[node]])
        rows = rows[order]
        parent = node[order[sizes.cumsum() - sizes]].astype(np.int32)
    return levels


def _group_equal(keys: NDArray[np.signedinteger]) -> tuple[NDArray[np.int64], I32]:
    """Return the indices of keys that occur at least twice, grouped by key, and the group sizes."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    bounds = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True])))
    sizes = np.diff(bounds).astype(np.int32)
    several = sizes > 1
    return order[several.repeat(sizes)], sizes[several]


def _count_common_pages(tables: I32, rows: I32, full_pages: I32, sizes: I32, firsts: NDArray[np.signedinteger]) -> I32:
    """Return the number of leading pages that the rows of each node have in common."""
    limit = np.minimum.reduceat(full_pages, firsts)
    width = int(limit.max())
    differs = tables[rows, :width] != tables[rows[firsts].repeat(sizes), :width]
    at = differs.argmax(axis=1)
    alike = np.where(differs[np.arange(len(rows)), at], at, width)
    return np.minimum(np.minimum.reduceat(alike, firsts), limit).astype(np.int32)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Estimates the cost of reading keys together or by each row alone.

    `split`: maximum number of keys of a work item. `heights`: number of rows in small and large tiles. `group`: queries
    per row and key head.
    """

    cost: SharingCost
    split: int
    heights: tuple[int, int]
    group: int

    def unshared_cost(self, num_keys: I32, first_key: I32) -> F64:
        """Return the cost of a row that reads its last `num_keys` keys alone, from `first_key` on."""
        num_items = -(-num_keys // self.split)
        states = np.where((num_items == 1) & (first_key == 0), 0, num_items)
        per_state = self.cost.per_query * self.group
        return np.asarray(self.cost.reread * num_keys + self.cost.per_item * num_items + per_state * states)

    def shared_cost(self, num_keys: I32, num_rows: I32) -> F64:
        """Return the cost of `num_rows` rows that read `num_keys` keys together, in large tiles."""
        num_items, tiles = -(-num_keys // self.split), -(-num_rows // self.heights[1])
        states = self.cost.per_query * self.group * num_rows * num_items
        return np.asarray(tiles * (self.cost.reread * num_keys + self.cost.per_item * num_items) + states)

    def small_tile_cost(self, num_keys: I32, num_rows: I32) -> float:
        """Return the extra cost of small tiles over large ones, for nodes larger than a small tile."""
        small, large = (-(-num_rows // height) for height in self.heights)
        each = self.cost.reread * num_keys + self.cost.per_item * -(-num_keys // self.split)
        return float(((small - large) * each)[num_rows > self.heights[0]].sum())


def choose_ranges(
    levels: list[ForestLevel], context: I32, page_size: int, rule: CostModel | None, *, launched: bool
) -> tuple[SharedRanges, bool]:
    """Choose the nodes to read together; return them, and whether large tiles are used.

    Without a rule: all nodes, in large tiles. `context` [num_rows]: number of keys of each row. `launched`: the step
    uses large tiles anyway.
    """
    if rule is None:
        return _all_ranges(levels, page_size), True
    ranges, saved = _cheapest_ranges(levels, context, page_size, rule)
    launch = 0.0 if launched else rule.cost.per_launch
    smaller = rule.small_tile_cost(ranges.end_key - ranges.first_key, ranges.sizes)
    if saved <= min(smaller, launch):
        nothing = np.zeros(0, np.int32)
        ranges = SharedRanges(nothing, nothing, nothing, nothing)
    return ranges, smaller > launch


def _all_ranges(levels: list[ForestLevel], page_size: int) -> SharedRanges:
    """Choose every node of the prefix forest."""
    chosen = [np.ones(len(level.sizes), bool) for level in levels]
    start_choices = [np.full(len(level.sizes), depth) for depth, level in enumerate(levels)]
    return _select_ranges(levels, _possible_starts(levels, page_size), start_choices, chosen, page_size)


def _cheapest_ranges(
    levels: list[ForestLevel], context: I32, page_size: int, rule: CostModel
) -> tuple[SharedRanges, float]:
    """Choose the nodes whose joint reading reduces the cost; return them and the cost saved.

    `context` [num_rows]: keys of each row.
    """
    begins = _possible_starts(levels, page_size)
    costs, apart = np.zeros((0, 0)), []
    for depth in range(len(levels) - 1, -1, -1):
        below = levels[depth + 1] if depth + 1 < len(levels) else None
        ends = levels[depth].end_page * page_size
        alone = _cost_below(levels[depth], below, np.vstack((begins[depth], ends)), costs, context, rule)
        together = rule.shared_cost(ends - begins[depth], levels[depth].sizes) + alone[-1]
        apart.append(together < alone[:-1])
        costs = np.minimum(together, alone[:-1])
    apart.reverse()
    start_choices, chosen = [np.zeros(len(levels[0].sizes), np.int64)], [apart[0][0]]
    for depth, level in enumerate(levels[1:], 1):
        start_choices.append(np.where(chosen[-1][level.parent], depth, start_choices[-1][level.parent]))
        chosen.append(apart[depth][start_choices[-1], np.arange(len(level.sizes))])
    num_keys = context[levels[0].rows]
    saved = float(rule.unshared_cost(num_keys, np.zeros_like(num_keys)).sum() - costs.sum())
    return _select_ranges(levels, begins, start_choices, chosen, page_size), saved


def _possible_starts(levels: list[ForestLevel], page_size: int) -> list[I32]:
    """Return the possible first keys of each node: 0, or the end of an ancestor.

    Shapes: [depth + 1, num_nodes].
    """
    begins = [np.zeros((1, len(levels[0].sizes)), np.int32)]
    for above, level in pairwise(levels):
        begins.append(np.vstack((begins[-1], above.end_page * page_size))[:, level.parent])
    return begins


def _cost_below(
    level: ForestLevel, below: ForestLevel | None, begins: I32, costs: F64, context: I32, rule: CostModel
) -> F64:
    """Return what the rows of each node cost from `begins` on, if the node is not chosen.

    Rows that are in no child read their keys alone; the others cost what their child costs (`costs`).
    Shapes: begins [n, num_nodes] -> [n, num_nodes]; costs [n, nodes of `below`].
    """
    ends_here = np.ones(len(context), bool)
    if below is not None:
        ends_here[below.rows] = False
    first_key = begins.repeat(level.sizes, axis=1)
    own = np.where(ends_here[level.rows], rule.unshared_cost(context[level.rows] - first_key, first_key), 0.0)
    total: F64 = np.add.reduceat(own, level.sizes.cumsum() - level.sizes, axis=1)
    if below is not None:
        np.add.at(total.T, below.parent, costs.T)
    return total


def _select_ranges(
    levels: list[ForestLevel],
    begins: list[I32],
    start_choices: list[NDArray[np.int64]],
    chosen: list[NDArray[np.bool_]],
    page_size: int,
) -> SharedRanges:
    """Return the chosen nodes; `start_choices` selects one of `begins` as the first key of each node."""
    parts = [
        (
            level.rows[kept.repeat(level.sizes)],
            level.sizes[kept],
            begin[start_choice, np.arange(len(start_choice))][kept],
            level.end_page[kept] * page_size,
        )
        for level, begin, start_choice, kept in zip(levels, begins, start_choices, chosen, strict=True)
    ]
    return SharedRanges(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
