"""Fairness between namespaces: a virtual token counter each, and whoever was served least goes next.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024 (the VTC scheduler). A counter grows by
INPUT_WEIGHT for every prompt token that a started request has to compute (cached ones cost nothing, so nobody pays for
them) and by OUTPUT_WEIGHT for every token drawn. A namespace that comes back after a pause is lifted to the least
counter of those that wait: idling saves up no credit. Nobody is held back while there is room (work-conserving).

Bound, for any two namespaces over any stretch in which both always have requests waiting: the weighted tokens they were
served differ by at most 2 * max(INPUT_WEIGHT * longest prompt, OUTPUT_WEIGHT * M), M being how many tokens the requests
of one namespace that run at once can come to hold.
"""

from __future__ import annotations

from collections.abc import Collection

FCFS = "fcfs"
PRIORITY = "priority"
FAIR = "fair"
SCHEDULING_POLICIES = (FCFS, PRIORITY, FAIR)

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
MAX_REMEMBERED = 4096


class VirtualTokenCounter:
    """One counter per namespace. `waiting` below: the namespaces with a request in the queue."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._last_left = ""
        self._max_counters = MAX_REMEMBERED

    def __getitem__(self, namespace: str) -> int:
        return self._counters.get(namespace, 0)

    def on_namespace_queued(self, namespace: str, waiting: Collection[str]) -> None:
        """Lift the counter of a namespace none of whose requests waited until now."""
        floor = self._floor(waiting)
        if len(self._counters) >= self._max_counters:
            self._forget_below(floor, {*waiting, self._last_left})
        self._counters[namespace] = max(self[namespace], floor)

    def on_namespace_drained(self, namespace: str) -> None:
        """Note that the last waiting request of a namespace has left the queue."""
        self._last_left = namespace

    def _forget_below(self, floor: int, kept: Collection[str]) -> None:
        """Forget who is absent and would be lifted to `floor` anyway."""
        self._counters = {name: count for name, count in self._counters.items() if count > floor or name in kept}
        self._max_counters = max(MAX_REMEMBERED, 2 * len(self._counters))

    def _floor(self, waiting: Collection[str]) -> int:
        return min(map(self.__getitem__, waiting)) if waiting else self[self._last_left]

    def charge_input(self, namespace: str, num_tokens: int) -> None:
        self._counters[namespace] = self[namespace] + INPUT_WEIGHT * num_tokens

    def charge_output(self, namespace: str, num_tokens: int) -> None:
        self._counters[namespace] = self[namespace] + OUTPUT_WEIGHT * num_tokens
