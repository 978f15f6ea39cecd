"""Room for a step's work list in buffers that stay where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
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
            num_states=size + min(size * pieces, 2 * own + size * SHARED_PIECES),
        )

    def parts(self) -> Parts:
        """Return the arrays of a work list by name."""
        parts: Parts = {"num_merges": (np.int32, (1,)), "num_items": (np.int32, (len(self.heights), 4))}
        parts |= {"merge_tokens": (np.int32, (self.size,)), "merge_offsets": (np.int32, (self.size + 1,))}
        for number in range(len(self.heights)):
            parts[f"items_{number}"] = (np.int32, (self.num_items, 6))
            parts[f"members_{number}"] = (np.int32, (self.num_states,))
        parts["merge_states"] = (np.int32, (self.num_states,))
        return parts

    def fill(self, given: Mapping[str, NDArray[Any]], work: AttentionWork) -> int | None:
        """Write a work list into the arrays; return how many lists have to be launched, None if it does not fit.

        What the arrays held before stays behind the new end, where nobody looks.
        """
        lists = {one.max_members: one for one in work.lists}
        if len(lists) < len(work.lists) or not lists.keys() <= set(self.heights) or work.num_states > self.num_states:
            return None
        if any(len(one.items) > self.num_items or len(one.members) > self.num_states for one in work.lists):
            return None
        num_lists = 1
        for number, height in enumerate(self.heights):
            one = lists.get(height)
            given["num_items"][number, 0] = 0 if one is None else len(one.items)
            if one is not None:
                num_lists = number + 1
                given[f"items_{number}"][: len(one.items)] = one.items.numpy()
                given[f"members_{number}"][: len(one.members)] = one.members.numpy()
        num_merges = len(work.merge_tokens)
        given["num_merges"][0] = num_merges
        given["merge_tokens"][:num_merges] = work.merge_tokens.numpy()
        given["merge_offsets"][: num_merges + 1] = work.merge_offsets.numpy()
        given["merge_states"][: work.num_states] = work.merge_states.numpy()
        return num_lists

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
