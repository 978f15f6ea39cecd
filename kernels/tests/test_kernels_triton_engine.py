"""Whole generations on one backend and on the reference: the same tokens, the same log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.engine_cases import CASES, assert_same, outcome


@pytest.mark.parametrize("case", list(CASES))
def test_the_engine_says_the_same_on_triton_kernels(case: str, tmp_path: Path) -> None:
    assert_same(outcome(case, tmp_path, "cpu"), outcome(case, tmp_path, "reference"))
