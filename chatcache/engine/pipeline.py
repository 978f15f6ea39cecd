"""Steps between planning and result: one at a time, or two where the runner runs ahead, so that the device never waits.

    fill      plan a step and launch it; then the one behind it, if that can be planned without the first one's result
    collect   wait for the oldest step's result

Each call of the engine fills, then collects one step: what runs on between two calls is at most one step, of steady
rows only. An abort in between lets go of pages at once; `sched.ahead` says why that is right.

What a runner answered, read with suspicion: a wrong shape ends the step's requests, a wrong cell its own.

Prompt log-probabilities: the scores of each step, put behind those of the steps before.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chatcache.engine.protocols import Launched, ModelRunner
from chatcache.errors import DeviceLostError, EngineError
from chatcache.scheduler.batch import Step
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.actions import Candidates
from chatcache.types.events import TokenLogprob
from chatcache.types.plan import F32, I32, Draws, StepPlan, StepResult

Bools = NDArray[np.bool_]


def check_shapes(plan: StepPlan, result: StepResult) -> None:
    """Verify that the result's arrays have the shapes that `StepResult` promises.

    Raises: ValueError naming the first that has not; nothing in the result can then be told apart.
    """
    draws = plan.draws
    num_draws = len(draws.row)
    width, num_top = int(draws.width.max(initial=0)), int(draws.num_top.max(initial=0))
    _check_pair("tokens", result.tokens, result.logprobs, num_draws, width)
    _check_pair("top_tokens", result.top_tokens, result.top_logprobs, num_draws, num_top)
    if ((draws.width > 1) & (draws.temperature > 0)).any():
        for name, values in (("perturbed", result.perturbed), ("raw_logprobs", result.raw_logprobs)):
            if values is None or values.shape != result.tokens.shape:
                raise ValueError(
                    f"{name} has shape {None if values is None else values.shape}, not {result.tokens.shape}"
                )
    if any(not 0 <= draw < num_draws for draw, _ in result.faults):
        raise ValueError(f"a fault names a draw beyond the {num_draws} of the plan")
    if plan.scores is not None:
        count = len(plan.scores.targets)
        if result.scores is None or result.score_tokens is None or result.score_logprobs is None:
            raise ValueError("scores were asked for and are missing")
        if result.scores.shape != (count,):
            raise ValueError(f"scores have shape {result.scores.shape}, not {(count,)}")
        _check_pair("score_tokens", result.score_tokens, result.score_logprobs, count,
                    int(plan.scores.num_top.max(initial=0)))  # fmt: skip


def _check_pair(name: str, tokens: I32, logprobs: F32, num_rows: int, num_columns: int) -> None:
    shape = tokens.shape
    if len(shape) != 2 or shape[0] != num_rows or shape[1] < num_columns or logprobs.shape != shape:
        raise ValueError(
            f"{name} has shape {shape}, its log-probabilities {logprobs.shape}; not {num_rows, num_columns}"
        )
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"{name} are {tokens.dtype}, not token ids")


def select_rows(result: StepResult, which: I32) -> StepResult:
    """Return these draws of the result of a step that drew one token from each row."""
    places = {draw: place for place, draw in enumerate(which.tolist())}
    return replace(
        result,
        tokens=result.tokens[which],
        logprobs=result.logprobs[which],
        top_tokens=result.top_tokens[which],
        top_logprobs=result.top_logprobs[which],
        faults=tuple((places[draw], message) for draw, message in result.faults if draw in places),
    )


def invalid_samples(draws: Draws, result: StepResult, vocab_size: int) -> list[tuple[int, str]]:
    """Find the draws whose cells no model of `vocab_size` tokens can have meant, each with what is wrong.

    Unused cells (id -1) are fine behind at least one that is used.
    """
    tokens, logprobs = result.tokens, result.logprobs
    if not len(tokens):
        return []
    wrong = _impossible(tokens, logprobs, vocab_size)
    wrong[:, 0] |= tokens[:, 0] < 0
    if tokens.shape[1] > 1:
        wrong &= np.arange(tokens.shape[1]) < draws.width[:, None]
    if result.top_tokens.shape[1]:
        wrong = np.hstack([wrong, _impossible(result.top_tokens, result.top_logprobs, vocab_size)])
    if not wrong.any():
        return []
    return [(draw, _complaint(draw, result, vocab_size)) for draw in np.flatnonzero(wrong.any(axis=1)).tolist()]


def _impossible(tokens: I32, logprobs: F32, vocab_size: int) -> Bools:
    return (tokens >= vocab_size) | (tokens < -1) | ((tokens >= 0) & np.isnan(logprobs))


def _complaint(draw: int, result: StepResult, vocab_size: int) -> str:
    ids = np.concatenate([result.tokens[draw], result.top_tokens[draw]])
    unknown = ids[(ids >= vocab_size) | (ids < -1)]
    if unknown.size:
        return f"the model answered with token id {int(unknown[0])}; its vocabulary ends at {vocab_size - 1}"
    return "the log-probabilities are not numbers" if result.tokens[draw, 0] >= 0 else "no token was drawn"


def candidates_of(draws: Draws, result: StepResult) -> list[Candidates]:
    """Turn the result's arrays into one `Candidates` per draw, without its unused cells (id -1)."""
    if result.tokens.shape[1] == 1 and result.top_tokens.shape[1] == 0:
        pairs = zip(result.tokens[:, 0].tolist(), result.logprobs[:, 0].tolist(), strict=True)
        return [Candidates((token,), (logprob,)) for token, logprob in pairs]
    tokens, logprobs = result.tokens.tolist(), result.logprobs.tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if result.top_tokens.shape[1]:
        tops = alternatives(result.top_tokens, result.top_logprobs)
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
    return candidates


def _rows(values: F32 | None, num_draws: int) -> list[list[float]]:
    """Return the rows that are in use, the others as empty lists."""
    if values is None or not values.shape[1]:
        return [[]] * num_draws
    return [row if row[0] > -inf else [] for row in values.tolist()]


def alternatives(tokens: I32, logprobs: F32) -> list[tuple[tuple[int, float], ...]]:
    """Pair up ids and log-probabilities, row by row, without unused cells. Shapes: [N, L] both."""
    rows = zip(tokens.tolist(), logprobs.tolist(), strict=True)
    return [tuple(pair for pair in zip(*row, strict=True) if pair[0] >= 0) for row in rows]


def collect_scores(step: Step, result: StepResult) -> dict[LiveRequest, Exception]:
    """Give each scored request its new scores; return whose came back as no numbers.

    A request starts only on tokens whose successors it has scored, so the next score is always among the step's.
    """
    plan = step.plan.scores
    if plan is None or result.scores is None or result.score_tokens is None or result.score_logprobs is None:
        return {}
    scores, targets = result.scores.tolist(), plan.targets.tolist()
    tops = alternatives(result.score_tokens, result.score_logprobs)
    faults: dict[LiveRequest, Exception] = {}
    place = 0
    for request, _, _, num_tokens in step.scored:
        for cell in range(place, place + num_tokens):
            if targets[cell] < 0:
                continue
            if isnan(scores[cell]):
                faults[request] = EngineError("the prompt's log-probabilities are not numbers")
                break
            request.prompt_scores.append(TokenLogprob(scores[cell], tops[cell][: request.num_prompt_top]))
        place += num_tokens
    return faults


log = logging.getLogger(__name__)


class CompletedStep(NamedTuple):
    """A step as far as it still counts, and its result. `is_committed`: the scheduler has noted it already."""

    step: Step
    result: StepResult
    is_committed: bool

    def faults(self, vocab_size: int) -> dict[LiveRequest, Exception]:
        """Say which requests cannot go on, and why; give the scored ones their scores."""
        step, result = self.step, self.result
        faults = dict(step.faults) | collect_scores(step, result)
        for draw, message in (*result.faults, *invalid_samples(step.plan.draws, result, vocab_size)):
            faults.setdefault(step.request_of_draw(draw), EngineError(message))
        return faults


class StepFailedError(Exception):
    """A step failed of `cause`, and what was launched behind it is void: `requests` have left the scheduler."""

    def __init__(self, cause: Exception, requests: list[LiveRequest]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.requests = requests


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """A step that could not be launched. Satisfies `Launched`."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


@dataclass(slots=True)
class _LaunchedStep:
    """`plan` is what was launched, `step` what of it still counts. `is_void`: whoever waited for it was interrupted, so
    that its requests may be gone: it counts as failed."""

    step: Step
    plan: StepPlan
    launched: Launched
    started_s: float
    is_committed: bool = False
    is_void: bool = False


class StepPipeline:
    """The steps that were launched and not collected, oldest first."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.num_ahead = 0  # steps that were launched behind another
        self._runner = runner
        self._runs_ahead = runner.capacity().has_async_launch
        self._scheduler = scheduler
        self._clock = clock
        self._flights: deque[_LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def fill(self) -> None:
        """Have a step on the device if there is work, and the one behind it if that is clear already.

        Raises: what planning raises. A launch that fails shows when the step is collected.
        """
        if not self._flights:
            step = self._scheduler.plan()
            if step is None:
                return
            self._launch(step)
        front = self._flights[0]
        if not self._runs_ahead or len(self._flights) > 1 or front.is_void or isinstance(front.launched, FailedLaunch):
            return
        if self._scheduler.can_schedule_ahead(front.step):
            self._settle(front)
            self._scheduler.commit(front.step)
            front.is_committed = True
            self._launch(self._scheduler.plan_ahead())
            self.num_ahead += 1

    def _launch(self, step: Step) -> None:
        started_s = self._clock()
        launched: Launched
        try:
            launched = self._runner.launch(step.plan)
        except Exception as error:
            launched = FailedLaunch(error)
        self._flights.append(_LaunchedStep(step, step.plan, launched, started_s))

    def collect(self) -> CompletedStep:
        """Wait for the oldest step.

        Raises: StepFailedError, DeviceLostError.
        """
        front = self._flights[0]
        try:
            result = front.launched.result()
            check_shapes(front.plan, result)
            if front.is_void:
                raise EngineError("The request was interrupted while it was computed.")
        except DeviceLostError:
            raise
        except Exception as error:
            log.exception("step %d failed", front.plan.step)
            self._flights.popleft()
            raise StepFailedError(error, self._scheduler.abort_steps(front.step, *self.drop())) from error
        except BaseException:
            front.is_void = True
            raise
        self._flights.popleft()
        rows = front.plan.rows
        self._scheduler.swaps.cost.prefill.record(len(rows.tokens), len(rows.slot), self._clock() - front.started_s)
        if not front.is_committed:
            self._settle(front)
        if front.step.kept_draws is not None:
            result = select_rows(result, front.step.kept_draws)
        return CompletedStep(front.step, result, front.is_committed)

    def _settle(self, front: _LaunchedStep) -> None:
        """Leave out the rows of those who went while the step was on the device."""
        front.step = self._scheduler.drop_finished_rows(front.step)

    def drop(self) -> list[Step]:
        """Wait until the device is done with all steps and forget their results; return the steps.

        Raises: DeviceLostError.
        """
        steps: list[Step] = []
        while self._flights:
            try:
                self._flights[0].launched.result()
            except DeviceLostError:
                raise
            except Exception:
                log.debug("step %d, which nobody needs, failed too", self._flights[0].plan.step, exc_info=True)
            steps.append(self._flights.popleft().step)
        return steps

    def forget(self) -> None:
        """Wait for nothing any more: the device is gone."""
        self._flights.clear()
