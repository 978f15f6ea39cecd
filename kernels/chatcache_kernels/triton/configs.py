"""How attention is launched: tile sizes, warps, pipeline stages and programs, in one table.

Chosen by chip, tile height and head size, never by the batch. What still depends on a token's company is where its keys
are cut, if it shares pages with others (`work.py`).

What the compiler says of them (Triton 3.6, sm_90, bfloat16, pages of 16, no spill in any; nothing here was timed):

    tile          keys  heads, size  registers  shared bytes  programs that fit  instructions of a warp per tile
    decode   16   64    32/8, 128    168        71,680        3                  350, with 32 mma and 16 copies
    decode   16   64    16/8, 128    168        71,680        3
    shared   64   64    32/8, 128    254        114,688       2
    shared   64   64    16/8, 128    254        114,688       2
    prompt  128   64    32/8, 128    250        131,072       1                  382, with 12 wgmma and 8 copies
    prompt  128   64    16/8, 128    244        131,072       1

Bytes in flight: reading 4.3 TB/s at 800 ns needs 3.4 MB on their way, 26 KB of each of 132 multiprocessors. A decode
program holds two tiles of 64 keys and values of 128 bfloat16, 32 KB each; one or both are on their way. So even a lone
program of a multiprocessor (32 to 64 KB) covers the latency, and the three that fit (96 to 192 KB) leave room for the
time that a tile takes to compute. Instructions: 350 x 4 warps on 4 schedulers for each 32 KB, which take 1,000 ns or
1,750 cycles to arrive at that rate: a fifth of the issue slots.
Prompts: 4.2 MFLOP for a tile, 1,024 cycles of matrix units, beside 764 cycles of issue slots for all else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

UNMEASURED: Final = "not measured"


@dataclass(frozen=True, slots=True)
class Config:
    """How tiles of `rows` queries are carried out.

    `block_n`: keys of a tile. `programs`: of each multiprocessor; more than fit at once leave the balance to the
    device's own scheduler. `parted`: keys that every query sees have a loop without masks. `max_registers`: of a
    thread, where the assembler would rather spill than use more. `measured`: when and on which chip, or "not measured".
    """

    rows: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    parted: bool = False
    max_registers: int | None = None
    measured: str = UNMEASURED


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """How states are merged: `block_s` at a time; the rest as in `Config`."""

    block_s: int
    num_warps: int
    programs: int
    measured: str = UNMEASURED


@dataclass(frozen=True, slots=True)
class Chip:
    """What a launch must know of a device. `major`: of its compute capability; 0 is the interpreter."""

    major: int
    multiprocessors: int


MERGE: Final = MergeConfig(block_s=32, num_warps=4, programs=8)

# Elements of two bytes: head size -> configurations by height, lowest first
HOPPER: Final = {
    64: (
        Config(16, 64, 4, 4, programs=4),
        Config(32, 64, 4, 4, programs=4),
        Config(64, 64, 4, 3, programs=8, parted=True),
        Config(128, 128, 8, 3, programs=8, parted=True),
    ),
    128: (
        Config(16, 64, 4, 3, programs=3),
        Config(32, 64, 4, 3, programs=2),
        Config(64, 64, 4, 3, programs=8, parted=True),
        Config(128, 64, 8, 3, programs=8, parted=True),
    ),
    256: (
        Config(16, 32, 4, 4, programs=2),
        Config(32, 32, 4, 4, programs=2),
        Config(64, 32, 8, 3, programs=8, parted=True),
    ),
}
# Compiled for Hopper's successor, taller tiles of keys spill
BLACKWELL: Final = HOPPER | {
    64: (*HOPPER[64][:3], Config(128, 64, 8, 3, programs=8, parted=True)),
    128: (
        *HOPPER[128][:2],
        Config(64, 32, 4, 3, programs=8, parted=True),
        Config(128, 32, 8, 3, programs=8, parted=True),
    ),
}
# What fits the 99 KiB of shared memory that every chip since Ampere has
MODEST: Final = {
    64: (
        Config(16, 64, 4, 3, programs=4),
        Config(32, 64, 4, 3, programs=3),
        Config(64, 64, 4, 3, programs=8, parted=True),
        Config(128, 64, 8, 3, programs=8, parted=True),
    ),
    128: (
        Config(16, 32, 4, 3, programs=4),
        Config(32, 32, 4, 3, programs=3),
        Config(64, 32, 4, 3, programs=8, parted=True),
        Config(128, 32, 8, 3, programs=8, parted=True),
    ),
    256: (
        Config(16, 32, 4, 3, programs=3),
        Config(32, 32, 4, 2, programs=2),
        Config(64, 32, 8, 2, programs=8, parted=True),
    ),
}
# float32 is multiplied exactly, without matrix units: there to compare with, not to be fast
FLOAT32: Final = {
    64: tuple(Config(rows, 16, 8, 2, programs=2, max_registers=128) for rows in (16, 32, 64)),
    128: tuple(Config(rows, 16, 8, 2, programs=2) for rows in (16, 32, 64)),
    256: tuple(Config(rows, 16, 8, 2, programs=2) for rows in (16, 32, 64)),
}
INTERPRETER: Final = {
    256: (Config(16, 64, 1, 1, programs=1), *(Config(rows, 64, 1, 1, programs=1, parted=True) for rows in (32, 64)))
}


def choose(chip: Chip, num_queries: int, head_dim: int, itemsize: int) -> Config:
    """Return the lowest tile that holds all queries, or the tallest there is: several then share the work.

    Raises: ValueError for heads larger than any table says.
    """
    for widest, configs in _table(chip, itemsize).items():
        if head_dim <= widest:
            return next((config for config in configs if config.rows >= num_queries), configs[-1])
    raise ValueError(f"a head has at most 256 dimensions, not {head_dim}")


def configs_of(chip: Chip, itemsize: int) -> Iterator[tuple[int, Config]]:
    """Yield all configurations of a chip, each with its head size."""
    for head_dim, configs in _table(chip, itemsize).items():
        yield from ((head_dim, config) for config in configs)


def _table(chip: Chip, itemsize: int) -> Mapping[int, tuple[Config, ...]]:
    if chip.major == 0:
        return INTERPRETER
    if itemsize == 4:
        return FLOAT32
    return {9: HOPPER, 10: BLACKWELL}.get(chip.major, MODEST)


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """Return the chip of a device; the interpreter acts as if it had three multiprocessors."""
    if device.type != "cuda":
        return Chip(0, 3)
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.major, properties.multi_processor_count)
