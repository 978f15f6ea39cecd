"""Parallel sampling: `n` candidates that share the pages of the prompt.

The root branch is drawn once per candidate; candidate i becomes branch i. Noise is keyed by (seed, candidate,
position), so a candidate does not depend on the presence of the others.

`BestOfStrategy` draws more candidates than requested and returns those with the best mean log-probability.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from struct import iter_unpack
from typing import Protocol

import msgspec

from chatcache.decoding.grammar.state import Constraint, GrammarDeadEndError, GrammarState, advance_candidate
from chatcache.decoding.logit_edits import LogitEdits
from chatcache.decoding.stopping import DEAD_END, START, StopProgress, StopResult, StopRules
from chatcache.decoding.token_bans import TokenMasks
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
    LogitChanges,
    Output,
    Release,
    Strategy,
    cannot_drop_error,
)
from chatcache.types.events import TokenLogprob, is_dead_end
from chatcache.types.request import SamplingParams, SentCandidate


class DecodingState(Protocol):
    """What the changed logits of a branch depend on."""

    @property
    def edits(self) -> LogitEdits: ...

    @property
    def progress(self) -> StopProgress: ...

    @property
    def grammar_state(self) -> GrammarState | None: ...


class SamplerSpec:
    """Sampling parameters of a request as draw specifications.

    Initial `spec` and `edits`, and per-branch ones.
    """

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
        self._min_tokens = rules.min_tokens
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
        masks = TokenMasks(params, constraint, rules)
        self._masks = None if masks.is_empty else masks
        has_fixed_changes = self.edits.is_fixed and constraint is None
        self.has_fixed_changes = has_fixed_changes and rules.thinking is None
        self._has_penalties_only = self._masks is None and not self.edits.has_bans
        self._thinking = rules.thinking if has_fixed_changes else None

    def draw_spec(self, spec: DrawSpec, state: DecodingState) -> DrawSpec:
        """Return the draw specification of a branch in the given state."""
        edit, mask = self.changes(state)
        return spec if edit is None and mask is None else replace(spec, edit=edit, mask=mask)

    def changes(self, state: DecodingState) -> LogitChanges:
        """Return the edit and the mask of a branch in the given state."""
        progress = state.progress
        edit = state.edits.edit(ban=progress.num_tokens < self._min_tokens)
        return (edit, None) if self._masks is None else self._masks.changes(edit, state.grammar_state, progress)

    def next_changes(self, state: DecodingState) -> Callable[[], LogitChanges]:
        """Return the function that returns the changes of a branch whose state is updated in place."""
        return state.edits.changes if self._has_penalties_only else partial(self.changes, state)

    def changes_stay(self, state: DecodingState) -> bool:
        """Return whether the changes after the next token are certain to be those of now."""
        return self._thinking is not None and self._thinking.has_no_mask_soon(state.progress.thought)


ROOT = 0


@dataclass(slots=True)
class _Candidate:
    """State of a live candidate. `score`: cumulative raw log-probability of its tokens."""

    index: int
    spec: DrawSpec
    edits: LogitEdits
    grammar_state: GrammarState | None = None
    progress: StopProgress = START
    score: float = 0.0


class SamplingStrategy:
    """Draw `best_of` candidates (default `n`).

    Branch ids are candidate indexes; the root becomes candidate 0.
    """

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
        self._num_candidates = params.n if params.best_of is None else params.best_of
        self._num_top = params.logprobs
        self._sampler_spec = SamplerSpec(params, rules, constraint, seed=seed, prompt=prompt)
        self._candidates: dict[int, _Candidate] = {}
        self._wanted = set(range(self._num_candidates))  # candidates not dropped before the first draw
        self._started = False
        self._is_banned = False  # all tokens of a draw were banned
        self._has_result = False  # a candidate has ended, and not in a dead end of the grammar

    @property
    def max_branches(self) -> int:
        return self._num_candidates

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def has_fixed_draws(self) -> bool:
        return self._started

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        sampler = self._sampler_spec
        if self._started:
            candidate = self._candidates[branch]
            edit, mask = sampler.changes(candidate)
            if sampler.has_fixed_changes:
                return (replace(candidate.spec, edit=edit, mask=mask),)
            next_changes, stay = sampler.next_changes(candidate), partial(sampler.changes_stay, candidate)
            return (replace(candidate.spec, edit=edit, mask=mask, next_changes=next_changes, changes_stay=stay),)
        if branch != ROOT:
            raise KeyError(branch)
        root = sampler.draw_spec(sampler.spec, _Candidate(ROOT, sampler.spec, sampler.edits))
        return (root, *(replace(root, lane=lane) for lane in range(1, self._num_candidates)))

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        actions: list[BranchAction] = []
        outputs: list[Output] = []
        if self._started:
            for branch, (each,) in drawn.items():
                alive = self._append(self._candidates[branch], each, outputs)
                actions.append(Extend(branch, each.tokens[0]) if alive else self._release(branch))
        elif ROOT in drawn:
            self._start(drawn[ROOT], actions, outputs)
        finished = self._started and not self._candidates
        if finished:
            self._check_has_result()
        return Advance(tuple(actions), tuple(outputs), finished)

    def _check_has_result(self) -> None:
        """Raise GrammarDeadEndError if all candidates ended in dead ends."""
        if not self._candidates and not self._has_result:
            raise GrammarDeadEndError(is_banned=self._is_banned)

    def drop(self, index: int) -> DroppedCandidate | None:
        alive = self._candidates.keys() if self._started else self._wanted
        if index not in alive:
            return None
        if len(alive) == 1:
            return DroppedCandidate(is_last=True)
        if not self._started:
            self._wanted.remove(index)
            return DroppedCandidate()
        return DroppedCandidate(index, self._candidates.pop(index).score)

    def resume(self, candidates: Sequence[SentCandidate]) -> tuple[Finish, ...]:
        """Restore candidates that were sent to the client before the engine restarted.

        Call before the first draw.

        Each live candidate becomes the branch of its index. Returns the ends that had not been sent.
        Raises: the errors of the grammar.
        """
        gone = {each.index for each in candidates if each.is_done}
        if not any(each.tokens for each in candidates):
            self._wanted -= gone
            return ()
        self._started, self._has_result = True, any(each.has_result for each in candidates)
        ends: list[Finish] = []
        for each in candidates:
            if each.index in gone:
                continue
            candidate, ended = self._new_candidate(each.index), None
            for (token,) in iter_unpack("<i", each.tokens):
                ended = self._advance_state(candidate, token)
            candidate.score = each.score
            if ended is None:
                self._candidates[candidate.index] = candidate
            else:
                ends.append(Finish(candidate.index, ended.finish_reason, ended.stop_reason, candidate.score))
        self._check_has_result()
        return tuple(ends)

    @property
    def live_candidates(self) -> tuple[int, ...]:
        """Indexes of the candidates that have started and not ended."""
        return tuple(self._candidates)

    def _start(self, drawn: tuple[Candidates, ...], actions: list[BranchAction], outputs: list[Output]) -> None:
        """Turn the draws of the root into candidates: forks first, then the step of the root itself."""
        self._started = True
        for index, each in enumerate(drawn):
            if index not in self._wanted:
                continue  # dropped; it was drawn because draws are made for all candidates together
            candidate = self._candidates[index] = self._new_candidate(index)
            if not self._append(candidate, each, outputs):
                del self._candidates[index]
            elif index != ROOT:
                actions.append(Fork(ROOT, index, each.tokens[0]))
        actions.append(Extend(ROOT, drawn[ROOT].tokens[0]) if ROOT in self._candidates else Release(ROOT))

    def _append(self, candidate: _Candidate, drawn: Candidates, outputs: list[Output]) -> bool:
        """Append a token to a candidate; return False if the candidate ends."""
        if not drawn.tokens:
            self._is_banned = True
            outputs.append(Finish(candidate.index, DEAD_END.finish_reason, DEAD_END.stop_reason, candidate.score))
            return False
        token, logprob = drawn.tokens[0], drawn.logprobs[0]
        candidate.score += logprob
        ended = self._advance_state(candidate, token)
        logprobs = (TokenLogprob(logprob, drawn.top),) if self._num_top is not None else ()
        outputs.append(Emit(candidate.index, drawn.tokens[:1], logprobs, candidate.score))
        if ended is not None:
            outputs.append(Finish(candidate.index, ended.finish_reason, ended.stop_reason, candidate.score))
        return ended is None

    def _new_candidate(self, index: int) -> _Candidate:
        grammar_state = None if self._constraint is None else self._constraint.fork(None)
        spec = replace(self._sampler_spec.spec, lane=index)
        return _Candidate(index, spec, self._sampler_spec.edits.fork(), grammar_state)

    def _advance_state(self, candidate: _Candidate, token: int) -> StopResult | None:
        if candidate.edits.is_recording:
            candidate.edits.record(token)
        if candidate.grammar_state is None:
            candidate.progress, ended = self._rules.advance(candidate.progress, token)
        else:
            state = candidate.grammar_state
            candidate.progress, ended = advance_candidate(self._rules, candidate.progress, token, state)
        if ended is not None and ended is not DEAD_END:
            self._has_result = True
        return ended

    def _release(self, branch: int) -> Release:
        del self._candidates[branch]
        return Release(branch)


@dataclass(slots=True)
class _CandidateOutput:
    """Collected output of one candidate."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Finish | None = None


_DRAWN = msgspec.msgpack.Decoder(dict[int, tuple[Candidates, ...]])


class BestOfStrategy:
    """Return the `n` candidates of `inner` with the best mean token log-probability, best first.

    They are known only when the last candidate ends, so nothing is emitted before. Ties: the lower index first.
    Candidates that ended in a dead end of the grammar come last.
    """

    def __init__(self, inner: Strategy, n: int) -> None:
        self._inner = inner
        self._num_returned = n
        self._outputs_by_index: dict[int, _CandidateOutput] = {}

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
            self._record(output)
        outputs = self._best_outputs() if advance.finished else ()
        return Advance(advance.actions, outputs, advance.finished, msgspec.msgpack.encode(drawn))

    def replay(self, record: bytes) -> Advance:
        return self.advance(_DRAWN.decode(record))

    def _record(self, output: Output) -> None:
        if isinstance(output, Emit):
            collected = self._outputs_by_index.setdefault(output.index, _CandidateOutput())
            collected.tokens += output.token_ids
            collected.logprobs += output.logprobs
        elif isinstance(output, Finish):
            self._outputs_by_index.setdefault(output.index, _CandidateOutput()).done = output

    def _best_outputs(self) -> tuple[Output, ...]:
        done = [(each, each.done) for _, each in sorted(self._outputs_by_index.items()) if each.done is not None]
        done.sort(key=lambda pair: _rank(*pair))
        outputs: list[Output] = []
        for index, (each, end) in enumerate(done[: self._num_returned]):
            outputs.append(Emit(index, tuple(each.tokens), tuple(each.logprobs)))
            outputs.append(Finish(index, end.finish_reason, end.stop_reason, end.score))
        return tuple(outputs)


def _rank(output: _CandidateOutput, end: Finish) -> tuple[bool, float]:
    """Return the sort key of an ended candidate: dead ends last, then by mean token log-probability."""
    return is_dead_end(end.finish_reason, end.stop_reason), -end.score / max(len(output.tokens), 1)
