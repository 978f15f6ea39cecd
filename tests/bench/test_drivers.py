"""Drivers of the engine and of transformers count and time alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatcache.bench.drivers import SHAPES, EngineDriver, TransformersDriver, write_model
from chatcache.config import EngineConfig
from chatcache.engine.engine import Engine
from chatcache.factory import build_engine
from chatcache.types.request import BeamSearchParams, Params, SamplingParams
from tests.support.fake_runner import FakeRunner, fake_model_info

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


def fake_driver(caching: bool = True) -> EngineDriver:
    config = EngineConfig(enable_prefix_caching=caching)
    return EngineDriver(Engine(FakeRunner(eos_every=0), fake_model_info(), config))


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


@pytest.mark.parametrize(("lengths", "params"), LOADS)
def test_transformers_driver_counts_as_the_engine_driver_does(folder: Path, lengths: list[int], params: Params) -> None:
    config = EngineConfig(model=str(folder), dtype="float32", kv_memory_bytes=2**24)
    engine = build_engine(config, need_tokenizer=False)
    ours, theirs = EngineDriver(engine), TransformersDriver(folder, engine.model_info)
    mine, other = (each.run([each.prompt(length) for length in lengths], params) for each in (ours, theirs))
    assert other.num_output_tokens == mine.num_output_tokens
    if isinstance(params, SamplingParams):  # our beam search emits most of its tokens at the end
        assert other.num_decoded == mine.num_decoded
    assert len(other.decode_s) == len(mine.decode_s)
    assert len(other.first_token_s) == len(mine.first_token_s) and other.num_cached == mine.num_cached
    assert 0 < other.prefill_s < other.total_s
