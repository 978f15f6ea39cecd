"""Memory for weights and activations: alignment, sharing and reuse."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from chatcache.model.host_memory import ALIGNMENT, HostArena
from chatcache.model.linear import PanelLinear, PanelLinearFactory


def test_arena_copies_are_separate_and_aligned() -> None:
    arena = HostArena()
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 2000, (60,), generator=generator).tolist()
    given = [torch.randn(size, 3, generator=generator).to(torch.bfloat16) for size in sizes]
    kept = [arena.copy(each.t()) for each in given]
    assert all(torch.equal(mine, each.t()) and mine.is_contiguous() for mine, each in zip(kept, given, strict=True))
    assert all(each.data_ptr() % ALIGNMENT == 0 for each in kept)


def test_arena_allocates_more_than_its_block_size() -> None:
    arena = HostArena()
    small, large = arena.empty((8,), torch.float32), arena.empty((70 * 2**20,), torch.uint8)
    small.fill_(1.0)
    large.fill_(7)
    assert small.sum() == 8.0 and len(large) == 70 * 2**20


def test_layers_of_a_model_share_a_block() -> None:
    make = PanelLinearFactory(has_onednn=True)
    layers = [make(torch.randn(64, 32, dtype=torch.bfloat16)) for _ in range(2)]
    first, second = (each.panels for each in layers if isinstance(each, PanelLinear))
    assert second.data_ptr() - first.data_ptr() == first.nbytes


def _growth(mib: int, *settings: str) -> int:
    """Return the bytes that a process of its own keeps of a freed block; settings hold for a whole process."""
    program = """
import resource, sys, torch
from chatcache.model import host_memory
for name in sys.argv[2:]:
    getattr(host_memory, name)()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
torch.full((8,), 1.0)
before = resident()
torch.full((int(sys.argv[1]) * 2**18,), 1.0)  # at once freed
print(resident() - before)
"""
    command = [sys.executable, "-c", program, str(mib), *settings]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.linux  # needs /proc
@pytest.mark.slow
def test_reuse_freed_memory_keeps_blocks_of_30_mib() -> None:
    assert _growth(30, "reuse_freed_memory") > 25 * 2**20
    assert _growth(30) < 5 * 2**20


@pytest.mark.linux
@pytest.mark.slow
def test_reuse_large_blocks_keeps_blocks_of_100_mib_until_the_next_model_loads() -> None:
    assert _growth(100, "reuse_freed_memory", "reuse_large_blocks") > 95 * 2**20
    assert _growth(100, "reuse_large_blocks", "reuse_freed_memory") < 5 * 2**20
