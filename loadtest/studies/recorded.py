"""A recorded trace (`--trace`) on simulated OPT: its times and lengths, and the reuse of prefixes of block-hash traces.

Traces are recorded on models with longer contexts. Lengths are multiplied by one factor, so that 95 % of the requests
fit the simulated context; longer ones are cut. Blocks of a block-hash trace shrink with them, so reuse stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from loadtest.open_loop.traces import TraceRequest, read_trace
from loadtest.open_loop.workload import LengthLimits, Plan, PlannedConversation, PromptTokens, plan_trace, scale_to_rate
from loadtest.studies.published import NAMES
from loadtest.studies.rates import find_rates
from loadtest.studies.reservations import MAX_MODEL_LEN
from loadtest.studies.results import SIMULATED, Context, Panel, Row, Series, StudyResult
from loadtest.studies.simulate import VOCAB_SIZE, Arrival, OnFinish, System, simulate

Trace = list[list[TraceRequest]]
read_once = cache(read_trace)
FITTING_SHARE = 95  # percent of the requests that fit after scaling
FULL_S, QUICK_S = 300.0, 60.0  # of the trace


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """The first requests of a trace, stretched or compressed to a rate. Satisfies `rates.Workload`.

    `seconds`: of arrivals; fewer if the trace has too few requests for the rate.
    """

    path: Path
    seconds: float
    scale: float

    def plan(self, rate: float) -> Plan:
        """Plan the requests of the trace at this rate."""
        trace = read_once(self.path)
        limits = LengthLimits(self.scale, MAX_MODEL_LEN * 3 // 4, MAX_MODEL_LEN // 4 - 1)
        seconds = min(self.seconds, sum(map(len, trace)) / rate)
        return plan_trace(trace, scale_to_rate(trace, rate, seconds), seconds, limits, "studies")

    def arrivals(self, rate: float) -> tuple[list[Arrival], OnFinish]:
        """Return the first turns of all conversations, and what follows a turn that ended."""
        plan = self.plan(rate)
        tokens = PromptTokens(plan, VOCAB_SIZE)
        later: dict[str, Iterator[Arrival]] = {}
        histories: dict[str, tuple[int, ...]] = {}

        def turns(number: int, conversation: PlannedConversation) -> Iterator[Arrival]:
            key = str(number)
            for index, turn in enumerate(conversation.turns):
                prompt = histories.get(key, ()) + tuple(tokens.draw(turn, number, index))
                start = turn.think_s if index else conversation.at_s
                yield Arrival(
                    start, prompt[-(MAX_MODEL_LEN - 1 - turn.num_output_tokens) :], turn.num_output_tokens, key=key
                )

        def on_finish(arrival: Arrival, now: float) -> Arrival | None:
            histories[arrival.key] = arrival.prompt + (7,) * arrival.output
            following = next(later[arrival.key], None)
            return replace(following, time_s=now + following.time_s) if following is not None else None

        starts = []
        for number, conversation in enumerate(plan.conversations):
            later[str(number)] = turns(number, conversation)
            starts.append(next(later[str(number)]))
        return starts, on_finish


def fitting_scale(trace: Trace) -> float:
    """Return the factor with which FITTING_SHARE percent of the requests fit the simulated context, at most 1."""
    totals = [turn.num_prompt_tokens + turn.num_output_tokens for turns in trace for turn in turns]
    return min(1.0, (MAX_MODEL_LEN - 1) / float(np.percentile(totals, FITTING_SHARE)))


def run_trace(context: Context) -> StudyResult:
    """Compare the sustained rates of a recorded trace.

    Raises: ValueError without a trace, or for a file that is none.
    """
    if context.trace is None:
        raise ValueError("this study needs --trace FILE")
    trace = read_once(context.trace)
    load = TraceLoad(context.trace, context.pick(FULL_S, QUICK_S), fitting_scale(trace))
    sample = [turn for each in load.plan(1.0).conversations for turn in each.turns]
    has_blocks = any(turn.block_ids for turn in sample)
    num_prompt, num_output = (
        statistics.fmean(getattr(turn, name) for turn in sample) for name in ("num_prompt_tokens", "num_output_tokens")
    )
    base = System(cost=context.cost)
    systems = {NAMES[name]: replace(base, memory=name) for name in ("max", "oracle", "pages")}
    if has_blocks:
        systems["paged, prefix cache"] = replace(base, prefix_caching=True)
    scarce = context.cost.num_slots / (2 * num_prompt + num_output) / (0.05 * num_output + 1)  # requests/s, by memory
    rates = dict(zip(systems, find_rates(context, [(each, load, scarce) for each in systems.values()]), strict=True))
    best = list(rates)[-1]
    arrivals, on_finish = load.arrivals(rates[best])
    outcome = simulate(arrivals, systems[best], on_finish)
    reuse = outcome.num_cached_tokens / outcome.num_prompt_tokens
    paged, oracle, most = rates[NAMES["pages"]], rates[NAMES["oracle"]], rates[NAMES["max"]]
    rows = [Row("trace", f"sustained rate, {name}", rate, None, "req/s", SIMULATED) for name, rate in rates.items()]
    answer = (
        f"Pages sustain {paged / oracle:.1f} times the rate of contiguous chunks of the exact length and "
        f"{paged / most:.1f} times that of chunks of the maximum length (lengths times {load.scale:.3f}: on average "
        f"{num_prompt:.0f} prompt and {num_output:.0f} output tokens)."
    )
    if has_blocks:
        rows.append(Row("trace", "prompt tokens found in the cache", 100 * reuse, None, "%", SIMULATED))
        answer += (
            f" The prefix cache finds {100 * reuse:.0f} % of the prompt tokens and raises the rate "
            f"{rates[best] / paged:.2f} times."
        )
    return StudyResult(
        name="trace",
        title=f"Recorded trace {context.trace.name}: sustained rate at 0.5 s/token ({context.cost.name})",
        question=f"What does paging buy on the recorded trace {context.trace.name}?",
        answer=answer,
        rows=tuple(rows),
        panels=(
            Panel(
                title="bursts and lengths of the trace", x_label="memory management", y_label="requests/s", kind="bars",
                series=(Series("sustained rate", tuple(rates), tuple(rates.values())),),
            ),
        ),
    )  # fmt: skip
