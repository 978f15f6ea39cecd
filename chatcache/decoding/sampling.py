"""Sampling and n-best: candidates that share the prompt's pages and go their own ways from its last logits.

The root is drawn once per lane; lane i becomes candidate i and branch i. Noise is keyed by (seed, lane, position), so a
candidate is the same whether its siblings exist or not.

From a request's sampling parameters to what is asked of the logits, for all strategies that draw.

Draw more candidates than asked for and return those the model finds most likely per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from struct import iter_unpack

from chatcache.decoding.grammar.state import Constraint, GrammarState, follow
from chatcache.decoding.logit_edits import LogitEdits
from chatcache.decoding.stopping import START, Ended, StopRules, Trail
from chatcache.types.actions import (
    Advance,
    BranchAction,
    Candidates,
    DrawSpec,
    DroppedCandidate,
    Emit,
    Extend,
    Finish,
    Fork,
    Output,
    Release,
    Strategy,
    cannot_drop_error,
)
from chatcache.types.events import TokenLogprob
from chatcache.types.request import SamplingParams, SentCandidate


class SamplerSpec:
    """What every branch of one request is drawn by: `spec` and `edits` at its root, and how they change on the way."""

    def __init__(
        self,
        params: SamplingParams,
        rules: StopRules,
        constraint: Constraint | None,
        *,
        seed: int,
        prompt: Sequence[int],
        width: int = 1,
    ) -> None:
        self._rules = rules
        self._constraint = constraint
        self.spec = DrawSpec(
            width=width,
            seed=seed,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            num_top=params.logprobs or 0,
        )
        bannable = rules.terminal_ids if rules.min_tokens > 0 and constraint is None else ()
        self.edits = LogitEdits(params, prompt, bannable)

    @property
    def has_fixed_draws(self) -> bool:
        """True when no branch is ever drawn otherwise than by its spec."""
        return self.edits.empty and self._constraint is None

    def at(self, spec: DrawSpec, edits: LogitEdits, trail: Trail, guide: GrammarState | None) -> DrawSpec:
        """Return the draw of a branch that has come to `trail`."""
        edit = edits.edit(ban=trail.num_tokens < self._rules.min_tokens)
        if self._constraint is not None:
            return replace(spec, edit=edit, mask=self._constraint.mask(guide, trail.num_tokens))
        return spec if edit is None else replace(spec, edit=edit)


ROOT = 0


@dataclass(slots=True)
class _Lane:
    """One candidate while it lives. `score`: cumulative raw log-probability of its tokens."""

    index: int
    spec: DrawSpec
    edits: LogitEdits
    guide: GrammarState | None = None
    trail: Trail = START
    score: float = 0.0


class SamplingStrategy:
    """Draw `best_of` candidates (`n` if that is None). Branch ids are lane numbers: the root goes on as lane 0."""

    def __init__(
        self,
        params: SamplingParams,
        rules: StopRules,
        *,
        seed: int,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
    ) -> None:
        self._rules = rules
        self._constraint = constraint
        self._num_lanes = params.n if params.best_of is None else params.best_of
        self._num_top = params.logprobs
        self._drawing = SamplerSpec(params, rules, constraint, seed=seed, prompt=prompt)
        self._lanes: dict[int, _Lane] = {}
        self._wanted = set(range(self._num_lanes))  # lanes to come, while none has begun
        self._started = False

    @property
    def max_branches(self) -> int:
        return self._num_lanes

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def has_fixed_draws(self) -> bool:
        return self._started and self._drawing.has_fixed_draws

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        if self._started:
            lane = self._lanes[branch]
            return (self._drawing.at(lane.spec, lane.edits, lane.trail, lane.guide),)
        if branch != ROOT:
            raise KeyError(branch)
        root = self._drawing.at(self._drawing.spec, self._drawing.edits, START, None)
        return (root, *(replace(root, lane=lane) for lane in range(1, self._num_lanes)))

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        actions: list[BranchAction] = []
        outputs: list[Output] = []
        if self._started:
            for branch, (candidate,) in drawn.items():
                alive = self._take(self._lanes[branch], candidate, outputs)
                actions.append(Extend(branch, candidate.tokens[0]) if alive else self._retire(branch))
        elif ROOT in drawn:
            self._split(drawn[ROOT], actions, outputs)
        return Advance(tuple(actions), tuple(outputs), finished=self._started and not self._lanes)

    def drop(self, index: int) -> DroppedCandidate | None:
        alive = self._lanes.keys() if self._started else self._wanted
        if index not in alive:
            return None
        if len(alive) == 1:
            return DroppedCandidate(is_last=True)
        if not self._started:
            self._wanted.remove(index)
            return DroppedCandidate()
        return DroppedCandidate(index, self._lanes.pop(index).score)

    def resume(self, candidates: Sequence[SentCandidate]) -> tuple[Finish, ...]:
        """Go on with candidates as another strategy of this request left them; call before anything is drawn.

        Each that lives is a branch of its index. Returns the ends that were not told. Raises: what a grammar raises.
        """
        gone = {each.index for each in candidates if each.is_done}
        if not any(each.tokens for each in candidates):
            self._wanted -= gone
            return ()
        self._started = True
        ends: list[Finish] = []
        for each in candidates:
            if each.index in gone:
                continue
            lane, ended = self._lane(each.index), None
            for (token,) in iter_unpack("<i", each.tokens):
                ended = self._follow(lane, token)
            lane.score = each.score
            if ended is None:
                self._lanes[lane.index] = lane
            else:
                ends.append(Finish(lane.index, ended.finish_reason, ended.stop_reason, lane.score))
        return tuple(ends)

    @property
    def living(self) -> tuple[int, ...]:
        """The candidates that have begun and not ended."""
        return tuple(self._lanes)

    def _split(self, candidates: tuple[Candidates, ...], actions: list[BranchAction], outputs: list[Output]) -> None:
        """Turn the root's draws into lanes: forks first, then the root's own step."""
        self._started = True
        for index, candidate in enumerate(candidates):
            if index not in self._wanted:
                continue  # drawn and dropped: the draws are those of its siblings, too
            lane = self._lanes[index] = self._lane(index)
            if not self._take(lane, candidate, outputs):
                del self._lanes[index]
            elif index != ROOT:
                actions.append(Fork(ROOT, index, candidate.tokens[0]))
        actions.append(Extend(ROOT, candidates[ROOT].tokens[0]) if ROOT in self._lanes else Release(ROOT))

    def _take(self, lane: _Lane, candidate: Candidates, outputs: list[Output]) -> bool:
        """Give `lane` its next token; say whether it goes on."""
        token, logprob = candidate.tokens[0], candidate.logprobs[0]
        lane.score += logprob
        ended = self._follow(lane, token)
        logprobs = (TokenLogprob(logprob, candidate.top),) if self._num_top is not None else ()
        outputs.append(Emit(lane.index, (token,), logprobs, lane.score))
        if ended is not None:
            outputs.append(Finish(lane.index, ended.finish_reason, ended.stop_reason, lane.score))
        return ended is None

    def _lane(self, index: int) -> _Lane:
        guide = None if self._constraint is None else self._constraint.fork(None)
        return _Lane(index, replace(self._drawing.spec, lane=index), self._drawing.edits.fork(), guide)

    def _follow(self, lane: _Lane, token: int) -> Ended | None:
        lane.edits.record(token)
        lane.trail, ended = follow(self._rules, lane.trail, token, lane.guide)
        return ended

    def _retire(self, branch: int) -> Release:
        del self._lanes[branch]
        return Release(branch)


@dataclass(slots=True)
class _Drawn:
    """One candidate of the strategy within."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Finish | None = None


class BestOfStrategy:
    """Return the `n` candidates of `inner` with the best mean token log-probability, best first.

    Which they are is known when the last one ends, so nothing is emitted before. Equal means: the earlier drawn first.
    """

    def __init__(self, inner: Strategy, n: int) -> None:
        self._inner = inner
        self._num_returned = n
        self._drawn: dict[int, _Drawn] = {}

    @property
    def max_branches(self) -> int:
        return self._inner.max_branches

    @property
    def lockstep(self) -> bool:
        return self._inner.lockstep

    @property
    def has_fixed_draws(self) -> bool:
        return self._inner.has_fixed_draws

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        return self._inner.draws(branch)

    def drop(self, index: int) -> DroppedCandidate | None:
        raise cannot_drop_error("candidates of best_of")

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        advance = self._inner.advance(drawn)
        for output in advance.outputs:
            self._keep(output)
        return Advance(advance.actions, self._best() if advance.finished else (), advance.finished)

    def _keep(self, output: Output) -> None:
        if isinstance(output, Emit):
            drawn = self._drawn.setdefault(output.index, _Drawn())
            drawn.tokens += output.token_ids
            drawn.logprobs += output.logprobs
        elif isinstance(output, Finish):
            self._drawn.setdefault(output.index, _Drawn()).done = output

    def _best(self) -> tuple[Output, ...]:
        done = [(drawn, drawn.done) for _, drawn in sorted(self._drawn.items()) if drawn.done is not None]
        done.sort(key=lambda pair: -pair[1].score / max(len(pair[0].tokens), 1))
        outputs: list[Output] = []
        for index, (drawn, end) in enumerate(done[: self._num_returned]):
            outputs.append(Emit(index, tuple(drawn.tokens), tuple(drawn.logprobs)))
            outputs.append(Finish(index, end.finish_reason, end.stop_reason, end.score))
        return tuple(outputs)
