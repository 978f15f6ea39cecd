"""Cut a step's attention into pieces of bounded size: the work list that one kernel launch carries out.

A piece is (some of the step's tokens) x (a range of keys): a row's newest token against 512 of its keys, a tile of a
prompt chunk against all keys before it, or the newest tokens of many rows against the pages they share, which are then
read once for all of them. Pieces of one token leave partial states that are merged by log-sum-exp, in order of their
keys.

    row 0   keys  [ shared pages ............ | own ......]    items  rows 0, 1, 2 x keys    0 ..  511   states 0 1 2
    row 1         [ the same ................ | own ..]               rows 0, 1, 2 x keys  512 .. 1023   states 3 4 5
    row 2         [ the same ................ | own ........]         row 0        x keys 1024 .. 1090   state  6  ...

The split rule depends on positions alone, not on how many rows there are: SPLIT keys for rows of few tokens, which are
bound by reading keys, and LONG_SPLIT for those of many, which bring queries enough to fill a device.

Sources: split-KV decoding (Flash-Decoding, 2023), merged states over shared prefixes (FlashInfer cascades, 2024;
Hydragen, Juravsky et al. 2024), work lists over prefix trees (DeFT, Yao et al. 2024).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .types import AttentionWork, WorkList

I32 = NDArray[np.int32]

SPLIT = 512
LONG_SPLIT = 4096
SMALL_QUERIES = 16  # queries of a tile for rows of few tokens: the least that a matrix unit multiplies
LARGE_QUERIES = 64


def plan_work(tables: I32, start: I32, num_tokens: I32, page_size: int, group: int) -> AttentionWork:
    """Return the pieces of one step, on the host.

    Shapes: tables [R, max_pages], start, num_tokens [R]; `group` is G.
    """
    counts = num_tokens.astype(np.int64)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    row_of = np.repeat(np.arange(len(counts)), counts)
    positions = (np.arange(offsets[-1]) - offsets[row_of] + start[row_of]).astype(np.int32)
    small, large = max(1, SMALL_QUERIES // group), max(1, LARGE_QUERIES // group)
    few = counts <= large
    lists, states = [], []  # states: (token, first key, state)
    num_states = 0
    for rows, height, split in (
        (np.flatnonzero(few & (counts > 0) & (counts <= small)), small, SPLIT),
        (np.flatnonzero(few & (counts > small)), large, SPLIT),
        (np.flatnonzero(~few), large, LONG_SPLIT),
    ):
        items: list[tuple[int, ...]] = []
        members: list[int] = []
        for row in rows.tolist():
            for first in range(0, int(counts[row]), height):
                tokens = range(int(offsets[row]) + first, int(offsets[row]) + min(first + height, int(counts[row])))
                end = int(start[row]) + first + len(tokens)
                cuts = range(0, end, split)
                for key in cuts:
                    state = -1
                    if len(cuts) > 1:
                        state, num_states = num_states, num_states + len(tokens)
                        states += [(token, key, state + i) for i, token in enumerate(tokens)]
                    items.append((row, key, min(key + split, end), len(members), len(tokens), state))
                    members += tokens
        if items:
            lists.append((items, members, height))
    states.sort()
    tokens_of = np.array([token for token, _, _ in states], np.int32)
    merge_tokens, firsts = np.unique(tokens_of, return_index=True)
    return AttentionWork(
        lists=tuple(
            WorkList(_int32(items).view(-1, 6), _int32(members), _int32([len(items)]), height)
            for items, members, height in lists
        ),
        positions=torch.from_numpy(positions),
        merge_tokens=_int32(merge_tokens),
        merge_offsets=_int32([*firsts.tolist(), len(states)]),
        merge_states=_int32([state for _, _, state in states]),
        num_merges=_int32([len(merge_tokens)]),
        num_states=num_states,
    )


def _int32(values: object) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))
