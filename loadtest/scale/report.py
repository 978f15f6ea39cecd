"""Report of the comparison: `scale.md`, `scale.json` and `scale.png`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from chatcache.bench.report import format_table, utc_timestamp, write_json
from loadtest.scale.policies import HASH, OURS, POLICIES
from loadtest.scale.runs import LARGE, NUM_GATEWAYS, Row, to_json
from loadtest.scale.traffic import SCENARIOS, TRACE

ORACLE = "true cache contents (oracle)"
RIVALS = (HASH, "SGLang rule, a tree per gateway", "Dynamo cost", "production-stack loadaware")
ACCEPTED = ("base", "pressure", "unequal", "hot prefix", "sparse")  # scenarios with goals

HEADER = """# Routing, simulated

Rules that choose a worker for each request, on a virtual clock: no model runs, and nothing here is measured on real
workers. Made by `python -m loadtest.scale simulate`{options} on {date}. Hit rate: share of prompt tokens found in the
chosen worker's cache. TTFT: time to first token. Imbalance: standard deviation / mean of the requests per worker.
Means over {seeds} seed(s), one with {large} or more workers and for recorded traces; the first quarter is not counted.
"""

METHOD = """## Method

A worker computes prompts one after another at 4,000 tokens/s; running replies slow it down by up to a half. A decode
step takes 20 ms and 1.5 ms for each running reply. A cache holds 120,000 tokens unless stated, least recently used
first out. Conversations arrive at random, with exponential lengths and pauses (25 s), and 10 % of them are forked once.
Four gateways choose independently. Ours sees the reservations of other gateways 10 ms late, and knows of the caches
only what finished turns recorded in the index. The other rules see all loads at once and, SGLang's trees excepted, the
true contents of all caches.

- **SGLang rule**: longest match if above 30 % of the prompt, else the smallest tree; least load if the loads differ by
  more than 64 and 1.5 times. As deployed, each gateway has a tree and loads of its own; one shared tree is shown, too.
- **Dynamo cost**: blocks to compute plus active blocks, temperature 0.
- **production-stack loadaware**: matched share of the prompt minus relative load.
- **oracle**: the lowest cost in seconds over all workers by true cache contents, without the discount. It concentrates
  requests where the system prompt is, so it is no lower bound of the time to first token.

The rules of other projects are written from their documentation, with default parameters; the projects do more. A
recorded trace has no conversations: its requests are hashed by their first two blocks, and compressed in time so that
their prompts take half of the workers' prefill time when nothing is cached.
"""


def write(rows: Sequence[Row], out: Path, num_seeds: int, options: str) -> Path:
    """Write the report, the data and the figure; return the path of the report."""
    out.mkdir(parents=True, exist_ok=True)
    goals = list(check_goals(rows))
    document = {"date": utc_timestamp(), "options": options.strip(), "seeds": num_seeds, "rows": to_json(rows)}
    write_json(
        out / "scale.json", {**document, "goals": [dict(zip(GOAL_HEADERS, goal, strict=True)) for goal in goals]}
    )
    parts = [HEADER.format(options=options, date=utc_timestamp()[:10], seeds=num_seeds, large=LARGE)]
    parts += ["![mean time to first token and hit rate of each rule](scale.png)", ""]
    if goals:
        parts += ["## Goals", "", table(GOAL_HEADERS, goals), ""]
    for name, count in dict.fromkeys((row.scenario, row.num_workers) for row in rows):
        title = TRACE.title if name == TRACE.name else SCENARIOS[name].title
        parts += [f"## {name}, {count} workers", "", f"{title}.", ""]
        parts += [table(HEADERS, [_cells(row) for row in rows if (row.scenario, row.num_workers) == (name, count)]), ""]
    (out / "scale.md").write_text("\n".join([*parts, METHOD]), encoding="utf-8")
    draw(rows, out / "scale.png")
    return out / "scale.md"


HEADERS = ("rule", "gateways", "hit rate %", "TTFT mean ms", "± ms", "p50 ms", "p99 ms", "imbalance", "decision us")
GOAL_HEADERS = ("goal", "scenario", "workers", "value", "limit", "met")


def _cells(row: Row) -> tuple[str, ...]:
    one = row.outcome
    times = (one.mean_ttft_s, row.spread, one.p50_ttft_s, one.p99_ttft_s)
    return (
        row.rule, str(row.num_gateways), f"{100 * one.hit_rate:.1f}", *(f"{1e3 * value:.0f}" for value in times),
        f"{one.cov:.2f}", f"{one.decision_us:.0f}",
    )  # fmt: skip


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (headers, *rows)]
    return "\n".join([lines[0], "|---" + "|--:" * (len(headers) - 1) + "|", *lines[1:]])


def check_goals(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Compare ours with the goals: name, scenario, workers, value, limit, yes or NO."""
    found = {(row.scenario, row.num_workers, row.rule, row.num_gateways): row.outcome for row in rows}
    for scenario, count in dict.fromkeys((row.scenario, row.num_workers) for row in rows):
        rules = {rule: found.get((scenario, count, rule, NUM_GATEWAYS)) for rule in POLICIES}
        ours, oracle, hashed = rules[OURS], rules[ORACLE], rules[HASH]
        goals: list[tuple[str, float, str, float, int]] = []
        if scenario in ACCEPTED and ours and oracle and hashed:
            rivals = [one for rule in RIVALS if (one := rules[rule])]
            mean_s, p99_s = (min(getattr(one, name) for one in rivals) for name in ("mean_ttft_s", "p99_ttft_s"))
            least = 100 * max(0.97 * oracle.hit_rate, hashed.hit_rate)
            goals += [
                ("hit rate (%): 0.97 of the oracle, and the hash", 100 * ours.hit_rate, ">=", least, 1),
                ("mean TTFT / best other rule", ours.mean_ttft_s / mean_s, "<=", 0.95, 2),
                ("p99 TTFT / best other rule", ours.p99_ttft_s / p99_s, "<=", 1.2, 2),
            ]
        if scenario == "base" and ours:
            goals.append(("imbalance", ours.cov, "<=", 0.3, 2))
            goals.append(("decision (us of real time)", ours.decision_us, "<=", 50 if count < LARGE else 100, 0))
            one, eight = (found.get((scenario, count, OURS, number)) for number in (1, 8))
            if one and eight:
                points = 100 * abs(one.hit_rate - eight.hit_rate)
                goals.append(("hit rate with 8 gateways against 1 (points)", points, "<=", 1.0, 2))
        if scenario == "two workers" and ours:
            goals.append(("imbalance", ours.cov, "<=", 0.2, 2))
        for name, value, sign, limit, digits in goals:
            met = value >= limit if sign == ">=" else value <= limit
            shown = f"{value:.{digits}f}", f"{sign} {limit:.{digits}f}"
            yield name, scenario, str(count), *shown, "yes" if met else "NO"


def summary(rows: Sequence[Row]) -> str:
    """Return all rows and goals as text for a terminal."""
    cells = [(row.scenario, str(row.num_workers), *_cells(row)) for row in rows]
    text = format_table(("scenario", "workers", *HEADERS), cells)
    goals = list(check_goals(rows))
    return text + ("\n\n" + format_table(GOAL_HEADERS, goals) if goals else "")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the mean time to first token and the hit rate of each rule, one column for each scenario."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = list(dict.fromkeys((row.scenario, row.num_workers) for row in rows))
    figure, axes = plt.subplots(
        2, len(columns), figsize=(1.6 + 1.5 * len(columns), 6.2), layout="constrained", sharey="row", squeeze=False
    )
    rules = [rule for rule in POLICIES if any(row.rule == rule for row in rows)]
    for column, (scenario, count) in enumerate(columns):
        found = {
            row.rule: row.outcome
            for row in rows
            if (row.scenario, row.num_workers, row.num_gateways) == (scenario, count, NUM_GATEWAYS)
        }
        for axis, scale, name in ((axes[0, column], 1e3, "mean_ttft_s"), (axes[1, column], 100.0, "hit_rate")):
            for number, rule in enumerate(reversed(rules)):
                if rule in found:
                    colour = "#1f6fb4" if rule == OURS else "#9aa3ad" if rule != ORACLE else "#d5d9de"
                    value = scale * getattr(found[rule], name)
                    axis.barh(number, value, color=colour)
                    axis.text(value, number, f" {value:.0f}", va="center", fontsize=7)
            axis.set_yticks(range(len(rules)), list(reversed(rules)), fontsize=8)
            axis.margins(x=0.25)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(axis="x", labelsize=7)
        axes[0, column].set_title(f"{scenario}\n{count} workers", fontsize=9)
        axes[0, column].set_xlabel("mean TTFT (ms)", fontsize=8)
        axes[1, column].set_xlabel("hit rate (%)", fontsize=8)
    figure.suptitle(
        "Routing rules, simulated: time to first token and share of prompt tokens from the cache", fontsize=11
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
