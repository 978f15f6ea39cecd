"""Metrics of runs, as a table, as JSON, and as a figure of several servers.

Normalized latency is the paper's metric (Kwon et al., SOSP 2023): the mean over requests of end-to-end latency divided
by output tokens. Only completed requests count; failed ones are counted by name.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatcache.bench.report import format_table, percentiles
from loadtest.open_loop.generator import RequestResult

COLUMNS = (
    "conversation", "turn", "planned_s", "lag_s", "ttft_s", "latency_s", "itl_s", "num_prompt_tokens",
    "num_received_tokens", "num_cached", "num_ideal_cached", "error",
)  # fmt: skip
"""Fields of each request in the CSV."""

Run = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """What a request has to meet to count as goodput: time to first token, and mean time between tokens (seconds)."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def met_by(self, result: RequestResult) -> bool:
        if result.error or result.ttft_s is None:
            return False
        if self.ttft_s is not None and result.ttft_s > self.ttft_s:
            return False
        return self.itl_s is None or result.itl_s is None or result.itl_s <= self.itl_s


def summarise(
    results: Sequence[RequestResult], window_s: float, wall_s: float, limits: LatencyLimits, lag_limit_s: float
) -> dict[str, Any]:
    """Return the metrics of one run; times in seconds, rates per second.

    `window_s`: length of the arrivals, by which offered rate and goodput are divided. `wall_s`: until the last reply.
    """
    good = [result for result in results if not result.error]
    num_output_tokens = sum(result.num_received_tokens for result in good)
    lags_s = percentiles([result.lag_s for result in results], (50, 99, 100), digits=4)
    num_in_time = sum(limits.met_by(result) for result in good)
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "failures": _failures(results),
        "offered_rate": round(len(results) / window_s, 4),
        "completed_rate": round(len(good) / wall_s, 4) if wall_s else 0.0,
        "output_tokens_per_s": round(num_output_tokens / wall_s, 2) if wall_s else 0.0,
        "normalized_latency_s": normalized_latency_s(good),
        "ttft_s": percentiles([result.ttft_s for result in good if result.ttft_s is not None], digits=4),
        "itl_s": percentiles([gap for result in good for gap in result.gaps_s], digits=4),
        "latency_s": percentiles([result.latency_s for result in good], digits=4),
        "goodput": round(num_in_time / window_s, 4) if limits != LatencyLimits() else None,
        **_cache_shares(good),
        "other_prompt_lengths": sum(r.num_reported_prompt_tokens not in (0, r.num_prompt_tokens) for r in good),
        "other_output_lengths": sum(r.num_received_tokens != r.num_output_tokens for r in good),
        "lag_s": lags_s,
        "is_late": bool(lags_s) and lags_s["p99"] > lag_limit_s,
        "window_s": window_s,
        "wall_s": round(wall_s, 3),
    }


def normalized_latency_s(results: Sequence[RequestResult]) -> float | None:
    """Return the mean of end-to-end latency / output tokens; None without results."""
    each = [result.latency_s / result.num_received_tokens for result in results if result.num_received_tokens]
    return round(statistics.fmean(each), 5) if each else None


def _failures(results: Sequence[RequestResult]) -> dict[str, dict[str, Any]]:
    """Count failures by name, with the text of the first."""
    failures: dict[str, dict[str, Any]] = {}
    for result in results:
        if result.error:
            failures.setdefault(result.error, {"count": 0, "example": result.detail})["count"] += 1
    return failures


def _cache_shares(good: Sequence[RequestResult]) -> dict[str, float | None]:
    """Return the reported and the ideal share of prompt tokens found in the cache."""
    num_prompt_tokens = sum(result.num_prompt_tokens for result in good) or 1
    reported = [result.num_cached for result in good if result.num_cached is not None]
    ideal = sum(result.num_ideal_cached for result in good)
    return {
        "cached_share": round(sum(reported) / num_prompt_tokens, 4) if reported else None,
        "ideal_cached_share": round(ideal / num_prompt_tokens, 4),
    }


def write_requests(path: Path, runs: Sequence[tuple[Run, Sequence[RequestResult]]]) -> None:
    """Write a line for each request of all runs as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("server", "rate", "repeat", *COLUMNS))
        for run, results in runs:
            for result in results:
                values = (getattr(result, column) for column in COLUMNS)
                rounded = (round(value, 4) if isinstance(value, float) else value for value in values)
                writer.writerow((run["server"], run["rate"], run["repeat"], *rounded))


# -- text ---------------------------------------------------------------------------------------------------------


def runs_table(runs: Sequence[Run]) -> str:
    """Return a row for each run, and notes on failures and on a late generator."""
    headers = (
        "server", "rate", "done/s", "s/token", "TTFT p50", "p99", "ITL p50", "p99", "goodput", "cached", "ideal",
        "failed", "lag p99",
    )  # fmt: skip
    rows = [_cells(run) for run in runs]
    notes = [note for run in runs for note in run_notes(run)]
    return "\n".join((format_table(headers, rows), *dict.fromkeys(notes)))


def _cells(run: Run) -> tuple[str, ...]:
    return (
        run["server"],
        f"{run['offered_rate']:.3g}",
        f"{run['completed_rate']:.3g}",
        _text(run["normalized_latency_s"], ".3f"),
        _text(run["ttft_s"].get("p50"), ".3f"),
        _text(run["ttft_s"].get("p99"), ".3f"),
        _text(run["itl_s"].get("p50"), ".4f"),
        _text(run["itl_s"].get("p99"), ".4f"),
        _text(run["goodput"], ".3g"),
        _text(run["cached_share"], ".1%"),
        _text(run["ideal_cached_share"], ".1%"),
        str(run["failed"]),
        _text(run["lag_s"].get("p99"), ".4f"),
    )


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def run_notes(run: Run) -> list[str]:
    """Return what the reader of a run has to know: failures, other lengths than planned, a late generator."""
    name = f"{run['server']} at {run['offered_rate']:.3g}/s:"
    notes = [f"{name} {each['count']} x {error}: {each['example']}" for error, each in run["failures"].items()]
    if run["other_prompt_lengths"]:
        notes.append(f"{name} {run['other_prompt_lengths']} prompts had another length than planned")
    if run["other_output_lengths"]:
        notes.append(f"{name} {run['other_output_lengths']} replies had another length than planned")
    if run["is_late"]:
        notes.append(
            f"{name} WARNING: requests were sent late, p99 {run['lag_s']['p99']:.3f} s; the latencies include that. "
            "Run the generator on another machine or lower the rate"
        )
    return notes


# -- figure -------------------------------------------------------------------------------------------------------

PANELS: tuple[tuple[str, str, tuple[tuple[str, str, Callable[[Run], float | None]], ...]], ...] = (
    ("Normalized latency", "seconds / output token", (("", "-", lambda run: run["normalized_latency_s"]),)),
    (
        "Time to first token",
        "seconds",
        (("p50", "-", lambda run: run["ttft_s"].get("p50")), ("p99", "--", lambda run: run["ttft_s"].get("p99"))),
    ),
    (
        "Inter-token latency",
        "seconds",
        (("p50", "-", lambda run: run["itl_s"].get("p50")), ("p99", "--", lambda run: run["itl_s"].get("p99"))),
    ),
    (
        "Completed requests",
        "requests / s",
        (("all", "-", lambda run: run["completed_rate"]), ("within limits", "--", lambda run: run["goodput"])),
    ),
)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs of JSON files. Raises: ValueError for a file without runs."""
    runs: list[Run] = []
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("kind") != "open-loop" or not document.get("runs"):
            raise ValueError(f"{path}: contains no runs of an open-loop load test")
        runs += document["runs"]
    return runs


def median_curve(runs: Sequence[Run], value: Callable[[Run], float | None]) -> list[tuple[float, float]]:
    """Return (rate, median of the value) for each planned rate, ascending. Repeated runs of a rate are one point."""
    values: dict[float, list[float]] = defaultdict(list)
    for run in runs:
        if (found := value(run)) is not None:
            values[run["rate"]].append(found)
    return [(rate, statistics.median(values[rate])) for rate in sorted(values)]


def plot(runs: Sequence[Run], path: Path, title: str = "") -> list[Path]:
    """Draw all servers of the runs in one figure; write it as SVG and as PNG, and return the two files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib import ticker

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title or "Open-loop load")
    servers = list(dict.fromkeys(run["server"] for run in runs))
    for axis, (name, unit, lines) in zip(axes.flat, PANELS, strict=True):
        for index, server in enumerate(servers):
            for label, style, value in lines:
                curve = median_curve([run for run in runs if run["server"] == server], value)
                if curve:
                    legend = f"{server} {label}".strip()
                    axis.plot(*zip(*curve, strict=True), style, color=f"C{index}", marker="o", ms=4, label=legend)
        axis.set(title=name, xlabel="request rate (requests / s)", ylabel=unit, xlim=(0, None))
        if name == "Completed requests":
            top = max(run["rate"] for run in runs)
            axis.plot((0, top), (0, top), ":", color="gray", label="offered")
            axis.set_ylim(0, None)
        else:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 5)))
            axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [path.with_suffix(".svg"), path.with_suffix(".png")]
    for each in paths:
        figure.savefig(each, dpi=110)
    plt.close(figure)
    return paths
