"""Stage "tests": the kernel tests, and the engine tests that run on the kernels."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from bench.check.context import StageContext
from chatcache.bench.report import ROOT, Figure

INI = ROOT / "kernels" / "bench" / "bare" / "pytest.ini"
GPU_TESTS = ("tests/gpu", "kernels/tests", "tests/model")
INTERPRETED = (  # the engine before its parts, because the time limit may stop the run
    "kernels/tests/test_triton_engine.py",
    "tests/model/test_triton_sampler.py",
    "kernels/tests",
    "tests/gpu",
)
IGNORED = "tests/model/test_parallel.py"  # runs engine processes, whose messages need msgspec itself
NEED_A_GPU = "(triton or gpu) and not compile and not attention_code and not bench"  # compilation tests need no GPU
MAX_PROCESSES = 12
MIN_CORES = 4


def run(context: StageContext) -> None:
    """Run the GPU tests with compiled kernels on a GPU, and under the interpreter elsewhere."""
    if context.size == "tiny":
        context.measure("tests", lambda: _pytest(context, ["kernels/tests/test_reference.py"], []))
    elif context.on_gpu:
        context.measure("tests on the GPU", lambda: _pytest(context, GPU_TESTS, ["-k", NEED_A_GPU]))
    else:
        context.measure("tests", lambda: _pytest(context, INTERPRETED, []))


def run_emulated(context: StageContext) -> None:
    """Run a sample of the tests of a GPU, interpreted, with tensors of an emulated device; all kernels are launched."""
    options = ["-k", NEED_A_GPU, "-p", "bench.check.emulated_device"]
    context.measure("tests with an emulated GPU", lambda: _pytest(context, GPU_TESTS, options))
    context.measure("kernels in these tests", lambda: check_kernels(context))


def check_kernels(context: StageContext) -> None:
    """Count the kernels that the tests launched. Raises: RuntimeError if they did not launch all of them."""
    log = (context.out / "tests.log").read_text()
    counted = re.search(r"^kernels launched by tests: (\d+); by none: (.*)$", log, re.MULTILINE)
    if counted is None:
        raise RuntimeError("the tests ended before all had run")
    context.add(Figure("kernels launched by tests", float(counted[1]), "kernels"))
    if counted[2] != "-":
        raise RuntimeError(f"no test launched {counted[2]}")


def _pytest(context: StageContext, paths: Sequence[str], options: Sequence[str]) -> None:
    """Run pytest in a process of its own.

    Raises: RuntimeError if tests fail or the time runs out.
    """
    report, log = context.out / "tests.xml", context.out / "tests.log"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-c",
        str(INI),
        "--rootdir",
        str(ROOT),
        f"--confcutdir={ROOT}",
        "--tier",
        "all",
    ]
    command += [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        f"--ignore={ROOT / IGNORED}",
        f"--junitxml={report}",
        "--durations=10",
        "--tb=short",
        *options,
        *_xdist_options(),
    ]
    status = _wait([*command, *paths], log, max(context.time_left_s - 5, 1.0))
    text = log.read_text()
    counts, failed = _read_report(report) if report.exists() else _read_log(text)
    for name, count in counts.items():
        context.add(Figure(f"tests {name}", count, "tests"))
    context.note("tests", {"counts": counts, "failed": failed, "exit status": status})
    print(text[-3000:], flush=True)
    if status != 0:
        how = "was stopped at its time limit" if status is None else f"ended with {status}"
        raise RuntimeError(f"pytest {how}; failed: {', '.join(failed) or 'none'}")


def _wait(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Return pytest's exit status, None if it did not end in time."""
    print(f"$ {shlex.join(command)}", flush=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def _read_log(text: str) -> tuple[dict[str, int], list[str]]:
    """Return what `_read_report` returns, from pytest's output, for a run that wrote no report."""
    words = [line.split() for line in text.splitlines()]
    ended = [line for line in words if {"PASSED", "FAILED", "ERROR"} & set(line)]
    failed = [next((word for word in line if "::" in word), "?") for line in ended if "PASSED" not in line]
    return {"passed": len(ended) - len(failed), "failed": len(failed), "skipped": 0}, failed


def _xdist_options() -> list[str]:
    """Return pytest's options for several processes; none without xdist or with few cores."""
    cores = os.cpu_count() or 1
    if cores < MIN_CORES or importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(min(cores * 3 // 4, MAX_PROCESSES)), "--dist", "load", "--maxschedchunk", "1"]


def _read_report(report: Path) -> tuple[dict[str, int], list[str]]:
    """Return the number of tests by result, and the names of the failed ones."""
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
