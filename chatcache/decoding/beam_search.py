"""Beam search on forks: a child shares its parent's pages, losers are retired, one child inherits.

Follows `transformers.generate(num_beams=...)` (version 5) in what it keeps and when it stops:

- each step ranks the best K = max(2, 1 + E) * width continuations of all live beams together by summed log-softmax
  (float32, in beam order), E being the number of token ids that end a hypothesis;
- a continuation that ends becomes a hypothesis only if it ranks within the first `width`; the best `width` that do not
  end live on;
- a hypothesis scores sum(log p) / num_tokens ** length_penalty, its last token (EOS too) counted; the best `width` are
  kept;
- it stops when nothing lives on, or `width` hypotheses exist and `early_stopping` is True, or the best live beam could
  not beat the worst of them: at its present length (False), at `max_tokens` if length_penalty > 0 ("never").

Differences, all where transformers would return or extend a sequence of score -1e9: beams that hit a stop are never
extended, and a vocabulary smaller than the width yields fewer live beams. Stop strings are matched in the output only.
`min_tokens` leaves terminal ids out without renormalising the rest, as `min_new_tokens` does.

With groups (see `groups.py`) all of this holds within each group; the best of all groups are returned.

Finished beams: what each is worth, which are kept, and when the search need not go on.

Groups of beams that avoid each other's tokens: diverse beam search (Vijayakumar et al. 2018).

Each group is a beam search of its own. Within a step they choose one after another, and a later group's log-probability
of a token loses `diversity_penalty` for every beam of an earlier group that has just gone on with that token. As in the
original of transformers (`group_beam_search` with `HammingDiversityLogitsProcessor`), what is lost stays lost: it is
part of a beam's sum, hence of its score. Tokens that end a hypothesis are not counted, nor are groups that are over.

A single group, or a penalty of 0, changes nothing. Beams of different groups with the same tokens share one branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from chatcache.decoding.grammar.state import Constraint, GrammarDeadEndError, GrammarState, follow
from chatcache.decoding.stopping import START, Ended, StopRules, Trail
from chatcache.decoding.token_tree import NO_SCORE, BranchReassignment, Node, Stream, TokenTree
from chatcache.types.actions import (
    Advance,
    BeamUpdate,
    Candidates,
    DrawSpec,
    DroppedCandidate,
    Finish,
    Output,
    cannot_drop_error,
)
from chatcache.types.events import FINISH_LENGTH, LiveBeam
from chatcache.types.request import BeamSearchParams

_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A continuation that ended; `node` is its last token."""

    score: float
    node: Node
    ended: Ended


class Hypotheses:
    """The best `width` hypotheses of one group of beams, best first.

    Scores are sum(log p) / num_tokens ** length_penalty, rounded to float32 as transformers holds them.
    """

    def __init__(self, params: BeamSearchParams, width: int, max_tokens: int) -> None:
        self.kept: list[Hypothesis] = []
        self._width = width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = max_tokens

    def add(self, found: list[Hypothesis]) -> None:
        """Keep the best of those there are and those found; the older of equals first."""
        self.kept += found
        self.kept.sort(key=lambda hypothesis: -hypothesis.score)
        del self.kept[self._width :]

    def score(self, total: float, num_tokens: int) -> float:
        """Return the score of a summed log-probability at this length."""
        score: float = total / num_tokens**self._length_penalty
        return float(np.float32(min(max(score, -_F32_MAX), _F32_MAX)))

    def settled(self, best_total: float, num_tokens: int) -> bool:
        """Say whether live beams, the best of which has `best_total`, cannot, or need not, improve what is kept."""
        if len(self.kept) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            num_tokens = self._max_tokens
        return self.score(best_total, num_tokens) <= self.kept[-1].score


Drawn = Mapping[int, tuple[Candidates, ...]]


@dataclass(frozen=True, slots=True)
class Beam:
    """A live beam; `total` is its summed log-probability, a float32 value."""

    node: Node
    total: float = 0.0
    trail: Trail = START
    guide: GrammarState | None = None


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
        self.dead_end: GrammarDeadEndError | None = None
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
            except GrammarDeadEndError as dead_end:
                self.dead_end = dead_end
                continue
            has_room = len(self.beams) < self._width if why is None else rank < self._width
            if not has_room:
                continue
            entry = drawn[beam.node.branch][0].logprob_at(place) if self._with_logprobs else None
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


class BeamStrategy:
    """Beam search. The `n` best hypotheses are returned, best first, with their score.

    What they are sure to have in common is emitted as soon as it is, for each of them; the rest at the end. A token's
    logprob is of the model's own log-softmax. Where fewer different outputs are possible than asked for, the missing
    ones end at what was emitted, with a score of -1e9.
    """

    def __init__(
        self, params: BeamSearchParams, rules: StopRules, *, vocab_size: int, constraint: Constraint | None = None
    ) -> None:
        self._params = params
        self._constraint = constraint
        self._num_returned = params.n if params.n is not None else params.beam_width
        # Temperature 0: a draw of width 1 (one beam, nothing terminal) is the most likely token, not a sample.
        width = min(num_drawn(params, rules, constraint), vocab_size)
        self._spec = DrawSpec(width=width, temperature=0.0, num_top=params.logprobs or 0)
        self._tree = TokenTree()
        self._stream = Stream(self._tree, self._num_returned, with_logprobs=params.logprobs is not None)
        self._lineage = BranchReassignment(self._tree.root)
        self._groups = [Group(params, rules, self._tree, constraint) for _ in range(params.num_beam_groups)]
        self._returnable: list[Hypothesis] = []  # these, or better ones, will be returned
        self._num_streamed = 0

    @property
    def max_branches(self) -> int:
        return self._params.beam_width

    @property
    def lockstep(self) -> bool:
        return True

    @property
    def has_fixed_draws(self) -> bool:
        return self._constraint is None

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        if self._constraint is None:
            return (self._spec,)
        beam = next(beam for group in self._groups for beam in group.beams if beam.node.branch == branch)
        return (replace(self._spec, mask=self._constraint.mask(beam.guide, beam.trail.num_tokens)),)

    def drop(self, index: int) -> DroppedCandidate | None:
        raise cannot_drop_error("beams")

    def advance(self, drawn: Drawn) -> Advance:
        crowd: Counter[int] = Counter()
        ended: list[Hypothesis] = []
        for group in self._groups:
            if group.beams:
                ended += group.advance(drawn, crowd)
        self._file(ended)
        beams = [beam for group in self._groups for beam in group.beams]
        dead_ends = [group.dead_end for group in self._groups if group.dead_end is not None]
        if dead_ends and not beams and not self._returnable:
            raise dead_ends[0]  # nothing is left, and nothing was found
        actions = self._lineage.move(list(dict.fromkeys(beam.node for beam in beams)))
        outputs = self._agreed(len(beams)) if beams else self._results()
        return Advance(actions, (*outputs, *self._watched(beams)), finished=not beams)

    def _file(self, ended: list[Hypothesis]) -> None:
        """Find the hypotheses that may be returned, now that some have ended, and let go of all others."""
        if not ended:
            return
        before = [*self._returnable, *ended]
        kept = [hypothesis for group in self._groups for hypothesis in group.hypotheses.kept]
        self._returnable = sorted(kept, key=lambda hypothesis: -hypothesis.score)[: self._num_returned]
        for hypothesis in before:
            if hypothesis not in self._returnable:
                self._tree.release(hypothesis.node)

    def _agreed(self, num_beams: int) -> Iterator[Output]:
        """Emit what all candidates that are sure to exist have in common."""
        num_kept = sum(len(group.hypotheses.kept) for group in self._groups)
        self._num_streamed = max(self._num_streamed, min(self._num_returned, num_beams + num_kept))
        node = self._tree.agree()
        for index in range(self._num_streamed):
            yield from self._stream.tell(index, node)

    def _watched(self, beams: list[Beam]) -> Iterator[Output]:
        """Report the live beams, each node once, if somebody watches."""
        if not self._params.stream_beams or not beams:
            return
        best = {beam.node: beam for beam in sorted(beams, key=lambda beam: beam.total)}  # of twins the better is last
        ranked = sorted(best.values(), key=lambda beam: -beam.total)
        nodes = [(beam.node, beam.total) for beam in ranked]
        yield BeamUpdate(tuple(LiveBeam(node.id, node.up().id, node.token, total) for node, total in nodes))

    def _results(self) -> Iterator[Output]:
        for index, hypothesis in enumerate(self._returnable):
            yield from self._stream.tell(index, hypothesis.node)
            yield Finish(index, hypothesis.ended.finish_reason, hypothesis.ended.stop_reason, hypothesis.score)
        for index in range(len(self._returnable), self._num_returned):
            yield Finish(index, FINISH_LENGTH, None, NO_SCORE)
