"""Diverse beam search, to the bit, against a dense one that looks at whole vocabularies and copies everything."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.types.request import BeamSearchParams
from tests.decoding.decode_driver import TableModel
from tests.decoding.dense_beams import Output, beam_run, check

GROUPINGS = [(width, groups) for width in range(1, 9) for groups in range(1, width + 1) if width % groups == 0]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(("width", "groups"), GROUPINGS)
def test_equals_dense(width: int, groups: int, early_stopping: bool | str) -> None:
    for seed, penalty in itertools.product(range(2), (0.0, 0.4, 3.0) if groups > 1 else (0.0,)):
        params = BeamSearchParams(
            beam_width=width,
            num_beam_groups=groups,
            diversity_penalty=penalty,
            length_penalty=(-0.7, 0.0, 1.0, 2.0)[(seed + width) % 4],
            early_stopping=early_stopping,
        )
        check(params, TableModel(24, seed), vocab_size=24, eos=((5,), (5, 9))[seed % 2], max_tokens=9)


@given(
    grouping=st.sampled_from(GROUPINGS),
    vocab_size=st.integers(2, 26),
    seed=st.integers(0, 999),
    sharpness=st.sampled_from([0.02, 0.5, 2.0, 4.0]),
    penalty=st.one_of(st.sampled_from([0.0, 100.0]), st.floats(0.01, 5.0)),
    length_penalty=st.floats(-3, 3),
    early_stopping=st.sampled_from([True, False, "never"]),
    eos=st.sampled_from([(), (1,), (0, 1)]),
    stop=st.sampled_from([(), ("a", "bc"), ("ddd", "eb", "c")]),
    min_tokens=st.integers(0, 4),
)
@settings(max_examples=250, deadline=None)
@pytest.mark.slow
def test_equals_dense_whatever_is_asked(
    grouping: tuple[int, int],
    vocab_size: int,
    seed: int,
    sharpness: float,
    penalty: float,
    length_penalty: float,
    early_stopping: bool | str,
    eos: Output,
    stop: tuple[str, ...],
    min_tokens: int,
) -> None:
    """Flat models (sharpness 0.02) let the penalty reorder nearly everything: the draw must be wide enough for it."""
    width, groups = grouping
    params = BeamSearchParams(
        beam_width=width,
        num_beam_groups=groups,
        diversity_penalty=penalty if groups > 1 else 0.0,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        stop=stop,
        min_tokens=min_tokens,
    )
    check(params, TableModel(vocab_size, seed, sharpness), vocab_size=vocab_size, eos=eos, max_tokens=7)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_when_a_search_ends_shows_in_its_result(early_stopping: bool | str) -> None:
    """Sharp models and frequent ends: a step too few or too many is another result in some of these."""
    for seed, length_penalty in itertools.product(range(20), (-0.4, 0.0, 0.4)):
        params = BeamSearchParams(beam_width=2, length_penalty=length_penalty, early_stopping=early_stopping)
        check(params, TableModel(8, seed, 4.0), vocab_size=8, eos=(1, 2), max_tokens=12)


def test_a_penalty_keeps_the_groups_apart() -> None:
    """A strong penalty: in no step do two groups go on with the same token."""
    params = BeamSearchParams(
        beam_width=6, num_beam_groups=6, diversity_penalty=100.0, ignore_eos=True, stream_beams=True
    )
    got = check(params, TableModel(20, 7), vocab_size=20, eos=(), max_tokens=6)
    for grown in got.grown:
        assert len({beam.token_id for beam in grown.beams}) == 6


def test_groups_without_a_penalty_are_one_search_on_shared_branches() -> None:
    logits = TableModel(20, 3)
    single = beam_run(BeamSearchParams(beam_width=2), logits, vocab_size=20, eos=(5,), max_tokens=8)
    many = beam_run(BeamSearchParams(beam_width=6, num_beam_groups=3), logits, vocab_size=20, eos=(5,), max_tokens=8)
    tokens = [outcome.tokens for outcome in single.outcomes.values()]
    assert sorted(outcome.tokens for outcome in many.outcomes.values()) == sorted(tokens * 3)
    assert many.most_alive == single.most_alive == 2
