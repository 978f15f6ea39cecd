"""Deterministic mode: every logit has the bits of the solo run in every configuration.

Each case runs the same requests in another configuration and compares the logits of every draw, the tokens and all
reported log-probabilities, bit by bit, with each request run alone: its own engine, an empty cache, the prompt in one
chunk. Sampled tokens are fed back, so a single different bit has visible consequences.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chatcache_kernels import cpu

from chatcache.model import batch_invariant
from chatcache.model.loading import loader
from chatcache.model.runner import Runner
from chatcache.types.request import BeamSearchParams, GenerateRequest, SamplingParams
from tests.model.determinism import (
    FEW,
    LONG,
    MAX_TOKENS,
    REQUESTS,
    SHAPES,
    WAYS,
    Bits,
    Way,
    alone,
    differing,
    digest,
    growing_requests,
    load,
    run,
    save_shape,
)
from tests.model.families import FAMILIES, RECURRENT, save_random

pytestmark = pytest.mark.requires_bf16_products  # most tests compare models in both types

DTYPES = ("float32", "bfloat16")
MODELS = [f"{shape}-{dtype}" for shape in SHAPES for dtype in DTYPES]
FAST_MODEL = "llama-float32"
FAST_WAYS = ("batch1-chunk5-uncached", "batch7-chunk37-cached", "backwards")
TIERED_MODELS = [name if name == FAST_MODEL else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


class Solo:
    """Runners, loaded once, and the bits of each request run alone."""

    def __init__(self, folder_of: Callable[[str], Path]) -> None:
        self._folder_of = folder_of
        self._made: dict[str, tuple[Runner, Bits]] = {}

    def __call__(self, model: str) -> tuple[Runner, Bits]:
        if model not in self._made:
            shape, dtype = model.split("-")
            runner = load(self._folder_of(shape), dtype)
            self._made[model] = runner, alone(runner, REQUESTS)
        return self._made[model]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders = {shape: save_shape(shape, tmp_path_factory.mktemp(shape)) for shape in SHAPES}
    return folders.__getitem__


@pytest.fixture(scope="module")
def solo(folder_of: Callable[[str], Path]) -> Solo:
    return Solo(folder_of)


@pytest.mark.parametrize(
    "way", [name if name in FAST_WAYS else pytest.param(name, marks=pytest.mark.slow) for name in WAYS]
)
@pytest.mark.parametrize("model", TIERED_MODELS)
@pytest.mark.slow
def test_logits_equal_the_solo_run_in_every_configuration(model: str, way: str, solo: Solo) -> None:
    """Vary batch size, order, chunk size and cache.

    A cached configuration runs twice, the second time on the pages of the first.
    """
    runner, expected = solo(model)
    requests, how = WAYS[way]
    got, _ = run(runner, requests, how)
    assert len(got) == len(requests) * (MAX_TOKENS + 1)
    assert not differing(got, expected)


@pytest.mark.parametrize("preemption", [pytest.param("recompute", marks=pytest.mark.slow), "swap"])
@pytest.mark.parametrize("model", [FAST_MODEL, pytest.param("qwen3-bfloat16", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_preempted_requests_equal_the_solo_run(model: str, preemption: str, solo: Solo) -> None:
    runner, _ = solo(model)
    requests = growing_requests(6, 70)
    got, engine = run(runner, requests, Way(6, 37, num_pages=20, preemption=preemption))
    health = engine.health()
    assert health.num_preemptions >= 3
    assert (health.num_pages_swapped_in > 0) == (preemption == "swap")
    assert not differing(got, alone(runner, requests))


@pytest.mark.parametrize("params", [
    SamplingParams(n=5, temperature=1.0, seed=77, max_tokens=8, ignore_eos=True),
    BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True),
], ids=["samples", "beams"])  # fmt: skip
@pytest.mark.parametrize("model", TIERED_MODELS)
def test_forked_branch_equals_a_recomputed_one(
    model: str, params: SamplingParams | BeamSearchParams, solo: Solo
) -> None:
    """Compare branches that share pages with recomputing each branch's tokens."""
    runner, _ = solo(model)
    request = GenerateRequest(request_id="one", prompt=REQUESTS[1].prompt, params=params)
    forked = run(runner, [request], Way(8), by_tokens=True)[0]
    histories = [cell for cell in forked if isinstance(cell, tuple)]
    assert len(histories) > 20
    for tokens in histories:
        copy = GenerateRequest(request_id="one", prompt=tokens, params=SamplingParams(temperature=0.0, max_tokens=1))
        assert run(runner, [copy], Way(), by_tokens=True)[0][tokens] == forked[tokens]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("gpt2", "float32"), pytest.param("qwen3-moe", "bfloat16", marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_transformers_model_equals_the_solo_run(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models run by transformers' own modules, whose bits depend on the batch."""
    save_random(FAMILIES[family].config(), tmp_path)
    monkeypatch.setattr(loader, "is_native", lambda *_: False)
    runner = load(tmp_path, dtype)
    expected = alone(runner, FEW)
    for way in (Way(3, 7, cache=True, rounds=2), Way(2, 300, order=-1)):
        assert not differing(run(runner, FEW, way)[0], expected)
    fast = load(tmp_path, dtype, deterministic=False)
    assert differing(run(fast, FEW, Way(3, 7))[0], alone(fast, FEW))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3-5", "float32"),
        ("granite-4", "bfloat16"),
        pytest.param("falcon-h1", "float32", marks=pytest.mark.long),
        pytest.param("lfm2", "float32", marks=pytest.mark.long),
    ],
)
@pytest.mark.slow
def test_model_with_states_equals_the_solo_run(family: str, dtype: str, tmp_path: Path) -> None:
    """A state from a snapshot, of a fork, or swapped in has the bits of one computed from the first token."""
    save_random(RECURRENT[family].config(), tmp_path)
    runner = load(tmp_path, dtype)
    expected = alone(runner, FEW)
    for way in (Way(3, 7, cache=True, rounds=2), Way(1, 300, cache=True, order=-1, rounds=2)):
        got, engine = run(runner, FEW, way)
        assert not differing(got, expected)
        assert engine.health().num_cached_tokens > sum(len(request.prompt) for request in FEW) // 2
    growing = growing_requests(3, 40)
    got, engine = run(runner, growing, Way(3, 37, num_pages=12, preemption="swap"))
    assert engine.health().num_pages_swapped_in > 0
    assert not differing(got, alone(runner, growing))
    request = GenerateRequest(
        request_id="one", prompt=REQUESTS[1].prompt, params=SamplingParams(n=3, seed=7, max_tokens=6, ignore_eos=True)
    )
    forked = run(runner, [request], Way(8), by_tokens=True)[0]
    histories = [cell for cell in forked if isinstance(cell, tuple)]
    assert len(histories) > 12
    for tokens in histories:
        copy = GenerateRequest(request_id="one", prompt=tokens, params=SamplingParams(temperature=0.0, max_tokens=1))
        assert run(runner, [copy], Way(), by_tokens=True)[0][tokens] == forked[tokens]


@pytest.mark.parametrize("model", [FAST_MODEL, pytest.param("qwen3-bfloat16", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_number_of_threads_does_not_change_logits(
    model: str, solo: Solo, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = solo(model)
    monkeypatch.setattr(loader, "limit_threads", lambda num_bytes: None)
    torch.set_num_threads(3)
    try:
        runner = load(folder_of(model.split("-")[0]), model.split("-")[1])
        for batch in (1, 7):
            assert not differing(run(runner, REQUESTS[:10], Way(batch, 50))[0], expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_new_process_computes_the_same_bits(solo: Solo, folder_of: Callable[[str], Path]) -> None:
    root = Path(__file__).resolve().parents[2]
    code = root / "tests" / "model" / "determinism.py"
    path = os.pathsep.join((str(root), str(root / "kernels")))
    folders = [str(folder_of(shape)) for shape in SHAPES]
    out = subprocess.run(
        [sys.executable, str(code), *folders], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert not out.returncode, out.stderr
    assert out.stdout.split() == [digest(solo(model)[1]) for model in MODELS]


@pytest.mark.slow
def test_without_deterministic_mode_logits_differ(folder_of: Callable[[str], Path]) -> None:
    """Without this, the other tests could not fail.

    The differences depend on the machine; short prompt chunks have differed on all machines so far.
    """
    for model in MODELS:
        shape, dtype = model.split("-")
        runner = load(folder_of(shape), dtype, deterministic=False)
        expected = alone(runner, LONG)
        got, _ = run(runner, LONG, Way(1, 5))
        assert differing(got, expected), model


@pytest.mark.slow
def test_injected_untiled_product_is_detected(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN adds up in another order for other numbers of rows, here for 1 and more than 32."""
    for model in MODELS:
        solo(model)  # loaded and drawn from before the mistake is made, also where this test runs alone
    monkeypatch.setattr(batch_invariant, "tile_sizes", lambda num_rows, sizes: iter([num_rows] if num_rows else []))
    bad = [model for model in MODELS if differing(run(solo(model)[0], LONG, Way(1, 37))[0], solo(model)[1])]
    assert bad, "on this machine products do not depend on the number of rows"


@pytest.mark.slow
def test_injected_chunk_dependent_attention_is_detected(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in MODELS:
        runner, expected = solo(model)
        monkeypatch.setattr(runner._kernels, "paged_attention", cpu.paged_attention)
        assert differing(run(runner, LONG, Way(1, 37))[0], expected), model


def test_injected_dependency_on_another_row_is_detected(solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a millionth of another row to the activations of one layer."""
    runner, expected = solo("llama-float32")
    plain = runner._kernels.silu_mul

    def inject(gate_up: torch.Tensor) -> torch.Tensor:
        out = plain(gate_up)
        return out + 1e-6 * out.roll(1, 0) * (len(out) == 3)

    monkeypatch.setattr(runner._kernels, "silu_mul", inject)
    assert not differing(run(runner, LONG, Way(1))[0], expected)
    assert differing(run(runner, LONG, Way(3))[0], expected)
