"""Figures, their tables and JSON; the module imports no package of the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from chatcache.bench.report import (
    Figure,
    compare,
    compare_to_floor,
    cpu_name,
    describe_machine,
    figure_table,
    format_number,
    format_table,
    percentiles,
    write_json,
)

RESULTS = Path(__file__).resolve().parents[2] / "loadtest" / "results"


def test_compare_returns_value_over_limit() -> None:
    assert compare("x", 5.0, "tokens/s", 10.0, "y").ratio == 0.5
    assert compare("x", 3.0, "ms", 2.0, "y").ratio == 1.5


def test_figure_met_follows_goal_in_both_directions() -> None:
    assert compare("a", 90.0, "GB/s", 100.0, goal=">= 0.90").met is True
    assert compare("b", 1.04, "us", 1.0, goal="<= 1.03").met is False
    assert Figure("d", 1.0, "s").met is None and compare("e", 1.0, "s", 2.0).met is None


def test_compare_to_floor_is_one_at_best() -> None:
    floor = compare_to_floor("c", 0.004, 0.002, ">= 0.40")
    assert (floor.value, floor.unit, floor.limit, floor.ratio, floor.met) == (4.0, "ms", 2.0, 0.5, True)
    assert compare_to_floor("c", 0.004, 0.002, unit="us").value == 4000.0


def test_figure_json_round_trip_keeps_all_fields() -> None:
    figure = Figure("a", 1.5, "s", 3.0, "limit", 0.5, ">= 0.40", (1.0, 2.0))
    assert Figure.from_json(json.loads(json.dumps(asdict(figure)))) == figure


@pytest.mark.parametrize("path", sorted(RESULTS.glob("bench-*.json")), ids=lambda path: path.stem)
def test_figures_of_committed_results_are_read(path: Path) -> None:
    figures = [Figure.from_json(data) for data in json.loads(path.read_text())["figures"]]
    assert figures and all(figure.value > 0 and figure.name in figure.line() for figure in figures)


def test_figure_table_leaves_out_empty_columns() -> None:
    missed = compare("wide name", 1.0, "s", 10.0, goal=">= 0.90")
    rows = figure_table([missed, Figure("b", 12345.0, "us")]).splitlines()
    assert rows[0].split() == ["figure", "measured", "compared", "with", "ratio", "goal"]
    assert rows[1].endswith("MISSED") and "12,345 us" in rows[2] and len(rows) == 3
    assert figure_table([Figure("b", 1.0, "us")]).splitlines()[0].split() == ["figure", "measured"]


def test_format_table_aligns_columns() -> None:
    assert format_table(("", "n"), [("a", "1"), ("bcd", "100")]) == "       n\na      1\nbcd  100"
    assert format_table(("x", "y"), [("1", "a")], "><") == "x  y\n1  a"


def test_format_number_keeps_four_digits() -> None:
    assert [format_number(value) for value in (12345.6, 12.3456, 0.00123456)] == ["12,346", "12.35", "0.001235"]


def test_percentiles_scales_and_rounds() -> None:
    assert percentiles([0.1, 0.2, 0.3], (50, 99.9), scale=1e3, digits=1) == {"p50": 200.0, "p99.9": 299.8}
    assert percentiles([]) == {}


def test_write_json_makes_the_folder(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == {"x": 1}


def test_describe_machine_names_versions_and_chip() -> None:
    facts = describe_machine()
    assert facts["versions"]["torch"] and facts["date"] and facts["chip"]
    assert re.fullmatch(r".+ \(\S+\)", cpu_name())


def test_report_imports_standard_library_and_numpy_only() -> None:
    """The load test and the GPU check import it where the packages of the server are missing."""
    script = "import sys, chatcache.bench.report; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split()) - set(sys.stdlib_module_names)
    assert not loaded & {"torch", "rich", "msgspec", "starlette", "httpx", "matplotlib", "typer"}
    assert {"numpy", "chatcache"} <= loaded
