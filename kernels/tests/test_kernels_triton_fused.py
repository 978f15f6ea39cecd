"""triton's norms and activation against reference.py: any width, one row or many, and every rounding in its place."""

from __future__ import annotations

import pytest
import torch
from chatcache_kernels import reference, triton
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_memory", "fresh_random")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(1, 576), (33, 48), (7, 20), (0, 32), (2, 1024), (3, 1536), (40, 128), (17, 64), (1, 1), (1, 5120)]


def close(got: Tensor, expected: Tensor) -> None:
    """Compare up to the last bit, which few of many numbers may miss: sums are formed in another order.

    What is rounded twice, before the weight and behind it, may miss it twice.
    """
    assert got.dtype == expected.dtype and got.shape == expected.shape
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=2 * STEP[got.dtype])
    if got.dtype != torch.float32 and got.numel() > 1000:
        assert (got != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_norms(dtype: torch.dtype, rows: int, width: int, triton_device: str) -> None:
    x, residual = (torch.randn(2, rows, width, device=triton_device) * 3).to(dtype).unbind(0)
    weight = torch.randn(width, device=triton_device).to(dtype)
    before = x.clone(), residual.clone()
    close(triton.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    normed, summed = triton.add_rms_norm(x, residual, weight, 1e-3)
    expected, expected_sum = reference.add_rms_norm(x, residual, weight, 1e-3)
    close(normed, expected)
    assert torch.equal(summed, expected_sum)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_rounds_before_the_weight_and_after_the_sum(triton_device: str) -> None:
    """Numbers whose result shows each rounding: without them it would differ in a third of the places."""
    x, residual = (torch.randn(2, 8, 256, device=triton_device)).bfloat16().unbind(0)
    weight = torch.randn(256, device=triton_device).bfloat16()
    total = x.float() + residual.float()
    exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
    expected, _ = reference.add_rms_norm(x, residual, weight, 1e-6)
    assert (exact.bfloat16() != expected).float().mean() > 0.1
    close(triton.add_rms_norm(x, residual, weight, 1e-6)[0], expected)


def test_a_row_of_zeros_stays_finite(triton_device: str) -> None:
    zeros, weight = torch.zeros(3, 64, device=triton_device), torch.ones(64, device=triton_device)
    assert torch.equal(triton.rms_norm(zeros, weight, 1e-6), zeros)


def test_norm_of_heads_that_are_slices(triton_device: str) -> None:
    qkv, weight = torch.randn(5, 12, 64, device=triton_device), torch.randn(64, device=triton_device)
    close(triton.rms_norm(qkv[:, 3:9], weight, 1e-6), reference.rms_norm(qkv[:, 3:9], weight, 1e-6))


def test_a_weight_of_another_dtype_decides_that_of_the_result(triton_device: str) -> None:
    x, weight = torch.randn(5, 64, device=triton_device).bfloat16(), torch.randn(64, device=triton_device)
    close(triton.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    for got, expected in zip(
        triton.add_rms_norm(x, x, weight, 1e-6), reference.add_rms_norm(x, x, weight, 1e-6), strict=True
    ):
        close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (33, 48), (7, 20), (0, 32), (2, 1100), (3, 1)])
def test_silu_mul(dtype: torch.dtype, rows: int, width: int, triton_device: str) -> None:
    x = (torch.randn(rows, 2 * width, device=triton_device) * 4).to(dtype)
    close(triton.silu_mul(x), reference.silu_mul(x))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # the interpreter's numpy
def test_silu_mul_of_extreme_gates(triton_device: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e30], device=triton_device)
    x = torch.cat((gate, torch.ones_like(gate)))[None]
    close(triton.silu_mul(x), reference.silu_mul(x))
