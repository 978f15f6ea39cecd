"""The megakernel decoder against a float32 decoder built from `reference`; the kernel queue.

The queue must run kernels in order, each after all items of the one before, and wait for no thread that holds no item.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from chatcache_kernels import cpu, reference
from chatcache_kernels.cpu import int8, launch, matmul, megakernel
from chatcache_kernels.cpu.compact import compact_weights
from chatcache_kernels.cpu.decoder import DecoderWeights, LayerWeights, MegakernelDecoder, PackedLinear
from chatcache_kernels.cpu.megakernel import KernelCalls, KernelQueue
from chatcache_kernels.types import AttentionBatch, HeadNorms, KVPages
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_random")


HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB, PAGE, NUM_PAGES, LENGTH = 6, 2, 32, 96, 160, 320, 16, 160, 700
EPS, SCALE = 1e-5, 32**-0.5


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A linear layer in plain torch."""

    weight: Tensor
    bias: Tensor | None
    numbers: Tensor | None = None
    scales: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight.float().T + (0.0 if self.bias is None else self.bias.float())

    def panels(self) -> PackedLinear:
        if self.numbers is None or self.scales is None:
            compact = compact_weights(self.weight[None])[0]
            return PackedLinear(matmul.pack_weight(self.weight), self.bias, compact=compact)
        bias = None if self.bias is None else self.bias.float()
        return PackedLinear(int8.pack_numbers(self.numbers, int8.choose_unit(torch.bfloat16)), bias, self.scales)

    def quantised(self) -> PlainLinear:
        """Return the layer with weights rounded to int8 codes, in float32."""
        numbers, scales = int8.quantise(self.weight)
        return PlainLinear(numbers.float() * scales[:, None], self.bias, numbers, scales)


def make_linear(num_outputs: int, num_inputs: int, bias: bool) -> PlainLinear:
    weight = torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
    return PlainLinear(weight.bfloat16(), torch.randn(num_outputs).bfloat16() if bias else None)


@dataclass(frozen=True, slots=True)
class Block:
    norms: tuple[Tensor, Tensor]
    linears: tuple[PlainLinear, PlainLinear, PlainLinear, PlainLinear]
    head_norms: HeadNorms | None
    window: int | None


@dataclass(frozen=True, slots=True)
class Model:
    """Random weights that both implementations use."""

    embedding: Tensor
    blocks: list[Block]
    norm: Tensor
    head: PlainLinear
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
                    make_linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, bias),
                    make_linear(HIDDEN, HEADS * DIM, bias),
                    make_linear(2 * INNER, HIDDEN, bias),
                    make_linear(HIDDEN, INNER, bias),
                ),
                HeadNorms(norm(DIM), norm(DIM), EPS) if head_norms else None,
                40 if windows and layer % 2 else None,
            )
            for layer in range(num_layers)
        ]
        angles = torch.outer(torch.arange(LENGTH).float(), 10000.0 ** -(torch.arange(0, DIM, 2) / DIM))
        embedding = torch.randn(VOCAB, HIDDEN).bfloat16()
        return cls(embedding, blocks, norm(HIDDEN), make_linear(VOCAB, HIDDEN, False), angles.cos(), angles.sin())

    def quantised(self) -> Model:
        """Return the model with int8 weights."""
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
        return self.head(self.states(tokens, positions, batch, pages))

    def states(self, tokens: Tensor, positions: Tensor, batch: AttentionBatch, pages: KVPages) -> Tensor:
        """Return the final hidden states of all tokens in float32."""
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
        return reference.rms_norm(x, self.norm.float(), EPS)


def make_batch(starts: list[int], counts: list[int]) -> tuple[AttentionBatch, Tensor]:
    """Return a batch of rows over separate pages, and the tokens' positions."""
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


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def use_int8_in_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply as on a CPU without AMX and int16 products."""
    monkeypatch.setattr(int8, "choose_unit", lambda dtype: "floats")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("weights", ["bf16", "int8", "int8-floats"])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"head_norms": True}, {"windows": True}], ids=str)
def test_decoder_logits_and_pages_equal_torch(
    options: dict[str, bool], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if weights == "int8-floats":
        use_int8_in_floats(monkeypatch)
    torch.set_num_threads(random.choice((1, 2)))
    model = Model.draw(3, **options)
    model = model.quantised() if weights != "bf16" else model
    ours, theirs = stores(3)
    few = MegakernelDecoder(model.packed(), ours)
    for starts, counts in (
        ([random.randrange(600)], [1]),
        ([0], [random.randint(2, min(few.max_tokens, 21))]),
        ([random.randrange(100) for _ in range(6)], [1] * 6),
        ([0, 37, 520], [3, 1, 2]),
    ):
        batch, positions = make_batch(starts, counts)
        assert few.can_run(batch, len(positions))
        tokens = torch.randint(VOCAB, (len(positions),))
        expected = model.logits(tokens, positions, batch, theirs)
        drawn = torch.tensor(
            sorted(random.sample(range(len(tokens)), random.randint(0, len(tokens)))), dtype=torch.long
        )
        got = few.run(tokens, positions, batch, drawn)
        assert relative_error(got, expected[drawn]) < 2e-2 or not len(drawn)
        assert relative_error(few.run(tokens, positions, batch, None), expected) < 2e-2
        pooled = torch.tensor(sorted(set(range(len(tokens))) - set(drawn.tolist())), dtype=torch.long)
        states, logits = few.run_states(tokens, positions, batch, pooled, drawn)
        assert logits.shape == got.shape and (relative_error(logits, expected[drawn]) < 2e-2 or not len(drawn))
        want = model.states(tokens, positions, batch, theirs)[pooled]
        assert states.shape == want.shape and (relative_error(states, want) < 2e-2 or not len(pooled))
        for layer in range(3):
            pairs = zip(
                cpu.read_pages(ours, layer, batch.slots), reference.read_pages(theirs, layer, batch.slots), strict=True
            )
            assert all(relative_error(mine, other) < 2e-2 for mine, other in pairs)


@pytest.mark.usefixtures("poisoned_memory")
def test_decoder_with_shared_pages_equals_unshared() -> None:
    torch.set_num_threads(2)
    model = Model.draw(2)
    ours, theirs = stores(2)
    few = MegakernelDecoder(model.packed(), ours)
    starts, counts = [random.randrange(480, 560) for _ in range(4)], [1, 2, 1, 1]
    batch, positions = make_batch(starts, counts)
    batch.tables[1:, :20] = batch.tables[0, :20]
    tables, start, num_tokens = (each.numpy() for each in (batch.tables, batch.start, batch.num_tokens))
    work = cpu.prepare(tables, start, num_tokens, PAGE, HEADS // KV_HEADS)
    assert work is not None
    tokens = torch.randint(VOCAB, (len(positions),))
    expected = model.logits(tokens, positions, batch, theirs)
    assert relative_error(few.run(tokens, positions, replace(batch, work=work), None), expected) < 2e-2


def test_can_run_rejects_unsupported_steps() -> None:
    model = Model.draw(1)
    ours, _ = stores(1)
    few = MegakernelDecoder(model.packed(), ours)
    batch, positions = make_batch([0], [22])  # more queries per key head than the decode kernel supports
    assert not few.can_run(batch, len(positions))
    many, positions = make_batch([0] * 5, [few.max_tokens // 5 + 1] * 5)
    assert not few.can_run(many, len(positions))
    batch, positions = make_batch([0], [1])
    for tokens, place in (([VOCAB], positions), ([-1], positions), ([0], positions + LENGTH)):
        with pytest.raises(IndexError, match=f"there are {VOCAB if tokens != [0] else LENGTH}"):
            few.run(torch.tensor(tokens), place, batch, None)
    packed = model.packed()
    odd = replace(packed, cos=packed.cos[:, :3], sin=packed.sin[:, :3])
    assert not odd.is_supported(ours)
    with pytest.raises(ValueError, match="need torch"):
        MegakernelDecoder(odd, ours)


NUM_STEPS, NUM_ROWS, NUM_WORDS = 40, 3, 20_000  # rows long enough that one thread could run ahead of another


def make_copy_queue(buffers: torch.Tensor, orders: torch.Tensor) -> tuple[KernelQueue, KernelCalls]:
    """Return a queue whose step i + 1 reads, in shuffled order, what step i wrote."""
    copies = KernelCalls(
        megakernel.gather_kernel(), megakernel.GATHER_JOB, NUM_STEPS, source=[each.data_ptr() for each in buffers[:-1]],
        out=[each.data_ptr() for each in buffers[1:]], rows=[each.data_ptr() for each in orders],
        num_rows=NUM_ROWS, words=NUM_WORDS,
    )  # fmt: skip
    return KernelQueue([(copies, index) for index in range(NUM_STEPS)]), copies


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_queue_kernels_run_in_order_on_any_number_of_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    orders = torch.stack([torch.randperm(NUM_ROWS) for _ in range(NUM_STEPS)])
    buffers = torch.zeros(NUM_STEPS + 1, NUM_ROWS, NUM_WORDS, dtype=torch.int64)
    copies, jobs = make_copy_queue(buffers, orders)
    expected = torch.arange(NUM_ROWS * NUM_WORDS).view(NUM_ROWS, NUM_WORDS)
    for order in orders:
        expected = expected[order]
    for _ in range(5):
        buffers.fill_(-1)
        buffers[0] = torch.arange(NUM_ROWS * NUM_WORDS).view(NUM_ROWS, NUM_WORDS)
        copies.run(num_threads)
        assert torch.equal(buffers[-1], expected)
    assert (jobs.records["next_thread"] == 0).all()  # the copy kernel does not use thread numbers


def test_queue_does_not_wait_for_a_thread_that_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the team that gets a core only after the others have finished finds nothing left to do."""
    orders = torch.stack([torch.randperm(NUM_ROWS) for _ in range(NUM_STEPS)])
    buffers = torch.zeros(NUM_STEPS + 1, NUM_ROWS, NUM_WORDS, dtype=torch.int64)
    buffers[0] = torch.arange(NUM_ROWS * NUM_WORDS).view(NUM_ROWS, NUM_WORDS)
    copies, _ = make_copy_queue(buffers, orders)
    expected = buffers[0][orders[0]]
    for order in orders[1:]:
        expected = expected[order]
    compiled = megakernel._queue_kernel().compiled  # type: ignore[attr-defined]

    def run_one_by_one(job: bytes, num_threads: int) -> None:
        memory = ctypes.create_string_buffer(job, len(job))
        for thread in range(num_threads):
            compiled.ctypes(ctypes.addressof(memory))
            assert torch.equal(buffers[-1], expected), f"after thread {thread}"

    monkeypatch.setattr(megakernel, "_queue_kernel", lambda: run_one_by_one)
    copies.run(3)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("in_int8", [False, True], ids=["bf16", "int8"])
def test_decoder_bits_do_not_depend_on_the_threads(in_int8: bool) -> None:
    """Which thread computes an item, and in which order, changes no bit of the logits or of the pages."""
    torch.set_num_threads(5)
    model = Model.draw(2)
    model = model.quantised() if in_int8 else model
    ours, _ = stores(2)
    few = MegakernelDecoder(model.packed(), ours)
    batch, positions = make_batch([0, 37, 520], [3, 1, 2])
    tokens = torch.randint(VOCAB, (len(positions),))
    torch.set_num_threads(1)
    expected = few.run(tokens, positions, batch, None)
    keys = ours.k.clone()
    for num_threads in (2, 3, 5, 5, 5):  # more threads than cores: the system deschedules them anywhere
        torch.set_num_threads(num_threads)
        assert torch.equal(few.run(tokens, positions, batch, None), expected)
        assert torch.equal(ours.k, keys)


@pytest.mark.slow
def test_queue_with_fewer_threads_than_requested_finishes() -> None:
    script = """
import torch
from chatcache_kernels.cpu import megakernel
from chatcache_kernels.cpu.megakernel import KernelCalls, KernelQueue
a, b = torch.arange(64), torch.zeros(64, dtype=torch.int64)
order = torch.arange(8).flip(0)
jobs = KernelCalls(megakernel.gather_kernel(), megakernel.GATHER_JOB, 1, source=a.data_ptr(), out=b.data_ptr(),
                   rows=order.data_ptr(), num_rows=8,
                   words=8)
KernelQueue([(jobs, 0)]).run(4)
assert torch.equal(b.view(8, 8), a.view(8, 8).flip(0))
"""
    path = os.pathsep.join(p for p in sys.path if p)
    limited = {**os.environ, "PYTHONPATH": path, "OMP_THREAD_LIMIT": "2", "OMP_DYNAMIC": "true"}
    done = subprocess.run([sys.executable, "-c", script], env=limited, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_queue_without_openmp_runs_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (launch._parallel_entry, launch.omp_function, megakernel._queue_kernel, megakernel.gather_kernel):
        cached.cache_clear()
    monkeypatch.setattr(launch, "omp_function", lambda name: 0)
    try:
        buffers = torch.zeros(NUM_STEPS + 1, NUM_ROWS, NUM_WORDS, dtype=torch.int64)
        buffers[0] = torch.arange(NUM_ROWS * NUM_WORDS).view(NUM_ROWS, NUM_WORDS)
        orders = torch.arange(NUM_ROWS).repeat(NUM_STEPS, 1)
        copies, _ = make_copy_queue(buffers, orders)
        copies.run(4)
        assert torch.equal(buffers[-1], buffers[0])
    finally:
        for again in (launch._parallel_entry, megakernel._queue_kernel, megakernel.gather_kernel):
            again.cache_clear()
