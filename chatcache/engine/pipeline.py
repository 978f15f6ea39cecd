"""Steps on the device: launching them, waiting for them and validating their results.

    fill      plan and launch a step; then launch the next one, if it can be planned without the first one's result
    collect   wait for the oldest step's result

With asynchronous scheduling two steps are launched, so that the device does not wait for the host. The engine calls
`fill`, then `collect`: between two engine steps at most one step is on the device. An abort in between frees pages at
once, see `scheduler.scheduler`.

Results are not trusted: a wrong shape fails all requests of the step, an invalid value fails the request it belongs to.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import inf, isnan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatcache.decoding.beam_search import BeamGroup, BeamStrategy, rank_together
from chatcache.engine.protocols import ModelRunner, StepHandle
from chatcache.errors import DeviceLostError, EngineError
from chatcache.scheduler.batch import Step
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.actions import RANKED, Advance, Candidates
from chatcache.types.events import TokenLogprob
from chatcache.types.plan import F32, I32, NOTHING_LEFT, Draws, StepPlan, StepResult

log = logging.getLogger(__name__)

BoolArray = NDArray[np.bool_]


def check_shapes(plan: StepPlan, result: StepResult) -> None:
    """Verify that the result's arrays have the shapes that `StepResult` documents.

    Raises: ValueError naming the first array with another shape.
    """
    draws = plan.draws
    num_draws = len(draws.row)
    width, num_top = int(draws.width.max(initial=0)), int(draws.num_top.max(initial=0))
    pairs = [
        ("tokens", result.tokens, result.logprobs, num_draws, width),
        ("top_tokens", result.top_tokens, result.top_logprobs, num_draws, num_top),
    ]
    if ((draws.width > 1) & (draws.temperature > 0)).any():
        for name, values in (("perturbed", result.perturbed), ("raw_logprobs", result.raw_logprobs)):
            if values is None or values.shape != result.tokens.shape:
                raise ValueError(
                    f"{name} has shape {None if values is None else values.shape}, not {result.tokens.shape}"
                )
    if result.faults and any(not 0 <= draw < num_draws for draw, _ in result.faults):
        raise ValueError(f"a fault names a draw that the plan does not have; it has {num_draws}")
    if plan.scores is not None:
        count = len(plan.scores.targets)
        if result.scores is None or result.score_tokens is None or result.score_logprobs is None:
            raise ValueError("prompt scores were requested and are missing")
        if result.scores.shape != (count,):
            raise ValueError(f"scores have shape {result.scores.shape}, not {(count,)}")
        num_top = int(plan.scores.num_top.max(initial=0))
        pairs.append(("score_tokens", result.score_tokens, result.score_logprobs, count, num_top))
    if plan.pools is not None:
        num_pools = len(plan.pools.row)
        if result.pooled is None or result.pooled.ndim != 2 or len(result.pooled) != num_pools:
            shape = None if result.pooled is None else result.pooled.shape
            raise ValueError(f"pooled has shape {shape}, not {num_pools, 'hidden'}")
    for name, tokens, logprobs, num_rows, num_columns in pairs:
        shape = tokens.shape
        if len(shape) != 2 or shape[0] != num_rows or shape[1] < num_columns or logprobs.shape != shape:
            raise ValueError(
                f"{name} has shape {shape}, its log-probabilities {logprobs.shape}; not {num_rows, num_columns}"
            )
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"{name} are {tokens.dtype}, not token ids")


def select_rows(result: StepResult, which: I32) -> StepResult:
    """Return the part of a result that belongs to these draws."""
    positions = {draw: position for position, draw in enumerate(which.tolist())}
    return replace(
        result,
        perturbed=None if result.perturbed is None else result.perturbed[which],
        raw_logprobs=None if result.raw_logprobs is None else result.raw_logprobs[which],
        tokens=result.tokens[which],
        logprobs=result.logprobs[which],
        top_tokens=result.top_tokens[which],
        top_logprobs=result.top_logprobs[which],
        faults=tuple((positions[draw], message) for draw, message in result.faults if draw in positions),
    )


def invalid_samples(draws: Draws, result: StepResult, vocab_size: int) -> list[tuple[int, str]]:
    """Find the draws with invalid token ids or log-probabilities; return each with a reason.

    Unused cells (id -1) are valid if at least one cell before them is used.
    """
    tokens, logprobs = result.tokens, result.logprobs
    if not len(tokens):
        return []
    found: list[BoolArray] = []
    for ids, values in ((tokens, logprobs), (result.top_tokens, result.top_logprobs)):
        if ids.shape[1]:
            found.append((ids >= vocab_size) | (ids < -1) | ((ids >= 0) & np.isnan(values)))
    wrong = found[0]
    wrong[:, 0] |= tokens[:, 0] < 0
    if result.faults:
        wrong[_draws_without_token(result)] = False
    if tokens.shape[1] > 1:
        wrong &= np.arange(tokens.shape[1]) < draws.width[:, None]
    if len(found) > 1:
        wrong = np.hstack(found)
    if not wrong.any():
        return []
    return [(draw, _describe_invalid(draw, result, vocab_size)) for draw in np.flatnonzero(wrong.any(axis=1)).tolist()]


def _describe_invalid(draw: int, result: StepResult, vocab_size: int) -> str:
    ids = np.concatenate([result.tokens[draw], result.top_tokens[draw]])
    unknown = ids[(ids >= vocab_size) | (ids < -1)]
    if unknown.size:
        return f"the model answered with token id {int(unknown[0])}; its vocabulary ends at {vocab_size - 1}"
    return "the log-probabilities are not numbers" if result.tokens[draw, 0] >= 0 else "no token was drawn"


class BeamRanker:
    """Ranks the continuations of beam searches in the decode batch together, if nothing has to be reported of them."""

    def __init__(self) -> None:
        self._branches: list[Branch] = []
        self._draws: list[tuple[BeamStrategy, LiveRequest, dict[int, int]]] = []  # row of each branch id

    def rank(
        self, step: Step, result: StepResult, faulty: Collection[LiveRequest]
    ) -> tuple[list[tuple[LiveRequest, Callable[[], Advance]]], list[Candidates]]:
        """Return how each of the searches continues, and the candidates of all other draws, RANKED for theirs."""
        advances: list[tuple[LiveRequest, Callable[[], Advance]]] = []
        ranked: list[int] = []
        if result.faults:
            return advances, build_candidates(step.plan.draws, result)
        if self._branches is not step.decode_branches:
            self._branches = step.decode_branches
            self._draws = list(_beam_rows(self._branches))
        first, widths = step.first_decode_draw, step.plan.draws.width.tolist()
        searches: dict[tuple[int, int], list[tuple[BeamStrategy, LiveRequest, BeamGroup, list[int]]]] = {}
        for strategy, request, rows in self._draws:
            group = strategy.sole_group
            if group is None or request in faulty or len(rows) != len(request.branches):
                continue  # some branches are not in the decode batch
            order = [first + rows[beam.node.branch] for beam in group.beams]
            searches.setdefault((len(order), widths[order[0]]), []).append((strategy, request, group, order))
        for (_, width), alike in searches.items():
            at = np.array([order for *_, order in alike])
            groups = [group for _, _, group, _ in alike]
            lists = rank_together(groups, result.tokens[at, :width], result.logprobs[at, :width])
            for (strategy, request, group, order), best in zip(alike, lists, strict=True):
                advances.append((request, partial(strategy.advance_ranked, group.continuations(*best))))
                ranked += order
        return advances, _build_other_candidates(step.plan.draws, result, ranked)


def _beam_rows(branches: list[Branch]) -> Iterator[tuple[BeamStrategy, LiveRequest, dict[int, int]]]:
    """Yield the beam searches, and the row of each branch id."""
    for request, rows in groupby(enumerate(branches), key=lambda row: row[1].request):
        if isinstance(strategy := request.strategy, BeamStrategy):
            yield strategy, request, {branch.id: row for row, branch in rows}


def _build_other_candidates(draws: Draws, result: StepResult, ranked: Sequence[int]) -> list[Candidates]:
    """Convert the draws that are not `ranked` as `build_candidates` does."""
    if not ranked:
        return build_candidates(draws, result)
    candidates = [RANKED] * len(draws.row)
    if len(ranked) < len(candidates):
        others = np.delete(np.arange(len(draws.row), dtype=np.int32), ranked)
        built = build_candidates(draws.select(others), select_rows(result, others))
        for draw, each in zip(others.tolist(), built, strict=True):
            candidates[draw] = each
    return candidates


def build_candidates(draws: Draws, result: StepResult) -> list[Candidates]:
    """Convert the result's arrays into one `Candidates` per draw, without unused cells (id -1).

    It is empty for a draw without an allowed token.
    """
    tokens, logprobs = result.tokens.tolist(), result.logprobs.tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if result.top_tokens.shape[1]:
        tops = pair_top_logprobs(result.top_tokens, result.top_logprobs)
    all_used = not result.faults and (draws.width == result.tokens.shape[1]).all() and (result.tokens >= 0).all()
    has_perturbed = result.perturbed is not None and result.perturbed.shape[1]
    has_raw = result.raw_logprobs is not None and result.raw_logprobs.shape[1]
    if all_used and not has_perturbed and not has_raw:
        return list(map(Candidates, map(tuple, tokens), map(tuple, logprobs), tops))
    noisy, raw = _rows(result.perturbed, len(tokens)), _rows(result.raw_logprobs, len(tokens))
    candidates: list[Candidates] = []
    for draw, (ids, width) in enumerate(zip(tokens, draws.width.tolist(), strict=True)):
        used = min(width, ids.index(-1) if ids[-1] == -1 else len(ids))
        candidates.append(
            Candidates(
                tuple(ids[:used]),
                tuple(logprobs[draw][:used]),
                tops[draw],
                tuple(noisy[draw][:used]),
                tuple(raw[draw][:used]),
            )
        )
    for draw in _draws_without_token(result):
        candidates[draw] = Candidates((), ())
    return candidates


def _draws_without_token(result: StepResult) -> list[int]:
    """Return the draws for which every token is banned."""
    return [draw for draw, message in result.faults if message == NOTHING_LEFT]


def _rows(values: F32 | None, num_draws: int) -> list[list[float]]:
    """Return the values as one list per draw; empty for a draw that does not use them."""
    if values is None or not values.shape[1]:
        return [[]] * num_draws
    return [row if row[0] > -inf else [] for row in values.tolist()]


def pair_top_logprobs(tokens: I32, logprobs: F32) -> list[tuple[tuple[int, float], ...]]:
    """Pair token ids and log-probabilities in each row, without unused cells.

    Shapes: [N, L] both.
    """
    rows = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    if (tokens >= 0).all():
        return [tuple(zip(*row, strict=True)) for row in rows]
    return [tuple(pair for pair in zip(*row, strict=True) if pair[0] >= 0) for row in rows]


def collect_scores(step: Step, result: StepResult) -> dict[LiveRequest, Exception]:
    """Append the step's prompt log-probabilities to the scored requests.

    Returns an error for each request with a NaN. A step computes prompt tokens only after the scores of all tokens
    before them, so scores are appended in order.
    """
    plan = step.plan.scores
    if plan is None or result.scores is None or result.score_tokens is None or result.score_logprobs is None:
        return {}
    scores, targets = result.scores.tolist(), plan.targets.tolist()
    tops = pair_top_logprobs(result.score_tokens, result.score_logprobs)
    faults: dict[LiveRequest, Exception] = {}
    position = 0
    for request, _, _, num_tokens in step.scored:
        for cell in range(position, position + num_tokens):
            if targets[cell] < 0:
                continue
            if isnan(scores[cell]):
                faults[request] = EngineError("the prompt's log-probabilities are not numbers")
                break
            request.prompt_scores.append(TokenLogprob(scores[cell], tops[cell][: request.num_prompt_top]))
        position += num_tokens
    return faults


def collect_pools(step: Step, result: StepResult) -> dict[LiveRequest, Exception]:
    """Add the step's sums of hidden states to the pooled requests; return an error for each sum with a NaN."""
    if result.pooled is None:
        return {}
    faults: dict[LiveRequest, Exception] = {}
    for (branch, _, num_tokens), hidden in zip(step.pooled, result.pooled, strict=True):
        if branch.table is None or branch.request.pooler is None:
            continue  # the request has ended
        if np.isfinite(hidden).all():
            branch.request.pooler.add(hidden, num_tokens)
        else:
            faults[branch.request] = EngineError("the prompt's hidden states are not numbers")
    return faults


class CompletedStep(NamedTuple):
    """A collected step, without the rows of ended requests, and its result.

    `is_committed`: the scheduler has committed it already."""

    step: Step
    result: StepResult
    is_committed: bool

    def collect_errors(self, vocab_size: int) -> dict[LiveRequest, Exception]:
        """Add prompt scores and pools to the requests; return the failed requests and their errors."""
        step, result = self.step, self.result
        faults = dict(step.faults)
        if step.plan.scores is not None:
            faults |= collect_scores(step, result)
        if step.pooled:
            faults |= collect_pools(step, result)
        for draw, message in (*result.faults, *invalid_samples(step.plan.draws, result, vocab_size)):
            if message != NOTHING_LEFT:
                faults.setdefault(step.request_of_draw(draw), EngineError(message))
        return faults


class StepFailedError(Exception):
    """A step failed with `cause`, and the steps after it are void.

    `requests` have left the scheduler."""

    def __init__(self, cause: Exception, requests: list[LiveRequest]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.requests = requests


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """A `StepHandle` of a step whose launch failed: `result` raises the error."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


@dataclass(slots=True)
class _LaunchedStep:
    """A step on the device.

    `plan` is what was launched, `step` the part whose requests have not ended.
    `is_ahead`: it was launched before the previous step was collected.
    `is_interrupted`: waiting for it was interrupted (KeyboardInterrupt), so the step counts as failed.
    """

    step: Step
    plan: StepPlan
    handle: StepHandle
    started_s: float
    is_ahead: bool = False
    is_committed: bool = False
    is_interrupted: bool = False


class StepPipeline:
    """The steps that were launched and not collected, oldest first."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.num_ahead = 0  # steps that were launched before the previous step was collected
        self._runner = runner
        self._can_launch_ahead = runner.capacity().has_async_launch
        self._scheduler = scheduler
        self._clock = clock
        self._steps: deque[_LaunchedStep] = deque()
        self._collected_s = 0.0  # when the last step was collected; the next one ran from then on

    def __len__(self) -> int:
        return len(self._steps)

    def fill(self) -> None:
        """Launch a step if none is launched, and the next one if it can be planned ahead.

        Raises: what planning raises. The error of a failed launch is raised by `collect`.
        """
        if not self._steps:
            step = self._scheduler.plan()
            if step is None:
                return
            self._launch(step)
        oldest = self._steps[0]
        if (
            not self._can_launch_ahead
            or len(self._steps) > 1
            or oldest.is_interrupted
            or isinstance(oldest.handle, FailedLaunch)
        ):
            return
        if self._scheduler.can_schedule_ahead(oldest.step):
            oldest.step = self._scheduler.drop_finished_rows(oldest.step)
            self._scheduler.commit(oldest.step)
            oldest.is_committed = True
            if (following := self._scheduler.plan_ahead()) is not None:
                self._launch(following, is_ahead=True)
                self.num_ahead += 1

    def _launch(self, step: Step, *, is_ahead: bool = False) -> None:
        started_s = self._clock()
        handle: StepHandle
        try:
            handle = self._runner.launch(step.plan)
        except Exception as error:
            handle = FailedLaunch(error)
        self._steps.append(_LaunchedStep(step, step.plan, handle, started_s, is_ahead))

    def collect(self) -> CompletedStep:
        """Wait for the oldest step and return it with its result.

        Raises: StepFailedError, DeviceLostError.
        """
        oldest = self._steps[0]
        try:
            result = oldest.handle.result()
            check_shapes(oldest.plan, result)
            if oldest.is_interrupted:
                raise EngineError("The request was interrupted while it was computed.")
        except DeviceLostError:
            raise
        except Exception as error:
            log.exception("step %d failed", oldest.plan.step)
            self._steps.popleft()
            raise StepFailedError(error, self._scheduler.abort_steps(oldest.step, *self.drain())) from error
        except BaseException:
            oldest.is_interrupted = True
            raise
        self._steps.popleft()
        if self._scheduler.kv.states is not None:
            self._scheduler.kv.confirm_ahead()
        rows = oldest.plan.rows
        started_s, self._collected_s = max(oldest.started_s, self._collected_s), self._clock()
        num_tokens, num_rows = len(rows.tokens), len(rows.slot)
        cost = self._scheduler.swaps.cost
        speed = cost.decode if num_tokens == num_rows else cost.prefill
        speed.record(num_tokens, num_rows, self._collected_s - started_s)
        if oldest.is_ahead and not oldest.is_committed:  # requests may have ended while it was on the device
            oldest.step = self._scheduler.drop_finished_rows(oldest.step)
        if oldest.step.kept_draws is not None:
            result = select_rows(result, oldest.step.kept_draws)
        return CompletedStep(oldest.step, result, oldest.is_committed)

    def drain(self) -> list[Step]:
        """Wait for all launched steps, discard their results and return the steps.

        Raises: DeviceLostError.
        """
        steps: list[Step] = []
        while self._steps:
            try:
                self._steps[0].handle.result()
            except DeviceLostError:
                raise
            except Exception:
                log.debug("step %d, whose result is discarded, failed too", self._steps[0].plan.step, exc_info=True)
            steps.append(self._steps.popleft().step)
        return steps

    def discard(self) -> None:
        """Remove all launched steps without waiting, because the device is lost."""
        self._steps.clear()
