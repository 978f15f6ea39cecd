"""`chatcache bench kv`: what pages and scheduling cost, without any model, each figure beside its goal.

All figures are CPU time of one thread, so a busy machine does not count its neighbours in; still, its caches are theirs
too. A scheduler step is plan() + commit() over branches that each decode one token: at first every branch stands
elsewhere in its page, so that one in `page_size` needs a new page in each step; then all of them stand at the same
place and need one in the same step, which is the worst there is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from operator import add
from typing import TypeVar

import numpy as np

from chatcache.bench.report import Figure, KVReport, compared
from chatcache.decode.actions import Advance, Candidates, DrawSpec, Dropped, Extend
from chatcache.kv.cache import KVCache
from chatcache.kv.chain import Scope
from chatcache.kv.table import PageTable
from chatcache.sched.request import LiveRequest
from chatcache.sched.scheduler import Scheduler

GOAL = "goal (less is better)"
HASH_GOAL_NS = 450.0
ALLOCATE_FREE_GOAL_NS = 120.0
FORK_GOAL_US = 5.0
STEP_GOALS_MS = {256: 0.10, 4096: 0.60}
NUM_FORKS = 8
TOKEN = 7
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class KVLoad:
    """How much to measure, `repeats` times over. A step's figures are means of `num_rounds` times `page_size` steps."""

    page_size: int = 16
    num_pages: int = 4096
    fork_tokens: tuple[int, ...] = (1024, 32768)
    branches: tuple[int, ...] = (256, 4096)
    num_rounds: int = 4
    repeats: int = 5


def run_kv_bench(load: KVLoad, say: Callable[[str], None]) -> KVReport:
    """Measure hashing, allocation, forks and scheduler steps."""
    say("pages")
    figures = [_hash(load), _allocate_free(load), *(_fork(load, num_tokens) for num_tokens in load.fork_tokens)]
    for num_branches in load.branches:
        say(f"{num_branches} branches")
        figures += _steps(load, num_branches)
    return KVReport(bench="kv", page_size=load.page_size, repeats=load.repeats, figures=tuple(figures))


def _hash(load: KVLoad) -> Figure:
    kv, numbers = KVCache(2, load.page_size), count()

    def prompt() -> bytes:
        return np.random.default_rng(next(numbers)).integers(0, 2**17, load.num_pages * load.page_size, "<i4").tobytes()

    value = _median_ns(10 * load.repeats, prompt, kv.chain) / load.num_pages
    return compared("page hash", value, "ns", HASH_GOAL_NS, GOAL)


def _allocate_free(load: KVLoad) -> Figure:
    pool = KVCache(load.num_pages + 1, load.page_size).pool

    def turn_over(_: object) -> None:
        pool.release(pool.allocate(load.num_pages) or ())

    value = _median_ns(10 * load.repeats, lambda: None, turn_over) / load.num_pages
    return compared("allocate + free, per page", value, "ns", ALLOCATE_FREE_GOAL_NS, GOAL)


def _fork(load: KVLoad, num_tokens: int) -> Figure:
    """Time 8 forks of a branch that ends in the middle of a page; the children are closed off the clock."""
    num_tokens += load.page_size // 2
    kv = KVCache(num_tokens // load.page_size + 2, load.page_size)
    table = _filled_table(kv, num_tokens)
    children: list[PageTable] = []

    def close() -> None:
        while children:
            kv.close(children.pop())

    def fork(_: object) -> None:
        for _ in range(NUM_FORKS):
            children.append(kv.fork(table))

    value = _median_ns(100 * load.repeats, close, fork) / 1e3
    return compared(f"fork n={NUM_FORKS} at {num_tokens:,} tokens", value, "us", FORK_GOAL_US, GOAL)


def _filled_table(kv: KVCache, num_tokens: int) -> PageTable:
    tokens = np.arange(num_tokens, dtype="<i4").tobytes()
    table = kv.open(kv.match(kv.chain(tokens, Scope())))
    if kv.reserve([(table, num_tokens)]) is None:
        raise ValueError(f"{num_tokens} tokens do not fit {kv.pool.num_usable} pages")
    kv.commit(table, tokens)
    return table


def _median_ns(repeats: int, prepare: Callable[[], _T], work: Callable[[_T], object]) -> float:
    times: list[int] = []
    for _ in range(repeats):
        given = prepare()
        start = time.thread_time_ns()
        work(given)
        times.append(time.thread_time_ns() - start)
    return statistics.median(times)


# -- scheduler steps ----------------------------------------------------------------------------------------------


class _Decode:
    """Draws one token per step, always in the same way."""

    max_branches = 1
    lockstep = False
    steady = True
    _spec = (DrawSpec(),)

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        return self._spec

    def drop(self, index: int) -> Dropped | None:
        return None

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        return Advance((Extend(0, TOKEN),), ())


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """Milliseconds: means over the steps of one repeat, and its longest step."""

    plan_ms: float
    commit_ms: float
    apply_ms: float
    worst_ms: float

    @property
    def step_ms(self) -> float:
        return self.plan_ms + self.commit_ms


def _steps(load: KVLoad, num_branches: int) -> list[Figure]:
    goal = STEP_GOALS_MS.get(num_branches)
    figures: list[Figure] = []
    for manner, spread in (("", load.page_size), (", pages in step", 1)):
        runs = _run_steps(load, num_branches, spread)
        title = f"{num_branches:,} branches{manner}"
        step = Figure(name=f"{title}: step", value=statistics.median(run.step_ms for run in runs), unit="ms")
        if goal is not None:
            step = compared(step.name, step.value, step.unit, goal, GOAL)
        parts = {
            "longest step": statistics.median(run.worst_ms for run in runs),
            "plan": statistics.median(run.plan_ms for run in runs),
            "commit": statistics.median(run.commit_ms for run in runs),
            "apply": statistics.median(run.apply_ms for run in runs),
        }
        figures.append(step)
        figures += [Figure(name=f"{title}: {part}", value=value, unit="ms") for part, value in parts.items()]
    return figures


def _run_steps(load: KVLoad, num_branches: int, spread: int) -> list[_StepTimes]:
    """Decode with prompts of `spread` different lengths."""
    num_steps = load.num_rounds * load.page_size
    num_tokens = 3 * load.page_size + (load.repeats + 1) * num_steps
    kv = KVCache(num_branches * (num_tokens // load.page_size + 1) + 1, load.page_size)
    scheduler = Scheduler(kv, num_slots=num_branches, max_num_batched_tokens=2 * num_branches * load.page_size)
    random = np.random.default_rng(0)
    for number in range(num_branches):
        prompt = random.integers(0, 2**17, load.page_size + 1 + number % spread).tolist()
        scheduler.add(LiveRequest(f"r{number}", prompt, "", _Decode(), number))
    _round(scheduler, load.page_size)
    return [_round(scheduler, num_steps) for _ in range(load.repeats)]


def _round(scheduler: Scheduler, num_steps: int) -> _StepTimes:
    clock, actions = time.thread_time_ns, (Extend(0, TOKEN),)
    plans: list[int] = []
    commits: list[int] = []
    applies: list[int] = []
    for _ in range(num_steps):
        start = clock()
        step = scheduler.plan()
        planned = clock()
        if step is None or len(step.plan.rows.slot) < len(scheduler.running):
            raise ValueError("not every branch decodes in every step")
        scheduler.commit(step)
        committed = clock()
        for request in scheduler.running:
            scheduler.apply(request, actions)
        applied = clock()
        plans.append(planned - start)
        commits.append(committed - planned)
        applies.append(applied - committed)
    return _StepTimes(
        plan_ms=sum(plans) / num_steps / 1e6,
        commit_ms=sum(commits) / num_steps / 1e6,
        apply_ms=sum(applies) / num_steps / 1e6,
        worst_ms=max(map(add, plans, commits)) / 1e6,
    )
