"""Room for a step's work list in buffers that stay where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from chatcache_kernels.types import AttentionWork, WorkList
from chatcache_kernels.work import LARGE_QUERIES, SMALL_QUERIES, SPLIT
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.plain import Parts

SHARED_PIECES = 16  # pieces of shared keys that every row of a full batch may take part in


@dataclass(frozen=True, slots=True)
class WorkRoom:
    """How much of a work list of `size` rows of one token fits.

    `heights`: of the tiles of each list, small ones first. Only rows that share pages need the others, so a step
    launches the first `num_lists` of them.
    """

    size: int
    heights: tuple[int, ...]
    num_items: int
    num_states: int

    @classmethod
    def of(cls, size: int, group: int, max_model_len: int, num_tokens: int) -> WorkRoom:
        """Return room for `size` rows over a store of `num_tokens` tokens; a step that needs more runs uncaptured."""
        heights = tuple(dict.fromkeys(max(1, queries // group) for queries in (SMALL_QUERIES, LARGE_QUERIES)))
        pieces = -(-max_model_len // SPLIT)
        own = -(-num_tokens // SPLIT)
        return cls(
            size=size,
            heights=heights if size > 1 else heights[:1],
            num_items=size + min(size * pieces, 2 * own),
            num_states=min(size * pieces, 2 * own + size * SHARED_PIECES),
        )

    @property
    def num_members(self) -> int:
        """Return how many members all items of a list may have: a state each, or the only piece of a row."""
        return self.num_states + self.size

    def parts(self) -> Parts:
        """Return the arrays of a work list by name."""
        parts: Parts = {"num_merges": (np.int32, (1,)), "num_items": (np.int32, (len(self.heights), 4))}
        parts |= {"merge_tokens": (np.int32, (self.size,)), "merge_offsets": (np.int32, (self.size + 1,))}
        for number in range(len(self.heights)):
            parts[f"items_{number}"] = (np.int32, (self.num_items, 6))
            parts[f"members_{number}"] = (np.int32, (self.num_members,))
        parts["merge_states"] = (np.int32, (self.num_states,))
        return parts

    def fill(self, given: Mapping[str, NDArray[Any]], work: AttentionWork, count: int) -> int | None:
        """Write the work list of `count` rows into the arrays; return how many lists have to be launched, None if it
        does not fit.

        Each row of nobody sees one key, the null page's first: what it computes is a number then, whatever memory held.
        What the arrays held before stays behind the new end, where nobody looks.
        """
        lists = {one.max_members: one for one in work.lists}
        if len(lists) < len(work.lists) or not lists.keys() <= set(self.heights) or work.num_states > self.num_states:
            return None
        nobody = self.size - count
        if any(len(one.items) + nobody > self.num_items for one in work.lists):
            return None
        if any(len(one.members) + nobody > self.num_members for one in work.lists):
            return None
        num_lists, num_items, num_members = 1, 0, 0
        for number, height in enumerate(self.heights):
            one = lists.get(height)
            given["num_items"][number, 0] = 0 if one is None else len(one.items)
            if one is not None:
                num_lists = number + 1
                if not number:
                    num_items, num_members = len(one.items), len(one.members)
                given[f"items_{number}"][: len(one.items)] = one.items.numpy()
                given[f"members_{number}"][: len(one.members)] = one.members.numpy()
        self._add_nobody(given, count, num_items, num_members)
        num_merges = len(work.merge_tokens)
        given["num_merges"][0] = num_merges
        given["merge_tokens"][:num_merges] = work.merge_tokens.numpy()
        given["merge_offsets"][: num_merges + 1] = work.merge_offsets.numpy()
        given["merge_states"][: work.num_states] = work.merge_states.numpy()
        return num_lists

    def _add_nobody(self, given: Mapping[str, NDArray[Any]], count: int, num_items: int, num_members: int) -> None:
        """Add an item to the first list for each row from `count` on."""
        number = self.size - count
        if not number:
            return
        row = np.arange(count, self.size, dtype=np.int32)
        items = given["items_0"][num_items : num_items + number]
        items[:] = (0, 0, 1, 0, 1, -1)
        items[:, 0] = row
        items[:, 3] = row + np.int32(num_members - count)
        given["members_0"][num_members : num_members + number] = row
        given["num_items"][0, 0] = num_items + number

    def work(self, given: Mapping[str, Tensor], num_lists: int) -> AttentionWork:
        """Return the work list that lies in these buffers; `start` among them says where each token is."""
        return AttentionWork(
            lists=tuple(
                WorkList(given[f"items_{number}"], given[f"members_{number}"], given["num_items"][number, :1], height)
                for number, height in enumerate(self.heights[:num_lists])
            ),
            positions=given["start"],
            merge_tokens=given["merge_tokens"],
            merge_offsets=given["merge_offsets"],
            merge_states=given["merge_states"],
            num_merges=given["num_merges"],
            num_states=self.num_states,
        )


def no_work() -> AttentionWork:
    """Return the work list of no rows."""
    none = torch.zeros(0, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    return AttentionWork((), none, none, zero, none, zero, 0)
