"""Compiled kernels are kept between processes, and do without a folder that can be written."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

SCRIPT = """
import torch
from chatcache_kernels import cpu
from chatcache_kernels.cpu.fused import norm_kernel
x = torch.randn(3, 32)
assert torch.allclose(cpu.rms_norm(x, torch.ones(32), 0.0).square().mean(-1), torch.ones(3))
print(norm_kernel(0).compiled.cache_hits)
"""


def run(**environment: str) -> int:
    """Return how many kernels a fresh process found compiled."""
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_second_process_compiles_nothing(tmp_path: pathlib.Path) -> None:
    assert run(NUMBA_CACHE_DIR=str(tmp_path)) == 0
    assert run(NUMBA_CACHE_DIR=str(tmp_path)) == 1


def test_unwritable_cache_folder_is_no_obstacle() -> None:
    assert run(NUMBA_CACHE_DIR="/dev/null/nowhere") == 0
