"""`chatcache bench kv`: its figures and goals; speeds are not tested."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from chatcache.bench import kv_bench
from chatcache.bench.decode_bench import MODES, measure_decoding
from chatcache.bench.kv_bench import KVLoad, KVReport, run_kv_bench
from chatcache.cli.main import app

SMALL = KVLoad(
    page_size=4, num_pages=32, fork_tokens=(16, 64), branches=(3, 256), decoding_branches=(), num_rounds=2, repeats=2
)


def test_kv_bench_reports_figures_next_to_goals() -> None:
    progress: list[str] = []
    report = run_kv_bench(SMALL, progress.append)
    assert (report.bench, report.page_size, report.repeats) == ("kv", 4, 2)
    assert progress == ["pages", "3 branches", "256 branches"]
    goals = {figure.name: figure.limit for figure in report.figures if figure.limit is not None}
    assert goals == {
        "page hash": 450.0,
        "allocate + free, per page": 120.0,
        "fork n=8 at 18 tokens": 5.0,
        "fork n=8 at 66 tokens": 5.0,
        "256 branches: step": 0.1,
        "256 branches, pages in step: step": 0.1,
    }
    for figure in report.figures:
        assert figure.value > 0
        expected = (figure.value / figure.limit, "goal", "<= 1.00") if figure.limit else (None, "", "")
        assert (figure.ratio, figure.limit_name, figure.goal) == expected
    assert msgspec.json.decode(json.dumps(asdict(report)), type=KVReport) == report
    assert all(figure.name in report.text() for figure in report.figures) and "goal" in report.text()


@pytest.mark.parametrize("title", ["3 branches", "3 branches, pages in step"])
def test_step_figure_is_plan_plus_commit(title: str) -> None:
    figures = {figure.name: figure.value for figure in run_kv_bench(SMALL).figures}
    # medians of two repeats are means, so they add up
    parts = {part: figures[f"{title}: {part}"] for part in ("step", "longest step", "plan", "commit", "apply")}
    assert parts["step"] == pytest.approx(parts["plan"] + parts["commit"], rel=1e-6)
    assert parts["longest step"] >= parts["step"]


def test_bench_kv_command_loads_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(KVLoad, num_pages=32, fork_tokens=(16,), branches=(3,), decoding_branches=(1,), num_rounds=1)
    monkeypatch.setattr(kv_bench, "KVLoad", small)
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["bench", "kv", "--repeats", "1", "--json", "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = msgspec.json.decode(result.stdout, type=KVReport)
    assert json.loads(out.read_text()) == json.loads(result.stdout)
    assert report.page_size == 16 and "fork n=8 at 24 tokens" in [figure.name for figure in report.figures]
    table = CliRunner().invoke(app, ["bench", "kv", "--repeats", "1"])
    assert table.exit_code == 0 and "3 branches, pages in step: apply" in table.stdout


def test_decode_bench_reports_every_mode_next_to_its_goal() -> None:
    figures = measure_decoding(64, num_steps=1, repeats=1)
    assert [figure.name for figure in figures] == [f"{mode}, 64 branches: branch-token" for mode in MODES]
    assert all(figure.value > 0 and figure.limit == 5.0 and figure.goal == "<= 1.00" for figure in figures)


def test_decode_step_of_one_branch_makes_at_most_40_python_calls() -> None:
    calls = {figure.name: figure for figure in measure_decoding(1, num_steps=3, repeats=1)}[
        "Python calls of a step, 1 branch"
    ]
    assert 10 < calls.value <= 40.0 and calls.limit == 40.0
