"""Measured figures next to their limits and goals, as text tables and JSON.

Needs the standard library and numpy only, because `kernels/bench` and `loadtest` run where the packages of the server
are not installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PERCENTILES = (50, 90, 99)
PACKAGES = ("torch", "triton", "transformers", "numba", "numpy", "msgspec")
UNITS_OF_TIME = {"s": 1.0, "ms": 1e3, "us": 1e6}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value, the value it is compared with, and the goal of that comparison.

    `limit` has the unit of `value`, and `limit_name` describes it. `goal` is a bound on `ratio`, such as ">= 0.90" or
    "<= 1.03". `spread` is the lowest and the highest value of the repetitions.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    limit_name: str = ""
    ratio: float | None = None
    goal: str = ""
    spread: tuple[float, float] | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if not self.goal or self.ratio is None:
            return None
        sign, bound = self.goal.split()
        return self.ratio >= float(bound) if sign == ">=" else self.ratio <= float(bound)

    @property
    def result(self) -> str:
        """Return "met" or "MISSED", and nothing without a goal."""
        return {None: "", True: "met", False: "MISSED"}[self.met]

    def line(self) -> str:
        """Return the figure as one line of text, for output during a run."""
        name, *cells = (cell for cell in _cells(self) if cell)
        return f"{name}: {'  '.join(cells)}"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figure:
        """Read what `dataclasses.asdict` returned; fields that older files lack have their defaults."""
        known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        return cls(**{**known, "spread": tuple(known["spread"]) if known.get("spread") else None})


def compare(name: str, value: float, unit: str, limit: float, limit_name: str = "", goal: str = "") -> Figure:
    """Return a value next to a limit or another value of the same run; ratio = value / limit."""
    return Figure(name, value, unit, limit, limit_name, value / limit, goal)


def compare_to_floor(name: str, seconds: float, floor_s: float, goal: str = "", unit: str = "ms") -> Figure:
    """Return a time next to the shortest possible time; ratio = floor / time, 1 at best."""
    scale = UNITS_OF_TIME[unit]
    return Figure(name, seconds * scale, unit, floor_s * scale, "floor", floor_s / seconds, goal)


# -- text ---------------------------------------------------------------------------------------------------------


def format_number(value: float) -> str:
    """Return "12,345", "12.35" or "0.001235": four significant digits or all integer digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_table(headers: Sequence[str], rows: Iterable[Sequence[str]], alignment: str = "") -> str:
    """Return text columns. `alignment` has "<" or ">" per column; default: only the first left."""
    cells = [headers, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = alignment or "<" + ">" * (len(headers) - 1)
    lines = ("  ".join(map(format, row, map("{}{}".format, sides, widths))) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def figure_table(figures: Iterable[Figure]) -> str:
    """Return a row for each figure; columns that would be empty are left out."""
    headers = ("figure", "measured", "compared with", "", "ratio", "goal", "")
    rows = [_cells(figure) for figure in figures]
    used = [index for index in range(len(headers)) if index < 2 or any(row[index] for row in rows)]
    selected = [[row[index] for index in used] for row in (headers, *rows)]
    return format_table(selected[0], selected[1:], "".join("<>><><<"[index] for index in used))


def _cells(figure: Figure) -> tuple[str, ...]:
    value = f"{format_number(figure.value)} {figure.unit}"
    limit = "" if figure.limit is None else f"{format_number(figure.limit)} {figure.unit}"
    ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
    return figure.name, value, limit, figure.limit_name, ratio, figure.goal, figure.result


# -- data ---------------------------------------------------------------------------------------------------------


def percentiles(
    values: Sequence[float], points: Sequence[float] = PERCENTILES, *, scale: float = 1.0, digits: int = 2
) -> dict[str, float]:
    """Return {"p50": ..., "p90": ...} of the values times `scale`; {} without values."""
    if not len(values):
        return {}
    found = np.percentile(np.asarray(values, np.float64) * scale, points)
    return {f"p{point:g}": round(float(value), digits) for point, value in zip(points, found, strict=True)}


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file, and the folder it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def utc_timestamp() -> str:
    """Return the current time as "2026-11-22T09:30:00Z"."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# -- the machine --------------------------------------------------------------------------------------------------


def describe_machine() -> dict[str, Any]:
    """Return the date, the processor or GPU, package versions and the revision of the source."""
    import torch

    on_gpu = torch.cuda.is_available()
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "kind": "cuda" if on_gpu else "cpu",
        "chip": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "cpu_cores": os.cpu_count(),
        "python": platform.python_version(),
        "revision": _git_revision(),
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "cuda": torch.version.cuda,
        }
    return facts | {"versions": {name: _package_version(name) for name in PACKAGES}}


def cpu_name() -> str:
    """Return the name of the processor and of its architecture: virtual machines may not name the model."""
    from llvmlite.binding import get_host_cpu_name

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor() or platform.machine())} ({get_host_cpu_name()})"


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Return the commit, followed by "+" if files differ from it; None outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
