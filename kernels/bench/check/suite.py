"""(a) The tests: kernels against the reference, the engine on them against the engine on the reference."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from bench.check.context import Context
from bench.check.figures import Figure
from bench.check.machine import ROOT

INI = ROOT / "kernels" / "bench" / "bare" / "pytest.ini"
GPU_TESTS = ("tests/gpu", "kernels/tests", "tests/model")
INTERPRETED = (  # the whole before its parts: what is stopped for want of time has shown the most
    "kernels/tests/test_kernels_triton_engine.py",
    "tests/model/test_device_sampler.py",
    "kernels/tests",
    "tests/gpu",
)
NEED_A_GPU = "(triton or gpu) and not compile and not attention_code and not bench"  # compiling for chips needs none
MOST_PROCESSES = 8
FEW_CORES = 4


def run(context: Context) -> None:
    """Run what this machine can: on a GPU all that needs one, compiled; elsewhere the same under the interpreter."""
    if context.size == "tiny":
        context.measure("tests", lambda: _pytest(context, ["kernels/tests/test_kernels_reference.py"], []))
    elif context.on_gpu:
        context.measure("tests on the GPU", lambda: _pytest(context, GPU_TESTS, ["-k", NEED_A_GPU]))
    else:
        context.measure("tests", lambda: _pytest(context, INTERPRETED, []))


def _pytest(context: Context, paths: Sequence[str], options: Sequence[str]) -> None:
    """Run pytest in a process of its own. Raises: RuntimeError naming the tests that failed, or if time ran out."""
    report, log = context.out / "tests.xml", context.out / "tests.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-v", "-c", str(INI), "--rootdir", str(ROOT), f"--confcutdir={ROOT}"]
    command += [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        f"--junitxml={report}",
        "--durations=10",
        "--tb=short",
        *options,
        *_spread_out(),
    ]
    status = _wait([*command, *paths], log, max(context.time_left_s - 5, 1.0))
    text = log.read_text()
    counts, failed = _read(report) if report.exists() else _read_log(text)
    for name, count in counts.items():
        context.add(Figure(f"tests {name}", count, "tests"))
    context.note("tests", {"counts": counts, "failed": failed, "exit status": status})
    print(text[-3000:], flush=True)
    if status != 0:
        how = "was stopped for want of time" if status is None else f"ended with {status}"
        raise RuntimeError(f"pytest {how}; failed: {', '.join(failed) or 'none'}")


def _wait(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Return pytest's exit status, None if it did not end in time."""
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def _read_log(text: str) -> tuple[dict[str, int], list[str]]:
    """Return as much as `_read` of a run that did not come to its report."""
    words = [line.split() for line in text.splitlines()]
    ended = [line for line in words if {"PASSED", "FAILED", "ERROR"} & set(line)]
    failed = [next((word for word in line if "::" in word), "?") for line in ended if "PASSED" not in line]
    return {"passed": len(ended) - len(failed), "failed": len(failed), "skipped": 0}, failed


def _spread_out() -> list[str]:
    """Return the options that share the tests among processes, where there are cores and the plug-in for it."""
    cores = os.cpu_count() or 1
    if cores < FEW_CORES or importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(cores // 2, MOST_PROCESSES)), "--dist", "load", "--maxschedchunk", "1"]


def _read(report: Path) -> tuple[dict[str, int], list[str]]:
    """Return how many tests ended how, and the names of those that failed."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        name = f"{case.get('classname')}::{case.get('name')}"
        if kinds & {"failure", "error"}:
            counts["failed"] += 1
            failed.append(name)
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return counts, failed
