"""Thread counts: what the container allows, and one thread for tiny models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chatcache.model.loading import loader
from chatcache.model.loading.loader import SINGLE_THREAD_BYTES, allowed_cpus, limit_threads

CPUS = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", CPUS), ("100000 100000", 1), ("150000 100000", min(2, CPUS)), ("5000 100000", 1), ("", CPUS)],
)
def test_allowed_cpus_respects_the_container_quota(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert allowed_cpus(tmp_path / "cpu.max") == expected


def test_allowed_cpus_without_control_groups_is_the_affinity(tmp_path: Path) -> None:
    assert allowed_cpus(tmp_path / "missing") == CPUS


def test_limit_threads_gives_small_models_one_thread_and_never_raises_it() -> None:
    torch.set_num_threads(2)
    limit_threads(SINGLE_THREAD_BYTES)
    assert torch.get_num_threads() == 1
    limit_threads(SINGLE_THREAD_BYTES + 1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(64)
    limit_threads(SINGLE_THREAD_BYTES + 1)
    assert torch.get_num_threads() == allowed_cpus()


@pytest.mark.parametrize(
    ("num_threads", "policy", "warns"), [(2, {}, True), (2, {"OMP_WAIT_POLICY": "x"}, False), (1, {}, False)]
)
def test_limit_threads_warns_of_unlimited_spinning(
    num_threads: int,
    policy: dict[str, str],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Threads spin without limit if the script has imported torch before chatcache, and has set no policy."""
    for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in policy.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(loader, "allowed_cpus", lambda: 2)
    torch.set_num_threads(num_threads)
    limit_threads(SINGLE_THREAD_BYTES + 1)
    assert ("torch was imported before chatcache" in caplog.text) == warns
