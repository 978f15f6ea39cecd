"""Cut a step into two smaller ones that give the same results, and put results together again.

Rows are independent of each other within a step, so the first half of them may run before the second. A single row is
cut between its tokens: the first half only fills pages, the draws belong to the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chatcache.sched.plan import Draws, Rows, Scores, StepPlan, StepResult

Index = NDArray[np.intp]

PER_DRAW = ("row", "width", "seed", "lane", "position", "temperature", "top_k", "top_p", "min_p", "num_top")


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a step, or some tokens of one row, and what is drawn from them and scored.

    `first_token`: where its tokens begin among the step's; `drawn`, `scored`: which of the step's draws and targets
    these are.
    """

    rows: Rows
    draws: Draws
    scores: Scores | None
    first_token: int
    drawn: Index
    scored: Index

    @classmethod
    def whole(cls, plan: StepPlan) -> Part:
        """Return all of a step's rows."""
        targets = len(plan.scores.targets) if plan.scores is not None else 0
        return cls(plan.rows, plan.draws, plan.scores, 0, np.arange(len(plan.draws.row)), np.arange(targets))


def halve(part: Part) -> tuple[Part, Part] | None:
    """Return two halves to be run in this order; None for a single token."""
    num_rows = len(part.rows.slot)
    if num_rows > 1:
        middle = num_rows // 2
        return _rows(part, 0, middle), _rows(part, middle, num_rows)
    if len(part.rows.tokens) > 1:
        return _tokens(part, len(part.rows.tokens) // 2)
    return None


def join(whole: Part, parts: Sequence[tuple[Part, StepResult]]) -> StepResult:
    """Return the results of a step's parts as the step's own."""
    num_draws = len(whole.draws.row)
    results = [result for _, result in parts]
    places = [part.drawn for part, _ in parts]
    faults = sorted((int(part.drawn[draw]), text) for part, result in parts for draw, text in result.faults)

    def gather(arrays: Sequence[NDArray[Any] | None], at: Sequence[Index], count: int, blank: float) -> NDArray[Any]:
        known = [(array, where) for array, where in zip(arrays, at, strict=True) if array is not None and len(where)]
        kind = known[0][0].dtype if known else np.dtype(np.int32 if blank == -1 else np.float32)
        out = np.full((count, max((array.shape[1] for array, _ in known), default=0)), blank, kind)
        for array, where in known:
            out[where, : array.shape[1]] = array
        return out

    joined = StepResult(
        gather([one.tokens for one in results], places, num_draws, -1),
        gather([one.logprobs for one in results], places, num_draws, -np.inf),
        gather([one.top_tokens for one in results], places, num_draws, -1),
        gather([one.top_logprobs for one in results], places, num_draws, -np.inf),
        tuple(faults),
        gather([one.perturbed for one in results], places, num_draws, -np.inf),
        gather([one.raw_logprobs for one in results], places, num_draws, -np.inf),
    )
    if whole.scores is None:
        return joined
    cells, count = [part.scored for part, _ in parts], len(whole.scores.targets)
    columns = [one.scores[:, None] if one.scores is not None else None for one in results]
    scores = np.full(count, np.nan, np.float32)
    if count:
        scores = gather(columns, cells, count, np.nan)[:, 0]
    return replace(
        joined,
        scores=scores,
        score_tokens=gather([one.score_tokens for one in results], cells, count, -1),
        score_logprobs=gather([one.score_logprobs for one in results], cells, count, -np.inf),
    )


def _rows(part: Part, first: int, last: int) -> Part:
    """Return rows first .. last - 1."""
    rows = part.rows
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows.num_tokens)))
    begin, end = int(ends[first]), int(ends[last])
    cut = Rows(rows.slot[first:last], rows.start[first:last], rows.num_tokens[first:last], rows.tokens[begin:end])
    which = np.flatnonzero((part.draws.row >= first) & (part.draws.row < last))
    scores, scored = _scores_of_rows(part, first, last)
    return Part(cut, _draws(part.draws, which, first), scores, part.first_token + begin, part.drawn[which], scored)


def _scores_of_rows(part: Part, first: int, last: int) -> tuple[Scores | None, Index]:
    scores = part.scores
    if scores is None:
        return None, part.scored
    inside = (scores.row >= first) & (scores.row < last)
    if not inside.any():
        return None, part.scored[:0]
    cells = np.repeat(inside, part.rows.num_tokens[scores.row])
    cut = Scores(scores.row[inside] - np.int32(first), scores.num_top[inside], scores.targets[cells])
    return cut, part.scored[cells]


def _tokens(part: Part, middle: int) -> tuple[Part, Part]:
    """Cut the only row before its token `middle`."""
    rows, scores = part.rows, part.scores
    before, after = np.array([middle], np.int32), (rows.num_tokens - middle).astype(np.int32)
    head = Rows(rows.slot, rows.start, before, rows.tokens[:middle])
    tail = Rows(rows.slot, rows.start + np.int32(middle), after, rows.tokens[middle:])
    first = second = scores
    if scores is not None:
        first, second = (replace(scores, targets=cut) for cut in (scores.targets[:middle], scores.targets[middle:]))
    none = part.drawn[:0]
    return (
        Part(head, _draws(part.draws, none, 0), first, part.first_token, none, part.scored[:middle]),
        Part(tail, part.draws, second, part.first_token + middle, part.drawn, part.scored[middle:]),
    )


def _draws(draws: Draws, which: Index, first_row: int) -> Draws:
    """Return some of the draws, their rows counted from `first_row`."""
    cut = {name: getattr(draws, name)[which] for name in PER_DRAW}
    cut["row"] = cut["row"] - np.int32(first_row)
    place = {int(draw): new for new, draw in enumerate(which)}
    return Draws(
        **cut,
        edits=tuple(replace(edit, draw=place[edit.draw]) for edit in draws.edits if edit.draw in place),
        masks=tuple(replace(mask, draw=place[mask.draw]) for mask in draws.masks if mask.draw in place),
    )
