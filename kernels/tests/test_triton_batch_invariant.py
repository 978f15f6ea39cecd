"""triton.batch_invariant and its matrix product: a token's bits equal those of its row computed one token at a time.

Compiled on a GPU, interpreted elsewhere: the interpreter's bits are not those of a GPU, but must not depend on the
batch either.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from chatcache_kernels import reference, triton, work_list
from chatcache_kernels.triton import attention, batch_invariant, invariant_matmul
from chatcache_kernels.triton.configs import Chip, choose_config
from chatcache_kernels.triton.invariant_matmul import Tile, choose_tile, multiply, tiles_for
from chatcache_kernels.types import AttentionBatch, AttentionWork, HeadNorms, KVPages
from torch import Tensor

pytestmark = pytest.mark.usefixtures("dot_of_single_rows")

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
PAGE = 16
SPLIT = 64  # tokens, so that short contexts have several
PREFIX = 40  # tokens that all rows share
DTYPES = [torch.float32, torch.bfloat16]

Part = tuple[int, int, int]  # (row, first token, end)
Prepare = Callable[..., Any]


class Sequences:
    """Keys, values and queries of several rows that share a prefix; slots without a token are NaN.

    Row r has a copy of the prefix in its own pages where `shared` is False.
    """

    def __init__(
        self, lengths: Sequence[int], dtype: torch.dtype, device: str, heads: int = 3, kv_heads: int = 1, dim: int = 64
    ) -> None:
        noise = torch.Generator().manual_seed(SEED)
        counts = [-(-length // PAGE) for length in lengths]
        num_pages = sum(counts) + 1
        self.pages: KVPages = triton.allocate_pages(1, num_pages, PAGE, kv_heads, dim, dtype)
        self.pages.k.fill_(torch.nan), self.pages.v.fill_(torch.nan)
        order = (torch.randperm(num_pages - 1, generator=noise) + 1).int()
        self.own = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            self.own[row, :count] = order[sum(counts[:row]) :][:count]
        k, v = (torch.randn(len(lengths), max(lengths), kv_heads, dim, generator=noise).to(dtype) for _ in "kv")
        k[:, :PREFIX], v[:, :PREFIX] = k[:1, :PREFIX], v[:1, :PREFIX]
        for row, length in enumerate(lengths):
            slots = self.own[row, torch.arange(length) // PAGE].long() * PAGE + torch.arange(length) % PAGE
            self.pages.k[0, slots // PAGE, :, slots % PAGE] = k[row, :length]
            self.pages.v[0, slots // PAGE, :, slots % PAGE] = v[row, :length]
        self.shared = self.own.clone()
        self.shared[:, : PREFIX // PAGE] = self.own[:1, : PREFIX // PAGE]
        self.q = [torch.randn(length, heads, dim, generator=noise).to(dtype) for length in lengths]
        self.group, self.device = heads // kv_heads, device
        pages = self.pages
        self.pages = KVPages(pages.k.to(device), pages.v.to(device), PAGE, kv_heads, dim)

    def attend(
        self, parts: Sequence[Part], prepare: Prepare = batch_invariant.prepare, *, shared: bool = False, **options: Any
    ) -> Tensor:
        """Attend for parts of rows as one batch."""
        rows, first, end = torch.tensor(parts, dtype=torch.int32).unbind(1)
        tables = (self.shared if shared else self.own)[rows]
        batch = AttentionBatch.build(tables, first, end - first, PAGE)
        work = prepare(tables.numpy(), first.numpy(), (end - first).numpy(), PAGE, self.group)
        q = torch.cat([self.q[row][a:b] for row, a, b in parts]).to(self.device)
        batch = AttentionBatch(
            batch.tables, batch.start, batch.num_tokens, batch.offsets, batch.slots, batch.max_new_tokens,
            batch.max_context_tokens, work,
        )  # fmt: skip
        return batch_invariant.paged_attention(q, self.pages, 0, batch.to(self.device), 0.3, **options)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_list, "INVARIANT_SPLIT_TOKENS", SPLIT)
    monkeypatch.setattr(work_list, "SPLIT_TOKENS", SPLIT)


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "window": {"window": 50},
    "capped": {"softcap": 3.0},
    "capped window": {"window": 50, "softcap": 3.0},
}
QUICK = ("plain", "capped window")
LENGTHS = (SPLIT + 1, SPLIT, 41, 2 * SPLIT + 37)


def random_parts(draw: random.Random, lengths: Sequence[int], sizes: Sequence[int]) -> list[Part]:
    """Return a chunk of each of some rows, in random order."""
    parts = []
    for row in draw.sample(range(len(lengths)), draw.randrange(1, len(lengths) + 1)):
        first = draw.randrange(lengths[row])
        parts.append((row, first, min(lengths[row], first + draw.choice(sizes))))
    return parts


@pytest.mark.parametrize(
    "option", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OPTIONS]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("short_splits")
def test_attention_does_not_depend_on_chunks_rows_or_sharing(
    option: str, dtype: torch.dtype, triton_device: str
) -> None:
    """Use contexts on both sides of a split, unaligned chunks, and pages that rows share."""
    options, draw = OPTIONS[option], random.Random(SEED)
    histories = Sequences(LENGTHS, dtype, triton_device)
    whole = histories.attend([(row, 0, length) for row, length in enumerate(LENGTHS)], **options)
    by_row = torch.split(whole, list(LENGTHS))
    for row, length in enumerate(LENGTHS):
        for position in (length - 1, draw.randrange(length)):
            alone = histories.attend([(row, position, position + 1)], **options)
            assert torch.equal(alone[0], by_row[row][position]), f"seed {SEED}: row {row}, token {position}"
    for number in range(2):
        parts = random_parts(draw, LENGTHS, (1, 1, 5, 33))
        got = histories.attend(parts, shared=number % 2 > 0, **options)
        expected = torch.cat([by_row[row][first:end] for row, first, end in parts])
        assert torch.equal(got, expected), f"seed {SEED}: {parts}"


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.usefixtures("short_splits")
@pytest.mark.slow
def test_attention_equals_reference(option: str, triton_device: str) -> None:
    histories = Sequences((150, 91), torch.float32, triton_device)
    parts = [(1, 60, 91), (0, 40, 150)]
    got = histories.attend(parts, **OPTIONS[option])
    plain = KVPages(histories.pages.k.transpose(2, 3), histories.pages.v.transpose(2, 3), PAGE, 1, 64)
    rows, first, end = torch.tensor(parts, dtype=torch.int32).unbind(1)
    batch = AttentionBatch.build(histories.own[rows], first, end - first, PAGE).to(triton_device)
    q = torch.cat([histories.q[row][a:b] for row, a, b in parts]).to(triton_device)
    expected = reference.paged_attention(q, plain, 0, batch, 0.3, **OPTIONS[option])
    torch.testing.assert_close(got, expected, atol=3e-5, rtol=3e-5)


def injected_split_by_rows(tables: Any, start: Any, num_tokens: Any, page_size: int, group: int) -> AttentionWork:
    """Plan as `plan_invariant_work`, but with shorter splits for few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work_list, "INVARIANT_SPLIT_TOKENS", SPLIT if len(start) > 2 else SPLIT // 2)
        return batch_invariant.prepare(tables, start, num_tokens, page_size, group)


@pytest.mark.parametrize("prepare", [
    injected_split_by_rows, partial(work_list.plan_work, share="always"),
])  # fmt: skip
@pytest.mark.usefixtures("short_splits")
def test_injected_batch_dependent_plan_is_detected(prepare: Prepare, triton_device: str) -> None:
    """Show that the tests above can fail."""
    histories = Sequences([100] * 3, torch.float32, triton_device)
    together = histories.attend([(row, 99, 100) for row in range(3)], prepare, shared=True)
    alone = torch.cat([histories.attend([(row, 99, 100)], prepare, shared=True) for row in range(3)])
    assert not torch.equal(together, alone)


def test_injected_window_at_the_oldest_token_is_detected(monkeypatch: pytest.MonkeyPatch, triton_device: str) -> None:
    histories = Sequences([200], torch.float32, triton_device)
    attend = attention.paged_attention
    monkeypatch.setattr(attention, "paged_attention", lambda *inputs, fixed_tiles, **more: attend(*inputs, **more))
    alone = histories.attend([(0, 199, 200)], window=100)[0]
    chunks = [histories.attend([(0, first, 200)], window=100) for first in (195, 196, 197, 198)]
    assert not all(torch.equal(chunk[-1], alone) for chunk in chunks)


def test_sinks_are_refused(triton_device: str) -> None:
    histories = Sequences([20], torch.float32, triton_device)
    with pytest.raises(ValueError, match="sinks"):
        histories.attend([(0, 0, 20)], sinks=torch.zeros(3, device=triton_device))


@pytest.mark.parametrize("major", [0, 8, 9, 10, 12])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_small_tile_has_one_loop_and_divides_a_split_on_every_chip(major: int, itemsize: int) -> None:
    """A loop without masks would begin and end where the other tokens of a tile do."""
    for head_dim in (64, 128, 256, 512):
        config = choose_config(Chip(major, 1), work_list.SMALL_TILE_QUERIES, head_dim, itemsize)
        assert not config.unmasked_loop
        assert work_list.INVARIANT_SPLIT_TOKENS % config.block_n == 0


def test_invariant_plan_has_one_height_and_fixed_splits() -> None:
    start, num_tokens = np.array([0, 1030, 5, 2047], np.int32), np.array([1100, 1, 0, 2], np.int32)
    work = work_list.plan_invariant_work(np.zeros((4, 200), np.int32), start, num_tokens, PAGE, 4)
    (one,) = work.lists
    assert one.max_members == 4
    assert (one.items[:, 1] % work_list.INVARIANT_SPLIT_TOKENS == 0).all()
    assert one.items[:, 4].max() == 4
    assert work_list.plan_invariant_work(np.zeros((1, 1), np.int32), start[:1], start[:1], PAGE, 4).lists == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_norms_activation_and_rope_do_not_depend_on_other_rows(dtype: torch.dtype, triton_device: str) -> None:
    count = 12
    x, residual = torch.randn(2, count, 96, device=triton_device).to(dtype).unbind(0)
    weight = torch.randn(96, device=triton_device).to(dtype)
    cos, sin = torch.randn(2, count, 12, device=triton_device).unbind(0)
    pages = triton.allocate_pages(1, 8, PAGE, 1, 24, dtype)
    pages = KVPages(pages.k.to(triton_device), pages.v.to(triton_device), PAGE, 1, 24)
    norms, slots = HeadNorms(weight[:24], weight[24:48], 1e-6), torch.arange(count, device=triton_device)

    def rope(rows: slice) -> Tensor:
        q, k, v = torch.split(x[rows].view(-1, 4, 24), [2, 1, 1], 1)
        return batch_invariant.rope_write(q, k, v, cos[rows], sin[rows], pages, 0, slots[rows], norms)

    functions: list[Callable[[slice], Tensor]] = [
        lambda rows: batch_invariant.rms_norm(x[rows], weight, 1e-5),
        lambda rows: batch_invariant.add_rms_norm(x[rows], residual[rows], weight, 1e-5)[0],
        lambda rows: batch_invariant.rms_norm(x[rows], weight.float(), 1e-5),
        lambda rows: batch_invariant.silu_mul(x[rows]),
        lambda rows: batch_invariant.gelu_mul(x[rows]),
        lambda rows: batch_invariant.clamped_silu_mul(x[rows], 1.702, 1.5),
        rope,
        lambda rows: rope(rows) + pages.k[0, slots[rows] // PAGE, :, slots[rows] % PAGE].repeat(1, 2, 1),
    ]
    for function in functions:
        whole = function(slice(0, count))
        for first, end in ((0, 1), (7, 8), (count - 1, count), (3, 9)):
            assert torch.equal(function(slice(first, end)), whole[first:end])


def test_rows_at_an_unaligned_address_have_the_same_bits(triton_device: str) -> None:
    """A kernel for unaligned pointers could add up a row in another order."""
    flat = torch.randn(4 * 96 + 1, device=triton_device)
    x, weight = flat[1:].view(4, 96), torch.randn(96, device=triton_device)
    assert x.data_ptr() % batch_invariant.ALIGNMENT_BYTES
    assert torch.equal(batch_invariant.rms_norm(x, weight, 1e-5), batch_invariant.rms_norm(x.clone(), weight, 1e-5))


def test_norms_of_several_dtypes_are_refused(triton_device: str) -> None:
    x, weight = torch.randn(3, 32, device=triton_device), torch.ones(32, device=triton_device).bfloat16()
    for call in (lambda: batch_invariant.rms_norm(x, weight, 1e-5),
                 lambda: batch_invariant.add_rms_norm(x, x, weight, 1e-5)):  # fmt: skip
        with pytest.raises(ValueError, match="one dtype"):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "has_bias"), [((96, 256), False), ((50, 101), True), ((1, 64), True), ((33, 136), False)]
)
def test_product_has_the_same_bits_for_any_rows(
    dtype: torch.dtype, shape: tuple[int, int], has_bias: bool, triton_device: str
) -> None:
    draw = random.Random(SEED)
    weight = torch.randn(shape, device=triton_device).to(dtype)
    x = torch.randn(70, shape[1], device=triton_device).to(dtype)
    bias = torch.randn(shape[0], device=triton_device).to(dtype) if has_bias else None
    for tile in tiles_for(dtype):
        times = partial(multiply, weight=weight, bias=bias, tile=tile)
        whole = times(x)
        for row in draw.sample(range(70), 2):
            assert torch.equal(times(x[row : row + 1])[0], whole[row]), f"seed {SEED}"
        for first, end in ((0, 2), (3, 68), (5, 12), (17, 18), (3, 3)):
            assert torch.equal(times(x[first:end]), whole[first:end])
        assert torch.equal(times(x.flip(0)), whole.flip(0))
        assert torch.equal(times(x.mT.contiguous().mT), whole)
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(whole.double(), want, atol=tolerance * shape[1] ** 0.5, rtol=tolerance)


def test_product_of_several_groups_of_tiles_covers_all_outputs(triton_device: str) -> None:
    tile = Tile(16, 16, 16, num_warps=4, num_stages=2)
    num_rows = 16 * (invariant_matmul.ROW_TILES + 2) + 3
    x, weight = torch.randn(num_rows, 24, device=triton_device), torch.randn(37, 24, device=triton_device)
    torch.testing.assert_close(multiply(x, weight, None, tile), x @ weight.T, atol=1e-4, rtol=1e-4)


def test_choose_tile_fills_tiles_and_multiprocessors() -> None:
    tiles = tiles_for(torch.bfloat16)

    def chosen(num_rows: int, num_outputs: int) -> tuple[int, int]:
        tile = choose_tile(tiles, num_rows, num_outputs, 132)
        return tile.rows, tile.columns

    assert chosen(1, 4096) == chosen(64, 4096) == (64, 32)
    assert chosen(1, 28672) == chosen(64, 28672) == (64, 64)
    assert chosen(65, 28672) == chosen(2048, 4096) == (128, 128)
    assert chosen(128, 4096) == (64, 32) and chosen(160, 4096) == (64, 64)
    assert choose_tile(tiles[:1], 2048, 28672, 132) is tiles[0]
