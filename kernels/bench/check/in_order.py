"""A runner held back, so that running ahead can be compared with not doing it."""

from __future__ import annotations

from dataclasses import replace

from chatcache.engine.protocols import Launched
from chatcache.model.runner import Runner
from chatcache.types.plan import KVCapacity, StepPlan, StepResult


class OneByOne:
    """A runner that never runs ahead: every step is over before the next one is planned."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def capacity(self) -> KVCapacity:
        return replace(self._runner.capacity(), runs_ahead=False)

    def execute(self, plan: StepPlan) -> StepResult:
        return self._runner.execute(plan)

    def launch(self, plan: StepPlan) -> Launched:
        return self._runner.launch(plan)
