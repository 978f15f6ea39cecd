"""Drive a scheduler without an engine: the tests decide on the actions for each sampled branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chatcache.engine.invariants import check_page_tokens
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.stats import check_invariants
from chatcache.scheduler.batch import Step
from chatcache.scheduler.request import Branch, LiveRequest
from chatcache.scheduler.scheduler import Reservation, Scheduler
from chatcache.types.actions import Advance, Candidates, DrawSpec, DroppedCandidate, Extend

P = 4


class FakeStrategy:
    """A strategy that draws every branch once; the tests decide on the actions."""

    def __init__(self, max_branches: int = 1, lockstep: bool = False) -> None:
        self.max_branches = max_branches
        self.lockstep = lockstep
        self.has_fixed_draws = True

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        return (DrawSpec(),)

    def drop(self, index: int) -> DroppedCandidate | None:
        return None

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        raise NotImplementedError


class SchedulerDriver:
    """A scheduler over a small cache, and helpers to run steps."""

    def __init__(
        self,
        num_pages: int = 64,
        num_slots: int = 8,
        budget: int = 64,
        caching: bool = True,
        reservation: Reservation | None = None,
    ) -> None:
        self.kv = KVCache(num_pages, P, "digest", caching)
        self.scheduler = Scheduler(self.kv, num_slots=num_slots, max_num_batched_tokens=budget, reservation=reservation)
        self.arrivals = 0

    def add(self, prompt: Sequence[int], max_branches: int = 1, lockstep: bool = False) -> LiveRequest:
        request = LiveRequest(f"r{self.arrivals}", prompt, "", FakeStrategy(max_branches, lockstep), self.arrivals)
        self.arrivals += 1
        self.scheduler.add(request)
        return request

    def step(self, *, audit: bool = True) -> Step:
        """Plan and commit a step. An audit checks all invariants, and commits pending tokens to the page tables."""
        step = self.scheduler.plan()
        assert step is not None
        self.scheduler.commit(step)
        if audit:
            self.check()
        return step

    def check(self) -> None:
        check_invariants(self.kv, self.scheduler.tables())
        check_page_tokens(self.kv, self.scheduler.running)

    def decode(self, token: int = 5, *, audit: bool = True) -> Step:
        """Run a step and extend every sampled branch by `token`."""
        step = self.step(audit=audit)
        for request in dict.fromkeys(branch.request for branch in drawn(step)):
            branches = [branch.id for branch in drawn(step) if branch.request is request]
            self.scheduler.apply(request, [Extend(branch, token) for branch in branches])
        return step


def drawn(step: Step) -> list[Branch]:
    """Return the branches that the step samples."""
    return [*(row.branch for row in step.drawn), *step.decode_branches]


def rows(step: Step) -> list[tuple[str, int, int, int]]:
    """Return (request, branch, start, number of tokens) of each row, the oldest request first."""
    starts, counts = step.plan.rows.start.tolist(), step.plan.rows.num_tokens.tolist()
    branches = zip(step.branches(), starts, counts, strict=True)
    in_order = sorted(branches, key=lambda row: (row[0].request.arrival, row[0].id))
    return [(branch.request.request_id, branch.id, start, count) for branch, start, count in in_order]
