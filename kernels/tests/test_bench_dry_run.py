"""`make gpu-check --dry-run`: the stages of the real run, and tests with an emulated GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.check import run_tests, stages

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import pytest
import torch
from chatcache_kernels import triton

def run(x, weight):
    return triton.rms_norm(x, weight, 1e-5)

def test_of_the_device(triton_device):
    x, weight = torch.randn(3, 64, device=triton_device), torch.ones(64, device=triton_device)
    assert x.device.type == "cuda"
    expected = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(run(x, weight), expected)
    assert run(x, weight).tolist() == run(x, weight).cpu().tolist()

def test_of_a_kernel_with_a_host_tensor(triton_device):
    run(torch.randn(3, 64, device=triton_device), torch.ones(64))

def test_of_mixed_devices(triton_device):
    torch.randn(3, device=triton_device) + torch.randn(3)

@pytest.mark.gpu
def test_of_a_real_device():
    torch.cuda.CUDAGraph()
"""


def test_emulated_device_refuses_host_memory(tmp_path: Path) -> None:
    """A folder of the kernel tests gets their fixtures."""
    file = ROOT / "kernels" / "tests" / f"test_emulated_{os.getpid()}.py"
    report = tmp_path / "tests.xml"
    options = ["-c", str(run_tests.INI), "--rootdir", str(ROOT), f"--confcutdir={ROOT}", f"--junitxml={report}"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "bench.check.emulated_device"]
    try:
        file.write_text(TESTS)
        command = [sys.executable, "-m", "pytest", *options, str(file)]
        run = subprocess.run(command, cwd=ROOT, env=stages.environment(), capture_output=True, text=True)
    finally:
        file.unlink()
    counts, failed = run_tests._read_report(report)
    assert counts == {"passed": 1, "failed": 2, "skipped": 0}, run.stdout
    assert [name.rpartition("::")[2] for name in failed] == [
        "test_of_a_kernel_with_a_host_tensor",
        "test_of_mixed_devices",
    ]
    assert "cannot be accessed from Triton (cpu tensor?)" in run.stdout


def test_dry_run_has_every_stage_of_the_real_run() -> None:
    real, dry = (
        [stage.target.replace("run_emulated", "run") for stage in stages.STAGES[size]] for size in ("full", "dry")
    )
    assert set(real) == set(dry) and real[0] == dry[0] == "run_tests.run"
    assert stages.find_stage("tests", "dry").target == "run_tests.run_emulated"


def test_make_runs_the_dry_run(tmp_path: Path) -> None:
    """`make --dry-run` only prints commands; the line of this target runs all the same."""
    arguments = ["gpu-check", "--dry-run", f"OUT={tmp_path}", "ARGS=--only peer", f"PYTHON={sys.executable}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "--size dry --stage 'peer tiny'" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_check.json"]
