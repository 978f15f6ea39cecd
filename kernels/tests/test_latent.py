"""Latent attention of every backend against torch's attention, on random batches.

Slots without a token are NaN. Shapes change every run; CHATCACHE_TEST_SEED replays them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from chatcache_kernels import cpu, reference, triton
from chatcache_kernels.cpu import latent as cpu_latent
from chatcache_kernels.types import AttentionBatch, HostPages, LatentPages
from chatcache_kernels.work_list import plan_work
from torch import Tensor
from torch.nn import functional as F

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}


def build(
    backend: ModuleType, device: str, rows: list[tuple[int, int]], heads: int, rank: int, rope: int, dtype: torch.dtype
) -> tuple[LatentPages, AttentionBatch, Tensor, list[Tensor]]:
    """Return a store with rows of (cached, new) tokens in layer 1, their batch, q, and the latents of each row."""
    size = random.choice([8, 16])
    needed = [-(-(start + new) // size) for start, new in rows]
    shuffled = torch.randperm(sum(needed) + 3).int() + 1
    tables = torch.zeros(len(rows), max(needed) + 1, dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = shuffled[sum(needed[:row]) :][:count]
    starts, news = (torch.tensor([row[i] for row in rows], dtype=torch.int32) for i in (0, 1))
    whole = AttentionBatch.build(tables, torch.zeros_like(starts), starts + news, size)
    with torch.device(device):
        pages = backend.allocate_latent_pages(2, sum(needed) + 5, size, rank + rope, rank, dtype)
    pages.data.fill_(float("nan"))
    latents = torch.randn(len(whole.slots), rank + rope).to(device, dtype)
    backend.write_latents(pages, 1, latents, whole.slots.to(device))
    work = plan_work(tables.numpy(), starts.numpy(), news.numpy(), size, heads)
    batch = replace(AttentionBatch.build(tables, starts, news, size), work=work).to(device)
    q = torch.randn(len(batch.slots), heads, rank + rope).to(device, dtype)
    return pages, batch, q, list(torch.split(latents, [start + new for start, new in rows]))


def expected(q: Tensor, rows: list[tuple[int, int]], latents: list[Tensor], rank: int, scale: float) -> Tensor:
    """Return torch's attention of every row, float32 [T, H, rank]."""
    parts, first = [], 0
    for (start, new), known in zip(rows, latents, strict=True):
        query = q[first : first + new].float().transpose(0, 1)[None]
        k = known.float().expand(1, q.shape[1], -1, -1)
        mask = torch.ones(new, start + new, dtype=torch.bool, device=q.device).tril(start)
        parts.append(F.scaled_dot_product_attention(query, k, k, mask, scale=scale)[0, ..., :rank].transpose(0, 1))
        first += new
    return torch.cat(parts)


def random_rows(most_context: int, most_new: int) -> list[tuple[int, int]]:
    news = [1, 1, 1, random.randint(2, most_new), 1, random.randint(2, most_new)]
    return [(random.choice([0, 3, random.randint(0, most_context)]), new) for new in news]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
def test_latent_attention_equals_torch_sdpa(
    backend: ModuleType, dtype: torch.dtype, fresh_random: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in (1 << 22, 700):  # tiles of few tokens, too
        monkeypatch.setattr(cpu_latent, "MAX_SCORES", limit)
        monkeypatch.setattr(cpu_latent, "MAX_GATHERED", 8 * limit)
        heads, rank, rope = random.choice([1, 4, 20]), random.choice([16, 40]), random.choice([8, 16])
        rows = random_rows(90, 30)
        pages, batch, q, latents = build(backend, "cpu", rows, heads, rank, rope, dtype)
        got = backend.latent_attention(q, pages, 1, batch, 0.2)
        assert got.dtype == dtype
        want = expected(q, rows, latents, rank, 0.2)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            got.float(), want, atol=tolerance, rtol=tolerance, msg=lambda m: f"{fresh_random}: {m}"
        )


@pytest.mark.parametrize(
    ("dtype", "heads", "rank", "rope", "context"),
    [
        (torch.float32, 4, 32, 16, 60),
        (torch.float32, 20, 40, 8, 30),
        (torch.bfloat16, 6, 32, 8, 60),
        pytest.param(torch.float32, 16, 512, 64, 1300, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 128, 512, 64, 100, marks=pytest.mark.slow),
    ],
)
def test_triton_latent_attention_equals_torch_sdpa(
    triton_device: str, dtype: torch.dtype, heads: int, rank: int, rope: int, context: int, fresh_random: int
) -> None:
    rows = random_rows(context, 9)
    pages, batch, q, latents = build(triton, triton_device, rows, heads, rank, rope, dtype)
    got = triton.latent_attention(q, pages, 1, batch, 0.1)
    want = expected(q, rows, latents, rank, 0.1)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance, msg=lambda m: f"{fresh_random}: {m}")


def test_triton_latent_attention_merges_split_keys(triton_device: str, fresh_random: int) -> None:
    """A row has more tokens than one item holds."""
    rows = [(700, 1), (5, 1)]
    pages, batch, q, latents = build(triton, triton_device, rows, 4, 16, 8, torch.float32)
    assert batch.work is not None and batch.work.num_states == 2
    got = triton.latent_attention(q, pages, 1, batch, 0.3)
    torch.testing.assert_close(got, expected(q, rows, latents, 16, 0.3), atol=3e-5, rtol=3e-5)


def test_triton_latent_attention_reads_shared_pages_once(triton_device: str, fresh_random: int) -> None:
    pages, batch, _, latents = build(triton, triton_device, [(70, 1)], 4, 16, 8, torch.float32)
    tables, starts, news = batch.tables.cpu().repeat(3, 1), torch.full((3,), 70), torch.ones(3)
    shared = AttentionBatch.build(tables, starts, news, pages.page_size)
    work = plan_work(
        tables.numpy(), shared.start.numpy(), shared.num_tokens.numpy(), pages.page_size, 4, share="always"
    )
    assert any(int(items[4]) == 3 for one in work.lists for items in one.items)
    q = torch.randn(3, 4, 24, device=triton_device)
    got = triton.latent_attention(q, pages, 1, replace(shared, work=work).to(triton_device), 0.3)
    torch.testing.assert_close(got, expected(q, [(70, 1)] * 3, latents * 3, 16, 0.3), atol=3e-5, rtol=3e-5)


def test_triton_latent_attention_without_a_plan_is_rejected(triton_device: str) -> None:
    pages, batch, q, _ = build(triton, triton_device, [(3, 1)], 4, 16, 8, torch.float32)
    with pytest.raises(ValueError, match=r"needs batch\.work"):
        triton.latent_attention(q, pages, 1, replace(batch, work=None), 0.3)


@pytest.mark.parametrize("backend", [reference, cpu], ids=["reference", "cpu"])
def test_rows_without_new_tokens_are_skipped(backend: ModuleType) -> None:
    rows = [(5, 1), (7, 4), (2, 1)]
    pages, batch, q, latents = build(backend, "cpu", rows, 4, 16, 8, torch.float32)
    counts = batch.num_tokens.clone()
    counts[1] = 0
    got = backend.latent_attention(q, pages, 1, replace(batch, num_tokens=counts), 0.3)
    want = expected(q, rows, latents, 16, 0.3)
    torch.testing.assert_close(got[[0, 5]], want[[0, 5]])


@pytest.mark.parametrize("backend", [reference, cpu, triton], ids=["reference", "cpu", "triton"])
def test_latent_pages_are_copied_and_swapped_whole(backend: ModuleType, triton_device: str) -> None:
    device = triton_device if backend is triton else "cpu"
    with torch.device(device):
        pages = backend.allocate_latent_pages(3, 6, 8, 24, 16, torch.bfloat16)
    pages.data.copy_(torch.randn(3, 6, 8, 24))
    assert pages.page_bytes == 3 * 8 * 24 * 2 and pages.num_pages == 6
    before = pages.data.cpu().clone()
    host = HostPages.allocate(pages, 3)
    backend.swap_out(pages, host, torch.tensor([[4, 2], [1, 0]], dtype=torch.int32))
    backend.copy_pages(pages, torch.tensor([[2, 4]], dtype=torch.int32, device=device))
    backend.swap_in(pages, host, torch.tensor([[2, 5], [0, 3]], dtype=torch.int32))
    assert torch.equal(pages.data.cpu(), before[:, [0, 1, 2, 1, 2, 4]])
    slots = torch.tensor([8, 47, 3], device=device)
    assert torch.equal(backend.read_latents(pages, 2, slots).cpu(), pages.data[2].cpu().flatten(0, 1)[slots.cpu()])
