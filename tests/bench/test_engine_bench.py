"""`chatcache bench`: reports, the command, and the comparison with transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from chatcache.bench import device as device_module
from chatcache.bench.drivers import SHAPES, write_model
from chatcache.bench.engine_bench import (
    BENCHMARKS,
    EngineReport,
    Load,
    compare_with_peer,
    run_engine_bench,
)
from chatcache.bench.report import Figure
from chatcache.cli.main import app
from chatcache.config import EngineConfig
from chatcache.errors import ModelFolderError

QUICK = EngineConfig(dtype="float32", attention_backend="reference", kv_memory_bytes=2**24)


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "BUDGET_S", 0.01)
    monkeypatch.setattr(device_module, "MATMUL_SIZE", {"cpu": 64})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape")
    write_model(SHAPES["tiny"], path)
    return path


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_engine_bench_reports_figures_next_to_limits(name: str) -> None:
    load = Load(prompt_tokens=32, output_tokens=8, batches=(1, 2), repeats=1)
    report = run_engine_bench(name, QUICK, load, shape="tiny")
    assert (report.bench, report.model, report.dtype, report.attention) == (name, "tiny", "float32", "reference")
    ratios = [figure for figure in report.figures if figure.ratio is not None]
    assert len(ratios) >= 2
    for figure in report.figures:
        assert figure.value > 0 and (figure.limit is None or figure.ratio == pytest.approx(figure.value / figure.limit))
    assert msgspec.json.decode(json.dumps(dataclasses.asdict(report)), type=EngineReport) == report
    assert all(figure.name in report.text() for figure in report.figures) and "GB/s" in report.text()


def test_default_prompts_fit_the_context() -> None:
    config = msgspec.structs.replace(QUICK, max_model_len=256)
    load = Load(prompt_tokens=0, output_tokens=8, batches=(1,), repeats=1)
    for name in ("latency", "mixed"):
        figures = run_engine_bench(name, config, load, shape="tiny").figures
        assert any("248 tokens" in figure.name for figure in figures)


def test_prefix_bench_finds_history_in_the_cache() -> None:
    load = Load(prompt_tokens=64, output_tokens=8, batches=(1,), repeats=1)
    report = run_engine_bench("prefix", QUICK, load, shape="tiny")
    cached = next(figure for figure in report.figures if figure.name == "tokens from cache")
    assert 48 <= cached.value <= 64


def test_compare_with_peer_pairs_figures_by_name() -> None:
    ours = [Figure(name=name, value=3.0, unit=unit) for name, unit in (("a", "tokens/s"), ("b", "ms"), ("c", "s"))]
    theirs = [Figure(name="b", value=6.0, unit="ms"), Figure(name="a", value=2.0, unit="tokens/s")]
    found = compare_with_peer(ours, theirs, "it")
    assert [(each.name, each.ratio, each.limit_name) for each in found] == [
        ("a", 1.5, "it"),
        ("b", 0.5, "it (less is better)"),
    ]


def test_bench_command_prints_and_writes_json(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--prompt-tokens", "16", "--output-tokens", "4", "--repeats", "1", "--json"]
    more = ["--attention-backend", "reference", "--dtype", "float32", "--out", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, ["bench", "latency", *options, *more])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "out.json").read_text())
    assert torch.get_num_threads() == json.loads(result.stdout)["num_threads"]


def test_bench_command_with_mixed_reports_streams_and_questions() -> None:
    options = ["--shape", "tiny", "--repeats", "2", "--attention-backend", "reference", "--dtype", "float32", "--json"]
    result = CliRunner().invoke(app, ["bench", "latency", "--mixed", "--prompt-tokens", "200", *options])
    assert result.exit_code == 0, result.output
    figures = {figure["name"]: figure for figure in json.loads(result.stdout)["figures"]}
    for name in ("time to first token, 30 tokens", "time to first token, 200 tokens"):
        assert figures[name]["value"] > 0
    assert "inter-token latency of 8 streams, p99" in figures
    assert CliRunner().invoke(app, ["bench", "beam", "--mixed"]).exit_code == 2


@pytest.mark.slow
def test_bench_command_takes_model_as_argument_or_option(tmp_path: Path) -> None:
    write_model(SHAPES["tiny"], tmp_path / "mine", seed=3)
    options = [
        "--prompt-tokens",
        "16",
        "--output-tokens",
        "4",
        "--repeats",
        "1",
        "--json",
        "--attention-backend",
        "reference",
    ]
    folder = str(tmp_path / "mine")
    for named in ([folder], ["--model", folder]):
        result = CliRunner().invoke(app, ["bench", "latency", *options, *named])
        assert result.exit_code == 0 and json.loads(result.stdout)["model"] == "mine"
    result = CliRunner().invoke(app, ["bench", "latency", folder, "--model", "another"])
    assert result.exit_code == 2 and "another" in result.output


def test_bench_command_passes_deterministic_to_the_loader() -> None:
    """The loader refuses the combination with the reference attention."""
    result = CliRunner().invoke(app, ["bench", "latency", "--deterministic", "--attention-backend", "reference"])
    assert isinstance(result.exception, ModelFolderError) and "deterministic" in result.exception.message


def test_bench_command_compares_with_transformers(folder: Path, tmp_path: Path) -> None:
    sizes = ["--prompt-tokens", "16", "--output-tokens", "4", "--repeats", "1", "--kv-memory", "16MiB"]
    out = tmp_path / "report.json"
    result = CliRunner().invoke(
        app, ["bench", "latency", str(folder), *sizes, "--compare", "transformers", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())["figures"]
    peers = {figure["name"]: figure for figure in figures if figure["limit_name"].startswith("transformers")}
    assert {"prefill, 16 tokens", "decode, batch 1"} <= peers.keys()
    assert all(each["ratio"] > 0 for each in peers.values())


def test_bench_command_refuses_to_compare_prefix(folder: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "prefix", str(folder), "--compare", "transformers"])
    assert result.exit_code != 0
    assert "compare works for latency, throughput, beam" in str(result.output) + str(result.exception)
