"""The engine on a GPU in float32 equals the reference backend.

It uses Triton kernels, captured steps and asynchronous launches.

The same cases run on CPUs, under Triton's interpreter, in `kernels/tests/test_triton_engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from chatcache.model.cuda_graphs import CudaCapture, capture_sizes, prompt_capture_sizes
from chatcache.model.runner import AsyncLaunch
from chatcache.types.events import Finished
from tests.gpu.engine_cases import (
    CASES,
    PAGE_BYTES,
    Answers,
    assert_same,
    build,
    count_decode_steps,
    count_replays,
    drain,
    outcome,
    prompt_of,
    sampled,
    submit,
)

pytestmark = pytest.mark.gpu


Expected = Callable[[str], Answers]


def has_fp8() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Return what gives the reference backend's answers to a case, on the same device."""
    folder = tmp_path_factory.mktemp("reference")
    return cache(lambda case: outcome(case, folder, "reference", "cuda"))


@pytest.mark.parametrize("case", list(CASES))
def test_triton_equals_the_reference(case: str, expected: Expected, tmp_path: Path) -> None:
    assert_same(outcome(case, tmp_path, "triton", "cuda"), expected(case))


@pytest.mark.parametrize("case", ["chunked", "cached", "long", "mixed", "recomputed", "n_best"])
def test_captured_steps_with_prompts_equal_the_reference(
    case: str, expected: Expected, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    graphs = AsyncLaunch(capture_sizes(16), CudaCapture(device), prompt_capture_sizes(1024))
    every, decode = count_replays(monkeypatch), count_replays(monkeypatch, only_decode=True)
    assert_same(outcome(case, tmp_path, "triton", "cuda", graphs=graphs), expected(case))
    assert len(every) - len(decode) >= {"chunked": 5, "cached": 2}.get(case, 1)


@pytest.mark.parametrize("case", ["n_best", "swapped", "mixed", "beams"])
def test_steps_are_replayed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above says little about graphs."""
    replayed = count_replays(monkeypatch)
    outcome(case, tmp_path, "triton", "cuda")
    assert len(replayed) >= 3, f"{len(replayed)} steps were replayed"


def test_every_decode_step_of_every_mode_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, decoded = count_replays(monkeypatch, only_decode=True), count_decode_steps(monkeypatch)
    outcome("every_mode", tmp_path, "triton", "cuda")
    assert replayed == decoded and max(decoded) == 7


@pytest.mark.parametrize("case", ["n_best", "long", "beams"])
def test_shared_prefix_attention_equals_the_reference(case: str, expected: Expected, tmp_path: Path) -> None:
    assert_same(outcome(case, tmp_path, "triton", "cuda", share="always"), expected(case))


@pytest.mark.parametrize("case", ["mixed", "n_best", "swapped"])
def test_uncaptured_steps_equal_the_reference(case: str, expected: Expected, tmp_path: Path) -> None:
    assert_same(outcome(case, tmp_path, "triton", "cuda", graphs=AsyncLaunch(())), expected(case))


@pytest.mark.parametrize("case", ["mixed", "beams", "recomputed"])
def test_synchronous_steps_equal_the_reference(case: str, expected: Expected, tmp_path: Path) -> None:
    assert_same(outcome(case, tmp_path, "triton", "cuda", in_order=True), expected(case))


def test_repeated_run_has_the_same_bits(tmp_path: Path) -> None:
    assert outcome("mixed", tmp_path, "triton", "cuda") == outcome("mixed", tmp_path, "triton", "cuda")


@pytest.mark.skipif(not has_fp8(), reason="FP8 products need compute capability 8.9")
def test_repeated_fp8_run_is_replayed_and_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that share the sums of an FP8 product end in any order, and its bits do not depend on it."""
    options = {"dtype": "bfloat16", "quantization": "fp8", "kv_memory_bytes": 128 * PAGE_BYTES}
    replayed = count_replays(monkeypatch)
    first = outcome("mixed", tmp_path, "triton", "cuda", **options)
    assert len(replayed) >= 3
    assert first == outcome("mixed", tmp_path, "triton", "cuda", **options)


@pytest.mark.skipif(not has_fp8(), reason="FP8 pages need compute capability 8.9")
def test_repeated_run_over_fp8_pages_is_replayed_and_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "kv_memory_bytes": 128 * PAGE_BYTES}
    replayed = count_replays(monkeypatch)
    first = outcome("mixed", tmp_path, "triton", "cuda", **options)
    assert len(replayed) >= 3
    assert first == outcome("mixed", tmp_path, "triton", "cuda", **options)


def test_a_cancelled_request_frees_its_pages_within_a_step(tmp_path: Path) -> None:
    engine = build(tmp_path, "triton", "cuda")
    submit(engine, (prompt_of(40, 1), sampled(4, 500)))
    for _ in range(10):
        engine.step()
    assert engine.health().num_pages_in_use >= 6
    engine.abort("r0-40")
    events = engine.step()
    assert [event.cancelled for event in events if isinstance(event, Finished)] == [True]
    assert engine.health().num_pages_in_use == 0
    drain(engine)
