"""Logit edits against transformers' processor and the formulas written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from chatcache.decoding.logit_edits import LogitEdits
from chatcache.types.actions import DrawSpec
from chatcache.types.plan import F32
from chatcache.types.request import SamplingParams
from tests.decoding.decode_driver import edited

VOCAB_SIZE = 40
tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60)


def logits_of(seed: int) -> F32:
    return (np.random.default_rng(seed).standard_normal(VOCAB_SIZE) * 4).astype(np.float32)


def after(edits: LogitEdits, logits: F32, *, ban: bool = False) -> F32:
    return edited(logits, DrawSpec(edit=edits.edit(ban=ban)))


@given(prompt=tokens.filter(bool), output=tokens, penalty=st.floats(0.1, 10), seed=st.integers(0, 99))
@settings(deadline=None)
def test_repetition_equals_transformers(prompt: list[int], output: list[int], penalty: float, seed: int) -> None:
    edits = LogitEdits(SamplingParams(repetition_penalty=penalty), prompt)
    for token in output:
        edits.record(token)
    logits = logits_of(seed)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    want = processor(torch.tensor([prompt + output]), torch.tensor(logits)[None].clone())[0].numpy()
    np.testing.assert_allclose(after(edits, logits), want, rtol=1e-6)


@given(
    prompt=tokens,
    output=tokens,
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100), max_size=5),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_all_together_equal_the_formulas(
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
    seed: int,
) -> None:
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=bias
    )
    edits = LogitEdits(params, prompt, bannable=(3, 4))
    for token in output:
        edits.record(token)
    logits = logits_of(seed)
    want = logits.astype(np.float64)
    for token in range(VOCAB_SIZE):
        if token in prompt or token in output:
            want[token] = want[token] / repetition if want[token] > 0 else want[token] * repetition
        count = output.count(token)
        want[token] += bias.get(token, 0.0) - presence * (count > 0) - frequency * count
    np.testing.assert_allclose(after(edits, logits), want, rtol=1e-5, atol=1e-4)
    want[[3, 4]] = -np.inf
    np.testing.assert_allclose(after(edits, logits, ban=True), want, rtol=1e-5, atol=1e-4)


def test_presence_and_frequency_ignore_the_prompt() -> None:
    edits = LogitEdits(SamplingParams(presence_penalty=1.0, frequency_penalty=1.0), prompt=[1, 2, 3])
    assert edits.edit(ban=False) is None


def test_nothing_to_edit_costs_nothing() -> None:
    edits = LogitEdits(SamplingParams(), prompt=range(1000), bannable=(5,))
    edits.record(7)
    assert edits.edit(ban=False) is None
    assert edits.fork() is edits
    banned = edits.edit(ban=True)
    assert banned is not None
    assert banned.tolist() == [(5, 1.0, -np.inf)]


def test_forks_go_their_own_ways() -> None:
    edits = LogitEdits(SamplingParams(frequency_penalty=0.5, repetition_penalty=2.0, logit_bias={3: 1.0}), prompt=[1])
    edits.record(2)
    copied = edits.fork()
    for token in range(30):
        edits.record(token)
    copied.record(9)
    table = copied.edit(ban=False)
    assert table is not None
    assert table.tolist() == [(1, 2.0, 0.0), (3, 1.0, 1.0), (2, 2.0, -0.5), (9, 2.0, -0.5)]
    grown = edits.edit(ban=False)
    assert grown is not None and len(grown) == 30
    assert grown[:3].tolist() == [(1, 2.0, -0.5), (3, 2.0, 0.5), (2, 2.0, -1.0)]


@pytest.mark.parametrize("kind", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_alone_changes_something(kind: str) -> None:
    edits = LogitEdits(SamplingParams(**{kind: 1.5}), prompt=[])  # type: ignore[arg-type]
    edits.record(11)
    logits = logits_of(0)
    assert np.flatnonzero(after(edits, logits) != logits).tolist() == [11]
