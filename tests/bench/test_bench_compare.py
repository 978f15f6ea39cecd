"""`--compare transformers`: the same measures over both, counted alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chatcache.bench.driver import Driver
from chatcache.bench.peer import TransformersDriver, beside
from chatcache.bench.report import Figure
from chatcache.bench.shapes import SHAPES, write_model
from chatcache.cli import app
from chatcache.compose import build_engine
from chatcache.config import EngineConfig
from chatcache.types.params import BeamSearchParams, Params, SamplingParams

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
def test_a_peer_counts_as_our_driver_does(folder: Path, lengths: list[int], params: Params) -> None:
    config = EngineConfig(model=str(folder), dtype="float32", kv_memory_bytes=2**24)
    engine = build_engine(config, need_tokenizer=False)
    ours, theirs = Driver(engine, engine.facts), TransformersDriver(folder, engine.facts)
    mine, other = (each.run([each.prompt(length) for length in lengths], params) for each in (ours, theirs))
    assert other.num_output_tokens == mine.num_output_tokens
    if isinstance(params, SamplingParams):  # our beams tell most of their tokens at the end
        assert other.num_decoded == mine.num_decoded
    assert len(other.decode_s) == len(mine.decode_s)
    assert len(other.first_token_s) == len(mine.first_token_s) and other.num_cached == mine.num_cached
    assert 0 < other.prefill_s < other.total_s


def test_figures_are_paired_by_name() -> None:
    ours = [Figure(name=name, value=3.0, unit=unit) for name, unit in (("a", "tokens/s"), ("b", "ms"), ("c", "s"))]
    theirs = [Figure(name="b", value=6.0, unit="ms"), Figure(name="a", value=2.0, unit="tokens/s")]
    found = beside(ours, theirs, "it")
    assert [(each.name, each.ratio, each.limit_name) for each in found] == [
        ("a", 1.5, "it"),
        ("b", 0.5, "it (less is better)"),
    ]


def test_the_command_compares(folder: Path, tmp_path: Path) -> None:
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


def test_what_has_no_peer_is_refused(folder: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "prefix", str(folder), "--compare", "transformers"])
    assert result.exit_code != 0
    assert "compare works for latency, throughput, beam" in str(result.output) + str(result.exception)
