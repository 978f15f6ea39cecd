"""triton.rope_write and write_pages against reference.py: heads and dimensions of any number, slices of one projection.

Pages hold random bits beforehand; afterwards those that no token was written to are the same to the bit.
"""

from __future__ import annotations

import pytest
import torch
from chatcache_kernels import reference, triton
from chatcache_kernels.types import HeadNorms, KVPages
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_memory", "fresh_random")

STEP = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
NUM_PAGES = 5


def stores(page_size: int, heads: int, dim: int, dtype: torch.dtype, device: str) -> tuple[KVPages, KVPages]:
    """Return the reference's store and triton's, with the same random numbers in every slot."""
    with torch.device(device):
        plain, paged = (b.allocate_pages(2, NUM_PAGES, page_size, heads, dim, dtype) for b in (reference, triton))
        for ours, theirs in ((plain.k, paged.k), (plain.v, paged.v)):
            ours.copy_(torch.randn(ours.shape))
            theirs.copy_(ours.transpose(2, 3))
    return plain, paged


def same_bits(plain: KVPages, paged: KVPages, *, keys_within: float = 0.0) -> None:
    """Compare every slot of every layer; keys, that were normed, up to a step."""
    assert torch.equal(paged.v.transpose(2, 3), plain.v)
    if keys_within:
        torch.testing.assert_close(paged.k.transpose(2, 3), plain.k, atol=keys_within, rtol=keys_within)
        assert ((paged.k.transpose(2, 3) != plain.k).float().mean() < 0.01) or plain.k.dtype == torch.float32
    else:
        assert torch.equal(paged.k.transpose(2, 3), plain.k)


def projections(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return q, k, v: slices of one tensor [T, H + 2 * Hkv, D]."""
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).to(dtype)
    return list(torch.split(qkv, [heads, kv_heads, kv_heads], 1))


SHAPES = [  # heads, key heads, D, C, page size, tokens
    (9, 3, 64, 32, 16, 5), (16, 8, 128, 64, 16, 3), (32, 8, 128, 64, 64, 1), (71, 1, 64, 32, 8, 2),
    (1, 1, 64, 8, 16, 4), (4, 2, 80, 40, 16, 3), (6, 2, 96, 24, 32, 3), (3, 3, 24, 4, 8, 7), (5, 5, 192, 96, 16, 2),
    (2, 1, 256, 128, 16, 2), (4, 4, 128, 0, 16, 2), (40, 40, 128, 64, 16, 1), (4, 2, 64, 32, 16, 0),
]  # fmt: skip


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_write(shape: tuple[int, ...], norm: bool, triton_device: str) -> None:
    heads, kv_heads, dim, half, page_size, tokens = shape
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        plain, paged = stores(page_size, kv_heads, dim, dtype, triton_device)
        q, k, v = projections(tokens, heads, kv_heads, dim, dtype, triton_device)
        angle = torch.randn(tokens, half, device=triton_device)
        slots = torch.randperm(NUM_PAGES * page_size, device=triton_device)[:tokens]
        weights = torch.randn(2, dim, device=triton_device).to(dtype)
        norms = HeadNorms(weights[0], weights[1], 1e-6) if norm else None
        before = q.clone(), k.clone(), v.clone()
        got = triton.rope_write(q, k, v, angle.cos(), angle.sin(), paged, 1, slots, norms)
        expected = reference.rope_write(q, k, v, angle.cos(), angle.sin(), plain, 1, slots, norms)
        if norm:
            torch.testing.assert_close(got, expected, atol=STEP[dtype], rtol=STEP[dtype])
        else:
            assert torch.equal(got, expected)
        same_bits(plain, paged, keys_within=STEP[dtype] if norm else 0.0)
        assert all(torch.equal(now, then) for now, then in zip((q, k, v), before, strict=True))


def test_normed_heads_round_where_the_reference_does(triton_device: str) -> None:
    """Few of many numbers differ, though leaving out one of the three roundings changes many."""
    plain, paged = stores(16, 8, 128, torch.bfloat16, triton_device)
    q, k, v = projections(8, 16, 8, 128, torch.bfloat16, triton_device)
    angle, slots = torch.randn(8, 64, device=triton_device), torch.arange(3, 11, device=triton_device)
    weights = torch.randn(2, 128, device=triton_device).bfloat16()
    norms = HeadNorms(weights[0], weights[1], 1e-6)
    got = triton.rope_write(q, k, v, angle.cos(), angle.sin(), paged, 1, slots, norms)
    expected = reference.rope_write(q, k, v, angle.cos(), angle.sin(), plain, 1, slots, norms)
    assert (got != expected).float().mean() < 0.01
    same_bits(plain, paged, keys_within=STEP[torch.bfloat16])


def test_norm_weights_of_another_dtype_take_the_plain_path(triton_device: str) -> None:
    plain, paged = stores(16, 2, 64, torch.float32, triton_device)
    q, k, v = projections(3, 4, 2, 64, torch.bfloat16, triton_device)
    angle, slots = torch.randn(3, 32, device=triton_device), torch.tensor([70, 2, 33], device=triton_device)
    norms = HeadNorms(torch.randn(64, device=triton_device), torch.randn(64, device=triton_device), 1e-5)
    got = triton.rope_write(q, k, v, angle.cos(), angle.sin(), paged, 0, slots, norms)
    expected = reference.rope_write(q, k, v, angle.cos(), angle.sin(), plain, 0, slots, norms)
    assert got.dtype == expected.dtype == torch.float32
    assert torch.equal(got, expected)
    same_bits(plain, paged)


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=str)
def test_pages_of_another_dtype(kinds: tuple[torch.dtype, torch.dtype], width: torch.dtype, triton_device: str) -> None:
    dtype, pages_dtype = kinds
    plain, paged = stores(16, 2, 64, pages_dtype, triton_device)
    q, k, v = projections(4, 6, 2, 64, dtype, triton_device)
    angle = torch.randn(4, 16, device=triton_device)
    slots = torch.tensor([40, 3, 17, 63], device=triton_device).to(width)
    got = triton.rope_write(q, k, v, angle.cos(), angle.sin(), paged, 1, slots)
    assert torch.equal(got, reference.rope_write(q, k, v, angle.cos(), angle.sin(), plain, 1, slots.long()))
    triton.write_pages(paged, 0, k, v, slots)
    reference.write_pages(plain, 0, k, v, slots.long())
    same_bits(plain, paged)


@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "tokens"),
    [(3, 64, 16, 6), (1, 40, 8, 4), (71, 64, 64, 2), (8, 256, 16, 3), (2, 8, 8, 0)],
)
def test_write_pages(heads: int, dim: int, page_size: int, tokens: int, triton_device: str) -> None:
    """Heads lie anywhere: as a projection gives them, or tokens after heads, as a transformers model does."""
    for dtype in (torch.float32, torch.bfloat16):
        plain, paged = stores(page_size, heads, dim, dtype, triton_device)
        k = torch.randn(heads, tokens, dim, device=triton_device).to(dtype).transpose(0, 1)
        v = torch.randn(tokens, heads, 2 * dim, device=triton_device).to(dtype)[..., ::2]
        slots = torch.randperm(NUM_PAGES * page_size, device=triton_device)[:tokens]
        triton.write_pages(paged, 1, k, v, slots)
        reference.write_pages(plain, 1, k, v, slots)
        same_bits(plain, paged)
        got, expected = (b.read_pages(p, 1, slots) for b, p in ((triton, paged), (reference, plain)))
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
