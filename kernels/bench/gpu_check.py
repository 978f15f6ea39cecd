"""Check and measure the kernels on whatever this machine has: python3 kernels/bench/gpu_check.py --out DIR

Needs torch, numba and pytest, nothing else of the project. Runs three stages, and each survives the failure of another:
    tests      the kernel tests, in a process of their own
    ceilings   read and copy bandwidth and the matmul rate, on the GPU where there is one, else on the CPU
    kernels    the reference on that device and the CPU kernels, beside the CPU's ceilings
Writes DIR/gpu_check.json and ends with a short table. Exit status 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

KERNELS = pathlib.Path(__file__).resolve().parents[1]
TEST_LIMIT_S = 300
SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-3-8B": (32, 8, 128)}  # H, Hkv, D


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. `limit` is the ceiling in the same unit, None where the figure is a ceiling itself."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    def text(self) -> str:
        """Return the table's line."""
        share = f"{self.value / self.limit:8.2f} of limit" if self.limit else ""
        return f"{self.name:56} {self.value:10.4g} {self.unit:8}{share}"


def run_tests() -> list[Line]:
    """Run the kernel tests. Raises: RuntimeError with the end of their output if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "--import-mode=importlib", "-c", os.devnull]
    command += ["--rootdir", str(KERNELS), "-p", "no:cacheprovider", str(KERNELS / "tests")]
    environment = {**os.environ, "PYTHONPATH": str(KERNELS)}
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment, cwd=KERNELS, capture_output=True, text=True, timeout=TEST_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    print(done.stdout.strip().splitlines()[-1])
    return [Line("kernel tests, all passed", time.perf_counter() - start, "s")]


def measure_ceilings(device: str) -> list[Line]:
    """Measure what the device can do at best."""
    import torch
    from chatcache_kernels import ceilings

    num_bytes = 2**32 if device == "cuda" else 2**28
    lines = [
        Line(f"read bandwidth, {num_bytes // 2**20} MiB", ceilings.read_bytes_per_s(num_bytes, device) / 1e9, "GB/s"),
        Line(f"copy bandwidth, {num_bytes // 2**20} MiB", ceilings.copy_bytes_per_s(num_bytes, device) / 1e9, "GB/s"),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        rate = ceilings.matmul_flops_per_s(dtype, device)
        lines.append(Line(f"matmul, {str(dtype).removeprefix('torch.')}", rate / 1e9, "GFLOP/s"))
    return lines


def measure_kernels(device: str) -> list[Line]:
    """Measure decode attention of each backend: 8 rows of 2,048 tokens in shuffled pages, bfloat16."""
    import torch
    from chatcache_kernels import ceilings, cpu, reference
    from chatcache_kernels.types import AttentionBatch

    lines, tables = [], (torch.randperm(8 * 128) + 1).view(8, 128)
    cached = AttentionBatch.build(tables, torch.full((8,), 2047), torch.ones(8), 16)
    for name, (heads, kv_heads, head_dim) in SHAPES.items():
        for label, backend, place in ((f"reference on {device}", reference, device), ("cpu", cpu, "cpu")):
            with torch.device(place):
                pages = backend.allocate_pages(1, 8 * 128 + 1, 16, kv_heads, head_dim, torch.bfloat16)
                q = torch.randn(8, heads, head_dim).to(torch.bfloat16)
            pages.k.normal_(), pages.v.normal_()
            batch = cached.to(place)
            attend = partial(backend.paged_attention, q, pages, 0, batch, 0.1)
            seconds = ceilings.best_s(attend, place)
            num_bytes = 8 * 128 * pages.page_bytes
            limit = ceilings.read_bytes_per_s(num_bytes, place) / 1e9
            lines.append(Line(f"decode attention, {name}, {label}", num_bytes / seconds / 1e9, "GB/s", limit))
    return lines


def describe() -> dict[str, Any]:
    """Return what was measured on."""
    import numba
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        "kind": "cuda" if on_gpu else "cpu",
        "cpu_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
    }


def _cpu_name() -> str:
    """Return the CPU's model name where the system tells."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def main() -> int:
    """Run every stage, write the JSON and print the table."""
    parser = argparse.ArgumentParser(description="Check and measure the kernels on whatever this machine has.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for gpu_check.json")
    out = parser.parse_args().out
    sys.path.insert(0, str(KERNELS))
    report: dict[str, Any] = {"machine": {}, "figures": {}, "failures": {}}

    def stage(name: str, work: Callable[[], Any]) -> Any:
        print(f"== {name}", flush=True)
        try:
            return work()
        except Exception as error:
            traceback.print_exc()
            report["failures"][name] = str(error)
            return None

    report["machine"] = stage("machine", describe) or {}
    device = report["machine"].get("kind", "cpu")
    stages = {
        "tests": run_tests,
        "ceilings": lambda: measure_ceilings(device),
        "kernels": lambda: measure_kernels(device),
    }
    lines = {name: stage(name, work) or [] for name, work in stages.items()}
    report["figures"] = {name: [asdict(line) for line in found] for name, found in lines.items()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{report['machine']}")
    for line in (line for found in lines.values() for line in found):
        print(line.text())
    for name, reason in report["failures"].items():
        print(f"FAILED {name}: {reason.splitlines()[0] if reason else 'no reason given'}")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
