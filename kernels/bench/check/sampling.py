"""Stage "sampling": from logits to candidates on the host, next to reading the logits once.

On a GPU, two further figures tell the host's part of the time from the device's: the time to enqueue the work, and the
time that the device takes for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.check.context import StageContext
from bench.check.limits import stage_limits
from chatcache.bench.device import Limits, synchronize, time_with_host, time_without_host
from chatcache.bench.report import Figure, compare, compare_to_floor
from chatcache.model.loading.loader import choose_sampler
from chatcache.model.sampling.sampler import TokenSampler
from chatcache.types.plan import Draws

VOCAB = {"full": 151_936, "cpu": 49_152, "tiny": 128}
BATCHES = {"full": (1, 64, 256), "cpu": (1, 8), "tiny": (2,)}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "8 beams": {"temperature": 0.0, "width": 16},
}


def run(context: StageContext) -> None:
    """Measure each kind of sampling at each batch size."""
    limits, vocab_size = stage_limits(context), VOCAB[context.size]
    sampler = make_sampler(vocab_size, context.device)
    for count in BATCHES[context.size]:
        logits = [torch.randn(count, vocab_size, device=context.device).to(torch.bfloat16) for _ in range(2)]
        for kind, options in KINDS.items():
            name = f"{kind}, {count} rows of {vocab_size}"
            context.measure(name, partial(_measure, context, limits, sampler, logits, name, options))


def make_sampler(vocab_size: int, device: str) -> TokenSampler:
    """Return the sampler of a runner on this device."""
    return choose_sampler("triton" if device.startswith("cuda") else "cpu", vocab_size, torch.device(device))


def make_draws(count: int, **options: Any) -> Draws:
    """Return one draw per row, all with the same options."""
    kinds: dict[str, tuple[Any, Any]] = {
        "width": (1, np.int32),
        "lane": (0, np.int32),
        "position": (7, np.int32),
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "num_top": (0, np.int32),
    }
    columns: dict[str, Any] = {
        name: np.full(count, options.get(name, default), dtype) for name, (default, dtype) in kinds.items()
    }
    return Draws(row=np.arange(count, dtype=np.int32), seed=np.arange(count, dtype=np.uint64), **columns)


def _measure(
    context: StageContext, limits: Limits, sampler: Any, logits: list[torch.Tensor], name: str, options: dict[str, Any]
) -> None:
    count, turn = len(logits[0]), iter(range(1 << 30))
    draws, index = make_draws(count, **options), np.arange(count)

    def draw() -> object:
        with torch.inference_mode():
            return sampler.sample(logits[next(turn) % 2], index, draws)

    draw(), draw()
    seconds = time_with_host(draw, context.device, repeats=9)
    floor_s = limits.floor_s(logits[0].numel() * logits[0].element_size())
    context.add(compare_to_floor(f"sample {name}", seconds, floor_s, unit="us"))
    if not context.on_gpu:
        return

    def enqueue() -> object:
        with torch.inference_mode():
            return sampler.enqueue(logits[next(turn) % 2], index, draws)

    host_s = _time_enqueue(enqueue, context.device)
    device_s = time_without_host(enqueue, host_s)
    context.add(Figure(f"enqueue {name}", host_s * 1e6, "us"))
    context.add(
        compare(f"device time {name}", device_s * 1e6, "us", 1e6 * (3 * floor_s + 20e-6), "3 floors + 20 us", "<= 1.00")
    )


def _time_enqueue(enqueue: Callable[[], object], device: str, repeats: int = 9) -> float:
    """Return the median seconds in which the host enqueues one call on an idle device."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        enqueue()
        times.append(time.perf_counter() - start)
    synchronize(device)
    return statistics.median(times)
