"""Workloads for the engine, and the harness that runs them and compares with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import numpy as np

from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.engine.protocols import ModelRunner
from chatcache.errors import ContextLengthError, UnsupportedParameterError
from chatcache.kv_cache.page_hash import namespace_hash
from chatcache.kv_cache.pool import PagePool
from chatcache.scheduler.fairness import DecodeShares
from chatcache.scheduler.speed import DecodeSpeed
from chatcache.types.events import FINISH_CANCELLED, CandidateDone, EngineEvent, Failed, Finished, Started, Tokens
from chatcache.types.plan import StepPlan, StepResult
from chatcache.types.request import GenerateRequest
from chatcache.types.stats import ModelInfo
from tests.engine.oracle import MODEL_INFO, VOCAB, WANDER, Answer, expected_answer, strategy_for
from tests.support.fake_runner import POISON, FakeRunner, fake_capacity, state_of

AUDIT_EVERY = 5  # not every step: an audit makes the scheduler tell the tables what it has put off


@dataclass(frozen=True)
class Arrival:
    """A request and its arrival step. `drops`: (step, index) of candidates to cancel."""

    request: GenerateRequest
    step: int
    cancelled_at: int | None
    drops: tuple[tuple[int, int], ...] = ()


class Crashing(FakeRunner):
    """Raises in the given steps, after corrupting everything that the plan would have written.

    `crashes` counts all steps, `swap_crashes` only those that copy pages to or from the host.
    """

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
        for states in (plan.state_copies[:, 1], plan.state_saves[:, 1], plan.state_swaps_in[:, 1], plan.rows.state):
            self.states[states] = POISON
        self.host_states[plan.state_swaps_out[:, 1]] = POISON
        raise RuntimeError("crashed as planned")


@dataclass(frozen=True)
class Workload:
    """Requests and the engine that runs them. Its runner crashes in some steps, see `Crashing`.

    `num_states`: 0 for a model without recurrent layers; `interval`: the tokens between two snapshots.
    `rests`: branches rest in many steps, as one more branch makes a step longer (with the policy "fair").
    `ahead`: "" for a runner that waits for each step; "eager" or "lazy" for asynchronous launch, see `FakeDevice`.
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
    num_states: int = 0
    num_host_states: int = 0
    interval: int = 1024
    rests: bool = False

    def engine(self) -> tuple[Engine, FakeRunner]:
        capacity = fake_capacity(
            *(self.num_pages, self.page_size, self.num_slots, 256, self.num_host_pages),
            has_async_launch=bool(self.ahead),
            num_states=self.num_states,
            num_host_states=self.num_host_states,
        )
        runner = Crashing(capacity, VOCAB, lazy=self.ahead == "lazy")
        runner.crashes, runner.swap_crashes = self.crashes, self.swap_crashes
        return self.engine_of(runner, MODEL_INFO), runner

    def engine_of(self, runner: ModelRunner, model_info: ModelInfo) -> Engine:
        """Return an engine for the workload over a runner with its capacity."""
        config = EngineConfig(
            max_num_batched_tokens=self.budget,
            max_num_seqs=self.num_slots,
            enable_prefix_caching=self.caching,
            preemption_mode=self.preemption,
            scheduling_policy=self.policy,
            strict=True,
        )
        engine = Engine(runner, model_info, config, make_strategy=strategy_for, clock=irregular_clock())
        if (states := engine.scheduler.kv.states) is not None:
            states.interval = self.interval
        if self.rests:
            speed = DecodeSpeed()
            speed.record(1, 1, 1.0)
            speed.record(4, 4, 4.0)
            engine.scheduler._decode_batch._choose_branches = DecodeShares(speed, min_branches=1).choose
        return engine


def irregular_clock() -> Callable[[], float]:
    """Return a clock whose steps differ in length, in the same way in each run: the measured speed changes plans."""
    rng = Random(0)
    return accumulate(iter(rng.random, None)).__next__


def poison_free_pages(engine: Engine, runner: FakeRunner) -> None:
    """Corrupt every page and state that is neither held nor cached: it must not be read again."""
    kv = engine.scheduler.kv
    runner.cells[_free(kv.pool)] = POISON
    if kv.host is not None:
        runner.host_cells[[page - 1 for page in _free(kv.host.pool)]] = POISON
    if kv.states is not None:
        runner.states[kv.states.blank_states()] = POISON
        runner.host_states[[h for h, refs in enumerate(kv.states.host.refs) if not refs]] = POISON


def _free(pool: PagePool) -> list[int]:
    return [page for page in range(1, pool.num_pages) if not pool.refs[page] and not pool.is_published(page)]


def step_and_watch(engine: Engine) -> list[EngineEvent]:
    """Run a step; the oldest request must not be preempted, and no request more than five times."""
    first = next(iter(engine.scheduler.running), None)
    before = first.num_preemptions if first else 0
    events = engine.step()
    if first is not None and first.num_preemptions > before:
        assert engine.scheduler.running[0].service_order < first.service_order, "the first in turn was preempted"
    most = max((request.num_preemptions for request in engine.scheduler.requests()), default=0)
    assert most <= 5, f"a request was preempted {most} times"
    return events


def run(workload: Workload, *, audit: bool = True, max_steps: int = 1000) -> dict[str, Answer]:
    """Run the workload, check it on the way, and return the answers of accepted requests.

    Checks events, pages and progress. Without `audit`, reference counts are not checked between steps: then wrong pages
    must change the answers.
    """
    engine, runner = workload.engine()
    answers = play(workload, engine, lambda: poison_free_pages(engine, runner), audit=audit, max_steps=max_steps)
    assert not runner.device.num_refused, "the runner was asked for what no device can do"
    check_snapshots(engine, runner, {arrival.request.namespace for arrival in workload.arrivals})
    return answers


def play(
    workload: Workload, engine: Engine, after_step: Callable[[], None], *, audit: bool = True, max_steps: int = 1000
) -> dict[str, Answer]:
    """Run the workload in an engine, call `after_step` after each step, and check that all is released at the end."""
    answers: dict[str, Answer] = {}
    events: dict[str, list[EngineEvent]] = {}
    todo = sorted(workload.arrivals, key=lambda arrival: arrival.step)
    aborts = sorted((a.cancelled_at, a.request.request_id) for a in todo if a.cancelled_at is not None)
    drops = sorted((at, a.request.request_id, index) for a in todo for at, index in a.drops)
    max_steps *= 5 if workload.rests else 1
    step = 0
    while todo or engine.has_work():
        while todo and todo[0].step <= step:
            request = todo.pop(0).request
            try:
                engine.add(request)
            except ContextLengthError:
                continue
            answers[request.request_id], events[request.request_id] = Answer(), []
        while aborts and aborts[0][0] <= step:
            engine.abort(aborts.pop(0)[1])
        while drops and drops[0][0] <= step:
            drop_one(engine, *drops.pop(0)[1:])
        for event in step_and_watch(engine):
            events[event.request_id].append(event)
            if isinstance(event, Tokens | CandidateDone):
                answers[event.request_id].take(event)
            elif isinstance(event, Started):
                answers[event.request_id].prompt = event.prompt_logprobs
        if audit and step % AUDIT_EVERY == 0:
            engine.cache.check()
        after_step()
        step += 1
        assert step < max_steps, "the engine stalls"
    health = engine.health()
    assert (health.num_pages_in_use, health.num_host_pages_in_use) == (0, 0)
    if (states := engine.scheduler.kv.states) is not None:
        assert (states.num_in_use, states.host.num_in_use) == (0, 0)
    engine.cache.check()
    assert health.num_self_checks > 0 or not health.num_steps
    for request_id, seen in events.items():
        check_events(request_id, seen, may_fail=bool(workload.crashes or workload.swap_crashes))
        answers[request_id].failed = isinstance(seen[-1], Failed)
        answers[request_id].cancelled = isinstance(seen[-1], Finished) and seen[-1].cancelled
    return answers


def check_snapshots(engine: Engine, runner: FakeRunner, namespaces: Iterable[str]) -> None:
    """Check that each snapshot that can be matched stands for the tokens of its name."""
    kv = engine.scheduler.kv
    if kv.states is None:
        return
    roots = {kv._root, *(namespace_hash(kv._root, namespace) for namespace in namespaces)}
    contents = [content for page in range(kv.pool.num_pages) if (content := kv.pool.content(page)) is not None]
    pages = {content.key: content for content in contents}
    pages |= {namespace_hash(content.key, namespace): content for content in contents for namespace in namespaces}
    for name, state in kv.states.snapshots():
        key, data = name
        while key in pages:
            key, data = pages[key].parent, pages[key].tokens + data
        if key in roots:  # otherwise a page before it was evicted, and it cannot be matched
            tokens = np.frombuffer(data, "<i4").tolist()
            assert runner.states[state] == state_of(tokens), f"state {state} is not that of its {len(tokens)} tokens"


def check_events(request_id: str, events: list[EngineEvent], *, may_fail: bool = False) -> None:
    """Check that events are contiguous, begin with `Started` and end with one terminal event."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert isinstance(events[-1], Finished | Failed if may_fail else Finished), (request_id, events[-1])
    assert not any(isinstance(event, Finished | Failed) for event in events[:-1])
    own = [event for event in events if not is_drop(event)]  # a candidate may be dropped before anything is computed
    if len(own) > 1:
        assert isinstance(own[0], Started)
        assert not any(isinstance(event, Started) for event in own[1:])
    ended = [event.index for event in events if isinstance(event, CandidateDone)]
    assert len(set(ended)) == len(ended), "a candidate ended twice"
    for number, event in enumerate(events):
        later = [each.index for each in events[number:] if isinstance(each, Tokens)]
        assert not isinstance(event, CandidateDone) or event.index not in later, (
            "an event follows the end of its candidate"
        )


def is_drop(event: EngineEvent) -> bool:
    return isinstance(event, CandidateDone) and event.finish_reason == FINISH_CANCELLED


def drop_one(engine: Engine, request_id: str, index: int) -> None:
    """Cancel a candidate: pages that only it holds are free at once, and its branch is removed."""
    pool, requests = engine.scheduler.kv.pool, {each.request_id: each for each in engine.scheduler.running}
    request = requests.get(request_id)
    branch = request.branches.get(index) if request is not None else None
    kept = [
        table for each in requests.values() for table in each.tables() if branch is None or table is not branch.table
    ]
    own = set(branch.table.pages()) if branch is not None and branch.table is not None else set()
    own -= {page for table in kept for page in table.pages()}
    num_in_use, num_ended = pool.num_in_use, len(engine._event_queue)
    try:
        engine.cancel_candidate(request_id, index)
    except UnsupportedParameterError:
        assert (pool.num_in_use, len(engine._event_queue)) == (num_in_use, num_ended)
        return
    news = engine._event_queue._events[num_ended:]
    if not news:
        assert pool.num_in_use == num_in_use
        return
    (done,) = news
    if isinstance(done, Finished):  # it was the last
        assert done.cancelled and request_id not in {each.request_id for each in engine.scheduler.requests()}
        assert pool.num_in_use == num_in_use - done.num_pages_freed
        return
    assert is_drop(done) and isinstance(done, CandidateDone) and done.index == index
    if request is not None and request.started:
        assert done.num_pages_freed == len(own) and index not in request.branches
    assert pool.num_in_use == num_in_use - done.num_pages_freed
    engine.cancel_candidate(request_id, index)
    assert len(engine._event_queue) == num_ended + 1, "dropped twice"


def assert_equals_alone(workload: Workload, *, audit: bool = True) -> None:
    """Run the workload and compare every answer with the one computed alone from plain lists."""
    answers = run(workload, audit=audit)
    assert_equal(workload, answers, lambda request: expected_answer(request, hybrid=bool(workload.num_states)))


def assert_equal(
    workload: Workload, answers: Mapping[str, Answer], answer_alone: Callable[[GenerateRequest], Answer]
) -> None:
    """Compare every answer of a workload with `answer_alone` of its request, as far as it was not cancelled."""
    for arrival in workload.arrivals:
        request = arrival.request
        if request.request_id not in answers:
            continue
        expected, got = answer_alone(request), answers[request.request_id]
        assert expected.begins_with(got)
        if got.cancelled or got.failed:
            assert arrival.cancelled_at is not None or arrival.drops or got.failed
            continue
        dropped = {index for index, (reason, *_) in got.done.items() if reason == FINISH_CANCELLED}
        assert dropped <= {index for _, index in arrival.drops}
        if (
            not request.namespace.startswith(WANDER) or not dropped
        ):  # there, what a dropped one would have forked is gone
            assert got.done.keys() == expected.done.keys()
        for index in got.done.keys() - dropped:
            assert got.of(index) == expected.of(index), f"candidate {index} of {request.request_id}"
        assert got.prompt == expected.prompt
