"""What each namespace was served in a step, put on its counter."""

from __future__ import annotations

from collections import Counter

from chatcache.sched.batch import Step
from chatcache.sched.fairness import VirtualCounters
from chatcache.sched.request import Branch, LiveRequest


class Meter:
    """Charges requests for their prompts and steps for their draws."""

    def __init__(self, counters: VirtualCounters) -> None:
        self._counters = counters
        self._steady: list[Branch] = []
        self._num_steady: Counter[str] = Counter()

    def charge_start(self, request: LiveRequest) -> None:
        """Charge for the part of the prompt that was not found, when a request first starts."""
        self._counters.charge_input(request.namespace, request.num_prompt_tokens - (request.num_cached_tokens or 0))

    def charge_step(self, step: Step) -> None:
        """Charge for every token that was drawn."""
        for branch, _, num_draws in step.drawn:
            self._counters.charge_output(branch.request.namespace, num_draws)
        if step.steady.branches is not self._steady:  # mostly the same list as in the step before
            self._steady = step.steady.branches
            self._num_steady = Counter(branch.request.namespace for branch in self._steady)
        for namespace, count in self._num_steady.items():
            self._counters.charge_output(namespace, count)
