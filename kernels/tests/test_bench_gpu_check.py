"""`gpu_check.py`: every stage at tiny sizes, and stages that hang, end early or fail."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench.check import (
    attention,
    fp8,
    layers,
    limits,
    model,
    offline,
    planning,
    read_kernel,
    sampling,
    small_kernels,
    stages,
    studies,
    tune,
)
from bench.check.context import StageContext
from bench.check.stages import (
    PEER,
    Outcome,
    Stage,
    compare_stages,
    figures_of,
    read_results,
    run_apart,
    select_for_table,
)
from bench.check.workload import PAGE, equal_rows, tree_rows, unshared

from chatcache.bench import device as device_module
from chatcache.bench.device import Timing, Work
from chatcache.bench.report import ROOT, Figure, compare
from chatcache.model.loading.loader import load_model
from chatcache.model.runner import AsyncLaunch
from tests.gpu import test_runner as gpu_runner_tests

pytestmark = pytest.mark.slow

KERNEL_STAGES: list[Any] = [
    limits.run,
    attention.run_decode,
    attention.run_prefill,
    pytest.param(small_kernels.run, marks=pytest.mark.requires_bf16_products),
    sampling.run,
    layers.run,
    planning.run,
]


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    monkeypatch.setattr(device_module, "BUDGET_S", 0.02)
    return StageContext("cpu", "tiny", tmp_path, tmp_path / "results.jsonl")


def entries_of(context: StageContext) -> list[dict[str, Any]]:
    return [json.loads(line) for line in context.results.read_text().splitlines()]


@pytest.mark.parametrize("run", KERNEL_STAGES, ids=lambda run: f"{run.__module__}.{run.__name__}")
def test_kernel_stage_measures_figures(run: Callable[[StageContext], None], context: StageContext) -> None:
    run(context)
    assert context.num_failures == 0, entries_of(context)
    figures = [Figure.from_json(entry["figure"]) for entry in entries_of(context) if "figure" in entry]
    assert len(figures) >= 6 and all(figure.value > 0 for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (attention, "run_decode"),
        (attention, "run_prefill"),
        (small_kernels, "run"),
        (layers, "run"),
        (fp8, "run"),
    ],
)
@pytest.mark.usefixtures("dot_of_single_rows")
def test_kernel_stage_runs_on_triton(
    module: ModuleType, function: str, context: StageContext, triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make each call of a GPU run once: interpreted kernels are too slow for timing."""

    def call_once(work: Work, num_inputs: int, device: str, **options: float) -> Timing:
        with torch.inference_mode():
            work(num_inputs - 1)
        return Timing(1e-3, 1e-3, 1e-3)

    monkeypatch.setattr(module, "time_work", call_once)
    triton = importlib.import_module("chatcache_kernels.triton")
    monkeypatch.setattr(module, "choose_kernels", lambda device: triton, raising=module is not fp8)
    context.device = triton_device
    getattr(module, function)(context)
    assert context.num_failures == 0, entries_of(context)
    assert sum("figure" in entry for entry in entries_of(context)) >= 6


def test_tune_ranks_configurations(context: StageContext, triton_device: str) -> None:
    context.device = triton_device
    tune.run(context)
    assert context.num_failures == 0, entries_of(context)
    notes = {entry["note"]: entry["value"] for entry in entries_of(context) if "note" in entry}
    ranked = notes["tune (16, 16)"]["ranked"]
    assert len(ranked) >= 4 and ranked[0]["worst ratio"] == 1.0
    assert len(notes["tune split 4/2/16"]["ranked"]) >= 4 and len(notes["tune merge"]["ranked"]) == 2


def test_read_kernel_reads_the_whole_buffer(triton_device: str) -> None:
    source = torch.randn(3 * read_kernel.BLOCK, device=triton_device)
    out = torch.full((2,), float("nan"), device=triton_device)
    read_kernel.read_all(source, out)
    blocks = source.view(3, -1).sum(1)
    torch.testing.assert_close(out, torch.stack((blocks[0] + blocks[2], blocks[1])), atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("stage", [model, offline], ids=lambda module: module.__name__)
@pytest.mark.parametrize(
    "ahead",
    [None, pytest.param(AsyncLaunch((1, 4)), marks=pytest.mark.slow)],
    ids=["synchronous", "asynchronous"],
)
def test_engine_stage_measures_figures(
    stage: Any, ahead: AsyncLaunch | None, context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as on a CPU, and as on a GPU: with static buffers and asynchronous scheduling."""
    monkeypatch.setattr(model, "load_model", partial(load_model, async_launch=ahead))
    stage.run(context, "tiny")
    assert context.num_failures == 0, entries_of(context)
    names = [entry["figure"]["name"] for entry in entries_of(context) if "figure" in entry]
    assert len(names) >= 5
    assert any("synchronous over asynchronous" in name for name in names) == (ahead is not None)


def test_studies_stage_measures_every_part(context: StageContext) -> None:
    studies.run(context, "tiny")
    assert context.num_failures == 0, entries_of(context)
    figures = {entry["figure"]["name"]: entry["figure"]["value"] for entry in entries_of(context) if "figure" in entry}
    for part in ("shuffled pages", "swap", "local user", "iteration level, paged", "users", "held slots"):
        assert any(part in name for name in figures), part
    assert all(value >= 0 for value in figures.values())


def test_make_queue_returns_the_common_workload() -> None:
    queue = offline.make_queue(256)
    assert (sum(map(len, queue.prompts)), queue.num_output) == (142_827, 133_966)
    assert queue.shorter(4).num_output == sum(length // 4 for length in queue.lengths)


def test_tree_rows_share_the_pages_of_inner_levels() -> None:
    rows = tree_rows([(1, 32), (2, 48), (3, 20)])
    assert rows.tables.shape == (6, 7) and rows.num_unique == 32 + 2 * 48 + 6 * 20 and rows.num_attended == 6 * 100
    assert [len(set(rows.tables[:, index])) for index in range(7)] == [1, 1, 2, 2, 2, 6, 6]
    assert 0 not in rows.tables and len(set(rows.tables.ravel())) == 2 + 6 + 12 == rows.num_pages - 1
    private = unshared(rows)
    assert len(set(private.tables.ravel())) == private.tables.size and 0 not in private.tables
    plain = equal_rows(2, PAGE + 1, 1, shuffled=False)
    assert plain.tables.tolist() == [[1, 2], [3, 4]] and plain.start.tolist() == [PAGE, PAGE]


def test_compare_stages_compares_the_peer_on_the_same_work() -> None:
    ours = Figure(f"m: {offline.PEER_WORK}", 300.0, "tokens/s")
    theirs = Figure(f"m: {PEER}, {offline.PEER_WORK}", 90.0, "tokens/s")
    outcomes = [Outcome("one", "ok", figures=[asdict(ours)]), Outcome("two", "ok", figures=[asdict(theirs)])]
    (found,) = compare_stages(figures_of(outcomes))
    assert found.ratio == pytest.approx(10 / 3) and found.met
    assert not compare_stages([theirs])


def test_context_measure_records_failures_and_continues(context: StageContext) -> None:
    def broken() -> None:
        raise ValueError("no such kernel")

    context.measure("broken", broken)
    context.measure("whole", lambda: context.add(Figure("whole", 1.0, "s")))
    context.deadline_s = 0.0
    context.measure("late", broken, needs_s=1)
    entries = entries_of(context)
    assert entries[0] == {"failure": "broken", "reason": "ValueError: no such kernel"}
    assert entries[1]["figure"]["name"] == "whole" and entries[2]["skipped"] == "late"


def test_run_apart_keeps_results_of_killed_and_failed_stages(tmp_path: Path) -> None:
    killed = run_apart(Stage("limits", "limits.run", 0.0), "tiny", tmp_path, 0.2, grace_s=0.2)
    assert killed.status == "killed" and "killed at its limit" in killed.failures[0]["reason"]
    failed = run_apart(Stage("no such stage", "run_tests.run", 0.0), "tiny", tmp_path, 300)
    assert failed.status == "failed" and failed.failures[0]["reason"] == "its process ended with 1"
    stage = Stage("cut short", "run_tests.run", 0.0)
    figure = json.dumps({"figure": asdict(Figure("kept", 1.0, "s"))})
    stages.results_path(stage, tmp_path).write_text(f"{figure}\n{figure[:20]}")
    assert [fields["name"] for fields in read_results(stage, tmp_path).figures] == ["kept"]


def test_dry_run_of_the_gpu_tests_passes_and_leaves_only_the_report_and_their_log(tmp_path: Path) -> None:
    """A machine that runs it may return only a few files."""
    script = ROOT / "kernels" / "bench" / "gpu_check.py"
    command = [sys.executable, str(script), "--dry-run", "--only", "tests", "--out", str(tmp_path / "out")]
    run = subprocess.run(command, env=stages.environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gpu_check.json", "tests.log"]
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert [stage["status"] for stage in report["stages"]] == ["ok"] and report["stages"][0]["figures"]


def test_gpu_check_tune_without_gpu_is_refused(tmp_path: Path) -> None:
    script = ROOT / "kernels" / "bench" / "gpu_check.py"
    environment = {**stages.environment(), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script), "--tune", "--out", str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and "no GPU" in run.stderr


def test_select_for_table_puts_missed_goals_last() -> None:
    plain, limited = Figure("a", 1.0, "s"), compare("b", 1.0, "s", 10.0)
    missed, met = (compare("c", value, "s", 10.0, goal=">= 0.90") for value in (1.0, 9.5))
    assert select_for_table([missed, plain, limited, met]) == [met, missed]
    assert select_for_table([plain, limited]) == [limited]


def test_stages_name_existing_functions_and_fit_the_time() -> None:
    for stage in (*itertools.chain(*stages.STAGES.values()), stages.TUNE):
        module, function = stage.target.split(".")
        assert callable(getattr(importlib.import_module(f"bench.check.{module}"), function))
    assert sum(stage.limit_s for stage in stages.STAGES["full"][:7]) <= stages.TOTAL_S


@pytest.mark.parametrize("name", ["REFUSED", "LOST"])
def test_scripts_of_gpu_tests_import_existing_names(name: str) -> None:
    """They run as text in a process of their own, where neither mypy nor a machine without a GPU reads them."""
    tree = ast.parse(textwrap.dedent(getattr(gpu_runner_tests, name)).format(root="", kernels=""))
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert found
    for node in found:
        module = importlib.import_module(node.module or "")
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import chatcache.bench.device, chatcache.cli.main, chatcache.engine_process.worker, chatcache.factory
import chatcache.model.loading.loader, chatcache.model.sampling.device_sampler, chatcache_kernels.triton
"""


def test_modules_of_the_gpu_path_import_no_numba() -> None:
    """numba refuses to load with a numpy newer than it supports, which must not stop a server on a GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
