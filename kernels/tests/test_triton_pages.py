"""Page copies and swaps of the triton backend are bit-identical and change nothing else."""

from __future__ import annotations

import mmap
import random

import numpy as np
import pytest
import torch
from chatcache_kernels import reference, triton
from chatcache_kernels.fp8 import DTYPE as FP8
from chatcache_kernels.triton import pages as triton_pages
from chatcache_kernels.types import HostPages, KVPages
from torch import Tensor

MAP_NORESERVE = 0x4000  # Linux; mmap defines it from Python 3.13 on

pytestmark = pytest.mark.usefixtures("poisoned_memory", "fresh_random")

# layers, page size, heads, D: pages of a few words, of many blocks, and of no round number
SHAPES = [(3, 16, 3, 64), (2, 8, 8, 128), (5, 64, 1, 80), (1, 16, 5, 24), (2, 32, 2, 256)]


def make_store(shape: tuple[int, int, int, int], num_pages: int, dtype: torch.dtype, device: str) -> KVPages:
    """Return a store of random bits, including NaNs of all kinds."""
    layers, page_size, heads, dim = shape
    with torch.device(device):
        pages = triton.allocate_pages(layers, num_pages, page_size, heads, dim, dtype)
    assert not to_bits(pages.k).any() and not to_bits(pages.v).any()
    for memory in (pages.k, pages.v):
        to_bits(memory).random_(-(2**31), 2**31 - 1)
    return pages


def to_bits(memory: Tensor) -> Tensor:
    """Return the memory as int32, so that NaN equals NaN."""
    return memory.view(torch.int32)


def snapshot(pages: KVPages) -> tuple[Tensor, Tensor]:
    return to_bits(pages.k).clone(), to_bits(pages.v).clone()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_copy_pages_equals_reference(shape: tuple[int, int, int, int], dtype: torch.dtype, triton_device: str) -> None:
    pages = make_store(shape, 9, dtype, triton_device)
    before = snapshot(pages)
    order = random.sample(range(1, 9), 8)
    pairs = [(order[i % 3], order[3 + i]) for i in range(5)]  # one page may have several copies
    triton.copy_pages(pages, torch.tensor(pairs, dtype=torch.int32, device=triton_device))
    at = list(range(9))
    for source, target in pairs:
        at[target] = source
    for old, memory in zip(before, (pages.k, pages.v), strict=True):
        assert torch.equal(to_bits(memory), old[:, at])


def test_copy_pages_without_copies_changes_nothing(triton_device: str) -> None:
    pages = make_store(SHAPES[0], 3, torch.bfloat16, triton_device)
    before = snapshot(pages)
    nothing = torch.zeros(0, 2, dtype=torch.int32)
    host = HostPages.allocate(pages, 2)
    triton.copy_pages(pages, nothing.to(triton_device))
    triton.swap_out(pages, host, nothing)
    triton.swap_in(pages, host, nothing)
    assert torch.equal(to_bits(pages.k), before[0]) and torch.equal(to_bits(pages.v), before[1])


def test_copied_pages_read_the_same_tokens(triton_device: str) -> None:
    with torch.device(triton_device):
        pages = triton.allocate_pages(2, 6, 16, 3, 64, torch.bfloat16)
        k, v = torch.randn(2, 16, 3, 64).bfloat16().unbind(0)
        triton.write_pages(pages, 1, k, v, torch.arange(32, 48))
        triton.copy_pages(pages, torch.tensor([[2, 5]], dtype=torch.int32))
        got = triton.read_pages(pages, 1, torch.arange(80, 96))
    assert torch.equal(got[0], k) and torch.equal(got[1], v)


@pytest.mark.parametrize("staged", [1, 3, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.slow
def test_swap_out_and_in_equals_reference(
    shape: tuple[int, int, int, int], staged: int, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swap pages out and into other pages, with staging buffers of one, three and all pages."""
    pages = make_store(shape, 12, random.choice((torch.float32, torch.bfloat16, torch.float16, FP8)), triton_device)
    monkeypatch.setattr(triton_pages, "STAGE_BYTES", staged * pages.page_bytes)
    before = snapshot(pages)
    host = HostPages.allocate(pages, 9)
    for memory in host.tensors:
        to_bits(memory).fill_(77)
    leaving, places = random.sample(range(12), 6), random.sample(range(9), 6)
    triton.swap_out(pages, host, torch.tensor(list(zip(leaving, places, strict=True)), dtype=torch.int32))
    synchronize(triton_device)
    for old, memory in zip(before, host.tensors, strict=True):
        for page, place in zip(leaving, places, strict=True):
            assert torch.equal(to_bits(memory)[place], old[:, page].cpu())
        assert (to_bits(memory)[[place for place in range(9) if place not in places]] == 77).all()
    back = [*places, places[0], places[3]]
    targets = random.sample(range(12), 8)
    triton.swap_in(pages, host, torch.tensor(list(zip(back, targets, strict=True)), dtype=torch.int32))
    at = list(range(12))
    for place, target in zip(back, targets, strict=True):
        at[target] = leaving[places.index(place)]
    for old, memory in zip(before, (pages.k, pages.v), strict=True):
        assert torch.equal(to_bits(memory), old[:, at])


def test_consecutive_swaps_see_each_other(triton_device: str) -> None:
    """Queue out, in, out to the same host pages, in; the result equals running each in turn."""
    shape = (2, 16, 2, 64)
    pages = make_store(shape, 8, torch.bfloat16, triton_device)
    with torch.device(triton_device):
        plain = reference.allocate_pages(*shape[:1], 8, *shape[1:], torch.bfloat16)
    plain.k.copy_(pages.k.transpose(2, 3)), plain.v.copy_(pages.v.transpose(2, 3))
    ours, theirs = HostPages.allocate(pages, 4), HostPages.allocate(plain, 4)
    for kept in (*ours.tensors, *theirs.tensors):
        to_bits(kept).fill_(77)
    for _ in range(4):
        count = random.randrange(1, 5)
        leaving, places = random.sample(range(8), count), random.sample(range(4), count)
        returning = random.sample(range(8), count)
        out, back = (
            torch.tensor(list(zip(a, b, strict=True)), dtype=torch.int32)
            for a, b in ((leaving, places), (places, returning))
        )
        for backend, memory, host in ((triton, pages, ours), (reference, plain, theirs)):
            backend.swap_out(memory, host, out)
            backend.swap_in(memory, host, back)
    synchronize(triton_device)
    for a, b in zip((*pages.tensors, *ours.tensors), (*plain.tensors, *theirs.tensors), strict=True):
        assert torch.equal(to_bits(a.transpose(2, 3).contiguous()), to_bits(b))


def test_consecutive_host_pages_are_one_transfer() -> None:
    assert list(triton_pages._consecutive_runs(np.array([2, 3, 4, 8, 10, 11]))) == [(0, 3), (3, 4), (4, 6)]
    assert list(triton_pages._consecutive_runs(np.array([5]))) == [(0, 1)]


def test_swap_plan_on_the_device_is_accepted(triton_device: str) -> None:
    pages = make_store(SHAPES[0], 4, torch.bfloat16, triton_device)
    before, host = snapshot(pages), HostPages.allocate(pages, 2)
    triton.swap_out(pages, host, torch.tensor([[3, 1]], device=triton_device))
    triton.swap_in(pages, host, torch.tensor([[1, 2]], device=triton_device))
    assert torch.equal(to_bits(pages.k), before[0][:, [0, 1, 3, 3]])


def make_huge_store(num_pages: int, device: str) -> KVPages:
    """Return a store of 3 layers whose offsets need more than 32 bits.

    K and V are the same memory.
    """
    num_bytes = 3 * num_pages * 64 * 256 * 2
    if device == "cuda":
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    else:  # reserved addresses without memory
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
    both = memory.view(torch.bfloat16).view(3, num_pages, 1, 64, 256)
    return KVPages(both, both, 64, 1, 256)


def test_store_over_2_31_elements_is_addressed(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the last page of the last layer, where offsets in words exceed 2^31."""
    if triton_device == "cpu":  # the interpreter writes back whole stores, though it works in place
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    last = 132_000 - 1
    pages = make_huge_store(last + 1, triton_device)
    assert pages.k.stride(0) > 2**31  # in int32 words half of it: two layers are beyond 2^31, too
    x, angle = torch.randn(1, 1, 256, device=triton_device).bfloat16(), torch.zeros(1, 128, device=triton_device)
    slots = torch.tensor([last * 64 + 5], device=triton_device)
    triton.rope_write(x, x, x, angle.cos(), angle.sin(), pages, 2, slots)
    assert torch.equal(pages.k[2, last, 0, 5], x[0, 0])
    triton.write_pages(pages, 2, 2 * x, 2 * x, slots + 1)
    assert torch.equal(pages.k[2, last, 0, 6], 2 * x[0, 0])
    triton.copy_pages(pages, torch.tensor([[last, last - 1], [last, 3]], dtype=torch.int32, device=triton_device))
    for page in (last - 1, 3):
        assert torch.equal(pages.k[2, page], pages.k[2, last])
