"""What to draw, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatcache.decode.actions import DrawSpec
from chatcache.sched.plan import I32, Draws, LogitEdit, LogitMask

MASK_64 = 2**64 - 1


def draws_of(specs: Sequence[DrawSpec], rows: Sequence[int], positions: Sequence[int]) -> Draws:
    """Lay out `specs`, drawn from `rows` at `positions`, as arrays. All have length D."""
    return Draws(
        row=np.array(rows, np.int32),
        width=np.array([spec.width for spec in specs], np.int32),
        seed=np.array([spec.seed & MASK_64 for spec in specs], np.uint64),
        lane=np.array([spec.lane for spec in specs], np.int32),
        position=np.array(positions, np.int32),
        temperature=np.array([spec.temperature for spec in specs], np.float32),
        top_k=np.array([spec.top_k for spec in specs], np.int32),
        top_p=np.array([spec.top_p for spec in specs], np.float32),
        min_p=np.array([spec.min_p for spec in specs], np.float32),
        num_top=np.array([spec.num_top for spec in specs], np.int32),
        edits=tuple(LogitEdit(draw, *spec.edit) for draw, spec in enumerate(specs) if spec.edit is not None),
        masks=tuple(LogitMask(draw, spec.mask) for draw, spec in enumerate(specs) if spec.mask is not None),
    )


def joined(first: Draws, second: Draws) -> Draws:
    """Put `second`, which has neither edits nor masks, after `first`."""
    pairs = zip(arrays_of(first), arrays_of(second), strict=True)
    return replace(_draws([np.concatenate(pair) for pair in pairs]), edits=first.edits, masks=first.masks)


def placed(draws: Draws, row: I32, position: I32) -> Draws:
    """Return draws without edits and masks from other rows and positions; they share all other arrays."""
    _, width, seed, lane, _, *rest = arrays_of(draws)
    return _draws((row, width, seed, lane, position, *rest))


def some_of(draws: Draws, which: I32) -> Draws:
    """Return these of the draws, without edits and masks, each from a row of its own."""
    _, *rest = arrays_of(draws)
    return _draws((np.arange(len(which), dtype=np.int32), *(array[which] for array in rest)))


def arrays_of(draws: Draws) -> tuple[NDArray[Any], ...]:
    """Return the arrays in the order in which `Draws` takes them."""
    return (
        *(draws.row, draws.width, draws.seed, draws.lane, draws.position),
        *(draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.num_top),
    )


def _draws(arrays: Sequence[NDArray[Any]]) -> Draws:
    row, width, seed, lane, position, temperature, top_k, top_p, min_p, num_top = arrays
    return Draws(row, width, seed, lane, position, temperature, top_k, top_p, min_p, num_top)


# A table of draws: one `Draws` whose cells are written one by one, and from which plans are copied.


def blank_draws(num_draws: int) -> Draws:
    return draws_of([DrawSpec()] * num_draws, [0] * num_draws, [0] * num_draws)


def put(table: Draws, place: int, spec: DrawSpec) -> None:
    """Write a spec without edit and mask into a table."""
    table.width[place] = spec.width
    table.seed[place] = spec.seed & MASK_64
    table.lane[place] = spec.lane
    table.temperature[place] = spec.temperature
    table.top_k[place] = spec.top_k
    table.top_p[place] = spec.top_p
    table.min_p[place] = spec.min_p
    table.num_top[place] = spec.num_top


def first_of(table: Draws, count: int) -> Draws:
    """Copy the first `count` draws of a table."""
    return _draws([array[:count].copy() for array in arrays_of(table)])
