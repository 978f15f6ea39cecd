"""Stage "layer kernels": recurrent layers, experts and latent attention next to the limits of the device.

Decode steps of recurrent layers read and write one state a row, experts read the weights that their tokens chose, and
latent attention reads one latent a token, so their limit is bandwidth. Prompts of recurrent layers are compared with
the linear layers around them, and many tokens of experts and latent attention with the rate of matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from chatcache_kernels.types import AttentionBatch
from torch import Tensor
from torch.nn import functional

from bench.check.context import StageContext
from bench.check.limits import stage_limits
from bench.check.workload import MIN_ROUND_BYTES, PAGE, choose_kernels, equal_rows
from chatcache.bench.device import Limits, Work, time_work
from chatcache.bench.report import compare, compare_to_floor

MIN_BANDWIDTH_BYTES = 64 * 2**20
DECODE_GOAL = ">= 0.70"  # of bandwidth, for launches of at least MIN_BANDWIDTH_BYTES
PROMPT_GOAL = "<= 1.00"  # times the linear layers of the same layer
PRODUCT_GOAL = ">= 0.50"  # of the shortest possible time
MAX_INPUTS = 16


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """A gated delta layer: heads of keys and of values, dimensions of a head, and hidden size."""

    key_heads: int
    heads: int
    dim: int
    hidden: int


@dataclass(frozen=True, slots=True)
class MambaShape:
    """A Mamba-2 layer: heads, groups, dimensions of a head and of its state, and hidden size."""

    heads: int
    groups: int
    dim: int
    state: int
    hidden: int


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A layer of experts: their number, experts of a token, hidden size and inner size."""

    num_experts: int
    choices: int
    hidden: int
    inner: int


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Latent attention: heads, dimensions of a latent and of its rotary key."""

    heads: int
    rank: int
    rope: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes, rows of decode steps, tokens of prompts, and (rows, context) of latent attention."""

    delta: DeltaShape
    mamba: MambaShape
    experts: ExpertShape
    latent: tuple[LatentShape, ...]
    rows: tuple[int, ...]
    prompts: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]


SIZES = {
    "full": Sizes(
        DeltaShape(16, 32, 128, 2048),  # Qwen3-Next-80B-A3B
        MambaShape(128, 1, 64, 128, 4096),  # Granite-4.0-H-Small
        ExpertShape(128, 8, 2048, 768),  # Qwen3-30B-A3B
        (LatentShape(16, 512, 64), LatentShape(128, 512, 64)),  # DeepSeek-V2-Lite and DeepSeek-V3
        (1, 64, 256),
        (512, 4096),
        ((1, 4096), (64, 4096), (256, 2048)),
    ),
    "tiny": Sizes(
        DeltaShape(1, 2, 16, 32), MambaShape(2, 1, 16, 16, 32), ExpertShape(4, 2, 32, 16), (LatentShape(2, 32, 16),),
        (2,), (20,), ((2, 40),),
    ),
}  # fmt: skip
SIZES["cpu"] = SIZES["tiny"]


def run(context: StageContext) -> None:
    """Measure each kind of layer: decode steps, then prompts."""
    limits, sizes = stage_limits(context), SIZES[context.size]
    bench = LayerBench(context, limits, sizes)
    for rows in sizes.rows:
        context.measure(f"gated delta, {rows} rows", partial(bench.measure_delta, rows, 1), needs_s=3)
        context.measure(f"Mamba-2, {rows} rows", partial(bench.measure_mamba, rows, 1), needs_s=3)
        context.measure(f"experts, {rows} tokens", partial(bench.measure_experts, rows), needs_s=3)
    for shape in sizes.latent:
        for rows, length in sizes.contexts:
            what = f"latent attention, {shape.heads} heads, {rows} x {length}"
            context.measure(what, partial(bench.measure_latent, what, shape, rows, length), needs_s=3)
    for tokens in sizes.prompts:
        context.measure(f"gated delta, prompt of {tokens}", partial(bench.measure_delta, 1, tokens), needs_s=3)
        context.measure(f"Mamba-2, prompt of {tokens}", partial(bench.measure_mamba, 1, tokens), needs_s=3)
        context.measure(f"experts, prompt of {tokens}", partial(bench.measure_experts, tokens), needs_s=3)


class LayerBench:
    """Measures layers of bfloat16 on the kernels of the device."""

    def __init__(self, context: StageContext, limits: Limits, sizes: Sizes) -> None:
        self._context = context
        self._limits = limits
        self._sizes = sizes
        self._kernels = choose_kernels(context.device)

    def measure_delta(self, rows: int, tokens: int) -> None:
        """Measure the convolution and the gated delta rule of `rows` rows of `tokens` new tokens."""
        shape = self._sizes.delta
        keys, values = shape.key_heads * shape.dim, shape.heads * shape.dim
        total, state_bytes = rows * tokens, 4 * shape.heads * shape.dim**2
        num_inputs = self._num_inputs(rows * state_bytes)
        states = self._floats(num_inputs, rows, shape.heads, shape.dim, shape.dim)
        q, k, v = (
            part.reshape(total, -1, shape.dim)
            for part in torch.split(self._random(total, 2 * keys + values), [keys, keys, values], dim=1)
        )
        g, beta = -functional.softplus(self._floats(total, shape.heads)), self._random(total, shape.heads).sigmoid()
        slots, offsets = self._rows(rows, tokens)

        def work(i: int) -> object:
            return self._kernels.gated_delta_rule(
                q, k, v, g, beta, states[i], slots, offsets, shape.dim**-0.5, l2_norm=True
            )

        linear = [(shape.hidden, 2 * keys + 2 * values), (values, shape.hidden)]
        self._add_recurrent("gated delta", rows, tokens, 2 * rows * state_bytes, num_inputs, work, linear)
        self._measure_conv("gated delta", rows, tokens, 2 * keys + values)

    def measure_mamba(self, rows: int, tokens: int) -> None:
        """Measure the convolution and the state space model of `rows` rows of `tokens` new tokens."""
        shape = self._sizes.mamba
        inner, group = shape.heads * shape.dim, shape.groups * shape.state
        total, state_bytes = rows * tokens, 4 * shape.heads * shape.dim * shape.state
        num_inputs = self._num_inputs(rows * state_bytes)
        states = self._floats(num_inputs, rows, shape.heads, shape.dim, shape.state)
        x, b, c = torch.split(self._random(total, inner + 2 * group), [inner, group, group], dim=1)
        x, b, c = (
            part.reshape(total, heads, -1) for part, heads in ((x, shape.heads), (b, shape.groups), (c, shape.groups))
        )
        dt, a = functional.softplus(self._floats(total, shape.heads)), -self._floats(shape.heads).abs()
        d = self._floats(shape.heads)
        slots, offsets = self._rows(rows, tokens)

        def work(i: int) -> object:
            return self._kernels.ssd_scan(x, dt, a, b, c, d, states[i], slots, offsets)

        linear = [(shape.hidden, 2 * inner + 2 * group + shape.heads), (inner, shape.hidden)]
        self._add_recurrent("Mamba-2", rows, tokens, 2 * rows * state_bytes, num_inputs, work, linear)
        self._measure_conv("Mamba-2", rows, tokens, inner + 2 * group)

    def measure_experts(self, tokens: int) -> None:
        """Measure a layer of experts: sort the tokens, multiply by the experts they chose, and add the results."""
        shape = self._sizes.experts
        up = self._kernels.pack_experts(self._random(shape.num_experts, 2 * shape.inner, shape.hidden), None)
        down = self._kernels.pack_experts(self._random(shape.num_experts, shape.hidden, shape.inner), None)
        x = self._random(tokens, shape.hidden)
        ids = [
            torch.rand(tokens, shape.num_experts, device=self._context.device)
            .argsort(1)[:, : shape.choices]
            .contiguous()
            for _ in range(4)
        ]
        weights = self._random(tokens, shape.choices).sigmoid()

        def work(i: int) -> object:
            return self._kernels.grouped_experts(x, ids[i], weights, up, down, self._kernels.silu_mul)

        seconds = time_work(work, len(ids), self._context.device).median_s
        expert_numbers = 3 * shape.inner * shape.hidden
        num_used = sum(int((torch.bincount(each.flatten()) > 0).sum()) for each in ids) / len(ids)
        name = f"experts {shape.num_experts} x {shape.inner}, {tokens} tokens"
        num_flops = 2.0 * tokens * shape.choices * expert_numbers
        self._add_floor(name, seconds, 2.0 * num_used * expert_numbers, num_flops)

    def measure_latent(self, name: str, shape: LatentShape, rows: int, length: int) -> None:
        """Measure the decode attention of `rows` rows over latents of `length` tokens each."""
        context, width = self._context, shape.rank + shape.rope
        layout = equal_rows(rows, length, 1)
        num_inputs = self._num_inputs(2 * layout.num_pages * PAGE * width)
        with torch.device(context.device):
            pages = self._kernels.allocate_latent_pages(
                num_inputs, layout.num_pages, PAGE, width, shape.rank, torch.bfloat16
            )
        pages.data.normal_()
        tables, start, num_tokens = (
            torch.from_numpy(each) for each in (layout.tables, layout.start, layout.num_tokens)
        )
        batch = AttentionBatch.build(tables, start, num_tokens, PAGE)
        work_list = self._kernels.prepare(layout.tables, layout.start, layout.num_tokens, PAGE, shape.heads)
        batch = replace(batch, work=work_list).to(context.device)
        q = self._random(rows, shape.heads, width)

        def work(i: int) -> object:
            return self._kernels.latent_attention(q, pages, i, batch, width**-0.5)

        seconds = time_work(work, num_inputs, context.device).median_s
        num_flops = 2.0 * rows * length * shape.heads * (width + shape.rank)
        self._add_floor(name, seconds, 2.0 * rows * length * width, num_flops)

    def _add_recurrent(
        self, layer: str, rows: int, tokens: int, num_bytes: int, num_inputs: int, work: Work,
        linear: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        """Add the bandwidth of a decode step, or the time of a prompt next to the linear layers [in, out] around it."""
        seconds = time_work(work, num_inputs, self._context.device).median_s
        if tokens == 1:
            self._add_bandwidth(f"{layer}, {rows} rows", num_bytes, seconds)
            return
        inputs = [self._random(rows * tokens, num_in) for num_in, _ in linear]
        weights = [self._random(num_out, num_in) for num_in, num_out in linear]
        multiply: Callable[[int], object] = lambda _: list(map(functional.linear, inputs, weights))  # noqa: E731
        limit_s = time_work(multiply, 4, self._context.device).median_s
        name = f"{layer}, prompt of {tokens}"
        self._context.add(compare(name, seconds * 1e6, "us", limit_s * 1e6, "its linear layers", PROMPT_GOAL))

    def _measure_conv(self, layer: str, rows: int, tokens: int, channels: int) -> None:
        num_taps, total = 4, rows * tokens
        num_bytes = 4 * total * channels + 4 * rows * channels * (num_taps - 1)
        num_inputs = self._num_inputs(num_bytes)
        x, weight = self._random(num_inputs, total, channels), self._random(channels, num_taps)
        states = self._random(num_inputs, rows, channels, num_taps - 1)
        slots, offsets = self._rows(rows, tokens)

        def work(i: int) -> object:
            return self._kernels.causal_conv(x[i], weight, None, states[i], slots, offsets, "silu")

        seconds = time_work(work, num_inputs, self._context.device).median_s
        self._add_bandwidth(f"{layer}, convolution of {rows} x {tokens} tokens", num_bytes, seconds)

    def _add_bandwidth(self, name: str, num_bytes: int, seconds: float) -> None:
        """Add the bandwidth of what is read and written, with a goal if it is large."""
        goal = DECODE_GOAL if num_bytes >= MIN_BANDWIDTH_BYTES else ""
        limit = self._limits.copy_bytes_per_s / 1e9
        self._context.add(compare(name, num_bytes / seconds / 1e9, "GB/s", limit, "copy", goal))

    def _add_floor(self, name: str, seconds: float, num_bytes: float, num_flops: float) -> None:
        """Add a time next to reading the bytes or computing the products, the longer of the two."""
        read_s, compute_s = num_bytes / self._limits.read_bytes_per_s, num_flops / self._limits.matmul_flops_per_s
        goal = DECODE_GOAL if num_bytes >= MIN_BANDWIDTH_BYTES else ""
        goal = PRODUCT_GOAL if compute_s > read_s else goal
        self._context.add(compare_to_floor(name, seconds, max(read_s, compute_s), goal, unit="us"))

    def _num_inputs(self, num_bytes: int) -> int:
        """Return how many inputs of so many bytes the timed calls use in turn, so that caches do not hold them."""
        return max(2, min(MAX_INPUTS, MIN_ROUND_BYTES[self._context.size] // max(num_bytes, 1)))

    def _rows(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        device = self._context.device
        slots = torch.randperm(rows, device=device).int()
        return slots, torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=device)

    def _floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._context.device)

    def _random(self, *shape: int) -> Tensor:
        return self._floats(*shape).to(torch.bfloat16)
