"""Deselection by hardware requirement, and its line in the summary of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.machine import REQUIREMENTS, Requirement, describe_unmet, unmet_requirements

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Item:
    markers: tuple[str, ...] = ()

    def get_closest_marker(self, name: str) -> object | None:
        return name if name in self.markers else None


def test_unmet_requirements_of_marked_items_are_counted_once_and_checked_once() -> None:
    num_checks = 0

    def check() -> bool:
        nonlocal num_checks
        num_checks += 1
        return False

    def unexpected() -> bool:
        raise AssertionError("no item has this marker")

    requirements = {
        "gpu": Requirement("", check),
        "linux": Requirement("", lambda: True),
        "traced": Requirement("", unexpected),
    }
    items = [Item(), Item(("gpu",)), Item(("linux",)), Item(("gpu", "linux"))]
    excluded, counts = unmet_requirements(items, requirements)
    assert excluded == {id(items[1]), id(items[3])} and counts == {"gpu": 2} and num_checks == 1
    assert describe_unmet(counts) == ["2 gpu: no CUDA device"]


def test_every_requirement_is_a_registered_marker() -> None:
    for settings in (ROOT / "pyproject.toml", ROOT / "kernels" / "bench" / "bare" / "pytest.ini"):
        text = settings.read_text()
        assert [marker for marker in REQUIREMENTS if f"{marker}: " not in text] == [], settings.name


@pytest.mark.slow
def test_a_run_under_ci_deselects_unmet_requirements_and_prints_their_counts(tmp_path: Path) -> None:
    """As a worker of pytest-xdist reports it, and without one."""
    (tmp_path / "test_example.py").write_text(
        "import pytest\n@pytest.mark.interpreter\ndef test_a() -> None: ...\ndef test_b() -> None: ...\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    for options in (["-p", "no:xdist"], ["-n", "1"]):
        run = subprocess.run(
            [*command, *options, tmp_path],
            env={**os.environ, "CI": "true", "TRITON_INTERPRET": "0"},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert "not run on this machine" in run.stdout and "1 interpreter: Triton kernels are compiled" in run.stdout
        assert "1 passed" in run.stdout
