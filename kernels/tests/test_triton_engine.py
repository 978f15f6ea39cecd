"""Whole generations on Triton kernels equal those on the reference: tokens and logprobs.

Interpreted on CPUs; `tests/gpu` runs the same cases compiled. Prefixes are always shared, which the cost model would
not choose for rows this short.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chatcache_kernels import work_list

from chatcache.model.runner import AsyncLaunch
from tests.gpu.engine_cases import CASES, assert_same, count_decode_steps, count_replays, outcome

INTERPRETED_CASES = [case for case in CASES if case != "long"]
pytestmark = pytest.mark.interpreter  # tests/gpu runs these cases compiled
LONG_CASES = ("mixed", "every_mode", "cancelled", "chunked", "cached")  # a test below runs "every_mode" captured


def _marks(case: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the tier of a case: "n_best" runs by default, others take five to ten seconds each."""
    if case in LONG_CASES:
        return (pytest.mark.long,)
    return () if case == "n_best" else (pytest.mark.slow,)


@pytest.mark.parametrize("case", [pytest.param(case, marks=_marks(case)) for case in INTERPRETED_CASES])
@pytest.mark.slow
def test_engine_outputs_on_triton_equal_reference(case: str, tmp_path: Path) -> None:
    assert_same(outcome(case, tmp_path, "triton", share="always"), outcome(case, tmp_path, "reference"))


@pytest.mark.long
def test_split_keys_do_not_change_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome("n_best", tmp_path, "reference")
    monkeypatch.setattr(work_list, "SPLIT_TOKENS", 32)
    assert_same(outcome("n_best", tmp_path, "triton", share="never"), expected)


@pytest.mark.slow
def test_static_buffers_and_async_scheduling_do_not_change_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover the runner's GPU path except graph capture: steps of 2 and 8 rows with padding rows."""
    replayed = count_replays(monkeypatch)
    found = outcome("n_best", tmp_path, "triton", share="always", graphs=AsyncLaunch((2, 8), prompt_sizes=(32, 64)))
    assert len(replayed) >= 3
    assert_same(found, outcome("n_best", tmp_path, "reference"))


@pytest.mark.slow
def test_every_decode_step_of_every_mode_runs_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No penalty, alternative, grammar or beam of one request takes the others out of the captured steps."""
    replayed, decoded = count_replays(monkeypatch, only_decode=True), count_decode_steps(monkeypatch)
    found = outcome("every_mode", tmp_path, "triton", graphs=AsyncLaunch((2, 8), prompt_sizes=(32, 64)))
    assert replayed == decoded and max(decoded) == 7
    assert_same(found, outcome("every_mode", tmp_path, "reference"))


@pytest.mark.long
def test_long_prompts_are_chunked_as_on_a_gpu(tmp_path: Path) -> None:
    assert_same(outcome("long", tmp_path, "triton"), outcome("long", tmp_path, "reference"))
