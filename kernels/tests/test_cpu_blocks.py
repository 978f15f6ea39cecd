"""Decode steps through the blocks of hybrid models and of models with experts, against plain torch in float32."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from chatcache_kernels import cpu, reference
from chatcache_kernels.cpu import matmul
from chatcache_kernels.cpu.blocks import (
    AttentionWeights,
    BlockDecoder,
    BlockWeights,
    DeltaWeights,
    ExpertsWeights,
    MLPWeights,
    StackWeights,
)
from chatcache_kernels.cpu.compact import compact_weights
from chatcache_kernels.cpu.decoder import PackedLinear
from chatcache_kernels.types import AttentionBatch, HeadNorms, KVPages
from torch import Tensor
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("fresh_random", "poisoned_memory")

HEADS, KV_HEADS, DIM, HALF, HIDDEN, INNER, PAGE, NUM_PAGES = 4, 2, 32, 8, 96, 64, 16, 160
KEY_HEADS, VALUE_HEADS, DIM_K, DIM_V, TAPS = 8, 16, 16, 16, 4
KEYS, VALUES = KEY_HEADS * DIM_K, VALUE_HEADS * DIM_V
NUM_EXPERTS, NUM_CHOSEN, NUM_SLOTS = 32, 3, 9
EPS, SCALE = 1e-5, DIM**-0.5
LAYOUTS = {
    "dense": ("delta mlp", "attention mlp", "delta mlp"),
    "experts": ("attention experts", "attention experts"),
    "mixed": ("delta experts", "attention shared", "delta mlp"),
}


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A linear layer in plain torch."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.float(), None if self.bias is None else self.bias.float())

    def panels(self) -> PackedLinear:
        return PackedLinear(matmul.pack_weight(self.weight), self.bias, compact=compact_weights(self.weight[None])[0])


def linear(num_outputs: int, num_inputs: int, *, bias: bool = False) -> PlainLinear:
    weight = (torch.randn(num_outputs, num_inputs) * num_inputs**-0.5).bfloat16()
    return PlainLinear(weight, torch.randn(num_outputs).bfloat16() if bias else None)


def heads(x: Tensor, dim: int) -> Tensor:
    """Return x [T, heads * dim] as [T, heads, dim]."""
    return x.reshape(len(x), -1, dim)


def norm(width: int) -> Tensor:
    return 1 + 0.2 * torch.randn(width)


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: PlainLinear
    out: PlainLinear
    norms: HeadNorms

    @classmethod
    def draw(cls) -> Attention:
        width = HEADS * DIM
        return cls(
            linear(2 * width + 2 * KV_HEADS * DIM, HIDDEN, bias=True),
            linear(HIDDEN, width),
            HeadNorms(norm(DIM), norm(DIM), EPS),
        )

    def packed(self, window: int | None) -> AttentionWeights:
        return AttentionWeights(self.qkv.panels(), self.out.panels(), self.norms, HEADS, SCALE, window)


@dataclass(frozen=True, slots=True)
class Delta:
    projection: PlainLinear
    out: PlainLinear
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor

    @classmethod
    def draw(cls) -> Delta:
        return cls(
            linear(2 * KEYS + 2 * VALUES + 2 * VALUE_HEADS, HIDDEN),
            linear(HIDDEN, VALUES),
            torch.randn(2 * KEYS + VALUES, TAPS).bfloat16(),
            -torch.rand(VALUE_HEADS).exp(),
            torch.randn(VALUE_HEADS),
            norm(DIM_V).bfloat16(),
        )

    def packed(self) -> DeltaWeights:
        return DeltaWeights(
            self.projection.panels(), self.out.panels(), self.conv, None, True, self.decay, self.dt_bias, self.norm,
            EPS, KEY_HEADS, VALUE_HEADS, DIM_K, DIM_V,
        )  # fmt: skip

    def __call__(self, h: Tensor, states: Sequence[Tensor], slots: Tensor, offsets: Tensor) -> Tensor:
        qkv, z, b, a = torch.split(self.projection(h), [2 * KEYS + VALUES, VALUES, VALUE_HEADS, VALUE_HEADS], dim=1)
        mixed = reference.causal_conv(qkv, self.conv.float(), None, states[0], slots, offsets, "silu")
        q, k, v = (heads(x, DIM_K) for x in torch.split(mixed, [KEYS, KEYS, VALUES], dim=1))
        g = self.decay * functional.softplus(a + self.dt_bias)
        out = reference.gated_delta_rule(q, k, v, g, b.sigmoid(), states[1], slots, offsets, DIM_K**-0.5, l2_norm=True)
        return self.out(reference.gated_rms_norm(out, z.view(out.shape), self.norm.float(), EPS).flatten(1))


@dataclass(frozen=True, slots=True)
class MLP:
    gate_up: PlainLinear
    down: PlainLinear

    @classmethod
    def draw(cls) -> MLP:
        return cls(linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER))

    def packed(self) -> MLPWeights:
        return MLPWeights(self.gate_up.panels(), self.down.panels())

    def __call__(self, h: Tensor) -> Tensor:
        return self.down(reference.silu_mul(self.gate_up(h)))


@dataclass(frozen=True, slots=True)
class Experts:
    router: PlainLinear
    up: Tensor
    down: Tensor
    shared: MLP | None
    shared_gate: Tensor | None

    @classmethod
    def draw(cls, *, shared: bool) -> Experts:
        up = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5
        down = torch.randn(NUM_EXPERTS, HIDDEN, INNER) * INNER**-0.5
        others = (MLP.draw(), (torch.randn(HIDDEN) * HIDDEN**-0.5).bfloat16()) if shared else (None, None)
        return cls(linear(NUM_EXPERTS, HIDDEN), up.bfloat16(), down.bfloat16(), *others)

    def packed(self) -> ExpertsWeights:
        up, down = (
            replace(cpu.pack_experts(each, None), compact=compact_weights(each)) for each in (self.up, self.down)
        )
        shared = None if self.shared is None else self.shared.packed()
        return ExpertsWeights(self.router.panels(), up, down, NUM_CHOSEN, True, shared, self.shared_gate)

    def __call__(self, h: Tensor, ids: Tensor) -> Tensor:
        """Apply the experts `ids`, which must be the best ones up to the rounding of their logits."""
        logits = self.router(h)
        chosen = logits.gather(1, ids)
        assert all(len(set(row)) == NUM_CHOSEN for row in ids.tolist())
        assert bool((chosen.amin(1) >= logits.sort(dim=1, descending=True)[0][:, NUM_CHOSEN - 1] - 0.2).all())
        up, down = (reference.pack_experts(each.float(), None) for each in (self.up, self.down))
        out = reference.grouped_experts(h, ids, chosen.softmax(1), up, down, reference.silu_mul)
        if self.shared is not None and self.shared_gate is not None:
            out = out + (h @ self.shared_gate.float()).sigmoid()[:, None] * self.shared(h)
        return out


@dataclass(frozen=True, slots=True)
class Block:
    norms: tuple[Tensor, Tensor]
    mixer: Attention | Delta
    mlp: MLP | Experts


@dataclass(frozen=True, slots=True)
class Model:
    """Random weights that both implementations use."""

    blocks: list[Block]
    norm: Tensor
    window: int | None

    @classmethod
    def draw(cls, layout: Sequence[str], window: int | None = None) -> Model:
        blocks = []
        for each in layout:
            mixer, mlp = each.split()
            blocks.append(
                Block(
                    (norm(HIDDEN), norm(HIDDEN)),
                    Attention.draw() if mixer == "attention" else Delta.draw(),
                    MLP.draw() if mlp == "mlp" else Experts.draw(shared=mlp == "shared"),
                )
            )
        return cls(blocks, norm(HIDDEN), window)

    def packed(self) -> StackWeights:
        blocks = [
            BlockWeights(
                block.norms[0],
                block.mixer.packed(self.window) if isinstance(block.mixer, Attention) else block.mixer.packed(),
                block.norms[1],
                block.mlp.packed(),
            )
            for block in self.blocks
        ]
        return StackWeights(blocks, self.norm, EPS, HALF)

    def run(self, x: Tensor, step: Step, pages: KVPages, states: Sequence[Tensor], ids: Sequence[Tensor]) -> Tensor:
        """Return the final hidden states; `ids`: the chosen experts of each layer that has some."""
        batch, (cos, sin), remaining, chosen = step.batch, step.rotation, list(states), list(ids)
        layer = 0
        for block in self.blocks:
            h = reference.rms_norm(x, block.norms[0], EPS)
            if isinstance(block.mixer, Attention):
                sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM, HEADS * DIM]
                *qkv, gates = torch.split(block.mixer.qkv(h), sizes, dim=1)
                q, k, v = (heads(each, DIM) for each in qkv)
                q = reference.rope_write(q, k, v, cos, sin, pages, layer, batch.slots, block.mixer.norms)
                out = reference.paged_attention(q, pages, layer, batch, SCALE, self.window).flatten(1)
                x, layer = x + block.mixer.out(out * gates.sigmoid()), layer + 1
            else:
                x = x + block.mixer(h, remaining[:2], step.slots, batch.offsets)
                del remaining[:2]
            h = reference.rms_norm(x, block.norms[1], EPS)
            x = x + (block.mlp(h) if isinstance(block.mlp, MLP) else block.mlp(h, chosen.pop(0)))
        return reference.rms_norm(x, self.norm, EPS)


@dataclass(frozen=True, slots=True)
class Step:
    x: Tensor
    batch: AttentionBatch
    rotation: tuple[Tensor, Tensor]
    slots: Tensor

    @classmethod
    def draw(cls, starts: Sequence[int], counts: Sequence[int]) -> Step:
        context = [start + count for start, count in zip(starts, counts, strict=True)]
        tables = (torch.randperm(NUM_PAGES - 1) + 1)[: len(starts) * 12].view(len(starts), 12).int()
        offsets = torch.tensor([0, *counts]).cumsum(0).int()
        places = [torch.arange(start, end) for start, end in zip(starts, context, strict=True)]
        cells = [table[place // PAGE] * PAGE + place % PAGE for table, place in zip(tables, places, strict=True)]
        start, num_tokens = torch.tensor(starts).int(), torch.tensor(counts).int()
        batch = AttentionBatch(tables, start, num_tokens, offsets, torch.cat(cells).long(), max(counts), max(context))
        angles = torch.cat(places)[:, None] * 100.0 ** -(torch.arange(HALF) / HALF)
        slots = torch.randperm(NUM_SLOTS - 1)[: len(starts)].int() + 1
        return cls(torch.randn(sum(counts), HIDDEN).bfloat16(), batch, (angles.cos(), angles.sin()), slots)


def make_pages(num_layers: int) -> tuple[KVPages, KVPages]:
    """Return the same random pages twice: bf16 for the kernels, float32 for the reference."""
    ours = cpu.allocate_pages(num_layers, NUM_PAGES, PAGE, KV_HEADS, DIM, torch.bfloat16)
    theirs = reference.allocate_pages(num_layers, NUM_PAGES, PAGE, KV_HEADS, DIM, torch.float32)
    cells = torch.arange(NUM_PAGES * PAGE)
    for layer in range(num_layers):
        k, v = torch.randn(2, len(cells), KV_HEADS, DIM).bfloat16().unbind(0)
        cpu.write_pages(ours, layer, k, v, cells)
        reference.write_pages(theirs, layer, k.float(), v.float(), cells)
    return ours, theirs


def make_states(num_layers: int) -> list[Tensor]:
    """Return random states: the tails of the convolutions in bf16, and memories."""
    states = []
    for _ in range(num_layers):
        states.append(torch.randn(NUM_SLOTS, 2 * KEYS + VALUES, TAPS - 1).bfloat16())
        states.append(torch.randn(NUM_SLOTS, VALUE_HEADS, DIM_K, DIM_V))
    return states


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def count(layout: Sequence[str], kind: str) -> int:
    return sum(each.startswith(kind) for each in layout)


MAX_ERROR = 4e-2  # relative, of bf16 activations after several blocks
STEPS = (([5], [1]), ([40, 0, 131, 9, 16], [1] * 5), ([0, 37, 90], [3, 1, 2]), ([17], [9]))


@pytest.mark.parametrize("unit", ["best", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_decoder_equals_torch(layout: str, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plain`: as on a CPU without AMX and AVX512-BF16."""
    if unit == "plain":
        for name in ("has_amx", "has_avx512_bf16"):
            for module in (matmul, cpu.experts, cpu.fused):
                monkeypatch.setattr(module, name, lambda: False, raising=False)
    torch.set_num_threads(random.choice((1, 2)))
    kinds = LAYOUTS[layout]
    model = Model.draw(kinds, window=random.choice((None, 40)))
    (ours, theirs), states = make_pages(count(kinds, "attention")), make_states(count(kinds, "delta"))
    expected_states = [each.to(torch.float32, copy=True) for each in states]
    decoder = BlockDecoder(model.packed(), ours, states)
    for starts, counts in STEPS:
        step = Step.draw(starts, counts)
        assert decoder.can_run(step.batch, len(step.x))
        got = decoder.run(step.x, step.rotation, step.batch, step.slots if states else None)
        ids = [each[: len(step.x) * NUM_CHOSEN].view(-1, NUM_CHOSEN) for each in decoder.chosen]
        expected = model.run(step.x.float(), step, theirs, expected_states, ids)
        assert relative_error(got, expected) < MAX_ERROR
        for mine, other in zip(states, expected_states, strict=True):
            assert relative_error(mine, other) < MAX_ERROR
        for layer in range(ours.num_layers):
            mine, others = (
                (cpu if pages is ours else reference).read_pages(pages, layer, step.batch.slots)
                for pages in (ours, theirs)
            )
            assert all(relative_error(x, y) < MAX_ERROR for x, y in zip(mine, others, strict=True))


def test_block_decoder_with_shared_pages_equals_unshared() -> None:
    torch.set_num_threads(2)
    model = Model.draw(LAYOUTS["dense"])
    pages, _ = make_pages(1)
    states = make_states(2)
    step = Step.draw([150, 155, 161], [1, 2, 1])
    step.batch.tables[1:, :9] = step.batch.tables[0, :9]
    tables, start, num_tokens = (each.numpy() for each in (step.batch.tables, step.batch.start, step.batch.num_tokens))
    work = cpu.prepare(tables, start, num_tokens, PAGE, HEADS // KV_HEADS)
    assert work is not None
    outs = []
    for batch in (step.batch, replace(step.batch, work=work)):
        decoder = BlockDecoder(model.packed(), pages, [each.clone() for each in states])
        outs.append(decoder.run(step.x, step.rotation, batch, step.slots))
    assert relative_error(outs[1], outs[0].float()) < 1e-2


def test_block_decoder_bits_do_not_depend_on_the_threads() -> None:
    torch.set_num_threads(5)
    kinds = LAYOUTS["mixed"]
    model, (pages, _), states = Model.draw(kinds), make_pages(1), make_states(2)
    step = Step.draw([40, 0, 131, 9], [1] * 4)
    outs = []
    for num_threads in (1, 5, 3, 5):
        torch.set_num_threads(5)
        mine = [each.clone() for each in states]
        decoder = BlockDecoder(model.packed(), pages, mine)
        torch.set_num_threads(num_threads)
        outs.append((decoder.run(step.x, step.rotation, step.batch, step.slots), *mine))
    assert all(torch.equal(*pair) for out in outs[1:] for pair in zip(out, outs[0], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thread_that_enters_a_kernel_late_finds_no_work(layout: str) -> None:
    """The queue lets a thread enter a kernel that the others have left, even at the end of the step."""
    kinds = LAYOUTS[layout]
    model, (pages, _), states = Model.draw(kinds), make_pages(count(kinds, "attention")), make_states(2)
    states = states[: 2 * count(kinds, "delta")]
    decoder = BlockDecoder(model.packed(), pages, states)
    step = Step.draw([40, 0, 131, 9], [1] * 4)
    decoder.run(step.x, step.rotation, step.batch, step.slots if states else None)
    memory = [*decoder._held, pages.k, pages.v, *states]
    before = [each.clone() for each in memory]
    for group, place in decoder._steps[0]:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(group.calls.entry)(group.calls.address(place))
    assert all(torch.equal(*(x.view(torch.uint8) for x in pair)) for pair in zip(memory, before, strict=True))


def test_block_decoder_refuses_unsupported_steps_and_shapes() -> None:
    model, (pages, _), states = Model.draw(LAYOUTS["dense"]), make_pages(1), make_states(2)
    weights = model.packed()
    decoder = BlockDecoder(weights, pages, states)
    long, many = Step.draw([0], [33]), Step.draw([0] * 13, [5] * 13)
    assert not decoder.can_run(long.batch, len(long.x))  # more queries per key head than the decode kernel supports
    assert not decoder.can_run(many.batch, len(many.x))
    assert not replace(weights, half=3).is_supported(pages)
    assert not weights.is_supported(make_pages(2)[0])
    for bad, tensors in ((replace(weights, half=3), states), (weights, states[:2])):
        with pytest.raises(ValueError, match="need torch"):
            BlockDecoder(bad, pages, tensors)
