"""Steps between planning and result: one at a time, or two where the runner runs ahead, so that the device never waits.

    fill      plan a step and launch it; then the one behind it, if that can be planned without the first one's result
    collect   wait for the oldest step's result

Each call of the engine fills, then collects one step: what runs on between two calls is at most one step, of steady
rows only. An abort in between lets go of pages at once; `sched.ahead` says why that is right.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from chatcache.engine.client import Launched, ModelRunner
from chatcache.engine.results import bad_draws, check_shapes, some_of
from chatcache.engine.scoring import collect_scores
from chatcache.errors import DeviceLost, EngineFault
from chatcache.sched.batch import Step
from chatcache.sched.plan import StepPlan, StepResult
from chatcache.sched.request import LiveRequest
from chatcache.sched.scheduler import Scheduler

log = logging.getLogger(__name__)


class Landed(NamedTuple):
    """A step as far as it still counts, and its result. `is_committed`: the scheduler has noted it already."""

    step: Step
    result: StepResult
    is_committed: bool

    def faults(self, vocab_size: int) -> dict[LiveRequest, Exception]:
        """Say which requests cannot go on, and why; give the scored ones their scores."""
        step, result = self.step, self.result
        faults = dict(step.faults) | collect_scores(step, result)
        for draw, message in (*result.faults, *bad_draws(step.plan.draws, result, vocab_size)):
            faults.setdefault(step.request_of_draw(draw), EngineFault(message))
        return faults


class StepFailed(Exception):
    """A step failed of `cause`, and what was launched behind it is void: `requests` have left the scheduler."""

    def __init__(self, cause: Exception, requests: list[LiveRequest]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.requests = requests


@dataclass(frozen=True, slots=True)
class NeverBegun:
    """A step that could not be launched. Satisfies `Launched`."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


@dataclass(slots=True)
class _Flight:
    """`plan` is what was launched, `step` what of it still counts. `is_void`: whoever waited for it was interrupted, so
    that its requests may be gone: it counts as failed."""

    step: Step
    plan: StepPlan
    launched: Launched
    started_s: float
    is_committed: bool = False
    is_void: bool = False


class Flights:
    """The steps that were launched and not collected, oldest first."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.num_ahead = 0  # steps that were launched behind another
        self._runner = runner
        self._runs_ahead = runner.capacity().runs_ahead
        self._scheduler = scheduler
        self._clock = clock
        self._flights: deque[_Flight] = deque()

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
        if not self._runs_ahead or len(self._flights) > 1 or front.is_void or isinstance(front.launched, NeverBegun):
            return
        if self._scheduler.may_run_ahead(front.step):
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
            launched = NeverBegun(error)
        self._flights.append(_Flight(step, step.plan, launched, started_s))

    def collect(self) -> Landed:
        """Wait for the oldest step.

        Raises: StepFailed, DeviceLost.
        """
        front = self._flights[0]
        try:
            result = front.launched.result()
            check_shapes(front.plan, result)
            if front.is_void:
                raise EngineFault("The request was interrupted while it was computed.")
        except DeviceLost:
            raise
        except Exception as error:
            log.exception("step %d failed", front.plan.step)
            self._flights.popleft()
            raise StepFailed(error, self._scheduler.abandon(front.step, *self.drop())) from error
        except BaseException:
            front.is_void = True
            raise
        self._flights.popleft()
        rows = front.plan.rows
        self._scheduler.swaps.cost.prefill.note(len(rows.tokens), len(rows.slot), self._clock() - front.started_s)
        if not front.is_committed:
            self._settle(front)
        if front.step.kept is not None:
            result = some_of(result, front.step.kept)
        return Landed(front.step, result, front.is_committed)

    def _settle(self, front: _Flight) -> None:
        """Leave out the rows of those who went while the step was on the device."""
        front.step = self._scheduler.current(front.step)

    def drop(self) -> list[Step]:
        """Wait until the device is done with all steps and forget their results; return the steps.

        Raises: DeviceLost.
        """
        steps: list[Step] = []
        while self._flights:
            try:
                self._flights[0].launched.result()
            except DeviceLost:
                raise
            except Exception:
                log.debug("step %d, which nobody needs, failed too", self._flights[0].plan.step, exc_info=True)
            steps.append(self._flights.popleft().step)
        return steps

    def forget(self) -> None:
        """Wait for nothing any more: the device is gone."""
        self._flights.clear()
