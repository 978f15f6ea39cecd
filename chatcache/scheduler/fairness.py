"""Fair scheduling between namespaces with virtual token counters (VTC).

Each namespace has a counter of the service it received, and the waiting namespace with the smallest counter goes next.
A counter grows by INPUT_WEIGHT for every prompt token that a started request has to compute (cached tokens are free)
and by OUTPUT_WEIGHT for every sampled token. When a namespace without waiting requests queues one again, its counter is
raised to the smallest counter of the waiting namespaces, so that idling accumulates no credit. The policy is
work-conserving: no request is held back while resources are free.

Bound: over any period in which two namespaces always have requests waiting, their weighted served tokens differ by at
most 2 * max(INPUT_WEIGHT * longest prompt, OUTPUT_WEIGHT * M), where M is the number of tokens that the requests of one
namespace running at once can hold.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from chatcache.scheduler.batch import Step
from chatcache.scheduler.request import Branch, LiveRequest

FCFS = "fcfs"
PRIORITY = "priority"
FAIR = "fair"
SCHEDULING_POLICIES = (FCFS, PRIORITY, FAIR)

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
MAX_REMEMBERED = 4096


class VirtualTokenCounter:
    """The counter of each namespace.

    `waiting` in the methods: the namespaces with a request in the queue.
    """

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._last_left = ""
        self._max_counters = MAX_REMEMBERED
        self._decode_branches: list[Branch] = []
        self._num_decode_branches: Counter[str] = Counter()

    def __getitem__(self, namespace: str) -> int:
        return self._counters.get(namespace, 0)

    def on_namespace_queued(self, namespace: str, waiting: Collection[str]) -> None:
        """Raise the counter of a returning namespace to the smallest of the waiting ones.

        Call when a namespace without waiting requests queues one.
        """
        floor = self._floor(waiting)
        if len(self._counters) >= self._max_counters:
            self._forget_below(floor, {*waiting, self._last_left})
        self._counters[namespace] = max(self[namespace], floor)

    def on_namespace_drained(self, namespace: str) -> None:
        """Record that the last waiting request of a namespace has left the queue."""
        self._last_left = namespace

    def _forget_below(self, floor: int, retained: Collection[str]) -> None:
        """Delete counters of absent namespaces that their return would raise to `floor` anyway."""
        self._counters = {name: count for name, count in self._counters.items() if count > floor or name in retained}
        self._max_counters = max(MAX_REMEMBERED, 2 * len(self._counters))

    def _floor(self, waiting: Collection[str]) -> int:
        """Return the smallest counter of the waiting namespaces.

        If none waits: the counter of the last one that left the queue.
        """
        return min(map(self.__getitem__, waiting)) if waiting else self[self._last_left]

    def charge_input(self, namespace: str, num_tokens: int) -> None:
        self._counters[namespace] = self[namespace] + INPUT_WEIGHT * num_tokens

    def charge_output(self, namespace: str, num_tokens: int) -> None:
        self._counters[namespace] = self[namespace] + OUTPUT_WEIGHT * num_tokens

    def charge_start(self, request: LiveRequest) -> None:
        """Charge for the uncached prompt tokens, when a request starts for the first time."""
        self.charge_input(request.namespace, request.num_prompt_tokens - (request.num_cached_tokens or 0))

    def charge_step(self, step: Step) -> None:
        """Charge for every token that a step sampled."""
        for branch, num_draws in step.drawn:
            self.charge_output(branch.request.namespace, num_draws)
        if step.decode_branches is not self._decode_branches:  # usually the same list as in the previous step
            self._decode_branches = step.decode_branches
            self._num_decode_branches = Counter(branch.request.namespace for branch in self._decode_branches)
        for namespace, count in self._num_decode_branches.items():  # `charge_output`, without a call in every step
            self._counters[namespace] = self[namespace] + OUTPUT_WEIGHT * count
