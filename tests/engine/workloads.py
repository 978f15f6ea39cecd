"""Workloads for the engine, and the harness that runs them and compares with the oracle."""

from __future__ import annotations

from dataclasses import dataclass

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine.fake import POISON, FakeRunner, fake_capacity
from chatcache.errors import ContextTooLong
from chatcache.kv.pool import PagePool
from chatcache.sched.plan import StepPlan, StepResult
from chatcache.types import (
    CandidateDone,
    EngineEvent,
    Failed,
    Finished,
    GenerateRequest,
    Started,
    Tokens,
)
from tests.engine.oracle import FACTS, VOCAB, Answer, alone, strategy_for

AUDIT_EVERY = 5  # not every step: an audit makes the scheduler tell the tables what it has put off


@dataclass(frozen=True)
class Arrival:
    request: GenerateRequest
    step: int
    cancelled_at: int | None


class Crashing(FakeRunner):
    """Raises in some steps, having spoilt everything that the plan would have written: in `crashes`, and in
    `swap_crashes`, which counts only those that move pages to or from the host."""

    crashes: frozenset[int] = frozenset()
    swap_crashes: frozenset[int] = frozenset()
    num_swaps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        moves = bool(len(plan.swaps_out) or len(plan.swaps_in))
        self.num_swaps += moves
        if plan.step not in self.crashes and not (moves and self.num_swaps in self.swap_crashes):
            return super().execute(plan)
        self.host_cells[plan.swaps_out[:, 1]] = POISON
        for pages in (plan.swaps_in[:, 1], plan.copies[:, 1]):
            self.cells[pages] = POISON
        raise RuntimeError("crashed as planned")


@dataclass(frozen=True)
class Workload:
    """Requests and the engine they come to. Its runner crashes in some steps: see `Crashing`.

    `ahead`: "" for a runner that waits for each step; "eager" or "lazy" for one that runs ahead, see `FakeDevice`.
    """

    arrivals: tuple[Arrival, ...]
    num_pages: int
    page_size: int
    num_slots: int
    budget: int
    caching: bool
    num_host_pages: int = 0
    preemption: str = "auto"
    policy: str = "fcfs"
    crashes: frozenset[int] = frozenset()
    swap_crashes: frozenset[int] = frozenset()
    ahead: str = ""

    def engine(self) -> tuple[Engine, FakeRunner]:
        capacity = fake_capacity(
            self.num_pages, self.page_size, self.num_slots, 256, self.num_host_pages, runs_ahead=bool(self.ahead)
        )
        runner = Crashing(capacity, VOCAB, lazy=self.ahead == "lazy")
        runner.crashes, runner.swap_crashes = self.crashes, self.swap_crashes
        config = EngineConfig(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.num_slots,
            enable_prefix_caching=self.caching,
            preemption=self.preemption,
            scheduling_policy=self.policy,
            strict=True,
        )
        return Engine(runner, FACTS, config, make_strategy=strategy_for), runner


def poison_free_pages(engine: Engine, runner: FakeRunner) -> None:
    """Spoil every page that nobody holds and nobody may match: nothing in it may ever be read again."""
    kv = engine.scheduler.kv
    runner.cells[_free(kv.pool)] = POISON
    if kv.host is not None:
        runner.host_cells[[page - 1 for page in _free(kv.host.pool)]] = POISON


def _free(pool: PagePool) -> list[int]:
    return [page for page in range(1, pool.num_pages) if not pool.refs[page] and not pool.is_published(page)]


def step_and_watch(engine: Engine) -> list[EngineEvent]:
    """Run a step; the first in turn must not be preempted in it, and nobody more than five times."""
    first = next(iter(engine.scheduler.running), None)
    before = first.num_preemptions if first else 0
    events = engine.step()
    if first is not None and first.num_preemptions > before:
        assert engine.scheduler.running[0].turn < first.turn, "the first in turn was preempted"
    assert all(request.num_preemptions <= 5 for request in engine.scheduler.requests())
    return events


def run(workload: Workload, *, audit: bool = True, max_steps: int = 1000) -> dict[str, Answer]:
    """Run the workload; check events, pages and progress on the way. Returns the answers of accepted requests.

    Without `audit` nobody looks at reference counts between steps: then wrong pages must show in the answers.
    """
    engine, runner = workload.engine()
    answers: dict[str, Answer] = {}
    events: dict[str, list[EngineEvent]] = {}
    todo = sorted(workload.arrivals, key=lambda arrival: arrival.step)
    aborts = sorted((a.cancelled_at, a.request.request_id) for a in todo if a.cancelled_at is not None)
    step = 0
    while todo or engine.has_work():
        while todo and todo[0].step <= step:
            request = todo.pop(0).request
            try:
                engine.add(request)
            except ContextTooLong:
                continue
            answers[request.request_id], events[request.request_id] = Answer(), []
        while aborts and aborts[0][0] <= step:
            engine.abort(aborts.pop(0)[1])
        for event in step_and_watch(engine):
            events[event.request_id].append(event)
            if isinstance(event, Tokens | CandidateDone):
                answers[event.request_id].take(event)
            elif isinstance(event, Started):
                answers[event.request_id].prompt = event.prompt_logprobs
        if audit and step % AUDIT_EVERY == 0:
            engine.check()
        poison_free_pages(engine, runner)
        step += 1
        assert step < max_steps, "the engine stalls"
    health = engine.health()
    assert not runner.device.num_refused, "the runner was asked for what no device can do"
    assert (health.num_pages_in_use, health.num_host_pages_in_use) == (0, 0)
    assert health.num_self_checks > 0 or not health.num_steps
    for request_id, seen in events.items():
        check_events(request_id, seen, may_fail=bool(workload.crashes or workload.swap_crashes))
        if isinstance(seen[-1], Failed):
            answers[request_id].failed = True
    return answers


def check_events(request_id: str, events: list[EngineEvent], *, may_fail: bool = False) -> None:
    """Numbered without a gap, `Started` before any token, exactly one terminal event, at the end."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert isinstance(events[-1], Finished | Failed if may_fail else Finished), (request_id, events[-1])
    assert not any(isinstance(event, Finished | Failed) for event in events[:-1])
    if len(events) > 1:
        assert isinstance(events[0], Started)
        assert not any(isinstance(event, Started) for event in events[1:])


def assert_equals_alone(workload: Workload, *, audit: bool = True) -> None:
    """Run the workload and compare every answer with the request's own, computed alone from plain lists."""
    answers = run(workload, audit=audit)
    for arrival in workload.arrivals:
        request = arrival.request
        if request.request_id not in answers:
            continue
        expected, got = alone(request), answers[request.request_id]
        if arrival.cancelled_at is None and not got.failed:
            assert got == expected
        else:
            assert expected.begins_with(got)
