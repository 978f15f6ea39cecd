"""The searches' tests have teeth: each of these plausible bugs shows in what is decoded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from chatcache.decoding import beam_search as beam
from chatcache.decoding import beam_search as groups
from chatcache.decoding import token_tree
from chatcache.decoding import unique as distinct
from chatcache.decoding.beam_search import BeamGroup, FinishedHypotheses
from chatcache.decoding.logit_edits import LogitEdits
from chatcache.decoding.token_tree import Node, TokenTree
from chatcache.types.actions import Extend, Fork, expand_actions
from chatcache.types.request import BeamSearchParams, SamplingParams
from tests.decoding import all_outputs, dense_beams
from tests.decoding.decode_driver import TableModel

Patch = pytest.MonkeyPatch


def search_beams() -> None:
    """Small searches of many kinds, each compared with the dense one, streaming included."""
    stops: tuple[bool | str, ...] = (True, False, "never")
    kinds = itertools.product(range(12), stops, ((4, 2, 0.0), (4, 2, 1.0), (3, 3, 0.5), (3, 1, 0.0)))
    for seed, early_stopping, (width, num_groups, penalty) in kinds:
        params = BeamSearchParams(
            beam_width=width,
            n=1 + seed % 2,
            num_beam_groups=num_groups,
            diversity_penalty=penalty,
            early_stopping=early_stopping,
            length_penalty=(0.0, 1.0, -0.4)[seed % 3],
            logprobs=0,
        )
        logits, shape = TableModel(9, seed, (0.3, 4.0)[seed % 2]), {"vocab_size": 9, "eos": (1, 2), "max_tokens": 8}
        got = dense_beams.check(params, logits, **shape)  # type: ignore[arg-type]
        dense = dense_beams.DenseBeams(params, logits, **shape)  # type: ignore[arg-type]
        dense.run()
        assert [pieces[0] if pieces else 0 for pieces in got.pieces[:-1]] == dense.agreed
        for outcome in got.outcomes.values():
            assert len(outcome.logprobs) == len(outcome.tokens)


def search_distinct() -> None:
    for seed in range(40):
        params = SamplingParams(n=1 + seed % 5, distinct=True, seed=seed, frequency_penalty=0.5 * (seed % 2))
        all_outputs.check(params, TableModel(4, seed, 1.0), vocab_size=4, eos=(1,), max_tokens=4)


def the_draw_is_as_wide_as_without_groups(patch: Patch) -> None:
    patch.setattr(beam, "num_draws_needed", lambda params, *_: params.beam_width // params.num_beam_groups + 2)


def the_crowd_is_forgotten(patch: Patch) -> None:
    original = BeamGroup.advance
    patch.setattr(BeamGroup, "advance", lambda self, ranked, crowd: original(self, ranked, {}))


def a_group_fears_itself(patch: Patch) -> None:
    original = BeamGroup.advance

    def advance(self: BeamGroup, ranked: Sequence[groups.Continuation], crowd: groups.TokenCounts) -> object:
        for each in self.beams:
            crowd[each.node.token] = crowd.get(each.node.token, 0) + 1
        return original(self, ranked, crowd)

    patch.setattr(BeamGroup, "advance", advance)


def never_means_at_any_length_whatever_the_penalty(patch: Patch) -> None:
    original = FinishedHypotheses.is_done

    def settled(self: FinishedHypotheses, best_total: float, num_tokens: int) -> bool:
        return original(self, best_total, self._max_tokens if self._early_stopping == "never" else num_tokens)

    patch.setattr(FinishedHypotheses, "is_done", settled)


def the_last_token_does_not_count(patch: Patch) -> None:
    original = FinishedHypotheses.score
    patch.setattr(FinishedHypotheses, "score", lambda self, total, n: original(self, total, max(n - 1, 1)))


def a_better_hypothesis_comes_too_late(patch: Patch) -> None:
    original = FinishedHypotheses.add
    patch.setattr(FinishedHypotheses, "add", lambda self, found: original(self, found[: self._width - len(self.best)]))


def dead_branches_hold_up_the_stream(patch: Patch) -> None:
    def release(self: TokenTree, node: Node) -> None:
        node.num_refs -= 1

    patch.setattr(TokenTree, "release", release)


def the_stream_follows_the_best_beam(patch: Patch) -> None:
    def agree(self: TokenTree) -> Node:
        while self.common_prefix.children:
            self.common_prefix = next(iter(self.common_prefix.children.values()))
        return self.common_prefix

    patch.setattr(TokenTree, "advance_common_prefix", agree)


def finished_candidates_are_let_go(patch: Patch) -> None:
    original = TokenTree.add

    def grow(self: TokenTree, parent: Node, token: int, logprob: object = None) -> Node:
        node = original(self, parent, token, None)
        node.num_refs -= token in (1, 2)
        return node

    patch.setattr(TokenTree, "add", grow)


def the_wrong_child_inherits(patch: Patch) -> None:
    original = token_tree.BranchReassignment.reassign

    def reassign(self: token_tree.BranchReassignment, nodes: list[Node], **options: bool) -> tuple[object, ...]:
        actions = expand_actions(original(self, nodes, **options))
        for (i, one), (j, other) in itertools.permutations(enumerate(actions), 2):
            if isinstance(one, Fork) and isinstance(other, Extend) and one.parent == other.branch:
                actions[i], actions[j] = Fork(one.parent, one.child, other.token), Extend(other.branch, one.token)
        return tuple(actions)

    patch.setattr(token_tree.BranchReassignment, "reassign", reassign)


def children_keep_their_own_maximum(patch: Patch) -> None:
    patch.setattr(distinct, "shift_to_maximum", lambda value, perturbed, *, ahead: perturbed)


def every_prefix_has_the_same_noise(patch: Patch) -> None:
    patch.setattr(distinct, "child_seed", lambda seed, token: seed)


def siblings_share_their_penalties(patch: Patch) -> None:
    patch.setattr(LogitEdits, "fork", lambda self: self)


def a_finished_candidate_leaves_the_running(patch: Patch) -> None:
    original = distinct.DistinctStrategy._select

    def best(self: distinct.DistinctStrategy, drawn: groups.DrawnByBranch) -> list[distinct.SelectedChild]:
        self._ranked = [prefix for prefix in self._ranked if prefix.ended is None]
        return original(self, drawn)

    patch.setattr(distinct.DistinctStrategy, "_select", best)


BEAM_BUGS: list[Callable[[Patch], None]] = [
    the_draw_is_as_wide_as_without_groups,
    the_crowd_is_forgotten,
    a_group_fears_itself,
    never_means_at_any_length_whatever_the_penalty,
    the_last_token_does_not_count,
    a_better_hypothesis_comes_too_late,
    dead_branches_hold_up_the_stream,
    the_stream_follows_the_best_beam,
    finished_candidates_are_let_go,
    the_wrong_child_inherits,
]
DISTINCT_BUGS: list[Callable[[Patch], None]] = [
    children_keep_their_own_maximum,
    every_prefix_has_the_same_noise,
    siblings_share_their_penalties,
    a_finished_candidate_leaves_the_running,
    the_wrong_child_inherits,
    the_stream_follows_the_best_beam,
]


@pytest.mark.slow
def test_without_a_bug_all_is_well() -> None:
    search_beams()
    search_distinct()


@pytest.mark.parametrize("bug", BEAM_BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_of_beams_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        search_beams()


@pytest.mark.parametrize("bug", DISTINCT_BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_of_distinct_candidates_is_caught(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        search_distinct()
