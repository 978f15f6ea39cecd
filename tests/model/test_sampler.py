"""Samplers against exact distributions, and against themselves in other batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import cycle, permutations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from chatcache.model.sampling.device_sampler import DeviceSampler
from chatcache.model.sampling.ops import draw_keys, gumbel, token_base, top_tokens
from chatcache.model.sampling.sampler import NOT_FINITE, Sampler
from chatcache.types.plan import NOTHING_LEFT, LogitEdit, LogitMask, StepResult, edit_table
from tests.model.drive import CPU, KERNELS, make_draws

NUM_DRAWS = 20_000


make_sampler: type[Sampler] | type[DeviceSampler] = Sampler


@pytest.fixture(
    params=[pytest.param(Sampler, id="cpu"), pytest.param(DeviceSampler, id="triton", marks=pytest.mark.slow)],
    autouse=True,
)
def _sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with both samplers, the Triton one in the slow tier."""
    monkeypatch.setitem(globals(), "make_sampler", request.param)


def draw(
    logits: torch.Tensor,
    specs: list[dict[str, Any]],
    edits: Sequence[LogitEdit] = (),
    masks: Sequence[LogitMask] = (),
) -> StepResult:
    """Sample from one row of logits per spec."""
    rows = np.array([spec.get("row", 0) for spec in specs])
    device = KERNELS if make_sampler is DeviceSampler else CPU
    return make_sampler(logits.shape[-1], device).sample(logits.to(device), rows, make_draws(specs, edits, masks))


def mask_of(draw: int, allowed: Iterable[int], num_words: int) -> LogitMask:
    words = [0] * num_words
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return LogitMask(draw, np.array(words, np.uint32))


def exact(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> NDArray[np.float64]:
    """Return the exact distribution, by a plain loop in float64.

    Order: temperature, min_p, top_k, top_p.
    """
    scaled = logits.double().numpy() / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0.0
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    for token in order[top_k:] if top_k > 0 else ():
        probs[token] = 0.0
    probs /= probs.sum()
    before = 0.0
    kept: NDArray[np.float64] = np.zeros_like(probs)
    for token in order:
        if token == order[0] or before < top_p:
            kept[token] = probs[token]
        before += probs[token]
    kept /= kept.sum()
    return kept


FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.5, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.3, 12, 0.9, 0.02),
    (1.0, -1, 0.5, 0.05),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize("vocab_size", [30, pytest.param(700, marks=pytest.mark.slow)])
def test_frequencies_are_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float, vocab_size: int
) -> None:
    """700 tokens exceed the first candidates, so that flat distributions take the full sort."""
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(7)) * (2.0 if vocab_size < 100 else 0.7)
    num_draws = NUM_DRAWS if vocab_size < 100 else NUM_DRAWS // 4
    if make_sampler is DeviceSampler:
        num_draws = 1000  # the interpreter is slow; that it draws as the CPU does is shown token by token elsewhere
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    counts = np.zeros(vocab_size)
    for start in range(0, num_draws, 1000):
        specs = [{"seed": 3, "lane": 1, "position": start + index, **filters} for index in range(1000)]
        tokens = draw(logits, specs).tokens[:, 0]
        np.add.at(counts, tokens, 1)
    expected = exact(logits[0], temperature, top_k, top_p, min_p)
    assert not counts[expected == 0].any(), "drew a token that the filters drop"
    deviation = np.sqrt(num_draws * expected * (1 - expected))
    likely = expected * num_draws >= 10
    assert (np.abs(counts - num_draws * expected)[likely] <= 4.5 * deviation[likely] + 1).all()
    chi2 = ((counts - num_draws * expected)[likely] ** 2 / (num_draws * expected[likely])).sum()
    freedom = likely.sum()
    assert chi2 <= freedom + 5 * np.sqrt(2 * freedom) + 5


def test_noise_matches_its_definition() -> None:
    """numpy, integer by integer as the docstring of `ops` defines it."""

    def mix64(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) % 2**64
        return x ^ x >> 31

    def mix32(x: int) -> int:
        x = ((x ^ x >> 16) * 0x21F0AAAD) % 2**32
        x = ((x ^ x >> 15) * 0x735A2D97) % 2**32
        return x ^ x >> 15

    seeds, lanes, positions = [0, 1, 2**64 - 1], [0, 63, 7], [0, 2**31 - 1, 4096]
    low, high = draw_keys(np.array(seeds, np.uint64), np.array(lanes, np.int32), np.array(positions, np.int32))
    got = gumbel(token_base(50, CPU), torch.from_numpy(low), torch.from_numpy(high)).numpy()
    for draw_index, (seed, lane, position) in enumerate(zip(seeds, lanes, positions, strict=True)):
        key = mix64(mix64((seed + 0x9E3779B97F4A7C15) % 2**64) ^ (lane << 32 | position))
        for token in range(50):
            bits = mix32((mix32((token + 0x9E3779B9) % 2**32) ^ key % 2**32) * (key >> 32 | 1) % 2**32) & 0x7FFFFFFF
            uniform = min((bits + 0.5) * 2.0**-31, 1 - 2.0**-24)
            assert got[draw_index, token] == pytest.approx(-np.log(-np.log1p(-uniform)), rel=1e-5, abs=1e-5)


def test_noise_is_standard_gumbel_and_uncorrelated() -> None:
    keys = draw_keys(
        np.arange(64, dtype=np.uint64) // 16,
        np.arange(64, dtype=np.int32) // 4 % 4,
        np.arange(64, dtype=np.int32) % 4,
    )
    noise = gumbel(token_base(4096, CPU), *(torch.from_numpy(word) for word in keys)).double()
    assert abs(noise.mean() - 0.577216) < 4 * (np.pi**2 / 6 / noise.numel()) ** 0.5
    uniform = (-(-noise).exp()).exp().flatten().sort().values
    steps = torch.arange(len(uniform)) / len(uniform)
    assert (uniform - steps).abs().max() < 1.9 / len(uniform) ** 0.5  # Kolmogorov-Smirnov, p about 1e-3
    for axis in (noise, noise.T[:64]):  # draws against draws, tokens against tokens
        related = torch.corrcoef(axis) - torch.eye(64)
        assert related.abs().max() < 6.0 / axis.shape[1] ** 0.5


def test_draws_do_not_depend_on_the_batch() -> None:
    logits = torch.randn(6, 900, generator=torch.Generator().manual_seed(1))
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 7},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"top_k": 400, "top_p": 0.99},
        {"temperature": 0.0},
    ]
    specs = [
        {"row": index, "seed": 99, "lane": index, "position": 5, "temperature": 0.9, **kind}
        for index, kind in enumerate(kinds)
    ]
    together = draw(logits, specs)
    for order in ([5, 3, 1], [4], [0, 2, 4, 1], [2]):
        some = draw(logits, [specs[index] for index in order])
        np.testing.assert_array_equal(some.tokens[:, 0], together.tokens[order, 0])
        np.testing.assert_allclose(some.logprobs[:, 0], together.logprobs[order, 0], rtol=1e-6)


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 0, 1], [1]])
@pytest.mark.parametrize(
    "kinds",
    [
        [{}],
        [{"temperature": 0.7}],
        [{"temperature": 0.7}, {}, {"temperature": 1e-9}],
        [{"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 1.0, "top_p": 0.9}],
        [{"temperature": 1.2, "min_p": 0.1, "top_p": 0.5}, {"temperature": 1.0, "top_k": 5}, {"top_p": 0.9}],
        [{"temperature": 1.0, "top_k": 600}],
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("vocab_size", [17, 900])
def test_steps_of_simple_draws_give_what_mixed_steps_give_to_the_bit(
    vocab_size: int, dtype: torch.dtype, kinds: list[dict[str, Any]], rows: list[int]
) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(3)).to(dtype)
    specs: list[dict[str, Any]] = [
        {"row": row, "seed": 2**64 - 9, "lane": lane, "position": 2**31 - 3, **kind}
        for lane, (row, kind) in enumerate(zip(rows, cycle(kinds)))
    ]
    plain, mixed = draw(logits, specs), draw(logits, [*specs, {"temperature": 1.0, "top_k": 3, "num_top": 1}])
    np.testing.assert_array_equal(plain.tokens, mixed.tokens[:-1])
    np.testing.assert_array_equal(plain.logprobs, mixed.logprobs[:-1])


@pytest.mark.parametrize("field", ["seed", "lane", "position"])
def test_noise_depends_on_every_part_of_the_key(field: str) -> None:
    logits = torch.zeros(1, 1000)
    tokens = draw(logits, [{"temperature": 1.0, field: value} for value in range(40)]).tokens[:, 0]
    assert len(set(tokens.tolist())) >= 36


def test_greedy_draw_takes_the_lowest_id_of_equals_and_reports_raw_logprobs() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 1.0, 2.0]], dtype=torch.bfloat16)
    result = draw(logits, [{"row": 1, "num_top": 4}, {"row": 0, "temperature": 0.0, "num_top": 2}])
    raw = logits.float().log_softmax(-1).numpy()
    assert result.tokens[:, 0].tolist() == [0, 1]
    np.testing.assert_allclose(result.logprobs[:, 0], [raw[1, 0], raw[0, 1]], rtol=1e-6)
    assert result.top_tokens.tolist() == [[0, 1, 3, 2], [1, 2, -1, -1]]
    np.testing.assert_allclose(result.top_logprobs[0], raw[1, [0, 1, 3, 2]], rtol=1e-6)
    assert np.isneginf(result.top_logprobs[1, 2:]).all()


def test_wide_greedy_draws_edit_the_log_softmax_without_renormalising_it() -> None:
    logits = torch.tensor([[0.5, 2.0, 2.0, -1.0, 2.0]])
    edit = LogitEdit(1, edit_table([1, 3], 2.0, [-np.inf, 8.0]))
    result = draw(logits, [{"width": 2}, {"width": 4}, {"width": 9}], [edit])
    raw = logits[0].log_softmax(-1).numpy()
    edited = np.array([raw[0], -np.inf, raw[2], 2 * raw[3] + 8.0, raw[4]])  # not normalised again
    assert result.tokens.tolist() == [[1, 2, -1, -1, -1], [3, 2, 4, 0, -1], [1, 2, 4, 0, 3]]
    np.testing.assert_allclose(result.logprobs[1, :4], edited[[3, 2, 4, 0]], rtol=1e-6)
    assert np.isneginf(result.logprobs[0, 2:]).all()
    assert result.raw_logprobs is not None and np.isneginf(result.raw_logprobs[[0, 2]]).all()
    np.testing.assert_allclose(result.raw_logprobs[1, :4], raw[[3, 2, 4, 0]], rtol=1e-6)
    assert not result.faults


def test_edits_change_the_draw_but_not_the_reported_logprob() -> None:
    logits = torch.tensor([[1.0, 0.0, -2.0]])
    edit = LogitEdit(0, edit_table([0, 2], 4.0, [0.0, 9.5]))
    result = draw(logits, [{}, {}], [edit])  # draw 0: [0.25, 0, -8 + 9.5]
    assert result.tokens[:, 0].tolist() == [2, 0]
    np.testing.assert_allclose(result.logprobs[:, 0], logits.log_softmax(-1)[0, [2, 0]].numpy(), rtol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("spec", [{}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0}, {"width": 3}])
def test_non_finite_logits_fault_their_own_draws_only(bad: float, spec: dict[str, Any]) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    healthy = draw(logits, [{"row": row, **spec} for row in range(3)])
    logits[1, 7] = bad
    result = draw(logits, [{"row": row, **spec} for row in (0, 1, 2, 1)])
    assert result.faults == ((1, NOT_FINITE), (3, NOT_FINITE))
    np.testing.assert_array_equal(result.tokens[[0, 2]], healthy.tokens[[0, 2]])
    assert (result.tokens[[1, 3]] == -1).all()


@pytest.mark.parametrize("spec", [{}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0}, {"width": 2}])
def test_banning_every_token_faults_the_draw(spec: dict[str, Any]) -> None:
    ban = LogitEdit(1, edit_table(np.arange(20), 1.0, -np.inf))
    result = draw(torch.randn(1, 20), [spec, spec], [ban])
    assert result.faults == ((1, NOTHING_LEFT),)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[80.0, 90.0, 89.9]])
    specs: list[dict[str, Any]] = [{"temperature": temperature, "position": index} for index in range(50)]
    assert set(draw(logits, specs).tokens[:, 0].tolist()) == {1}


@pytest.mark.parametrize("size", [1, 3, 8, 40])
def test_top_tokens_orders_equals_by_id(size: int) -> None:
    """Values from a handful of levels, so that every cut runs through equals; -0.0 equals 0.0."""
    values = torch.randint(-2, 3, (30, 40), generator=torch.Generator().manual_seed(size)).float()
    values[values == 0] *= torch.where(torch.arange(int((values == 0).sum())) % 2 == 0, 1.0, -1.0)
    found, ids = top_tokens(values, size)
    for row in range(len(values)):
        want = sorted(range(40), key=lambda token: (-values[row, token].item(), token))[:size]
        assert ids[row].tolist() == want
        assert found[row].tolist() == values[row, want].tolist()


def noise_of(spec: dict[str, Any], vocab_size: int) -> NDArray[np.float64]:
    """The keyed noise of one draw, for a whole vocabulary."""
    kinds = {"seed": np.uint64, "lane": np.int32, "position": np.int32}
    keys = draw_keys(*(np.array([spec.get(name, 0)], kind) for name, kind in kinds.items()))
    noise = gumbel(token_base(vocab_size, CPU), *(torch.from_numpy(word) for word in keys))
    return noise[0].double().numpy()


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 700])
def test_masks_allow_their_tokens_only(vocab_size: int) -> None:
    """Compare with a plain loop.

    One row has several masked draws and an unmasked one, with edits in addition.
    """
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(3))
    rng = np.random.default_rng(vocab_size)
    bias = np.array([5.0, 3.0], np.float32)
    ids = np.array([0, vocab_size - 1], np.int32) if vocab_size > 1 else np.zeros(1, np.int32)
    edit = LogitEdit(1, edit_table(ids, 1.0, bias[: len(ids)]))
    allowed = [sorted(set(rng.integers(0, vocab_size, max(vocab_size // 3, 1)).tolist())) for _ in range(4)]
    num_words = -(-vocab_size // 32)
    masks = [mask_of(draw_index, tokens, num_words) for draw_index, tokens in enumerate(allowed)]
    wide: dict[str, Any] = {"width": min(vocab_size, 40)}
    result = draw(logits, [{}, wide, {"temperature": 1.0}, {"width": 3, "temperature": 2.0}, wide], [edit], masks)
    raw = logits[0].double().numpy()
    edited = raw.copy()
    edited[ids] += bias[: len(ids)]
    assert result.tokens[0, 0] == max(allowed[0], key=lambda token: raw[token])
    want = sorted(allowed[1], key=lambda token: -edited[token])[: wide["width"]]
    assert result.tokens[1].tolist() == want + [-1] * (result.tokens.shape[1] - len(want))
    logprobs = edited - np.log(np.exp(raw if wide["width"] > 1 else edited).sum())  # not normalised again
    np.testing.assert_allclose(result.logprobs[1, : len(want)], logprobs[want], rtol=1e-5, atol=1e-6)
    assert result.tokens[2, 0] in allowed[2]
    drawn = result.tokens[3][result.tokens[3] >= 0].tolist()
    assert len(drawn) == min(3, len(allowed[3]), vocab_size) and set(drawn) <= set(allowed[3])
    np.testing.assert_allclose(result.logprobs[0, 0], logits.log_softmax(-1)[0, result.tokens[0, 0]], rtol=1e-5)
    assert result.tokens[4].tolist() == np.argsort(-raw, kind="stable")[: result.tokens.shape[1]].tolist(), "unmasked"


def test_ids_beyond_the_last_word_are_forbidden_and_words_beyond_the_last_id_ignored() -> None:
    logits = torch.arange(80).float()[None]
    short, long = mask_of(0, [3, 31], 1), mask_of(1, [3, 70, 127], 4)
    assert draw(logits, [{}, {}], masks=[short, long]).tokens[:, 0].tolist() == [31, 70]


@pytest.mark.parametrize(
    "spec", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"width": 2}, {"width": 2, "temperature": 1.0}]
)
def test_mask_without_tokens_faults_its_draw_only(spec: dict[str, Any]) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5))
    result = draw(logits, [spec] * 3, masks=[mask_of(1, [], 2), mask_of(2, [39], 2)])
    assert result.faults == ((1, NOTHING_LEFT),)
    assert result.tokens[2, 0] == 39 and result.tokens[0, 0] >= 0


def test_edit_and_mask_that_forbid_every_token_fault_the_draw() -> None:
    ban = LogitEdit(0, edit_table([7], 1.0, -np.inf))
    result = draw(torch.randn(1, 40), [{}, {}], [ban], [mask_of(0, [7], 2), mask_of(1, [7], 2)])
    assert result.faults == ((0, NOTHING_LEFT),) and result.tokens[1, 0] == 7


def test_edits_of_ids_outside_the_vocabulary_are_ignored() -> None:
    ids, add = np.array([-1, 2, 3, 999], np.int32), np.full(4, 50.0, np.float32)
    result = draw(torch.tensor([[3.0, 2.0, 1.0]]), [{}], [LogitEdit(0, edit_table(ids, 1.0, add))])
    assert result.tokens[0, 0] == 2


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize("vocab_size", [30, 700])
def test_distinct_draws_are_the_top_of_log_probability_plus_noise(
    temperature: float, top_k: int, top_p: float, min_p: float, vocab_size: int
) -> None:
    """Compare Gumbel top-k with its formula over the exact filtered distribution.

    Draws of other widths are in the same batch.
    """
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(17)) * 1.5
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    specs: list[dict[str, Any]] = [
        {"row": place % 2, "seed": 5, "lane": place, "position": 9, "width": width, **filters}
        for place, width in enumerate((2, 1, 7, 40, 3))
    ]
    result = draw(logits, [*specs, {"width": 3}, {}])
    assert result.perturbed is not None and not result.faults
    for place, spec in enumerate(specs):
        if spec["width"] == 1:
            continue
        probs = exact(logits[spec["row"]], temperature, top_k, top_p, min_p)
        with np.errstate(divide="ignore"):
            logprobs = np.log(probs)
        sums = logprobs + noise_of(spec, vocab_size)
        want = [token for token in np.argsort(-sums)[: spec["width"]] if probs[token] > 0]
        assert result.tokens[place].tolist() == want + [-1] * (result.tokens.shape[1] - len(want))
        used = slice(len(want))
        np.testing.assert_allclose(result.logprobs[place, used], logprobs[want], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(result.perturbed[place, used], sums[want], rtol=1e-4, atol=1e-4)
        assert np.isneginf(result.perturbed[place, len(want) :]).all()
    assert np.isneginf(result.perturbed[1]).all() and np.isneginf(result.perturbed[-2:]).all()
    assert result.tokens[-2].tolist()[:3] == np.argsort(-logits[0].numpy())[:3].tolist()


def test_first_distinct_token_equals_an_ordinary_draw() -> None:
    """One definition of the noise, and of the sum that is compared."""
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(8)) * 0.3
    keys = [{"seed": 11, "lane": place % 7, "position": place, "temperature": 0.7} for place in range(300)]
    wide = draw(logits, [{**key, "width": 4} for key in keys])
    assert wide.tokens[:, 0].tolist() == draw(logits, keys).tokens[:, 0].tolist()
    assert all(len(set(row)) == 4 for row in wide.tokens.tolist())


def test_distinct_draws_follow_the_distribution_without_replacement() -> None:
    """Ordered triples out of five tokens: p(a) p(b) / (1 - p(a)) p(c) / (1 - p(a) - p(b))."""
    logits = torch.tensor([[1.0, 0.2, -0.5, 0.9, -1.5]])
    probs = logits.double().softmax(-1)[0].tolist()
    specs: list[dict[str, Any]] = [{"width": 3, "temperature": 1.0, "position": place} for place in range(8000)]
    counts = Counter(map(tuple, draw(logits, specs).tokens.tolist()))
    chi2 = 0.0
    for a, b, c in permutations(range(5), 3):
        expected = 8000 * probs[a] * probs[b] / (1 - probs[a]) * probs[c] / (1 - probs[a] - probs[b])
        chi2 += (counts[a, b, c] - expected) ** 2 / expected
    assert chi2 < 59 + 5 * (2 * 59) ** 0.5


def test_result_without_distinct_draws_has_no_perturbed_scores() -> None:
    result = draw(torch.randn(1, 9), [{"width": 3}, {"temperature": 1.0}])
    assert result.perturbed is not None and result.perturbed.shape == (2, 0)


def test_distinct_draws_report_the_raw_log_probabilities_too() -> None:
    logits = torch.randn(2, 60, generator=torch.Generator().manual_seed(4))
    raw = logits.log_softmax(-1).numpy()
    edit = LogitEdit(1, edit_table([3, 8], 1.0, [9.0, -np.inf]))
    warm = {"width": 3, "temperature": 0.6, "top_k": 9}
    result = draw(logits, [warm, {**warm, "row": 1}, {"width": 5}, {"temperature": 1.0}], [edit])
    assert result.raw_logprobs is not None and result.tokens[1, 0] == 3
    for place in range(2):
        np.testing.assert_allclose(result.raw_logprobs[place, :3], raw[place, result.tokens[place, :3]], rtol=1e-5)
        assert not np.allclose(result.raw_logprobs[place, :3], result.logprobs[place, :3])
    assert np.isneginf(result.raw_logprobs[:2, 3:]).all()
    assert np.isneginf(result.raw_logprobs[2:]).all(), "those of all other draws are raw anyway"


def test_distinct_draws_of_non_finite_logits_fault() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    logits[1, 7] = torch.nan
    result = draw(logits, [{"row": row, "width": 3, "temperature": 1.0} for row in range(2)])
    assert result.faults == ((1, NOT_FINITE),) and (result.tokens[1] == -1).all()
    assert result.perturbed is not None and np.isneginf(result.perturbed[1]).all()
