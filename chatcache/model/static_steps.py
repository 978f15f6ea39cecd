"""Steps up to the logits, on buffers with fixed addresses, which CUDA graphs can capture and replay.

There is one `StaticStep` per `StepSize`. A smaller step is padded: a padding token is token 0 at position 0 of the
padding slot, whose table holds null pages only. It writes its keys and values to the null page (page 0 is never
allocated, and no branch reads it), and attends to that page alone; the logits of padding rows are ignored.

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
from chatcache_kernels.work_list import (
    LARGE_TILE_QUERIES,
    LOAD_SPLITS,
    MIN_DECODE_ITEMS,
    PREFILL_TILE_QUERIES,
    SMALL_TILE_QUERIES,
    SPLIT_TOKENS,
)
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.attention import AttentionBackend, AttentionStep, Network
from chatcache.model.page_tables import DeviceSlots, StepLayout, TableChanges
from chatcache.model.states import StateStep, StateStore
from chatcache.model.streams import ArraySpecs, Layout
from chatcache.types.plan import I32, I64, Rows

SHARED_PIECES = 16  # splits of shared keys per row of a full batch
MAX_PROMPT_ROWS = 256  # of a step with prompts: each row has logits, also those that the step does not have
PROMPT_PIECES = 4  # splits of the keys of each token of prompts; a step whose contexts are longer runs uncaptured

Arrays = dict[str, NDArray[Any]]
Replay = Callable[[], None]


@dataclass(frozen=True, slots=True)
class StepSize:
    """Padded size of a captured step. Decode steps have one token in each row, others any number in each."""

    num_rows: int
    num_tokens: int
    is_decode: bool

    @classmethod
    def decode(cls, num_rows: int) -> StepSize:
        """Return the size of a decode step."""
        return cls(num_rows, num_rows, is_decode=True)

    @classmethod
    def prompts(cls, num_tokens: int, num_slots: int) -> StepSize:
        """Return the size of a step with prompts of a runner with `num_slots` branch slots."""
        return cls(min(num_tokens, num_slots, MAX_PROMPT_ROWS), num_tokens, is_decode=False)

    @property
    def padding_row(self) -> int:
        """Return the row after all rows of a step with prompts, which is always a padding row."""
        return self.num_rows

    def __str__(self) -> str:
        return f"decode step of {self.num_rows} rows" if self.is_decode else f"prompt step of {self.num_tokens} tokens"


@dataclass(frozen=True, slots=True)
class AttentionLaunches:
    """What a step launches in each attention layer: its first `num_lists` work lists, and the merge of split keys."""

    num_lists: int
    has_merges: bool


@dataclass(frozen=True, slots=True)
class WorkListBuffers:
    """Capacity of the fixed-size buffers for the attention work list of a step.

    `heights`: tile height of each list, the smallest first. Only rows that share pages and prompts need the others, so
    a step launches the first `num_lists` of them. `prefix`: of the names of the arrays.
    """

    size: StepSize
    heights: tuple[int, ...]
    num_items: int
    num_states: int
    prefix: str = ""

    @classmethod
    def sized_for(
        cls, size: StepSize, group: int, max_model_len: int, num_kv_tokens: int, prefix: str = ""
    ) -> WorkListBuffers:
        """Return buffers for a step over `num_kv_tokens` tokens of KV pages.

        A step that needs more runs uncaptured.
        """
        queries = [SMALL_TILE_QUERIES, LARGE_TILE_QUERIES, PREFILL_TILE_QUERIES]
        num_heights = 3 if not size.is_decode else 2 if size.num_rows > 1 else 1
        heights = [max(1, each // group) for each in queries[:num_heights]]
        num_rows, pieces, own = size.num_rows, -(-max_model_len // SPLIT_TOKENS), -(-num_kv_tokens // SPLIT_TOKENS)
        shortest = -(-max_model_len // int(SPLIT_TOKENS * LOAD_SPLITS[0]))
        num_short = min(num_rows * shortest, num_rows + 2 * MIN_DECODE_ITEMS)
        num_items = num_rows + max(num_short, min(num_rows * pieces, 2 * own))
        num_states = max(num_short, min(num_rows * pieces, 2 * own + num_rows * SHARED_PIECES))
        if not size.is_decode:
            num_tiles = size.num_tokens // heights[-1] + num_rows
            num_items += num_tiles * min(PROMPT_PIECES, pieces)
            num_items += -(-size.num_tokens // heights[0])  # padding
            num_states += size.num_tokens * min(PROMPT_PIECES, pieces)
        return cls(size, tuple(dict.fromkeys(heights)), num_items, num_states, prefix)

    @property
    def num_members(self) -> int:
        """Return how many tokens the items of a work list can name: one per partial state, and each token once more."""
        return self.num_states + self.size.num_tokens

    def specs(self) -> ArraySpecs:
        """Return the dtype and shape of each array of a work list, by name."""
        num_tokens = self.size.num_tokens
        parts: ArraySpecs = {"num_merges": (np.int32, (1,)), "num_items": (np.int32, (len(self.heights), 4))}
        parts |= {"merge_tokens": (np.int32, (num_tokens,)), "merge_offsets": (np.int32, (num_tokens + 1,))}
        for number in range(len(self.heights)):
            parts[f"items_{number}"] = (np.int32, (self.num_items, 6))
            parts[f"members_{number}"] = (np.int32, (self.num_members,))
        parts["merge_states"] = (np.int32, (self.num_states,))
        return {self.prefix + name: spec for name, spec in parts.items()}

    def fill(self, inputs: Mapping[str, NDArray[Any]], work: AttentionWork, count: int) -> AttentionLaunches | None:
        """Write the work list of `count` tokens into the arrays.

        Return what to launch, or None if the work list does not fit. Each padding token attends to the
        first key of the null page, so its result is a number whatever memory held. Array contents past the new end are
        stale.
        """
        p, lists = self.prefix, {one.max_members: one for one in work.lists}
        if len(lists) < len(work.lists) or not lists.keys() <= set(self.heights) or work.num_states > self.num_states:
            return None
        num_padding = self.size.num_tokens - count
        num_padding_items = -(-num_padding // self.heights[0])
        if any(len(one.items) + num_padding_items > self.num_items for one in work.lists):
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
        """Add items for the padding tokens, from token `count` on, to the first list."""
        p, size, height = self.prefix, self.size, self.heights[0]
        num_tokens = size.num_tokens - count
        if not num_tokens:
            return
        number = -(-num_tokens // height)
        first = np.arange(number, dtype=np.int32) * np.int32(height)
        items = inputs[p + "items_0"][num_items : num_items + number]
        items[:] = (count if size.is_decode else size.padding_row, 0, 1, 0, 0, -1)
        items[:, 3] = num_members + first
        items[:, 4] = np.minimum(num_tokens - first, height)
        inputs[p + "members_0"][num_members : num_members + num_tokens] = np.arange(count, size.num_tokens)
        inputs[p + "num_items"][0, 0] = num_items + number

    def work(self, inputs: Mapping[str, Tensor], launches: AttentionLaunches) -> AttentionWork:
        """Return the work list over these buffers; `start` holds the position of each token."""
        p, num_merges = self.prefix, self.size.num_tokens if launches.has_merges else 0
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
    """The network, kernels, pages, slots and states that all static steps of a runner use."""

    network: Network
    kernels: AttentionBackend
    stores: tuple[PageStore, ...]
    slots: DeviceSlots
    states: StateStore | None = None


def input_specs(size: StepSize, work_buffers: Sequence[WorkListBuffers]) -> ArraySpecs:
    """Return the dtype and shape of each input array of a step, by name.

    `start` is `positions` in the type that attention needs; `slot` that of each token; `cells` are the KV cells of the
    new tokens; `changed_at` and `changed_pages` are changes of the page tables that apply before the step; `state` is
    that of each row of a decode step, for models with recurrent layers. Steps with prompts also have the slot, start,
    number of tokens, offsets and last token of each row, as `StepLayout`.
    """
    wide: ArraySpecs = dict.fromkeys(
        ("tokens", "positions", "slot", "cells", "changed_at"), (np.int64, (size.num_tokens,))
    )
    narrow: ArraySpecs = dict.fromkeys(("start", "changed_pages", "state"), (np.int32, (size.num_tokens,)))
    specs = {**wide, **narrow}
    if not size.is_decode:
        specs |= {"row_slot": (np.int64, (size.num_rows + 1,)), "last": (np.int64, (size.num_rows,))}
        specs |= dict.fromkeys(("row_start", "row_tokens"), (np.int32, (size.num_rows + 1,)))
        specs |= {"offsets": (np.int32, (size.num_rows + 2,))}
    for buffers in work_buffers:
        specs |= buffers.specs()
    return specs


class StaticStep:
    """Step of one size, on the first bytes and the first logits of buffers that all sizes share."""

    def __init__(
        self,
        size: StepSize,
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
        self._logits = logits[: size.num_rows]
        if size.is_decode:
            self._inputs["row_slot"], self._inputs["row_start"] = self._inputs["slot"], self._inputs["start"]
            self._inputs["row_tokens"] = torch.ones(size.num_rows, dtype=torch.int32, device=inputs.device)
            self._inputs["offsets"] = torch.arange(size.num_rows + 1, dtype=torch.int32, device=inputs.device)

    @property
    def states(self) -> StateStore | None:
        """Return the states that the step updates, None for a model without."""
        return self._context.states

    @property
    def launches(self) -> list[AttentionLaunches]:
        """Return what the attention of a step may launch.

        Decode steps: more work lists, and merges or none, as steps of short contexts have none. Others: everything.
        """
        max_lists = max((len(buffers.heights) for buffers in self.work_buffers), default=1)
        if not self.size.is_decode:
            return [AttentionLaunches(max_lists, has_merges=True)]
        found = [AttentionLaunches(count, has_merges=True) for count in range(1, max_lists + 1)]
        return [AttentionLaunches(1, has_merges=False), *found] if self.work_buffers else found

    def choose_launches(self, filled: Sequence[AttentionLaunches | None]) -> AttentionLaunches | None:
        """Return the fewest launches for all forms of attention; None if the work list of one did not fit."""
        needed = [each for each in filled if each is not None]
        if len(needed) < len(filled):
            return None
        num_lists, has_merges = max(each.num_lists for each in needed), any(each.has_merges for each in needed)
        for each in (AttentionLaunches(num_lists, has_merges), AttentionLaunches(num_lists, has_merges=True)):
            if each in self.launches:
                return each
        return self.launches[-1]

    def run(self, launches: AttentionLaunches) -> None:
        """Run the device's part of a step; `launches`: of its attention."""
        context, inputs = self._context, self._inputs
        slots = context.slots
        slots.write(inputs["changed_at"], inputs["changed_pages"])
        slot = inputs["slot"]
        last = slots.last_token.index_select(0, slot).long()
        tokens = torch.where(inputs["tokens"] < 0, last, inputs["tokens"])
        batch = AttentionBatch(
            tables=slots.select_tables(inputs["row_slot"], slots.max_pages),
            start=inputs["row_start"],
            num_tokens=inputs["row_tokens"],
            offsets=inputs["offsets"],
            slots=inputs["cells"],
            max_new_tokens=1 if self.size.is_decode else self.size.num_tokens,
            max_context_tokens=slots.max_pages * context.stores[0].page_size,
        )
        places = context.network.geometry.places
        states = StateStep(context.states.tensors, inputs["state"]) if context.states is not None else None
        step = AttentionStep(context.kernels, context.stores, self._batches(batch, launches), places, states)
        drawn = None if self.size.is_decode else inputs["last"]
        self._logits.copy_(context.network.forward(tokens, inputs["positions"], step, drawn))

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
    """Write the rows of a decode step, followed by padding rows, into the arrays of `input_specs`."""
    _fill_tokens(inputs, rows.tokens, rows.start, rows.slot, cells, slots)
    _fill_changes(inputs, changes, slots)


def fill_states(inputs: Mapping[str, NDArray[Any]], state: I32, scratch: int) -> None:
    """Write the states of the rows of a decode step; padding rows update the scratch state."""
    inputs["state"][: len(state)] = state
    inputs["state"][len(state) :] = scratch


def fill_prompt_rows(
    inputs: Mapping[str, NDArray[Any]], rows: Rows, layout: StepLayout, changes: TableChanges, slots: DeviceSlots
) -> None:
    """Write the rows of a step with prompts, and padding tokens and rows, into the arrays of `input_specs`."""
    slot = layout.slot.repeat(rows.num_tokens)
    _fill_tokens(inputs, rows.tokens, layout.positions, slot, layout.slots, slots)
    _fill_changes(inputs, changes, slots)
    count = len(rows.slot)
    for name, values, rest in (
        ("row_slot", layout.slot, slots.padding_slot),
        ("last", layout.last, 0),
        ("row_start", layout.start, 0),
        ("row_tokens", layout.num_tokens, 0),
        ("offsets", layout.offsets[:-1], layout.offsets[-1]),
    ):
        inputs[name][:count] = values
        inputs[name][count:] = rest


def _fill_tokens(
    inputs: Mapping[str, NDArray[Any]],
    tokens: I32,
    positions: I32 | I64,
    slot: I32 | I64,
    cells: I64,
    slots: DeviceSlots,
) -> None:
    """Write the tokens of a step, followed by padding tokens."""
    count = len(tokens)
    for name, values, rest in (
        ("tokens", tokens, 0),
        ("positions", positions, 0),
        ("start", positions, 0),
        ("slot", slot, slots.padding_slot),
        ("cells", cells, 0),
    ):
        inputs[name][:count] = values
        inputs[name][count:] = rest


def _fill_changes(inputs: Mapping[str, NDArray[Any]], changes: TableChanges, slots: DeviceSlots) -> None:
    """Write changes of the page tables; the rest of the arrays changes a cell of the padding slot."""
    count = len(changes.at)
    inputs["changed_at"][:count] = changes.at
    inputs["changed_at"][count:] = slots.padding_cell
    inputs["changed_pages"][:count] = changes.pages
    inputs["changed_pages"][count:] = 0


def fill_padding(inputs: Mapping[str, NDArray[Any]], slots: DeviceSlots, step: StaticStep) -> None:
    """Write a step of padding only, which is what a capture runs."""
    none, wide = np.zeros(0, np.int32), np.zeros(0, np.int64)
    rows = Rows(none, none, none, none)
    if step.size.is_decode:
        fill_rows(inputs, rows, wide, no_changes(), slots)
        if step.states is not None:
            fill_states(inputs, none, step.states.scratch)
    else:
        layout = StepLayout(wide, none[:, None], none, none, np.zeros(1, np.int32), wide, wide, wide, 0, 0, ())
        fill_prompt_rows(inputs, rows, layout, no_changes(), slots)
    for buffers in step.work_buffers:
        buffers.fill(inputs, empty_work(), 0)
