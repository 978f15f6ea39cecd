"""What a sampling launch draws from, and in which portions."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from .launch import next_power_of_2


@dataclass(frozen=True, slots=True)
class Launches:
    """How the kernels are launched; not measured.

    chunk: tokens that a program of a draw looks at. block: tokens at a time of a program that looks for a cut, and goes
    over its whole row. rows: draws that a program works for.
    """

    chunk: int = 2048
    warps: int = 4
    block: int = 4096
    cut_warps: int = 16
    rows: int = 64 if triton.knobs.runtime.interpret else 1  # the interpreter takes as long for one as for many


@dataclass(frozen=True, slots=True)
class Draws:
    """What a launch draws from. `cuts`: whether any draw has a CUT.

    Shapes: x [U, V] as drawn from, raw [U', V] as reported (x itself, if nothing is edited), both with dense rows; base
    int32 [V], the hashed token ids; table int32 [NUM_FIELDS, N] (`sampling_rows`); words int32 [M, V / 32] or None.
    """

    x: Tensor
    raw: Tensor
    base: Tensor
    table: Tensor
    words: Tensor | None
    cuts: bool
    launches: Launches = Launches()

    @property
    def num_draws(self) -> int:
        return self.table.shape[1]

    @property
    def chunk(self) -> int:
        return min(self.launches.chunk, next_power_of_2(self.x.shape[1]))

    @property
    def masked(self) -> bool:
        return self.words is not None

    @property
    def warps(self) -> int:
        """Return the warps of a draw's programs; masks take registers, so more of them share a chunk."""
        return self.launches.warps * (2 if self.masked else 1)

    @property
    def block(self) -> int:
        return min(self.launches.block // (2 if self.masked else 1), next_power_of_2(self.x.shape[1]))

    @property
    def cut_warps(self) -> int:
        return self.launches.cut_warps // (2 if self.masked else 1)

    @property
    def num_chunks(self) -> int:
        return -(-self.x.shape[1] // self.chunk)

    @property
    def num_programs(self) -> int:
        return -(-self.num_draws // self.launches.rows)

    @property
    def mask_words(self) -> Tensor:
        """Return the words of masks, or anything where there are none."""
        return self.base if self.words is None else self.words
