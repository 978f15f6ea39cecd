"""Compile Triton kernel variants for several GPU architectures and check limits and PTX.

Needs no GPU.
The interpreter accepts code that the compiler rejects, and does not check registers; see compile_kernels.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parent
ARCHS = [80, 90, 100]
MAX_VARIANTS = 2  # per kernel, sampled anew in every run; the `long` test compiles all

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


def compile_all(arch: int, folder: Path, *options: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run compile_kernels.py in a new process: in this one, kernels may be interpreted."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(TESTS.parent), str(folder), variables.get("PYTHONPATH", ""))
    variables |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(TESTS / "compile_kernels.py"), "--arch", str(arch), *options]
    run = subprocess.run(command, env=variables | (env or {}), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]  # ptxas complains there, too


def check(lines: list[dict[str, Any]]) -> None:
    wrong = [f"{line['variant']}\n    {line['error']}" for line in lines if line["error"]]
    assert not wrong, "\n".join(wrong)
    assert len({line["variant"].split(" ")[0] for line in lines}) >= 6  # kernels


@pytest.mark.parametrize(
    ("arch", "most"),
    [pytest.param(80, MAX_VARIANTS, marks=pytest.mark.long), (90, 1), pytest.param(100, 1, marks=pytest.mark.slow)],
)
def test_sampled_variants_compile_within_limits(arch: int, most: int, tmp_path: Path) -> None:
    check(compile_all(arch, tmp_path, "--most", str(most)))


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_compiles_within_limits(arch: int, tmp_path: Path) -> None:
    check(compile_all(arch, tmp_path))


def test_broken_kernels_are_reported(tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text(BROKEN_MODULE)
    lines = compile_all(90, tmp_path, "--module", "broken_module")
    errors = [line["error"] for line in lines]
    expected = [
        "unsupported AST node",
        "Mismatched type",
        "spills:",
        "shared memory; this chip has 232448",
        "no 16-byte ld",
    ]
    for error, text in zip(errors, expected, strict=False):
        assert error is not None and text in error, (error, text)
    assert errors[len(expected) :] == [None]


def test_unlisted_kernel_is_reported(tmp_path: Path) -> None:
    launch = "\ndef launch(x):\n    forgotten[(1,)](x)\n"
    (tmp_path / "broken_module.py").write_text(BROKEN_MODULE + launch)
    (line,) = compile_all(90, tmp_path, "--module", "broken_module")
    assert "lists nothing for forgotten" in line["error"]


def test_broken_cuobjdump_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "cuobjdump"
    broken.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo release 12.8, V12.8; else exit 3; fi\n')
    broken.chmod(0o755)
    only = ("--module", "chatcache_kernels.triton.fused", "--match", "silu_mul_kernel *fp32")
    (line,) = compile_all(90, tmp_path, *only, env={"TRITON_CUOBJDUMP_PATH": str(broken)})
    assert line["error"].startswith("RuntimeError") and "cuobjdump does not run here" in line["error"]


BF16_ATTENTION = "attention.paged_attention_kernel *bf16/*fp32/*i32 sinks=None"
LLAMA = "SLICES=1 GROUP=4 KV_HEADS=8 HEAD_DIM=128"


@pytest.mark.parametrize(("rows", "product"), [(16, "mma.sync"), (128, "wgmma.mma_async")])
def test_attention_code_prefetches_16_bytes_while_multiplying(rows: int, product: str, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (str(TESTS.parent), variables.get("PYTHONPATH", ""))
    variables |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(TESTS / "compile_kernels.py"), "--arch", "90", "--asm", str(tmp_path)]
    command += ["--module", "chatcache_kernels.triton.attention", "--match", f"{BF16_ATTENTION} ROWS={rows} {LLAMA}"]
    text = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=True).stdout
    (line,) = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert line["error"] is None
    (code,) = (path.read_text() for path in tmp_path.glob("*.ptx"))
    copies = re.findall(r"cp\.async\.\w+\.shared\.global .*", code)
    assert len(copies) >= 16
    assert all(" 0x10" in copy for copy in copies), "narrower copies"
    waits = {int(number, 0) for number in re.findall(r"cp\.async\.wait_group\s+(\w+)", code)}
    assert max(waits) >= 2, "no tile of keys and values is on its way while one is waited for"
    assert product in code
    assert not re.search(r"ld\.global[.\w:]*\.[bu]16\b", code), "narrow loads"
