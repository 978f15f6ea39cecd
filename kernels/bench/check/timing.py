"""Seconds of device work. On a GPU, one CUDA graph runs the work over several inputs in turn, so that neither the host
nor the L2 cache decides the time; elsewhere a plain loop does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Work = Callable[[int], object]
"""Does the work on input number i; nothing is kept of what it returns."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one piece of work: the median of the repetitions, and the lowest and highest. `graphed`: by replay."""

    median_s: float
    low_s: float
    high_s: float
    graphed: bool = False


def measure(work: Work, num_inputs: int, device: str, *, repeats: int = 15, budget_s: float = 0.4) -> Timing:
    """Time `work(0) .. work(num_inputs - 1)`, per call."""
    with torch.inference_mode():
        for number in range(min(num_inputs, 3)):  # compiles, allocates
            work(number)
        if device.startswith("cuda"):
            return _on_gpu(work, num_inputs, repeats, budget_s)
        return _on_cpu(work, num_inputs, repeats, budget_s)


def _on_cpu(work: Work, num_inputs: int, repeats: int, budget_s: float) -> Timing:
    times, end = [], time.perf_counter() + budget_s
    for _ in range(repeats):
        start = time.perf_counter()
        for number in range(num_inputs):
            work(number)
        times.append((time.perf_counter() - start) / num_inputs)
        if len(times) >= 2 and time.perf_counter() > end:
            break
    return Timing(statistics.median(times), min(times), max(times))


def _on_gpu(work: Work, num_inputs: int, repeats: int, budget_s: float) -> Timing:
    replay, graphed = _replayed(work, num_inputs)
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


def _replayed(work: Work, num_inputs: int) -> tuple[Callable[[], None], bool]:
    """Return a function that does all the work, as one graph if the work can be captured, and whether it is one."""

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


def wall_s(work: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Return the median seconds on the host's clock, until the device is done."""
    times = []
    for _ in range(repeats):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def wait(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
