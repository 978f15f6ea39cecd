"""The device of the fake runner for asynchronous launch.

It resolves a PENDING_TOKEN to the token that it sampled in the previous step at that slot. It rejects what a device
cannot do: a third step, results out of order, a token that was not sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from chatcache.types.plan import I32, PENDING_TOKEN, StepPlan, StepResult

MAX_STEPS = 2


class InvalidPlanError(RuntimeError):
    """A plan or a call that no device could execute."""


class Queued:
    """A launched step. Satisfies `StepHandle`."""

    def __init__(self, device: FakeDevice, plan: StepPlan) -> None:
        self._device = device
        self.plan = plan
        self.outcome: StepResult | Exception | None = None

    def result(self) -> StepResult:
        self._device.finish(self)
        if isinstance(self.outcome, StepResult):
            return self.outcome
        raise self.outcome or InvalidPlanError("the step was never executed")


class FakeDevice:
    """Executes steps in order: at their launch or, if `lazy`, when their result is read.

    Errors are raised by the result. `num_refused` counts invalid launches.
    """

    def __init__(self, execute: Callable[[StepPlan], StepResult], *, lazy: bool) -> None:
        self.num_refused = 0
        self._execute = execute
        self._lazy = lazy
        self._steps: deque[Queued] = deque()  # whose results were not asked for
        self._last: StepPlan | None = None
        self._drawn: dict[int, int] = {}  # by slot, in the step executed last

    def launch(self, plan: StepPlan) -> Queued:
        """Enqueue a step.

        Raises: InvalidPlanError.
        """
        if len(self._steps) == MAX_STEPS:
            self._refuse(f"step {plan.step} was launched after {MAX_STEPS} others")
        row_of = np.repeat(np.arange(len(plan.rows.slot)), plan.rows.num_tokens)
        for row in row_of[plan.rows.tokens == PENDING_TOKEN].tolist():
            slot = int(plan.rows.slot[row])
            if plan.rows.num_tokens[row] != 1 or self._last is None or slot not in slots_drawn(self._last):
                self._refuse(f"step {plan.step}: the token of slot {slot} was not drawn in the step before")
        self._last = plan
        step = Queued(self, plan)
        self._steps.append(step)
        if not self._lazy:
            self._run(step)
        return step

    def finish(self, step: Queued) -> None:
        """Execute the step if that has not been done.

        Raises: InvalidPlanError unless it is the next one.
        """
        if step not in self._steps:
            return
        if step is not self._steps[0]:
            self._refuse(f"the result of step {step.plan.step} was asked for before that of the step ahead of it")
        if step.outcome is None:
            self._run(step)
        self._steps.popleft()

    def _run(self, step: Queued) -> None:
        try:
            plan = self._resolved(step.plan)
            result = step.outcome = self._execute(plan)
        except Exception as error:
            step.outcome, self._drawn = error, {}
        else:
            slots = slots_drawn(step.plan)
            self._drawn = {slot: int(result.tokens[draw, 0]) for slot, draw in slots.items()}

    def _resolved(self, plan: StepPlan) -> StepPlan:
        rows = plan.rows
        tokens: I32 = rows.tokens.copy()
        row_of = np.repeat(np.arange(len(rows.slot)), rows.num_tokens)
        for place in np.flatnonzero(tokens == PENDING_TOKEN).tolist():
            tokens[place] = self._drawn[int(rows.slot[row_of[place]])]
        return replace(plan, rows=replace(rows, tokens=tokens))

    def _refuse(self, reason: str) -> None:
        self.num_refused += 1
        raise InvalidPlanError(reason)


def slots_drawn(plan: StepPlan) -> dict[int, int]:
    """Return the draw of each slot with exactly one single draw, by slot."""
    row, slot = plan.draws.row, plan.rows.slot
    single = np.flatnonzero((plan.draws.width == 1) & (np.bincount(row)[row] == 1)) if len(row) else row
    return dict(zip(slot[row[single]].tolist(), single.tolist(), strict=True))
