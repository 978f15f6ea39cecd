"""A whole decoder in one launch against the same decoder spelled out with `reference` in float32."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from chatcache_kernels import cpu, reference
from chatcache_kernels.cpu import int8, matmul
from chatcache_kernels.cpu.decoder import DecoderWeights, LayerWeights, MegakernelDecoder, PackedLinear
from chatcache_kernels.types import AttentionBatch, HeadNorms, KVPages
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_random")

HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB, PAGE, NUM_PAGES, LENGTH = 6, 2, 32, 96, 160, 320, 16, 160, 700
EPS, SCALE = 1e-5, 32**-0.5


@dataclass(frozen=True, slots=True)
class Plain:
    """A linear layer as it is."""

    weight: Tensor
    bias: Tensor | None
    numbers: Tensor | None = None
    scales: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.float().T + (0.0 if self.bias is None else self.bias.float())

    def panels(self) -> PackedLinear:
        if self.numbers is None or self.scales is None:
            return PackedLinear(matmul.pack_weight(self.weight), self.bias)
        bias = None if self.bias is None else self.bias.float()
        return PackedLinear(int8.pack_numbers(self.numbers), bias, self.scales)

    def quantised(self) -> Plain:
        """Return the layer over the nearest 8-bit weights, which are in float32 then."""
        numbers, scales = int8.quantise(self.weight)
        return Plain(numbers.float() * scales[:, None], self.bias, numbers, scales)


def linear(num_outputs: int, num_inputs: int, bias: bool) -> Plain:
    weight = torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
    return Plain(weight.bfloat16(), torch.randn(num_outputs).bfloat16() if bias else None)


@dataclass(frozen=True, slots=True)
class Block:
    norms: tuple[Tensor, Tensor]
    linears: tuple[Plain, Plain, Plain, Plain]
    head_norms: HeadNorms | None
    window: int | None


@dataclass(frozen=True, slots=True)
class Model:
    """What both sides compute with."""

    embedding: Tensor
    blocks: list[Block]
    norm: Tensor
    head: Plain
    cos: Tensor
    sin: Tensor

    @classmethod
    def draw(cls, num_layers: int, *, bias: bool = False, head_norms: bool = False, windows: bool = False) -> Model:
        def norm(width: int) -> Tensor:
            return (1 + 0.2 * torch.randn(width)).bfloat16()

        blocks = [
            Block(
                (norm(HIDDEN), norm(HIDDEN)),
                (
                    linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, bias),
                    linear(HIDDEN, HEADS * DIM, bias),
                    linear(2 * INNER, HIDDEN, bias),
                    linear(HIDDEN, INNER, bias),
                ),
                HeadNorms(norm(DIM), norm(DIM), EPS) if head_norms else None,
                40 if windows and layer % 2 else None,
            )
            for layer in range(num_layers)
        ]
        angles = torch.outer(torch.arange(LENGTH).float(), 10000.0 ** -(torch.arange(0, DIM, 2) / DIM))
        embedding = torch.randn(VOCAB, HIDDEN).bfloat16()
        return cls(embedding, blocks, norm(HIDDEN), linear(VOCAB, HIDDEN, False), angles.cos(), angles.sin())

    def quantised(self) -> Model:
        """Return the model over 8-bit weights."""
        blocks = []
        for block in self.blocks:
            qkv, out, gate_up, down = (each.quantised() for each in block.linears)
            blocks.append(replace(block, linears=(qkv, out, gate_up, down)))
        return replace(self, blocks=blocks, head=self.head.quantised())

    def packed(self) -> DecoderWeights:
        layers = [
            LayerWeights(
                block.norms[0], block.linears[0].panels(), block.head_norms, block.linears[1].panels(), block.norms[1],
                block.linears[2].panels(), block.linears[3].panels(), block.window,
            )
            for block in self.blocks
        ]  # fmt: skip
        return DecoderWeights(
            self.embedding, self.cos, self.sin, layers, self.norm, self.head.panels(), EPS, SCALE, HEADS
        )

    def logits(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, pages: KVPages) -> Tensor:
        """Return the logits of all tokens in float32; `pages` are reference pages in float32."""
        x = self.embedding.float()[tokens]
        cos, sin = self.cos[positions], self.sin[positions]
        for index, block in enumerate(self.blocks):
            h = reference.rms_norm(x, block.norms[0].float(), EPS)
            heads = block.linears[0](h).view(len(h), -1, DIM)
            q, k, v = torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], dim=1)
            n = block.head_norms
            norms = HeadNorms(n.q.float(), n.k.float(), n.eps) if n is not None else None
            q = reference.rope_write(q, k, v, cos, sin, pages, index, batch.slots, norms)
            mixed = reference.paged_attention(q, pages, index, batch, SCALE, block.window)
            x = x + block.linears[1](mixed.reshape(len(h), -1))
            gated = reference.silu_mul(block.linears[2](reference.rms_norm(x, block.norms[1].float(), EPS)))
            x = x + block.linears[3](gated)
        return self.head(reference.rms_norm(x, self.norm.float(), EPS))


def batch_of(starts: list[int], counts: list[int]) -> tuple[AttentionBatch, Tensor]:
    """Return a batch of rows over pages of their own, and the tokens' positions."""
    free = iter((torch.randperm(NUM_PAGES - 1) + 1).tolist())
    context = [start + count for start, count in zip(starts, counts, strict=True)]
    tables = torch.zeros(len(starts), -(-max(context) // PAGE), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    for row, (first, end) in enumerate(zip(starts, context, strict=True)):
        for place in range(-(-end // PAGE)):
            tables[row, place] = next(free)
        positions += range(first, end)
        slots += [int(tables[row, position // PAGE]) * PAGE + position % PAGE for position in range(first, end)]
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    start, num_tokens = (torch.tensor(each, dtype=torch.int32) for each in (starts, counts))
    batch = AttentionBatch(tables, start, num_tokens, offsets, torch.tensor(slots), max(counts), max(context))
    return batch, torch.tensor(positions)


def stores(num_layers: int) -> tuple[KVPages, KVPages]:
    """Return the same random pages twice: bf16 for the kernels, float32 for the reference."""
    ours = cpu.allocate_pages(num_layers, NUM_PAGES, PAGE, KV_HEADS, DIM, torch.bfloat16)
    theirs = reference.allocate_pages(num_layers, NUM_PAGES, PAGE, KV_HEADS, DIM, torch.float32)
    slots = torch.arange(NUM_PAGES * PAGE)
    for layer in range(num_layers):
        k, v = torch.randn(2, len(slots), KV_HEADS, DIM).bfloat16().unbind(0)
        cpu.write_pages(ours, layer, k, v, slots)
        reference.write_pages(theirs, layer, k.float(), v.float(), slots)
    return ours, theirs


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("in_int8", [False, True], ids=["bf16", "int8"])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"head_norms": True}, {"windows": True}], ids=str)
def test_logits_and_pages(options: dict[str, bool], in_int8: bool) -> None:
    torch.set_num_threads(random.choice((1, 2)))
    model = Model.draw(3, **options)
    model = model.quantised() if in_int8 else model
    ours, theirs = stores(3)
    few = MegakernelDecoder(model.packed(), ours)
    for starts, counts in (
        ([random.randrange(600)], [1]),
        ([0], [random.randint(2, min(few.max_tokens, 21))]),
        ([random.randrange(100) for _ in range(6)], [1] * 6),
        ([0, 37, 520], [3, 1, 2]),
    ):
        batch, positions = batch_of(starts, counts)
        assert few.can_run(batch, len(positions))
        tokens = torch.randint(VOCAB, (len(positions),))
        expected = model.logits(tokens, positions, batch, theirs)
        drawn = torch.tensor(
            sorted(random.sample(range(len(tokens)), random.randint(0, len(tokens)))), dtype=torch.long
        )
        got = few.run(tokens, positions, batch, drawn)
        assert error(got, expected[drawn]) < 2e-2 or not len(drawn)
        assert error(few.run(tokens, positions, batch, None), expected) < 2e-2
        for layer in range(3):
            pairs = zip(
                cpu.read_pages(ours, layer, batch.slots), reference.read_pages(theirs, layer, batch.slots), strict=True
            )
            assert all(error(mine, other) < 2e-2 for mine, other in pairs)


@pytest.mark.usefixtures("poisoned_memory")
def test_rows_that_share_pages() -> None:
    torch.set_num_threads(2)
    model = Model.draw(2)
    ours, theirs = stores(2)
    few = MegakernelDecoder(model.packed(), ours)
    starts, counts = [random.randrange(480, 560) for _ in range(4)], [1, 2, 1, 1]
    batch, positions = batch_of(starts, counts)
    batch.tables[1:, :20] = batch.tables[0, :20]
    tables, start, num_tokens = (each.numpy() for each in (batch.tables, batch.start, batch.num_tokens))
    work = cpu.prepare(tables, start, num_tokens, PAGE, HEADS // KV_HEADS)
    assert work is not None
    tokens = torch.randint(VOCAB, (len(positions),))
    expected = model.logits(tokens, positions, batch, theirs)
    assert error(few.run(tokens, positions, replace(batch, work=work), None), expected) < 2e-2


def test_what_it_does_not_take() -> None:
    model = Model.draw(1)
    ours, _ = stores(1)
    few = MegakernelDecoder(model.packed(), ours)
    batch, positions = batch_of([0], [22])  # more queries of a key head than the decode kernel takes
    assert not few.can_run(batch, len(positions))
    many, positions = batch_of([0] * 5, [few.max_tokens // 5 + 1] * 5)
    assert not few.can_run(many, len(positions))
    batch, positions = batch_of([0], [1])
    for tokens, place in (([VOCAB], positions), ([-1], positions), ([0], positions + LENGTH)):
        with pytest.raises(IndexError, match=f"there are {VOCAB if tokens != [0] else LENGTH}"):
            few.run(torch.tensor(tokens), place, batch, None)
    packed = model.packed()
    odd = replace(packed, cos=packed.cos[:, :3], sin=packed.sin[:, :3])
    assert not odd.is_supported(ours)
    with pytest.raises(ValueError, match="need torch"):
        MegakernelDecoder(odd, ours)
