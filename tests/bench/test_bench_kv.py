"""`chatcache bench kv` says what it should; how fast anything is, no test says."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from chatcache.bench import kv as kv_bench
from chatcache.bench.kv import GOAL, KVLoad, run_kv_bench
from chatcache.bench.report import KVReport, print_kv_report, to_json
from chatcache.cli import app

SMALL = KVLoad(page_size=4, num_pages=32, fork_tokens=(16, 64), branches=(3, 256), num_rounds=2, repeats=2)


def test_every_figure_stands_beside_its_goal() -> None:
    said: list[str] = []
    report = run_kv_bench(SMALL, said.append)
    assert (report.bench, report.page_size, report.repeats) == ("kv", 4, 2)
    assert said == ["pages", "3 branches", "256 branches"]
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
        assert (figure.ratio, figure.limit_name) == (
            (figure.value / figure.limit, GOAL) if figure.limit else (None, "")
        )
    assert msgspec.json.decode(to_json(report), type=KVReport) == report
    console = Console(width=160, record=True, file=io.StringIO())
    print_kv_report(report, console)
    text = console.export_text()
    assert all(figure.name in text for figure in report.figures) and "goal" in text


@pytest.mark.parametrize("title", ["3 branches", "3 branches, pages in step"])
def test_a_step_is_plan_and_commit_and_its_longest_is_told(title: str) -> None:
    figures = {figure.name: figure.value for figure in run_kv_bench(SMALL, lambda _: None).figures}
    # medians of two repeats are means, so they add up
    parts = {part: figures[f"{title}: {part}"] for part in ("step", "longest step", "plan", "commit", "apply")}
    assert parts["step"] == pytest.approx(parts["plan"] + parts["commit"], rel=1e-6)
    assert parts["longest step"] >= parts["step"]


def test_the_command_loads_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(KVLoad, num_pages=32, fork_tokens=(16,), branches=(3,), num_rounds=1)
    monkeypatch.setattr(kv_bench, "KVLoad", small)
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["bench", "kv", "--repeats", "1", "--json", "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = msgspec.json.decode(result.stdout, type=KVReport)
    assert json.loads(out.read_text()) == json.loads(result.stdout)
    assert report.page_size == 16 and "fork n=8 at 24 tokens" in [figure.name for figure in report.figures]
    table = CliRunner().invoke(app, ["bench", "kv", "--repeats", "1"])
    assert table.exit_code == 0 and "3 branches, pages in step: apply" in table.stdout
