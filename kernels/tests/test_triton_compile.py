"""Compile Triton kernel variants for several GPU architectures and check limits and PTX.

Needs no GPU.
The interpreter accepts code that the compiler rejects, and does not check registers; see bench/aot.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import aot
from chatcache_kernels.triton.variants import Variant

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MAX_VARIANTS = 1  # per kernel, sampled anew in every run; the `long` test compiles all

BROKEN_MODULE = """
import triton
import triton.language as tl
from chatcache_kernels.triton.variants import Variant

@triton.jit
def interpreted_only(x):
    names = {"first": 0}
    tl.store(x + names["first"], 1.0)

@triton.jit
def two_shapes(x, N: tl.constexpr):
    if tl.load(x) > 0:
        column = tl.arange(0, N)
    else:
        column = tl.arange(0, 2 * N)
    tl.store(x + column, 0.0)

@triton.jit
def spills(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(x + BLOCK + i)
    for _ in range(tl.load(x).to(tl.int32)):
        a, b = a * b + 1.0, b * tl.sum(a * b)
    tl.store(x + i, a + b)

@triton.jit
def too_much_shared(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tile = tl.load(x + i)
    tl.store(x + i, tl.dot(tile, tile.T))

@triton.jit
def narrow(x, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + 2 * i, tl.load(x + 2 * i) + 1.0)

@triton.jit
def forgotten(x):
    tl.store(x, 1.0)

def variants(arch):
    floats = {"x": "*fp32"}
    yield Variant(interpreted_only, floats, {}, {"num_warps": 1})
    yield Variant(two_shapes, {**floats, "N": "constexpr"}, {"N": 16}, {"num_warps": 1})
    yield Variant(spills, {**floats, "BLOCK": "constexpr"}, {"BLOCK": 4096}, {"num_warps": 1})
    yield Variant(too_much_shared, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 256}, {"num_warps": 8})
    yield Variant(narrow, {**floats, "BLOCK": "constexpr"}, {"BLOCK": 1024}, {"num_warps": 4}, wide=True)
    yield Variant(narrow, {**floats, "BLOCK": "constexpr"}, {"BLOCK": 1024}, {"num_warps": 4})
"""


def run_aot(arch: int, folder: Path, *options: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run `kernels.bench.aot` in a new process, as kernels may be interpreted in this one."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(ROOT), str(ROOT / "kernels"), str(folder), variables.get("PYTHONPATH", ""))
    variables |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "kernels.bench.aot", "--lines", "--jobs", "1", "--arch", str(arch), *options]
    run = subprocess.run(command, cwd=ROOT, env=variables | (env or {}), capture_output=True, text=True, timeout=500)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]  # ptxas complains there, too
    assert run.returncode == any(line["error"] for line in lines), run.stderr
    return lines


def check(lines: list[dict[str, Any]]) -> None:
    wrong = [f"{line['variant']}\n    {line['error']}" for line in lines if line["error"]]
    assert not wrong, "\n".join(wrong)
    assert len({line["kernel"] for line in lines}) >= 14


def test_sampled_variants_compile_within_limits(tmp_path: Path) -> None:
    """On one architecture, another for other seeds."""
    seed = os.environ["CHATCACHE_TEST_SEED"]
    arch = (90, 86, 120)[int(seed) % 3]
    check(run_aot(arch, tmp_path, "--most", str(MAX_VARIANTS), "--seed", seed))


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_every_variant_compiles_within_limits(arch: int, tmp_path: Path) -> None:
    check(run_aot(arch, tmp_path))


def test_gpu_configurations_interpret_and_compile(tmp_path: Path) -> None:
    """Tests pass in the form that a GPU launches; the forms that they launch compile."""
    forms = tmp_path / "forms.jsonl"
    variables = {**os.environ, "TRITON_INTERPRET": "1", "GPU_FORMS": f"90:{forms}"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""))))
    tests = ["kernels/tests/test_triton_attention.py", "tests/model/test_triton_sampler.py"]
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "bench.record_launches"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=ROOT, env=variables, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    recorded = [json.loads(line) for line in forms.read_text().splitlines()]
    constants = {name: value for form in recorded for name, value in form[3].items() if name == "BLOCK_N"}
    assert constants, "no attention was recorded"
    check(run_aot(90, tmp_path, "--recorded", str(forms), "--most", "1"))


def test_broken_kernels_are_reported(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text(BROKEN_MODULE)
    lines = run_aot(90, tmp_path, "--module", "broken_module")
    errors = [line["error"] for line in lines]
    expected = [
        "unsupported AST node",
        "Mismatched type",
        "bytes per thread",
        "shared memory; this chip has 232448",
        "no 16-byte ld",
    ]
    for error, text in zip(errors, expected, strict=False):
        assert error is not None and text in error, (error, text)
    assert errors[len(expected) :] == [None]


GROUP_OF_5 = {"ROWS": 64, "GROUP": 5, "HEAD_DIM": 128}


@pytest.mark.parametrize(
    ("arch", "name", "constants", "accepted"),
    [
        (86, "paged_attention_kernel", GROUP_OF_5, 80),
        (90, "paged_attention_kernel", GROUP_OF_5, 16),
        (86, "paged_attention_kernel", {**GROUP_OF_5, "GROUP": 4}, 16),
        (80, "delta_chunk_kernel", {"PRECISION": "tf32"}, 32),
        (90, "delta_chunk_kernel", {"PRECISION": "tf32"}, 16),
        (90, "delta_chunk_kernel", {"PRECISION": "tf32x3"}, 240),
        (120, "ssd_chunk_kernel", {"PRECISION": "tf32x3"}, 128),
        (120, "ssd_step_kernel", {"PRECISION": "tf32x3"}, 16),
    ],
)
def test_spill_over_the_accepted_one_is_reported(
    arch: int, name: str, constants: dict[str, object], accepted: int
) -> None:
    """Each accepted spill has a limit, which holds for its chips and forms only."""
    kernel = SimpleNamespace(__module__="chatcache_kernels.triton.example", __name__=name)
    variant = Variant(kernel, {"x": "*bf16"}, constants, {"num_warps": 4})
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=0), asm={"ptx": ""})
    assert aot.find_problem(variant, arch, compiled, accepted) is None
    problem = aot.find_problem(variant, arch, compiled, accepted + 4)
    assert problem == f"spills {accepted + 4} bytes per thread; accepted are {accepted}"


def test_unlisted_kernel_is_reported(tmp_path: Path) -> None:
    launch = "\ndef launch(x):\n    forgotten[(1,)](x)\n"
    (tmp_path / "broken_module.py").write_text(BROKEN_MODULE + launch)
    (line,) = run_aot(90, tmp_path, "--module", "broken_module")
    assert "lists nothing for forgotten" in line["error"]


def test_broken_cuobjdump_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "cuobjdump"
    broken.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo release 12.8, V12.8; else exit 3; fi\n')
    broken.chmod(0o755)
    only = ("--module", "chatcache_kernels.triton.fused", "--match", "activation_kernel *fp32 ACTIVATION=silu")
    (line,) = run_aot(90, tmp_path, *only, env={"TRITON_CUOBJDUMP_PATH": str(broken)})
    assert line["error"].startswith("RuntimeError") and "cuobjdump does not run here" in line["error"]


BF16_ATTENTION = "attention.paged_attention_kernel *bf16/*fp32/*i32 sinks=None"
LLAMA = "SLICES=1 GROUP=4 KV_HEADS=8 HEAD_DIM=128"


@pytest.mark.parametrize(("rows", "product"), [(16, "mma.sync"), (128, "wgmma.mma_async")])
def test_attention_code_prefetches_16_bytes_while_multiplying(rows: int, product: str, tmp_path: Path) -> None:
    match = f"{BF16_ATTENTION} ROWS={rows} {LLAMA}"
    only = ("--module", "chatcache_kernels.triton.attention", "--match", match)
    (line,) = run_aot(90, tmp_path, "--asm", str(tmp_path), *only)
    assert line["error"] is None
    (code,) = (path.read_text() for path in tmp_path.glob("*.ptx"))
    copies = re.findall(r"cp\.async\.\w+\.shared\.global .*", code)
    assert len(copies) >= 16
    assert all(" 0x10" in copy for copy in copies), "narrower copies"
    waits = {int(number, 0) for number in re.findall(r"cp\.async\.wait_group\s+(\w+)", code)}
    assert max(waits) >= 2, "no tile of keys and values is on its way while one is waited for"
    assert product in code
    assert not re.search(r"ld\.global[.\w:]*\.[bu]16\b", code), "narrow loads"
