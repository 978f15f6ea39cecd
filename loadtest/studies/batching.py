"""Paging or scheduling, lengths apart or together, page sizes, chunk budgets, and one local user."""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np

from loadtest.lengths import ALPACA, SHAREGPT
from loadtest.studies.published import NAMES, SYSTEMS
from loadtest.studies.rates import Load, find_rate
from loadtest.studies.results import SIMULATED, Context, Panel, Row, Series, StudyResult
from loadtest.studies.simulate import Arrival, Outcome, System, poisson_trace, simulate


def run_paging_or_scheduling(context: Context) -> StudyResult:
    """Find the sustained rates of {static, iteration-level} x {Max, Pow2, Oracle, pages}."""
    load = Load(SHAREGPT, context.pick(300.0, 150.0), seed=context.seed)
    iteration = {"max": 0.5, "pow2": 0.7, "oracle": 0.9, "pages": 1.8}
    static = {"max": 0.2, "pow2": 0.25, "oracle": 0.35, "pages": 0.5}
    base = System(cost=context.cost)
    jobs = [
        (replace(base, memory=name, static_batch=0 if guesses is iteration else 1000,
                 max_num_batched_tokens=2560 if guesses is iteration else 2**15), load, guess)
        for guesses in (static, iteration)
        for name, guess in guesses.items()
    ]  # fmt: skip
    rates = context.map(find_rate, jobs)
    by_static, by_iteration = dict(zip(SYSTEMS, rates[:4], strict=True)), dict(zip(SYSTEMS, rates[4:], strict=True))
    rows = [
        Row("scheduling", f"{how}, {NAMES[name]}", found[name], None, "req/s", SIMULATED)
        for how, found in (("static batches", by_static), ("iteration level", by_iteration))
        for name in SYSTEMS
    ]
    labels = tuple(NAMES[name] for name in SYSTEMS)
    return StudyResult(
        name="paging_or_scheduling",
        title="Paging or scheduling: sustained rate at 0.5 s/token (OPT-13B, ShareGPT lengths)",
        question="Is it paging or scheduling that brings the speed?",
        answer="Both, and they multiply. With chunks of the maximum length, iteration-level scheduling alone brings "
        f"{by_iteration['max'] / by_static['max']:.1f} times; with static batches, paging alone brings "
        f"{by_static['pages'] / by_static['max']:.1f} times; both together "
        f"{by_iteration['pages'] / by_static['max']:.1f} "
        "times.",
        rows=tuple(rows),
        panels=(
            Panel(
                title="static batches and iteration-level scheduling", x_label="memory management",
                y_label="sustained rate (requests/s)", kind="bars",
                series=(
                    Series("static batches", labels, tuple(by_static.values())),
                    Series("iteration level", labels, tuple(by_iteration.values())),
                ),
            ),
        ),
    )  # fmt: skip


def _run_offline(job: tuple[System, tuple[Arrival, ...]]) -> float:
    return simulate(job[1], job[0]).seconds


def run_lengths_apart(context: Context) -> StudyResult:
    """Time a fixed set of short and long requests, in order of arrival or sorted by output length."""
    count = context.pick(300.0, 100.0)
    mixed = poisson_trace(SHAREGPT, 0.5, count, 1) + poisson_trace(ALPACA, 0.5, count, 2)
    mixed.sort(key=lambda each: each.time_s)
    together = tuple(replace(each, time_s=0.0) for each in mixed)
    apart = tuple(sorted(together, key=lambda each: each.output))
    iteration = System(cost=context.cost)
    static = replace(iteration, memory="max", static_batch=7, max_num_batched_tokens=2**15)
    names = ("static batches of 7", "iteration level, paged")
    jobs = [(system, requests) for system in (static, iteration) for requests in (together, apart)]
    times = context.map(_run_offline, jobs)
    gains = times[0] / times[1], times[2] / times[3]
    return StudyResult(
        name="lengths_apart",
        title="Short and long requests together or apart (OPT-13B, half Alpaca, half ShareGPT, offline)",
        question="Does batching by length alone help?",
        answer=f"With static batches it shortens the run {gains[0]:.2f} times, because no request waits for a "
        f"longer one in "
        f"its batch. With iteration-level scheduling the factor is {gains[1]:.2f}: there is little left to "
        f"gain, and length-"
        f"aware static batches still take {times[1] / times[2]:.1f} times as long as iteration-level ones of "
        f"mixed lengths.",
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


def _run_trace(job: tuple[System, float]) -> Outcome:
    system, rate = job
    return simulate(poisson_trace(SHAREGPT, rate, system.seconds, 1), system)


def run_page_sizes(context: Context) -> StudyResult:
    """Count the requests in a batch when memory binds, by page size."""
    sizes = context.pick((1, 4, 8, 16, 32, 64, 128, 256), (1, 16, 64, 256))
    seconds = context.pick(360.0, 200.0)
    base = System(cost=context.cost, warm_up_s=150.0, seconds=seconds, drain=False)
    outcomes = context.map(_run_trace, [(replace(base, page_size=size), 4.0) for size in sizes])
    batches = [outcome.mean_running for outcome in outcomes]
    tokens = [100 * outcome.memory_mean().tokens for outcome in outcomes]
    return StudyResult(
        name="fig18b",
        title="Figure 18b: page size (OPT-13B, ShareGPT lengths, saturated)",
        question="Why 16 tokens per page?",
        answer=f"For memory alone the smallest page is best: pages of {sizes[0]}, 16 and {sizes[-1]} tokens batch "
        f"{batches[0]:.0f}, {batches[sizes.index(16)]:.0f} and {batches[-1]:.0f} requests. The paper's kernel "
        f"is slower with "
        "pages below 16 tokens, so it chose 16; simulated steps have no such cost.",
        rows=tuple(
            Row("18b", f"requests in the batch, pages of {size}", batch, None, "requests", SIMULATED)
            for size, batch in zip(sizes, batches, strict=True)
        ),
        panels=(
            Panel(
                title="requests in the batch", x_label="page size (tokens)", y_label="requests",
                series=(Series("ours", sizes, tuple(batches)),), log_x=True,
            ),
            Panel(
                title="slots with tokens", x_label="page size (tokens)", y_label="share of KV slots (%)",
                series=(Series("ours", sizes, tuple(tokens)),), log_x=True,
            ),
        ),
    )  # fmt: skip


def run_chunks(context: Context) -> StudyResult:
    """Measure inter-token latency and throughput by the most tokens in a step."""
    budgets = context.pick((256, 512, 1024, 2560), (256, 2560))
    base = System(cost=context.cost, seconds=context.pick(300.0, 120.0))
    outcomes = context.map(_run_trace, [(replace(base, max_num_batched_tokens=budget), 1.8) for budget in budgets])
    p99 = [1e3 * _gap_percentile(outcome, 0.99) for outcome in outcomes]
    speed = [sum(each.num_tokens for each in outcome.finishes) / outcome.seconds for outcome in outcomes]
    first = [statistics.fmean(each.first_token_s - each.arrived_s for each in outcome.finishes) for outcome in outcomes]
    return StudyResult(
        name="chunks",
        title="Tokens per step (chunk budget): latency and throughput (OPT-13B, ShareGPT lengths, 1.8 requests/s)",
        question="How many tokens should a step compute?",
        answer=f"A budget of {budgets[0]} instead of {budgets[-1]} tokens changes the 99th percentile of the "
        f"time between two "
        f"tokens from {p99[-1]:.0f} to {p99[0]:.0f} ms, the mean time to the first token from {first[-1]:.2f} to "
        f"{first[0]:.2f} s and the throughput from {speed[-1]:.0f} to {speed[0]:.0f} tokens/s.",
        rows=tuple(
            Row("chunks", f"inter-token latency p99, {budget} tokens", value, None, "ms", SIMULATED)
            for budget, value in zip(budgets, p99, strict=True)
        ),
        panels=(
            Panel(
                title="inter-token latency, p99", x_label="tokens per step", y_label="ms",
                series=(Series("p99", budgets, tuple(p99)),), log_x=True,
            ),
            Panel(
                title="time to first token, mean", x_label="tokens per step", y_label="s",
                series=(Series("mean", budgets, tuple(first)),), log_x=True,
            ),
        ),
    )  # fmt: skip


def _gap_percentile(outcome: Outcome, share: float) -> float:
    seconds, weights = np.array(outcome.gaps).T
    order = np.argsort(seconds)
    reached = np.cumsum(weights[order]) >= share * weights.sum()
    return float(seconds[order][np.argmax(reached)])


def _local_day() -> list[tuple[int, ...]]:
    """Return the prompts of one user: 8 turns, a regenerated answer, an edited question and two branches."""
    rng, answer = np.random.default_rng(0), (7,) * 150
    history: tuple[int, ...] = tuple(rng.integers(1000, 50_000, 100).tolist())
    prompts: list[tuple[int, ...]] = []
    starts: list[tuple[int, ...]] = []

    def ask(before: tuple[int, ...], num_tokens: int = 40) -> tuple[int, ...]:
        prompts.append(before + tuple(rng.integers(1000, 50_000, num_tokens).tolist()))
        return prompts[-1] + answer

    for _ in range(8):
        starts.append(history)
        history = ask(history)
    prompts.append(prompts[-1])  # regenerate
    ask(starts[4])  # edit the fifth question
    ask(ask(starts[6]))  # two branches from the seventh
    ask(ask(starts[6]))
    return prompts


def run_local_user(context: Context) -> StudyResult:
    """Count the computed prompt tokens of one user's day, with and without the prefix cache."""
    prompts = _local_day()
    arrivals = [Arrival(60.0 * number, prompt, 150) for number, prompt in enumerate(prompts)]
    base = System(cost=context.cost)
    on, off = (simulate(arrivals, replace(base, prefix_caching=caching)) for caching in (True, False))
    context.advance(1.0)
    computed = [each.num_prompt_tokens - each.num_cached_tokens for each in (on, off)]
    first_ms = [1e3 * statistics.fmean(f.first_token_s - f.arrived_s for f in each.finishes) for each in (on, off)]
    turns = tuple(range(1, len(prompts) + 1))
    return StudyResult(
        name="local_user",
        title="One local user: turns, a regenerated answer, an edit and two branches",
        question="Does prefix reuse help a single local user?",
        answer=f"Yes: of {computed[1]:,} prompt tokens {computed[0]:,} are computed, and the mean time to the "
        f"first token "
        f"falls from {first_ms[1]:.0f} to {first_ms[0]:.0f} ms. On slower machines the difference grows with "
        f"the time per "
        "prompt token.",
        rows=(
            Row("local user", "prompt tokens computed, cache on / off", computed[0] / computed[1], None, "", SIMULATED),
            Row("local user", "mean time to first token, cache on", first_ms[0], None, "ms", SIMULATED),
            Row("local user", "mean time to first token, cache off", first_ms[1], None, "ms", SIMULATED),
        ),
        panels=(
            Panel(
                title="time to first token", x_label="turn", y_label="ms",
                series=tuple(
                    Series(name, turns, tuple(1e3 * (f.first_token_s - f.arrived_s) for f in each.finishes))
                    for name, each in (("cache on", on), ("cache off", off))
                ),
            ),
        ),
    )  # fmt: skip
