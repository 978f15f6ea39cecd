"""Triton norms, activation, rope_write and write_pages against `reference`.

Pages hold random bits before a test; slots that no token was written to must be bit-identical afterwards.
"""

from __future__ import annotations

import pytest
import torch
from chatcache_kernels import reference, triton
from chatcache_kernels.fp8 import DTYPE as FP8
from chatcache_kernels.types import HeadNorms, KVPages
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_memory", "fresh_random")


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FUSED_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
FUSED_SHAPES = [(1, 576), (33, 48), (7, 20), (0, 32), (2, 1024), (3, 1536), (40, 128), (17, 64), (1, 1), (1, 5120)]


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Compare up to one last bit, which few numbers may miss since sums have another order.

    Numbers that are rounded twice, before and after the weight, may differ by two.
    """
    assert got.dtype == expected.dtype and got.shape == expected.shape
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=2 * FUSED_TOLERANCE[got.dtype])
    if got.dtype != torch.float32 and got.numel() > 1000:
        assert (got != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), FUSED_SHAPES)
def test_rms_norm_equals_reference(dtype: torch.dtype, rows: int, width: int, triton_device: str) -> None:
    x, residual = (torch.randn(2, rows, width, device=triton_device) * 3).to(dtype).unbind(0)
    weight = torch.randn(width, device=triton_device).to(dtype)
    before = x.clone(), residual.clone()
    assert_close(triton.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    normed, summed = triton.add_rms_norm(x, residual, weight, 1e-3)
    expected, expected_sum = reference.add_rms_norm(x, residual, weight, 1e-3)
    assert_close(normed, expected)
    assert torch.equal(summed, expected_sum)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_rms_norm_rounds_where_reference_does(triton_device: str) -> None:
    """Use numbers for which a missing rounding changes a third of the results."""
    x, residual = (torch.randn(2, 8, 256, device=triton_device)).bfloat16().unbind(0)
    weight = torch.randn(256, device=triton_device).bfloat16()
    total = x.float() + residual.float()
    exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    expected, _ = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert (exact.bfloat16() != expected).float().mean() > 0.1
    assert_close(triton.add_rms_norm(x, residual, weight, 1e-6)[0], expected)


def test_rms_norm_of_zeros_stays_finite(triton_device: str) -> None:
    zeros, weight = torch.zeros(3, 64, device=triton_device), torch.ones(64, device=triton_device)
    assert torch.equal(triton.rms_norm(zeros, weight, 1e-6), zeros)


def test_rms_norm_of_sliced_heads_equals_reference(triton_device: str) -> None:
    qkv, weight = torch.randn(5, 12, 64, device=triton_device), torch.randn(64, device=triton_device)
    assert_close(triton.rms_norm(qkv[:, 3:9], weight, 1e-6), reference.rms_norm(qkv[:, 3:9], weight, 1e-6))


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_rms_norm_returns_the_dtype_of_a_different_weight(kind: torch.dtype, triton_device: str) -> None:
    """The kernel takes weights in float32; with others torch computes."""
    x, weight = torch.randn(5, 64, device=triton_device).bfloat16(), torch.randn(64, device=triton_device).to(kind)
    assert_close(triton.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    for got, expected in zip(
        triton.add_rms_norm(x, x, weight, 1e-6), reference.add_rms_norm(x, x, weight, 1e-6), strict=True
    ):
        assert_close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (33, 48), (7, 20), (0, 32), (2, 1100), (3, 1)])
@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")  # the interpreter's numpy
def test_activations_equal_reference(dtype: torch.dtype, rows: int, width: int, triton_device: str) -> None:
    x = (torch.randn(rows, 2 * width, device=triton_device) * 4).to(dtype)
    assert_close(triton.silu_mul(x), reference.silu_mul(x))
    assert_close(triton.gelu_mul(x), reference.gelu_mul(x))
    assert_close(triton.clamped_silu_mul(x, 1.702, 3.0), reference.clamped_silu_mul(x, 1.702, 3.0))


@pytest.mark.filterwarnings("ignore:overflow encountered in:RuntimeWarning")  # the interpreter's numpy
def test_activations_of_extreme_gates_equal_reference(triton_device: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e30], device=triton_device)
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    assert_close(triton.silu_mul(x), reference.silu_mul(x))
    assert_close(triton.gelu_mul(x), reference.gelu_mul(x))
    assert_close(triton.clamped_silu_mul(x, 1.702, 7.0), reference.clamped_silu_mul(x, 1.702, 7.0))


ROPE_TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
NUM_PAGES = 5


def make_stores(page_size: int, heads: int, dim: int, dtype: torch.dtype, device: str) -> tuple[KVPages, KVPages]:
    """Return the reference's store and Triton's, with the same random numbers in every slot."""
    with torch.device(device):
        plain, paged = (b.allocate_pages(2, NUM_PAGES, page_size, heads, dim, dtype) for b in (reference, triton))
        for ours, theirs in ((plain.k, paged.k), (plain.v, paged.v)):
            ours.copy_(torch.randn(ours.shape))
            theirs.copy_(ours.transpose(2, 3))
    return plain, paged


def assert_same_pages(plain: KVPages, paged: KVPages, *, keys_within: float = 0.0) -> None:
    """Compare every slot of every layer; normalised keys up to `keys_within`."""
    assert torch.equal(paged.v.transpose(2, 3), plain.v)
    if keys_within:
        torch.testing.assert_close(paged.k.transpose(2, 3), plain.k, atol=keys_within, rtol=keys_within)
        assert ((paged.k.transpose(2, 3) != plain.k).float().mean() < 0.01) or plain.k.dtype == torch.float32
    else:
        assert torch.equal(paged.k.transpose(2, 3), plain.k)


def make_projections(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Return q, k, v as slices of one tensor [T, H + 2 * Hkv, D]."""
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).to(dtype)
    return list(torch.split(qkv, [heads, kv_heads, kv_heads], 1))


ROPE_SHAPES = [  # heads, key heads, D, C, page size, tokens
    (9, 3, 64, 32, 16, 5), (16, 8, 128, 64, 16, 3), (32, 8, 128, 64, 64, 1), (71, 1, 64, 32, 8, 2),
    (1, 1, 64, 8, 16, 4), (4, 2, 80, 40, 16, 3), (6, 2, 96, 24, 32, 3), (3, 3, 24, 4, 8, 7), (5, 5, 192, 96, 16, 2),
    (2, 1, 256, 128, 16, 2), (4, 4, 128, 0, 16, 2), (40, 40, 128, 64, 16, 1), (4, 2, 64, 32, 16, 0),
]  # fmt: skip


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", ROPE_SHAPES, ids=str)
@pytest.mark.slow
def test_rope_write_equals_reference(shape: tuple[int, ...], norm: bool, triton_device: str) -> None:
    heads, kv_heads, dim, half, page_size, tokens = shape
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        plain, paged = make_stores(page_size, kv_heads, dim, dtype, triton_device)
        q, k, v = make_projections(tokens, heads, kv_heads, dim, dtype, triton_device)
        angle = torch.randn(tokens, half, device=triton_device)
        slots = torch.randperm(NUM_PAGES * page_size, device=triton_device)[:tokens]
        weights = torch.randn(2, dim, device=triton_device).to(dtype)
        norms = HeadNorms(weights[0], weights[1], 1e-6) if norm else None
        before = q.clone(), k.clone(), v.clone()
        got = triton.rope_write(q, k, v, angle.cos(), angle.sin(), paged, 1, slots, norms)
        expected = reference.rope_write(q, k, v, angle.cos(), angle.sin(), plain, 1, slots, norms)
        if norm:
            torch.testing.assert_close(got, expected, atol=ROPE_TOLERANCE[dtype], rtol=ROPE_TOLERANCE[dtype])
        else:
            assert torch.equal(got, expected)
        assert_same_pages(plain, paged, keys_within=ROPE_TOLERANCE[dtype] if norm else 0.0)
        assert all(torch.equal(now, then) for now, then in zip((q, k, v), before, strict=True))


def test_rope_write_with_norms_rounds_where_reference_does(triton_device: str) -> None:
    """Leaving out one of the three roundings would change many numbers; few may differ."""
    plain, paged = make_stores(16, 8, 128, torch.bfloat16, triton_device)
    q, k, v = make_projections(8, 16, 8, 128, torch.bfloat16, triton_device)
    angle, slots = torch.randn(8, 64, device=triton_device), torch.arange(3, 11, device=triton_device)
    weights = torch.randn(2, 128, device=triton_device).bfloat16()
    norms = HeadNorms(weights[0], weights[1], 1e-6)
    got = triton.rope_write(q, k, v, angle.cos(), angle.sin(), paged, 1, slots, norms)
    expected = reference.rope_write(q, k, v, angle.cos(), angle.sin(), plain, 1, slots, norms)
    assert (got != expected).float().mean() < 0.01
    assert_same_pages(plain, paged, keys_within=ROPE_TOLERANCE[torch.bfloat16])


def test_rope_write_with_mixed_norm_dtype_equals_reference(triton_device: str) -> None:
    plain, paged = make_stores(16, 2, 64, torch.float32, triton_device)
    q, k, v = make_projections(3, 4, 2, 64, torch.bfloat16, triton_device)
    angle, slots = torch.randn(3, 32, device=triton_device), torch.tensor([70, 2, 33], device=triton_device)
    norms = HeadNorms(torch.randn(64, device=triton_device), torch.randn(64, device=triton_device), 1e-5)
    got = triton.rope_write(q, k, v, angle.cos(), angle.sin(), paged, 0, slots, norms)
    expected = reference.rope_write(q, k, v, angle.cos(), angle.sin(), plain, 0, slots, norms)
    assert got.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(got, expected)
    assert_same_pages(plain, paged)


@pytest.mark.parametrize("kinds", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("width", [torch.int32, torch.int64], ids=str)
def test_rope_write_to_pages_of_another_dtype_equals_reference(
    kinds: tuple[torch.dtype, torch.dtype], width: torch.dtype, triton_device: str
) -> None:
    dtype, pages_dtype = kinds
    plain, paged = make_stores(16, 2, 64, pages_dtype, triton_device)
    q, k, v = make_projections(4, 6, 2, 64, dtype, triton_device)
    angle = torch.randn(4, 16, device=triton_device)
    slots = torch.tensor([40, 3, 17, 63], device=triton_device).to(width)
    got = triton.rope_write(q, k, v, angle.cos(), angle.sin(), paged, 1, slots)
    assert torch.equal(got, reference.rope_write(q, k, v, angle.cos(), angle.sin(), plain, 1, slots.long()))
    triton.write_pages(paged, 0, k, v, slots)
    reference.write_pages(plain, 0, k, v, slots.long())
    assert_same_pages(plain, paged)


FP8_SHAPES = [  # heads, key heads, D, C, page size, tokens; C: half of the rotated dimensions
    (9, 3, 64, 32, 16, 5), (16, 8, 128, 64, 16, 3), (4, 2, 80, 20, 32, 3), (3, 3, 24, 4, 8, 7), (2, 1, 256, 128, 64, 2),
]  # fmt: skip


@pytest.mark.usefixtures("needs_fp8")
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_writes_to_fp8_pages_equal_reference(shape: tuple[int, ...], triton_device: str) -> None:
    """Every number and scale is equal, also of vectors of zeros and of very different sizes."""
    heads, kv_heads, dim, half, page_size, tokens = shape
    for dtype in (torch.float32, torch.bfloat16):
        with torch.device(triton_device):
            plain, paged = (b.allocate_pages(2, NUM_PAGES, page_size, kv_heads, dim, FP8) for b in (reference, triton))
        q, k, v = make_projections(tokens, heads, kv_heads, dim, dtype, triton_device)
        k[0], v[-1], v[0] = 0, 0, v[0] * 1e6
        angle = torch.randn(tokens, half, device=triton_device)
        slots = torch.randperm(NUM_PAGES * page_size, device=triton_device)[:tokens]
        got = triton.rope_write(q, k, v, angle.cos(), angle.sin(), paged, 1, slots)
        assert torch.equal(got, reference.rope_write(q, k, v, angle.cos(), angle.sin(), plain, 1, slots))
        triton.write_pages(paged, 0, k, v, slots.int())
        reference.write_pages(plain, 0, k, v, slots)
        for layer in range(2):
            every = torch.arange(NUM_PAGES * page_size, device=triton_device)
            ours, theirs = (b.read_pages(p, layer, every) for b, p in ((triton, paged), (reference, plain)))
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
            assert ours[0].any() and ours[1].any()


@pytest.mark.usefixtures("needs_fp8")
def test_rope_write_with_norms_to_fp8_pages_is_close_to_reference(triton_device: str) -> None:
    """A key that is rounded in another way before may be quantised to the next number, of few keys."""
    with torch.device(triton_device):
        plain, paged = (b.allocate_pages(1, NUM_PAGES, 16, 8, 128, FP8) for b in (reference, triton))
    q, k, v = make_projections(8, 16, 8, 128, torch.bfloat16, triton_device)
    angle, slots = torch.randn(8, 48, device=triton_device), torch.arange(3, 11, device=triton_device)
    weights = torch.randn(2, 128, device=triton_device).bfloat16()
    norms = HeadNorms(weights[0], weights[1], 1e-6)
    for backend, pages in ((triton, paged), (reference, plain)):
        backend.rope_write(q, k, v, angle.cos(), angle.sin(), pages, 0, slots, norms)
    ours, theirs = (b.read_pages(p, 0, slots) for b, p in ((triton, paged), (reference, plain)))
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-2, rtol=0.13)
    assert (ours[0] != theirs[0]).float().mean() < 0.05
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "tokens"),
    [(3, 64, 16, 6), (1, 40, 8, 4), (71, 64, 64, 2), (8, 256, 16, 3), (2, 8, 8, 0)],
)
def test_write_pages_equals_reference(heads: int, dim: int, page_size: int, tokens: int, triton_device: str) -> None:
    """Test strides of a fused projection and of a transformers model (heads before tokens)."""
    for dtype in (torch.float32, torch.bfloat16):
        plain, paged = make_stores(page_size, heads, dim, dtype, triton_device)
        k = torch.randn(heads, tokens, dim, device=triton_device).to(dtype).transpose(0, 1)
        v = torch.randn(tokens, heads, 2 * dim, device=triton_device).to(dtype)[..., ::2]
        slots = torch.randperm(NUM_PAGES * page_size, device=triton_device)[:tokens]
        triton.write_pages(paged, 1, k, v, slots)
        reference.write_pages(plain, 1, k, v, slots)
        assert_same_pages(plain, paged)
        got, expected = (b.read_pages(p, 1, slots) for b, p in ((triton, paged), (reference, plain)))
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
