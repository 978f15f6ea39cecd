"""`chatcache bench kv`: the cost of pages and scheduling, without a model, next to goals.

All figures are CPU time of one thread, so the time of other programs is not counted, although they use the same caches.
A scheduler step is plan() + commit() over branches that each decode one token. First every branch is at a different
position of its page, so that one in `page_size` needs a new page in each step; then all branches are at the same
position and need a new page in the same step, which is the worst case. `decode_bench` measures whole engine steps.
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

from chatcache.bench.decode_bench import measure_decoding
from chatcache.bench.report import Figure, compare, figure_table
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import CacheScope
from chatcache.kv_cache.page_table import PageTable
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.actions import Advance, Candidates, DrawSpec, DroppedCandidate, Extend

HASH_GOAL_NS = 450.0
ALLOCATE_FREE_GOAL_NS = 120.0
FORK_GOAL_US = 5.0
STEP_GOALS_MS = {256: 0.10, 4096: 0.60}
NUM_FORKS = 8
TOKEN = 7
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class KVLoad:
    """Sizes of the benchmark.

    A step's figures are means over `num_rounds` times `page_size` steps.
    """

    page_size: int = 16
    num_pages: int = 4096
    fork_tokens: tuple[int, ...] = (1024, 32768)
    branches: tuple[int, ...] = (256, 4096)
    decoding_branches: tuple[int, ...] = (1, 64, 256)
    num_rounds: int = 4
    repeats: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReport:
    """One run of `bench kv`. The figures are medians of `repeats`."""

    bench: str
    page_size: int
    repeats: int
    figures: tuple[Figure, ...]

    def text(self) -> str:
        """Return a row for each figure."""
        heading = f"{self.bench}  pages of {self.page_size}; CPU time, medians of {self.repeats}"
        return f"{heading}\n{figure_table(self.figures)}"


def run_kv_bench(load: KVLoad, on_progress: Callable[[str], None] = lambda _: None) -> KVReport:
    """Measure hashing, allocation, forks, scheduler steps and the host time of each decoding mode."""
    on_progress("pages")
    figures = [
        _measure_hash(load),
        _measure_allocation(load),
        *(_measure_fork(load, num_tokens) for num_tokens in load.fork_tokens),
    ]
    for num_branches in load.branches:
        on_progress(f"{num_branches} branches")
        figures += _measure_steps(load, num_branches)
    for num_branches in load.decoding_branches:
        on_progress(f"{num_branches} branches of each decoding mode")
        figures += measure_decoding(num_branches, load.num_rounds * load.page_size, load.repeats)
    return KVReport(bench="kv", page_size=load.page_size, repeats=load.repeats, figures=tuple(figures))


def _compare_to_goal(name: str, value: float, unit: str, goal: float) -> Figure:
    return compare(name, value, unit, goal, "goal", "<= 1.00")


def _measure_hash(load: KVLoad) -> Figure:
    kv, numbers = KVCache(2, load.page_size), count()

    def prompt() -> bytes:
        return np.random.default_rng(next(numbers)).integers(0, 2**17, load.num_pages * load.page_size, "<i4").tobytes()

    value = _median_ns(10 * load.repeats, prompt, kv.hash_pages) / load.num_pages
    return _compare_to_goal("page hash", value, "ns", HASH_GOAL_NS)


def _measure_allocation(load: KVLoad) -> Figure:
    pool = KVCache(load.num_pages + 1, load.page_size).pool

    def allocate_and_free(_: object) -> None:
        pool.release(pool.allocate(load.num_pages) or ())

    value = _median_ns(10 * load.repeats, lambda: None, allocate_and_free) / load.num_pages
    return _compare_to_goal("allocate + free, per page", value, "ns", ALLOCATE_FREE_GOAL_NS)


def _measure_fork(load: KVLoad, num_tokens: int) -> Figure:
    """Time 8 forks of a branch that ends inside a page; closing the children is not timed."""
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
    return _compare_to_goal(f"fork n={NUM_FORKS} at {num_tokens:,} tokens", value, "us", FORK_GOAL_US)


def _filled_table(kv: KVCache, num_tokens: int) -> PageTable:
    tokens = np.arange(num_tokens, dtype="<i4").tobytes()
    table = kv.open(kv.match(kv.hash_pages(tokens, CacheScope())))
    if kv.reserve([(table, num_tokens)]) is None:
        raise ValueError(f"{num_tokens} tokens do not fit {kv.pool.num_usable} pages")
    kv.commit(table, tokens)
    return table


def _median_ns(repeats: int, prepare: Callable[[], _T], work: Callable[[_T], object]) -> float:
    times: list[int] = []
    for _ in range(repeats):
        argument = prepare()
        start = time.thread_time_ns()
        work(argument)
        times.append(time.thread_time_ns() - start)
    return statistics.median(times)


# -- scheduler steps ----------------------------------------------------------------------------------------------


class _DecodeStrategy:
    """A decoding strategy that extends its branch by the same token in every step."""

    max_branches = 1
    lockstep = False
    has_fixed_draws = True
    _spec = (DrawSpec(),)

    def draws(self, branch: int) -> tuple[DrawSpec, ...]:
        return self._spec

    def drop(self, index: int) -> DroppedCandidate | None:
        return None

    def advance(self, drawn: Mapping[int, tuple[Candidates, ...]]) -> Advance:
        return Advance((Extend(0, TOKEN),), ())


@dataclass(frozen=True, slots=True)
class _StepTimes:
    """Mean times over the scheduler steps of one repetition, and the longest step."""

    plan_ms: float
    commit_ms: float
    apply_ms: float
    longest_ms: float

    @property
    def step_ms(self) -> float:
        return self.plan_ms + self.commit_ms


def _measure_steps(load: KVLoad, num_branches: int) -> list[Figure]:
    goal = STEP_GOALS_MS.get(num_branches)
    figures: list[Figure] = []
    for suffix, num_lengths in (("", load.page_size), (", pages in step", 1)):
        runs = _run_steps(load, num_branches, num_lengths)
        title = f"{num_branches:,} branches{suffix}"
        name, step_ms = f"{title}: step", statistics.median(run.step_ms for run in runs)
        parts = {
            "longest step": statistics.median(run.longest_ms for run in runs),
            "plan": statistics.median(run.plan_ms for run in runs),
            "commit": statistics.median(run.commit_ms for run in runs),
            "apply": statistics.median(run.apply_ms for run in runs),
        }
        figures.append(Figure(name, step_ms, "ms") if goal is None else _compare_to_goal(name, step_ms, "ms", goal))
        figures += [Figure(f"{title}: {part}", value, "ms") for part, value in parts.items()]
    return figures


def _run_steps(load: KVLoad, num_branches: int, num_lengths: int) -> list[_StepTimes]:
    """Time scheduler steps over branches with `num_lengths` different lengths, per repetition."""
    num_steps = load.num_rounds * load.page_size
    num_tokens = 3 * load.page_size + (load.repeats + 1) * num_steps
    kv = KVCache(num_branches * (num_tokens // load.page_size + 1) + 1, load.page_size)
    scheduler = Scheduler(kv, num_slots=num_branches, max_num_batched_tokens=2 * num_branches * load.page_size)
    random = np.random.default_rng(0)
    for number in range(num_branches):
        prompt = random.integers(0, 2**17, load.page_size + 1 + number % num_lengths).tolist()
        scheduler.add(LiveRequest(f"r{number}", prompt, "", _DecodeStrategy(), number))
    _run_round(scheduler, load.page_size)
    return [_run_round(scheduler, num_steps) for _ in range(load.repeats)]


def _run_round(scheduler: Scheduler, num_steps: int) -> _StepTimes:
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
        longest_ms=max(map(add, plans, commits)) / 1e6,
    )
