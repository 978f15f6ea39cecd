"""Time work on a device, and measure what the device can do at best.

On a GPU one CUDA graph runs the work over several inputs in turn, so that neither the host nor the L2 cache decides the
time. Other devices run a plain loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[int], object]
"""Does the work on input number i; its return value is dropped."""

MIN_BUFFER_BYTES = 2**20
MATMUL_SIZE = {"cpu": 1024, "cuda": 4096}
SLEEP_CYCLES_PER_S = 4e9  # twice the clock of current GPUs
BUDGET_S = 0.4
"""A measurement ends after this time, or after its last repetition if that is earlier."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: median, lowest and highest of the repetitions.

    `graphed`: timed by CUDA graph replay.
    """

    median_s: float
    low_s: float
    high_s: float
    graphed: bool = False


def time_work(work: Work, num_inputs: int, device: str, *, repeats: int = 15, budget_s: float | None = None) -> Timing:
    """Time `work(0)` to `work(num_inputs - 1)`; the result is per call."""
    budget_s = BUDGET_S if budget_s is None else budget_s
    with torch.inference_mode():
        for number in range(min(num_inputs, 3)):  # compiles and allocates
            work(number)
        if device.startswith("cuda"):
            return _time_on_gpu(work, num_inputs, repeats, budget_s)
        return _time_on_cpu(work, num_inputs, repeats, budget_s)


def time_with_host(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Return the median seconds on the host's clock, until the device has finished."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_without_host(work: Callable[[], object], host_s: float, repeats: int = 5, num_calls: int = 4) -> float:
    """Return the median seconds that a GPU takes for a call that only enqueues work.

    The GPU sleeps until the host, which needs about `host_s` for a call, has enqueued `num_calls` of them.
    """
    num_cycles = int((num_calls * host_s + 1e-3) * SLEEP_CYCLES_PER_S)
    times: list[float] = []
    for _ in range(repeats + 3):  # the sleep may be too short at first
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(num_cycles)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(num_calls):
            work()
        end.record()
        is_awake = start.query()  # type: ignore[no-untyped-call]
        if is_awake:  # the host was slower than the sleep, so the GPU has waited for it
            num_cycles *= 2
        else:
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / num_calls)
    if not times:
        raise RuntimeError(f"the host enqueued no {num_calls} calls while the GPU slept {num_cycles} cycles")
    return statistics.median(times)


def synchronize(device: str) -> None:
    """Wait until the device has finished all work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _time_on_cpu(work: Work, num_inputs: int, repeats: int, budget_s: float) -> Timing:
    times, end = [], time.perf_counter() + budget_s
    for _ in range(repeats):
        start = time.perf_counter()
        for number in range(num_inputs):
            work(number)
        times.append((time.perf_counter() - start) / num_inputs)
        if len(times) >= 2 and time.perf_counter() > end:
            break
    return Timing(statistics.median(times), min(times), max(times))


def _time_on_gpu(work: Work, num_inputs: int, repeats: int, budget_s: float) -> Timing:
    replay, graphed = _capture(work, num_inputs)
    replay()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < repeats:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) / 1e3 / num_inputs)
        if len(times) >= 5 and time.perf_counter() > end:
            break
    return Timing(statistics.median(times), min(times), max(times), graphed)


def _capture(work: Work, num_inputs: int) -> tuple[Callable[[], None], bool]:
    """Return a function that does all the work, and whether it replays a CUDA graph."""

    def loop() -> None:
        for number in range(num_inputs):
            work(number)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loop()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            loop()
    except RuntimeError as error:  # work that waits for the device cannot be captured
        print(f"timed without a graph: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
        return loop, False
    return graph.replay, True


# -- limits -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of a device.

    `buffer_bytes`: size of the buffer that was read; a small one fits a cache.
    """

    read_bytes_per_s: float
    matmul_flops_per_s: float
    buffer_bytes: int
    copy_bytes_per_s: float = 0.0

    def floor_s(self, num_bytes: float, num_flops: float = 0.0) -> float:
        """Return the least seconds to read `num_bytes` and multiply `num_flops`: the roofline."""
        return max(num_bytes / self.read_bytes_per_s, num_flops / self.matmul_flops_per_s)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least time of engine steps on a device with these limits.

    `step_bytes`: weights that a step reads. `layer_params`: weights that every token is multiplied with. `head_params`:
    the output head, for one token per branch. `attention_flops`: per new token and token that it attends to.
    """

    limits: Limits
    step_bytes: float
    kv_token_bytes: float
    layer_params: int
    head_params: int = 0
    attention_flops: float = 0.0

    def decode_s(self, num_branches: int, num_tokens: float) -> float:
        """Return the seconds of one token per branch, over pages with `num_tokens` different tokens."""
        num_flops = 2.0 * num_branches * (self.layer_params + self.head_params)
        return self.limits.floor_s(self.step_bytes + num_tokens * self.kv_token_bytes, num_flops)

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Return the seconds of a prompt: new tokens, causal attention, one row of the head."""
        num_attended = num_tokens * (num_cached + (num_tokens + 1) / 2)
        num_flops = 2.0 * (num_tokens * self.layer_params + self.head_params) + self.attention_flops * num_attended
        return self.limits.floor_s(self.step_bytes + num_cached * self.kv_token_bytes, num_flops)


def measure_limits(num_bytes: int, dtype: str, device: str, matmul_size: int | None = None) -> Limits:
    """Measure the limits, the bandwidths over a buffer of `num_bytes` (at least 1 MiB)."""
    num_bytes = max(num_bytes, MIN_BUFFER_BYTES)
    size = matmul_size or MATMUL_SIZE[device.split(":")[0]]
    return Limits(
        read_bytes_per_s=num_bytes / time_read(num_bytes, device).low_s,
        matmul_flops_per_s=2 * size**3 / time_matmul(size, _matmul_dtype(dtype, device), device).low_s,
        buffer_bytes=num_bytes,
        copy_bytes_per_s=2 * num_bytes / time_copy(num_bytes, device).low_s,
    )


def _matmul_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the type in which a device multiplies numbers of `dtype`: many CPUs have no bf16 products."""
    if device == "cpu" and dtype == "bfloat16":
        from chatcache_kernels.cpu.bf16 import has_bf16_products

        return torch.bfloat16 if has_bf16_products() else torch.float32
    return getattr(torch, dtype)  # type: ignore[no-any-return]


def time_read(num_bytes: int, device: str) -> Timing:
    """Time torch's sum over a buffer."""
    buffer = torch.arange(num_bytes // 4, dtype=torch.float32, device=device)
    out = torch.empty((), device=device)
    return _time_often(lambda _: torch.sum(buffer, dim=0, out=out), device)


def time_copy(num_bytes: int, device: str) -> Timing:
    """Time torch's copy of a buffer, which reads and writes `num_bytes` each."""
    source = torch.arange(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return _time_often(lambda _: target.copy_(source), device)


def time_matmul(size: int, dtype: torch.dtype, device: str) -> Timing:
    """Time one product of square random matrices."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return _time_often(lambda _: torch.mm(left, right, out=out), device)


def _time_often(work: Work, device: str) -> Timing:
    """Time many single calls; on a GPU, many replays of a CUDA graph of four calls."""
    return time_work(work, 4 if device.startswith("cuda") else 1, device, repeats=1000)
