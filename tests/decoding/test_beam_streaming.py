"""What beams stream: the agreed prefix as soon as it is agreed, and the live beams for those who watch."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatcache.decoding.token_tree import Node, TokenTree
from chatcache.types.request import BeamSearchParams
from tests.decoding.decode_driver import Outcome, Run, TableModel, log_softmax
from tests.decoding.dense_beams import PROMPT, DenseBeams, Output, beam_run, num_common

VOCAB = 24


@st.composite
def searches(draw: st.DrawFn) -> tuple[BeamSearchParams, TableModel, Output]:
    width = draw(st.integers(1, 8))
    groups = draw(st.sampled_from([g for g in range(1, width + 1) if width % g == 0]))
    params = BeamSearchParams(
        beam_width=width,
        n=draw(st.integers(1, width)),
        num_beam_groups=groups,
        diversity_penalty=draw(st.sampled_from([0.0, 0.3])) if groups > 1 else 0.0,
        length_penalty=draw(st.sampled_from([0.0, 1.0, 2.0])),
        early_stopping=draw(st.one_of(st.booleans(), st.just("never"))),
        stop=draw(st.sampled_from([(), ("a", "bc")])),
        min_tokens=draw(st.integers(0, 6)),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        stream_beams=True,
    )
    sharpness = draw(st.sampled_from([1.0, 3.0, 5.0]))  # the sharper, the sooner beams agree
    return params, TableModel(VOCAB, draw(st.integers(0, 999)), sharpness), draw(st.sampled_from([(5,), (5, 9)]))


@given(searches())
@settings(max_examples=200, deadline=None)
@pytest.mark.slow
def test_a_token_is_emitted_in_the_step_in_which_it_is_agreed_on(
    search: tuple[BeamSearchParams, TableModel, Output],
) -> None:
    params, logits, eos = search
    dense = DenseBeams(params, logits, vocab_size=VOCAB, eos=eos, max_tokens=16)
    want = dense.run()
    got = beam_run(params, logits, vocab_size=VOCAB, eos=eos, max_tokens=16)
    assert [tuple(outcome.tokens) for outcome in got.outcomes.values()] == [output for _, output, _ in want]
    assert [pieces[0] if pieces else 0 for pieces in got.pieces[:-1]] == dense.agreed
    assert all(len(set(pieces.values())) <= 1 for pieces in got.pieces[:-1]), "all candidates are told the same"
    for outcome in got.outcomes.values():
        check_logprobs(outcome, params, logits)


def check_logprobs(outcome: Outcome, params: BeamSearchParams, logits: TableModel) -> None:
    assert len(outcome.logprobs) == (0 if params.logprobs is None else len(outcome.tokens))
    for place, entry in enumerate(outcome.logprobs):
        raw = log_softmax(logits(PROMPT + tuple(outcome.tokens[:place])))
        assert entry.logprob == float(raw[outcome.tokens[place]])
        assert [token for token, _ in entry.top] == (-raw).argsort(kind="stable")[: params.logprobs].tolist()


def test_half_of_a_sharp_answer_arrives_before_the_end() -> None:
    params = BeamSearchParams(beam_width=4, n=1, ignore_eos=True)
    got = beam_run(params, TableModel(VOCAB, 1, 4.0), vocab_size=VOCAB, eos=(), max_tokens=60)
    assert got.pieces[-2][0] > 30


@given(searches())
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_a_client_can_rebuild_the_tree(search: tuple[BeamSearchParams, TableModel, Output]) -> None:
    params, logits, eos = search
    got = beam_run(params, logits, vocab_size=VOCAB, eos=eos, max_tokens=10)
    paths = rebuilt(got)
    assert len(got.grown) == got.num_steps - 1, "after every step in which something lives on"
    for step, grown in enumerate(got.grown):
        scores = [beam.score for beam in grown.beams]
        assert scores == sorted(scores, reverse=True) and len(scores) <= params.beam_width
        for beam in grown.beams:
            assert len(paths[beam.node]) == step + 1
            if not params.diversity_penalty:
                assert beam.score == pytest.approx(summed(paths[beam.node], logits), abs=1e-4)
    for outcome in got.outcomes.values():
        assert tuple(outcome.tokens[:-1]) in paths.values(), "all but the last token of a candidate was a live beam"


def rebuilt(got: Run) -> dict[int, Output]:
    """Grow the tree from the events; every node is reported once per step and never changes its meaning."""
    paths: dict[int, Output] = {0: ()}
    for grown in got.grown:
        assert len({beam.node for beam in grown.beams}) == len(grown.beams)
        for beam in grown.beams:
            assert beam.node not in paths
            paths[beam.node] = (*paths[beam.parent], beam.token_id)
    assert len(set(paths.values())) == len(paths)
    return paths


def summed(output: Output, logits: TableModel) -> float:
    return math.fsum(float(log_softmax(logits(PROMPT + output[:k]))[token]) for k, token in enumerate(output))


def test_live_beams_are_reported_only_on_request() -> None:
    got = beam_run(BeamSearchParams(), TableModel(VOCAB), vocab_size=VOCAB, eos=(5,), max_tokens=8)
    assert got.grown == []


@pytest.mark.slow
def test_the_work_of_a_step_does_not_grow_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    num_moves = 0
    original = Node.get_parent

    def up(self: Node) -> Node:
        nonlocal num_moves
        num_moves += 1
        return original(self)

    monkeypatch.setattr(Node, "get_parent", up)
    for sharpness in (0.05, 4.0):  # the beams agree late, or soon
        num_moves = 0
        params = BeamSearchParams(beam_width=4, ignore_eos=True)
        got = beam_run(params, TableModel(VOCAB, 2, sharpness), vocab_size=VOCAB, eos=(), max_tokens=300)
        assert got.num_steps == 300
        assert num_moves <= 300 * 4 * 4


@pytest.mark.parametrize("seed", range(30))
def test_the_tree_knows_what_all_leaves_have_in_common(seed: int) -> None:
    """Against plain lists: grow, hold and release leaves at random."""
    rng = random.Random(seed)
    tree = TokenTree()
    tree.root.num_refs += 1
    leaves: list[tuple[Node, tuple[int, ...]]] = [(tree.root, ())]
    for _ in range(200):
        place = rng.randrange(len(leaves))
        node, path = leaves[place]
        if rng.random() < 0.5 or len(leaves) == 1:
            children = rng.choices(range(4), k=rng.randint(1, 3))
            leaves += [(tree.add(node, token), (*path, token)) for token in children]
        if rng.random() < 0.8:
            tree.release(leaves.pop(place)[0])
        agreed = tree.advance_common_prefix()
        assert tuple(step.token for step in agreed.path_below(tree.root)) == common([path for _, path in leaves])
        for node, path in leaves:
            assert tuple(step.token for step in node.path_below(tree.root)) == path


def common(paths: list[tuple[int, ...]]) -> tuple[int, ...]:
    return paths[0][: num_common(paths)]
