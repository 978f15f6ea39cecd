"""What this machine can do at best, and the shortest time a step could take on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIN_BUFFER_BYTES = 2**20
MAX_BUFFER_BYTES = 2**30
MEASURE_S = 0.5
MATMUL_SIZE = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured ceilings. `buffer_bytes`: what the bandwidth was read from; small buffers are read from a cache."""

    read_bytes_per_s: float
    matmul_flops_per_s: float
    buffer_bytes: int

    def step_s(self, num_bytes: float, num_flops: float) -> float:
        """The roofline: a step that reads and multiplies this much takes at least so long."""
        return max(num_bytes / self.read_bytes_per_s, num_flops / self.matmul_flops_per_s)


def measure_limits(weight_bytes: int, dtype: str, device: str) -> Limits:
    """Measure both ceilings where the model runs, the bandwidth over a buffer of the weights' size."""
    buffer_bytes = min(max(weight_bytes, MIN_BUFFER_BYTES), MAX_BUFFER_BYTES)
    with torch.inference_mode():
        return Limits(
            read_bytes_per_s=_read_rate(buffer_bytes, device),
            matmul_flops_per_s=_matmul_rate(getattr(torch, dtype), device),
            buffer_bytes=buffer_bytes,
        )


def _read_rate(num_bytes: int, device: str) -> float:
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return num_bytes / _best_s(lambda: buffer.sum(), device)


def _matmul_rate(dtype: torch.dtype, device: str) -> float:
    size = MATMUL_SIZE[device.split(":")[0]]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_s(lambda: left @ right, device)


def _best_s(work: Callable[[], torch.Tensor], device: str) -> float:
    """Shortest of many runs: disturbances only ever add time."""
    best, deadline = float("inf"), time.perf_counter() + MEASURE_S
    for attempt in range(1000):
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
        if attempt >= 4 and time.perf_counter() > deadline:
            break
    return best
