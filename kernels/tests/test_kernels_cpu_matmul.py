"""Products of few tokens against float64, by every way this CPU has to multiply."""

from __future__ import annotations

import random

import pytest
import torch
from chatcache_kernels.cpu import matmul
from chatcache_kernels.cpu.bf16 import has_amx, has_avx512_bf16
from torch import Tensor

UNITS = ["floats", *(["pairs"] if has_avx512_bf16() else []), *(["tiles"] if has_amx() else [])]

pytestmark = pytest.mark.usefixtures("fresh_random")


def made(num_tokens: int, num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(num_tokens, num_inputs), torch.randn(num_outputs, num_inputs)
    return x.bfloat16(), weight.bfloat16(), torch.randn(num_outputs).bfloat16()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 7, 16, 17, 31, 32, 33, 50, 64, 97])
def test_products(unit: str, num_tokens: int) -> None:
    torch.set_num_threads(random.choice((1, 3)))
    num_outputs, num_inputs = 32 * random.randint(1, 9), 32 * random.randint(1, 9)
    x, weight, bias = made(num_tokens, num_outputs, num_inputs)
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    for each in (None, bias):
        got = matmul.multiply(x, matmul.pack_weight(weight), each, unit).double()
        expected = x.double() @ weight.double().T + (0 if each is None else each.double())
        assert got.shape == expected.shape
        assert bool(((got - expected).abs() <= expected.abs() * 2**-8 + size * 2**-20).all())


@pytest.mark.parametrize("unit", UNITS[:2])
def test_a_token_does_not_feel_its_neighbours(unit: str) -> None:
    x, weight, bias = made(11, 96, 160)
    packed = matmul.pack_weight(weight)
    alone = torch.cat([matmul.multiply(row[None], packed, bias, unit) for row in x])
    assert torch.equal(matmul.multiply(x, packed, bias, unit), alone)


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_not_finite_stays_with_its_token(unit: str) -> None:
    x, weight, _ = made(5, 64, 64)
    x[2, 7], x[3, 9] = torch.nan, torch.inf
    got = matmul.multiply(x, matmul.pack_weight(weight), None, unit)
    assert got[2].isnan().all()
    assert not got[3].isfinite().any()
    assert got[[0, 1, 4]].isfinite().all()


def test_weights_that_do_not_fit_are_told() -> None:
    assert matmul.can_pack(torch.zeros(64, 96, dtype=torch.bfloat16))
    for shape, dtype in (((48, 64), torch.bfloat16), ((64, 48), torch.bfloat16), ((64, 64), torch.float32)):
        assert not matmul.can_pack(torch.zeros(shape, dtype=dtype))
