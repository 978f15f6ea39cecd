"""What a branch does next, and the protocol every decoding strategy satisfies.

A strategy owns one request's decoding state: it says what to draw from each branch's logits and, when the candidates
come back, answers with actions on branches (the scheduler applies them to pages) and outputs (the engine turns them
into events). It never sees pages, plans or tensors. Preemption is invisible to it.

Branch ids are small ints local to the request; branch 0 is the root and holds the prompt.

What is made anew for every token is a msgspec struct: made in a fraction of a dataclass's time, and none of the garbage
collector's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from chatcache.errors import UnsupportedParameterError
from chatcache.types.events import LiveBeam, TokenLogprob
from chatcache.types.plan import F32, I32, U32


@dataclass(frozen=True, slots=True)
class DrawSpec:
    """One draw from a branch's next-token logits; fields as in `sched.plan.Draws`.

    `edit` is (ids, scale, add) of `sched.plan.LogitEdit`, `mask` the words of a `LogitMask`, or None.
    """

    width: int = 1
    seed: int = 0
    lane: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_top: int = 0
    edit: tuple[I32, F32, F32] | None = None
    mask: U32 | None = None


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """What one draw came back with: `width` tokens, best first, and the top raw alternatives if asked for.

    `perturbed`: log-probability + noise of each token, where they were drawn without replacement. `raw_logprobs`:
    those of the model's own log-softmax, where `logprobs` are of another distribution.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[int, float], ...] = ()
    perturbed: tuple[float, ...] = ()
    raw_logprobs: tuple[float, ...] = ()

    def logprob_at(self, place: int) -> TokenLogprob:
        """Return what is reported of the token at `place`."""
        return TokenLogprob((self.raw_logprobs or self.logprobs)[place], self.top)


class Extend(msgspec.Struct, frozen=True, gc=False):
    """Append `token` to `branch`; its KV is computed in a later step."""

    branch: int
    token: int


class Fork(msgspec.Struct, frozen=True, gc=False):
    """Create `child` with all of `parent`'s tokens and pages as they were before this step's actions, plus `token`.

    Every Fork of a parent precedes that parent's own Extend or Retire in the action list.
    """

    parent: int
    child: int
    token: int


class Release(msgspec.Struct, frozen=True, gc=False):
    """Release `branch`'s hold on its pages. What it computed may be found again by later requests, the tokens on its
    partly filled last page only if `keep_tail`."""

    branch: int
    keep_tail: bool = True


BranchAction = Extend | Fork | Release


class Emit(msgspec.Struct, frozen=True, gc=False):
    """Tokens of candidate `index` that are now final, for the caller; `score` as of `types.Tokens`."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """Candidate `index` ended; fields as in `types.CandidateDone`."""

    index: int
    finish_reason: str
    stop_reason: str | int | None = None
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class BeamUpdate:
    """The live beams after this step, best first, where the caller asked to watch them."""

    beams: tuple[LiveBeam, ...]


Output = Emit | Finish | BeamUpdate


class DroppedCandidate(msgspec.Struct, frozen=True, gc=False):
    """Who goes with a candidate that was given up, and the candidate's score so far.

    `branch`: None while it has none of its own. `is_last`: no other is left, so that the request has to end; then
    nothing was changed.
    """

    branch: int | None = None
    score: float = 0.0
    is_last: bool = False


class Advance(msgspec.Struct, frozen=True, gc=False):
    """Answer to one round of candidates. Actions apply in order. `finished`: no branch is left, the request is over
    (every branch has been retired by then)."""

    actions: tuple[BranchAction, ...]
    outputs: tuple[Output, ...]
    finished: bool = False


class Strategy(Protocol):
    """Decoding of one request."""

    @property
    def max_branches(self) -> int:
        """Upper bound of branches alive at once; what gang admission plans for."""
        ...

    @property
    def lockstep(self) -> bool:
        """True when all live branches must be drawn in the same step (beams)."""
        ...

    @property
    def has_fixed_draws(self) -> bool:
        """True once `draws` will answer for a branch what it answered last time, step after step, until the branch is
        gone: the scheduler then need not ask again."""
        ...

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        """What to draw from `branch`'s next-token logits. A query: may be asked again after a preemption."""
        ...

    def drop(self, index: int) -> DroppedCandidate | None:
        """Give up candidate `index` between two steps; None if it has ended, or never was.

        The caller lets its branch go. Raises: UnsupportedParameterError where candidates stand for no branch of their
        own.
        """
        ...

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        """Consume candidates by branch, as many per branch as `draws(branch)` asked for."""
        ...


def cannot_drop_error(kind: str) -> UnsupportedParameterError:
    """What `Strategy.drop` raises where candidates are settled together."""
    return UnsupportedParameterError(f"{kind} cannot be dropped one by one: cancel the response", param="candidate")
