"""How attention is launched: tile sizes, warps, pipeline stages and programs, in one table.

Chosen by chip, tile height and head size, never by the batch, so a token's bits do not depend on the step around it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch

UNMEASURED: Final = "not measured"


@dataclass(frozen=True, slots=True)
class Config:
    """How one tile height is carried out.

    `block_n`: keys of a tile. `programs`: of each multiprocessor; more than fit at once leave the balance to the
    device's own scheduler. `parted`: tiles that every query sees whole have a loop without masks. `measured`: when and
    on which chip, or that it was not.
    """

    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    parted: bool = False
    measured: str = UNMEASURED


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """How states are merged: `block_s` at a time; the rest as in `Config`."""

    block_s: int
    num_warps: int
    programs: int
    measured: str = UNMEASURED


MERGE: Final = MergeConfig(block_s=32, num_warps=4, programs=8)

# (rows of a tile, head size, both rounded up to what is here) -> configuration, for elements of two bytes
HOPPER: Final = {
    (16, 64): Config(64, 4, 4, programs=4),
    (16, 128): Config(32, 4, 4, programs=4),
    (16, 256): Config(32, 4, 4, programs=2),
    (32, 64): Config(64, 4, 4, programs=4),
    (32, 128): Config(64, 4, 3, programs=2),
    (32, 256): Config(32, 4, 4, programs=1),
    (64, 64): Config(64, 4, 3, programs=8, parted=True),
    (64, 128): Config(64, 4, 3, programs=8, parted=True),
    (64, 256): Config(32, 8, 3, programs=8, parted=True),
    (128, 64): Config(128, 8, 3, programs=8, parted=True),
    (128, 128): Config(64, 8, 3, programs=8, parted=True),
    (128, 256): Config(32, 8, 3, programs=8, parted=True),
}
# what fits the 99 KiB of shared memory that every chip since Ampere has
MODEST: Final = {
    (16, 64): Config(64, 4, 3, programs=4),
    (16, 128): Config(32, 4, 3, programs=4),
    (16, 256): Config(32, 4, 2, programs=2),
    (32, 64): Config(64, 4, 3, programs=3),
    (32, 128): Config(32, 4, 3, programs=3),
    (32, 256): Config(32, 4, 2, programs=2),
    (64, 64): Config(64, 4, 3, programs=8, parted=True),
    (64, 128): Config(32, 4, 3, programs=8, parted=True),
    (64, 256): Config(32, 8, 2, programs=8, parted=True),
    (128, 64): Config(64, 8, 3, programs=8, parted=True),
    (128, 128): Config(32, 8, 3, programs=8, parted=True),
    (128, 256): Config(16, 8, 2, programs=8, parted=True),
}
TABLES: Final = {8: MODEST, 9: HOPPER, 10: HOPPER, 12: MODEST}  # by major compute capability
# float32 is multiplied exactly, without matrix units: there to compare with, not to be fast
EXACT_FLOAT32: Final = {
    (rows, width): Config(16, 8, 2, programs=2) for rows in (16, 32, 64, 128) for width in (64, 128, 256)
}
INTERPRETER: Final = Config(64, 1, 1, programs=1)


def choose(device: torch.device, rows: int, head_dim: int, itemsize: int) -> Config:
    """Return how a tile of `rows` queries is carried out. Raises: ValueError for tiles or heads beyond the tables."""
    if rows > 128:
        raise ValueError(f"a tile holds at most 128 queries (members x G), not {rows}")
    if head_dim > 256:
        raise ValueError(f"a head has at most 256 dimensions, not {head_dim}")
    if device.type == "cpu":
        return INTERPRETER if rows <= 32 else Config(64, 1, 1, programs=1, parted=True)
    major, _ = capability(device)
    return look_up(major, rows, head_dim, itemsize)


def look_up(major: int, rows: int, head_dim: int, itemsize: int) -> Config:
    """Return the entry of a chip of that major compute capability."""
    table = EXACT_FLOAT32 if itemsize == 4 else TABLES.get(major, MODEST)
    return table[rows, 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256]


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; the interpreter acts as if it had three."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
