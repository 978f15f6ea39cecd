"""Every stage of `gpu_check.py` at sizes that say nothing, and what becomes of a stage that hangs, dies or fails."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.check import ceilings, decode, model, offline, prefill, read_kernel, sampling, small, stages, timing, tune
from bench.check.context import Context
from bench.check.figures import Figure, above_floor, compared, from_json, rate, table
from bench.check.goals import PEER, across_stages, all_figures, in_table
from bench.check.machine import ROOT, describe
from bench.check.stages import Outcome, Stage, read_sheet, run_apart
from bench.check.workload import PAGE, equal_rows, tree_rows, unshared

from chatcache.model.loading.loader import load_model
from chatcache.model.runner import Ahead


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("cpu", "tiny", tmp_path, tmp_path / "sheet.jsonl")


def told(context: Context) -> list[dict[str, Any]]:
    return [json.loads(line) for line in context.sheet.read_text().splitlines()]


@pytest.mark.parametrize("stage", [ceilings, decode, prefill, sampling, small], ids=lambda module: module.__name__)
def test_kernel_stages_run(stage: Any, context: Context) -> None:
    stage.run(context)
    assert context.num_failures == 0, told(context)
    figures = [from_json(entry["figure"]) for entry in told(context) if "figure" in entry]
    assert len(figures) >= 6 and all(figure.value > 0 for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures)


@pytest.mark.parametrize("stage", [decode, prefill, small], ids=lambda module: module.__name__)
def test_kernel_stages_run_on_triton(
    stage: Any, context: Context, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that a GPU would get, once: interpreted kernels are too slow to be timed."""

    def once(work: timing.Work, num_inputs: int, device: str, **limits: float) -> timing.Timing:
        with torch.inference_mode():
            work(num_inputs - 1)
        return timing.Timing(1e-3, 1e-3, 1e-3)

    for module in {stage, ceilings, decode}:
        monkeypatch.setattr(module, "measure", once)
    monkeypatch.setattr(stage, "choose_kernels", lambda device: importlib.import_module("chatcache_kernels.triton"))
    context.device = triton_device
    stage.run(context)
    assert context.num_failures == 0, told(context)
    assert sum("figure" in entry for entry in told(context)) >= 6


def test_configurations_are_ranked(context: Context, triton_device: str) -> None:
    context.device = triton_device
    tune.run(context)
    assert context.num_failures == 0, told(context)
    notes = {entry["note"]: entry["value"] for entry in told(context) if "note" in entry}
    ranked = notes["tune (16, 16)"]["ranked"]
    assert len(ranked) == 3 and ranked[0]["worst ratio"] == 1.0 and notes["tune merge"]


def test_the_reading_kernel_reads_everything(triton_device: str) -> None:
    source = torch.randn(3 * read_kernel.BLOCK, device=triton_device)
    out = torch.full((2,), float("nan"), device=triton_device)
    read_kernel.read_all(source, out)
    blocks = source.view(3, -1).sum(1)
    torch.testing.assert_close(out, torch.stack((blocks[0] + blocks[2], blocks[1])), atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("stage", [model, offline], ids=lambda module: module.__name__)
@pytest.mark.parametrize("ahead", [None, Ahead((1, 4))], ids=["in turn", "ahead"])
def test_engine_stages_run(stage: Any, ahead: Ahead | None, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU, and as on a GPU: steps in static buffers, launched before the one before is over."""
    monkeypatch.setattr(model, "load_model", partial(load_model, ahead=ahead))
    stage.run(context, "tiny")
    assert context.num_failures == 0, told(context)
    names = [entry["figure"]["name"] for entry in told(context) if "figure" in entry]
    assert len(names) >= 5
    assert any("one by one over ahead" in name for name in names) == (ahead is not None)


def test_the_queue_is_the_one_others_are_measured_with() -> None:
    queue = offline.make_queue(256)
    assert (sum(map(len, queue.prompts)), queue.num_output) == (142_827, 133_966)
    assert queue.shorter(4).num_output == sum(length // 4 for length in queue.lengths)


def test_trees_share_what_they_say() -> None:
    rows = tree_rows([(1, 32), (2, 48), (3, 20)])
    assert rows.tables.shape == (6, 7) and rows.num_unique == 32 + 2 * 48 + 6 * 20 and rows.num_attended == 6 * 100
    assert [len(set(rows.tables[:, index])) for index in range(7)] == [1, 1, 2, 2, 2, 6, 6]
    assert 0 not in rows.tables and len(set(rows.tables.ravel())) == 2 + 6 + 12 == rows.num_pages - 1
    private = unshared(rows)
    assert len(set(private.tables.ravel())) == private.tables.size and 0 not in private.tables
    plain = equal_rows(2, PAGE + 1, 1, shuffled=False)
    assert plain.tables.tolist() == [[1, 2], [3, 4]] and plain.start.tolist() == [PAGE, PAGE]


def test_figures_know_whether_their_goal_is_met() -> None:
    assert rate("a", 90.0, "GB/s", 100.0, ">= 0.90").met is True
    assert compared("b", 1.04, "us", 1.0, "<= 1.03").met is False
    floor = above_floor("c", 0.004, 0.002, ">= 0.40")
    assert (floor.value, floor.limit, floor.ratio, floor.met) == (4.0, 2.0, 0.5, True)
    plain = Figure("d", 1.0, "s")
    assert plain.met is None and from_json(json.loads(json.dumps(floor.as_json()))) == floor
    rows = table(in_table([rate("x", 1.0, "s", 10.0, ">= 0.90"), floor, plain])).splitlines()
    assert len(rows) == 3 and rows[1].endswith("met") and rows[2].endswith("MISSED")


def test_the_peer_is_compared_on_the_slice_that_both_ran() -> None:
    ours = Figure(f"m: {offline.PEER_SLICE}", 300.0, "tokens/s")
    theirs = Figure(f"m: {PEER}, {offline.PEER_SLICE}", 90.0, "tokens/s")
    outcomes = [Outcome("one", "ok", figures=[ours.as_json()]), Outcome("two", "ok", figures=[theirs.as_json()])]
    (found,) = across_stages(all_figures(outcomes))
    assert found.ratio == pytest.approx(10 / 3) and found.met
    assert not across_stages([theirs])


def test_a_part_that_fails_is_noted_and_the_next_one_runs(context: Context) -> None:
    def broken() -> None:
        raise ValueError("no such kernel")

    context.measure("broken", broken)
    context.measure("whole", lambda: context.add(Figure("whole", 1.0, "s")))
    context.deadline_s = 0.0
    context.measure("late", broken, needs_s=1)
    entries = told(context)
    assert entries[0] == {"failure": "broken", "reason": "ValueError: no such kernel"}
    assert entries[1]["figure"]["name"] == "whole" and entries[2]["left_out"] == "late"


def test_a_stage_that_hangs_or_dies_leaves_what_it_had(tmp_path: Path) -> None:
    hangs = run_apart(Stage("ceilings", "ceilings", 0.0), "tiny", tmp_path, 0.2, grace_s=0.2)
    assert hangs.ended == "killed" and "killed at its limit" in hangs.failures[0]["reason"]
    dies = run_apart(Stage("no such stage", "suite", 0.0), "tiny", tmp_path, 60)
    assert dies.ended == "failed" and dies.failures[0]["reason"] == "its process ended with 1"
    stage = Stage("cut short", "suite", 0.0)
    figure = json.dumps({"figure": Figure("kept", 1.0, "s").as_json()})
    stages.sheet_of(stage, tmp_path).write_text(f"{figure}\n{figure[:20]}")
    assert [fields["name"] for fields in read_sheet(stage, tmp_path).figures] == ["kept"]


def test_gpu_check_leaves_the_report_and_the_log_of_tests_only(tmp_path: Path) -> None:
    """A machine that runs it may hand back few files."""
    script = ROOT / "kernels" / "bench" / "gpu_check.py"
    command = [sys.executable, str(script), "--quick", "--only", "tests", "--out", str(tmp_path / "out")]
    run = subprocess.run(command, env=stages.environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu_check.json", "tests.log"]
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert [stage["ended"] for stage in report["stages"]] == ["ok"] and report["stages"][0]["figures"]


def test_the_machine_is_described() -> None:
    facts = describe()
    assert facts["versions"]["torch"] and facts["date"] and facts["chip"]
    assert {stage.module for size in stages.STAGES.values() for stage in size} >= {"suite", "peer", "model"}
    assert sum(stage.limit_s for stage in stages.STAGES["full"][:7]) <= stages.TOTAL_S
