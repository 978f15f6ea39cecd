"""`--compare transformers`: the same benchmarks over both, with the same counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chatcache.bench.drivers import EngineDriver, TransformersDriver
from chatcache.bench.engine_bench import compare_with_peer
from chatcache.bench.report import Figure
from chatcache.bench.shapes import SHAPES, write_model
from chatcache.cli.main import app
from chatcache.config import EngineConfig
from chatcache.factory import build_engine
from chatcache.types.request import BeamSearchParams, Params, SamplingParams

LOADS: list[tuple[list[int], Params]] = [
    ([40], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)),
    ([20, 33], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)),
    ([24], SamplingParams(n=3, max_tokens=5, ignore_eos=True, seed=1)),
    ([24], BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True, early_stopping="never")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape")
    write_model(SHAPES["tiny"], path)
    return path


@pytest.mark.parametrize(("lengths", "params"), LOADS)
def test_transformers_driver_counts_as_the_engine_driver_does(folder: Path, lengths: list[int], params: Params) -> None:
    config = EngineConfig(model=str(folder), dtype="float32", kv_memory_bytes=2**24)
    engine = build_engine(config, need_tokenizer=False)
    ours, theirs = EngineDriver(engine), TransformersDriver(folder, engine.facts)
    mine, other = (each.run([each.prompt(length) for length in lengths], params) for each in (ours, theirs))
    assert other.num_output_tokens == mine.num_output_tokens
    if isinstance(params, SamplingParams):  # our beam search emits most of its tokens at the end
        assert other.num_decoded == mine.num_decoded
    assert len(other.decode_s) == len(mine.decode_s)
    assert len(other.first_token_s) == len(mine.first_token_s) and other.num_cached == mine.num_cached
    assert 0 < other.prefill_s < other.total_s


def test_compare_with_peer_pairs_figures_by_name() -> None:
    ours = [Figure(name=name, value=3.0, unit=unit) for name, unit in (("a", "tokens/s"), ("b", "ms"), ("c", "s"))]
    theirs = [Figure(name="b", value=6.0, unit="ms"), Figure(name="a", value=2.0, unit="tokens/s")]
    found = compare_with_peer(ours, theirs, "it")
    assert [(each.name, each.ratio, each.limit_name) for each in found] == [
        ("a", 1.5, "it"),
        ("b", 0.5, "it (less is better)"),
    ]


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
