"""One page-table row per branch slot, kept between steps so that a plan only carries what changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from chatcache_kernels import reference
from chatcache_kernels.types import AttentionBatch, AttentionWork

from chatcache.model.transfer import to_device
from chatcache.sched.plan import I32, I64, Rows

Prepare = Callable[[I32, I32, I32, int, int], AttentionWork | None]
"""A backend's `prepare`: (tables, start, num_tokens, page_size, group) -> the step's work list, if it wants one."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a step's tokens go. Shapes: positions [T]; last [R] is each row's last token among the T."""

    batch: AttentionBatch
    positions: I64
    last: I64


class PageTables:
    """Shapes: rows [num_slots, max_pages] int32; entries past a branch's end are leftovers and never read."""

    def __init__(
        self, num_slots: int, max_pages: int, page_size: int, prepare: Prepare = reference.prepare, group: int = 1
    ) -> None:
        self._prepare = prepare
        self._group = group
        self.rows = np.zeros((num_slots, max_pages), np.int32)
        self.page_size = page_size

    def apply(self, forks: I32, updates: I32) -> None:
        """Copy rows for forks, in order (a slot may be source after it was target), then write the new entries."""
        for source, target, num_pages in forks.tolist():
            self.rows[target, :num_pages] = self.rows[source, :num_pages]
        if len(updates):
            self.rows[updates[:, 0], updates[:, 1]] = updates[:, 2]

    def place(self, rows: Rows, device: torch.device) -> Placement:
        """Return the attention batch and positions of a step's tokens.

        Raises: ValueError for a token whose page was never given; writing it would spoil the null page.
        """
        size = self.page_size
        counts = rows.num_tokens.astype(np.int64)
        ends = np.cumsum(counts)
        offsets = np.concatenate((np.zeros(1, np.int64), ends))
        row = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(row)) + np.repeat(rows.start - offsets[:-1], counts)
        context = rows.start + rows.num_tokens
        most = int(context.max(initial=0))
        tables = self.rows[rows.slot, : -(-most // size)]
        pages = tables[row, positions // size]
        if not pages.all():
            raise ValueError(f"row {row[pages == 0][0]}: position {positions[pages == 0][0]} has no page")
        slots = pages.astype(np.int64) * size + positions % size
        start, num_tokens = rows.start.astype(np.int32), rows.num_tokens.astype(np.int32)
        work = self._prepare(tables, start, num_tokens, size, self._group)
        batch = AttentionBatch(
            tables=to_device(tables, device),
            start=to_device(start, device),
            num_tokens=to_device(num_tokens, device),
            offsets=to_device(offsets.astype(np.int32), device),
            slots=to_device(slots, device),
            max_new_tokens=int(counts.max(initial=0)),
            max_context_tokens=most,
            work=work.to(device) if work is not None else None,
        )
        return Placement(batch, positions, ends - 1)
