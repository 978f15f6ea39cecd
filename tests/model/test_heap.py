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
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
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


@pytest.mark.linux  # needs /proc
@pytest.mark.slow
def test_reuse_freed_memory_keeps_memory_in_the_process() -> None:
    """In a process of its own: the setting stays for good."""
    program = """
import resource, sys, torch
from chatcache.model.host_memory import reuse_freed_memory
if sys.argv[1] == "keep":
    reuse_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
torch.full((8,), 1.0)
before = resident()
torch.full((30 * 2**18,), 1.0)  # 30 MiB, at once freed
print(resident() - before)
"""
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", program, mode], capture_output=True, text=True, check=True).stdout)
        for mode in ("keep", "return")
    )
    assert kept > 25 * 2**20 > 5 * 2**20 > returned
