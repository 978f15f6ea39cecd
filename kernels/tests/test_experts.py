"""Mixture-of-experts layers of every backend against `reference`, and `reference` against a loop over tokens."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from chatcache_kernels import cpu, reference, triton
from chatcache_kernels.cpu import expert_layer, int8, int16, matmul
from chatcache_kernels.cpu import experts as cpu_experts
from chatcache_kernels.cpu.compact import compact_weights
from chatcache_kernels.experts import ExpertWeights
from torch import Tensor
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("fresh_random")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}
NUM_EXPERTS, NUM_CHOICES, WIDTH, INNER = 12, 3, 96, 64

Layer = tuple[Tensor, Tensor, Tensor, Tensor]


def make_layer(dtype: torch.dtype, width: int = WIDTH, inner: int = INNER, device: str = "cpu") -> Layer:
    """Return gate_up [E, 2 * inner, width], its bias, down [E, width, inner] and its bias."""
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner, width, device=device) / width**0.5
    down = torch.randn(NUM_EXPERTS, width, inner, device=device) / inner**0.5
    gate_up_bias = torch.randn(NUM_EXPERTS, 2 * inner, device=device)
    down_bias = torch.randn(NUM_EXPERTS, width, device=device)
    return gate_up.to(dtype), gate_up_bias.to(dtype), down.to(dtype), down_bias.to(dtype)


def route(num_tokens: int, kind: str, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return expert ids and weights [num_tokens, NUM_CHOICES]; the last expert never has tokens."""
    order = torch.rand(num_tokens, NUM_EXPERTS - 1, device=device).argsort(1)
    ids = order[:, :NUM_CHOICES].contiguous()
    if kind == "even":
        ids = torch.arange(num_tokens * NUM_CHOICES, device=device).view(num_tokens, NUM_CHOICES) % (NUM_EXPERTS - 1)
    if kind == "same":
        ids = torch.tensor([[4, 1, 9]], device=device).repeat(num_tokens, 1)
    weights = torch.rand(num_tokens, NUM_CHOICES, device=device)
    return ids, weights


def pack(
    kernels: ModuleType, layer: Layer, *, has_bias: bool = True, is_int8: bool = False
) -> tuple[ExpertWeights, ExpertWeights]:
    """Pack both linear layers for a backend."""
    gate_up, gate_up_bias, down, down_bias = layer
    return (
        kernels.pack_experts(gate_up, gate_up_bias if has_bias else None, is_int8=is_int8),
        kernels.pack_experts(down, down_bias if has_bias else None, is_int8=is_int8),
    )


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Compare within the tolerance of the dtype, relative to the largest result."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    size = expected.float().abs().max().clamp(min=1.0) if expected.numel() else 1.0
    assert bool(((got.float() - expected.float()).abs() <= TOLERANCE[got.dtype] * size).all())


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_reference_equals_a_loop_over_tokens(num_tokens: int) -> None:
    layer, (ids, weights) = make_layer(torch.float32), route(num_tokens, "random")
    gate_up, gate_up_bias, down, down_bias = layer
    x = torch.randn(num_tokens, WIDTH)
    expected = torch.zeros(num_tokens, WIDTH)
    for token in range(num_tokens):
        for choice in range(NUM_CHOICES):
            expert = int(ids[token, choice])
            gate, up = (gate_up[expert] @ x[token] + gate_up_bias[expert]).chunk(2)
            result = down[expert] @ (functional.silu(gate) * up) + down_bias[expert]
            expected[token] += weights[token, choice] * result
    got = reference.grouped_experts(x, ids, weights, *pack(reference, layer), reference.silu_mul)
    assert_close(got, expected)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["random", "same"])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 64, 513])
def test_cpu_experts_equal_reference(num_tokens: int, kind: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(random.choice((1, 3)))
    layer, (ids, weights) = make_layer(dtype), route(num_tokens, kind)
    x, has_bias = torch.randn(num_tokens, WIDTH).to(dtype), random.random() < 0.5
    expected = reference.grouped_experts(
        x, ids, weights, *pack(reference, layer, has_bias=has_bias), reference.silu_mul
    )
    packed = pack(cpu, layer, has_bias=has_bias)
    assert (packed[0].form == "panels") == (dtype == torch.bfloat16)
    got = cpu.grouped_experts(x, ids, weights.to(dtype), *packed, cpu.silu_mul)
    assert_close(got, expected)
    if dtype == torch.bfloat16:
        up, down = (
            replace(each, compact=compact_weights(weight)) for each, weight in zip(packed, layer[::2], strict=True)
        )
        from_compact = cpu.grouped_experts(x, ids, weights.to(dtype), up, down, cpu.silu_mul)
        assert_close(from_compact, expected)
        assert torch.equal(from_compact, got)
        if num_tokens == 1:  # the panels are not read
            up, down = (replace(each, weight=torch.zeros_like(each.weight)) for each in (up, down))
            assert torch.equal(cpu.grouped_experts(x, ids, weights.to(dtype), up, down, cpu.silu_mul), from_compact)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "inner", "has_compact"),
    [(301, 64, False), (301, 32, True), (11, 32, True)],  # more outputs of `up`; of `down`; few enough for the copy
)
def test_cpu_layer_in_one_launch_equals_its_parts(
    num_tokens: int, inner: int, has_compact: bool, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one launch is for tiles that keep all threads busy; uneven ones are multiplied in parts."""
    sizes: list[int] = []  # of the longest tiles of each launch
    one_launch = expert_layer.multiply_tiles

    def multiply_tiles(
        x: Tensor, tokens: Tensor, tiles: Tensor, tile_tokens: int, up: ExpertWeights, down: ExpertWeights
    ) -> Tensor:
        sizes.append(tile_tokens)
        return one_launch(x, tokens, tiles, tile_tokens, up, down)

    monkeypatch.setattr(expert_layer, "multiply_tiles", multiply_tiles)
    torch.set_num_threads(2)
    layer, x = make_layer(torch.bfloat16, inner=inner), torch.randn(num_tokens, WIDTH).bfloat16()
    up, down = pack(cpu, layer, has_bias=has_bias)
    if has_compact:
        up, down = (
            replace(each, compact=compact_weights(weight)) for each, weight in zip((up, down), layer[::2], strict=True)
        )
    for kind in ("even", "same"):
        ids, weights = route(num_tokens, kind)
        got = cpu.grouped_experts(x, ids, weights, up, down, cpu.silu_mul)
        assert len(sizes) == 1, "one launch for even tiles only"
        parts = cpu.grouped_experts(x, ids, weights, up, down, lambda both: cpu.silu_mul(both))
        assert torch.equal(got, parts)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_tokens", "tile_tokens"), [(1, 32), (70, 32), (130, 96), (96, 96)])
def test_dense_mlp_in_tiles_equals_products(num_tokens: int, tile_tokens: int, has_bias: bool) -> None:
    torch.set_num_threads(2)
    layer = make_layer(torch.bfloat16)
    up, down = ((layer[at][3], layer[at + 1][3] if has_bias else None) for at in (0, 2))
    x = torch.randn(num_tokens, WIDTH).bfloat16()
    hidden = cpu.silu_mul(matmul.multiply(x, matmul.pack_weight(up[0]), up[1]))
    expected = matmul.multiply(hidden, matmul.pack_weight(down[0]), down[1])
    gate_up, out = (cpu.pack_experts(w[None], None if b is None else b[None]) for w, b in (up, down))
    assert torch.equal(expert_layer.gated_mlp(x, gate_up, out, tile_tokens), expected)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("num_tokens", [64, 130, 512, 584, 1000, 5000])
def test_tiles_of_a_dense_mlp_are_few_and_fit_a_cache(
    num_tokens: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_layer, "has_amx", lambda: True)
    torch.set_num_threads(threads)
    size = expert_layer.choose_mlp_tokens(num_tokens, 576, 1536)
    if num_tokens < expert_layer.MIN_MLP_TOKENS * threads:
        assert size == 0
        return
    assert size % 32 == 0 and size <= 256 < expert_layer.MAX_MLP_BYTES / (2 * (2 * 576 + 1536))
    assert math.ceil(num_tokens / size) <= threads * math.ceil(num_tokens / (threads * 256))
    assert expert_layer.choose_mlp_tokens(num_tokens, 4096, 14336) == 0
    monkeypatch.setattr(expert_layer, "has_amx", lambda: False)
    assert expert_layer.choose_mlp_tokens(num_tokens, 576, 1536) == 0


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"), [(1, 32, 8), (37, 128, 8), (5, 16, 16), (0, 32, 2)]
)
def test_chosen_experts_equal_topk_of_softmax(
    num_tokens: int, num_experts: int, num_chosen: int, dtype: torch.dtype
) -> None:
    logits = (torch.rand(num_tokens, num_experts).argsort(1) - num_experts / 2).to(dtype) / 8  # no two are equal
    probs = logits.softmax(-1, dtype=torch.float32)
    expected, order = probs.topk(num_chosen)
    for is_normalised in (False, True):
        ids, weights = cpu_experts.choose_experts(logits, num_chosen, is_normalised=is_normalised)
        assert torch.equal(ids, order)
        torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True) if is_normalised else expected)


def test_infinite_router_logits_choose_distinct_experts() -> None:
    logits = torch.full((1, 32), -torch.inf)
    logits[0, 7] = 300.0
    ids, weights = cpu_experts.choose_experts(logits, 4, is_normalised=True)
    assert ids[0, 0] == 7 and len(set(ids[0].tolist())) == 4
    assert weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_shared_expert_equals_torch(dtype: torch.dtype) -> None:
    out, y, x = (torch.randn(3, 7, 64) * 3).to(dtype).unbind(0)
    gate = (torch.randn(64) / 8).to(dtype)
    expected = out.float() + y.float() * (x.float() @ gate.float()).sigmoid()[:, None]
    out = out.clone()
    cpu_experts.add_shared_expert(out, y, x, gate)
    assert_close(out, expected.to(dtype))


@pytest.mark.parametrize(("width", "inner"), [(80, 24), (33, 7)])
def test_cpu_experts_of_odd_sizes_equal_reference(width: int, inner: int) -> None:
    layer, (ids, weights) = make_layer(torch.bfloat16, width, inner), route(9, "random")
    x = torch.randn(9, width).bfloat16()
    expected = reference.grouped_experts(x, ids, weights, *pack(reference, layer), reference.silu_mul)
    assert_close(cpu.grouped_experts(x, ids, weights, *pack(cpu, layer), cpu.silu_mul), expected)


def test_cpu_experts_take_transposed_weights_and_other_activations() -> None:
    """gpt-oss stores [num_experts, in, out], interleaves gate and up, and limits both."""
    layer, (ids, weights) = make_layer(torch.bfloat16), route(40, "random")
    gate_up, gate_up_bias, down, down_bias = layer
    stored = gate_up.mT.contiguous(), gate_up_bias, down.mT.contiguous(), down_bias

    def activate(both: Tensor) -> Tensor:
        gate, up = both[..., ::2].clamp(max=1.0), both[..., 1::2].clamp(-1.0, 1.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    x = torch.randn(40, WIDTH).bfloat16()
    expected = reference.grouped_experts(x, ids, weights, *pack(reference, layer), activate)
    views = stored[0].mT, stored[1], stored[2].mT, stored[3]
    assert_close(cpu.grouped_experts(x, ids, weights, *pack(cpu, views), activate), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 3, 64, 513])
def test_cpu_int8_experts_equal_reference_over_quantised_weights(
    num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without int16 products the kernel widens the codes, for either dtype."""
    layer, (ids, weights) = make_layer(dtype), route(num_tokens, "random")
    kept = [each if each.ndim == 2 else torch.stack([_round_to_int8(one) for one in each]) for each in layer]
    x = torch.randn(num_tokens, WIDTH).to(dtype)
    gate_up, gate_up_bias, down, down_bias = kept
    exact = gate_up.float(), gate_up_bias.float(), down.float(), down_bias.float()
    expected = reference.grouped_experts(x.float(), ids, weights, *pack(reference, exact), reference.silu_mul)
    for has_products in (True, False):
        if not has_products:
            monkeypatch.setattr(int16, "has_int16_products", lambda: False)
        packed = pack(cpu, layer, is_int8=True)
        assert packed[0].num_bytes < layer[0].nbytes * (0.55 if dtype == torch.bfloat16 else 0.3)
        got = cpu.grouped_experts(x, ids, weights, *packed, cpu.silu_mul)
        assert_close(got, expected.to(dtype))


def _round_to_int8(weight: Tensor) -> Tensor:
    numbers, scales = int8.quantise(weight)
    return numbers.float() * scales[:, None]


@pytest.mark.parametrize("is_int8", [False, True])
def test_cpu_experts_do_not_depend_on_other_tokens(is_int8: bool) -> None:
    layer, (ids, weights) = make_layer(torch.bfloat16), route(70, "random")
    packed = pack(cpu, layer, is_int8=is_int8)
    x = torch.randn(70, WIDTH).bfloat16()
    together = cpu.grouped_experts(x, ids, weights, *packed, cpu.silu_mul)
    for token in range(70):
        one = slice(token, token + 1)
        alone = cpu.grouped_experts(x[one], ids[one], weights[one], *packed, cpu.silu_mul)
        assert torch.equal(alone, together[one])


def test_cpu_plan_of_pairs_covers_every_pair_once() -> None:
    for _ in range(50):
        num_tokens, limit = random.randint(1, 200), random.choice((1, 7, 32))
        ids, _ = route(num_tokens, random.choice(("random", "same")))
        places, tokens, tiles = cpu_experts.plan_pairs(ids, NUM_EXPERTS, limit)
        assert sorted(places.tolist()) == list(range(ids.numel()))
        end = 0
        for expert, first, stop in tiles[1 : 1 + int(tiles[0, 0])].tolist():
            assert first == end and 0 < stop - first <= limit
            end = stop
            for place in range(first, stop):
                assert expert in ids[tokens[place]]
        assert end == ids.numel()
        pairs = torch.arange(ids.numel())
        assert torch.equal(tokens[places], pairs // NUM_CHOICES)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_tokens", "kind"),
    [(0, "random"), (1, "random"), (3, "same"), (40, "random"), pytest.param(513, "random", marks=pytest.mark.slow)],
)
def test_triton_experts_equal_reference(num_tokens: int, kind: str, dtype: torch.dtype, triton_device: str) -> None:
    layer, (ids, weights) = make_layer(dtype, device=triton_device), route(num_tokens, kind, triton_device)
    x, has_bias = torch.randn(num_tokens, WIDTH, device=triton_device).to(dtype), random.random() < 0.5
    expected = reference.grouped_experts(
        x, ids, weights, *pack(reference, layer, has_bias=has_bias), reference.silu_mul
    )
    packed = pack(triton, layer, has_bias=has_bias)
    assert_close(triton.grouped_experts(x, ids, weights.to(dtype), *packed, triton.silu_mul), expected)


@pytest.mark.parametrize(("width", "inner"), [(80, 24), (33, 7)])
def test_triton_experts_of_odd_sizes_and_transposed_weights_equal_reference(
    width: int, inner: int, triton_device: str
) -> None:
    layer = make_layer(torch.float32, width, inner, triton_device)
    ids, weights = route(21, "random", triton_device)
    x = torch.randn(21, width, device=triton_device)
    expected = reference.grouped_experts(x, ids, weights, *pack(reference, layer), reference.silu_mul)
    views = layer[0].mT.contiguous().mT, layer[1], layer[2].mT.contiguous().mT, layer[3]
    assert_close(triton.grouped_experts(x, ids, weights, *pack(triton, views), triton.silu_mul), expected)


@pytest.mark.gpu
def test_triton_experts_captured_once_serve_any_routing() -> None:
    layer, (ids, weights) = make_layer(torch.bfloat16, device="cuda"), route(64, "same", "cuda")
    x, packed = torch.randn(64, WIDTH, device="cuda").bfloat16(), pack(triton, layer)
    triton.grouped_experts(x, ids, weights, *packed, triton.silu_mul)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = triton.grouped_experts(x, ids, weights, *packed, triton.silu_mul)
    for kind in ("random", "same", "random"):
        ids.copy_(route(64, kind, "cuda")[0])
        graph.replay()
        assert_close(got, reference.grouped_experts(x, ids, weights, *pack(reference, layer), reference.silu_mul))
