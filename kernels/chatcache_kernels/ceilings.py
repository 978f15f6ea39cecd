"""What a device can do at best, measured: the limits beside which kernels are judged."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def best_s(work: Callable[[], object], device: str = "cpu", budget_s: float = 0.5) -> float:
    """Return the shortest of many runs, at least five: disturbances only ever add time."""
    work()
    shortest, deadline = float("inf"), time.perf_counter() + budget_s
    for attempt in range(10_000):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        shortest = min(shortest, time.perf_counter() - start)
        if attempt >= 4 and time.perf_counter() > deadline:
            break
    return shortest


def read_bytes_per_s(num_bytes: int, device: str = "cpu") -> float:
    """Measure reading a buffer of so many bytes, over and over: a small one is read from a cache."""
    buffer = torch.ones(num_bytes // 4, device=device)
    return num_bytes / best_s(buffer.sum, device)


def copy_bytes_per_s(num_bytes: int, device: str = "cpu") -> float:
    """Measure copying a buffer of so many bytes; counts what is read and what is written."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / best_s(lambda: target.copy_(source), device)


def matmul_flops_per_s(dtype: torch.dtype, device: str = "cpu") -> float:
    """Measure a square matrix multiplication."""
    size = 8192 if device.startswith("cuda") else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_s(lambda: left @ right, device)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
