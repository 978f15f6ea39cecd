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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from chatcache.decode.actions import (
    Advance,
    BranchAction,
    Candidates,
    Done,
    DrawSpec,
    Emit,
    Extend,
    Fork,
    Output,
    Retire,
)
from chatcache.decode.stop import START, Ended, StopRules, Trail
from chatcache.types import FINISH_LENGTH, BeamSearchParams, TokenLogprob

_NO_SCORE = -1.0e9
_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class _Step:
    """The last token of a path and the path before it; siblings share everything above."""

    token: int
    logprob: TokenLogprob
    before: _Step | None

    def path(self) -> list[_Step]:
        steps: list[_Step] = []
        step: _Step | None = self
        while step is not None:
            steps.append(step)
            step = step.before
        return steps[::-1]


@dataclass(frozen=True, slots=True)
class _Beam:
    """A live beam; `total` is its summed log-probability, a float32 value."""

    branch: int
    total: float = 0.0
    trail: Trail = START
    last: _Step | None = None


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    score: float
    last: _Step
    ended: Ended


@dataclass(frozen=True, slots=True)
class _Continuation:
    parent: _Beam
    total: float
    trail: Trail
    last: _Step


class BeamStrategy:
    """Beam search. The `n` best hypotheses are emitted at the end, best first, with their score.

    A token's logprob is of the model's own log-softmax. A branch id is used once in a request's life.
    """

    def __init__(self, params: BeamSearchParams, rules: StopRules, *, vocab_size: int) -> None:
        self._params = params
        self._rules = rules
        self._width = params.beam_width
        num_terminal = len(rules.terminal_ids)
        self._num_ranked = max(2, 1 + num_terminal) * self._width
        # Per beam enough to hold `width` that live on: K where a stop string may end any of them. Temperature 0: a draw
        # of width 1 (one beam, nothing terminal) is the most likely token, not a sample.
        width = (self._num_ranked if rules.has_stop_strings else self._width) + num_terminal
        self._spec = DrawSpec(width=min(width, vocab_size), temperature=0.0, num_top=params.logprobs or 0)
        self._beams = {0: _Beam(branch=0)}  # by branch, best first
        self._finished: list[_Hypothesis] = []
        self._next_branch = 1

    @property
    def max_branches(self) -> int:
        return self._width

    @property
    def lockstep(self) -> bool:
        return True

    @property
    def steady(self) -> bool:
        return True

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        return (self._spec,)

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        survivors = self._select(drawn)
        if not survivors or self._settled(survivors[0]):
            retired = tuple(Retire(branch) for branch in self._beams)
            self._beams = {}
            return Advance(retired, tuple(self._results()), finished=True)
        return Advance(tuple(self._grow(survivors)), ())

    def _select(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> list[_Continuation]:
        """File the hypotheses that end in this step; return the continuations that live on, best first."""
        survivors: list[_Continuation] = []
        for rank, (beam, token, logprob, total) in enumerate(self._ranked(drawn)):
            if len(survivors) == self._width and rank >= self._width:
                break
            trail, ended = self._rules.follow(beam.trail, token)
            if ended is not None and rank >= self._width:
                continue
            last = _Step(token, TokenLogprob(logprob, drawn[beam.branch][0].top), beam.last)
            if ended is None and len(survivors) < self._width:
                survivors.append(_Continuation(beam, total, trail, last))
            elif ended is not None:
                self._finished.append(_Hypothesis(self._score(total, trail.num_tokens), last, ended))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self._width :]
        return survivors

    def _ranked(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Iterator[tuple[_Beam, int, float, float]]:
        """Yield the best K (beam, token, logprob, total) of all beams; equal totals in beam order."""
        beams = list(self._beams.values())
        drawings = [drawn[beam.branch][0] for beam in beams]
        sizes = [len(drawing.tokens) for drawing in drawings]
        tokens = np.concatenate([np.array(drawing.tokens, dtype=np.int64) for drawing in drawings])
        logprobs = np.concatenate([np.array(drawing.logprobs, dtype=np.float32) for drawing in drawings])
        owners = np.repeat(np.arange(len(beams)), sizes)
        totals = logprobs + np.array([beam.total for beam in beams], dtype=np.float32)[owners]
        banned = self._rules.banned(beams[0].trail)  # in lockstep all beams are of one length
        possible = np.flatnonzero((tokens >= 0) & (logprobs > -np.inf) & ~np.isin(tokens, banned))
        for place in possible[np.argsort(-totals[possible], kind="stable")[: self._num_ranked]].tolist():
            yield beams[owners[place]], int(tokens[place]), float(logprobs[place]), float(totals[place])

    def _score(self, total: float, num_tokens: int) -> float:
        """Length-penalised score, rounded to float32 as transformers holds it."""
        score: float = total / num_tokens**self._params.length_penalty
        return float(np.float32(min(max(score, -_F32_MAX), _F32_MAX)))

    def _settled(self, best: _Continuation) -> bool:
        """Say whether the kept hypotheses cannot, or need not, be improved by the live beams."""
        if len(self._finished) < self._width:
            return False
        if self._params.early_stopping is True:
            return True
        num_tokens = best.trail.num_tokens
        if self._params.early_stopping == "never" and self._params.length_penalty > 0.0:
            num_tokens = self._rules.max_tokens
        return self._score(best.total, num_tokens) <= self._finished[-1].score

    def _grow(self, survivors: list[_Continuation]) -> Iterator[BranchAction]:
        """Move branches under the survivors: childless ones go first, so that at most `width` are ever alive."""
        families: dict[int, list[int]] = {branch: [] for branch in self._beams}
        beams: list[_Beam] = []
        for place, child in enumerate(survivors):
            siblings = families[child.parent.branch]
            branch = self._next_branch if siblings else child.parent.branch  # the best child inherits
            self._next_branch += bool(siblings)
            siblings.append(place)
            beams.append(_Beam(branch, child.total, child.trail, child.last))
        self._beams = {beam.branch: beam for beam in beams}
        yield from (Retire(parent) for parent, places in families.items() if not places)
        for parent, places in families.items():
            yield from (Fork(parent, beams[place].branch, survivors[place].last.token) for place in places[1:])
            if places:
                yield Extend(parent, survivors[places[0]].last.token)

    def _results(self) -> Iterator[Output]:
        num_returned = self._params.n if self._params.n is not None else self._width
        for index in range(num_returned):
            if index >= len(self._finished):  # a vocabulary too small for so many different outputs
                yield Done(index, FINISH_LENGTH, None, _NO_SCORE)
                continue
            hypothesis = self._finished[index]
            path = hypothesis.last.path()
            logprobs = tuple(step.logprob for step in path) if self._params.logprobs is not None else ()
            yield Emit(index, tuple(step.token for step in path), logprobs)
            yield Done(index, hypothesis.ended.finish_reason, hypothesis.ended.stop_reason, hypothesis.score)
