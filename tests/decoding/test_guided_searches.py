"""Beams, groups and distinct candidates within a grammar, exact against implementations that look at everything."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.decoding.beam_search import BeamStrategy
from chatcache.decoding.grammar.state import GrammarDeadEndError
from chatcache.decoding.stopping import StopRules
from chatcache.types.request import BeamSearchParams, SamplingParams
from tests.decoding import all_outputs, dense_beams
from tests.decoding.decode_driver import Run, TableModel, run
from tests.decoding.toy_grammar import Output, ToyConstraint, ToyGrammar, ToyGuide

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
@pytest.mark.slow
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
@pytest.mark.slow
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


class Pit(ToyGuide):
    """After one of `fatal` the grammar requires more text, but no token matches it."""

    fatal: frozenset[int]

    def consume(self, token: int) -> bool:
        if token in self.fatal:
            raise GrammarDeadEndError
        return super().consume(token)


class Pits(ToyConstraint):
    def __init__(self, grammar: ToyGrammar, fatal: frozenset[int]) -> None:
        super().__init__(grammar, 0)
        self.fatal = fatal

    def fork(self, guide: ToyGuide | None) -> ToyGuide:
        pit = Pit(self.grammar, guide.output if guide is not None else ())
        pit.fatal = self.fatal
        return pit


def search_among_pits(fatal: frozenset[int]) -> Run:
    params = BeamSearchParams(beam_width=4, num_beam_groups=2, diversity_penalty=1.0)
    rules = StopRules(max_tokens=5, eos_ids=(9,))
    constraint = cast(Any, Pits(Anything(VOCAB, (9,), 0), fatal))
    strategy = BeamStrategy(params, rules, prompt=(1,), vocab_size=VOCAB, constraint=constraint)
    return run(strategy, (1,), TableModel(VOCAB, 3))


class Anything(ToyGrammar):
    def state(self, output: Output) -> int:
        return 0


def test_a_dead_end_is_an_error_only_where_nothing_else_is_found() -> None:
    """Beams walk around it as long as one of any group can."""
    got = search_among_pits(frozenset({0, 2, 4, 5}))
    assert all(outcome.done and not {0, 2, 4, 5} & set(outcome.tokens) for outcome in got.outcomes.values())
    with pytest.raises(GrammarDeadEndError, match="no token of this model continues"):
        search_among_pits(frozenset(range(9)))
