"""Every listed variant of every Triton kernel compiles for the chips we name; no GPU is needed.

The interpreter accepts what the compiler refuses, and neither says whether registers suffice; see compile_kernels.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
ARCHS = [80, 90, 100]
MOST = 2  # of each kernel, drawn anew in every run; the `long` test takes all

PLANTED = """
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
    """Run the script in a process of its own: in this one, kernels may be interpreted."""
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


@pytest.mark.parametrize(("arch", "most"), [pytest.param(80, MOST, marks=pytest.mark.long), (90, MOST), (100, 1)])
def test_variants_compile_within_the_chip(arch: int, most: int, tmp_path: Path) -> None:
    check(compile_all(arch, tmp_path, "--most", str(most)))


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_compiles_within_the_chip(arch: int, tmp_path: Path) -> None:
    check(compile_all(arch, tmp_path))


def test_what_is_wrong_with_a_kernel_is_reported(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    lines = compile_all(90, tmp_path, "--module", "planted")
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


def test_a_kernel_that_nobody_lists_is_reported(tmp_path: Path) -> None:
    launch = "\ndef launch(x):\n    forgotten[(1,)](x)\n"
    (tmp_path / "planted.py").write_text(PLANTED + launch)
    (line,) = compile_all(90, tmp_path, "--module", "planted")
    assert "lists nothing for forgotten" in line["error"]


def test_tools_that_do_not_run_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "cuobjdump"
    broken.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo release 12.8, V12.8; else exit 3; fi\n')
    broken.chmod(0o755)
    only = ("--module", "chatcache_kernels.triton.fused", "--match", "silu_rows *fp32")
    (line,) = compile_all(90, tmp_path, *only, env={"TRITON_CUOBJDUMP_PATH": str(broken)})
    assert line["error"].startswith("RuntimeError") and "cuobjdump does not run here" in line["error"]
