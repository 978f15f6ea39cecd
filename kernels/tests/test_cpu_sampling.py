"""Vocabulary kernels against numpy in float64 and torch, on widths with and without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    level = torch.rand(33) + 0.5
    functions: list[Callable[[slice], Tensor]] = [
        lambda rows: sampling.gumbel(base, low[rows], high[rows]),
        lambda rows: sampling.apply_temperature(x[rows], level[rows]),
        lambda rows: sampling.log_sum_exp(x[rows]),
    ]
    for function in functions:
        alone = torch.cat([function(slice(row, row + 1)) for row in range(33)])
        for rows in (slice(0, 33), slice(5, 7), slice(1, 32)):
            assert torch.equal(function(rows), alone[rows])
    some = torch.randperm(5003)[:100].expand(33, -1)
    assert torch.equal(sampling.gumbel(base[some], low, high), sampling.gumbel(base, low, high).gather(1, some))


def draw_fields(num_draws: int, **changed: float) -> list[np.ndarray[Any, Any]]:
    """Return the fields of plain greedy draws, the last of them with these changes."""
    fields = {name: np.zeros(num_draws) for name in sampling.DRAW_FIELDS.split()}
    fields["width"][:] = fields["top_p"][:] = 1.0
    for name, value in changed.items():
        fields[name][-1] = value
    return [values.astype(kind) for values, kind in zip(fields.values(), sampling._DRAW_TYPES, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 17, 4096])
def test_plain_draws_take_the_first_of_the_largest_and_its_log_probability(width: int, dtype: torch.dtype) -> None:
    x = torch.randint(-3, 3, (5, width)).to(dtype)
    x[3, width // 2] = torch.nan
    index = np.array([4, 0, 0, 3, 2, 1])
    drawn = sampling.draw_tokens(x, index, draw_fields(6), make_bases(width))
    assert drawn is not None
    expected = sampling.argmax(x.float())[index].numpy()
    logprobs = x.float().log_softmax(-1)[index, expected].numpy()
    np.testing.assert_array_equal(drawn[0], np.where(index == 3, -1, expected))
    np.testing.assert_allclose(drawn[1], np.where(index == 3, -np.inf, logprobs), rtol=1e-5)


def keys_of(
    seed: np.ndarray[Any, Any], lane: np.ndarray[Any, Any], position: np.ndarray[Any, Any]
) -> tuple[Tensor, Tensor]:
    """Return the key words of draws with Python's integers: the finaliser of SplitMix64 over (seed, lane, position)."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    places = zip(seed.tolist(), lane.tolist(), position.tolist(), strict=True)
    keys = [mix(mix((first + 0x9E3779B97F4A7C15) % 2**64) ^ (second << 32 | third)) for first, second, third in places]
    words = np.array([(key % 2**32, key >> 32 | 1) for key in keys], np.uint32).view(np.int32)
    return torch.from_numpy(words[:, 0].copy()), torch.from_numpy(words[:, 1].copy())


def kept_tokens(scaled: np.ndarray[Any, Any], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Return the tokens that pass the filters, by a plain loop in float64."""
    order = [int(token) for token in np.lexsort((np.arange(len(scaled)), -scaled))]
    order = [token for token in order if not min_p or scaled[token] >= np.float32(np.log(np.float32(min_p)))]
    order = order[:top_k] if top_k else order
    weights = np.exp(scaled[order].astype(np.float64))
    before = (np.cumsum(weights) - weights) / weights.sum()
    return [token for place, token in enumerate(order) if place == 0 or top_p >= 1 or before[place] < top_p]


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("width", [17, 199, 5003])
def test_filtered_draws_take_the_best_of_what_passes(width: int, has_ties: bool) -> None:
    noise = np.random.default_rng(width)
    x = (torch.randint(-4, 4, (4, width)) * 0.5 if has_ties else torch.randn(4, width) * 3).bfloat16()
    index, base, count = noise.integers(0, 4, 300), make_bases(width), 300
    names = sampling.DRAW_FIELDS.split()
    fields: dict[str, Any] = {name: noise.integers(0, 2**31, count) for name in names}
    fields |= {"width": np.ones(count), "num_top": np.zeros(count), "temperature": noise.choice([0.5, 1.0, 1.7], count)}
    fields |= {"top_k": noise.choice([-1, 0, 1, 5, 16, 150, width, width + 1], count)}
    fields |= {
        "top_p": noise.choice([1e-9, 0.31, 0.83, 0.97, 1.0], count),
        "min_p": noise.choice([0.0, 0.05, 0.5], count),
    }
    typed = {name: fields[name].astype(kind) for name, kind in zip(names, sampling._DRAW_TYPES, strict=True)}
    drawn = sampling.draw_tokens(x, index, list(typed.values()), base)
    assert drawn is not None
    low, high = keys_of(typed["seed"], typed["lane"], typed["position"])
    rows = x.float().numpy()[index]
    scaled = (rows - rows.max(axis=1, keepdims=True)) / typed["temperature"][:, None]
    noisy = scaled + sampling.gumbel(base, low, high).numpy()
    for draw, token in enumerate(drawn[0].tolist()):
        top_k = int(typed["top_k"][draw])
        kept = kept_tokens(scaled[draw], top_k if 0 < top_k < width else 0, typed["top_p"][draw], typed["min_p"][draw])
        assert token in kept
        assert noisy[draw, token] == noisy[draw, kept].max()
    expected = x.float().log_softmax(-1).numpy()[index, drawn[0]]
    np.testing.assert_allclose(drawn[1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changed", [{"width": 2}, {"num_top": 1}, {"top_k": sampling.MAX_TOP + 1}])
def test_draws_for_which_there_is_no_kernel_are_left(changed: dict[str, float]) -> None:
    x, base = torch.randn(1, 900), make_bases(900)
    assert sampling.draw_tokens(x, np.zeros(3, np.int64), draw_fields(3, **changed), base) is None
    assert sampling.draw_tokens(x, np.zeros(3, np.int64), draw_fields(3, top_k=900), base) is not None
    assert sampling.draw_tokens(x[:, :15], np.zeros(3, np.int64), draw_fields(3), base) is None
