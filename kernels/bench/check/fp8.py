"""Stage "FP8 layers": linear layers with FP8 weights next to bandwidth, and next to the same layers in bfloat16.

Both products are timed around `FEW_ROWS`, so that the figures show where it belongs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import torch
from chatcache_kernels.fp8 import Fp8Weight
from torch import Tensor
from torch.nn import functional

from bench.check.context import StageContext
from bench.check.limits import stage_limits
from bench.check.workload import MIN_ROUND_BYTES
from chatcache.bench.device import Limits, Work, time_work
from chatcache.bench.report import compare, compare_to_floor
from chatcache.model.attention import FP8_CAPABILITY

BLOCK = 128
MAX_FEW_ROWS = 64
DECODE_GOAL = ">= 0.70"  # of the time to read the weights, for those of at least MIN_GOAL_BYTES
MANY_GOAL = "<= 0.75"  # times bfloat16
MIN_GOAL_BYTES = 16 * 2**20
MIN_GOAL_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Layers [in, out], and numbers of rows."""

    layers: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]


SIZES = {
    "full": Sizes(((4096, 4096), (4096, 24_576)), (1, 16, 32, 64, 256, 2048)),  # Qwen3-8B: out, gate and up
    "tiny": Sizes(((256, 64),), (1, 65)),
}


def run(context: StageContext) -> None:
    """Measure every layer at every number of rows; without a GPU, only the interpreter can."""
    if not context.on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        context.skip("FP8 layers", "Triton kernels need a GPU")
        return
    if context.on_gpu and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        context.skip("FP8 layers", "the GPU has no FP8 products")
        return
    limits, sizes = stage_limits(context), SIZES["full" if context.size == "full" else "tiny"]
    for num_inputs, num_outputs in sizes.layers:
        layer = _Layer(context, limits, num_inputs, num_outputs)
        for rows in sizes.rows:
            context.measure(f"{num_inputs} -> {num_outputs}, {rows} rows", partial(layer.measure, rows))


class _Layer:
    """One linear layer, in enough copies that no cache holds them."""

    def __init__(self, context: StageContext, limits: Limits, num_inputs: int, num_outputs: int) -> None:
        from chatcache_kernels.triton import fp8

        self._context, self._limits, self._kernels = context, limits, fp8
        self._name = f"{num_inputs} -> {num_outputs}"
        count = max(2, min(32, MIN_ROUND_BYTES[context.size] // (num_inputs * num_outputs)))
        plain = [self._random(num_outputs, num_inputs) for _ in range(count)]
        self._plain = plain
        numbers = [fp8.quantise_rows(weight, num_inputs) for weight in plain]
        scales = torch.ones(num_outputs // BLOCK or 1, num_inputs // BLOCK, device=context.device)
        self._weights = {
            "by output": [Fp8Weight(*each, 1, num_inputs) for each in numbers],
            "by block": [Fp8Weight(each[0], scales, BLOCK, BLOCK) for each in numbers],
        }
        self._locks = torch.zeros(
            fp8.num_locks(self._weights["by output"][0]), dtype=torch.int32, device=context.device
        )

    def measure(self, rows: int) -> None:
        """Add the figures of one number of rows."""
        x = self._random(rows, self._plain[0].shape[1])
        plain_s = self._time(lambda i: functional.linear(x, self._plain[i]))
        for kind, weights in self._weights.items():
            name = f"FP8 {kind}, {self._name}, {rows} rows"
            if rows <= MAX_FEW_ROWS:
                num_bytes = weights[0].num_bytes
                seconds = self._time(partial(self._multiply_few, x, weights))
                goal = DECODE_GOAL if num_bytes >= MIN_GOAL_BYTES and rows <= self._kernels.FEW_ROWS else ""
                floor_s = num_bytes / self._limits.read_bytes_per_s
                self._context.add(
                    compare_to_floor(f"{name}, converted", seconds, floor_s, goal, unit="us"),
                    compare(f"{name}, converted, over bf16", seconds * 1e6, "us", plain_s * 1e6, "bf16"),
                )
            seconds = self._time(partial(self._multiply, x, weights))
            goal = MANY_GOAL if rows >= MIN_GOAL_ROWS else ""
            self._context.add(compare(f"{name}, quantised", seconds * 1e6, "us", plain_s * 1e6, "bf16", goal))
        if rows <= MAX_FEW_ROWS:
            return
        seconds = self._time(lambda i: self._kernels.quantise_rows(x, x.shape[1]))
        floor_s = 3 * x.numel() / self._limits.copy_bytes_per_s
        self._context.add(compare_to_floor(f"FP8 quantisation, {self._name}, {rows} rows", seconds, floor_s, unit="us"))

    def _multiply_few(self, x: Tensor, weights: list[Fp8Weight], i: int) -> Tensor:
        return self._kernels.multiply_few_rows(x, weights[i], None, self._locks)

    def _multiply(self, x: Tensor, weights: list[Fp8Weight], i: int) -> Tensor:
        return self._kernels.multiply(x, weights[i])

    def _time(self, work: Work) -> float:
        return time_work(work, len(self._plain), self._context.device).median_s

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._context.device).to(torch.bfloat16)
