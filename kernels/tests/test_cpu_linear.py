"""Linear layers of the cpu backend (bf16 and int8 weights) against float64.

Every way to multiply that this CPU supports is tested.
"""

from __future__ import annotations

import random

import pytest
import torch
from chatcache_kernels.cpu import fused, int8, int16, matmul
from chatcache_kernels.cpu.bf16 import has_amx, has_avx512_bf16
from chatcache_kernels.cpu.compact import FEW_TOKENS, LONG_BYTES, SHORT_BYTES, compact_weights, restore
from chatcache_kernels.cpu.int8 import pack_numbers, quantise
from chatcache_kernels.cpu.simd import BFLOAT16
from torch import Tensor
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("fresh_random")


PAIRS = ["pairs"] if has_avx512_bf16() else []
UNITS = ["floats", *PAIRS, *(["tiles"] if has_amx() else [])]
INT8_UNITS = ["floats", *(["int16"] if int16.has_int16_products() else []), *(["tiles"] if has_amx() else [])]
WAYS = [(torch.float32, "floats"), *((torch.bfloat16, unit) for unit in INT8_UNITS)]


def make_int8_layer(num_tokens: int, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and bias. Output magnitudes differ, to detect a misplaced scale."""
    sizes = torch.rand(num_outputs, 1) * 4 + 0.1
    return torch.randn(num_tokens, num_inputs), torch.randn(num_outputs, num_inputs) * sizes, torch.randn(num_outputs)


def round_to_int16(x: Tensor) -> Tensor:
    """Return activations rounded to 16 bits, with a scale for each 512 inputs of a token, as float64."""
    groups = functional.pad(x.float(), (0, -x.shape[1] % 512)).view(len(x), -(-x.shape[1] // 512), 512)
    largest = groups.abs().amax(2, keepdim=True)
    factors = torch.full_like(largest, 32767.0) / largest  # `32767 / largest` would multiply by a rounded reciprocal
    numbers = (groups * factors.nan_to_num(posinf=0.0)).round()
    rounded = numbers.double() * (largest * (1 / 32767)).double()
    return rounded.flatten(1)[:, : x.shape[1]]


def check_int8_multiply(x: Tensor, weight: Tensor, bias: Tensor | None, unit: str) -> None:
    """Compare with float64 over the quantised weights."""
    numbers, scales = quantise(weight)
    kept = numbers.double() * scales.double()[:, None]
    got = int8.multiply(x, pack_numbers(numbers, unit), scales, bias, unit)
    assert got.dtype == x.dtype
    x = round_to_int16(x) if unit == "int16" else x
    rounding = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-22
    expected = x.double() @ kept.T + (0 if bias is None else bias.double())
    size = x.double().abs() @ kept.abs().T + (0 if bias is None else bias.double().abs())
    assert got.shape == expected.shape
    assert bool(((got.double() - expected).abs() <= expected.abs() * rounding + size * 2**-20).all())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("dtype", "unit"), WAYS)
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 7, 15, 16, 17, 31, 32, 33, 64, 97])
def test_int8_multiply_equals_torch(dtype: torch.dtype, unit: str, num_tokens: int) -> None:
    torch.set_num_threads(random.choice((1, 3)))
    for num_outputs, num_inputs in (
        (32 * random.randint(1, 9), 32 * random.randint(1, 35)),
        (random.randint(1, 200), random.randint(1, 200)),
    ):
        x, weight, bias = make_int8_layer(num_tokens, num_outputs, num_inputs)
        for each in (None, bias):
            check_int8_multiply(x.to(dtype), weight, each, unit)


@pytest.mark.parametrize("unit", INT8_UNITS)
def test_int8_multiply_of_many_tokens_equals_torch(unit: str) -> None:
    """Use more tokens than an item, more panels than are widened at once, and partial ends."""
    torch.set_num_threads(random.choice((1, 2)))
    for num_tokens, num_outputs, num_inputs in ((32 * 33 + 5, 32 * 13, 64), (300, 32 * 11, 32 * 70)):
        x, weight, bias = make_int8_layer(num_tokens, num_outputs, num_inputs)
        check_int8_multiply(x.bfloat16(), weight, bias, unit)


def test_choose_blocking_covers_all_tokens_and_panels() -> None:
    for _ in range(300):
        num_tokens, num_panels = random.randint(1, 5000), random.randint(1, 300)
        num_inputs, threads = 32 * random.randint(1, 500), random.randint(1, 64)
        groups, panels = int8.choose_blocking(num_tokens, num_inputs, num_panels, threads)
        assert 1 <= groups <= int8.MAX_GROUPS
        assert panels == 1 or 64 * panels * num_inputs + int8.SUMS_BYTES <= int8.scratch_bytes(num_inputs)
        assert 64 * num_inputs + int8.SUMS_BYTES <= int8.scratch_bytes(num_inputs)


@pytest.mark.parametrize(("dtype", "unit"), WAYS)
def test_int8_multiply_does_not_depend_on_other_tokens(dtype: torch.dtype, unit: str) -> None:
    x, weight, bias = make_int8_layer(70, 96, 160)
    x = x.to(dtype)
    numbers, scales = quantise(weight)
    codes = pack_numbers(numbers, unit)
    alone = torch.cat([int8.multiply(row[None], codes, scales, bias, unit) for row in x])
    assert torch.equal(int8.multiply(x, codes, scales, bias, unit), alone)


@pytest.mark.parametrize(("dtype", "unit"), WAYS)
def test_int8_multiply_keeps_non_finite_values_in_their_token_and_output(dtype: torch.dtype, unit: str) -> None:
    x, weight, _ = make_int8_layer(5, 64, 64)
    x[2, 7], x[3, 9] = torch.nan, torch.inf
    weight[5, 1], weight[33, 2] = torch.inf, torch.nan
    numbers, scales = quantise(weight)
    got = int8.multiply(x.to(dtype), pack_numbers(numbers, unit), scales, None, unit)
    assert got[2].isnan().all()
    assert not got[3][numbers[:, 9] != 0].isfinite().any()
    assert got[:, [5, 33]].isnan().all()
    others = [output for output in range(64) if output not in (5, 33)]
    assert got[[0, 1, 4]][:, others].isfinite().all()


@pytest.mark.requires_int16
def test_int16_multiply_is_as_exact_as_bf16_inputs() -> None:
    """Inputs in float64 against those rounded to 16 bits, with an outlier in one group of 512."""
    x, weight, _ = make_int8_layer(33, 96, 1120)
    x[:, 600] = 1e4
    x, (numbers, scales) = x.bfloat16(), quantise(weight)
    kept = numbers.double() * scales.double()[:, None]
    got = int8.multiply(x, pack_numbers(numbers, "int16"), scales, None, "int16").double()
    expected, first = x.double() @ kept.T, x[:, :512].double().abs().amax(1, keepdim=True) * kept[:, :512].abs().sum(1)
    second = x[:, 512:].double().abs().amax(1, keepdim=True) * kept[:, 512:].abs().sum(1)
    assert bool(((got - expected).abs() <= expected.abs() * 2**-8 + (first + second) * 2**-16).all())


@pytest.mark.requires_int16
def test_norm_and_activation_quantise_as_the_separate_kernel() -> None:
    x, weight = torch.randn(7, 192).bfloat16(), torch.rand(96).bfloat16()
    out, quantised = torch.empty(7, 96).bfloat16(), torch.empty(7, int16.row_bytes(96), dtype=torch.uint8)
    silu = fused._PACK_ACTIVATION.pack(0, 0, x.data_ptr(), out.data_ptr(), quantised.data_ptr(), 7, 96, 1, 1.0, 0.0)
    rows = x[:, :96].contiguous()
    norm = fused._PACK_NORM.pack(
        0, 0, rows.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0, quantised.data_ptr(), 7, 96, 1, 1e-5
    )
    for launch, job, expected in (
        (fused.activation_kernel(BFLOAT16, quantise=True), silu, fused.silu_mul(x)),
        (fused.norm_kernel(BFLOAT16, quantise=True), norm, fused.rms_norm(rows, weight, 1e-5)),
    ):
        launch(job, 2)
        assert torch.equal(out, expected)
        assert torch.equal(quantised, int16.quantise_tokens(expected))


def test_quantise_rounds_to_nearest_code_of_the_row() -> None:
    for num_outputs, num_inputs in ((1, 1), (7, 130), (300, 5000)):
        weight = torch.randn(num_outputs, num_inputs)
        weight[0] = 0.0
        numbers, scales = quantise(weight)
        assert numbers.abs().amax() <= 127
        assert bool((numbers[1:].abs().amax(1) == 127).all())
        error = (numbers.double() * scales.double()[:, None] - weight.double()).abs()
        assert bool((error <= scales.double()[:, None] * (0.5 + 1e-5)).all())
        half = weight.bfloat16()
        assert torch.equal(quantise(half)[0], quantise(half.float())[0])


@pytest.mark.requires_vbmi  # other CPUs have one way to widen
def test_widen_codes_by_table_and_by_conversion_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test every number from -127 to 127 in every position of a tile row."""
    numbers = (torch.arange(32 * 512).view(32, 512) % 255 - 127).to(torch.int8)
    unit = "tiles" if has_amx() else "floats"
    scales, codes, x = torch.rand(32) + 0.5, pack_numbers(numbers, unit), torch.randn(3, 512).bfloat16()
    expected = x.double() @ (numbers.double() * scales.double()[:, None]).T
    got = int8.multiply(x, codes, scales, None, unit)
    assert bool(((got.double() - expected).abs() <= expected.abs() * 2**-8 + 0.5).all())
    monkeypatch.setattr(int8, "has_avx512_vbmi", lambda: False)
    assert torch.equal(int8.multiply(x, codes, scales, None, unit), got)


def make_bf16_layer(num_tokens: int, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(num_tokens, num_inputs), torch.randn(num_outputs, num_inputs)
    return x.bfloat16(), weight.bfloat16(), torch.randn(num_outputs).bfloat16()


@pytest.mark.usefixtures("poisoned_memory")
def test_pack_weight_of_a_transposed_weight_equals_a_permutation() -> None:
    torch.set_num_threads(3)
    weight = torch.randn(96, 512).bfloat16().T
    expected = weight.reshape(16, 2, 16, 3, 16, 2).permute(0, 3, 4, 1, 2, 5)
    assert torch.equal(matmul.pack_weight(weight), expected)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 7, 16, 17, 31, 32, 33, 50, 64, 97])
def test_bf16_multiply_equals_torch(unit: str, num_tokens: int) -> None:
    torch.set_num_threads(random.choice((1, 3)))
    num_outputs, num_inputs = 32 * random.randint(1, 9), 32 * random.randint(1, 9)
    x, weight, bias = make_bf16_layer(num_tokens, num_outputs, num_inputs)
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    for each in (None, bias):
        got = matmul.multiply(x, matmul.pack_weight(weight), each, unit).double()
        expected = x.double() @ weight.double().T + (0 if each is None else each.double())
        assert got.shape == expected.shape
        assert bool(((got - expected).abs() <= expected.abs() * 2**-8 + size * 2**-20).all())


def is_product(got: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Return whether `got` is x @ weight.T, up to the rounding of bf16 and of sums in float32."""
    expected = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    return bool(((got.double() - expected).abs() <= expected.abs() * 2.0**-8 + size * 2.0**-20).all())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("unit", UNITS)
def test_bf16_multiply_of_several_blocks_of_tokens_equals_torch(unit: str) -> None:
    num_inputs = matmul.BLOCK_BYTES // (2 * matmul.GROUP_TOKENS * matmul.MIN_BLOCK_GROUPS)
    num_tokens = 2 * matmul.MIN_BLOCK_GROUPS * matmul.GROUP_TOKENS + 33  # the last block has fewer groups
    x, weight = torch.randn(num_tokens, num_inputs).bfloat16(), torch.randn(96, num_inputs).bfloat16()
    got = matmul.multiply(x, matmul.pack_weight(weight), None, unit)
    assert is_product(got, x, weight)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("threads", [1, 2])
def test_bf16_multiply_of_one_token_by_many_panels_equals_torch(threads: int) -> None:
    torch.set_num_threads(threads)
    num_outputs = 32 * (5 * matmul.MIN_SHARES * threads + 3)  # the last share has fewer panels
    x, weight = torch.randn(1, 64).bfloat16(), torch.randn(num_outputs, 64).bfloat16()
    got = matmul.multiply(x, matmul.pack_weight(weight), None, "floats")
    assert is_product(got, x, weight)


@pytest.mark.parametrize("unit", ["floats", *PAIRS])
def test_bf16_multiply_does_not_depend_on_other_tokens(unit: str) -> None:
    x, weight, bias = make_bf16_layer(11, 96, 160)
    packed = matmul.pack_weight(weight)
    alone = torch.cat([matmul.multiply(row[None], packed, bias, unit) for row in x])
    assert torch.equal(matmul.multiply(x, packed, bias, unit), alone)


@pytest.mark.parametrize("unit", UNITS)
def test_bf16_multiply_keeps_non_finite_values_in_their_token(unit: str) -> None:
    x, weight, _ = make_bf16_layer(5, 64, 64)
    x[2, 7], x[3, 9] = torch.nan, torch.inf
    got = matmul.multiply(x, matmul.pack_weight(weight), None, unit)
    assert got[2].isnan().all()
    assert not got[3].isfinite().any()
    assert got[[0, 1, 4]].isfinite().all()


def make_mixed_weight(num_outputs: int, num_inputs: int) -> Tensor:
    """Return a weight with tiles of all kinds: zeros, subnormal, infinite and NaN numbers, wide and narrow ranges."""
    powers = torch.randint(-40, 30, (num_outputs // 32, 1)).repeat_interleave(32, 0)
    weight = (torch.randn(num_outputs, num_inputs) * 10.0**powers).bfloat16()
    weight[:32, :32] = 0.0
    weight[:32, 32:64] = torch.tensor((0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38)).repeat(4)
    bits = torch.arange(1024, dtype=torch.int32).view(32, 32) * 2 + 0x3000  # 16 exponents, half of all fractions
    weight[:32, 64:96] = bits.to(torch.int16).view(torch.bfloat16)
    return weight


@pytest.mark.usefixtures("poisoned_memory")
def test_compact_weights_keep_every_bit() -> None:
    torch.set_num_threads(3)
    weights = torch.stack([make_mixed_weight(96, 160), torch.ones(96, 160).bfloat16()])
    for shape, each in (((96, 160), weights), ((160, 96), weights.mT)):
        for weight, compact in zip(each, compact_weights(each), strict=True):
            assert torch.equal(restore(compact, *shape).view(torch.int16), weight.contiguous().view(torch.int16))


def test_compact_weights_store_16_neighbouring_exponents_in_12_bits() -> None:
    weight = (torch.rand(64, 96) + 2.0**-15).bfloat16()
    assert compact_weights(weight[None]).shape == (1, 512 + 6 * SHORT_BYTES)
    weight[3, 40] = 2.0**-17
    assert compact_weights(weight[None]).shape == (1, 512 + 5 * SHORT_BYTES + LONG_BYTES)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("num_tokens", "max_tokens"), [(num, FEW_TOKENS) for num in range(1, FEW_TOKENS + 2)] + [(2, 2), (3, 2)]
)
def test_bf16_multiply_from_a_compact_weight_equals_that_from_panels(
    unit: str, num_tokens: int, max_tokens: int
) -> None:
    weight, bias = make_mixed_weight(96, 160), torch.randn(96).bfloat16()
    (compact,), packed = compact_weights(weight[None], max_tokens=max_tokens), matmul.pack_weight(weight)
    x = torch.randn(num_tokens, 160).bfloat16()
    expected = matmul.multiply(x, packed, bias, unit)
    if num_tokens <= max_tokens:
        packed = torch.zeros_like(packed)  # is not read
    else:
        compact[512:] = 0  # the tiles
    got = matmul.multiply(x, packed, bias, unit, compact)
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


def test_compact_weights_refuse_more_tokens_than_kernels_support() -> None:
    weight = make_mixed_weight(96, 160)
    with pytest.raises(ValueError, match=f"max_tokens {FEW_TOKENS + 1}: the limit is {FEW_TOKENS}"):
        compact_weights(weight[None], max_tokens=FEW_TOKENS + 1)
    (compact,) = compact_weights(weight[None], max_tokens=2)
    with pytest.raises(ValueError, match="3 tokens, but the limit is 2"):
        matmul.multiply_few(torch.zeros(3, 160).bfloat16(), compact, 96)


def test_can_pack_rejects_unsupported_weights() -> None:
    assert matmul.can_pack(torch.zeros(64, 96, dtype=torch.bfloat16))
    for shape, dtype in (((48, 64), torch.bfloat16), ((64, 48), torch.bfloat16), ((64, 64), torch.float32)):
        assert not matmul.can_pack(torch.zeros(shape, dtype=dtype))
