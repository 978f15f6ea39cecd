"""Stage "limits": what the device can do at best.

Other stages measure their limits themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from bench.check.context import StageContext
from chatcache.bench.device import (
    Limits,
    Timing,
    measure_limits,
    time_copy,
    time_matmul,
    time_read,
    time_with_host,
    time_work,
)
from chatcache.bench.report import Figure

GIB, MIB = 2**30, 2**20
READ_BYTES = {"full": 4 * GIB, "cpu": 256 * MIB, "tiny": MIB}
SMALL_BYTES = {"full": (16 * MIB, 256 * MIB), "cpu": (MIB, 16 * MIB), "tiny": (MIB // 4,)}
MATMUL = {"full": (1024, 4096, 8192), "cpu": (1024,), "tiny": (64,)}
LAUNCHES = {"full": 1000, "cpu": 100, "tiny": 10}


def stage_limits(context: StageContext) -> Limits:
    """Measure the limits in the process of a stage, with buffers larger than a cache."""
    num_bytes = READ_BYTES[context.size]
    limits = measure_limits(num_bytes, "bfloat16", context.device, MATMUL[context.size][-1])
    read_bytes_per_s = max(limits.read_bytes_per_s, limits.copy_bytes_per_s)
    if context.on_gpu:
        read_bytes_per_s = max(read_bytes_per_s, num_bytes / _time_triton_read(num_bytes, context.device).low_s)
    limits = replace(limits, read_bytes_per_s=read_bytes_per_s)
    context.add(
        Figure("limit of this stage: read", limits.read_bytes_per_s / 1e9, "GB/s"),
        Figure("limit of this stage: copy", limits.copy_bytes_per_s / 1e9, "GB/s"),
        Figure("limit of this stage: bf16 matmul", limits.matmul_flops_per_s / 1e12, "TFLOP/s"),
    )
    return limits


def run(context: StageContext) -> None:
    """Measure every limit at several sizes."""
    for num_bytes in (*SMALL_BYTES[context.size], READ_BYTES[context.size]):
        context.measure(f"bandwidth over {num_bytes // 2**10} KiB", partial(_measure_bandwidth, context, num_bytes))
    for size in MATMUL[context.size]:
        context.measure(f"matmul {size}", partial(_measure_matmul, context, size))
    context.measure("launches", partial(_measure_launches, context))


def _measure_bandwidth(context: StageContext, num_bytes: int) -> None:
    label = f"{num_bytes / MIB:.4g} MiB"
    reads = {"torch": time_read(num_bytes, context.device)}
    if context.on_gpu:
        reads["triton"] = _time_triton_read(num_bytes, context.device)
    for name, timing in reads.items():
        context.add(_bandwidth_figure(f"read, {label}, {name}", num_bytes, timing))
    copy = time_copy(num_bytes, context.device)
    context.add(_bandwidth_figure(f"copy, {label} (read + written)", 2 * num_bytes, copy))


def _bandwidth_figure(name: str, num_bytes: int, timing: Timing) -> Figure:
    spread = (num_bytes / timing.high_s / 1e9, num_bytes / timing.low_s / 1e9)
    return Figure(name, num_bytes / timing.median_s / 1e9, "GB/s", spread=spread)


def _time_triton_read(num_bytes: int, device: str) -> Timing:
    """Time a kernel that only reads."""
    from bench.check import read_kernel

    buffer = torch.randn(num_bytes // 4, device=device)
    out = torch.empty(read_kernel.num_programs(), device=device)
    return time_work(lambda _: read_kernel.read_all(buffer, out), 4, device)


def _measure_matmul(context: StageContext, size: int) -> None:
    flops_per_s = 2 * size**3 / time_matmul(size, torch.bfloat16, context.device).median_s
    context.add(Figure(f"bf16 matmul, {size} x {size} x {size}", flops_per_s / 1e12, "TFLOP/s"))


def _measure_launches(context: StageContext) -> None:
    """Time a minimal kernel, launched by the host and as a node of a CUDA graph."""
    one, count = torch.zeros(1, device=context.device), LAUNCHES[context.size]
    launch_all: Callable[[], object] = lambda: [one.add_(1) for _ in range(count)]  # noqa: E731
    launch_all()
    launch_s = time_with_host(launch_all, context.device) / count
    context.add(Figure("torch kernel launched by the host", launch_s * 1e6, "us"))
    if context.on_gpu:
        node = time_work(lambda _: one.add_(1), count, context.device)
        context.add(Figure("node of a CUDA graph", node.median_s * 1e6, "us"))
        graph = time_work(lambda _: one.add_(1), 1, context.device)
        context.add(Figure("CUDA graph of one node, launch to end", graph.median_s * 1e6, "us"))
    start = time.perf_counter()
    for _ in range(count):
        one.tolist()
    context.add(Figure("copy of one number to the host", (time.perf_counter() - start) / count * 1e6, "us"))
