"""What to draw, as arrays. Strategies answer with the same `DrawSpec` object step after step while nothing changes for
a branch, so a decode step mostly reuses the arrays of the step before."""

from __future__ import annotations

from dataclasses import replace
from operator import is_

import numpy as np

from chatcache.decode.actions import DrawSpec
from chatcache.sched.plan import Draws, LogitEdit, LogitMask

_MASK_64 = 2**64 - 1


def draws_of(specs: list[DrawSpec], rows: list[int], positions: list[int]) -> Draws:
    """Lay out `specs`, drawn from `rows` at `positions`, as arrays. All have length D."""
    return Draws(
        row=np.array(rows, np.int32),
        width=np.array([spec.width for spec in specs], np.int32),
        seed=np.array([spec.seed & _MASK_64 for spec in specs], np.uint64),
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


class DrawArrays:
    """`draws_of` with a memory of one step. The arrays are never written again, so steps may share them."""

    def __init__(self) -> None:
        self._specs: list[DrawSpec] = []
        self._draws = draws_of([], [], [])

    def of(self, specs: list[DrawSpec], rows: list[int], positions: list[int]) -> Draws:
        if len(specs) == len(self._specs) and all(map(is_, specs, self._specs)):
            self._draws = replace(self._draws, row=np.array(rows, np.int32), position=np.array(positions, np.int32))
        else:
            self._specs, self._draws = specs, draws_of(specs, rows, positions)
        return self._draws
