"""Figures 2 and 13: how the KV memory is used, and how many requests share a batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from loadtest.lengths import ALPACA, SHAREGPT, LengthDistribution
from loadtest.studies import published
from loadtest.studies.published import FIG2_PARTS, NAMES, SYSTEMS
from loadtest.studies.results import SIMULATED, Context, Panel, Row, Series, StudyResult
from loadtest.studies.simulate import Outcome, System, poisson_trace, simulate

WARM_UP_S = 300.0


def measure(memory: str, lengths: LengthDistribution, rate: float, base: System, seed: int) -> Outcome:
    """Simulate one system at a rate, without the requests that are left at the end."""
    return simulate(poisson_trace(lengths, rate, base.seconds, seed), replace(base, memory=memory))


def _measure_all(
    context: Context, lengths: LengthDistribution, rate: float, share: float, warm_up_s: float, seconds: float
) -> dict[str, Outcome]:
    base = System(cost=context.cost, warm_up_s=warm_up_s, seconds=seconds, drain=False)
    run = partial(measure, lengths=lengths, rate=rate, base=base, seed=context.seed)
    return dict(zip(SYSTEMS, context.map(run, SYSTEMS, share), strict=True))


def run_fig2(context: Context) -> StudyResult:
    """Measure the shares of the KV slots at 4 requests/s."""
    outcomes = _measure_all(context, SHAREGPT, 4.0, 1.0, *context.pick((WARM_UP_S, 900.0), (200.0, 450.0)))
    shares = {name: tuple(100 * share for share in outcomes[name].memory_mean()) for name in SYSTEMS}
    rows = [
        Row("2", f"slots with token states, {NAMES[name]}", shares[name][0], published.FIG2[name][0], "%", SIMULATED)
        for name in SYSTEMS
    ]
    rows += [
        Row("2", f"{part}, {NAMES['max']}", shares["max"][index], published.FIG2["max"][index], "%", SIMULATED)
        for index, part in enumerate(FIG2_PARTS)
        if index
    ]
    columns = tuple(label for name in SYSTEMS for label in (f"{NAMES[name]}\nours", f"{NAMES[name]}\npaper"))
    stacks = tuple(
        Series(part, columns, tuple(v for name in SYSTEMS for v in (shares[name][i], published.FIG2[name][i])))
        for i, part in enumerate(FIG2_PARTS)
    )
    paged, oracle = shares["pages"][0], shares["oracle"][0]
    return StudyResult(
        name="fig2",
        title="Figure 2: what the KV memory holds (OPT-13B, ShareGPT lengths, 4 requests/s)",
        question="How much of the KV memory holds tokens?",
        answer=f"With pages {paged:.0f} % of all slots hold a token, and {shares['pages'][2]:.1f} % are the free ends "
        f"of last pages. With contiguous reservations {shares['max'][0]:.0f} to {oracle:.0f} % hold one, even if the "
        "output length is known in advance: the rest is reserved for later tokens or lost between chunks.",
        rows=tuple(rows),
        panels=(
            Panel(
                title="Use of the KV slots", x_label="memory management", y_label="share of KV slots (%)",
                series=stacks, kind="stack", y_max=100,
            ),
        ),
    )  # fmt: skip


def run_fig13(context: Context) -> StudyResult:
    """Measure the number of requests in the batch."""
    cases = (
        (
            "ShareGPT, 2 requests/s",
            SHAREGPT,
            2.0,
            *context.pick((WARM_UP_S, 900.0), (200.0, 450.0)),
            published.FIG13_SHAREGPT,
        ),
        ("Alpaca, 30 requests/s", ALPACA, 30.0, 60.0, context.pick(400.0, 140.0), published.FIG13_ALPACA),
    )
    rows: list[Row] = []
    panels: list[Panel] = []
    labels = tuple(NAMES[name] for name in SYSTEMS)
    for title, lengths, rate, warm_up_s, seconds, paper in cases:
        outcomes = _measure_all(context, lengths, rate, 0.5, warm_up_s, seconds)
        ours = {name: outcome.mean_running for name, outcome in outcomes.items()}
        rows += [
            Row("13", f"{title}, {NAMES[name]}", ours[name], paper[name], "requests", SIMULATED) for name in SYSTEMS
        ]
        panels.append(
            Panel(
                title=title, x_label="memory management", y_label="requests in the batch", kind="bars",
                series=(
                    Series("ours", labels, tuple(ours[name] for name in SYSTEMS)),
                    Series("paper", labels, tuple(paper[name] for name in SYSTEMS), is_published=True),
                ),
            )
        )  # fmt: skip
    return StudyResult(
        name="fig13",
        title="Figure 13: requests in the batch (OPT-13B)",
        question="How many requests share a step?",
        answer=f"On the same memory, pages run {rows[3].ours:.0f} requests at once (ShareGPT lengths), "
        f"{rows[3].ours / rows[2].ours:.1f} times as many as contiguous chunks of the exact length and "
        f"{rows[3].ours / rows[0].ours:.1f} times as many as chunks of the maximum length.",
        rows=tuple(rows),
        panels=tuple(panels),
    )
