"""What to draw, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chatcache.decode.actions import DrawSpec
from chatcache.sched.plan import I32, Draws, LogitEdit, LogitMask

MASK_64 = 2**64 - 1
_ARRAYS = ("row", "width", "seed", "lane", "position", "temperature", "top_k", "top_p", "min_p", "num_top")


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
    arrays = {name: np.concatenate((getattr(first, name), getattr(second, name))) for name in _ARRAYS}
    return Draws(**arrays, edits=first.edits, masks=first.masks)


class DrawTable:
    """One spec without edit and mask per slot, ready to be gathered."""

    def __init__(self, num_slots: int) -> None:
        self._draws = draws_of([DrawSpec()] * num_slots, [0] * num_slots, [0] * num_slots)

    def put(self, slot: int, spec: DrawSpec) -> None:
        table = self._draws
        table.width[slot] = spec.width
        table.seed[slot] = spec.seed & MASK_64
        table.lane[slot] = spec.lane
        table.temperature[slot] = spec.temperature
        table.top_k[slot] = spec.top_k
        table.top_p[slot] = spec.top_p
        table.min_p[slot] = spec.min_p
        table.num_top[slot] = spec.num_top

    def take(self, slots: NDArray[np.intp]) -> Draws:
        """Return the specs of `slots` as draws of rows and positions yet unknown."""
        return Draws(**{name: getattr(self._draws, name)[slots] for name in _ARRAYS})


def placed(draws: Draws, row: I32, position: I32) -> Draws:
    """Return the same draws from other rows and positions; they share all other arrays."""
    return Draws(
        row,
        draws.width,
        draws.seed,
        draws.lane,
        position,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        draws.num_top,
        draws.edits,
        draws.masks,
    )
