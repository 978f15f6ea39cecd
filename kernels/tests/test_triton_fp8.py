"""FP8 layers: quantisation and products of the Triton kernels against plain torch."""

from __future__ import annotations

import pytest
import torch
from chatcache_kernels import fp8
from chatcache_kernels.fp8 import DTYPE, LARGEST, Fp8Weight
from chatcache_kernels.triton import fp8 as kernels
from chatcache_kernels.triton.configs import Chip
from torch import Tensor

pytestmark = pytest.mark.usefixtures("needs_fp8", "poisoned_memory", "fresh_random")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7}
SHAPES = [(64, 96), (80, 208), (128, 1024)]


def make_weight(num_outputs: int, num_inputs: int, device: str, block: int | None = None) -> Fp8Weight:
    """Return random weights whose scales differ, per output or in blocks."""
    rows, columns = (1, num_inputs) if block is None else (block, block)
    numbers = torch.randn(num_outputs, num_inputs, device=device).mul(100).clamp(-LARGEST, LARGEST).to(DTYPE)
    scales = torch.rand(-(-num_outputs // rows), -(-num_inputs // columns), device=device) * 0.01 + 0.001
    return Fp8Weight(numbers, scales, rows, columns)


def skip_float32(dtype: torch.dtype, device: str) -> None:
    if dtype == torch.float32 and device == "cuda":
        pytest.skip("FP8 layers run in bfloat16 on a GPU")


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    atol = TOLERANCE[got.dtype] * float(expected.float().norm() / max(1, expected.numel()) ** 0.5)
    torch.testing.assert_close(got, expected, rtol=TOLERANCE[got.dtype], atol=atol)


def test_to_fp8_rounds_as_torch(triton_device: str) -> None:
    """All numbers, the values halfway between them, and their neighbours, are rounded to nearest even."""
    exact = torch.arange(127, dtype=torch.uint8, device=triton_device).view(DTYPE).float()
    half = (exact[1:] + exact[:-1]) / 2
    near = torch.cat([torch.nextafter(half, half + 1), torch.nextafter(half, half - 1)])
    values = torch.cat([exact, half, near, torch.randn(1000, device=triton_device)])
    values = torch.cat([values, -values])
    x = torch.stack([values, values])
    x = torch.cat([x, torch.full((2, 1), LARGEST, device=triton_device)], 1)  # makes the scale 1
    numbers, scales = kernels.quantise_rows(x, x.shape[1])
    assert scales.flatten().tolist() == [1.0, 1.0]
    assert torch.equal(numbers.view(torch.uint8), x.to(DTYPE).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "width", "group"), [(1, 64, 64), (3, 208, 208), (5, 208, 128), (0, 64, 64), (2, 1300, 128)]
)
def test_quantise_rows_equals_reference(
    dtype: torch.dtype, rows: int, width: int, group: int, triton_device: str
) -> None:
    x = (torch.randn(rows, width, device=triton_device) * 10 ** torch.randn(rows, 1, device=triton_device)).to(dtype)
    numbers, scales = kernels.quantise_rows(x, group)
    expected, expected_scales = fp8.quantise_rows(x, group)
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    restored = Fp8Weight(numbers, scales, 1, group).dequantise()
    largest = scales.repeat_interleave(group, 1)[:, :width] * LARGEST
    assert bool(((restored - x.float()).abs() <= x.float().abs() * 2**-4 + largest * 2**-18).all())


def test_quantise_rows_of_zeros_and_infinity(triton_device: str) -> None:
    x = torch.zeros(2, 64, device=triton_device)
    x[1, 3] = 3e38
    numbers, scales = kernels.quantise_rows(x, 64)
    assert not bool(numbers[0].float().any())
    assert float(numbers[1].float()[3] * scales[1]) == pytest.approx(3e38)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 17])
def test_multiply_few_rows_equals_reference(
    num_rows: int, num_outputs: int, num_inputs: int, block: int | None, dtype: torch.dtype, triton_device: str
) -> None:
    skip_float32(dtype, triton_device)
    weight = make_weight(num_outputs, num_inputs, triton_device, block)
    x = torch.randn(num_rows, num_inputs, device=triton_device).to(dtype)
    bias = torch.randn(num_outputs, device=triton_device).to(dtype) if block else None
    locks = torch.zeros(kernels.num_locks(weight), dtype=torch.int32, device=triton_device)
    for _ in range(2):  # the locks are as they were
        assert_close(kernels.multiply_few_rows(x, weight, bias, locks), fp8.multiply_few_rows(x, weight, bias))
        assert not bool(locks.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [128, None])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 70, pytest.param(257, marks=pytest.mark.gpu)])
def test_multiply_equals_reference(
    num_rows: int, num_outputs: int, num_inputs: int, block: int | None, dtype: torch.dtype, triton_device: str
) -> None:
    skip_float32(dtype, triton_device)
    weight = make_weight(num_outputs, num_inputs, triton_device, block)
    x = torch.randn(num_rows, num_inputs, device=triton_device).to(dtype)
    bias = torch.randn(num_outputs, device=triton_device).to(dtype) if block else None
    assert_close(kernels.multiply(x, weight, bias), fp8.multiply(x, weight, bias))


def test_cublas_multiplies_whole_blocks_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    blocks = make_weight(256, 384, "cpu", 128)
    assert kernels._cublas_has_blocks(blocks, Chip(9, 132))
    assert not kernels._cublas_has_blocks(blocks, Chip(10, 132))
    assert not kernels._cublas_has_blocks(make_weight(80, 384, "cpu", 128), Chip(9, 132))
    assert not kernels._cublas_has_blocks(make_weight(256, 208, "cpu", 128), Chip(9, 132))
    assert not kernels._cublas_has_blocks(make_weight(256, 384, "cpu", None), Chip(9, 132))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert not kernels._cublas_has_blocks(blocks, Chip(9, 132))


def test_choose_split_covers_the_inputs_with_enough_programs() -> None:
    for num_tiles, num_blocks in ((64, 32), (64, 96), (384, 32), (16, 8), (1, 2), (96, 32), (16, 24)):
        split = kernels.choose_split(num_tiles, num_blocks, 132)
        assert (split.count - 1) * split.num_blocks < num_blocks <= split.count * split.num_blocks
        assert split.count == 1 or split.num_blocks >= kernels.MIN_BLOCKS
    assert kernels.choose_split(64, 32, 132) == kernels.Split(5, 7)
    assert kernels.choose_split(384, 32, 132).count == 1


def test_stack_keeps_the_values_of_blocks_that_end_within_an_output(triton_device: str) -> None:
    parts = [make_weight(num_outputs, 256, triton_device, 128) for num_outputs in (192, 64, 80)]
    whole = fp8.stack(parts)
    assert whole.rows == 64
    assert torch.equal(whole.dequantise(), torch.cat([part.dequantise() for part in parts]))
    aligned = fp8.stack([parts[0], make_weight(128, 256, triton_device, 128)][::-1])
    assert aligned.rows == 128


def test_quantised_weight_is_close_to_the_weight() -> None:
    weight = torch.randn(64, 256)
    numbers, scales = fp8.quantise_rows(weight, 256)
    restored = Fp8Weight(numbers, scales, 1, 256).dequantise()
    error = (restored - weight).norm() / weight.norm()
    assert error < 2**-5
