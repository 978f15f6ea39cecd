"""Prefill attention on CPUs against `reference`, on random shapes, by each way to multiply."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from chatcache_kernels import cpu, reference
from chatcache_kernels.cpu import attention_prefill
from chatcache_kernels.types import AttentionBatch, KVPages

pytestmark = pytest.mark.usefixtures("poisoned_memory", "fresh_random")

UNITS = [
    "floats",
    pytest.param("pairs", marks=pytest.mark.requires_avx512_bf16),
    pytest.param("tiles", marks=pytest.mark.requires_amx),
]


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A way to multiply, which the kernels use in the test."""
    name: str = request.param
    monkeypatch.setattr(attention_prefill, "choose_unit", lambda *_: name)
    return name


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of rows over two equal stores, one in each KV layout."""

    batch: AttentionBatch
    q: torch.Tensor
    plain: KVPages
    paged: KVPages


def build_case(
    rows: list[tuple[int, int]],
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Build rows of (cached tokens, new tokens) in shuffled pages, with NaN everywhere else."""
    needed = [-(-(start + new) // page_size) for start, new in rows]
    shuffled = (torch.randperm(sum(needed) + 4) + 1).int()
    tables = torch.zeros(len(rows), max(needed) + 2, dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = shuffled[sum(needed[:row]) :][:count]
    starts, news = (torch.tensor([row[i] for row in rows], dtype=torch.int32) for i in (0, 1))
    whole = AttentionBatch.build(tables, torch.zeros_like(starts), starts + news, page_size)
    k, v = torch.randn(2, whole.slots.numel(), kv_heads, head_dim).to(dtype).unbind(0)
    stores = []
    for backend in (reference, cpu):
        pages = backend.allocate_pages(2, sum(needed) + 5, page_size, kv_heads, head_dim, dtype)
        pages.k.fill_(torch.nan), pages.v.fill_(torch.nan)
        backend.write_pages(pages, 1, k, v, whole.slots)
        stores.append(pages)
    batch = AttentionBatch.build(tables, starts, news, page_size)
    return Case(batch, torch.randn(batch.slots.numel(), heads, head_dim).to(dtype), *stores)


def run_kernel(case: Case, least: int = 1, **options: object) -> torch.Tensor:
    """Run the kernel over rows of at least `least` tokens; outputs of other rows stay NaN."""
    assert attention_prefill.supports_pages(case.paged)
    out = torch.full_like(case.q, torch.nan)
    given = {"scale": 0.2, "window": None, "softcap": None, "sinks": None, **options}
    attention_prefill.prefill_attention(case.q, out, case.paged, 1, case.batch, least, **given)  # type: ignore[arg-type]
    return out


def check(case: Case, tolerance: float = 1e-2, **options: object) -> None:
    given = {"scale": 0.2, **options}
    expected = reference.paged_attention(case.q.float(), case.plain, 1, case.batch, **given)  # type: ignore[arg-type]
    torch.testing.assert_close(run_kernel(case, 1, **options).float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_trials", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_prefill_of_random_batches_equals_reference(num_trials: int, unit: str) -> None:
    for trial in range(num_trials):
        torch.set_num_threads(1 + trial % 3)
        kv_heads, group = random.choice([1, 2, 3, 5]), random.choice([1, 2, 3, 5, 8])
        rows = [(random.randrange(400), random.choice([0, 1, 2, 31, 70, 200])) for _ in range(random.randrange(1, 5))]
        dims = [16, 32, 48, 64, 80, 128, 256, 512] + [8, 24, 72] * (unit == "floats")
        dtype = random.choice([torch.bfloat16] + [torch.float32, torch.float16] * (unit == "floats"))
        case = build_case(rows, kv_heads * group, kv_heads, random.choice(dims), random.choice([8, 16, 32, 64]), dtype)
        check(
            case,
            1e-2 if dtype == torch.bfloat16 else 2e-3 if dtype == torch.float16 else 1e-5,
            scale=random.choice([0.05, 0.2]),
            window=random.choice([None, 1, 7, 64, 130, 300]),
            softcap=random.choice([None, 3.0, 30.0]),
            sinks=random.choice([None, torch.randn(kv_heads * group)]),
        )


@pytest.mark.usefixtures("unit")
@pytest.mark.parametrize("start", [127, 128, 129, 4090])
def test_prefill_at_block_boundaries_equals_reference(start: int) -> None:
    case = build_case([(start, 33), (start - 33, 1)], 9, 3)
    check(case)
    check(case, window=start // 2)


@pytest.mark.usefixtures("unit")
def test_prefill_with_growing_scores_rescales() -> None:
    """Scores grow from key to key, by more and by less than the rescale threshold."""
    for scale in (0.01, 0.05, 3.0):
        case = build_case([(0, 300)], 2, 1)
        slots = case.batch.slots
        k, v = reference.read_pages(case.plain, 1, slots)
        k = (k.float() * torch.linspace(0.1, 10, 300)[:, None, None]).bfloat16()
        reference.write_pages(case.plain, 1, k, v, slots)
        cpu.write_pages(case.paged, 1, k, v, slots)
        check(case, scale=scale)


@pytest.mark.usefixtures("unit")
def test_prefill_leaves_short_rows_unchanged() -> None:
    case = build_case([(40, 3), (9, 50), (0, 49)])
    out = run_kernel(case, least=50)
    assert out[:3].isnan().all() and out[3:53].isfinite().all() and out[53:].isnan().all()


@pytest.mark.usefixtures("unit")
def test_prefill_does_not_depend_on_other_rows() -> None:
    """Outputs are bit-identical for other batches, item sizes and numbers of threads."""
    case = build_case([(200, 300), (0, 77)], 6, 2)
    every: list[dict[str, object]] = [{}, {"window": 150}, {"softcap": 5.0}]
    for options in every:
        torch.set_num_threads(1)
        together = run_kernel(case, 1, **options)
        tables, starts, news = case.batch.tables, case.batch.start, case.batch.num_tokens
        for row, part in ((0, slice(0, 300)), (1, slice(300, 377))):
            only = slice(row, row + 1)
            batch = AttentionBatch.build(tables[only], starts[only], news[only], 16)
            torch.set_num_threads(3)
            alone = run_kernel(Case(batch, case.q[part].contiguous(), case.plain, case.paged), 1, **options)
            assert torch.equal(alone, together[part])
        batch = AttentionBatch.build(tables[:1], starts[:1] + 210, news[:1] - 210, 16)
        late = run_kernel(Case(batch, case.q[210:300].contiguous(), case.plain, case.paged), 1, **options)
        assert torch.equal(late, together[210:300])


def test_shapes_without_a_kernel_equal_reference() -> None:
    """Pages of 4 tokens."""
    case = build_case([(30, 150), (0, 300)], 6, 2, 16, 4, torch.float32)
    assert not attention_prefill.supports_pages(case.paged)
    options: list[dict[str, object]] = [{}, {"window": 70}, {"softcap": 5.0, "sinks": torch.randn(6)}]
    for given in options:
        out = cpu.paged_attention(case.q, case.paged, 1, case.batch, 0.2, **given)  # type: ignore[arg-type]
        expected = reference.paged_attention(case.q, case.plain, 1, case.batch, 0.2, **given)  # type: ignore[arg-type]
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
