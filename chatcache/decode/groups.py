"""Groups of beams that avoid each other's tokens: diverse beam search (Vijayakumar et al. 2018).

Each group is a beam search of its own. Within a step they choose one after another, and a later group's log-probability
of a token loses `diversity_penalty` for every beam of an earlier group that has just gone on with that token. As in the
original of transformers (`group_beam_search` with `HammingDiversityLogitsProcessor`), what is lost stays lost: it is
part of a beam's sum, hence of its score. Tokens that end a hypothesis are not counted, nor are groups that are over.

A single group, or a penalty of 0, changes nothing. Beams of different groups with the same tokens share one branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from chatcache.decode.actions import Candidates
from chatcache.decode.constraint import Constraint, DeadEnd, Guide, follow
from chatcache.decode.hypotheses import Hypotheses, Hypothesis
from chatcache.decode.stop import START, StopRules, Trail
from chatcache.decode.streaming import Node, TokenTree
from chatcache.types.events import FINISH_LENGTH
from chatcache.types.params import BeamSearchParams

Drawn = Mapping[int, tuple[Candidates, ...]]


@dataclass(frozen=True, slots=True)
class Beam:
    """A live beam; `total` is its summed log-probability, a float32 value."""

    node: Node
    total: float = 0.0
    trail: Trail = START
    guide: Guide | None = None


class Group:
    """The live beams of one group, best first (none once it is over), and its hypotheses."""

    def __init__(
        self, params: BeamSearchParams, rules: StopRules, tree: TokenTree, constraint: Constraint | None = None
    ) -> None:
        self._rules = rules
        self._constraint = constraint
        self._tree = tree
        self._width = params.beam_width // params.num_beam_groups
        self._penalty = params.diversity_penalty
        self._with_logprobs = params.logprobs is not None
        self._num_ranked = num_ranked(self._width, rules)
        self.hypotheses = Hypotheses(params, self._width, rules.max_tokens)
        self.beams = [Beam(tree.root)]
        self.dead_end: DeadEnd | None = None
        tree.root.num_holds += 1

    def advance(self, drawn: Drawn, crowd: Counter[int]) -> list[Hypothesis]:
        """Choose the continuations that live on, and return those that ended, best first, the kept ones or not.

        `crowd` counts the tokens that earlier groups have just chosen; this group's are added.
        Raises: what a constraint raises, but for dead ends; the last of them is kept in `dead_end`.
        """
        old, self.beams = self.beams, []
        ended = self._choose(old, drawn, crowd)
        crowd.update(beam.node.token for beam in self.beams)
        crowd.update(h.node.token for h in ended if h.ended.finish_reason == FINISH_LENGTH)
        self.hypotheses.add(ended)
        for beam in old:
            self._tree.release(beam.node)
        if self.beams and self.hypotheses.settled(self.beams[0].total, self.beams[0].trail.num_tokens):
            self._end()
        return ended

    def _choose(self, old: list[Beam], drawn: Drawn, crowd: Counter[int]) -> list[Hypothesis]:
        """Add the best continuations that live on to the beams; return those that ended."""
        ended: list[Hypothesis] = []
        for rank, (beam, place, token, total) in enumerate(self._ranked(old, drawn, crowd)):
            if len(self.beams) == self._width and rank >= self._width:
                break
            guide = None if self._constraint is None else self._constraint.fork(beam.guide)
            try:
                trail, why = follow(self._rules, beam.trail, token, guide)
            except DeadEnd as dead_end:
                self.dead_end = dead_end
                continue
            has_room = len(self.beams) < self._width if why is None else rank < self._width
            if not has_room:
                continue
            entry = drawn[beam.node.branch][0].entry(place) if self._with_logprobs else None
            node = self._tree.grow(beam.node, token, entry)
            if why is None:
                self.beams.append(Beam(node, total, trail, guide))
            else:
                node.ended = True
                ended.append(Hypothesis(self.hypotheses.score(total, trail.num_tokens), node, why))
        return ended

    def _end(self) -> None:
        for beam in self.beams:
            self._tree.release(beam.node)
        self.beams = []

    def _ranked(self, beams: list[Beam], drawn: Drawn, crowd: Counter[int]) -> Iterator[tuple[Beam, int, int, float]]:
        """Yield the best (beam, place in its drawing, token, total) of all beams; equal totals in beam order."""
        drawings = [drawn[beam.node.branch][0] for beam in beams]
        sizes = [len(drawing.tokens) for drawing in drawings]
        tokens = np.concatenate([np.array(drawing.tokens, dtype=np.int64) for drawing in drawings])
        logprobs = np.concatenate([np.array(drawing.logprobs, dtype=np.float32) for drawing in drawings])
        owners = np.repeat(np.arange(len(beams)), sizes)
        places = np.concatenate([np.arange(size) for size in sizes])
        scores = logprobs
        if crowd and self._penalty:
            scores = logprobs - np.array([self._penalty * crowd[token] for token in tokens.tolist()], np.float32)
        totals = scores + np.array([beam.total for beam in beams], dtype=np.float32)[owners]
        # In lockstep all beams are of one length. A constraint's mask has left out what is banned.
        banned = self._rules.banned(beams[0].trail) if self._constraint is None else ()
        possible = np.flatnonzero((tokens >= 0) & (logprobs > -np.inf) & ~np.isin(tokens, banned))
        for place in possible[np.argsort(-totals[possible], kind="stable")[: self._num_ranked]].tolist():
            yield beams[owners[place]], int(places[place]), int(tokens[place]), float(totals[place])


def num_ranked(width: int, rules: StopRules) -> int:
    """Return how many continuations of a group of `width` beams are looked at in a step."""
    return max(2, 1 + len(rules.terminal_ids)) * width


def num_drawn(params: BeamSearchParams, rules: StopRules, constraint: Constraint | None = None) -> int:
    """Return how many of a branch's most likely tokens suffice to choose exactly as from the whole vocabulary.

    Without a penalty: `width` tokens that live on, and the terminal ids before them; all that are ranked where a stop
    string, or the end of a grammar, may come with any token. A penalty moves back at most as many different tokens as
    earlier groups have chosen: so many more make sure that the best of the penalised order are there.
    """
    width = params.beam_width // params.num_beam_groups
    num_crowded = params.beam_width - width if params.diversity_penalty > 0.0 else 0
    any_may_end = rules.has_stop_strings or constraint is not None
    return (num_ranked(width, rules) if any_may_end else width) + len(rules.terminal_ids) + num_crowded
