"""Distinct n-best against enumeration: every output of a toy model, perturbed from the top down."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.decoding.unique import child_seed, log1mexp, shift_to_maximum
from chatcache.types.request import SamplingParams
from tests.decoding.all_outputs import PROMPT, Everything, Output, check, distinct_run
from tests.decoding.decode_driver import TableModel, log_softmax


@given(
    n=st.integers(1, 9),
    vocab_size=st.integers(2, 5),
    max_tokens=st.integers(1, 5),
    model=st.integers(0, 999),
    sharpness=st.sampled_from([0.1, 1.0, 3.0]),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    eos=st.sampled_from([(), (1,), (0, 1)]),
    stop=st.sampled_from([(), ("a", "bc"), ("dd", "eb", "c")]),
    min_tokens=st.integers(0, 3),
    penalties=st.sampled_from([{}, {"frequency_penalty": 0.7}, {"presence_penalty": -1.0, "repetition_penalty": 1.3}]),
    logit_bias=st.sampled_from([None, {0: 1.5, 1: -100.0}]),
)
@settings(max_examples=200, deadline=None)
@pytest.mark.slow
def test_equals_every_output_perturbed(
    n: int,
    vocab_size: int,
    max_tokens: int,
    model: int,
    sharpness: float,
    seed: int,
    temperature: float,
    eos: Output,
    stop: tuple[str, ...],
    min_tokens: int,
    penalties: dict[str, float],
    logit_bias: dict[int, float] | None,
) -> None:
    """To the token, in order, at every step; a larger n therefore begins with the candidates of a smaller one."""
    params = SamplingParams(
        n=n,
        distinct=True,
        seed=seed,
        temperature=temperature,
        stop=stop,
        min_tokens=min(min_tokens, max_tokens if vocab_size > len(eos) else 0),
        logit_bias=logit_bias,
        **penalties,  # type: ignore[arg-type]
    )
    check(params, TableModel(vocab_size, model, sharpness), vocab_size=vocab_size, eos=eos, max_tokens=max_tokens)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.slow
def test_candidates_are_included_as_often_as_without_replacement(n: int) -> None:
    """Counts over seeds, within 4 sigma of the probabilities by enumeration; the first candidate is a plain sample."""
    logits, num_seeds = TableModel(3, 11, 1.0), 2500
    shape = {"vocab_size": 3, "eos": (2,), "max_tokens": 3}
    everything = Everything(SamplingParams(distinct=True), logits, **shape)  # type: ignore[arg-type]
    probability = {prefix.output: math.exp(prefix.score) for prefix in everything.levels[-1]}
    assert len(probability) == 15 and sum(probability.values()) == pytest.approx(1.0, abs=1e-5)
    included: Counter[Output] = Counter()
    first: Counter[Output] = Counter()
    for seed in range(num_seeds):
        outcomes = distinct_run(SamplingParams(n=n, distinct=True, seed=seed), logits, **shape).outcomes  # type: ignore[arg-type]
        outputs = [tuple(outcome.tokens) for outcome in outcomes.values()]
        assert len(set(outputs)) == n
        included.update(outputs)
        first[outputs[0]] += 1
    for counts, expected in ((first, probability), (included, inclusion(probability, n))):
        for output, p in expected.items():
            sigma = math.sqrt(num_seeds * p * (1 - p))
            assert abs(counts[output] - num_seeds * p) <= 4 * sigma, output


def inclusion(probability: dict[Output, float], n: int) -> dict[Output, float]:
    """How likely each output is among n drawn one after another, those drawn before struck out."""
    result = dict.fromkeys(probability, 0.0)
    for drawn in itertools.permutations(probability, n):
        chance, left = 1.0, 1.0
        for output in drawn:
            chance *= probability[output] / left
            left -= probability[output]
        for output in drawn:
            result[output] += chance
    return result


def test_a_token_s_logprob_is_raw() -> None:
    logits = TableModel(12, 3)
    params = SamplingParams(n=4, distinct=True, seed=1, temperature=0.7, logprobs=2)
    for outcome in distinct_run(params, logits, vocab_size=12, eos=(5,), max_tokens=8).outcomes.values():
        assert outcome.done is not None
        assert len(outcome.logprobs) == len(outcome.tokens)
        scaled = 0.0
        for place, (token, entry) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True)):
            raw = logits(PROMPT + tuple(outcome.tokens[:place]))
            assert entry.logprob == float(log_softmax(raw)[token])
            assert [t for t, _ in entry.top] == (-raw).argsort(kind="stable")[:2].tolist()
            scaled += float(log_softmax(raw / np.float32(0.7))[token])
        assert outcome.done.score == pytest.approx(scaled, abs=1e-6)


def test_branches_are_as_many_as_candidates_at_most() -> None:
    for n in (1, 3, 8):
        got = distinct_run(
            SamplingParams(n=n, distinct=True, seed=n), TableModel(30, 1), vocab_size=30, eos=(5,), max_tokens=12
        )
        assert got.most_alive <= n
        outputs = [tuple(outcome.tokens) for outcome in got.outcomes.values()]
        assert len(set(outputs)) == n


def test_the_noise_of_a_prefix_is_its_own() -> None:
    """A short walk through the tree meets no key twice, and keys tell token order apart."""
    seeds: dict[Output, int] = {(): 7}
    for output in itertools.chain.from_iterable(itertools.product(range(6), repeat=k) for k in range(1, 6)):
        seeds[output] = child_seed(seeds[output[:-1]], output[-1])
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds.values())


@pytest.mark.parametrize("value", [0.0, -3.0, -60.0, 5.0])
def test_conditioning_is_stable(value: float) -> None:
    """Against long doubles where those suffice, and finite and ordered where they do not."""
    gaps = [0.0, 1e-12, 1e-7, 1e-3, 0.5, 1.0, 20.0, 45.0]
    perturbed = [1.25 - gap for gap in gaps]
    got = [shift_to_maximum(value, one - 2.0, ahead=gap) for one, gap in zip(perturbed, gaps, strict=True)]
    assert got[0] == value and got == sorted(got, reverse=True)
    exact = np.array(perturbed, np.longdouble) - 2
    want = -np.log(np.exp(-np.longdouble(value)) - np.exp(-exact[0]) + np.exp(-exact))
    if abs(value) < 10:
        assert got == pytest.approx(want.astype(float).tolist(), abs=1e-9)
    far = [shift_to_maximum(value, one - 800.0, ahead=900.0 - one) for one in (900.0, 899.0, 0.0, -900.0)]
    assert all(math.isfinite(one) for one in far) and far == sorted(far, reverse=True)


def test_log1mexp() -> None:
    for x in (1e-300, 1e-12, 1e-3, 0.5, 0.7, 1.0, 30.0, 800.0):
        with localcontext(prec=400):
            want = float((1 - (-Decimal(x)).exp()).ln())
        assert log1mexp(x) == pytest.approx(want, rel=1e-12, abs=0)
