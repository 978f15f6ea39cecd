"""`chatcache bench`: counts against an exact runner, models against transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from chatcache import factory as compose
from chatcache.bench import device as device_module
from chatcache.bench.device import Limits, measure_limits, time_with_host, time_work
from chatcache.bench.drivers import EngineDriver
from chatcache.bench.engine_bench import BENCHMARKS, EngineReport, Load, count_matmul_params, run_engine_bench
from chatcache.bench.shapes import SHAPES, RandomWeights, Shape, write_config, write_model
from chatcache.cli.main import app
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.errors import ModelFolderError
from chatcache.model.loading.loader import load_model
from chatcache.types.events import Tokens
from chatcache.types.request import BeamSearchParams, GenerateRequest, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_facts

QUICK = EngineConfig(dtype="float32", attention_backend="reference", kv_memory_bytes=2**24)


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "BUDGET_S", 0.01)
    monkeypatch.setattr(device_module, "MATMUL_SIZE", {"cpu": 64})


def fake_driver(caching: bool = True) -> EngineDriver:
    config = EngineConfig(enable_prefix_caching=caching)
    return EngineDriver(Engine(FakeRunner(eos_every=0), fake_facts(), config))


def greedy(num_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=1.0, n=n, max_tokens=num_tokens, ignore_eos=True)


def test_engine_driver_counts_tokens_and_decode_steps() -> None:
    driver = fake_driver()
    run = driver.run([driver.prompt(40), driver.prompt(30)], greedy(6, n=3))
    assert run.num_output_tokens == 2 * 3 * 6
    assert len(run.decode_s) == 5, "the first of six tokens comes with the prompt"
    assert run.num_decoded == 2 * 3 * 5
    assert run.num_cached == [0, 0] and len(run.first_token_s) == 2
    assert 0 < run.prefill_s <= run.total_s
    assert run.decode_tokens_per_s == pytest.approx(run.num_decoded / sum(run.decode_s))


def test_engine_driver_reports_cache_hits_and_pages() -> None:
    driver = fake_driver()
    prompt = driver.prompt(64)
    assert driver.run([prompt], greedy(2)).num_cached == [0]
    run = driver.run([prompt + driver.prompt(4)], greedy(2, n=4))
    assert run.num_cached[0] >= 64 - 16
    assert 5 <= run.peak_pages <= 5 + 4
    plain = fake_driver(caching=False)
    plain.run([prompt], greedy(2))
    assert plain.run([prompt], greedy(2)).num_cached == [0]


def test_engine_driver_times_beam_search() -> None:
    driver = fake_driver()
    params = BeamSearchParams(beam_width=4, max_tokens=8, early_stopping="never", ignore_eos=True)
    run = driver.run([driver.prompt(20)], params)
    assert len(run.decode_s) == 7
    assert run.num_output_tokens == 4 * 8


def test_limits_floor_is_the_larger_of_both_times() -> None:
    limits = Limits(read_bytes_per_s=10.0, matmul_flops_per_s=100.0, buffer_bytes=1)
    assert limits.floor_s(num_bytes=50, num_flops=100) == 5.0
    assert limits.floor_s(num_bytes=50, num_flops=1000) == 10.0


def test_time_work_reports_seconds_per_call() -> None:
    calls: list[int] = []
    timing = time_work(calls.append, 4, "cpu", repeats=3)
    assert calls[:3] == [0, 1, 2] and calls[3:7] == [0, 1, 2, 3]
    assert 0 <= timing.low_s <= timing.median_s <= timing.high_s < 1 and not timing.graphed
    assert time_with_host(lambda: None, "cpu") < 1


def test_measure_limits_reads_a_buffer_of_the_given_size() -> None:
    limits = measure_limits(3 * 2**20, "float32", "cpu")
    assert limits.buffer_bytes == 3 * 2**20
    assert measure_limits(1, "bfloat16", "cpu").buffer_bytes == device_module.MIN_BUFFER_BYTES
    assert limits.read_bytes_per_s > 0 and limits.matmul_flops_per_s > 0 and limits.copy_bytes_per_s > 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_write_model_loads_completely_in_transformers(tmp_path: Path, tied: bool, qk_norm: bool) -> None:
    shape = dataclasses.replace(SHAPES["tiny"], tied=tied, qk_norm=qk_norm)
    write_model(shape, tmp_path, seed=3)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    weight = model.model.layers[1].mlp.up_proj.weight.float()
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    engine = compose.build_engine(msgspec.structs.replace(QUICK, model=str(tmp_path)), need_tokenizer=False)
    body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name)
    assert count_matmul_params(tmp_path, engine.facts) == body


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


def test_prefix_bench_finds_history_in_the_cache() -> None:
    load = Load(prompt_tokens=64, output_tokens=8, batches=(1,), repeats=1)
    report = run_engine_bench("prefix", QUICK, load, shape="tiny")
    cached = next(figure for figure in report.figures if figure.name == "tokens from cache")
    assert 48 <= cached.value <= 64


def test_bench_command_prints_and_writes_json(tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--prompt-tokens", "16", "--output-tokens", "4", "--repeats", "1", "--json"]
    more = ["--attention-backend", "reference", "--dtype", "float32", "--out", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, ["bench", "latency", *options, *more])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "out.json").read_text())
    assert torch.get_num_threads() == json.loads(result.stdout)["num_threads"]


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


def test_random_weights_depend_on_seed_only(tmp_path: Path) -> None:
    """The text depends on the seed; the tensors are those of transformers' model."""
    shape, texts = dataclasses.replace(SHAPES["tiny"], tied=False, qk_norm=True), []
    write_config(shape, tmp_path, dtype=torch.float32)
    for seed in (0, 0, 1):
        weights = RandomWeights(shape, "cpu", dtype=torch.float32, seed=seed, std=0.2)
        config = msgspec.structs.replace(QUICK, model=str(tmp_path))
        runner = load_model(config, weights=weights)
        assert runner.facts.digest == load_model(config, weights=weights).facts.digest
        engine = Engine(runner, runner.facts, config)
        engine.add(GenerateRequest(request_id="a", prompt=tuple(range(20)), params=greedy(8)))
        events = [event for _ in range(20) if engine.has_work() for event in engine.step()]
        texts.append([event.token_ids for event in events if isinstance(event, Tokens)])
    assert texts[0] == texts[1] != texts[2]
    model = AutoModelForCausalLM.from_pretrained(write_folder(shape, tmp_path / "written"), dtype=torch.float32)
    names = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert all(weights.get(name, size).shape == size for name, size in names.items())
    with pytest.raises(ModelFolderError, match="random weights have shape"):
        weights.get("lm_head.weight", (2, 2))


def write_folder(shape: Shape, folder: Path) -> Path:
    write_model(shape, folder, dtype=torch.float32)
    return folder
