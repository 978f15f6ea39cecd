"""cpu.batch_invariant: a token's bits equal those of its row computed one token at a time."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from chatcache_kernels import cpu, reference
from chatcache_kernels.cpu import batch_invariant
from chatcache_kernels.types import AttentionBatch, KVPages
from torch import Tensor

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
PAGE = 16


class Sequences:
    """Keys, values and queries of several rows in one store; slots without a token are NaN."""

    def __init__(self, lengths: Sequence[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        noise = torch.Generator().manual_seed(SEED)
        counts = [-(-length // PAGE) for length in lengths]
        num_pages = sum(counts) + 1
        self.pages: KVPages = cpu.allocate_pages(1, num_pages, PAGE, kv_heads, dim, dtype)
        self.pages.k.fill_(torch.nan), self.pages.v.fill_(torch.nan)
        order = (torch.randperm(num_pages - 1, generator=noise) + 1).int()
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count] = order[sum(counts[:row]) :][:count]
        start, ends = torch.zeros(len(lengths)), torch.tensor(lengths)
        k, v = torch.randn(2, sum(lengths), kv_heads, dim, generator=noise).to(dtype).unbind(0)
        cpu.write_pages(self.pages, 0, k, v, AttentionBatch.build(self.tables, start, ends, PAGE).slots)
        self.q = [torch.randn(length, heads, dim, generator=noise).to(dtype) for length in lengths]

    def attend(
        self, parts: Sequence[tuple[int, int, int]], module: ModuleType = batch_invariant, **options: Any
    ) -> Tensor:
        """Attend for parts (row, first, end) as one batch."""
        rows, first, end = torch.tensor(parts).unbind(1)
        batch = AttentionBatch.build(self.tables[rows], first, end - first, PAGE)
        q = torch.cat([self.q[row][a:b] for row, a, b in parts])
        out: Tensor = module.paged_attention(q, self.pages, 0, batch, 0.3, **options)
        return out


OPTIONS: Mapping[str, Any] = {
    "plain": {},
    "window": {"window": 100},
    "capped": {"softcap": 3.0},
    "sinks": {"sinks": torch.randn(6)},
}


QUICK = ("plain", torch.float32), ("window", torch.bfloat16), ("capped", torch.bfloat16), ("sinks", torch.float32)


@pytest.mark.parametrize(
    ("option", "dtype"),
    [
        pytest.param(option, dtype, marks=() if (option, dtype) in QUICK else pytest.mark.slow)
        for dtype in (torch.float32, torch.bfloat16)
        for option in OPTIONS
    ],
)
def test_attention_does_not_depend_on_chunks_or_other_rows(option: str, dtype: torch.dtype) -> None:
    """Use contexts on both sides of a split, unaligned chunks and three threads."""
    options, draw = OPTIONS[option], random.Random(SEED)
    lengths = (513, 512, 37, 1, 1050)
    histories = Sequences(lengths, 6, 2, 64, dtype)
    alone = [
        torch.cat([histories.attend([(row, p, p + 1)], **options) for p in range(length)])
        for row, length in enumerate(lengths)
    ]
    whole = histories.attend([(row, 0, length) for row, length in enumerate(lengths)], **options)
    assert torch.equal(whole, torch.cat(alone)), f"seed {SEED}"
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for _ in range(8):
            parts = []
            for row in draw.sample(range(len(lengths)), draw.randrange(1, len(lengths) + 1)):
                first = draw.randrange(lengths[row])
                parts.append((row, first, min(lengths[row], first + draw.choice((1, 1, 5, 64, 333)))))
            got = histories.attend(parts, **options)
            expected = torch.cat([alone[row][first:end] for row, first, end in parts])
            assert torch.equal(got, expected), f"seed {SEED}: {parts}"


def test_long_context_in_several_launches_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    histories = Sequences((1500, 600), 4, 2, 32, torch.float32)
    parts = [(0, 1400, 1500), (1, 0, 600), (0, 90, 91)]
    once = histories.attend(parts)
    monkeypatch.setattr(batch_invariant, "MAX_PARTIAL_FLOATS", 40_000)
    assert torch.equal(histories.attend(parts), once)


@pytest.mark.parametrize("option", OPTIONS)
def test_attention_equals_reference(option: str) -> None:
    histories = Sequences((300, 900), 6, 2, 64, torch.float32)
    parts = [(1, 200, 900), (0, 0, 300)]
    got = histories.attend(parts, **OPTIONS[option])
    plain = reference.allocate_pages(1, histories.pages.num_pages, PAGE, 2, 64, torch.float32)
    slots = torch.arange(PAGE, histories.pages.num_pages * PAGE)
    reference.write_pages(plain, 0, *cpu.read_pages(histories.pages, 0, slots), slots)
    histories.pages = plain
    expected = histories.attend(parts, reference, **OPTIONS[option])
    torch.testing.assert_close(got, expected, atol=3e-5, rtol=3e-5)


def test_fast_path_depends_on_the_batch_as_negative_control() -> None:
    """Show that the tests above can fail: rows of few tokens have another kernel."""
    histories = Sequences((400,), 6, 2, 64, torch.float32)
    whole, halves = (
        [histories.attend([(0, a, b)], cpu) for a, b in cuts] for cuts in ([(0, 400)], [(0, 381), (381, 400)])
    )
    assert not torch.equal(torch.cat(whole), torch.cat(halves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_activation_and_rope_do_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    torch.set_num_threads(3)
    x, residual = torch.randn(2, 700, 96).to(dtype).unbind(0)
    weight = torch.randn(96).to(dtype)
    cos, sin = residual[:, :11], residual[:, 11:22]
    functions: list[Callable[[slice], Tensor]] = [
        lambda rows: batch_invariant.rms_norm(x[rows], weight, 1e-5),
        lambda rows: batch_invariant.add_rms_norm(x[rows], residual[rows], weight, 1e-5)[0],
        lambda rows: batch_invariant.silu_mul(x[rows]),
        lambda rows: batch_invariant.gelu_mul(x[rows]),
        lambda rows: batch_invariant.clamped_silu_mul(x[rows], 1.702, 1.5),
        lambda rows: reference.rope(x[rows].view(-1, 4, 24), cos[rows], sin[rows]),
    ]
    for function in functions:
        alone = torch.cat([function(slice(row, row + 1)) for row in range(700)])
        for rows in (slice(0, 700), slice(3, 40), slice(699, 700)):
            assert torch.equal(function(rows), alone[rows])


def test_unsupported_shapes_raise_value_error() -> None:
    narrow = torch.randn(3, 20)
    with pytest.raises(ValueError, match=r"rows of 20 .* numbers: 16 must divide"):
        batch_invariant.rms_norm(narrow, torch.ones(20), 1e-5)
    with pytest.raises(ValueError, match="16 must divide"):
        batch_invariant.add_rms_norm(narrow, narrow, torch.ones(20), 1e-5)
    with pytest.raises(ValueError, match="16 must divide"):
        batch_invariant.silu_mul(narrow)
    with pytest.raises(ValueError, match="of one dtype"):
        batch_invariant.add_rms_norm(torch.randn(3, 32), torch.randn(3, 32).bfloat16(), torch.ones(32), 1e-5)
    histories = Sequences((20,), 4, 2, 16, torch.float32)
    pages = replace(histories.pages, head_dim=12)
    batch = AttentionBatch.build(histories.tables, torch.tensor([0]), torch.tensor([20]), PAGE)
    with pytest.raises(ValueError, match="heads of 12 in pages of 16 tokens: 8 must divide both"):
        batch_invariant.paged_attention(torch.randn(20, 4, 12), pages, 0, batch, 1.0)
