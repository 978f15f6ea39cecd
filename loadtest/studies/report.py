"""Files of the studies: one JSON document, SVG and PNG per study, and `studies.md`, made of all documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chatcache.bench.report import format_number, utc_timestamp, write_json
from loadtest.lengths import ALPACA, SHAREGPT
from loadtest.studies.cost import FITTED_BASE_S, OPT_13B
from loadtest.studies.results import Panel, Row, Series, StudyResult

TOPICS: dict[str, tuple[str, ...]] = {
    "Batching and the kernel": ("paging_or_scheduling", "lengths_apart", "fig18a", "chunks"),
    "A single user": ("local_user",),
    "Pages": ("fig18b", "fig19", "tails"),
    "The other figures of the paper": ("fig2", "fig12", "fig13", "fig14", "fig15", "fig16", "fig17", "trace"),
}
"""The studies by topic, in the order of the report."""

COLOURS = ("#1f6fb4", "#e07b1a", "#3a9a4b", "#8a5fb0", "#c0392b", "#6b7280")
PAPER = "#111111"

HEADER = """# Studies: the paper's figures and the questions around them

The paper is Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023
([arXiv 2309.06180](https://arxiv.org/abs/2309.06180)). All values are made by `make studies`; see
[the method](#method). Run on: {machine}.
{notes}
"""

METHOD = """## Method

**Simulated** rows run the real engine (admission, queue, scheduler, decoding strategies, page pool) on a virtual clock.
No model runs: a cost model gives the seconds of each step. 981 pages of 16 tokens are the paper's 15.7 K slots of
OPT-13B on an A100 with 40 GB. **Real** rows run models and kernels on the machine named above.

What is not measured but chosen:

- *Two fitted constants.* A step of OPT-13B takes {base:.1f} ms + {row:.2f} ms per row + {context:.2f} us per context
  token + {prompt:.2f} ms per prompt token. {fitted_base:.1f} ms of the base and the time per row were fitted by
  Little's law on the two vLLM bars of Figure 13, so these are no predictions. The other terms follow from data
  sheets: 26 GB of weights at 1.555 TB/s, 819,200 B of keys and values per token at 1.3 TB/s, 26 GFLOP per prompt token
  at 130 TFLOP/s. The larger models have no fit of their own.
- *The Alpaca bar* is sensitive. At 30 requests/s a longer step means a larger batch, and a larger batch a longer step;
  1 % more time per step is about 3 % more requests in the batch. A time per row rounded to 0.2 ms gave 100 requests
  instead of the published 132, and two traces of three minutes differ by 10 %.
- *Assumed spreads.* The paper publishes mean lengths only. Here they are gamma distributions. Their coefficients of
  variation are {sharegpt_prompt} (prompt) and {sharegpt_output} (output) for ShareGPT, chosen so that Figure 2 agrees,
  and {alpaca_prompt} and {alpaca_output} for Alpaca, chosen so that the contiguous bars of Figure 13 and the candidates
  of Figure 15 agree. Requests of 2,048 tokens or more are left out.
- *Assumed beams.* In simulations, log-probabilities of beam candidates are random. How likely the best candidate is was
  chosen so that Figure 15 agrees for Alpaca. Lengths of the questions and
  answers of Figure 16, and rounds and think times of Figure 17, are assumed, too.
- *Contiguous systems* follow the paper's description of Orca: a buddy allocator with chunks of at most 2,048 tokens;
  Max reserves 2,048, Pow2 the prompt and the next power of two of the output, Oracle the true output. They run the same
  scheduler, on `Scheduler(reservation=...)`. Their copies when beams are reordered cost nothing here.
- *Static batches* of FasterTransformer: the paper's 22 times is its highest ratio over three models. For OPT-13B alone
  the ratio is the one in the table, less than half of that.
- *Short traces.* A sustained rate is the highest one at which a trace of limited length, run to its last request, stays
  at 0.5 s per token. Short traces, above all quick ones (20 to 450 s), allow higher rates than an hour would; ratios
  depend less on the length.
- Simulated times contain no host work of this project.

Real rows have choices of their own:

- *Models* have random weights in the shape of a known model, bfloat16. Prompts are random tokens.
- *Queues* have ShareGPT lengths divided by a small number, and a KV memory in which as
  many of the longest requests fit as in the paper. Everything arrives at once. Static batches save the rows of requests
  that have ended, which the paper's FasterTransformer computes to the end of the batch.
- *Repeats* are interleaved: each round runs every variant once, and medians of the rounds are reported.
- *Figure 18a*: the paper compares with FasterTransformer's kernel. Here the same kernel runs over one run of pages and
  over shuffled pages, and torch's `scaled_dot_product_attention` over contiguous tensors.
"""


def save(result: StudyResult, out: Path, run: dict[str, Any]) -> None:
    """Write the JSON document and the drawings of a study. `run`: how it was run."""
    write_json(out / f"{result.name}.json", {"run": run, **asdict(result)})
    draw(result, out / result.name)


def load_all(out: Path, order: Sequence[str]) -> list[tuple[dict[str, Any], StudyResult]]:
    """Return how each study in a folder was run, and its result."""
    found = []
    for path in (out / f"{name}.json" for name in order):
        if path.exists():
            data = json.loads(path.read_text(encoding="utf-8"))
            found.append((data.pop("run"), _result_from_json(data)))
    return found


def _result_from_json(data: dict[str, Any]) -> StudyResult:
    rows = tuple(Row(**{**row, "published": _tuples(row["published"])}) for row in data.pop("rows"))
    panels = []
    for panel in data.pop("panels"):
        series = tuple(Series(**{name: _tuples(value) for name, value in each.items()}) for each in panel["series"])
        fixed = {name: _tuples(value) for name, value in panel.items() if name != "series"}
        panels.append(Panel(**fixed, series=series))
    return StudyResult(rows=rows, panels=tuple(panels), **data)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _method() -> str:
    return METHOD.format(
        base=1e3 * OPT_13B.base, row=1e3 * OPT_13B.per_row, context=1e6 * OPT_13B.per_context_token,
        prompt=1e3 * OPT_13B.per_prompt_token, fitted_base=1e3 * FITTED_BASE_S,
        sharegpt_prompt=SHAREGPT.prompt_cv, sharegpt_output=SHAREGPT.output_cv, alpaca_prompt=ALPACA.prompt_cv,
        alpaca_output=ALPACA.output_cv,
    )  # fmt: skip


def write_markdown(out: Path) -> Path:
    """Write `studies.md` from all documents in the folder."""
    found = load_all(out, [name for names in TOPICS.values() for name in names])
    runs = [run for run, _ in found]
    machines = sorted({run["machine"] for run in runs})
    notes = "\n".join(f"\n**{note}**" for note in dict.fromkeys(note for run in runs for note in run["notes"]))
    parts = [HEADER.format(machine="; ".join(machines), notes=notes)]
    parts += ["| figure | quantity | published | ours | ratio | | command |", "|---|---|--:|--:|--:|---|---|"]
    for run, result in found:
        command = (
            f"`make studies ARGS='--only {result.name}{run.get('options', '')}{' --quick' if run['quick'] else ''}'`"
        )
        parts += [_table_row(row, command) for row in result.rows]
    parts += ["", "Ratio: ours / published; for a published range, the nearest bound, and 1 within it.", ""]
    parts += ["## Answers", ""]
    for topic, names in TOPICS.items():
        answers = [
            f"**{result.question}** {result.answer} ([{result.name}](#{result.name}))"
            for _, result in found if result.name in names
        ]  # fmt: skip
        parts += [f"### {topic}", "", *(line for answer in answers for line in (answer, ""))] if answers else []
    parts += [_method(), "## Figures", ""]
    for run, result in found:
        parts += [
            f"### {result.name}", "", f"{result.title}. Run at {run['at']}, {run['seconds']:.0f} s"
            f"{', quick' if run['quick'] else ''}.", "", f"![{result.title}]({result.name}.png)", "",
        ]  # fmt: skip
    path = out / "studies.md"
    path.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")
    return path


def _table_row(row: Row, command: str) -> str:
    if row.published is None:
        paper = "-"
    elif isinstance(row.published, tuple):
        paper = " - ".join(map(format_number, row.published))
    else:
        paper = format_number(row.published)
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    unit = f" {row.unit}" if row.unit else ""
    cells = (row.figure, row.quantity, paper, f"{format_number(row.ours)}{unit}", ratio, row.kind, command)
    return f"| {' | '.join(cells)} |"


def run_facts(seconds: float, quick: bool, notes: Sequence[str], options: str, machine: str) -> dict[str, Any]:
    """Return how and where a study was run. `options`: of its command."""
    return {
        "at": utc_timestamp(),
        "seconds": round(seconds, 1),
        "quick": quick,
        "options": options,
        "machine": machine,
        "notes": list(notes),
    }


# -- drawings -----------------------------------------------------------------------------------------------------


def draw(result: StudyResult, stem: Path) -> None:
    """Draw the panels of a study side by side into an SVG and a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "chatcache"
    from matplotlib import pyplot as plt

    columns = min(len(result.panels), 3)
    lines = -(-len(result.panels) // columns)
    size = (max(4.6 * columns + 0.8, 8.6), 3.7 * lines + 0.5)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(result.title, fontsize=12)
    for axis in axes.flat[len(result.panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, result.panels, strict=False):
        _draw_panel(axis, panel)
    figure.savefig(stem.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(stem.with_suffix(".png"), dpi=100)
    plt.close(figure)


def _draw_panel(axis: Any, panel: Panel) -> None:
    if panel.kind == "stack":
        _draw_stack(axis, panel)
    elif panel.kind == "bars":
        _draw_bars(axis, panel)
    else:
        _draw_lines(axis, panel)
    if panel.limit is not None:
        axis.axhline(panel.limit[0], color="#888888", linestyle=":", linewidth=1.2, label=panel.limit[1])
    axis.set_title(panel.title, fontsize=10)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    if panel.x_ticks:
        axis.set_xticks(range(1, len(panel.x_ticks) + 1), panel.x_ticks, fontsize=7)
    if panel.log_y:
        axis.set_yscale("log")
    if panel.y_max is not None:
        axis.set_ylim(axis.get_ylim()[0] if panel.log_y else 0, panel.y_max)
    elif panel.y_min is not None:
        axis.set_ylim(panel.y_min, 1.08 * axis.get_ylim()[1])
    if len(panel.series) > 1 or panel.limit is not None:
        axis.legend(fontsize=8, framealpha=0.9)


def _draw_lines(axis: Any, panel: Panel) -> None:
    colours = iter(COLOURS * 2)
    for each in panel.series:
        if each.is_published:
            axis.plot(each.x, each.y, "D", color=PAPER, mfc="none", ms=8, mew=1.6, label=each.label, zorder=5)
        else:
            axis.plot(each.x, each.y, "o-", color=next(colours), markersize=4, linewidth=1.8, label=each.label)
    if panel.log_x:
        axis.set_xscale("log", base=2)
        ticks = sorted({x for each in panel.series for x in each.x})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()


def _draw_bars(axis: Any, panel: Panel) -> None:
    categories = list(dict.fromkeys(x for each in panel.series for x in each.x))
    width, colours = 0.8 / len(panel.series), iter(COLOURS)
    for index, each in enumerate(panel.series):
        places = [categories.index(x) + (index - (len(panel.series) - 1) / 2) * width for x in each.x]
        style = (
            {"color": "white", "edgecolor": PAPER, "hatch": "///"} if each.is_published else {"color": next(colours)}
        )
        values = [value if value is not None else float("nan") for value in each.y]
        bars = axis.bar(places, values, width * 0.94, label=each.label, **style)
        axis.bar_label(bars, [_bar_label(value) for value in values], fontsize=7, padding=1)
    axis.set_xticks(range(len(categories)), [str(each) for each in categories], fontsize=8)
    axis.margins(y=0.14)


def _bar_label(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _draw_stack(axis: Any, panel: Panel) -> None:
    places, bottoms = range(len(panel.series[0].x)), [0.0] * len(panel.series[0].x)
    for each, colour in zip(panel.series, ("#1f6fb4", "#f2b134", "#d9d9d9", "#f4f4f4"), strict=False):
        values = [value or 0.0 for value in each.y]
        bars = axis.bar(
            places, values, 0.8, bottoms, color=colour, edgecolor="#555555", linewidth=0.6, label=each.label
        )
        text = "white" if colour == "#1f6fb4" else "black"
        labels = [f"{value:.1f}" if value >= 3 else "" for value in values]
        axis.bar_label(bars, labels, label_type="center", fontsize=7, color=text)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    axis.set_xticks(list(places), [str(x) for x in panel.series[0].x], fontsize=7)
