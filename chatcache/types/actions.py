"""The protocol of decoding strategies, and the actions on branches that they return.

A strategy holds the decoding state of one request. In each step it specifies what to draw from the logits of its
branches, receives the sampled candidates, and returns actions on branches (which the scheduler applies) and outputs
(which the engine turns into events):

    strategy.draws(branch) --> DrawSpecs --> [the step executes] --> Candidates --> strategy.advance --> Advance

A strategy never sees pages, plans or tensors, and does not notice preemption. Branch ids are small integers local to
the request; branch 0 is the root, which holds the prompt. Types that are created for every token are msgspec structs,
which are several times cheaper to create than dataclasses and are not tracked by the garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from chatcache.errors import UnsupportedParameterError
from chatcache.types.events import LiveBeam, TokenLogprob
from chatcache.types.plan import F32, U32, Draws, EditTable, LogitEdit, LogitMask

MASK_64 = 2**64 - 1

LogitChanges = tuple[EditTable | None, U32 | None]
"""The table of a `plan.LogitEdit` and the words of a `plan.LogitMask`, or None for either."""


@dataclass(frozen=True, slots=True)
class DrawSpec:
    """One draw from a branch's next-token logits; the fields are those of `plan.Draws`.

    `edit` and `mask` as in `LogitChanges`. `next_changes` returns those of the same branch's draw in any later step;
    None if they stay the same. `changes_stay` returns whether they are the same after the next token, whichever it is;
    None if they never are for certain.
    """

    width: int = 1
    seed: int = 0
    lane: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_top: int = 0
    edit: EditTable | None = None
    mask: U32 | None = None
    next_changes: Callable[[], LogitChanges] | None = None
    changes_stay: Callable[[], bool] | None = None


def pack_draws(specs: Sequence[DrawSpec], rows: Sequence[int], positions: Sequence[int]) -> Draws:
    """Pack draw specs as arrays: one draw of each spec from its row at its position."""
    return Draws(
        row=np.array(rows, np.int32),
        width=np.array([spec.width for spec in specs], np.int32),
        seed=np.array([spec.seed & MASK_64 for spec in specs], np.uint64),
        lane=np.array([spec.lane for spec in specs], np.int32),
        position=np.array(positions, np.int32),
        temperature=np.array([spec.temperature for spec in specs], np.float32),
        top_k=np.array([spec.top_k for spec in specs], np.int32),
        top_p=np.array([spec.top_p for spec in specs], np.float32),
        min_p=np.array([spec.min_p for spec in specs], np.float32),
        num_top=np.array([spec.num_top for spec in specs], np.int32),
        edits=tuple(LogitEdit(draw, spec.edit) for draw, spec in enumerate(specs) if spec.edit is not None),
        masks=tuple(LogitMask(draw, spec.mask) for draw, spec in enumerate(specs) if spec.mask is not None),
    )


class Candidates(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The result of one draw: `width` tokens, best first, and the requested top alternatives.

    Fewer tokens if not so many are allowed, none if all are banned: the branch has then reached a dead end.
    `perturbed`: log-probability + noise of each token, if they were drawn without replacement. `raw_logprobs`: the
    log-probabilities under the model's own softmax, if `logprobs` are those of another distribution.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[int, float], ...] = ()
    perturbed: tuple[float, ...] = ()
    raw_logprobs: tuple[float, ...] = ()

    def logprob_at(self, index: int) -> TokenLogprob:
        """Return the log-probability to report for token `index`, and the top alternatives."""
        return TokenLogprob((self.raw_logprobs or self.logprobs)[index], self.top)


RANKED = Candidates((), ())
"""Stands for the candidates of a draw that were ranked together with those of other requests."""


class Extend(msgspec.Struct, frozen=True, gc=False):
    """Append `token` to `branch`; its keys and values are computed in a later step."""

    branch: int
    token: int


class Fork(msgspec.Struct, frozen=True, gc=False):
    """Create the branch `child` as a copy of `parent` with one more token, `token`.

    The copy has the tokens and pages that the parent had before this step's actions. In the list of actions every Fork
    of a parent precedes that parent's own Extend or Release.
    """

    parent: int
    child: int
    token: int


class Release(msgspec.Struct, frozen=True, gc=False):
    """End `branch` and release its pages.

    Later requests can reuse their content while it is cached; that of the partly filled last page only if `keep_tail`.
    """

    branch: int
    keep_tail: bool = True


class Reorder(msgspec.Struct, frozen=True, gc=False):
    """One step of a beam search: branch `branches[i]` becomes a copy of `parents[i]` with one more token, `tokens[i]`.

    Names all branches of the request, parents after their children. A branch that is a parent is its own parent; the
    others give up their tokens and pages, without their partly filled page. It is the only action of its step.
    """

    branches: tuple[int, ...]
    parents: tuple[int, ...]
    tokens: tuple[int, ...]

    def as_actions(self) -> list[Release | Fork | Extend]:
        """Return the actions that do the same branch by branch."""
        steps = list(zip(self.branches, self.parents, self.tokens, strict=True))
        moved = [step for step in steps if step[0] != step[1]]
        return [
            *(Release(branch, keep_tail=False) for branch, _, _ in moved),
            *(Fork(parent, branch, token) for branch, parent, token in moved),
            *(Extend(branch, token) for branch, parent, token in steps if branch == parent),
        ]


BranchAction = Extend | Fork | Release | Reorder


def expand_actions(actions: Sequence[BranchAction]) -> list[Extend | Fork | Release]:
    """Return the actions with a `Reorder` replaced by those that do the same branch by branch."""
    expanded: list[Extend | Fork | Release] = []
    for action in actions:
        expanded += action.as_actions() if isinstance(action, Reorder) else [action]
    return expanded


class Emit(msgspec.Struct, frozen=True, gc=False):
    """Send final tokens of candidate `index` to the client; `score` as in `events.Tokens`."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """Report the end of candidate `index`; the fields are those of `events.CandidateDone`."""

    index: int
    finish_reason: str
    stop_reason: str | int | None = None
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class BeamUpdate:
    """Report the live beams after this step, best first, if `stream_beams` was requested."""

    beams: tuple[LiveBeam, ...]


@dataclass(frozen=True, slots=True)
class Embed:
    """Return the embedding of the prompt; `values` are those of `events.Embedding`."""

    values: bytes


Output = Emit | Finish | BeamUpdate | Embed


class DroppedCandidate(msgspec.Struct, frozen=True, gc=False):
    """The result of cancelling one candidate: the branch to release, and its score so far.

    `branch`: None if the candidate has no branch of its own yet. `is_last`: no other candidate is left, so the request
    has to be cancelled; in this case the strategy has changed nothing.
    """

    branch: int | None = None
    score: float = 0.0
    is_last: bool = False


class Advance(msgspec.Struct, frozen=True, gc=False):
    """A strategy's response to the candidates of a step: ordered actions, and outputs.

    `finished`: the request is complete; its actions have released every branch. `record`: the choices of this step, for
    `SearchStrategy.replay`.
    """

    actions: tuple[BranchAction, ...]
    outputs: tuple[Output, ...]
    finished: bool = False
    record: bytes = b""


class Strategy(Protocol):
    """Decides how one request is decoded: plain sampling, n-best sampling, beam search."""

    @property
    def max_branches(self) -> int:
        """The largest number of branches that can exist at once.

        A request starts only when each of them can get a row.
        """
        ...

    @property
    def lockstep(self) -> bool:
        """Whether all live branches must be sampled in the same step (beam search)."""
        ...

    @property
    def has_fixed_draws(self) -> bool:
        """Whether `draws` returns the same specs for a branch in every later step, except edits and masks.

        The scheduler then calls it only once, and afterwards `DrawSpec.next_changes`.
        """
        ...

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        """Return what to draw from the next-token logits of `branch`; nothing only if this is a `Pooler`.

        It changes no state, and is called again after a preemption.
        """
        ...

    def drop(self, index: int) -> DroppedCandidate | None:
        """Cancel candidate `index` between two steps; None if it has ended or does not exist.

        The caller releases its branch. Raises: UnsupportedParameterError if candidates have no branches of their own.
        """
        ...

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        """Process the sampled candidates and return the actions and outputs that follow from them.

        `drawn`: for each branch one result per spec of `draws(branch)`.
        """
        ...


@runtime_checkable
class SearchStrategy(Strategy, Protocol):
    """A strategy whose state cannot be rebuilt from the emitted tokens, so that each `Advance` has a `record`."""

    def replay(self, record: bytes) -> Advance:
        """Repeat a recorded step, in the state that it began in; return the same actions and outputs.

        Raises: the errors of a grammar.
        """
        ...


class Pooler(Strategy, Protocol):
    """A strategy that needs hidden states of the prompt's tokens instead of draws."""

    @property
    def max_matched_tokens(self) -> int | None:
        """Limit on the prompt tokens that may be matched, because later hidden states are needed; None for no limit."""
        ...

    def num_pooled_tokens(self, start: int, stop: int) -> int:
        """Return how many of the last prompt tokens from `start` up to, not including, `stop` are to be pooled."""
        ...

    def add(self, hidden: F32, num_tokens: int) -> None:
        """Add the sum of the hidden states of the next `num_tokens` tokens. Shape [hidden]."""
        ...


def cannot_drop_error(kind: str) -> UnsupportedParameterError:
    """Return the error for a request whose candidates (`kind`) cannot be cancelled one by one."""
    return UnsupportedParameterError(f"{kind} cannot be dropped one by one: cancel the response", param="candidate")
