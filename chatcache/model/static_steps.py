"""Decode steps up to the logits, on buffers with fixed addresses, which CUDA graphs can capture and replay.

There is one `StaticStep` per batch size. A step of fewer rows is padded: a padding row is token 0 at position 0 of the
padding slot, whose table holds null pages only. It writes its keys and values to the null page (page 0 is never
allocated, and no branch reads it), and attends to that page alone; its logits are ignored.

    host     | tokens | positions | ... | work list |     pinned, two buffers used in turn
                                | one copy
    device   | tokens | positions | ... | work list |
                                | replay
    device   | logits of each row |                       drawn from outside of the captured step, by any sampler
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from chatcache_kernels.types import AttentionBatch, AttentionWork, PageStore, WorkList
from chatcache_kernels.work_list import LARGE_TILE_QUERIES, SMALL_TILE_QUERIES, SPLIT_TOKENS
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.attention import AttentionBackend, AttentionStep, Network
from chatcache.model.page_tables import DeviceSlots, TableChanges
from chatcache.model.streams import ArraySpecs, Layout
from chatcache.types.plan import I64, Rows

SHARED_PIECES = 16  # splits of shared keys per row of a full batch
MAX_ROWS_WITHOUT_MERGES = 8
"""Steps of so many rows are captured without merges, too: short contexts have none, and small steps notice a launch."""

Arrays = dict[str, NDArray[Any]]
Replay = Callable[[], None]


@dataclass(frozen=True, slots=True)
class AttentionLaunches:
    """What a step launches in each attention layer: its first `num_lists` work lists, and the merge of split keys."""

    num_lists: int
    has_merges: bool


@dataclass(frozen=True, slots=True)
class WorkListBuffers:
    """Capacity of the fixed-size buffers for the attention work list of `size` decode rows.

    `heights`: tile height of each list, the smallest first. Only rows that share pages need the others, so a step
    launches the first `num_lists` of them. `prefix`: of the names of the arrays.
    """

    size: int
    heights: tuple[int, ...]
    num_items: int
    num_states: int
    prefix: str = ""

    @classmethod
    def sized_for(cls, size: int, group: int, max_model_len: int, num_tokens: int, prefix: str = "") -> WorkListBuffers:
        """Return buffers for `size` rows over `num_tokens` tokens of KV pages.

        A step that needs more runs uncaptured.
        """
        heights = tuple(dict.fromkeys(max(1, queries // group) for queries in (SMALL_TILE_QUERIES, LARGE_TILE_QUERIES)))
        pieces = -(-max_model_len // SPLIT_TOKENS)
        own = -(-num_tokens // SPLIT_TOKENS)
        return cls(
            size=size,
            heights=heights if size > 1 else heights[:1],
            num_items=size + min(size * pieces, 2 * own),
            num_states=min(size * pieces, 2 * own + size * SHARED_PIECES),
            prefix=prefix,
        )

    @property
    def num_members(self) -> int:
        """Return how many rows the items of a work list can name: one per partial state, and each row once more."""
        return self.num_states + self.size

    def specs(self) -> ArraySpecs:
        """Return the dtype and shape of each array of a work list, by name."""
        parts: ArraySpecs = {"num_merges": (np.int32, (1,)), "num_items": (np.int32, (len(self.heights), 4))}
        parts |= {"merge_tokens": (np.int32, (self.size,)), "merge_offsets": (np.int32, (self.size + 1,))}
        for number in range(len(self.heights)):
            parts[f"items_{number}"] = (np.int32, (self.num_items, 6))
            parts[f"members_{number}"] = (np.int32, (self.num_members,))
        parts["merge_states"] = (np.int32, (self.num_states,))
        return {self.prefix + name: spec for name, spec in parts.items()}

    def fill(self, inputs: Mapping[str, NDArray[Any]], work: AttentionWork, count: int) -> AttentionLaunches | None:
        """Write the work list of `count` rows into the arrays.

        Return what to launch, or None if the work list does not fit. Each padding row attends to the
        first key of the null page, so its result is a number whatever memory held. Array contents past the new end are
        stale.
        """
        p, lists = self.prefix, {one.max_members: one for one in work.lists}
        if len(lists) < len(work.lists) or not lists.keys() <= set(self.heights) or work.num_states > self.num_states:
            return None
        num_padding = self.size - count
        if any(len(one.items) + num_padding > self.num_items for one in work.lists):
            return None
        if any(len(one.members) + num_padding > self.num_members for one in work.lists):
            return None
        num_lists, num_items, num_members = 1, 0, 0
        for number, height in enumerate(self.heights):
            one = lists.get(height)
            inputs[p + "num_items"][number, 0] = 0 if one is None else len(one.items)
            if one is not None:
                num_lists = number + 1
                if not number:
                    num_items, num_members = len(one.items), len(one.members)
                inputs[p + f"items_{number}"][: len(one.items)] = one.items.numpy()
                inputs[p + f"members_{number}"][: len(one.members)] = one.members.numpy()
        self._add_padding(inputs, count, num_items, num_members)
        num_merges = len(work.merge_tokens)
        inputs[p + "num_merges"][0] = num_merges
        inputs[p + "merge_tokens"][:num_merges] = work.merge_tokens.numpy()
        inputs[p + "merge_offsets"][: num_merges + 1] = work.merge_offsets.numpy()
        inputs[p + "merge_states"][: work.num_states] = work.merge_states.numpy()
        return AttentionLaunches(num_lists, has_merges=num_merges > 0)

    def _add_padding(self, inputs: Mapping[str, NDArray[Any]], count: int, num_items: int, num_members: int) -> None:
        """Add one item to the first list for each padding row, from row `count` on."""
        p, number = self.prefix, self.size - count
        if not number:
            return
        row = np.arange(count, self.size, dtype=np.int32)
        items = inputs[p + "items_0"][num_items : num_items + number]
        items[:] = (0, 0, 1, 0, 1, -1)
        items[:, 0] = row
        items[:, 3] = row + np.int32(num_members - count)
        inputs[p + "members_0"][num_members : num_members + number] = row
        inputs[p + "num_items"][0, 0] = num_items + number

    def work(self, inputs: Mapping[str, Tensor], launches: AttentionLaunches) -> AttentionWork:
        """Return the work list over these buffers; `start` holds the position of each token."""
        p, num_merges = self.prefix, self.size if launches.has_merges else 0
        return AttentionWork(
            lists=tuple(
                WorkList(
                    inputs[p + f"items_{number}"],
                    inputs[p + f"members_{number}"],
                    inputs[p + "num_items"][number, :1],
                    height,
                )
                for number, height in enumerate(self.heights[: launches.num_lists])
            ),
            positions=inputs["start"],
            merge_tokens=inputs[p + "merge_tokens"][:num_merges],
            merge_offsets=inputs[p + "merge_offsets"],
            merge_states=inputs[p + "merge_states"],
            num_merges=inputs[p + "num_merges"],
            num_states=self.num_states if launches.has_merges else 0,
        )


def empty_work() -> AttentionWork:
    """Return a work list without rows."""
    none = torch.zeros(0, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    return AttentionWork((), none, none, zero, none, zero, 0)


@dataclass(frozen=True, slots=True)
class StepContext:
    """The network, kernels, pages and slots that all static steps of a runner use."""

    network: Network
    kernels: AttentionBackend
    stores: tuple[PageStore, ...]
    slots: DeviceSlots


def input_specs(size: int, work_buffers: Sequence[WorkListBuffers]) -> ArraySpecs:
    """Return the dtype and shape of each input array of a step of `size` rows, by name.

    `start` is `positions` in the type that attention needs; `cells` are the KV cells of the new tokens; `changed_at`
    and `changed_pages` are changes of the page tables that apply before the step.
    """
    wide: ArraySpecs = dict.fromkeys(("tokens", "positions", "slot", "cells", "changed_at"), (np.int64, (size,)))
    narrow: ArraySpecs = dict.fromkeys(("start", "changed_pages"), (np.int32, (size,)))
    specs = {**wide, **narrow}
    for buffers in work_buffers:
        specs |= buffers.specs()
    return specs


class StaticStep:
    """Decode step of `size` rows, on the first bytes and the first logits of buffers that all sizes share."""

    def __init__(
        self,
        size: int,
        context: StepContext,
        work_buffers: Sequence[WorkListBuffers],
        inputs: Tensor,
        logits: Tensor,
    ) -> None:
        self.size = size
        self.work_buffers = work_buffers
        self.layout = Layout(input_specs(size, work_buffers))
        self._context = context
        self._inputs = self.layout.tensors(inputs)
        self._logits = logits[:size]
        device = inputs.device
        self._ones = torch.ones(size, dtype=torch.int32, device=device)
        self._offsets = torch.arange(size + 1, dtype=torch.int32, device=device)

    @property
    def launches(self) -> list[AttentionLaunches]:
        """Return what the attention of a step may launch: more work lists, and merges or in small steps none."""
        max_lists = max((len(buffers.heights) for buffers in self.work_buffers), default=1)
        found = [AttentionLaunches(count, has_merges=True) for count in range(1, max_lists + 1)]
        has_short = self.work_buffers and self.size <= MAX_ROWS_WITHOUT_MERGES
        return [AttentionLaunches(1, has_merges=False), *found] if has_short else found

    def choose_launches(self, filled: Sequence[AttentionLaunches | None]) -> AttentionLaunches | None:
        """Return the fewest launches for all forms of attention; None if the work list of one did not fit."""
        needed = [each for each in filled if each is not None]
        if len(needed) < len(filled):
            return None
        num_lists, has_merges = max(each.num_lists for each in needed), any(each.has_merges for each in needed)
        exact = AttentionLaunches(num_lists, has_merges)
        return exact if exact in self.launches else AttentionLaunches(num_lists, has_merges=True)

    def run(self, launches: AttentionLaunches) -> None:
        """Run the device's part of a step; `launches`: of its attention."""
        context, inputs = self._context, self._inputs
        slots = context.slots
        slots.write(inputs["changed_at"], inputs["changed_pages"])
        slot = inputs["slot"]
        last = slots.last_token.index_select(0, slot).long()
        tokens = torch.where(inputs["tokens"] < 0, last, inputs["tokens"])
        batch = AttentionBatch(
            tables=slots.select_tables(slot, slots.max_pages),
            start=inputs["start"],
            num_tokens=self._ones,
            offsets=self._offsets,
            slots=inputs["cells"],
            max_new_tokens=1,
            max_context_tokens=slots.max_pages * context.stores[0].page_size,
        )
        places = context.network.geometry.places
        step = AttentionStep(context.kernels, context.stores, self._batches(batch, launches), places)
        self._logits.copy_(context.network.forward(tokens, inputs["positions"], step, None))

    def _batches(self, batch: AttentionBatch, launches: AttentionLaunches) -> tuple[AttentionBatch, ...]:
        """Return the batch of each form of attention."""
        if not self.work_buffers:
            return (batch,) * len(self._context.network.geometry.forms)
        return tuple(replace(batch, work=buffers.work(self._inputs, launches)) for buffers in self.work_buffers)


def no_changes() -> TableChanges:
    """Return page-table changes without any."""
    return TableChanges(np.zeros(0, np.int64), np.zeros(0, np.int32))


def fill_rows(
    inputs: Mapping[str, NDArray[Any]], rows: Rows, cells: I64, changes: TableChanges, slots: DeviceSlots
) -> None:
    """Write a step's rows, followed by padding rows, into the arrays of `input_specs`."""
    count, num_changes = len(rows.slot), len(changes.at)
    for name, values, rest in (
        ("tokens", rows.tokens, 0),
        ("positions", rows.start, 0),
        ("start", rows.start, 0),
        ("slot", rows.slot, slots.padding_slot),
        ("cells", cells, 0),
    ):
        inputs[name][:count] = values
        inputs[name][count:] = rest
    inputs["changed_at"][:num_changes] = changes.at
    inputs["changed_at"][num_changes:] = slots.padding_cell
    inputs["changed_pages"][:num_changes] = changes.pages
    inputs["changed_pages"][num_changes:] = 0


def fill_padding(
    inputs: Mapping[str, NDArray[Any]], slots: DeviceSlots, work_buffers: Sequence[WorkListBuffers]
) -> None:
    """Write a step of padding rows only, which is what a capture runs."""
    none = np.zeros(0, np.int32)
    fill_rows(inputs, Rows(none, none, none, none), none.astype(np.int64), no_changes(), slots)
    for buffers in work_buffers:
        buffers.fill(inputs, empty_work(), 0)
