"""Page tables: one row per branch slot, kept between steps.

A plan therefore only carries changes. The host's tables are authoritative. A GPU keeps a mirror of them
(`DeviceSlots`), which receives the changed cells of each step; a CPU needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import torch
from chatcache_kernels import reference
from chatcache_kernels.types import AttentionBatch, AttentionWork
from torch import Tensor

from chatcache.model.geometry import WorkForm
from chatcache.model.streams import upload
from chatcache.types.plan import I32, I64, Rows

PrepareWork = Callable[[I32, I32, I32, int, int], AttentionWork | None]
"""A backend's `prepare`: (tables, start, num_tokens, page_size, group) -> the step's work list, or None."""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Page-table cells that a plan changed, and their new values; a cell may occur twice.

    Shapes: at [K] int64 (slot * max_pages + index), pages [K] int32.
    """

    at: I64
    pages: I32


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows of a step cut where attention chunks begin: each piece is a row that starts at its chunk's first key.

    Shapes as in `StepLayout`: the tokens are the same, in the same order; positions count from the start of the chunk.
    """

    tables: I32
    start: I32
    num_tokens: I32
    offsets: I32

    @classmethod
    def cut(cls, tables: I32, start: I32, num_tokens: I32, page_size: int, chunk: int) -> ChunkRows:
        """Return the pieces of rows. `chunk` is a multiple of `page_size`."""
        end = start + num_tokens
        first = start // chunk
        count = np.maximum(-(-end // chunk) - first, 1)
        row = np.repeat(np.arange(len(start)), count)
        number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        origin = (first[row] + number) * chunk
        begin = np.maximum(start[row], origin)
        stop = np.minimum(end[row], origin + chunk)
        width = -(-int((stop - origin).max(initial=0)) // page_size)
        columns = np.minimum((origin // page_size)[:, None] + np.arange(width), tables.shape[1] - 1)
        offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(stop - begin))).astype(np.int32)
        counts = (begin - origin).astype(np.int32), (stop - begin).astype(np.int32)
        return cls(np.ascontiguousarray(tables[row[:, None], columns]), *counts, offsets)


@dataclass(frozen=True, slots=True)
class FormLayout:
    """One form of a step's attention: its work list, if the backend needs one, and its rows, if they are cut."""

    work: AttentionWork | None
    rows: ChunkRows | None = None

    def arrays(self) -> list[I32]:
        """Return the arrays that the device needs."""
        rows = self.rows
        arrays = [] if rows is None else [rows.tables, rows.start, rows.num_tokens, rows.offsets]
        return arrays + (_arrays(self.work) if self.work is not None else [])

    def batch(self, batch: AttentionBatch, tensors: list[Tensor]) -> AttentionBatch:
        """Return the step's `batch` in this form; `tensors` are `arrays` on the device."""
        if self.rows is not None:
            tables, start, num_tokens, offsets, *tensors = tensors
            ends = self.rows.start + self.rows.num_tokens
            most, longest = int(self.rows.num_tokens.max(initial=0)), int(ends.max(initial=0))
            batch = AttentionBatch(tables, start, num_tokens, offsets, batch.slots, most, longest)
        return batch if self.work is None else replace(batch, work=_with_arrays(self.work, tensors))


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the tokens of a step are stored, on the host.

    Shapes: slot [R] int64, the page table row of each row; tables [R, pages of the longest row], start, num_tokens [R],
    offsets [R + 1] int32; slots [T] int64, the KV cell of each token; positions [T] int64; last [R], the index of each
    row's last token among the T tokens.
    """

    slot: I64
    tables: I32
    start: I32
    num_tokens: I32
    offsets: I32
    slots: I64
    positions: I64
    last: I64
    max_new_tokens: int
    max_context_tokens: int
    forms: tuple[FormLayout, ...]

    def to(
        self, device: torch.device, device_slots: DeviceSlots | None = None
    ) -> tuple[tuple[AttentionBatch, ...], Tensor]:
        """Return the attention batches and the positions on a device, copied in one transfer.

        With `device_slots`, the page tables come from the device's mirror.
        """
        more = [form.arrays() for form in self.forms]
        tables = self.tables if device_slots is None else self.slot
        host = (tables, self.start, self.num_tokens, self.offsets, self.slots, self.positions)
        first, start, num_tokens, offsets, slots, positions, *rest = upload((*host, *chain(*more)), device)
        batch = AttentionBatch(
            tables=first if device_slots is None else device_slots.select_tables(first, self.tables.shape[1]),
            start=start,
            num_tokens=num_tokens,
            offsets=offsets,
            slots=slots,
            max_new_tokens=self.max_new_tokens,
            max_context_tokens=self.max_context_tokens,
        )
        tensors = iter(rest)
        batches = [
            form.batch(batch, list(islice(tensors, len(arrays)))) for form, arrays in zip(self.forms, more, strict=True)
        ]
        return tuple(batches), positions


class PageTables:
    """The page tables of all branch slots, on the host.

    Shapes: rows [num_slots, max_pages] int32; entries past the end of a branch are stale and never read.
    """

    def __init__(
        self,
        num_slots: int,
        max_pages: int,
        page_size: int,
        prepare: PrepareWork = reference.prepare,
        forms: Sequence[WorkForm] = (WorkForm(),),
    ) -> None:
        self._prepare = prepare
        self._forms = forms
        self.rows = np.zeros((num_slots, max_pages), np.int32)
        self.page_size = page_size

    def apply(self, forks: I32, updates: I32) -> TableChanges:
        """Apply a plan's forks and new entries to the tables; return the changed cells.

        A fork (source slot, target slot, number of pages) copies a table's first entries. Forks apply first and in
        order: a slot may be a source after it was a target.
        """
        width = self.rows.shape[1]
        for source, target, num_pages in forks.tolist():
            self.rows[target, :num_pages] = self.rows[source, :num_pages]
        at = np.zeros(0, np.int64)
        if len(updates):
            self.rows[updates[:, 0], updates[:, 1]] = updates[:, 2]
            at = updates[:, 0] * np.int64(width) + updates[:, 1]
        if len(forks):
            copied = [np.arange(target * width, target * width + num_pages) for _, target, num_pages in forks.tolist()]
            at = np.concatenate((at, *copied))
        return TableChanges(at, self.rows.reshape(-1)[at])

    def step_layout(self, rows: Rows) -> StepLayout:
        """Return where the tokens of a step are stored.

        Raises: ValueError for a token at a position that has no page; writing it would corrupt the null page.
        """
        size, num_rows = self.page_size, len(rows.slot)
        if len(rows.tokens) == num_rows:  # one token each
            offsets, positions = np.arange(num_rows + 1), rows.start.astype(np.int64)
            row = offsets[:-1]
        else:
            offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows.num_tokens, dtype=np.int64)))
            row = np.repeat(np.arange(num_rows), rows.num_tokens)
            positions = np.arange(len(row)) + np.repeat(rows.start - offsets[:-1], rows.num_tokens)
        max_context = int((rows.start + rows.num_tokens).max(initial=0))
        tables = self.rows[rows.slot, : -(-max_context // size)]
        pages = tables[row, positions // size]
        _check_pages(pages, positions, row)
        slots = pages.astype(np.int64) * size + positions % size
        start, num_tokens = rows.start.astype(np.int32), rows.num_tokens.astype(np.int32)
        return StepLayout(
            slot=rows.slot.astype(np.int64),
            tables=tables,
            start=start,
            num_tokens=num_tokens,
            offsets=offsets.astype(np.int32),
            slots=slots,
            positions=positions,
            last=offsets[1:] - 1,
            max_new_tokens=int(num_tokens.max(initial=0)),
            max_context_tokens=max_context,
            forms=tuple(self._form_layout(form, tables, start, num_tokens, max_context) for form in self._forms),
        )

    def _form_layout(self, form: WorkForm, tables: I32, start: I32, num_tokens: I32, max_context: int) -> FormLayout:
        rows = None
        if form.chunk is not None and max_context > form.chunk:
            rows = ChunkRows.cut(tables, start, num_tokens, self.page_size, form.chunk)
            tables, start, num_tokens = rows.tables, rows.start, rows.num_tokens
        return FormLayout(self._prepare(tables, start, num_tokens, self.page_size, form.group), rows)

    def decode_cells(self, slot: I32, start: I32) -> I64:
        """Return the KV cell of one new token per row. Shapes: slot, start [R] -> [R].

        Raises: ValueError as `step_layout`.
        """
        index, offset = np.divmod(start, np.int32(self.page_size))
        pages = self.rows[slot, index]
        if not pages.all():
            _check_pages(pages, start, np.arange(len(slot)))
        return pages.astype(np.int64) * self.page_size + offset

    def decode_works(self, slot: I32, start: I32) -> tuple[AttentionWork | None, ...]:
        """Return the work lists for one new token per row, None where the backend needs none; no form has chunks."""
        max_context = int(start.max(initial=0)) // self.page_size + 1
        tables, ones = self.rows[slot, :max_context], np.ones(len(slot), np.int32)
        return tuple(self._prepare(tables, start, ones, self.page_size, form.group) for form in self._forms)


class DeviceSlots:
    """State of each slot that a device keeps between steps.

    Shapes: tables [num_slots + 1, max_pages] int32, the mirror of the page tables; last_token [num_slots + 1] int32,
    the token drawn last if the draw had width 1. The extra slot at the end belongs to the rows that pad a batch.
    """

    def __init__(self, tables: PageTables, device: torch.device) -> None:
        num_slots, max_pages = tables.rows.shape
        self.padding_slot = num_slots
        self.padding_cell = num_slots * max_pages
        self.max_pages = max_pages
        self.tables = torch.zeros(num_slots + 1, max_pages, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)

    def apply(self, changes: TableChanges) -> None:
        """Apply the changes of a step to the mirror."""
        if len(changes.at):
            self.write(*upload((changes.at, changes.pages), self.tables.device))

    def write(self, at: Tensor, pages: Tensor) -> None:
        """Write single cells of the tables. Shapes: at [K] int64, pages [K] int32."""
        self.tables.view(-1).index_copy_(0, at, pages)

    def select_tables(self, slots: Tensor, num_pages: int) -> Tensor:
        """Return the first `num_pages` entries of the tables of `slots` [R], [R, num_pages]."""
        return self.tables[:, :num_pages].index_select(0, slots)


def _check_pages(pages: I32, positions: I64 | I32, row: I64) -> None:
    if not pages.all():
        bad = np.flatnonzero(pages == 0)[0]
        raise ValueError(f"row {row[bad]}: position {positions[bad]} has no page")


def _arrays(work: AttentionWork) -> list[I32]:
    """Return the arrays of a work list in host memory."""
    tensors = [work.positions, work.merge_tokens, work.merge_offsets, work.merge_states, work.num_merges]
    for one in work.lists:
        tensors += [one.items, one.members, one.num_items]
    return [tensor.numpy() for tensor in tensors]


def _with_arrays(work: AttentionWork, tensors: list[Tensor]) -> AttentionWork:
    """Return the same work list over other tensors, in the order of `_arrays`."""
    positions, tokens, offsets, states, num_merges, *rest = tensors
    lists = [
        replace(one, items=rest[3 * place], members=rest[3 * place + 1], num_items=rest[3 * place + 2])
        for place, one in enumerate(work.lists)
    ]
    return AttentionWork(tuple(lists), positions, tokens, offsets, states, num_merges, work.num_states)
