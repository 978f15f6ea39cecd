"""Figures, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from chatcache.settings import format_size


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value. `limit` is what the machine would allow in the same unit, `ratio` how much of it was reached.

    For values where less is better the ratio is value over the compared value instead, and `limit_name` says of what.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    limit_name: str = ""
    ratio: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one benchmark. Bandwidth in bytes/s, matmul rate in flop/s."""

    bench: str
    model: str
    num_parameters: int
    weight_bytes: int
    step_bytes: int
    dtype: str
    quantization: str
    device: str
    attention: str
    page_size: int
    read_bytes_per_s: float
    matmul_flops_per_s: float
    buffer_bytes: int
    num_threads: int
    figures: tuple[Figure, ...]


class KVReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `bench kv`. The figures are medians of `repeats`."""

    bench: str
    page_size: int
    repeats: int
    figures: tuple[Figure, ...]


def rate(name: str, per_s: float, limit_per_s: float, limit_name: str, unit: str = "tokens/s") -> Figure:
    """A speed beside its limit."""
    return Figure(
        name=name, value=per_s, unit=unit, limit=limit_per_s, limit_name=limit_name, ratio=per_s / limit_per_s
    )


def compared(name: str, value: float, unit: str, other: float, other_name: str) -> Figure:
    """A value over another of the same run."""
    return Figure(name=name, value=value, unit=unit, limit=other, limit_name=other_name, ratio=value / other)


def to_json(report: Report | KVReport) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def print_report(report: Report, console: Console) -> None:
    """Print the machine's limits, then a row per figure."""
    precision = report.dtype if report.quantization == "none" else f"{report.dtype}, {report.quantization} weights,"
    console.print(
        f"[bold]{report.bench}[/]  {report.model}: {report.num_parameters / 1e6:,.1f} M parameters, {precision} on "
        f"{report.device} ({report.num_threads} threads), {report.attention} attention, pages of {report.page_size}",
        soft_wrap=True,
    )
    console.print(
        f"limits measured now: read {report.read_bytes_per_s / 1e9:.1f} GB/s over {format_size(report.buffer_bytes)}, "
        f"{report.dtype} matmul {report.matmul_flops_per_s / 1e9:,.0f} GFLOP/s",
        soft_wrap=True,
    )
    _print_figures(report.figures, console, "limit or peer")


def print_kv_report(report: KVReport, console: Console) -> None:
    """Print a row per figure."""
    console.print(f"[bold]{report.bench}[/]  pages of {report.page_size}; CPU time, medians of {report.repeats}")
    _print_figures(report.figures, console, "goal")


def _print_figures(figures: Sequence[Figure], console: Console, beside: str) -> None:
    table = Table("figure", "measured", beside, "ratio", "of what", box=None, padding=(0, 2), header_style="dim")
    for column in (1, 2, 3):
        table.columns[column].justify = "right"
    for figure in figures:
        limit = "" if figure.limit is None else f"{_digits(figure.limit)} {figure.unit}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
        table.add_row(figure.name, f"{_digits(figure.value)} {figure.unit}", limit, ratio, figure.limit_name)
    console.print(table)


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
