"""Profile engine steps: kernels by device time, and the idle time of the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from chatcache.bench.device import synchronize

MAX_KERNELS = 14


@dataclass(frozen=True, slots=True)
class Profile:
    """Device time of engine steps, as means per step.

    `kernels`: (name, launches, ms), longest first; torch operators on a CPU.
    """

    wall_ms: float
    device_ms: float
    num_launches: float
    kernels: tuple[tuple[str, float, float], ...]

    @property
    def idle_ms(self) -> float:
        """Time without a running kernel, if kernels do not overlap."""
        return self.wall_ms - self.device_ms

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "idle_ms": self.idle_ms}

    def text(self) -> str:
        """Return the profile as text."""
        head = f"   step {self.wall_ms:.3f} ms under the profiler"
        head += f", {self.num_launches:.0f} kernels in {self.device_ms:.3f} ms"
        rows = (f"   {ms:9.4f} ms {count:7.1f} x {name[:90]}" for name, count, ms in self.kernels)
        return "\n".join((f"{head}, idle {self.idle_ms:.3f} ms", *rows))


def profile_steps(step: Callable[[], object], num_steps: int, device: str) -> Profile:
    """Profile steps of a running engine."""
    on_gpu = device.startswith("cuda")
    step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize(device)
        wall_s = time.perf_counter() - start
    entries = [(event.key, event.count, _self_us(event, on_gpu)) for event in profiler.key_averages()]
    entries = sorted((entry for entry in entries if entry[2] > 0), key=lambda entry: -entry[2])
    kernels = tuple((key, count / num_steps, us / 1e3 / num_steps) for key, count, us in entries)
    device_ms = sum(ms for _, _, ms in kernels) if on_gpu else 0.0
    launches = sum(count for _, count, _ in kernels) if on_gpu else 0.0
    return Profile(wall_s * 1e3 / num_steps, device_ms, launches, kernels[:MAX_KERNELS])


def _self_us(event: Any, on_gpu: bool) -> float:
    if not on_gpu:
        return float(event.self_cpu_time_total)
    if event.device_type != DeviceType.CUDA:
        return 0.0
    return float(event.self_device_time_total)
