"""Which rows' page tables begin alike, and which of those prefixes are worth reading once for all of them.

Rows that share pages form a forest. A node is a set of rows and the stretch of pages that they, and no larger set, have
in common: a system prompt, conversations after it and the branches of an n-best are three levels of one tree.

    node 0   rows 0 1 2 3   pages 0 .. 4        level 0
    node 1   rows 0 1       pages 5 .. 9        level 1, parent node 0
    node 2   rows 2 3       pages 5 .. 6        level 1, parent node 0

Nodes are found level by level, all of a level at once: rows are compared with the first row of their node, part where
pages differ, and gather again by the page that comes next. Only pages below every member's `start` count: those are
full, and nobody writes them.

Cost rule. A node left out is read by its children, each for itself, from where the last chosen node above it ended.
Cost is counted in keys read from memory:

    item     reread x its keys + per_item    another reader of the same pages finds many of them in a cache
    state    per_query x G                   for each member of an item, unless its only piece: written, then merged
    launch   per_launch                      if large tiles are used for sharing alone

The cheapest choice is found from the leaves up: a node costs the lesser of being read apart and being left to its
children, for each place where its keys may begin. Large tiles are then given up where small ones cost less than their
launch, and sharing is where it saves less than that, so that the choice never costs more than all nodes or none.

Sources: prefix trees of pages (RadixAttention, Zheng et al. 2024), work lists over them (DeFT, Yao et al. 2024).
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
    """What pieces cost beside the keys they read, in keys (of bfloat16 pages)."""

    reread: float = 0.5  # of a key that another item reads too: caches serve part of it
    per_item: float = 64.0  # starting an item: its queries, its first pages, a pipeline that fills
    per_query: float = 2.0  # a float32 state of D + 1 numbers written and read, beside a key and value of D each
    per_launch: float = 3000.0  # about 3 us of reading for 8 key heads of 128 dimensions


@dataclass(frozen=True, slots=True)
class Level:
    """The nodes at one depth of the forest, C of them.

    Shapes: rows [sum(sizes)], node after node; sizes, end_page [C]; parent [C]: nodes of the level above.
    """

    rows: I32
    sizes: I32
    end_page: I32
    parent: I32


@dataclass(frozen=True, slots=True)
class SharedRanges:
    """The chosen nodes, those of one path in order of their keys.

    Shapes: rows [sum(sizes)], node after node; sizes, first_key, end_key [N].
    """

    rows: I32
    sizes: I32
    first_key: I32
    end_key: I32


def prefix_forest(tables: I32, full_pages: I32) -> list[Level]:
    """Return the levels of the forest over the first `full_pages` entries of each table; no level where none is shared.

    Shapes: tables [R, max_pages]; full_pages [R], 0 for rows that take no part.
    """
    rows = full_pages.nonzero()[0].astype(np.int32)
    if len(rows) < 2:
        return []
    pages = tables[rows, 0]
    ordered = np.sort(pages)
    if not (ordered[1:] == ordered[:-1]).any():
        return []
    levels: list[Level] = []
    order, sizes = _alike(pages)
    rows, parent = rows[order], np.zeros(len(sizes), np.int32)
    while len(sizes):
        firsts = sizes.cumsum() - sizes
        end = _common_pages(tables, rows, full_pages[rows], sizes, firsts)
        levels.append(Level(rows, sizes, end, parent))
        node = np.repeat(np.arange(len(sizes)), sizes)
        longer = np.flatnonzero(full_pages[rows] > end[node])
        rows, node = rows[longer], node[longer]
        if not len(rows):
            break
        order, sizes = _alike((node << 32) + tables[rows, end[node]])
        rows = rows[order]
        parent = node[order[sizes.cumsum() - sizes]].astype(np.int32)
    return levels


def _alike(keys: NDArray[np.signedinteger]) -> tuple[NDArray[np.int64], I32]:
    """Return the places of keys that occur at least twice, equal ones side by side in order, and how many of each."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    bounds = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1], [True])))
    sizes = np.diff(bounds).astype(np.int32)
    several = sizes > 1
    return order[several.repeat(sizes)], sizes[several]


def _common_pages(tables: I32, rows: I32, full_pages: I32, sizes: I32, firsts: NDArray[np.signedinteger]) -> I32:
    """Return how many leading pages the rows of each node have in common."""
    limit = np.minimum.reduceat(full_pages, firsts)
    width = int(limit.max())
    differs = tables[rows, :width] != tables[rows[firsts].repeat(sizes), :width]
    at = differs.argmax(axis=1)
    alike = np.where(differs[np.arange(len(rows)), at], at, width)
    return np.minimum(np.minimum.reduceat(alike, firsts), limit).astype(np.int32)


@dataclass(frozen=True, slots=True)
class CostRule:
    """Counts the cost of pieces of at most `split` keys.

    `heights`: the rows that small and large tiles hold, of `group` queries each.
    """

    cost: SharingCost
    split: int
    heights: tuple[int, int]
    group: int

    def own(self, num_keys: I32, first_key: I32) -> F64:
        """Return what a row costs that reads its last `num_keys` keys alone, from `first_key` on."""
        pieces = -(-num_keys // self.split)
        states = np.where((pieces == 1) & (first_key == 0), 0, pieces)
        per_state = self.cost.per_query * self.group
        return np.asarray(self.cost.reread * num_keys + self.cost.per_item * pieces + per_state * states)

    def shared(self, num_keys: I32, num_rows: I32) -> F64:
        """Return what `num_rows` rows cost that read `num_keys` keys together, in large tiles."""
        pieces, tiles = -(-num_keys // self.split), -(-num_rows // self.heights[1])
        states = self.cost.per_query * self.group * num_rows * pieces
        return np.asarray(tiles * (self.cost.reread * num_keys + self.cost.per_item * pieces) + states)

    def smaller(self, num_keys: I32, num_rows: I32) -> float:
        """Return what small tiles for all would cost more than large ones where a small one is not enough."""
        small, large = (-(-num_rows // height) for height in self.heights)
        each = self.cost.reread * num_keys + self.cost.per_item * -(-num_keys // self.split)
        return float(((small - large) * each)[num_rows > self.heights[0]].sum())


def choose_ranges(
    levels: list[Level], context: I32, page_size: int, rule: CostRule | None, *, launched: bool
) -> tuple[SharedRanges, bool]:
    """Return the nodes to read apart, and whether large tiles are used; without a rule all nodes, in large tiles.

    `context` [R]: the keys of each row. `launched`: the step uses large tiles anyway.
    """
    if rule is None:
        return _all_ranges(levels, page_size), True
    ranges, saved = _cheapest_ranges(levels, context, page_size, rule)
    launch = 0.0 if launched else rule.cost.per_launch
    smaller = rule.smaller(ranges.end_key - ranges.first_key, ranges.sizes)
    if saved <= min(smaller, launch):
        nothing = np.zeros(0, np.int32)
        ranges = SharedRanges(nothing, nothing, nothing, nothing)
    return ranges, smaller > launch


def _all_ranges(levels: list[Level], page_size: int) -> SharedRanges:
    """Return every node of the forest."""
    chosen = [np.ones(len(level.sizes), bool) for level in levels]
    places = [np.full(len(level.sizes), depth) for depth, level in enumerate(levels)]
    return _ranges(levels, _begins(levels, page_size), places, chosen, page_size)


def _cheapest_ranges(levels: list[Level], context: I32, page_size: int, rule: CostRule) -> tuple[SharedRanges, float]:
    """Return the nodes that are worth reading apart, and what that saves. `context` [R]: the keys of each row."""
    begins = _begins(levels, page_size)
    costs, apart = np.zeros((0, 0)), []
    for depth in range(len(levels) - 1, -1, -1):
        below = levels[depth + 1] if depth + 1 < len(levels) else None
        ends = levels[depth].end_page * page_size
        alone = _without(levels[depth], below, np.vstack((begins[depth], ends)), costs, context, rule)
        together = rule.shared(ends - begins[depth], levels[depth].sizes) + alone[-1]
        apart.append(together < alone[:-1])
        costs = np.minimum(together, alone[:-1])
    apart.reverse()
    places, chosen = [np.zeros(len(levels[0].sizes), np.int64)], [apart[0][0]]
    for depth, level in enumerate(levels[1:], 1):
        places.append(np.where(chosen[-1][level.parent], depth, places[-1][level.parent]))
        chosen.append(apart[depth][places[-1], np.arange(len(level.sizes))])
    num_keys = context[levels[0].rows]
    saved = float(rule.own(num_keys, np.zeros_like(num_keys)).sum() - costs.sum())
    return _ranges(levels, begins, places, chosen, page_size), saved


def _begins(levels: list[Level], page_size: int) -> list[I32]:
    """Return where the keys of each node may begin: 0, or the end of one of the nodes above it. [depth + 1, C]."""
    begins = [np.zeros((1, len(levels[0].sizes)), np.int32)]
    for above, level in pairwise(levels):
        begins.append(np.vstack((begins[-1], above.end_page * page_size))[:, level.parent])
    return begins


def _without(level: Level, below: Level | None, begins: I32, costs: F64, context: I32, rule: CostRule) -> F64:
    """Return the cost of what lies below each node, from each of `begins` on. Shapes: begins [n, C] -> [n, C].

    `costs` [n, C of `below`] are those of its children.
    """
    ends_here = np.ones(len(context), bool)
    if below is not None:
        ends_here[below.rows] = False
    first_key = begins.repeat(level.sizes, axis=1)
    own = np.where(ends_here[level.rows], rule.own(context[level.rows] - first_key, first_key), 0.0)
    total: F64 = np.add.reduceat(own, level.sizes.cumsum() - level.sizes, axis=1)
    if below is not None:
        np.add.at(total.T, below.parent, costs.T)
    return total


def _ranges(
    levels: list[Level],
    begins: list[I32],
    places: list[NDArray[np.int64]],
    chosen: list[NDArray[np.bool_]],
    page_size: int,
) -> SharedRanges:
    """Return the chosen nodes, each from the one of its `begins` that its place names."""
    parts = [
        (
            level.rows[kept.repeat(level.sizes)],
            level.sizes[kept],
            begin[place, np.arange(len(place))][kept],
            level.end_page[kept] * page_size,
        )
        for level, begin, place, kept in zip(levels, begins, places, chosen, strict=True)
    ]
    return SharedRanges(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
