"""Summary, JSON and plot of a run of chats.

Percentiles are over turns (TTFT, TPOT) or over gaps (ITL).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chatcache.bench.report import PERCENTILES, format_table, percentiles, write_json
from loadtest.chats import Scenario
from loadtest.client import Turn

LATENCIES = {
    "TTFT ms": "ttft_ms",
    "  first turn": "ttft_first_turn_ms",
    "  later turns": "ttft_later_turns_ms",
    "ITL ms": "itl_ms",
    "TPOT ms": "tpot_ms",
}


def summarise(turns: Sequence[Turn], wall_s: float) -> dict[str, Any]:
    """Return a summary: latencies in milliseconds, shares as fractions of prompt tokens."""
    good = [turn for turn in turns if turn.error is None]
    first, later = [turn for turn in good if turn.turn == 0], [turn for turn in good if turn.turn > 0]
    num_prompt_tokens = sum(turn.prompt_tokens for turn in good)
    num_output_tokens = sum(turn.completion_tokens for turn in good)
    return {
        "turns": len(turns),
        "failed": len(turns) - len(good),
        "errors": sorted({turn.error for turn in turns if turn.error is not None})[:5],
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(good) / wall_s, 2) if wall_s else 0.0,
        "output_tokens_per_s": round(num_output_tokens / wall_s, 1) if wall_s else 0.0,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        "cached_share": _cached_share(good),
        "cached_share_after_first_turn": _cached_share(later),
        "ttft_ms": _ttft_ms(good),
        "ttft_first_turn_ms": _ttft_ms(first),
        "ttft_later_turns_ms": _ttft_ms(later),
        "itl_ms": percentiles([gap for turn in good for gap in turn.gaps_s], scale=1e3),
        "tpot_ms": percentiles([turn.tpot_s for turn in good if turn.tpot_s is not None], scale=1e3),
    }


def _ttft_ms(turns: Sequence[Turn]) -> dict[str, float]:
    return percentiles([turn.ttft_s for turn in turns if turn.ttft_s is not None], scale=1e3)


def _cached_share(turns: Sequence[Turn]) -> float:
    num_prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    return round(sum(turn.cached_tokens for turn in turns) / num_prompt_tokens, 4) if num_prompt_tokens else 0.0


def summary_text(summary: dict[str, Any]) -> str:
    """Return the latencies as a table, then throughput, cache hits and errors."""
    points = [f"p{point}" for point in PERCENTILES]
    rows = [
        (name, *(f"{summary[key].get(point, float('nan')):.1f}" for point in points)) for name, key in LATENCIES.items()
    ]
    return "\n".join(
        (
            format_table(("", *points), rows),
            f"{summary['turns']} turns ({summary['failed']} failed) in {summary['wall_s']:.1f} s: "
            f"{summary['requests_per_s']} requests/s, {summary['output_tokens_per_s']} output tokens/s, "
            f"{summary['cached_share']:.1%} of {summary['prompt_tokens']} prompt tokens from cache "
            f"({summary['cached_share_after_first_turn']:.1%} after the first turn)",
            *summary["errors"],
        )
    )


def write_report(path: Path, scenario: Scenario, url: str, summary: dict[str, Any], turns: Sequence[Turn]) -> None:
    """Write the scenario, the summary and each turn without its text as JSON."""
    rows = [{name: value for name, value in asdict(turn).items() if name != "text"} for turn in turns]
    write_json(path, {"scenario": asdict(scenario), "url": url, "summary": summary, "turns": rows})


def plot(path: Path, turns: Sequence[Turn], summary: dict[str, Any]) -> None:
    """Draw TTFT over time and by turn, inter-token latency, and the cached share of prompts."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    good = [turn for turn in turns if turn.error is None and turn.ttft_s is not None]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle(
        f"{summary['turns']} turns, {summary['failed']} failed, {summary['output_tokens_per_s']} tokens/s, "
        f"{summary['cached_share']:.0%} of prompt tokens from cache"
    )
    numbers = sorted({turn.turn for turn in good})
    by_turn = [[turn for turn in good if turn.turn == n] for n in numbers]

    axes[0, 0].scatter([t.started_s for t in good], [t.ttft_s * 1e3 for t in good if t.ttft_s], s=12)
    axes[0, 0].set(xlabel="sent at (s)", ylabel="TTFT (ms)", title="Time to first token")
    if by_turn:
        axes[0, 1].boxplot([[t.ttft_s * 1e3 for t in group if t.ttft_s] for group in by_turn], positions=numbers)
    axes[0, 1].set(xlabel="turn", ylabel="TTFT (ms)", title="Time to first token by turn")
    gaps_ms = [gap * 1e3 for turn in good for gap in turn.gaps_s]
    if gaps_ms:
        axes[1, 0].hist(gaps_ms, bins=60)
    axes[1, 0].set(xlabel="gap (ms)", ylabel="count", title="Inter-token latency")
    axes[1, 1].bar(numbers, [_cached_share(group) for group in by_turn])
    axes[1, 1].set(xlabel="turn", ylabel="share", ylim=(0, 1), title="Prompt tokens from cache")
    figure.savefig(path, dpi=110)
    plt.close(figure)
