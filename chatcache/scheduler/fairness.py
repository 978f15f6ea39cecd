"""Fair scheduling between namespaces: which requests start (VTC), and which branches decode in a step (DecodeShares).

Virtual token counters: each namespace has a counter of the service it received, and the waiting namespace with the
smallest counter goes next. A counter grows by INPUT_WEIGHT for every prompt token that a started request has to compute
(cached tokens are free) and by OUTPUT_WEIGHT for every sampled token. When a namespace without waiting requests queues
one again, its counter is raised to the smallest counter of the waiting namespaces: idling accumulates no credit. The
policy is work-conserving: no request is held back while resources are free.

Bound: over any period in which two namespaces always have requests waiting, their weighted served tokens differ by at
most 2 * max(INPUT_WEIGHT * longest prompt, OUTPUT_WEIGHT * M), where M is the number of tokens that the requests of one
namespace running at once can hold.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.

Decode shares: every branch lengthens a step, so a namespace with hundreds of branches would delay the tokens of all
others. Therefore each further namespace may lengthen a step by half of the time that the branches of the smallest one
would take alone, by the measured speed, and in any case by as many branches as that one has. The number of branches
that this allows is shared with max-min fairness, and the branches of a namespace that has more take turns (deficit
round robin: Shreedhar, Varghese, "Efficient Fair Queuing using Deficit Round Robin", SIGCOMM 1995). Where one more
branch costs next to nothing, as on most GPUs, and among namespaces of similar size, all branches decode in every step.
A client that sends one request after the other has no branch for a moment between two of them, in which a step with all
branches of the others would delay its next request. A namespace therefore keeps its share for the next ABSENT_STEPS.
One that was away for longer has the share of one branch in the step in which its request starts, so that a prompt of
one step waits for at most one step with all branches of the others.

The shares are those of branches in the decode batch. Branches outside it decode in every step: beams of recurrent
models, `distinct`, and all of them while more branches have pages than a step may have tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import NamedTuple

from chatcache.scheduler.batch import Step
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.scheduler.speed import DecodeSpeed
from chatcache.scheduler.token_budget import split_equally

FCFS = "fcfs"
PRIORITY = "priority"
FAIR = "fair"
SCHEDULING_POLICIES = (FCFS, PRIORITY, FAIR)

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
MAX_REMEMBERED = 4096

MAX_DELAY = 0.5
"""By how much a further namespace may lengthen a step, as a part of its time with the smallest namespace alone."""

MIN_DECODE_BRANCHES = 2
"""For each further namespace, so many branches decode in a step whatever the measured speed: a step has other costs."""

ABSENT_STEPS = 64
"""For so many steps after its last branch has ended, the share of a namespace is not given to the others."""


class Turn(NamedTuple):
    """Where a namespace is whose branches take turns.

    `last`: order of the last branch that decoded. `num_ahead`: how many branches decoded beyond the share so far.
    """

    last: tuple[int, int] = (-1, -1)
    num_ahead: int = 0


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
            self._counters[namespace] = self._counters.get(namespace, 0) + OUTPUT_WEIGHT * count


class DecodeShares:
    """Chooses the branches that decode in each step."""

    def __init__(self, speed: DecodeSpeed, min_branches: int = MIN_DECODE_BRANCHES) -> None:
        self._speed = speed
        self._min_branches = min_branches
        self._branches: list[Branch] = []
        self._indices: dict[str, list[int]] = {}  # into `_branches`, of each namespace
        self._turns: dict[str, Turn] = {}  # of the namespaces whose branches rested in the last step
        self._num_steps = 0
        self._absent: dict[str, tuple[int, int]] = {}  # (branches, last step in which it counts) of each that has left

    def choose(self, branches: list[Branch]) -> list[int] | None:
        """Return which of the branches, given in service order, decode in the next step; None for all of them.

        All branches of a lockstep request decode in the same steps.
        """
        self._num_steps += 1
        if branches is not self._branches:  # usually the same list as before the previous step
            self._update(branches)
        if len(self._indices) == 1 and not self._absent:
            self._turns.clear()
            return None
        counts = list(map(len, self._indices.values()))
        max_branches = self._max_branches(counts)
        if self._absent:
            self._absent = {name: each for name, each in self._absent.items() if each[1] >= self._num_steps}
            fewest = min((count for count, _ in self._absent.values()), default=0)
            if 0 < fewest < min(counts, default=0):
                max_branches = min(max_branches, self._max_branches([*counts, fewest]) - fewest)
        if sum(counts) <= max_branches:
            self._turns.clear()
            return None
        chosen: list[int] = []
        shares = split_equally(counts, max_branches)
        while not chosen:  # again while all have decoded beyond their shares: no step is without branches
            before, self._turns = self._turns, {}
            for (namespace, indices), share in zip(self._indices.items(), shares, strict=True):
                if share == len(indices):
                    chosen += indices
                else:
                    taken, self._turns[namespace] = self._take_turns(indices, share, before.get(namespace, Turn()))
                    chosen += taken
        return sorted(chosen)

    def record_start(self, namespace: str) -> None:
        """Record that a request starts in the next step, in which it has no branch that decodes."""
        if namespace not in self._indices:
            count, last_step = self._absent.get(namespace, (1, 0))
            self._absent[namespace] = count, max(last_step, self._num_steps + 1)

    def _update(self, branches: list[Branch]) -> None:
        """Replace the branches, and record the namespaces that have come or left."""
        before, self._branches, self._indices = self._indices, branches, {}
        for index, branch in enumerate(branches):
            self._indices.setdefault(branch.request.namespace, []).append(index)
        for namespace in self._indices:
            self._absent.pop(namespace, None)
        for namespace, indices in before.items():
            if namespace not in self._indices:
                self._absent[namespace] = len(indices), self._num_steps + ABSENT_STEPS - 1

    def _max_branches(self, counts: Sequence[int]) -> int:
        """Return how many branches may decode in a step, of namespaces with so many branches each."""
        fit = self._speed.linear_fit()
        if len(counts) < 2 or fit is None or not fit[1]:
            return sum(counts)
        fixed_s, branch_s = fit
        fewest = min(counts)
        num_others = max(int(MAX_DELAY * (fixed_s / branch_s + fewest)), fewest, self._min_branches)
        return fewest + (len(counts) - 1) * num_others

    def _take_turns(self, indices: Sequence[int], share: int, turn: Turn) -> tuple[list[int], Turn]:
        """Choose about `share` of the branches, beginning after those of the last step; also return the next turn.

        Besides those that belong to branches outside the decode batch, which decode in every step and do not count.
        """
        last, num_ahead = turn
        groups = [list(group) for _, group in groupby(indices, key=self._order)]
        first = bisect_right(groups, last, key=lambda group: self._order(group[0]))
        chosen: list[int] = []
        for group in (*groups[first:], *groups[:first]):
            request = self._branches[group[0]].request
            if request.lockstep and request.num_unbatched:
                chosen += group
            elif num_ahead < share:
                chosen += group
                num_ahead += len(group)
                last = self._order(group[0])
        return chosen, Turn(last, max(num_ahead - share, 0))

    def _order(self, index: int) -> tuple[int, int]:
        """Return the place of a branch in the order of turns, which all branches of a lockstep request share."""
        branch = self._branches[index]
        return branch.request.service_order, 0 if branch.request.lockstep else branch.ordinal
