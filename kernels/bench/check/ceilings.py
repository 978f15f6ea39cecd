"""(b) What the device can do at best. Stages that need a limit measure it in their own process, just before."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bench.check.context import Context
from bench.check.figures import Figure
from bench.check.timing import Timing, measure, wall_s

GIB, MIB = 2**30, 2**20
READ_BYTES = {"full": 4 * GIB, "cpu": 256 * MIB, "tiny": MIB}
SMALL_BYTES = {"full": (16 * MIB, 256 * MIB), "cpu": (MIB, 16 * MIB), "tiny": (MIB // 4,)}
MATMUL = {"full": (1024, 4096, 8192), "cpu": (1024,), "tiny": (64,)}
LAUNCHES = {"full": 1000, "cpu": 100, "tiny": 10}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What every figure of a stage is judged by."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def floor_s(self, num_bytes: float, num_flops: float = 0.0) -> float:
        """The roofline: reading and multiplying this much takes at least so long."""
        return max(num_bytes / self.read_bytes_per_s, num_flops / self.matmul_flops_per_s)


def quick(context: Context) -> Ceilings:
    """Measure the three limits, the bandwidths over memory rather than a cache."""
    size = READ_BYTES[context.size]
    copied = copy_rate(context, size)
    found = Ceilings(max(read_rate(context, size), copied), copied, matmul_rate(context, MATMUL[context.size][-1]))
    names = (("read", found.read_bytes_per_s / 1e9, "GB/s"), ("copy", found.copy_bytes_per_s / 1e9, "GB/s"))
    context.add(*(Figure(f"this stage's limit: {name}", value, unit) for name, value, unit in names))
    context.add(Figure("this stage's limit: bf16 matmul", found.matmul_flops_per_s / 1e12, "TFLOP/s"))
    return found


def run(context: Context) -> None:
    """Measure every ceiling at several sizes."""
    for size in (*SMALL_BYTES[context.size], READ_BYTES[context.size]):
        context.measure(f"bandwidth over {size // 2**10} KiB", partial(_bandwidths, context, size))
    for size in MATMUL[context.size]:
        context.measure(f"matmul {size}", partial(_matmul, context, size))
    context.measure("launches", partial(_launches, context))


def _bandwidths(context: Context, size: int) -> None:
    label = f"{size / MIB:.4g} MiB"
    reads = {"torch": read_timing(context, size)}
    if context.on_gpu:
        reads["triton"] = triton_read_timing(context, size)
    for name, timing in reads.items():
        context.add(_speed(f"read, {label}, {name}", size, timing))
    context.add(_speed(f"copy, {label} (read + written)", 2 * size, copy_timing(context, size)))


def _speed(name: str, num_bytes: int, timing: Timing) -> Figure:
    spread = (num_bytes / timing.high_s / 1e9, num_bytes / timing.low_s / 1e9)
    return Figure(name, num_bytes / timing.median_s / 1e9, "GB/s", spread=spread)


def read_rate(context: Context, size: int) -> float:
    """Return bytes/s of the faster of two ways to read."""
    times = [read_timing(context, size).median_s]
    if context.on_gpu:
        times.append(triton_read_timing(context, size).median_s)
    return size / min(times)


def copy_rate(context: Context, size: int) -> float:
    """Return bytes/s read and written."""
    return 2 * size / copy_timing(context, size).median_s


def matmul_rate(context: Context, size: int) -> float:
    """Return FLOP/s of a square product of random bfloat16 matrices."""
    return 2 * size**3 / matmul_timing(context, size).median_s


def read_timing(context: Context, size: int) -> Timing:
    """Time torch's sum."""
    buffer = torch.randn(size // 4, device=context.device)
    out = torch.empty((), device=context.device)
    return measure(lambda _: torch.sum(buffer, dim=0, out=out), 4, context.device)


def triton_read_timing(context: Context, size: int) -> Timing:
    """Time a kernel that only reads."""
    from bench.check import read_kernel

    buffer = torch.randn(size // 4, device=context.device)
    out = torch.empty(read_kernel.num_programs(), device=context.device)
    return measure(lambda _: read_kernel.read_all(buffer, out), 4, context.device)


def copy_timing(context: Context, size: int) -> Timing:
    """Time torch's copy."""
    source = torch.randn(size // 4, device=context.device)
    target = torch.empty_like(source)
    return measure(lambda _: target.copy_(source), 4, context.device)


def matmul_timing(context: Context, size: int) -> Timing:
    """Time one product."""
    left, right = (torch.randn(size, size, device=context.device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return measure(lambda _: torch.mm(left, right, out=out), 4, context.device)


def _matmul(context: Context, size: int) -> None:
    context.add(Figure(f"bf16 matmul, {size} x {size} x {size}", matmul_rate(context, size) / 1e12, "TFLOP/s"))


def _launches(context: Context) -> None:
    """Time a kernel that does nothing, launched by the host and as one node of a graph."""
    one, count = torch.zeros(1, device=context.device), LAUNCHES[context.size]
    many: Callable[[], object] = lambda: [one.add_(1) for _ in range(count)]  # noqa: E731
    many()
    context.add(Figure("torch kernel launched by the host", wall_s(many, context.device) / count * 1e6, "us"))
    if context.on_gpu:
        timing = measure(lambda _: one.add_(1), count, context.device)
        context.add(Figure("node of a CUDA graph", timing.median_s * 1e6, "us"))
        empty = measure(lambda _: one.add_(1), 1, context.device)
        context.add(Figure("CUDA graph of one node, launch to end", empty.median_s * 1e6, "us"))
    start = time.perf_counter()
    for _ in range(count):
        one.tolist()
    context.add(Figure("waiting for one number", (time.perf_counter() - start) / count * 1e6, "us"))
