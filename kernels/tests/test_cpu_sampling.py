"""Vocabulary kernels against numpy in float64 and torch, on widths with and without padding."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from chatcache_kernels.cpu import sampling
from torch import Tensor

WIDTHS = [1, 5, 16, 17, 199, 4096, 50003]


def make_keys(num_rows: int) -> tuple[Tensor, Tensor]:
    low, high = torch.randint(-(2**31), 2**31, (2, num_rows), dtype=torch.int64).to(torch.int32).unbind(0)
    return low.contiguous(), (high | 1).contiguous()


def make_bases(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def exact_gumbel(base: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return the noise in float64, from the same uniform numbers."""
    words = [x.numpy().astype(np.uint32).astype(np.uint64) for x in (base, low[:, None], high[:, None])]
    bits = (words[0] ^ words[1]) * words[2] % 2**32
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = (bits ^ bits >> np.uint64(shift)) * np.uint64(factor) % 2**32
    bits = (bits ^ bits >> np.uint64(15)) & np.uint64(0x7FFFFFFF)
    uniform = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31), np.float32(1 - 2.0**-24))
    return torch.from_numpy(-np.log(-np.log1p(-uniform.astype(np.float64))))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("of_some", [False, True])
def test_gumbel_equals_exact_noise(width: int, of_some: bool) -> None:
    base, (low, high) = make_bases(*([7] if of_some else []), width), make_keys(7)
    got, expected = sampling.gumbel(base, low, high).double(), exact_gumbel(base, low, high)
    assert got.shape == (7, width)
    assert ((got - expected).abs() <= 2.5e-7 * expected.abs().clamp(min=1.0)).all()


def test_gumbel_at_extreme_uniforms_is_exact() -> None:
    """Use uniform numbers 2^-32 and 1 - 2^-24: the extremes of the noise."""
    base = make_bases(1 << 20)
    noise = sampling.gumbel(base, *make_keys(64))
    expected = [-np.log(-np.log1p(-v)) for v in (2.0**-32, 1 - 2.0**-24)]
    assert noise.max() <= expected[0] * (1 + 1e-6)
    assert noise.max() > 15
    assert noise.min() >= expected[1] * (1 + 1e-6)
    assert noise.min() < -2.7


@pytest.mark.parametrize("width", WIDTHS)
def test_argmax_returns_first_of_equals(width: int) -> None:
    x = torch.randint(0, 3, (40, width)).float()
    x[0], x[1, width // 2] = -torch.inf, torch.nan
    got = sampling.argmax(x)
    for row, place in enumerate(got.tolist()):
        if row != 1:
            assert place == int(x[row].argmax())
    assert 0 <= got[1] < width
    low, high = make_keys(40)
    base = make_bases(width)
    best = sampling.gumbel_argmax(x, base, low, high)
    sums = x + sampling.gumbel(base, low, high)
    keep = torch.arange(40) != 1
    assert torch.equal(best[keep], sums.argmax(-1)[keep])
    assert ((best >= 0) & (best < width)).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_top_tokens_equal_a_stable_sort(width: int) -> None:
    x = torch.randn(9, width)
    x[1:4] = torch.randint(-2, 3, (3, width)).float()
    x[4], x[5] = -torch.inf, torch.arange(width)  # nothing to rank; every value is the largest so far
    values, order = x.sort(dim=-1, descending=True, stable=True)
    for size in sorted({1, min(20, width), min(sampling.MAX_TOP, width)}):
        found, ids = sampling.top_tokens(x, size)
        assert torch.equal(found, values[:, :size]) and torch.equal(ids, order[:, :size])


@pytest.mark.parametrize("width", WIDTHS)
def test_apply_temperature_equals_torch(width: int) -> None:
    x, temperature = torch.randn(9, width) * 5, torch.rand(9) + 0.1
    x[:, ::7] = -torch.inf
    x[:, width - 1] = 3.0
    expected = (x - x.amax(-1, keepdim=True)) / temperature[:, None]
    assert torch.equal(sampling.apply_temperature(x, temperature), expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_mass_before_equals_sorted_sum(width: int) -> None:
    x = torch.randint(-6, 1, (30, width)) * 0.7
    chosen, floor = torch.randint(0, width, (30,)), torch.randint(-7, 0, (30,)) * 0.7 - 0.1
    value = x.gather(1, chosen[:, None])
    ahead = (x > value) | ((x == value) & (torch.arange(width) < chosen[:, None]))
    weight = torch.where(x >= floor[:, None], x.double().exp(), 0.0)
    expected = (weight * ahead).sum(-1) / weight.sum(-1)
    torch.testing.assert_close(
        sampling.mass_before(x, chosen, floor).double(), expected, atol=1e-6, rtol=1e-5, equal_nan=True
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_log_sum_exp_equals_torch(width: int) -> None:
    x = torch.randn(30, width) * 8 + torch.randn(30, 1) * 100
    x[1, 1:] = -torch.inf
    x[2] = -torch.inf
    x[3, width // 2], x[4, width - 1] = torch.nan, torch.inf
    x[5] = 0.0
    got = sampling.log_sum_exp(x)
    assert not got[2:5].isfinite().any()
    keep = [row for row in range(30) if row not in (2, 3, 4)]
    torch.testing.assert_close(got[keep].double(), x[keep].double().logsumexp(-1), atol=1e-5, rtol=3e-7)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_do_not_depend_on_batch_or_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    x, base, (low, high) = torch.randn(33, 5003), make_bases(5003), make_keys(33)
    chosen, level = torch.randint(0, 5003, (33,)), torch.rand(33) + 0.5
    functions: list[Callable[[slice], Tensor]] = [
        lambda rows: sampling.gumbel(base, low[rows], high[rows]),
        lambda rows: sampling.gumbel_argmax(x[rows], base, low[rows], high[rows]),
        lambda rows: sampling.apply_temperature(x[rows], level[rows]),
        lambda rows: sampling.log_sum_exp(x[rows]),
        lambda rows: sampling.mass_before(x[rows], chosen[rows], -level[rows]),
    ]
    for function in functions:
        alone = torch.cat([function(slice(row, row + 1)) for row in range(33)])
        for rows in (slice(0, 33), slice(5, 7), slice(1, 32)):
            assert torch.equal(function(rows), alone[rows])
    some = torch.randperm(5003)[:100].expand(33, -1)
    assert torch.equal(sampling.gumbel(base[some], low, high), sampling.gumbel(base, low, high).gather(1, some))
