"""Paging or scheduling, lengths apart or together, page sizes and chunk budgets: simulated, and on this machine."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from loadtest.lengths import ALPACA, SHAREGPT
from loadtest.studies.cost import OPT_13B
from loadtest.studies.machine import KV_TOKENS, RealModel, RequestLoop, open_model, repeat
from loadtest.studies.published import NAMES, SYSTEMS
from loadtest.studies.rates import Load, find_rates, run_offline, run_sharegpt
from loadtest.studies.reservations import MAX_MODEL_LEN, ContiguousReservation, StaticBatch
from loadtest.studies.results import REAL, SIMULATED, Context, Panel, Row, Series, StudyResult
from loadtest.studies.simulate import Arrival, Outcome, System, VirtualClock, poisson_trace

STATIC, ITERATION = "static batches", "iteration level"
CASES = tuple((how, memory) for how in (STATIC, ITERATION) for memory in SYSTEMS)
GUESSES = (0.5, 0.5, 0.65, 1.0, 1.0, 1.3, 1.6, 2.3)  # requests/s from which the search starts, for each of CASES
QUICK_GUESSES = (1.0, 1.15, 1.15, 1.4, 1.95, 3.0, 3.8, 5.0)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A queue of requests with ShareGPT lengths / `divisor`, for a memory that holds as many longest ones as OPT's."""

    num_requests: int
    divisor: int

    @property
    def max_len(self) -> int:
        return MAX_MODEL_LEN // self.divisor

    @property
    def num_slots(self) -> int:
        return OPT_13B.num_slots // self.divisor // 16 * 16

    def requests(self, model: RealModel) -> list[Arrival]:
        """Return the requests, all at time 0."""
        rng, found = random.Random(0), list[Arrival]()
        while len(found) < self.num_requests:
            prompt, output = (max(1, length // self.divisor) for length in SHAREGPT.sample(rng))
            found.append(Arrival(0.0, model.prompt(rng, prompt), output))
        return found


FULL_QUEUE, QUICK_QUEUE = Scaled(30, 4), Scaled(12, 16)


def _run_reserved(model: RealModel, how: str, memory: str, queue: Scaled) -> Outcome:
    """Run a queue with static batches or iteration-level scheduling, in pages or contiguous reservations."""
    clock, output_tokens = VirtualClock(), dict[str, int]()
    reservation: ContiguousReservation | StaticBatch | None = None
    if memory != "pages":
        reservation = ContiguousReservation(queue.num_slots, memory, output_tokens, queue.max_len)
    num_slots = queue.num_slots if reservation is None else KV_TOKENS  # only a reservation limits contiguous memory
    if how == STATIC:
        reservation = StaticBatch(queue.num_requests, clock, reservation)
    loop = RequestLoop(model.engine(num_slots, reservation=reservation), clock=clock)
    return loop.run(queue.requests(model), output_tokens)


def measure_scheduling(
    context: Context, queue: Scaled, num_rounds: int, share: float
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return tokens per second and mean requests in the batch of a queue on this machine, for each of CASES."""
    model = open_model(context)
    num_tokens = sum(each.output for each in queue.requests(model))
    cases = {case: partial(_run_reserved, model, *case, queue) for case in CASES}
    return {
        case: (
            num_tokens / statistics.median(run.seconds for run in runs),
            statistics.median(run.mean_running for run in runs),
        )
        for case, runs in repeat(context, cases, num_rounds, share).items()
    }


def _gains(found: dict[tuple[str, str], float]) -> tuple[float, float, float]:
    """Return the gain over static batches of longest chunks: by scheduling, by pages, by both."""
    base = found[STATIC, "max"]
    return found[ITERATION, "max"] / base, found[STATIC, "pages"] / base, found[ITERATION, "pages"] / base


def run_paging_or_scheduling(context: Context) -> StudyResult:
    """Measure {static, iteration-level} x {Max, Pow2, Oracle, pages}."""
    load = Load(SHAREGPT, context.pick(300.0, 60.0), seed=context.seed)
    guesses = context.pick(GUESSES, QUICK_GUESSES)
    jobs = []
    for case, guess in zip(CASES, guesses, strict=True):
        system = System(cost=context.cost, memory=case[1])
        if case[0] == STATIC:  # a batch computes all its prompts in one step
            system = replace(system, static_batch=1000, max_num_batched_tokens=2**15)
        jobs.append((system, load, guess))
    simulated = dict(zip(CASES, find_rates(context, jobs, 0.5), strict=True))
    queue = context.pick(FULL_QUEUE, QUICK_QUEUE)
    measured = measure_scheduling(context, queue, context.pick(3, 1), 0.5)
    speeds = {case: speed for case, (speed, _) in measured.items()}
    rows = [Row("scheduling", f"{how}, {NAMES[m]}", simulated[how, m], None, "req/s", SIMULATED) for how, m in CASES]
    rows += [
        Row("scheduling", f"{how}, {NAMES[m]}, {open_model(context).label}", speeds[how, m], None, "tokens/s", REAL)
        for how, m in CASES
    ]
    labels = tuple(NAMES[name] for name in SYSTEMS)
    panels = [
        Panel(
            title=title, x_label="memory management", y_label=unit, kind="bars",
            series=tuple(
                Series(how, labels, tuple(found[how, name] for name in SYSTEMS)) for how in (STATIC, ITERATION)
            ),
        )
        for title, unit, found in (
            ("simulated: OPT-13B", "sustained rate (requests/s)", simulated),
            (f"real: {open_model(context).label}", "output (tokens/s)", speeds),
        )
    ]  # fmt: skip
    by_scheduling, by_pages, by_both = _gains(simulated)
    real = _gains(speeds)
    batches = measured[ITERATION, "max"][1], measured[ITERATION, "pages"][1]
    return StudyResult(
        name="paging_or_scheduling",
        title="Paging or scheduling (OPT-13B at 0.5 s/token, and a queue on this machine; ShareGPT lengths)",
        question="Is it paging or scheduling that brings the speed?",
        answer="In the simulation, both do: with chunks of the maximum length, iteration-level scheduling alone brings "
        f"{by_scheduling:.1f} times; with static batches, paging alone brings {by_pages:.1f} times; both together "
        f"{by_both:.1f} times. On this machine ({open_model(context).label}, lengths divided by {queue.divisor}, a "
        f"memory of {queue.num_slots:,} tokens) the factors are {real[0]:.1f}, {real[1]:.1f} and {real[2]:.1f}: "
        f"pages raise the mean batch from {batches[0]:.1f} to {batches[1]:.1f} requests, and how much a larger batch "
        "gains depends on the machine.",
        rows=tuple(rows),
        panels=tuple(panels),
    )


def run_lengths_apart(context: Context) -> StudyResult:
    """Time a fixed set of short and long requests, in order of arrival or sorted by output length."""
    count = context.pick(300.0, 80.0)
    mixed = poisson_trace(SHAREGPT, 0.5, count, 1) + poisson_trace(ALPACA, 0.5, count, 2)
    mixed.sort(key=lambda each: each.time_s)
    together = tuple(replace(each, time_s=0.0) for each in mixed)
    apart = tuple(sorted(together, key=lambda each: each.output))
    iteration = System(cost=context.cost)
    static = replace(iteration, memory="max", static_batch=7, max_num_batched_tokens=2**15)
    names = ("static batches of 7", "iteration level, paged")
    jobs = [(system, requests) for system in (static, iteration) for requests in (together, apart)]
    times = context.map(run_offline, jobs)
    gains = times[0] / times[1], times[2] / times[3]
    return StudyResult(
        name="lengths_apart",
        title="Short and long requests together or apart (OPT-13B, half Alpaca, half ShareGPT, offline)",
        question="Does batching by length alone help?",
        answer=f"With static batches it shortens the run {gains[0]:.2f} times, because no request waits for a longer "
        f"one in its batch. With iteration-level scheduling the factor is {gains[1]:.2f}: there is little left to "
        f"gain. Length-aware static batches still take {times[1] / times[2]:.1f} times as long as iteration-level "
        "ones of mixed lengths, and they need to know the output lengths in advance.",
        rows=(
            Row("lengths", "together / apart, static batches of 7", gains[0], None, "x", SIMULATED),
            Row("lengths", "together / apart, iteration level with pages", gains[1], None, "x", SIMULATED),
        ),
        panels=(
            Panel(
                title="time of the whole set", x_label="scheduling", y_label="seconds", kind="bars",
                series=(
                    Series("together, by arrival", names, (times[0], times[2])),
                    Series("apart, by length", names, (times[1], times[3])),
                ),
            ),
        ),
    )  # fmt: skip


class PageSizeTimes(NamedTuple):
    """Output tokens per second, percent of the held slots without a token, and requests in the batch."""

    tokens_per_s: float
    waste: float
    batch: float


def _empty_share(outcome: Outcome) -> float:
    """Return the percent of the slots on held pages that hold no token."""
    memory = outcome.memory_mean()
    return 100 * memory.internal / (memory.tokens + memory.internal)


def _run_binding_queue(model: RealModel, queue: Scaled) -> Outcome:
    return RequestLoop(model.engine(queue.num_slots // 2)).run(queue.requests(model))


def measure_page_sizes(
    context: Context, sizes: Sequence[int], queue: Scaled, num_rounds: int, share: float
) -> dict[int, PageSizeTimes]:
    """Run a queue in a memory that binds, by page size."""
    cases = {size: partial(_run_binding_queue, open_model(context, size), queue) for size in sizes}
    found = {}
    for size, runs in repeat(context, cases, num_rounds, share).items():
        num_tokens = sum(each.num_tokens for each in runs[0].finishes)
        found[size] = PageSizeTimes(
            num_tokens / statistics.median(run.seconds for run in runs),
            statistics.median(_empty_share(run) for run in runs),
            statistics.median(run.mean_running for run in runs),
        )
    return found


def run_page_sizes(context: Context) -> StudyResult:
    """Measure the batch when memory binds, and on this machine the speed and the waste, by page size."""
    sizes = context.pick((1, 4, 8, 16, 32, 64, 128, 256), (4, 16, 256))
    base = System(cost=context.cost, warm_up_s=150.0, seconds=context.pick(360.0, 200.0), drain=False)
    outcomes = context.map(run_sharegpt, [(replace(base, page_size=size), 4.0) for size in sizes], 0.4)
    batches = [outcome.mean_running for outcome in outcomes]
    empty = [_empty_share(outcome) for outcome in outcomes]
    real_sizes = context.pick((8, 16, 32, 64), (16, 64))
    real = measure_page_sizes(context, real_sizes, context.pick(FULL_QUEUE, Scaled(8, 8)), context.pick(3, 1), 0.6)
    label = open_model(context).label
    rows = [
        Row("18b", f"requests in the batch, pages of {size}", batch, None, "requests", SIMULATED)
        for size, batch in zip(sizes, batches, strict=True)
    ]
    for size, times in real.items():
        rows += [
            Row("18b", f"output, pages of {size}, {label}", times.tokens_per_s, None, "tokens/s", REAL),
            Row("18b", f"held slots without a token, pages of {size}, {label}", times.waste, None, "%", REAL),
        ]
    fastest = max(real, key=lambda size: real[size].tokens_per_s)
    first, last = min(real), max(real)
    return StudyResult(
        name="fig18b",
        title="Figure 18b: page size (OPT-13B simulated, and a queue on this machine; ShareGPT lengths)",
        question="Why 16 tokens per page?",
        answer=f"For memory alone the smallest page is best: in the simulation pages of {sizes[0]}, 16 and "
        f"{sizes[-1]} tokens batch {batches[0]:.0f}, {batches[sizes.index(16)]:.0f} and {batches[-1]:.0f} requests. "
        f"On this machine ({label}) pages of {first} and {last} leave {real[first].waste:.0f} and "
        f"{real[last].waste:.0f} % of the held slots empty and generate {real[first].tokens_per_s:.0f} and "
        f"{real[last].tokens_per_s:.0f} tokens/s; pages of {fastest} are the fastest. The paper found pages of 16 to "
        "128 best for ShareGPT and of 16 and 32 for Alpaca, because its kernel reads small pages slowly.",
        rows=tuple(rows),
        panels=(
            Panel(
                title="simulated: requests in the batch", x_label="page size (tokens)", y_label="requests", log_x=True,
                series=(Series("OPT-13B", sizes, tuple(batches)),), y_min=0,
            ),
            Panel(
                title="memory without tokens", x_label="page size (tokens)", y_label="empty slots on held pages (%)",
                log_x=True, y_min=0,
                series=(
                    Series("simulated: OPT-13B", sizes, tuple(empty)),
                    Series(f"real: {label}", real_sizes, tuple(t.waste for t in real.values())),
                ),
            ),
            Panel(
                title=f"real: {label}", x_label="page size (tokens)", y_label="output (tokens/s)", log_x=True, y_min=0,
                series=(Series("output", real_sizes, tuple(times.tokens_per_s for times in real.values())),),
            ),
        ),
    )  # fmt: skip


DEFAULT_BUDGET = "default"  # 2,048 tokens, and prompts take at most 50 ms of a step on CPUs
NUM_USERS = 4


class ChunkTimes(NamedTuple):
    """Inter-token latency in ms, and output tokens per second."""

    p50_ms: float
    p99_ms: float
    tokens_per_s: float


def _run_users(model: RealModel, budget: int | None, num_requests: int, prompt_tokens: int) -> Outcome:
    """Run users that submit a long prompt as soon as their last reply ended. `budget`: None for the default."""
    rng = random.Random(0)
    arrivals = [Arrival(0.0, model.prompt(rng, prompt_tokens), rng.randint(16, 48)) for _ in range(num_requests)]
    engine = model.engine(max_num_batched_tokens=budget) if budget else model.engine(max_prefill_time_s=None)
    return RequestLoop(engine, NUM_USERS).run(arrivals)


def measure_chunks(
    context: Context, budgets: Sequence[int], num_requests: int, prompt_tokens: int, num_rounds: int, share: float
) -> dict[int | None, ChunkTimes]:
    """Measure latency and throughput by chunk budget; None is the default of the engine."""
    model = open_model(context)
    cases = {budget: partial(_run_users, model, budget, num_requests, prompt_tokens) for budget in (*budgets, None)}
    found = {}
    for budget, runs in repeat(context, cases, num_rounds, share).items():
        num_tokens = sum(each.num_tokens for each in runs[0].finishes)
        found[budget] = ChunkTimes(
            1e3 * statistics.median(_gap_percentile(run, 0.5) for run in runs),
            1e3 * statistics.median(_gap_percentile(run, 0.99) for run in runs),
            num_tokens / statistics.median(run.seconds for run in runs),
        )
    return found


def run_chunks(context: Context) -> StudyResult:
    """Measure inter-token latency and throughput by the most tokens in a step."""
    budgets = context.pick((256, 512, 1024, 2560), (256, 2560))
    base = System(cost=context.cost, seconds=context.pick(300.0, 60.0))
    outcomes = context.map(run_sharegpt, [(replace(base, max_num_batched_tokens=each), 1.8) for each in budgets], 0.3)
    p99 = [1e3 * _gap_percentile(outcome, 0.99) for outcome in outcomes]
    speed = [sum(each.num_tokens for each in outcome.finishes) / outcome.seconds for outcome in outcomes]
    first = [statistics.fmean(each.first_token_s - each.arrived_s for each in outcome.finishes) for outcome in outcomes]
    num_requests, prompt_tokens = context.pick((10, 1024), (5, 400))
    real = measure_chunks(context, budgets, num_requests, prompt_tokens, context.pick(3, 1), 0.7)
    label = open_model(context).label
    rows = [
        Row("chunks", f"inter-token latency p99, {budget} tokens", value, None, "ms", SIMULATED)
        for budget, value in zip(budgets, p99, strict=True)
    ]
    for budget, times in real.items():
        what = f"{budget or DEFAULT_BUDGET}{' tokens' if budget else ''}, {label}"
        rows += [
            Row("chunks", f"inter-token latency p50, {what}", times.p50_ms, None, "ms", REAL),
            Row("chunks", f"inter-token latency p99, {what}", times.p99_ms, None, "ms", REAL),
            Row("chunks", f"output, {what}", times.tokens_per_s, None, "tokens/s", REAL),
        ]
    low, high, default = real[budgets[0]], real[budgets[-1]], real[None]
    names = tuple(map(str, (*budgets, DEFAULT_BUDGET)))
    return StudyResult(
        name="chunks",
        title="Tokens per step (chunk budget): OPT-13B simulated at 1.8 requests/s, and 4 users on this machine",
        question="How many tokens should a step compute?",
        answer=f"In the simulation a budget of {budgets[0]} instead of {budgets[-1]} tokens changes the 99th "
        f"percentile of the time between two tokens from {p99[-1]:.0f} to {p99[0]:.0f} ms, the mean time to the "
        f"first token from {first[-1]:.2f} to {first[0]:.2f} s and the throughput from {speed[-1]:.0f} to "
        f"{speed[0]:.0f} tokens/s. On this machine ({label}, {NUM_USERS} users with prompts of {prompt_tokens:,} "
        f"tokens) it changes the 99th percentile from {high.p99_ms:.0f} to {low.p99_ms:.0f} ms and the output from "
        f"{high.tokens_per_s:.0f} to {low.tokens_per_s:.0f} tokens/s; the default of the engine, which on CPUs "
        f"limits the time of prompts in a step, gives {default.p99_ms:.0f} ms and {default.tokens_per_s:.0f} "
        "tokens/s.",
        rows=tuple(rows),
        panels=(
            Panel(
                title="simulated: OPT-13B", x_label="tokens per step", y_label="inter-token latency, p99 (ms)",
                series=(Series("p99", budgets, tuple(p99)),), log_x=True, y_min=0,
            ),
            Panel(
                title=f"real: {label}", x_label="tokens per step", y_label="inter-token latency (ms)", kind="bars",
                series=(
                    Series("p50", names, tuple(times.p50_ms for times in real.values())),
                    Series("p99", names, tuple(times.p99_ms for times in real.values())),
                ),
            ),
            Panel(
                title=f"real: {label}", x_label="tokens per step", y_label="output (tokens/s)", kind="bars",
                series=(Series("output", names, tuple(times.tokens_per_s for times in real.values())),),
            ),
        ),
    )  # fmt: skip


def _gap_percentile(outcome: Outcome, share: float) -> float:
    seconds, weights = np.array(outcome.gaps).T
    order = np.argsort(seconds)
    reached = np.cumsum(weights[order]) >= share * weights.sum()
    return float(seconds[order][np.argmax(reached)])
