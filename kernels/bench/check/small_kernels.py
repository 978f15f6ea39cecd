"""Stage "small kernels": norms, activations, rotation, copies and swaps next to bandwidth; batch-invariant products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import numpy as np
import torch
from chatcache_kernels.types import HeadNorms, KVPages
from torch import Tensor
from torch.nn import functional

from bench.check.context import StageContext
from bench.check.limits import stage_limits
from bench.check.workload import PAGE, Heads, choose_kernels
from chatcache.bench.device import Limits, Work, time_with_host, time_work
from chatcache.bench.report import compare, compare_to_floor
from chatcache.model.batch_invariant import BatchInvariantLinearFactory, TritonLinearFactory
from chatcache.model.linear import Linear, LinearFactory
from chatcache.model.runner import SwapExecutor

MIN_BANDWIDTH_BYTES = 64 * 2**20  # smaller launches are compared by time


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the workloads; `copies`, `swaps`: numbers of pages of one copy or swap."""

    tokens: tuple[int, ...]
    hidden: int
    intermediate: int
    heads: Heads
    num_layers: int
    copies: tuple[int, ...]
    swaps: tuple[int, ...]


SIZES = {
    "full": Sizes((1, 64, 256, 8192), 4096, 14_336, Heads(32, 8, 128), 32, (1, 8, 64, 256), (1, 16, 256)),
    "cpu": Sizes((1, 512), 576, 1536, Heads(9, 3, 64), 30, (8,), (8, 64)),
    "tiny": Sizes((1, 5), 64, 96, Heads(4, 2, 32), 2, (2,), (3,)),
}


def run(context: StageContext) -> None:
    """Measure every operation at every size."""
    limits, sizes, kernels = stage_limits(context), SIZES[context.size], choose_kernels(context.device)
    for tokens in sizes.tokens:
        context.measure(
            f"norms and activation, {tokens}", partial(_measure_norms, context, limits, sizes, kernels, tokens)
        )
        context.measure(f"rope + write, {tokens}", partial(_measure_rope, context, limits, sizes, kernels, tokens))
        context.measure(
            f"batch-invariant products, {tokens}", partial(_measure_products, context, limits, sizes, kernels, tokens)
        )
    context.measure("page copies", partial(_measure_copies, context, limits, sizes, kernels))
    context.measure("swaps", partial(_measure_swaps, context, sizes, kernels))


def _add_figure(context: StageContext, limits: Limits, name: str, num_bytes: int, work: Work, num_inputs: int) -> None:
    timing = time_work(work, num_inputs, context.device)
    if num_bytes >= MIN_BANDWIDTH_BYTES or not context.on_gpu:
        context.add(compare(name, num_bytes / timing.median_s / 1e9, "GB/s", limits.copy_bytes_per_s / 1e9, "copy"))
    else:
        floor_s = num_bytes / limits.copy_bytes_per_s
        context.add(compare_to_floor(name, timing.median_s, floor_s, unit="us"))


def _inputs(context: StageContext, *shape: int) -> list[Tensor]:
    """Return four random bfloat16 tensors of one shape, which timed calls use in turn."""
    return [torch.randn(shape, device=context.device).to(torch.bfloat16) for _ in range(4)]


def _measure_norms(context: StageContext, limits: Limits, sizes: Sizes, kernels: ModuleType, tokens: int) -> None:
    x, residual = _inputs(context, tokens, sizes.hidden), _inputs(context, tokens, sizes.hidden)
    gates = _inputs(context, tokens, 2 * sizes.intermediate)
    weight = torch.randn(sizes.hidden, device=context.device).to(torch.bfloat16)
    works: dict[str, tuple[int, Callable[[int], object]]] = {
        "rms_norm": (2, lambda i: kernels.rms_norm(x[i], weight, 1e-5)),
        "add + rms_norm": (4, lambda i: kernels.add_rms_norm(x[i], residual[i], weight, 1e-5)),
    }
    for name, (passes, work) in works.items():
        _add_figure(context, limits, f"{name}, {tokens} tokens", passes * 2 * x[0].numel(), work, 4)
    num_bytes = 3 * gates[0].numel()
    _add_figure(context, limits, f"silu x up, {tokens} tokens", num_bytes, lambda i: kernels.silu_mul(gates[i]), 4)


def _measure_rope(context: StageContext, limits: Limits, sizes: Sizes, kernels: ModuleType, tokens: int) -> None:
    """Measure rotation, head norms and page write of one fused [T, H + 2 Hkv, D] projection."""
    heads, num_pages = sizes.heads, -(-tokens // PAGE) + 1
    fused = _inputs(context, tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
    parts = [torch.split(x, [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1) for x in fused]
    cos, sin = (torch.randn(tokens, heads.head_dim // 2, device=context.device) for _ in range(2))
    norm = torch.randn(heads.head_dim, device=context.device).to(torch.bfloat16)
    pages = _pages(context, kernels, heads, 4, num_pages)
    slots = PAGE + torch.randperm(tokens, device=context.device)
    q_bytes, kv_bytes = 2 * tokens * heads.num_heads * heads.head_dim, tokens * heads.token_bytes
    for name, norms in (("rope + write", None), ("norms + rope + write", HeadNorms(norm, norm, 1e-6))):

        def work(i: int, norms: HeadNorms | None = norms) -> object:
            return kernels.rope_write(*parts[i], cos, sin, pages, i, slots, norms)

        _add_figure(context, limits, f"{name}, {tokens} tokens", 2 * (q_bytes + kv_bytes), work, 4)


def _measure_products(context: StageContext, limits: Limits, sizes: Sizes, kernels: ModuleType, tokens: int) -> None:
    """Measure the linear layers of `--deterministic` next to the device's limits and to torch's product."""
    make: LinearFactory = (
        TritonLinearFactory() if kernels.__name__.endswith("triton") else BatchInvariantLinearFactory()
    )
    heads, hidden = sizes.heads, sizes.hidden
    layers = {
        "qkv": ((heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, hidden),
        "out": (hidden, heads.num_heads * heads.head_dim),
        "gate_up": (2 * sizes.intermediate, hidden),
        "down": (hidden, sizes.intermediate),
    }
    for layer, (num_outputs, num_inputs) in layers.items():
        weights, x = _inputs(context, num_outputs, num_inputs), _inputs(context, tokens, num_inputs)
        products: list[Linear] = [make(weight, None) for weight in weights]

        def work(i: int, products: list[Linear] = products, x: list[Tensor] = x) -> object:
            return products[i](x[i])

        def torch_work(i: int, weights: list[Tensor] = weights, x: list[Tensor] = x) -> object:
            return functional.linear(x[i], weights[i])

        timing = time_work(work, 4, context.device)
        torch_s = time_work(torch_work, 4, context.device).median_s
        floor_s = max(
            weights[0].nbytes / limits.read_bytes_per_s, 2 * tokens * weights[0].numel() / limits.matmul_flops_per_s
        )
        name = f"batch-invariant {layer}, {tokens} tokens"
        context.add(
            compare_to_floor(name, timing.median_s, floor_s, unit="us"),
            compare(f"{name}, over torch", timing.median_s * 1e6, "us", torch_s * 1e6, "torch"),
        )


def _pages(context: StageContext, kernels: ModuleType, heads: Heads, num_layers: int, num_pages: int) -> KVPages:
    with torch.device(context.device):
        pages: KVPages = kernels.allocate_pages(
            num_layers, num_pages, PAGE, heads.num_kv_heads, heads.head_dim, torch.bfloat16
        )
    for store in (pages.k, pages.v):
        store.normal_()
    return pages


def _measure_copies(context: StageContext, limits: Limits, sizes: Sizes, kernels: ModuleType) -> None:
    for count in sizes.copies:
        pages = _pages(context, kernels, sizes.heads, sizes.num_layers, 8 * count + 1)
        order = (1 + torch.randperm(8 * count, dtype=torch.int32)).view(4, count, 2).to(context.device)
        name = f"copy {count} pages, {sizes.num_layers} layers"

        def work(i: int, pages: KVPages = pages, order: Tensor = order) -> object:
            return kernels.copy_pages(pages, order[i])

        _add_figure(context, limits, name, 2 * count * pages.page_bytes, work, 4)


def _measure_swaps(context: StageContext, sizes: Sizes, kernels: ModuleType) -> None:
    """Measure swaps in both directions, next to torch's copy of as many bytes of pinned memory."""
    for count in sizes.swaps:
        pages = _pages(context, kernels, sizes.heads, sizes.num_layers, count + 1)
        swaps = SwapExecutor(kernels, (pages,), count)
        away = np.stack((1 + np.random.default_rng(0).permutation(count), np.arange(count)), 1).astype(np.int32)
        back, none = away[:, ::-1].copy(), away[:0]
        num_bytes = count * pages.page_bytes
        limit = num_bytes / _copy_to_host_s(context, num_bytes) / 1e9
        for name, move in (("out", partial(swaps.apply, away, none)), ("in", partial(swaps.apply, none, back))):
            move()
            seconds = time_with_host(move, context.device)
            context.add(compare(f"swap {name} {count} pages", num_bytes / seconds / 1e9, "GB/s", limit, "pinned copy"))
        swaps.close()


def _copy_to_host_s(context: StageContext, num_bytes: int) -> float:
    """Return the seconds of one copy to pinned host memory."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=context.device)
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=context.on_gpu)
    target.copy_(source, non_blocking=True)
    return time_with_host(lambda: target.copy_(source, non_blocking=True), context.device)
