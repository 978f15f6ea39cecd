"""Cut a step's attention into pieces of bounded size: the work list that one kernel launch carries out.

A piece is (some of the step's tokens) x (a range of keys): a row's newest token against 512 of its keys, a tile of a
prompt chunk against the keys before it, or the newest tokens of many rows against the pages they share, which are then
read once for all of them. A token that several pieces see gets a partial state from each; they merge by log-sum-exp, in
order of their keys.

    row 0   keys  [ shared pages ............ | own ......]    items  rows 0, 1, 2 x keys    0 ..  511   states 0 1 2
    row 1         [ the same ................ | own ..]               rows 0, 1, 2 x keys  512 .. 1023   states 3 4 5
    row 2         [ the same ................ | own ........]         row 0        x keys 1024 .. 1090   state  6  ...

The split rule depends on positions alone, not on how many rows there are: SPLIT keys for rows of few tokens, which are
bound by reading keys, and LONG_SPLIT for those of many, which bring queries enough to fill a device. Rows that share
pages are cut where the shared ones end, too: the last bits of their tokens may depend on who shares with them.

This runs once a step while a device waits, so no row costs Python time: tiles (tokens that go together, and their keys)
are arrays, and one pass cuts them all.

Sources: split-KV decoding (Flash-Decoding, 2023), merged states over shared prefixes (FlashInfer cascades, 2024;
Hydragen, Juravsky et al. 2024), work lists over prefix trees (DeFT, Yao et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .prefix_sharing import CostRule, SharedRanges, SharingCost, choose_ranges, prefix_forest
from .types import I32, AttentionWork, HostList, HostWork

Share = Literal["auto", "always", "never"]

SPLIT = 512
LONG_SPLIT = 4096
SMALL_QUERIES = 16  # queries of a tile for rows of few tokens: the least that a matrix unit multiplies
LARGE_QUERIES = 64
PROMPT_QUERIES = 128  # for rows of more tokens than LARGE_QUERIES hold: two groups of warps share each tile of keys
DEFAULT_COST = SharingCost()


def tile_heights(group: int) -> tuple[int, int]:
    """Return how many tokens a small and a large tile hold."""
    return max(1, SMALL_QUERIES // group), max(1, LARGE_QUERIES // group)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tokens that go through the same keys together, to be cut into items.

    Shapes: row, first_key, end_key, num_members, split [N]; members [sum(num_members)], tile after tile. `height` is
    the most members of a tile. The keys first_key .. end_key - 1 of table `row` are cut every `split` keys; `shared`:
    later tiles hold the rest of these tokens' keys.
    """

    row: I32
    first_key: I32
    end_key: I32
    num_members: I32
    split: I32
    members: I32
    height: int
    shared: bool = False

    def __len__(self) -> int:
        """Return N."""
        return len(self.row)


def plan_work(
    tables: I32,
    start: I32,
    num_tokens: I32,
    page_size: int,
    group: int,
    *,
    share: Share = "auto",
    cost: SharingCost = DEFAULT_COST,
) -> AttentionWork:
    """Return the pieces of one step, on the host.

    Shapes: tables [R, max_pages], start, num_tokens [R]; `group` is G. `share`: whether rows of one token read together
    the pages that they have in common: where `cost` says that it pays, always, or never. Which rows share decides where
    a token's keys are cut, and nothing else: its states merge in order of their keys.
    """
    return plan_host(tables, start, num_tokens, page_size, group, share=share, cost=cost).tensors()


def plan_host(
    tables: I32,
    start: I32,
    num_tokens: I32,
    page_size: int,
    group: int,
    *,
    share: Share = "auto",
    cost: SharingCost = DEFAULT_COST,
) -> HostWork:
    """Return the pieces of one step in numpy; the arguments are those of `plan_work`."""
    heights = tile_heights(group)
    ranges, height = None, heights[1]
    if share != "never":
        rule = CostRule(cost, SPLIT, heights, group) if share == "auto" else None
        ranges, height = find_shared(tables, start, num_tokens, page_size, rule, heights)
    prompt_height = max(1, PROMPT_QUERIES // group)
    return cut_step(start, num_tokens, heights, ranges, height, prompt_height=prompt_height)


def find_shared(
    tables: I32, start: I32, num_tokens: I32, page_size: int, rule: CostRule | None, heights: tuple[int, int]
) -> tuple[SharedRanges | None, int]:
    """Return what rows of one token should read together, by `rule` or all they can, and how high its tiles may be."""
    levels = prefix_forest(tables, start // page_size * (num_tokens == 1))
    if not levels:
        return None, heights[1]
    launched = bool(num_tokens.max() > heights[0])
    ranges, use_large = choose_ranges(levels, start + 1, page_size, rule, launched=launched)
    return ranges if len(ranges.sizes) else None, heights[1] if use_large else heights[0]


def cut_step(
    start: I32,
    num_tokens: I32,
    heights: tuple[int, int],
    ranges: SharedRanges | None,
    shared_height: int,
    most_tokens: int | None = None,
    prompt_height: int | None = None,
) -> HostWork:
    """Return the pieces of a step in tiles of two `heights`, without those of rows of more than `most_tokens`.

    `prompt_height`: of the tiles of rows that have more tokens than the larger height, if not that.
    """
    small, large = heights
    offsets = num_tokens.cumsum(dtype=np.int32) - num_tokens
    own = np.zeros_like(start)  # the first key that a row reads for itself
    shared: list[Tiles] = []
    if ranges is not None:
        own[ranges.rows] = ranges.end_key.repeat(ranges.sizes)  # of several levels the last counts
        shared = _shared_tiles(ranges, offsets, small, shared_height)
    if num_tokens.max(initial=0) <= 1:
        tiles = _one_token(start, own, offsets, slice(None) if num_tokens.all() else num_tokens.nonzero()[0], small)
        return _cut([*shared, tiles], tiles.end_key - 1)
    counts = num_tokens if most_tokens is None else num_tokens * (num_tokens <= most_tokens)
    long = np.flatnonzero(counts > large).astype(np.int32)
    many = np.flatnonzero((counts > small) & (counts <= large)).astype(np.int32)
    few = np.flatnonzero((counts > 0) & (counts <= small)).astype(np.int32)
    parts = [
        _row_tiles(long, start, own, counts, offsets, prompt_height or large, LONG_SPLIT),
        _row_tiles(many, start, own, counts, offsets, large, SPLIT),
        *shared,
        _row_tiles(few, start, own, counts, offsets, small, SPLIT),
    ]
    return _cut(parts, start.repeat(num_tokens) + _within(num_tokens))


def _one_token(start: I32, own: I32, offsets: I32, rows: slice | NDArray[np.int64], height: int) -> Tiles:
    """Return a tile for each of `rows`, all of one token."""
    row = np.arange(len(start), dtype=np.int32)[rows]
    ones = np.ones(len(row), np.int32)
    return Tiles(row, own[rows], start[rows] + 1, ones, ones * SPLIT, offsets[rows], height)


def _shared_tiles(ranges: SharedRanges, offsets: I32, small: int, large: int) -> list[Tiles]:
    """Return the tiles of rows that share pages, as even as they come, those of many rows first."""
    many = ranges.sizes > small
    firsts = ranges.sizes.cumsum(dtype=np.int32) - ranges.sizes
    tiles = []
    for node, height in ((many.nonzero()[0], large), ((~many).nonzero()[0], small)):
        if not len(node):
            continue
        sizes = ranges.sizes[node]
        num_tiles = -(-sizes // height)
        number, at = _within(num_tiles), node.repeat(num_tiles)
        size, count = sizes.repeat(num_tiles), num_tiles.repeat(num_tiles)
        begin, end = number * size // count, (number + 1) * size // count
        first = firsts[at] + begin
        rows = ranges.rows[first.repeat(end - begin) + _within(end - begin)]
        split = np.full(len(at), SPLIT, np.int32)
        first_key, end_key = ranges.first_key[at], ranges.end_key[at]
        tiles.append(
            Tiles(ranges.rows[first], first_key, end_key, end - begin, split, offsets[rows], height, shared=True)
        )
    return tiles


def _row_tiles(rows: I32, start: I32, own: I32, num_tokens: I32, offsets: I32, height: int, split: int) -> Tiles:
    """Return the tiles, each of at most `height` tokens, of each of `rows`."""
    num_tiles = -(-num_tokens[rows] // height)
    row = rows.repeat(num_tiles)
    first = _within(num_tiles) * height
    num = np.minimum(num_tokens[row] - first, height)
    members = np.repeat(offsets[row] + first, num) + _within(num)
    return Tiles(row, own[row], start[row] + first + num, num, np.full_like(row, split), members, height)


def _within(counts: I32) -> I32:
    """Return 0 .. count - 1 for each count, one after the other."""
    ends = counts.cumsum(dtype=np.int32)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - counts, counts)


def _join(parts: list[Tiles]) -> Tiles:
    """Return all tiles behind one another."""
    if len(parts) == 1:
        return parts[0]
    return Tiles(
        np.concatenate([part.row for part in parts]),
        np.concatenate([part.first_key for part in parts]),
        np.concatenate([part.end_key for part in parts]),
        np.concatenate([part.num_members for part in parts]),
        np.concatenate([part.split for part in parts]),
        np.concatenate([part.members for part in parts]),
        height=0,
    )


def _cut(parts: list[Tiles], positions: I32) -> HostWork:
    """Cut tiles into items and say which states make up a token. A token's tiles come in order of their keys."""
    tiles = _join(parts)
    num, split = tiles.num_members, tiles.split
    pieces = (tiles.end_key - tiles.first_key + (split - 1)) // split
    alone = (pieces == 1) & (tiles.first_key == 0)
    if len(parts) > 1:
        alone &= np.repeat([not part.shared for part in parts], [len(part) for part in parts])
    num_states = pieces * num
    num_states[alone] = 0
    first_state = num_states.cumsum(dtype=np.int32) - num_states
    item_ends, member_ends = pieces.cumsum(dtype=np.int32), num.cumsum(dtype=np.int32)
    first_item, first_member = item_ends - pieces, member_ends - num
    # each column is linear in the item's number, so that an item is its tile's line and a multiplication
    lines = np.empty((len(num), 6), np.int32)
    lines[:, 0] = tiles.row
    lines[:, 1] = tiles.first_key - split * first_item
    lines[:, 2] = tiles.end_key
    lines[:, 3] = first_member
    lines[:, 4] = num
    lines[:, 5] = np.where(alone, -1, first_state) - num * first_item
    items = lines.repeat(pieces, axis=0)
    number = np.arange(len(items), dtype=np.int32)
    split = split.repeat(pieces)
    items[:, 1] += number * split
    items[:, 2] = np.minimum(items[:, 2], items[:, 1] + split)
    items[:, 5] += number * items[:, 4]
    lists = _lists(parts, items, item_ends, tiles.members, member_ends)
    return HostWork(lists, positions, *_merges(tiles, pieces, alone, first_state, len(parts) > 1))


def _lists(parts: list[Tiles], items: I32, item_ends: I32, members: I32, member_ends: I32) -> tuple[HostList, ...]:
    """Return the items in a list for each tile height; parts of equal height are neighbours."""
    if len(parts) == 1:
        return (HostList(items, members, parts[0].height),) if len(items) else ()
    lists = []
    tile, item, member = 0, 0, 0
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        tile += len(part)
        if (after is not None and after.height == part.height) or not tile:
            continue
        if item_ends[tile - 1] > item:
            chosen = items[item : item_ends[tile - 1]]
            chosen[:, 3] -= member
            lists.append(HostList(chosen, members[member : member_ends[tile - 1]], part.height))
        item, member = int(item_ends[tile - 1]), int(member_ends[tile - 1])
    return tuple(lists)


def _merges(tiles: Tiles, pieces: I32, alone: NDArray[np.bool_], first_state: I32, mixed: bool) -> tuple[I32, I32, I32]:
    """Return merge_tokens, merge_offsets and merge_states. `mixed`: tokens may be out of order, or in several tiles."""
    tokens, num = tiles.members, tiles.num_members
    count = np.where(alone, 0, pieces)
    if not mixed and len(tokens) == len(num):  # decode: states are numbered token by token
        chosen = count.nonzero()[0]
        ends = np.cumsum(count[chosen], dtype=np.int32)
        offsets = np.zeros(len(ends) + 1, np.int32)
        offsets[1:] = ends
        return tokens[chosen], offsets, np.arange(offsets[-1], dtype=np.int32)
    count, state, step = (x.repeat(num) for x in (count, first_state, num))
    state += _within(num)
    chosen = count.nonzero()[0]
    chosen = chosen[np.argsort(tokens[chosen], kind="stable")]
    tokens, state, step, count = (x[chosen] for x in (tokens, state, step, count))
    ends = count.cumsum(dtype=np.int32)
    states = np.repeat(state - step * (ends - count), count)
    states += np.arange(len(states), dtype=np.int32) * step.repeat(count)
    last = np.flatnonzero(np.append(tokens[1:] != tokens[:-1], len(tokens) > 0))
    return tokens[last], np.append(np.int32(0), ends[last]), states
