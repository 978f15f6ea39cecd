"""A step's draws, sorted into what one launch of a sampling kernel does alike.

singles   one token each                 from raw rows | from edited copies
wides     several tokens each            from raw rows | from edited copies
tops      alternatives to report         from raw rows, each row once
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from chatcache_kernels.triton import sampling_rows as fields

from chatcache.model.draw_table import NUM_FIELDS, fill_table
from chatcache.model.edits import WORD_BITS
from chatcache.model.filters import Index, draws_at
from chatcache.sched.plan import F32, I32, I64, Draws


@dataclass(frozen=True, slots=True)
class Job:
    """Draws of one launch. Shapes: which [N], the step's draws (of tops, rows); table int32 [NUM_FIELDS, N]. `size`:
    tokens of each, 0 for singles. `edited`: whether they draw from edited copies. `cuts`: whether any has a CUT."""

    which: Index
    table: I32
    size: int
    edited: bool
    cuts: bool


@dataclass(frozen=True, slots=True)
class Edits:
    """Edits as single cells. Shapes: sources [E] int64, the raw row of each edited copy; rows, ids, scale, add [K]."""

    sources: I64
    rows: I32
    ids: I32
    scale: F32
    add: F32


def flat_edits(draws: Draws, index: Index, vocab_size: int) -> tuple[Edits, Index]:
    """Return a step's edits, and which copy each draw draws from, [D], -1 for the raw row."""
    edited = sorted({edit.draw for edit in draws.edits})
    copy = np.full(len(index), -1, np.intp)
    copy[edited] = np.arange(len(edited))
    none = np.zeros(0, np.float32)
    rows = np.concatenate([none, *(np.full(len(edit.ids), copy[edit.draw]) for edit in draws.edits)]).astype(np.int32)
    ids = np.concatenate([none.astype(np.int32), *(edit.ids for edit in draws.edits)])
    scale = np.concatenate([none, *(edit.scale for edit in draws.edits)])
    add = np.concatenate([none, *(edit.add for edit in draws.edits)])
    known = (ids >= 0) & (ids < vocab_size)  # an EOS id of the tokenizer may lie beyond the model's logits
    cells = Edits(index[edited].astype(np.int64), rows[known], ids[known].astype(np.int32), scale[known], add[known])
    return cells, copy


def mask_words(draws: Draws, vocab_size: int) -> tuple[I32, I32]:
    """Return the masks' words, int32 [1 or more, ceil(V / 32)], and which each draw has, [D], -1 for none."""
    words = np.zeros((max(len(draws.masks), 1), -(-vocab_size // WORD_BITS)), np.uint32)
    mask: I32 = np.full(len(draws.row), -1, np.int32)
    for row, each in enumerate(draws.masks):
        size = min(len(each.words), words.shape[1])
        words[row, :size] = each.words[:size]
        mask[each.draw] = row
    return words.view(np.int32), mask


def draw_jobs(draws: Draws, index: Index, copy: Index, mask: I32, slots: I32, vocab_size: int) -> list[Job]:
    """Sort a step's draws. Shapes: index, copy, mask and slots [D]; the last two -1 for none."""
    wide = draws.width > 1
    jobs = []
    for edited in (False, True):
        for size in (False, True):
            which = np.flatnonzero(((copy >= 0) == edited) & (wide == size))
            if which.size:
                jobs.append(_job(draws, which, index, copy, mask, slots, vocab_size))
    return jobs


def _job(draws: Draws, which: Index, index: Index, copy: Index, mask: I32, slots: I32, vocab_size: int) -> Job:
    some = draws_at(draws, which)
    table = np.zeros((NUM_FIELDS, len(which)), np.int32)
    edited, size = bool(copy[which[0]] >= 0), min(int(some.width.max()), vocab_size)
    fill_table(table, some, copy[which] if edited else index[which], vocab_size)
    table[fields.RAW_ROW.value] = index[which]
    table[fields.MASK.value] = mask[which]
    wide = bool(some.width[0] > 1)
    if wide:
        table[fields.CUT.value] |= some.temperature > 0
    else:
        table[fields.SLOT.value] = slots[which]
    cuts = bool(table[fields.CUT.value].any())
    return Job(which, table, size if wide else 0, edited, cuts)


def tops_job(rows: Index, size: int) -> Job:
    """Return the job of ranking raw rows; `which` are the rows, each once, ascending."""
    which = np.unique(rows)
    table = np.zeros((NUM_FIELDS, len(which)), np.int32)
    table[fields.ROW.value] = table[fields.RAW_ROW.value] = which
    for field in (fields.MASK, fields.SLOT, fields.TARGET):
        table[field.value] = -1
    return Job(which, table, size, edited=False, cuts=False)
