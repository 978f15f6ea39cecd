"""cpu.paged_attention and the cpu page store against `reference`, on random shapes.

Slots without a token and pages without an owner are NaN, so a kernel that reads one is detected. Shapes change every
run; a failing case prints its seed, and CHATCACHE_TEST_SEED=<seed> replays it.
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass

import pytest
import torch
from chatcache_kernels import cpu, reference
from chatcache_kernels.cpu import attention_decode
from chatcache_kernels.types import AttentionBatch, KVPages
from torch import Tensor

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
# Kernels for pages of float16 are compiled by the second tier only.
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of rows over two equal stores, one in each KV layout."""

    batch: AttentionBatch
    q: Tensor
    plain: KVPages
    paged: KVPages

    def check(self, scale: float = 0.2, *, tolerance: float | None = None, **options: object) -> None:
        """Compare both attentions; `options` as in paged_attention."""
        got = cpu.paged_attention(self.q, self.paged, 1, self.batch, scale, **options)  # type: ignore[arg-type]
        expected = reference.paged_attention(self.q.float(), self.plain, 1, self.batch, scale, **options)  # type: ignore[arg-type]
        assert got.dtype == self.q.dtype
        assert got.shape == self.q.shape
        bound = tolerance or max(TOLERANCE[self.q.dtype], TOLERANCE[self.plain.k.dtype])
        torch.testing.assert_close(got.float(), expected, atol=bound, rtol=bound, msg=lambda m: f"seed {SEED}: {m}")


def build_case(
    rows: list[tuple[int, int]],
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    pages_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype | None = None,
    seed: int = SEED,
) -> Case:
    """Build rows of (cached tokens, new tokens) in shuffled pages, with NaN everywhere else."""
    noise = torch.Generator().manual_seed(seed)
    needed = [-(-(start + new) // page_size) for start, new in rows]
    num_pages = sum(needed) + 5
    shuffled = (torch.randperm(num_pages - 1, generator=noise) + 1).int()
    tables = torch.zeros(len(rows), max(needed, default=0) + 2, dtype=torch.int32)
    first = 0
    for row, count in enumerate(needed):
        tables[row, :count] = shuffled[first : first + count]
        first += count
    stores = []
    for backend in (reference, cpu):
        pages = backend.allocate_pages(2, num_pages, page_size, kv_heads, head_dim, pages_dtype)
        pages.k.fill_(float("nan")), pages.v.fill_(float("nan"))
        stores.append(pages)
    starts, news = (torch.tensor([row[i] for row in rows], dtype=torch.int32) for i in (0, 1))
    whole = AttentionBatch.build(tables, torch.zeros_like(starts), starts + news, page_size)
    k, v = torch.randn(2, whole.slots.numel(), kv_heads, head_dim, generator=noise).to(pages_dtype).unbind(0)
    for backend, pages in zip((reference, cpu), stores, strict=True):
        backend.write_pages(pages, 1, k, v, whole.slots)
    batch = AttentionBatch.build(tables, starts, news, page_size)
    q = torch.randn(batch.slots.numel(), heads, head_dim, generator=noise).to(dtype or pages_dtype)
    return Case(batch, q, *stores)


def random_rows(draw: random.Random) -> list[tuple[int, int]]:
    """Return one-token rows, short rows and a chunk in random order, some without new tokens."""
    rows = [(draw.randrange(700), 1) for _ in range(draw.randrange(1, 5))]
    rows += [(draw.randrange(200), draw.randrange(0, 20)), (0, 1), (draw.randrange(100), draw.randrange(130, 200))]
    draw.shuffle(rows)
    return rows


@pytest.mark.parametrize("page_size", [8, 16, 32, 64])
@pytest.mark.parametrize("pages_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_attention_of_random_batches_equals_reference(page_size: int, pages_dtype: torch.dtype) -> None:
    for trial in range(3):
        torch.set_num_threads(1 + trial)
        seed = SEED + trial
        draw = random.Random(seed)
        kv_heads, group = draw.choice([1, 2, 3, 5]), draw.choice([1, 2, 3, 4, 7])
        case = build_case(
            random_rows(draw),
            kv_heads * group,
            kv_heads,
            draw.choice([32, 64, 80, 96, 128]),
            page_size,
            pages_dtype,
            seed=seed,
        )
        case.check(
            draw.choice([0.1, 0.3]),
            window=draw.choice([None, 1, 5, 64, 300]),
            softcap=draw.choice([None, 3.0, 30.0]),
            sinks=draw.choice([None, torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(seed))]),
        )


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 3), (2, 8)])
def test_attention_of_head_shapes_equals_reference(head_dim: int, kv_heads: int, group: int) -> None:
    case = build_case([(57, 1), (30, 3), (0, 1)], kv_heads * group, kv_heads, head_dim, pages_dtype=torch.bfloat16)
    case.check()


@pytest.mark.parametrize("head_dim", [8, 24, 40])
def test_head_size_of_half_a_register_equals_reference(head_dim: int) -> None:
    build_case([(57, 1), (30, 3), (0, 140)], head_dim=head_dim).check()


def test_attention_without_bf16_products_equals_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode of bf16 pages on a CPU that widens their numbers to float32."""
    monkeypatch.setattr(attention_decode, "has_avx512_bf16", lambda: False)
    attention_decode.decode_kernel.cache_clear()
    try:
        build_case([(70, 1), (0, 1), (533, 3), (15, 2)], pages_dtype=torch.bfloat16).check()
    finally:
        attention_decode.decode_kernel.cache_clear()


def test_unsupported_head_size_uses_torch() -> None:
    build_case([(57, 1), (30, 3), (0, 140)], head_dim=20).check()


@pytest.mark.parametrize("start", [510, 511, 512, 1023, 1500, 4095])
def test_attention_at_split_boundaries_equals_reference(start: int) -> None:
    case = build_case([(start, 1), (start - 1, 2), (3, 1)], pages_dtype=torch.bfloat16)
    case.check()
    case.check(window=700)
    case.check(sinks=torch.randn(6), softcap=2.0)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 600])
@pytest.mark.parametrize("new", [1, 9, 300])
def test_sliding_window_equals_reference(window: int, new: int) -> None:
    build_case([(900, new), (10, new), (0, new)]).check(window=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_narrow_window_in_long_chunk_equals_reference(dtype: torch.dtype) -> None:
    for window in (1, 2, 40):
        build_case([(0, 600), (100, 257)], pages_dtype=dtype).check(window=window)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("start", [0, 77, 512])
def test_chunk_after_prefix_equals_reference(start: int, window: int | None, softcap: float | None) -> None:
    build_case([(start, 270), (start, 65)]).check(window=window, softcap=softcap, sinks=torch.randn(6))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("pages_dtype", DTYPES)
def test_mixed_dtypes_equal_reference(dtype: torch.dtype, pages_dtype: torch.dtype) -> None:
    build_case([(100, 1), (50, 150)], pages_dtype=pages_dtype, dtype=dtype).check()


@pytest.mark.parametrize("page_size", [16, 64])
def test_chunks_within_one_page_equal_reference(page_size: int) -> None:
    case = build_case([(0, 15), (2, 14), (15, 1), (0, 9)], heads=14, kv_heads=2, page_size=page_size)
    case.check()
    case.check(window=3)
    case.check(softcap=3.0)


def test_large_scores_stay_finite() -> None:
    case = build_case([(40, 1), (600, 4)])
    case.check(40.0, tolerance=1e-3)  # scores in the hundreds: their exponentials have four digits in float32
    case.check(40.0, tolerance=1e-3, softcap=200.0)
    case.check(sinks=torch.tensor([-90.0, 90.0, 0.0, 5.0, -5.0, 60.0]))


def test_empty_batch_returns_no_rows() -> None:
    case = build_case([])
    assert cpu.paged_attention(case.q, case.paged, 1, case.batch, 1.0).shape == (0, 6, 64)


def test_rows_without_new_tokens_are_skipped() -> None:
    build_case([(5, 0), (7, 1), (0, 0), (9, 2), (4, 0)]).check()


def test_nan_key_affects_only_its_row() -> None:
    case = build_case([(20, 1), (20, 1)])
    case.paged.k[1, case.batch.tables[0, 0]] = float("nan")
    got = cpu.paged_attention(case.q, case.paged, 1, case.batch, 0.2)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()


def test_row_does_not_depend_on_batch_or_threads() -> None:
    case = build_case([(700, 1), (90, 1), (1300, 1), (5, 1)], pages_dtype=torch.bfloat16)
    together = cpu.paged_attention(case.q, case.paged, 1, case.batch, 0.2)
    for row in range(4):
        tables, start, new = (x[row : row + 1] for x in (case.batch.tables, case.batch.start, case.batch.num_tokens))
        alone = AttentionBatch.build(tables, start, new, 16)
        torch.set_num_threads(1 + row)
        assert torch.equal(cpu.paged_attention(case.q[row : row + 1], case.paged, 1, alone, 0.2)[0], together[row])


@pytest.mark.parametrize(("heads", "group", "head_dim"), [(6, 3, 64), (8, 4, 48), (9, 1, 80)])
def test_items_of_several_key_heads_equal_items_of_one(heads: int, group: int, head_dim: int) -> None:
    shapes = {"heads": heads * group, "kv_heads": heads, "head_dim": head_dim, "pages_dtype": torch.bfloat16}
    rows = [(700, 1), (90, 1), (1300, 1), (5, 1), (0, 1), (63, 1), (64, 1), (1023, 1)]
    case = build_case(rows, **shapes)  # type: ignore[arg-type]
    torch.set_num_threads(2)
    assert attention_decode.choose_heads_per_item(heads, attention_decode.pad_queries(group), 8 * 3, 2) > 1
    case.check()
    case.check(window=100, sinks=torch.randn(heads * group), softcap=2.0)
    together = cpu.paged_attention(case.q, case.paged, 1, case.batch, 0.2)
    torch.set_num_threads(16)  # too few splits for items of several heads
    assert torch.equal(cpu.paged_attention(case.q, case.paged, 1, case.batch, 0.2), together)


def test_concurrent_attention_calls_are_correct() -> None:
    torch.set_num_threads(2)
    case = build_case([(700, 1), (90, 3)])
    expected = cpu.paged_attention(case.q, case.paged, 1, case.batch, 0.2)
    equal: list[bool] = []

    def attend() -> None:
        for _ in range(20):
            equal.append(torch.equal(cpu.paged_attention(case.q, case.paged, 1, case.batch, 0.2), expected))

    threads = [threading.Thread(target=attend) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 60


@pytest.mark.parametrize(("page_size", "head_dim"), [(8, 64), (16, 80), (64, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_and_copied_pages_read_back(page_size: int, head_dim: int, dtype: torch.dtype) -> None:
    pages = cpu.allocate_pages(3, 9, page_size, 2, head_dim, dtype)
    slots = torch.randperm(9 * page_size)[: 5 * page_size]
    written = [torch.randn(2, slots.numel(), 2, head_dim).to(dtype) for _ in range(3)]
    for layer, (k, v) in enumerate(written):
        cpu.write_pages(pages, layer, k, v, slots)
    for layer, kv in enumerate(written):
        assert torch.equal(torch.stack(cpu.read_pages(pages, layer, slots)), kv)
    pages.k.normal_(), pages.v.normal_()
    before = pages.k.clone(), pages.v.clone()
    cpu.copy_pages(pages, torch.tensor([[1, 4], [2, 5], [1, 3]], dtype=torch.int32))
    for old, new in zip(before, (pages.k, pages.v), strict=True):
        assert torch.equal(new, old[:, [0, 1, 2, 1, 1, 2, 6, 7, 8]])


def test_copying_no_pages_changes_nothing() -> None:
    pages = cpu.allocate_pages(1, 3, 8, 2, 16, torch.float32)
    pages.k.normal_(), pages.v.normal_()
    before = pages.k.clone()
    cpu.copy_pages(pages, torch.empty(0, 2, dtype=torch.int32))
    assert torch.equal(pages.k, before)
