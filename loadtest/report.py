"""Figures, JSON and plot of a run. Percentiles are over all turns (TTFT, TPOT) or all gaps (ITL)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.client import Turn
from loadtest.scenario import Scenario

PERCENTILES = (50, 90, 99)


def _spread_ms(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    points = np.percentile(np.asarray(values) * 1e3, PERCENTILES)
    return {f"p{p}": round(float(v), 2) for p, v in zip(PERCENTILES, points, strict=True)}


def summarise(turns: list[Turn], wall_s: float) -> dict[str, Any]:
    """What the run showed; times in milliseconds, shares as fractions of prompt tokens."""
    good = [turn for turn in turns if turn.error is None]
    prompt = sum(turn.prompt_tokens for turn in good)
    output = sum(turn.completion_tokens for turn in good)
    later = [turn for turn in good if turn.turn > 0]
    return {
        "turns": len(turns),
        "failed": len(turns) - len(good),
        "errors": sorted({turn.error for turn in turns if turn.error is not None})[:5],
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(good) / wall_s, 2) if wall_s else 0.0,
        "output_tokens_per_s": round(output / wall_s, 1) if wall_s else 0.0,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_share": _share(good),
        "cached_share_after_first_turn": _share(later),
        "ttft_ms": _spread_ms([turn.ttft_s for turn in good if turn.ttft_s is not None]),
        "ttft_first_turn_ms": _spread_ms([t.ttft_s for t in good if t.turn == 0 and t.ttft_s is not None]),
        "ttft_later_turns_ms": _spread_ms([t.ttft_s for t in later if t.ttft_s is not None]),
        "itl_ms": _spread_ms([gap for turn in good for gap in turn.gaps_s]),
        "tpot_ms": _spread_ms([turn.tpot_s for turn in good if turn.tpot_s is not None]),
    }


def _share(turns: list[Turn]) -> float:
    prompt = sum(turn.prompt_tokens for turn in turns)
    return round(sum(turn.cached_tokens for turn in turns) / prompt, 4) if prompt else 0.0


def write_json(path: Path, scenario: Scenario, url: str, summary: dict[str, Any], turns: list[Turn]) -> None:
    """Everything a later comparison needs: what was asked, the summary and each turn (without its text)."""
    rows = []
    for turn in turns:
        row = asdict(turn)
        del row["text"]
        rows.append(row)
    document = {"scenario": asdict(scenario), "url": url, "summary": summary, "turns": rows}
    path.write_text(json.dumps(document, indent=1))


def plot(path: Path, turns: list[Turn], summary: dict[str, Any]) -> None:
    """Four panels: TTFT over time, TTFT by turn, inter-token latency, share of the prompt served from cache."""
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
    axes[1, 1].bar(numbers, [_share(group) for group in by_turn])
    axes[1, 1].set(xlabel="turn", ylabel="share", ylim=(0, 1), title="Prompt tokens from cache")
    figure.savefig(path, dpi=110)
    plt.close(figure)
