"""Planning behind a step whose results are still on the device: when, and why it comes to the same.

    launch n | note n as computed | plan n+1, its tokens NOT_YET | launch n+1 | collect n: tokens, ends, faults
             | note n+1, whose tokens are known now | plan n+2 | ...

Which cells step n writes is known when it is launched, only what it draws is not. So n+1 can be planned if nothing in
it depends on what n draws: every branch is steady and draws one token, and nothing but that would be planned: no start,
no fork, no copy or swap, no preemption. Otherwise the results are collected first, and all is as without this.

A branch that ends, or is let go of, while its next row is on the device: the row computes one cell more, for nobody.
Its pages may be freed, matched, swapped out and given to others at once, since every later step runs behind that row;
and the row writes behind the tokens that the page's name tells of. Its result is dropped (`Scheduler.current`). A
branch that goes on with another token than was drawn (`Scheduler.confirm`) loses its row, too, and computes that token.

Nor is n followed blindly if it copies pages to or from the host: whoever left with those copies has no row in n, and
if n fails, they are nothing to come back to.

A page that n fills gets its name when n+1 is planned. Until n is collected nobody is matched, so nobody builds on it;
if n fails, or its numbers are not finite, the request is forgotten and the name with it. Between two calls of the
engine one step may be on the device, not noted yet: what tables and audits say then has been computed and seen.

A branch at the end of its page is given another before it is known whether it needs one: only from free pages, and if
it does not, they are back within the same call. A receipt (`num_pages_freed`) counts such a page, for it was held.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatcache.sched.batch import Step
from chatcache.sched.queue import WaitingQueue
from chatcache.sched.request import LiveRequest
from chatcache.sched.slots import Slots
from chatcache.sched.steady import SteadyBranches


class Ahead:
    """Knows whether anything is to be decided before the next step."""

    def __init__(self, steady: SteadyBranches, waiting: WaitingQueue, slots: Slots) -> None:
        self._steady = steady
        self._waiting = waiting
        self._slots = slots

    def is_clear(self, step: Step, running: Sequence[LiveRequest], budget: int) -> bool:
        """Say whether the step behind this one, the last planned, is the same whatever this one draws. A query.

        `budget`: tokens of a step.
        """
        if step.granted or step.moves_pages or self._steady.unsettled or self._slots.has_forks:
            return False
        return self._steady.can_follow() and not self._may_start(running, budget)

    def _may_start(self, running: Sequence[LiveRequest], budget: int) -> bool:
        if not len(self._waiting):
            return False
        ways = [False] * (budget > self._steady.num_branches) + [True] * (self._waiting.num_forks > 0)
        free = self._slots.num_unpromised
        return any(self._waiting.next(running, free, forks=forks) is not None for forks in ways)
