"""Beam search on copy-on-write forks: a child beam shares the pages of its parent.

Selection and stopping follow `transformers.generate(num_beams=...)` (version 5):

- each step ranks the best K = max(2, 1 + E) * width continuations of all live beams together by summed log-softmax
  (float32, in beam order), where E is the number of token ids that end a hypothesis;
- a continuation that ends becomes a hypothesis only if it ranks within the first `width`; the best `width`
  continuations that do not end are the next beams;
- the score of a hypothesis is sum(log p) / num_tokens ** length_penalty, including its last token (EOS); the best
  `width` hypotheses are kept;
- the search stops when no beam is left, or when `width` hypotheses exist and either `early_stopping` is True or the
  best beam cannot beat the worst of them: at its present length (False), or at `max_tokens` if length_penalty > 0
  ("never").

Differences, all in cases where transformers would return or extend a sequence of score -1e9: beams that end are never
extended, and a vocabulary smaller than the width yields fewer beams. Stop strings are matched in the output only.
`min_tokens` excludes terminal ids without renormalising the rest, as `min_new_tokens` does. Penalties, biases and bans
change the log-softmax without renormalising it, as the logits processors of transformers do.

Diverse beam search (Vijayakumar et al. 2018): the beams are divided into groups, and each group is a beam search of its
own. Within a step the groups choose one after another; the log-probability of a token is reduced by
`diversity_penalty` for every beam of an earlier group that chose this token in this step. The reduction stays in the
beam's sum, as in the original implementation of transformers (`group_beam_search` with
`HammingDiversityLogitsProcessor`). Tokens that end a hypothesis and groups that have finished are not counted. Beams of
different groups with the same tokens share one branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from math import inf
from typing import TypeVar

import msgspec
import numpy as np

from chatcache.decoding.grammar.state import Constraint, GrammarDeadEndError, GrammarState, advance_candidate
from chatcache.decoding.logit_edits import LogitEdits
from chatcache.decoding.stopping import DEAD_END, START, StopProgress, StopResult, StopRules
from chatcache.decoding.token_bans import TokenMasks
from chatcache.decoding.token_tree import NO_SCORE, BranchReassignment, CandidateStream, Node, TokenTree
from chatcache.types.actions import (
    Advance,
    BeamUpdate,
    Candidates,
    DrawSpec,
    DroppedCandidate,
    Finish,
    LogitChanges,
    Output,
    cannot_drop_error,
)
from chatcache.types.events import FINISH_LENGTH, LiveBeam, TokenLogprob
from chatcache.types.plan import F32, I32
from chatcache.types.request import BeamSearchParams

_T = TypeVar("_T")
NO_TOKEN = -1
_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A finished beam; `node` is its last token."""

    score: float
    node: Node
    ended: StopResult


class FinishedHypotheses:
    """The best `width` finished hypotheses of a group, best first.

    Scores are sum(log p) / num_tokens ** length_penalty, rounded to float32 as in transformers.
    """

    def __init__(self, params: BeamSearchParams, width: int, max_tokens: int) -> None:
        self.best: list[Hypothesis] = []
        self._width = width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = max_tokens

    def add(self, found: list[Hypothesis]) -> None:
        """Merge new hypotheses and keep the best `width`. Of equal scores the older one wins."""
        self.best += found
        self.best.sort(key=lambda hypothesis: -hypothesis.score)
        del self.best[self._width :]

    def score(self, total: float, num_tokens: int) -> float:
        """Return the length-penalised score of a summed log-probability."""
        score: float = total / num_tokens**self._length_penalty
        return float(np.float32(min(max(score, -_F32_MAX), _F32_MAX)))

    def is_done(self, best_total: float, num_tokens: int) -> bool:
        """Return True if the search can stop.

        No live beam (best sum `best_total`) has to be followed.
        """
        if len(self.best) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            num_tokens = self._max_tokens
        return self.score(best_total, num_tokens) <= self.best[-1].score


DrawnByBranch = Mapping[int, tuple[Candidates, ...]]
TokenCounts = dict[int, int]


class Beam(msgspec.Struct, frozen=True, gc=False):
    """A live beam. `total`: summed log-probability, a float32 value."""

    node: Node
    total: float = 0.0
    progress: StopProgress = START
    grammar_state: GrammarState | None = None
    edits: LogitEdits | None = None


Continuation = tuple[int, int, float, TokenLogprob | None]
"""A token after one of a group's beams: position of the beam, token, sum with this token (a float32), its report."""


_SELECTED = msgspec.msgpack.Decoder(list[list[Continuation]])


class BeamGroup:
    """Live beams of one group, best first (empty once it has finished), and its hypotheses.

    `selected`: the continuations that the last step selected. Only these have to be recorded, as selecting from these
    alone gives the same result: none has a later rank among them than before.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        rules: StopRules,
        tree: TokenTree,
        constraint: Constraint | None,
        edits: LogitEdits | None,
    ) -> None:
        self._rules = rules
        self._constraint = constraint
        self._has_state = constraint is not None or rules.has_stop_strings or rules.thinking is not None
        self._tree = tree
        self._width = params.beam_width // params.num_beam_groups
        self._penalty = params.diversity_penalty
        self._with_logprobs = params.logprobs is not None
        self._num_ranked = num_ranked_continuations(self._width, rules)
        self.hypotheses = FinishedHypotheses(params, self._width, rules.max_tokens)
        self.beams = [Beam(tree.root, edits=edits)]
        self.selected: Sequence[Continuation] = ()
        self.is_banned = False  # all continuations of a beam were banned
        self.has_dead_end = False  # a continuation was dropped, as the grammar does not go on after it
        tree.root.num_refs += 1

    def advance(self, ranked: Sequence[Continuation], earlier_tokens: TokenCounts) -> list[Hypothesis]:
        """Select the next beams; return all continuations that ended in this step, best first.

        `ranked`: continuations of the beams, best first. `earlier_tokens` counts the tokens chosen in this step by
        earlier groups; this group's tokens are added.
        Raises: the errors of a constraint, except dead ends, which set `has_dead_end`.
        """
        old, self.beams = self.beams, []
        ended = [] if self._select_unended(old, ranked[: self._width]) else self._select(old, ranked)
        if self._penalty:
            chosen = [beam.node for beam in self.beams]
            chosen += [h.node for h in ended if h.ended.finish_reason == FINISH_LENGTH]
            for node in chosen:
                earlier_tokens[node.token] = earlier_tokens.get(node.token, 0) + 1
        if ended:
            self.hypotheses.add(ended)
        self._tree.release_all([beam.node for beam in old])
        if self.beams and self.hypotheses.is_done(self.beams[0].total, self.beams[0].progress.num_tokens):
            self._finish()
        return ended

    def _select_unended(self, old: list[Beam], best: Sequence[Continuation]) -> bool:
        """Fill `beams` with the best `width` continuations; False, and no change, if one of them may end."""
        num_tokens = old[0].progress.num_tokens + 1  # all beams have the same length
        rules = self._rules
        if self._has_state or num_tokens >= rules.max_tokens or len(best) < self._width or old[0].edits is not None:
            return False
        terminal_ids = rules.terminal_ids
        for _, token, _, _ in best:
            if token in terminal_ids:
                return False
        progress, add = StopProgress(num_tokens), self._tree.add
        self.beams = [
            Beam(add(old[position].node, token, logprob), total, progress) for position, token, total, logprob in best
        ]
        self.selected = best
        return True

    def _select(self, old: list[Beam], ranked: Iterable[Continuation]) -> list[Hypothesis]:
        """Fill `beams` with the best continuations that do not end; return those that ended."""
        ended: list[Hypothesis] = []
        selected: list[Continuation] = []
        beams, width, add = self.beams, self._width, self._tree.add
        num_tokens = old[0].progress.num_tokens + 1
        rules, unended = self._rules, StopProgress(num_tokens)
        may_end, terminal_ids = self._has_state or num_tokens >= rules.max_tokens, rules.terminal_ids
        self.selected = selected
        for rank, continuation in enumerate(ranked):
            if rank >= width and len(beams) == width:
                break
            position, token, total, logprob = continuation
            beam, progress, grammar_state, why = old[position], unended, None, None
            if may_end or token in terminal_ids:
                if self._constraint is None:
                    progress, why = rules.advance(beam.progress, token)
                else:
                    grammar_state = self._constraint.fork(beam.grammar_state)
                    progress, why = advance_candidate(rules, beam.progress, token, grammar_state)
                if why is DEAD_END:
                    self.has_dead_end = True
                    selected.append(continuation)  # it is dropped again where the step is repeated
                    continue
            if len(beams) == width if why is None else rank >= width:
                continue
            selected.append(continuation)
            node = add(beam.node, token, logprob)
            if why is None:
                edits = beam.edits
                if edits is not None:
                    edits = edits.fork()
                    edits.record(token)
                beams.append(Beam(node, total, progress, grammar_state, edits))
            else:
                node.ended = self._tree.has_ended = True
                ended.append(Hypothesis(self.hypotheses.score(total, progress.num_tokens), node, why))
        return ended

    def _finish(self) -> None:
        self._tree.release_all([beam.node for beam in self.beams])
        self.beams = []

    def rank(self, drawn: DrawnByBranch, earlier_tokens: TokenCounts) -> list[Continuation]:
        """Return the best continuations of the present beams, best first; ties in beam order."""
        drawings = [drawn[beam.node.branch][0] for beam in self.beams]
        width, narrowest = (choose(len(drawing.tokens) for drawing in drawings) for choose in (max, min))
        if not narrowest:
            self.has_dead_end = self.is_banned = True
        tokens = np.array([_pad(drawing.tokens, width, NO_TOKEN) for drawing in drawings], np.int32)
        logprobs = np.array([_pad(drawing.logprobs, width, -inf) for drawing in drawings], np.float32)
        if earlier_tokens and self._penalty:
            counts = [[earlier_tokens.get(token, 0) for token in row] for row in tokens.tolist()]
            logprobs -= (self._penalty * np.array(counts)).astype(np.float32)
        ((owners, ids, totals),) = rank_together([self], tokens[None], logprobs[None])
        best = self.continuations(owners, ids, totals)
        if not self._with_logprobs:
            return best
        index_of = [{token: index for index, token in enumerate(drawing.tokens)} for drawing in drawings]
        return [(i, token, total, drawings[i].logprob_at(index_of[i][token])) for i, token, total, _ in best]

    def continuations(self, owners: list[int], ids: list[int], totals: list[float]) -> list[Continuation]:
        """Return the ranked continuations without those that are banned, and without reports."""
        # All beams have the same length. A grammar mask has already excluded the banned ids.
        banned = self._rules.banned_ids(self.beams[0].progress) if self._constraint is None else ()
        if not banned and totals and totals[-1] > -inf:
            return list(zip(owners[: self._num_ranked], ids, totals, repeat(None)))  # the shortest ends it
        best: list[Continuation] = list(zip(owners, ids, totals, repeat(None)))
        return [each for each in best if each[2] > -inf and each[1] not in banned][: self._num_ranked]

    @property
    def max_ranked(self) -> int:
        """How many continuations have to be ranked, including those that may turn out to be banned."""
        return self._num_ranked + len(self._rules.banned_ids(self.beams[0].progress)) * len(self.beams)


def rank_together(
    groups: Sequence[BeamGroup], tokens: I32, logprobs: F32
) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Rank the continuations of several groups with equally many beams; ties in beam order.

    Shapes: [group, beam, draw]. Yields for each group the beams, tokens and sums of its best continuations, best first.
    """
    sums = logprobs + np.array([[beam.total for beam in group.beams] for group in groups], np.float32)[:, :, None]
    num_groups, num_beams, width = tokens.shape
    order = (-sums.reshape(num_groups, -1)).argsort(axis=1, kind="stable")
    order = order[:, : max([group.max_ranked for group in groups])]
    at = order + np.arange(num_groups)[:, None] * (num_beams * width)
    lists = (order // max(width, 1)).tolist(), tokens.take(at).tolist(), sums.take(at).tolist()
    return zip(*lists, strict=True)


def _live_beams(beams: list[Beam]) -> BeamUpdate:
    """Report the live beams, each node once."""
    best = {beam.node: beam for beam in sorted(beams, key=lambda beam: beam.total)}
    ranked = sorted(best.values(), key=lambda beam: -beam.total)
    nodes = [(beam.node, beam.total) for beam in ranked]
    return BeamUpdate(tuple(LiveBeam(node.id, node.get_parent().id, node.token, total) for node, total in nodes))


def _pad(values: tuple[_T, ...], width: int, value: _T) -> tuple[_T, ...]:
    return values if len(values) == width else values + (value,) * (width - len(values))


def num_ranked_continuations(width: int, rules: StopRules) -> int:
    """Return how many continuations of a group are ranked per step."""
    return max(2, 1 + len(rules.terminal_ids)) * width


def num_draws_needed(params: BeamSearchParams, rules: StopRules, constraint: Constraint | None = None) -> int:
    """Return how many top tokens of a branch suffice for exact selection.

    Without a penalty: `width` tokens that do not end, plus the terminal ids that may rank before them. If any token may
    end the candidate (stop strings, grammars): all ranked continuations. A diversity penalty can move back at most as
    many tokens as earlier groups have chosen, so that many more are needed.
    """
    width = params.beam_width // params.num_beam_groups
    num_penalised = params.beam_width - width if params.diversity_penalty > 0.0 else 0
    any_may_end = rules.has_stop_strings or constraint is not None
    return (num_ranked_continuations(width, rules) if any_may_end else width) + len(rules.terminal_ids) + num_penalised


class BeamStrategy:
    """Beam search. Returns the `n` best hypotheses, best first, with their scores.

    Tokens that all possible results have in common are emitted early, for each candidate; the rest at the end. Token
    logprobs are those of the model's log-softmax. If fewer different outputs than `n` exist, the missing candidates end
    after the tokens emitted so far, with a score of -1e9.

    `sole_group`: the only group of a search without log-probabilities, whose continuations `rank_together` can rank.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        rules: StopRules,
        *,
        prompt: Sequence[int],
        vocab_size: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._params = params
        self._masks = TokenMasks(params, constraint, rules)
        edits = LogitEdits(params, prompt)
        self._has_edits = not edits.is_empty
        self._num_returned = params.n if params.n is not None else params.beam_width
        # Temperature 0: a draw of width 1 (one beam, no terminal ids) is the argmax, not a sample. It would edit the
        # logits instead of the log-softmax.
        width = min(max(num_draws_needed(params, rules, constraint), 1 + self._has_edits), vocab_size)
        self._spec = DrawSpec(width=width, temperature=0.0, num_top=params.logprobs or 0)
        self._tree = TokenTree()
        self._stream = CandidateStream(self._tree, self._num_returned, with_logprobs=params.logprobs is not None)
        self._branches = BranchReassignment(self._tree.root)
        initial = edits if self._has_edits else None
        self._groups = [
            BeamGroup(params, rules, self._tree, constraint, initial) for _ in range(params.num_beam_groups)
        ]
        self.sole_group = self._groups[0] if len(self._groups) == 1 and params.logprobs is None else None
        self._returnable: list[Hypothesis] = []  # the best so far
        self._num_streamed = 0
        self._streamed: tuple[Node, int] | None = None  # the prefix, and how many candidates got it

    @property
    def max_branches(self) -> int:
        return self._params.beam_width

    @property
    def lockstep(self) -> bool:
        return True

    @property
    def has_fixed_draws(self) -> bool:
        return True

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        if self._masks.is_empty and not self._has_edits:
            return (self._spec,)
        next_changes = partial(self._changes, branch)
        edit, mask = next_changes()
        return (replace(self._spec, edit=edit, mask=mask, next_changes=next_changes),)

    def _changes(self, branch: int) -> LogitChanges:
        """Return the edit and the mask of a branch: those of any of its beams, which have the same tokens."""
        beam = next(beam for group in self._groups for beam in group.beams if beam.node.branch == branch)
        # `min_tokens` is enforced by the ranking of continuations.
        edit = None if beam.edits is None else beam.edits.edit(ban=False)
        return self._masks.changes(edit, beam.grammar_state, beam.progress)

    def drop(self, index: int) -> DroppedCandidate | None:
        raise cannot_drop_error("beams")

    def advance(self, drawn: DrawnByBranch) -> Advance:
        return self._advance(lambda group, earlier_tokens: group.rank(drawn, earlier_tokens))

    def advance_ranked(self, best: list[Continuation]) -> Advance:
        """Process the ranked continuations of the `sole_group`."""
        return self._advance(lambda group, earlier_tokens: best)

    def replay(self, record: bytes) -> Advance:
        selected = iter(_SELECTED.decode(record))
        return self._advance(lambda group, earlier_tokens: next(selected))

    def _advance(self, rank: Callable[[BeamGroup, TokenCounts], Sequence[Continuation]]) -> Advance:
        earlier_tokens: TokenCounts = {}
        ended: list[Hypothesis] = []
        selected: list[Sequence[Continuation]] = []
        for group in self._groups:
            if group.beams:
                ended += group.advance(rank(group, earlier_tokens), earlier_tokens)
                selected.append(group.selected)
        if ended:
            self._update_returnable(ended)
        beams = [beam for group in self._groups for beam in group.beams]
        if not beams and not self._returnable and any(group.has_dead_end for group in self._groups):
            raise GrammarDeadEndError(
                is_banned=any(group.is_banned for group in self._groups)
            )  # no beam is left and no hypothesis was found
        nodes = list(dict.fromkeys([beam.node for beam in beams]))
        actions = self._branches.reassign(nodes, has_ended=self._tree.has_ended)
        outputs = self._emit_common_prefix(len(beams)) if beams else [*self._final_outputs()]
        if self._params.stream_beams and beams:
            outputs.append(_live_beams(beams))
        return Advance(actions, tuple(outputs), not beams, msgspec.msgpack.encode(selected))

    def _update_returnable(self, ended: list[Hypothesis]) -> None:
        """Update the hypotheses that may be returned; release all others."""
        before = [*self._returnable, *ended]
        kept = [hypothesis for group in self._groups for hypothesis in group.hypotheses.best]
        self._returnable = sorted(kept, key=lambda hypothesis: -hypothesis.score)[: self._num_returned]
        for hypothesis in before:
            if hypothesis not in self._returnable:
                self._tree.release(hypothesis.node)

    def _emit_common_prefix(self, num_beams: int) -> list[Output]:
        """Emit the common prefix to every candidate that is certain to exist."""
        if self._num_streamed < self._num_returned:
            num_kept = sum(len(group.hypotheses.best) for group in self._groups)
            self._num_streamed = max(self._num_streamed, min(self._num_returned, num_beams + num_kept))
        node = self._tree.advance_common_prefix()
        if self._streamed == (node, self._num_streamed):
            return []
        self._streamed = node, self._num_streamed
        return [emit for index in range(self._num_streamed) for emit in self._stream.emit(index, node)]

    def _final_outputs(self) -> Iterator[Output]:
        for index, hypothesis in enumerate(self._returnable):
            yield from self._stream.emit(index, hypothesis.node)
            yield Finish(index, hypothesis.ended.finish_reason, hypothesis.ended.stop_reason, hypothesis.score)
        for index in range(len(self._returnable), self._num_returned):
            yield Finish(index, FINISH_LENGTH, None, NO_SCORE)
