"""Whole generations on Triton kernels and on the reference: the same tokens, the same log-probabilities.

Interpreted on CPUs; `tests/gpu` runs the same cases compiled. Prefixes are shared wherever they can be, which for rows
this short the cost rule would not choose.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chatcache_kernels import work_list

from chatcache.model.runner import Ahead
from tests.gpu.engine_cases import CASES, assert_same, count_replays, outcome

QUICK = [case for case in CASES if case != "long"]
pytestmark = pytest.mark.interpreter  # tests/gpu runs these cases compiled
SLOW = ("mixed", "cancelled", "chunked", "cached")  # five to ten seconds each: the long suite has them


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long if case in SLOW else ()) for case in QUICK])
def test_the_engine_says_the_same_on_triton_kernels(case: str, tmp_path: Path) -> None:
    assert_same(outcome(case, tmp_path, "triton", share="always"), outcome(case, tmp_path, "reference"))


@pytest.mark.long
def test_keys_cut_into_pieces_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome("n_best", tmp_path, "reference")
    monkeypatch.setattr(work_list, "SPLIT_TOKENS", 32)
    assert_same(outcome("n_best", tmp_path, "triton", share="never"), expected)


def test_steps_in_static_buffers_launched_ahead_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the runner's way on a GPU but the capture itself: steps of 2 and 8 rows, some of them nobody's."""
    replayed = count_replays(monkeypatch)
    found = outcome("n_best", tmp_path, "triton", share="always", graphs=Ahead((2, 8)))
    assert len(replayed) >= 3
    assert_same(found, outcome("n_best", tmp_path, "reference"))


@pytest.mark.long
def test_long_prompts_are_cut_as_they_are_on_a_gpu(tmp_path: Path) -> None:
    assert_same(outcome("long", tmp_path, "triton"), outcome("long", tmp_path, "reference"))
