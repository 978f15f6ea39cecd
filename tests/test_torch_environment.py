"""The variables that torch reads when it loads: set before that, in every entry, unless the user has set them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from chatcache import torch_environment

VARIABLES = (
    *("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_WAIT_POLICY"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "THP_MEM_ALLOC_ENABLE"),
)
SPIN = {"GOMP_SPINCOUNT": torch_environment.SPIN_COUNT}
BLOCK = {"KMP_BLOCKTIME": torch_environment.BLOCK_TIME_MS}
ALLOCATOR = {"PYTORCH_ALLOC_CONF": torch_environment.ALLOCATOR}
HUGE = {"THP_MEM_ALLOC_ENABLE": "1"}
ENTRIES = {
    "llm": "from chatcache import LLM",
    "llm_module": "from chatcache.llm.llm import LLM",
    "command": "import chatcache.cli.main",
    "engine_process": "import chatcache.engine_process.worker",
    "bench": "import chatcache.bench.engine_bench",
}


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", script], env={**kept, "PYTHONPATH": paths, **environment},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES)
def test_entry_sets_the_spin_count_before_openmp_is_loaded(entry: str) -> None:
    """libgomp prints the settings in effect when torch loads it."""
    if not torch.__config__.parallel_info().count("OpenMP") or sys.platform != "linux":
        pytest.skip("torch does not use libgomp here")
    done = run_python(f"{ENTRIES[entry]}\nimport torch", OMP_DISPLAY_ENV="verbose")
    assert f"GOMP_SPINCOUNT = '{torch_environment.SPIN_COUNT}'" in done.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {**SPIN, **BLOCK, **ALLOCATOR, **HUGE}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7", **BLOCK, **ALLOCATOR, **HUGE}),
        ({"KMP_BLOCKTIME": "7"}, {**SPIN, "KMP_BLOCKTIME": "7", **ALLOCATOR, **HUGE}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active", **ALLOCATOR, **HUGE}),
        ({"PYTORCH_ALLOC_CONF": ""}, {**SPIN, **BLOCK, "PYTORCH_ALLOC_CONF": "", **HUGE}),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, {**SPIN, **BLOCK, **ALLOCATOR, "THP_MEM_ALLOC_ENABLE": "0"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, {**SPIN, **BLOCK, "PYTORCH_CUDA_ALLOC_CONF": "a:1", **HUGE}),
    ],
    ids=str,
)
def test_set_defaults_keeps_the_users_values(
    given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    environment = dict(given)
    assert torch_environment.is_spinning_limited(environment) == any("ALLOC" not in name for name in given)
    torch_environment.set_defaults(environment)
    assert environment == expected
    assert torch_environment.is_spinning_limited(environment)


def test_set_defaults_after_torch_sets_nothing() -> None:
    environment: dict[str, str] = {}
    torch_environment.set_defaults(environment)
    assert environment == {}


def test_import_of_chatcache_loads_no_torch_and_sets_the_environment() -> None:
    script = "import chatcache, os, sys; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    assert run_python(script).stdout.split() == [torch_environment.SPIN_COUNT, "False"]
    assert run_python(script, GOMP_SPINCOUNT="7").stdout.split() == ["7", "False"]
