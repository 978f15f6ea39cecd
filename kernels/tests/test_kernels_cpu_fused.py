"""The cpu backend's fused operations against reference.py, on widths and heads that fit registers and that do not."""

from __future__ import annotations

import pytest
import torch
from chatcache_kernels import cpu, reference
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(got: Tensor, expected: Tensor) -> None:
    """Compare up to one rounding of the dtype (reference rounds once more in between)."""
    step = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}[got.dtype]
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.float(), expected.float(), atol=step, rtol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (33, 48), (7, 20), (0, 32), (300, 128)])
def test_norms(dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = (torch.randn(2, rows, width) * 3).to(dtype).unbind(0)
    weight = torch.randn(width).to(dtype)
    close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    normed, summed = cpu.add_rms_norm(x, residual, weight, 1e-3)
    expected, expected_sum = reference.add_rms_norm(x, residual, weight, 1e-3)
    close(normed, expected)
    assert torch.equal(summed, expected_sum)


def test_rows_are_shared_among_threads() -> None:
    torch.set_num_threads(3)
    x = torch.randn(700, 128)
    assert torch.equal(cpu.silu_mul(x), torch.cat([cpu.silu_mul(row[None]) for row in x]))


def test_norm_of_heads_that_are_slices() -> None:
    qkv = torch.randn(5, 12, 64)
    weight = torch.randn(64)
    close(cpu.rms_norm(qkv[:, 3:9], weight, 1e-6), reference.rms_norm(qkv[:, 3:9], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (33, 48), (7, 20), (0, 32)])
def test_silu_mul(dtype: torch.dtype, rows: int, width: int) -> None:
    x = (torch.randn(rows, 2 * width) * 4).to(dtype)
    close(cpu.silu_mul(x), reference.silu_mul(x))


def test_silu_mul_of_extreme_gates() -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e30]).repeat(2)
    x = torch.cat((gate, torch.ones(16)))[None]
    close(cpu.silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (80, 40), (64, 16), (96, 32), (24, 4), (128, 0)])
@pytest.mark.parametrize("page_size", [8, 16, 64])
def test_rope_write(dtype: torch.dtype, head_dim: int, half: int, page_size: int) -> None:
    tokens, heads, kv_heads = 37, 6, 2
    stores = [b.allocate_pages(2, 9, page_size, kv_heads, head_dim, dtype) for b in (reference, cpu)]
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    angle = torch.randn(tokens, half)
    slots = torch.randperm(9 * page_size)[:tokens]
    turned = []
    for backend, pages in zip((reference, cpu), stores, strict=True):
        turned.append(backend.rope_write(q, k, v, angle.cos(), angle.sin(), pages, 1, slots))
    close(turned[1], turned[0])
    expected, got = (b.read_pages(p, 1, slots) for b, p in zip((reference, cpu), stores, strict=True))
    close(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_writes_into_pages_of_another_dtype() -> None:
    pages = cpu.allocate_pages(1, 4, 16, 2, 64, torch.bfloat16)
    k, v = torch.randn(2, 5, 2, 64).unbind(0)
    slots = torch.tensor([40, 3, 17, 63, 16], dtype=torch.int32)
    cpu.write_pages(pages, 0, k, v, slots)
    assert torch.equal(torch.stack(cpu.read_pages(pages, 0, slots)), torch.stack((k, v)).bfloat16())
    none = torch.zeros(5, 0)
    cpu.rope_write(k, k, v, none, none, pages, 0, slots)
    assert torch.equal(torch.stack(cpu.read_pages(pages, 0, slots)), torch.stack((k, v)).bfloat16())
