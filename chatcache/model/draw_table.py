"""What draws want, as the table of numbers that sampling kernels read (`chatcache_kernels.triton.sampling_rows`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from chatcache_kernels.triton import sampling_rows as fields
from numpy.typing import NDArray

from chatcache.model.noise import draw_keys
from chatcache.sched.plan import F32, I32, Draws

NUM_FIELDS = fields.NUM_FIELDS


def limits(draws: Draws, vocab_size: int) -> tuple[I32, F32, F32]:
    """Return (top_k, top_p, log of min_p) of each draw, 0, 1 and -inf where they drop nothing."""
    warm = draws.temperature > 0
    top_k = np.where(warm & (draws.top_k > 0) & (draws.top_k < vocab_size), draws.top_k, 0).astype(np.int32)
    top_p = np.where(warm, np.minimum(draws.top_p, 1.0), 1.0).astype(np.float32)
    with np.errstate(divide="ignore"):
        floor = np.log(np.where(warm, np.clip(draws.min_p, 0.0, 1.0), 0.0)).astype(np.float32)
    return top_k, top_p, floor


def fill_table(table: NDArray[Any], draws: Draws, rows: NDArray[np.integer[Any]], vocab_size: int) -> None:
    """Write the draws into the first columns of `table`, int32 [NUM_FIELDS, N]; they draw from `rows` [D].

    The columns after them become greedy draws from row 0. Masks, slots and targets are the caller's to add.
    """
    count = len(rows)
    table[:, count:] = 0
    for field in (fields.MASK, fields.SLOT, fields.TARGET):
        table[field.value] = -1
    used = table[:, :count]
    used[fields.ROW.value] = used[fields.RAW_ROW.value] = rows
    used[fields.KEY_LOW.value], used[fields.KEY_HIGH.value] = draw_keys(draws.seed, draws.lane, draws.position)
    used[fields.TEMPERATURE.value] = draws.temperature.astype(np.float32).view(np.int32)
    top_k, top_p, floor = limits(draws, vocab_size)
    used[fields.TOP_K.value] = top_k
    used[fields.TOP_P.value] = top_p.view(np.int32)
    used[fields.FLOOR.value] = floor.view(np.int32)
    used[fields.CUT.value] = (top_k > 0) | (top_p < 1) | (floor > -np.inf)


def has_cuts(draws: Draws, vocab_size: int) -> bool:
    """Whether any draw has a filter that can drop something."""
    top_k, top_p, floor = limits(draws, vocab_size)
    return bool(((top_k > 0) | (top_p < 1) | (floor > -np.inf)).any())


def set_slots(table: NDArray[Any], slots: NDArray[np.integer[Any]]) -> None:
    """Say where each column's token is kept for the next step. Shape: slots [N]."""
    table[fields.SLOT.value] = slots
