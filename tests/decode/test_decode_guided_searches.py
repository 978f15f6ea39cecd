"""Beams, groups and distinct candidates within a grammar, exact against implementations that look at everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.types import BeamSearchParams, SamplingParams
from tests.decode import all_outputs, dense_beams
from tests.decode.decode_driver import TableModel
from tests.decode.dense_beams import Output
from tests.decode.toy_grammar import ToyGrammar

VOCAB = 10


@given(
    grouping=st.sampled_from([(1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (6, 3), (3, 3)]),
    grammar=st.integers(0, 999),
    model=st.integers(0, 999),
    sharpness=st.sampled_from([0.3, 3.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    eos=st.sampled_from([(1,), (0, 1)]),
    stop=st.sampled_from([(), ("c", "de")]),
    min_tokens=st.integers(0, 4),
)
@settings(max_examples=200, deadline=None)
def test_beams_within_a_grammar_equal_dense(
    grouping: tuple[int, int],
    grammar: int,
    model: int,
    sharpness: float,
    early_stopping: bool | str,
    eos: Output,
    stop: tuple[str, ...],
    min_tokens: int,
) -> None:
    """Few paths may exist at all: then fewer candidates come back, and nothing was promised of the others."""
    params = BeamSearchParams(
        beam_width=grouping[0],
        num_beam_groups=grouping[1],
        diversity_penalty=0.5 if grouping[1] > 1 else 0.0,
        early_stopping=early_stopping,
        stop=stop,
        min_tokens=min_tokens,
    )
    logits, rules = TableModel(VOCAB, model, sharpness), ToyGrammar(VOCAB, eos, grammar)
    dense_beams.check(params, logits, vocab_size=VOCAB, eos=eos, max_tokens=6, grammar=rules)


@given(
    n=st.integers(1, 6),
    grammar=st.integers(0, 999),
    model=st.integers(0, 999),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.5, 1.0]),
    min_tokens=st.integers(0, 3),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
)
@settings(max_examples=150, deadline=None)
def test_distinct_candidates_within_a_grammar_equal_every_output_perturbed(
    n: int, grammar: int, model: int, seed: int, temperature: float, min_tokens: int, frequency_penalty: float
) -> None:
    params = SamplingParams(
        n=n,
        distinct=True,
        seed=seed,
        temperature=temperature,
        min_tokens=min_tokens,
        frequency_penalty=frequency_penalty,
    )
    rules = ToyGrammar(5, (1,), grammar, num_states=4)
    all_outputs.check(params, TableModel(5, model, 1.0), vocab_size=5, eos=(1,), max_tokens=4, grammar=rules)
