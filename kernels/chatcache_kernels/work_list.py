"""Plan a step's attention: split it into items of bounded size for one kernel launch.

An item is some of the step's tokens times a range of keys: the newest token of a row against 512 of its keys, a tile of
a prefill chunk against the keys before it, or the newest tokens of many rows against the pages they share, which are
then read once for all of them. A token that is a member of several items gets a partial state from each; they are
merged by log-sum-exp, in order of their keys.

    row 0   keys  [ shared pages ............ | own ......]    items  rows 0, 1, 2 x keys    0 ..  511   states 0 1 2
    row 1         [ shared pages ............ | own ..]               rows 0, 1, 2 x keys  512 .. 1023   states 3 4 5
    row 2         [ shared pages ............ | own ........]         row 0        x keys 1024 .. 1090   state  6  ...

The split depends on the row alone, not on the number of rows: SPLIT_TOKENS keys for rows of few new tokens, which are
limited by memory bandwidth, and more for rows of many, which are split only as far as their tiles do not fill a device.
Rows that share pages are also split where the shared pages end, so the last bits of their results may depend on which
rows share with them.

The plan is made once a step while a device waits, so it costs no Python time per row: tiles (tokens that attend to the
same keys together) are arrays, and one pass splits all of them.

Source: split-KV decoding (Flash-Decoding, 2023), merged states over shared prefixes (FlashInfer cascades, 2024;
Hydragen, Juravsky et al. 2024), work lists over prefix trees (DeFT, Yao et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .prefix_sharing import CostModel, SharedRanges, SharingCost, build_prefix_forest, choose_ranges
from .types import I32, AttentionWork, HostAttentionWork, HostWorkList

SharingMode = Literal["auto", "always", "never"]

SPLIT_TOKENS = 512
MIN_PREFILL_ITEMS = 32  # of a row with more new tokens than a large tile; each runs once for every key head
SMALL_TILE_QUERIES = 16  # rows of few tokens: the smallest operand of a matrix unit
LARGE_TILE_QUERIES = 64
PREFILL_TILE_QUERIES = 128  # rows of more tokens than a large tile holds: two warp groups share keys
DEFAULT_COST = SharingCost()


def tokens_per_tile(group: int) -> tuple[int, int]:
    """Return the number of tokens in a small and in a large tile, for a GQA group size."""
    return max(1, SMALL_TILE_QUERIES // group), max(1, LARGE_TILE_QUERIES // group)


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Tiles of tokens that attend to the same keys together; each is split into items.

    Shapes: row, first_key, end_key, num_members, split [num_tiles]; members [sum(num_members)], tile after tile.
    `height`: maximum number of members of a tile. Keys first_key .. end_key - 1 of table `row` are split every `split`
    keys. `shared`: later tiles hold the remaining keys of these tokens.
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
        """Return the number of tiles."""
        return len(self.row)


def plan_work(
    tables: I32,
    start: I32,
    num_tokens: I32,
    page_size: int,
    group: int,
    *,
    share: SharingMode = "auto",
    cost: SharingCost = DEFAULT_COST,
) -> AttentionWork:
    """Plan the attention of one step. The result is on the CPU.

    Shapes: tables [num_rows, max_pages], start, num_tokens [num_rows] int32; group = num_heads / num_kv_heads. share:
    whether rows of one new token read the pages that they have in common together: "auto" where `cost` predicts a gain,
    "always", or "never". Sharing changes only where a token's keys are split; its states still merge in key order.
    """
    return plan_work_arrays(tables, start, num_tokens, page_size, group, share=share, cost=cost).to_tensors()


def plan_work_arrays(
    tables: I32,
    start: I32,
    num_tokens: I32,
    page_size: int,
    group: int,
    *,
    share: SharingMode = "auto",
    cost: SharingCost = DEFAULT_COST,
) -> HostAttentionWork:
    """Plan the attention of one step as numpy arrays. Arguments as in `plan_work`."""
    heights = tokens_per_tile(group)
    ranges, height = None, heights[1]
    if share != "never":
        rule = CostModel(cost, SPLIT_TOKENS, heights, group) if share == "auto" else None
        ranges, height = find_shared_prefixes(tables, start, num_tokens, page_size, rule, heights)
    prefill_height = max(1, PREFILL_TILE_QUERIES // group)
    return build_work_items(start, num_tokens, heights, ranges, height, prefill_height=prefill_height)


def find_shared_prefixes(
    tables: I32, start: I32, num_tokens: I32, page_size: int, rule: CostModel | None, heights: tuple[int, int]
) -> tuple[SharedRanges | None, int]:
    """Choose the prefixes that decode rows read together, and the maximum rows of their tiles.

    Decode rows have one new token. With a `rule`, those prefixes that reduce its cost; without, all shared prefixes.
    None if there are none.
    """
    levels = build_prefix_forest(tables, start // page_size * (num_tokens == 1))
    if not levels:
        return None, heights[1]
    launched = bool(num_tokens.max() > heights[0])
    ranges, use_large = choose_ranges(levels, start + 1, page_size, rule, launched=launched)
    return ranges if len(ranges.sizes) else None, heights[1] if use_large else heights[0]


def build_work_items(
    start: I32,
    num_tokens: I32,
    heights: tuple[int, int],
    ranges: SharedRanges | None,
    shared_height: int,
    max_row_tokens: int | None = None,
    prefill_height: int | None = None,
) -> HostAttentionWork:
    """Split the attention of a step into work items, in tiles of two `heights` (small, large).

    `ranges`: the shared prefixes, in tiles of `shared_height` rows. Rows of more than `max_row_tokens` new tokens are
    left out. `prefill_height`: tile height of rows that have more tokens than the large height; default: the large
    height.
    """
    small, large = heights
    offsets = num_tokens.cumsum(dtype=np.int32) - num_tokens
    own = np.zeros_like(start)  # first key that a row does not share
    shared: list[QueryTiles] = []
    if ranges is not None:
        own[ranges.rows] = ranges.end_key.repeat(ranges.sizes)  # with several levels the deepest wins
        shared = _shared_tiles(ranges, offsets, small, shared_height)
    if num_tokens.max(initial=0) <= 1:
        tiles = _decode_tiles(start, own, offsets, slice(None) if num_tokens.all() else num_tokens.nonzero()[0], small)
        return _split_tiles([*shared, tiles], tiles.end_key - 1)
    counts = num_tokens if max_row_tokens is None else num_tokens * (num_tokens <= max_row_tokens)
    long = np.flatnonzero(counts > large).astype(np.int32)
    many = np.flatnonzero((counts > small) & (counts <= large)).astype(np.int32)
    few = np.flatnonzero((counts > 0) & (counts <= small)).astype(np.int32)
    parts = [
        _row_tiles(long, start, own, counts, offsets, prefill_height or large, MIN_PREFILL_ITEMS),
        _row_tiles(many, start, own, counts, offsets, large),
        *shared,
        _row_tiles(few, start, own, counts, offsets, small),
    ]
    return _split_tiles(parts, start.repeat(num_tokens) + _index_within(num_tokens))


def _decode_tiles(start: I32, own: I32, offsets: I32, rows: slice | NDArray[np.int64], height: int) -> QueryTiles:
    """Return one tile for each of `rows`, which have one new token each.

    `own`: first key that each row does not share.
    """
    row = np.arange(len(start), dtype=np.int32)[rows]
    ones = np.ones(len(row), np.int32)
    return QueryTiles(row, own[rows], start[rows] + 1, ones, ones * SPLIT_TOKENS, offsets[rows], height)


def _shared_tiles(ranges: SharedRanges, offsets: I32, small: int, large: int) -> list[QueryTiles]:
    """Return the tiles of rows that read shared pages together; nodes of many rows first.

    The tiles of a node are of nearly equal size.
    """
    many = ranges.sizes > small
    firsts = ranges.sizes.cumsum(dtype=np.int32) - ranges.sizes
    tiles = []
    for node, height in ((many.nonzero()[0], large), ((~many).nonzero()[0], small)):
        if not len(node):
            continue
        sizes = ranges.sizes[node]
        num_tiles = -(-sizes // height)
        number, at = _index_within(num_tiles), node.repeat(num_tiles)
        size, count = sizes.repeat(num_tiles), num_tiles.repeat(num_tiles)
        begin, end = number * size // count, (number + 1) * size // count
        first = firsts[at] + begin
        rows = ranges.rows[first.repeat(end - begin) + _index_within(end - begin)]
        split = np.full(len(at), SPLIT_TOKENS, np.int32)
        first_key, end_key = ranges.first_key[at], ranges.end_key[at]
        tiles.append(
            QueryTiles(ranges.rows[first], first_key, end_key, end - begin, split, offsets[rows], height, shared=True)
        )
    return tiles


def _row_tiles(
    rows: I32, start: I32, own: I32, num_tokens: I32, offsets: I32, height: int, min_items: int | None = None
) -> QueryTiles:
    """Divide the new tokens of each of `rows` into tiles of at most `height` tokens.

    `own`: first key that each row does not share. Tiles are split every SPLIT_TOKENS keys or, with `min_items`, into
    the fewest equal parts that give the row so many items.
    """
    num_tiles = -(-num_tokens[rows] // height)
    split = np.full_like(rows, SPLIT_TOKENS)
    if min_items is not None:
        num_parts = -(-min_items // num_tiles)
        num_keys = (start + num_tokens - own)[rows]
        split *= -(-num_keys // (num_parts * SPLIT_TOKENS))
    row = rows.repeat(num_tiles)
    first = _index_within(num_tiles) * height
    num = np.minimum(num_tokens[row] - first, height)
    members = np.repeat(offsets[row] + first, num) + _index_within(num)
    return QueryTiles(row, own[row], start[row] + first + num, num, split.repeat(num_tiles), members, height)


def _index_within(counts: I32) -> I32:
    """Return 0 .. count - 1 for each count, concatenated."""
    ends = counts.cumsum(dtype=np.int32)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - counts, counts)


def _concatenate(parts: list[QueryTiles]) -> QueryTiles:
    """Concatenate tiles."""
    if len(parts) == 1:
        return parts[0]
    return QueryTiles(
        np.concatenate([part.row for part in parts]),
        np.concatenate([part.first_key for part in parts]),
        np.concatenate([part.end_key for part in parts]),
        np.concatenate([part.num_members for part in parts]),
        np.concatenate([part.split for part in parts]),
        np.concatenate([part.members for part in parts]),
        height=0,
    )


def _split_tiles(parts: list[QueryTiles], positions: I32) -> HostAttentionWork:
    """Split tiles into work items and list the partial states of each token.

    Tiles of a token must come in order of their keys.
    """
    tiles = _concatenate(parts)
    num, split = tiles.num_members, tiles.split
    num_items = (tiles.end_key - tiles.first_key + (split - 1)) // split
    alone = (num_items == 1) & (tiles.first_key == 0)
    if len(parts) > 1:
        alone &= np.repeat([not part.shared for part in parts], [len(part) for part in parts])
    num_states = num_items * num
    num_states[alone] = 0
    first_state = num_states.cumsum(dtype=np.int32) - num_states
    item_ends, member_ends = num_items.cumsum(dtype=np.int32), num.cumsum(dtype=np.int32)
    first_item, first_member = item_ends - num_items, member_ends - num
    # every column is linear in the item number: an item is its tile's line plus a multiple
    lines = np.empty((len(num), 6), np.int32)
    lines[:, 0] = tiles.row
    lines[:, 1] = tiles.first_key - split * first_item
    lines[:, 2] = tiles.end_key
    lines[:, 3] = first_member
    lines[:, 4] = num
    lines[:, 5] = np.where(alone, -1, first_state) - num * first_item
    items = lines.repeat(num_items, axis=0)
    number = np.arange(len(items), dtype=np.int32)
    split = split.repeat(num_items)
    items[:, 1] += number * split
    items[:, 2] = np.minimum(items[:, 2], items[:, 1] + split)
    items[:, 5] += number * items[:, 4]
    lists = _group_by_height(parts, items, item_ends, tiles.members, member_ends)
    return HostAttentionWork(lists, positions, *_plan_merges(tiles, num_items, alone, first_state, len(parts) > 1))


def _group_by_height(
    parts: list[QueryTiles], items: I32, item_ends: I32, members: I32, member_ends: I32
) -> tuple[HostWorkList, ...]:
    """Return one list of items per tile height. Parts of equal height must be adjacent."""
    if len(parts) == 1:
        return (HostWorkList(items, members, parts[0].height),) if len(items) else ()
    lists = []
    tile, item, member = 0, 0, 0
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        tile += len(part)
        if (after is not None and after.height == part.height) or not tile:
            continue
        if item_ends[tile - 1] > item:
            chosen = items[item : item_ends[tile - 1]]
            chosen[:, 3] -= member
            lists.append(HostWorkList(chosen, members[member : member_ends[tile - 1]], part.height))
        item, member = int(item_ends[tile - 1]), int(member_ends[tile - 1])
    return tuple(lists)


def _plan_merges(
    tiles: QueryTiles, num_items: I32, alone: NDArray[np.bool_], first_state: I32, mixed: bool
) -> tuple[I32, I32, I32]:
    """List the partial states of each token: return merge_tokens, merge_offsets, merge_states.

    See `AttentionWork`. `alone`: tiles whose results are final. `mixed`: tokens may be out of order, or in several
    tiles.
    """
    tokens, num = tiles.members, tiles.num_members
    count = np.where(alone, 0, num_items)
    if not mixed and len(tokens) == len(num):  # decode: states are numbered in token order
        chosen = count.nonzero()[0]
        ends = np.cumsum(count[chosen], dtype=np.int32)
        offsets = np.zeros(len(ends) + 1, np.int32)
        offsets[1:] = ends
        return tokens[chosen], offsets, np.arange(offsets[-1], dtype=np.int32)
    count, state, step = (x.repeat(num) for x in (count, first_state, num))
    state += _index_within(num)
    chosen = count.nonzero()[0]
    chosen = chosen[np.argsort(tokens[chosen], kind="stable")]
    tokens, state, step, count = (x[chosen] for x in (tokens, state, step, count))
    ends = count.cumsum(dtype=np.int32)
    states = np.repeat(state - step * (ends - count), count)
    states += np.arange(len(states), dtype=np.int32) * step.repeat(count)
    last = np.flatnonzero(np.append(tokens[1:] != tokens[:-1], len(tokens) > 0))
    return tokens[last], np.append(np.int32(0), ends[last]), states
