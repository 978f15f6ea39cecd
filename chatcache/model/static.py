"""A decode step whose every number lies in buffers that never move, so that it can be captured once and replayed.

One size of batch is one `StaticStep`. A step of fewer rows fills up with rows of nobody: token 0 at position 0 of the
spare slot, whose table is all null pages. They write K and V to the null page (page 0 is never handed out, and no
branch's table names it within its tokens), attend to that alone, leave their draw in the spare slot, and nobody looks
at what was drawn.

    host     | tokens | positions | ... | draws | work list |     pinned, one of two in turn
                                | one copy
    device   | tokens | positions | ... | draws | work list |
                                | replay
    device   | tokens drawn | log-probabilities | faults |
                                | one copy, and a mark
    host     | tokens drawn | ...                               pinned, one of two in turn
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from chatcache_kernels.types import AttentionBatch, AttentionWork, KVPages
from numpy.typing import NDArray
from torch import Tensor

from chatcache.model.attention import AttentionBackend, AttentionStep, Network
from chatcache.model.plain import Parts, PlainDraws
from chatcache.model.room import WorkRoom, no_work
from chatcache.model.tables import Changes, DeviceSlots
from chatcache.model.transfer import Layout
from chatcache.sched.plan import I64, Draws, Rows

Arrays = dict[str, NDArray[Any]]
Replay = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Parties:
    """What every static step computes with."""

    network: Network
    kernels: AttentionBackend
    pages: KVPages
    slots: DeviceSlots
    plain: PlainDraws


def step_parts(size: int, plain: PlainDraws, room: WorkRoom | None) -> Parts:
    """Return what is given to a step of `size` rows. `start` is `positions` as attention wants it; `cells` say where
    K and V go, `changed_*` what has to be done to the tables first."""
    wide: Parts = dict.fromkeys(("tokens", "positions", "slot", "cells", "changed_at"), (np.int64, (size,)))
    narrow: Parts = dict.fromkeys(("start", "changed_pages"), (np.int32, (size,)))
    return {**wide, **narrow, **plain.parts(size), **(room.parts() if room is not None else {})}


class StaticStep:
    """Decodes `size` rows. Works on the first bytes of buffers that all sizes share."""

    def __init__(self, size: int, parties: Parties, room: WorkRoom | None, given: Tensor, drawn: Tensor) -> None:
        self.size = size
        self.room = room
        self.layout = Layout(step_parts(size, parties.plain, room))
        self.drawn_layout = Layout(parties.plain.drawn_parts(size))
        self._parties = parties
        self._given = self.layout.tensors(given)
        self._drawn = self.drawn_layout.tensors(drawn)
        device = given.device
        self._ones = torch.ones(size, dtype=torch.int32, device=device)
        self._offsets = torch.arange(size + 1, dtype=torch.int32, device=device)

    @property
    def most_lists(self) -> int:
        """Return how many lists a step may have."""
        return len(self.room.heights) if self.room is not None else 1

    def run(self, num_lists: int, kind: int) -> None:
        """Do the device's part of a step with that many work lists, and draws of this kind."""
        parties, given = self._parties, self._given
        slots = parties.slots
        slots.write(given["changed_at"], given["changed_pages"])
        slot = given["slot"]
        last = slots.last_token.index_select(0, slot).long()
        tokens = torch.where(given["tokens"] < 0, last, given["tokens"])
        batch = AttentionBatch(
            tables=slots.tables_of(slot, slots.max_pages),
            start=given["start"],
            num_tokens=self._ones,
            offsets=self._offsets,
            slots=given["cells"],
            max_new_tokens=1,
            max_context_tokens=slots.max_pages * parties.pages.page_size,
            work=self._work(num_lists),
        )
        step = AttentionStep(parties.kernels, parties.pages, batch)
        logits = parties.network.forward(tokens, given["positions"], step, None)
        parties.plain.draw(logits, given, self._drawn, slots.last_token, kind)

    def _work(self, num_lists: int) -> AttentionWork | None:
        return self.room.work(self._given, num_lists) if self.room is not None else None


def fits_tables(changes: Changes, size: int) -> bool:
    """Whether a step of `size` rows has room for these changes."""
    return len(changes.at) <= size


def fill_rows(given: Mapping[str, NDArray[Any]], rows: Rows, cells: I64, changes: Changes, slots: DeviceSlots) -> None:
    """Write a step's rows, and rows of nobody after them, into the arrays of `step_parts`."""
    count, num_changes = len(rows.slot), len(changes.at)
    for name, values, rest in (
        ("tokens", rows.tokens, 0),
        ("positions", rows.start, 0),
        ("start", rows.start, 0),
        ("slot", rows.slot, slots.spare_slot),
        ("cells", cells, 0),
    ):
        given[name][:count] = values
        given[name][count:] = rest
    given["changed_at"][:num_changes] = changes.at
    given["changed_at"][num_changes:] = slots.spare_cell
    given["changed_pages"][:num_changes] = changes.pages
    given["changed_pages"][num_changes:] = 0


def fill_nobody(
    given: Mapping[str, NDArray[Any]], plain: PlainDraws, slots: DeviceSlots, room: WorkRoom | None
) -> None:
    """Write a step of nobody's rows only: what a step is captured with."""
    none = np.zeros(0, np.int32)
    fill_rows(given, Rows(none, none, none, none), none.astype(np.int64), Changes(none.astype(np.int64), none), slots)
    if room is not None:
        room.fill(given, no_work(), 0)
    plain.fill(given, no_draws(), given["slot"])


def no_draws() -> Draws:
    """Return no draws at all."""
    i, f = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Draws(i, i, i.astype(np.uint64), i, i, f, i, f, f, i)
