"""Launch configurations of attention: tile sizes, warps, pipeline stages and programs.

Chosen by chip, tile height and head size, never by the batch. (The batch can only change where a token's keys are
split, if it shares pages with other rows; see `work_list`.)

Compiler report (Triton 3.6, sm_90, bfloat16, pages of 16, no spills; nothing here was timed):

    tile          keys  heads, size  registers  shared bytes  programs that fit  instructions of a warp per tile
    decode   16   64    32/8, 128    168        71,680        3                  350, with 32 mma and 16 copies
    decode   16   64    16/8, 128    168        71,680        3
    shared   64   64    32/8, 128    254        114,688       2
    shared   64   64    16/8, 128    254        114,688       2
    prefill 128   64    32/8, 128    250        131,072       1                  382, with 12 wgmma and 8 copies
    prefill 128   64    16/8, 128    244        131,072       1

Decode on an H100: 64 rows of 1,024 tokens take 107 to 121 us with one to eight programs per multiprocessor and 32 to
128 keys; one row prefers 64 or 128 keys. One row of 512 keys takes 10 us, about 0.7 us for each of its 8 tiles:
probably barriers and chains of products, as one program alone does not fill the memory. So a step of few keys needs
short items, and one of many keys needs no merges (`work_list.choose_split`).
Prefill: 4.2 MFLOP for a tile, 1,024 cycles of matrix units, next to 800 cycles of issue slots for everything else;
64 keys take about 2,700 cycles, in tiles of 64 or of 128. A product of values that waits one turn, so that it runs
during the next softmax (as in FlashAttention-3), reached 389 TFLOP/s, an earlier state without it 432.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

NOT_MEASURED: Final = "not measured"


@dataclass(frozen=True, slots=True)
class Config:
    """Launch configuration of tiles of `rows` queries.

    block_n: keys of a tile. programs: per multiprocessor; more than fit at once leave the balance to the device's
    scheduler. unmasked_loop: keys that every query sees have a loop without masks. max_registers: per thread, where the
    assembler would otherwise spill. measured: when and on which chip, or "not measured".
    """

    rows: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    unmasked_loop: bool = False
    max_registers: int | None = None
    measured: str = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class MergeConfig:
    """Launch configuration of the merge: `block_s` states at a time; the rest as in `Config`."""

    block_s: int
    num_warps: int
    programs: int
    measured: str = NOT_MEASURED


@dataclass(frozen=True, slots=True)
class Chip:
    """Device properties that a launch depends on.

    `major`: major version of the compute capability; 0 is Triton's interpreter.
    """

    major: int
    multiprocessors: int


H100: Final = "H100, 2026-11-26"
H200: Final = "H200, 2026-11-27"
MERGE: Final = MergeConfig(block_s=32, num_warps=1, programs=8, measured=H100)

# Two-byte elements: head size -> configurations by height, lowest first
HOPPER: Final = {
    64: (
        Config(16, 64, 4, 4, programs=6, measured=H100),
        Config(32, 64, 4, 4, programs=4),
        Config(64, 32, 4, 4, programs=8, unmasked_loop=True, measured=H100),
        Config(128, 128, 8, 3, programs=8, unmasked_loop=True, measured=H100),
    ),
    128: (
        Config(16, 64, 4, 3, programs=6, measured=H100),
        Config(32, 64, 4, 3, programs=2),
        Config(64, 32, 4, 3, programs=8, unmasked_loop=True, measured=H100),
        Config(128, 64, 8, 3, programs=8, unmasked_loop=True, measured=H100),
    ),
    256: (
        Config(16, 32, 4, 4, programs=2),
        Config(32, 32, 4, 4, programs=2),
        Config(64, 32, 8, 3, programs=8, unmasked_loop=True),
    ),
    512: (
        Config(16, 32, 8, 2, programs=1),
        Config(32, 32, 8, 2, programs=1),
    ),
}
# On Blackwell, larger tiles of keys spill
BLACKWELL: Final = HOPPER | {
    64: (*HOPPER[64][:3], Config(128, 64, 8, 3, programs=8, unmasked_loop=True)),
    128: (
        *HOPPER[128][:2],
        Config(64, 32, 4, 3, programs=8, unmasked_loop=True),
        Config(128, 32, 8, 3, programs=8, unmasked_loop=True),
    ),
}
# Fits the 99 KiB of shared memory that every chip since Ampere has
SMALL_SHARED_MEMORY: Final = {
    64: (
        Config(16, 64, 4, 3, programs=4),
        Config(32, 64, 4, 3, programs=3),
        Config(64, 64, 4, 3, programs=8, unmasked_loop=True),
        Config(128, 64, 8, 3, programs=8, unmasked_loop=True),
    ),
    128: (
        Config(16, 32, 4, 3, programs=4),
        Config(32, 32, 4, 3, programs=3),
        Config(64, 32, 4, 3, programs=8, unmasked_loop=True),
        Config(128, 32, 8, 3, programs=8, unmasked_loop=True),
    ),
    256: (
        Config(16, 32, 4, 3, programs=3),
        Config(32, 32, 4, 2, programs=2),
        Config(64, 32, 8, 2, programs=8, unmasked_loop=True),
    ),
    512: (
        Config(16, 16, 8, 2, programs=1),
        Config(32, 16, 8, 2, programs=1),
    ),
}
# FP8 pages: the converted keys and values of a tile take registers
FP8_PAGES: Final = SMALL_SHARED_MEMORY | {
    64: (
        *SMALL_SHARED_MEMORY[64][:2],
        Config(64, 32, 4, 3, programs=8, unmasked_loop=True),
        Config(128, 32, 8, 3, programs=8, unmasked_loop=True),
    ),
    128: (*SMALL_SHARED_MEMORY[128][:3], Config(128, 16, 8, 3, programs=8, unmasked_loop=True)),
    256: (*SMALL_SHARED_MEMORY[256][:2], Config(64, 16, 8, 2, programs=8, unmasked_loop=True)),
}
FP8_HOPPER: Final = FP8_PAGES | {
    64: (Config(16, 64, 2, 3, programs=8, measured=H200), *FP8_PAGES[64][1:]),
    128: (
        Config(16, 64, 2, 3, programs=8, measured=H200),
        FP8_PAGES[128][1],
        Config(64, 64, 4, 3, programs=8, unmasked_loop=True, measured=H200),
        Config(128, 64, 8, 3, programs=8, unmasked_loop=True, measured=H200),
    ),
}
# float32 is multiplied exactly, without matrix units: for comparison, not for speed
FLOAT32: Final = {
    64: tuple(Config(rows, 16, 8, 2, programs=2, max_registers=128) for rows in (16, 32, 64)),
    128: tuple(Config(rows, 16, 8, 2, programs=2) for rows in (16, 32, 64)),
    256: (*(Config(rows, 16, 8, 2, programs=2) for rows in (16, 32)), Config(64, 16, 8, 1, programs=1)),
    512: (Config(16, 16, 8, 1, programs=1),),
}
INTERPRETER: Final = {
    512: (
        Config(16, 64, 1, 1, programs=1),
        *(Config(rows, 64, 1, 1, programs=1, unmasked_loop=True) for rows in (32, 64)),
    )
}


def choose_config(chip: Chip, num_queries: int, head_dim: int, itemsize: int, *, fp8_pages: bool = False) -> Config:
    """Return the launch configuration with the smallest tile that holds all queries of an item.

    If none does, the one with the largest tile: several tiles then share the work.
    Raises: ValueError for heads larger than any table entry.
    """
    for widest, configs in _table(chip, itemsize, fp8_pages).items():
        if head_dim <= widest:
            return next((config for config in configs if config.rows >= num_queries), configs[-1])
    raise ValueError(f"a head has at most 512 dimensions, not {head_dim}")


def iter_configs(chip: Chip, itemsize: int, *, fp8_pages: bool = False) -> Iterator[tuple[int, Config]]:
    """Yield (head size, configuration) for all configurations of a chip."""
    for head_dim, configs in _table(chip, itemsize, fp8_pages).items():
        yield from ((head_dim, config) for config in configs)


def _table(chip: Chip, itemsize: int, fp8_pages: bool) -> Mapping[int, tuple[Config, ...]]:
    """Return the launch configurations of a chip and the queries' element size, by maximum head size."""
    if chip.major == 0:
        return INTERPRETER
    if itemsize == 4:
        return FLOAT32
    if fp8_pages:
        return FP8_HOPPER if chip.major == 9 else FP8_PAGES
    return {9: HOPPER, 10: BLACKWELL}.get(chip.major, SMALL_SHARED_MEMORY)


@functools.cache
def get_chip(device: torch.device) -> Chip:
    """Return the chip of a device; the interpreter acts as a chip with three multiprocessors."""
    if device.type != "cuda":
        return Chip(0, 3)
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.major, properties.multi_processor_count)
