"""triton.paged_attention against `reference`, on random shapes and values.

Slots without a token, pages without an owner and unwritten memory are NaN. Shapes change every run; a failing case
prints its seed, and CHATCACHE_TEST_SEED=<seed> replays it.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from chatcache_kernels import reference, triton
from chatcache_kernels.fp8 import DTYPE as FP8
from chatcache_kernels.fp8 import SCALE_BYTES
from chatcache_kernels.types import AttentionBatch, AttentionWork, KVPages, WorkList
from chatcache_kernels.work_list import plan_work
from torch import Tensor

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised torch memory with NaN, to expose missing writes."""
    empty: Callable[..., Tensor] = torch.empty

    def poisoned(*args: object, **options: object) -> Tensor:
        memory = empty(*args, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", poisoned)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of rows over two equal stores, one in each KV layout."""

    batch: AttentionBatch
    q: Tensor
    plain: KVPages
    paged: KVPages

    def expected(self, scale: float, **options: object) -> Tensor:
        """Return the reference's result in float32."""
        return reference.paged_attention(self.q.float(), self.plain, 1, self.batch, scale, **options)  # type: ignore[arg-type]

    def check(
        self,
        scale: float = 0.2,
        *,
        work: AttentionWork | None = None,
        tolerance: float | None = None,
        **options: object,
    ) -> None:
        """Compare both attentions; `options` as in paged_attention."""
        batch = self.batch if work is None else replace(self.batch, work=work.to(self.q.device))
        got = triton.paged_attention(self.q, self.paged, 1, batch, scale, **options)  # type: ignore[arg-type]
        assert got.dtype == self.q.dtype
        assert got.shape == self.q.shape
        bound = tolerance or TOLERANCE[self.q.dtype]
        expected = self.expected(scale, **options)
        torch.testing.assert_close(got.float(), expected, atol=bound, rtol=bound, msg=lambda m: f"seed {SEED}: {m}")


def make_tables(rows: Sequence[tuple[int, int]], page_size: int, noise: torch.Generator) -> tuple[Tensor, int]:
    """Return tables of shuffled, unshared pages for rows of (cached, new) tokens, and the count."""
    needed = [-(-(start + new) // page_size) for start, new in rows]
    num_pages = sum(needed) + 5
    shuffled = (torch.randperm(num_pages - 1, generator=noise) + 1).int()
    tables = torch.zeros(len(rows), max(needed, default=0) + 2, dtype=torch.int32)
    first = 0
    for row, count in enumerate(needed):
        tables[row, :count] = shuffled[first : first + count]
        first += count
    return tables, num_pages


class CaseBuilder:
    """Builds cases on one device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(
        self,
        rows: Sequence[tuple[int, int]],
        heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 64,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = SEED,
        tables: Tensor | None = None,
        *,
        fp8_pages: bool = False,
        value_factor: float = 1.0,
    ) -> Case:
        """Build rows of (cached tokens, new tokens), in shuffled pages or those of `tables`.

        All other pages are NaN. Values are of the size of `value_factor`.
        """
        noise = torch.Generator().manual_seed(seed)
        if tables is None:
            tables, num_pages = make_tables(rows, page_size, noise)
        else:
            num_pages = int(tables.max()) + 5
        sizes = 2, num_pages, page_size, kv_heads, head_dim, FP8 if fp8_pages else dtype
        plain = reference.allocate_pages(*sizes)
        for memory in plain.tensors:
            fill_with_nan(memory)
        starts, news = (torch.tensor([row[i] for row in rows], dtype=torch.int32) for i in (0, 1))
        whole = AttentionBatch.build(tables, torch.zeros_like(starts), starts + news, page_size)
        k, v = torch.randn(2, whole.slots.numel(), kv_heads, head_dim, generator=noise).to(dtype).unbind(0)
        reference.write_pages(plain, 1, k, v * value_factor, whole.slots)
        batch = AttentionBatch.build(tables, starts, news, page_size)
        work = plan_work(tables.numpy(), starts.numpy(), news.numpy(), page_size, heads // kv_heads)
        q = torch.randn(batch.slots.numel(), heads, head_dim, generator=noise).to(dtype)
        plain = replace(plain, k=plain.k.to(self.device), v=plain.v.to(self.device))
        paged = replace(plain, k=heads_first(plain.k), v=heads_first(plain.v))
        return Case(replace(batch, work=work).to(self.device), q.to(self.device), plain, paged)


def heads_first(memory: Tensor) -> Tensor:
    """Return the keys or values of the reference's pages in the layout of Triton's."""
    if memory.dtype != FP8:
        return memory.transpose(2, 3).contiguous()
    numbers, scales = memory.view(torch.uint8).transpose(2, 3).tensor_split([-SCALE_BYTES], -1)
    return torch.cat((numbers.flatten(3), scales.flatten(3)), -1).view(FP8)


def fill_with_nan(memory: Tensor) -> None:
    """Fill with NaN, FP8 memory too, whose scales become 3e38."""
    if memory.dtype == FP8:
        memory.view(torch.uint8).fill_(0x7F)
    else:
        memory.fill_(float("nan"))


@pytest.fixture
def build(triton_device: str) -> CaseBuilder:
    return CaseBuilder(triton_device)


def make_work(lists: Sequence[Sequence[tuple[int, int, int, list[int]]]], positions: Tensor) -> AttentionWork:
    """Build a work list from items (row of tables, first key, end key, tokens).

    Each token of an item gets a state, unless it is the token's only item. States merge in the order of the items.
    """
    counts = np.bincount([t for items in lists for *_, tokens in items for t in tokens], minlength=len(positions))
    states: dict[int, list[int]] = {}
    num_states = 0
    made = []
    for items in lists:
        lines: list[tuple[int, ...]] = []
        members: list[int] = []
        for row, first, end, tokens in items:
            alone = all(counts[t] == 1 for t in tokens)
            lines.append((row, first, end, len(members), len(tokens), -1 if alone else num_states))
            members += tokens
            if not alone:
                for token in tokens:
                    states.setdefault(token, []).append(num_states)
                    num_states += 1
        highest = max(len(tokens) for *_, tokens in items)
        made.append(WorkList(to_int32(lines), to_int32(members), to_int32([len(lines)]), highest))
    merged = sorted(states)
    return AttentionWork(
        lists=tuple(made),
        positions=positions.int().cpu(),
        merge_tokens=to_int32(merged),
        merge_offsets=to_int32(np.cumsum([0] + [len(states[t]) for t in merged])),
        merge_states=to_int32([s for t in merged for s in states[t]]),
        num_merges=to_int32([len(merged)]),
        num_states=num_states,
    )


def to_int32(values: object) -> Tensor:
    """Return an int32 tensor."""
    return torch.from_numpy(np.array(values, np.int32))


def add_leftovers(work: AttentionWork) -> AttentionWork:
    """Return the same work in larger static buffers that end with invalid entries."""

    def longer(x: Tensor) -> Tensor:
        return torch.cat((x, torch.full((5, *x.shape[1:]), 2**30, dtype=x.dtype)))

    lists = tuple(replace(one, items=longer(one.items), members=longer(one.members)) for one in work.lists)
    names = ("positions", "merge_tokens", "merge_offsets", "merge_states")
    changed = {name: longer(getattr(work, name)) for name in names}
    return replace(work, lists=lists, num_states=work.num_states + 3, **changed)


def random_rows(draw: random.Random) -> list[tuple[int, int]]:
    """Return one-token rows, short rows and a chunk in random order, some without new tokens."""
    rows = [(draw.randrange(700), 1) for _ in range(draw.randrange(1, 4))]
    rows += [(draw.randrange(200), draw.randrange(0, 20)), (0, 1), (draw.randrange(100), draw.randrange(100, 150))]
    draw.shuffle(rows)
    return rows


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_attention_of_random_batches_equals_reference(build: CaseBuilder, page_size: int, dtype: torch.dtype) -> None:
    draw = random.Random(SEED + page_size)
    kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4, 7])
    head_dim = draw.choice([32, 64, 80, 96, 128])
    case = build(random_rows(draw), kv_heads * group, kv_heads, head_dim, page_size, dtype)
    case.check(
        draw.choice([0.1, 0.3]),
        window=draw.choice([None, 1, 5, 64, 300]),
        softcap=draw.choice([None, 3.0, 30.0]),
        sinks=draw.choice([None, torch.randn(kv_heads * group).to(case.q.device)]),
    )


@pytest.mark.parametrize("head_dim", [20, 64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_sizes_equal_reference(build: CaseBuilder, head_dim: int, dtype: torch.dtype) -> None:
    build([(57, 1), (30, 20), (0, 1), (600, 1)], 4, 2, head_dim, dtype=dtype).check(0.1)


@pytest.mark.usefixtures("needs_fp8")
@pytest.mark.parametrize(
    ("head_dim", "page_size", "dtype", "options"),
    [
        (64, 16, torch.bfloat16, {"window": 40, "softcap": 5.0}),
        pytest.param(128, 16, torch.float32, {}, marks=pytest.mark.slow),
        pytest.param(80, 32, torch.bfloat16, {}, marks=pytest.mark.slow),
        pytest.param(20, 8, torch.float32, {"softcap": 5.0}, marks=pytest.mark.slow),
        pytest.param(256, 64, torch.float16, {"window": 300}, marks=pytest.mark.slow),
    ],
)
def test_attention_over_fp8_pages_equals_reference(
    build: CaseBuilder, head_dim: int, page_size: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """The oracle attends to the dequantised keys and values."""
    case = build([(57, 1), (30, 20), (0, 1), (600, 1)], 4, 2, head_dim, page_size, dtype, fp8_pages=True)
    case.check(0.1, sinks=torch.randn(4).to(case.q.device), **options)


@pytest.mark.usefixtures("needs_fp8")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value_factor", [1e-3, 1e3])
def test_attention_over_small_and_large_fp8_values_equals_reference(
    build: CaseBuilder, value_factor: float, dtype: torch.dtype
) -> None:
    """Products of weights and scales stay in the range of float16."""
    case = build([(57, 1), (600, 1)], 4, 2, dtype=dtype, fp8_pages=True, value_factor=value_factor)
    got, expected = triton.paged_attention(case.q, case.paged, 1, case.batch, 0.1), case.expected(0.1)
    assert float((got - expected).norm() / expected.norm()) < 2**-8


@pytest.mark.parametrize(
    ("kv_heads", "group"), [(1, 1), (3, 1), (2, 3), (1, 5), (2, 7), (3, 8), (1, 9), (1, 71), (1, 130)]
)
@pytest.mark.slow
def test_gqa_groups_equal_reference(build: CaseBuilder, kv_heads: int, group: int) -> None:
    build([(57, 1), (30, 3), (0, 1), (520, 1)], kv_heads * group, kv_heads).check()


@pytest.mark.parametrize("start", [510, 511, 512, 1023, 1500])
@pytest.mark.slow
def test_attention_at_split_boundaries_equals_reference(build: CaseBuilder, start: int) -> None:
    case = build([(start, 1), (start - 1, 2), (3, 1)])
    case.check()
    case.check(window=700)
    case.check(sinks=torch.randn(6).to(case.q.device), softcap=2.0)


@pytest.mark.slow
def test_long_contexts_equal_reference(build: CaseBuilder) -> None:
    case = build([(4095, 1), (4100, 1), (4000, 130)], 2, 1, dtype=torch.bfloat16)
    case.check()


@pytest.mark.parametrize("window", [1, 15, 16, 17, 600])
@pytest.mark.parametrize("new", [1, 9, 150])
@pytest.mark.slow
def test_sliding_window_equals_reference(build: CaseBuilder, window: int, new: int) -> None:
    build([(700, new), (10, new), (0, new)], 2, 1, 32).check(window=window)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("start", [0, 77, 512])
@pytest.mark.slow
def test_chunk_after_prefix_equals_reference(
    build: CaseBuilder, start: int, window: int | None, softcap: float | None
) -> None:
    case = build([(start, 150), (start, 65)], 3, 1)
    case.check(window=window, softcap=softcap, sinks=torch.randn(3).to(case.q.device))


@pytest.mark.slow
def test_large_scores_stay_finite(build: CaseBuilder) -> None:
    case = build([(40, 1), (600, 4)])
    case.check(40.0, tolerance=1e-3)  # scores in the hundreds: their exponentials have four digits in float32
    case.check(40.0, tolerance=1e-3, softcap=200.0)
    case.check(sinks=torch.tensor([-90.0, 90.0, 0.0, 5.0, -5.0, 60.0]).to(case.q.device))


def test_empty_batch_returns_no_rows(build: CaseBuilder) -> None:
    case = build([])
    assert triton.paged_attention(case.q, case.paged, 1, case.batch, 1.0).shape == (0, 6, 64)


def test_rows_without_new_tokens_are_skipped(build: CaseBuilder) -> None:
    build([(5, 0), (7, 1), (0, 0), (9, 2), (4, 0)]).check()


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
def test_nan_key_affects_only_its_row(build: CaseBuilder) -> None:
    case = build([(20, 1), (20, 1)])
    case.paged.k[1, case.batch.tables[0, 0]] = float("nan")
    got = triton.paged_attention(case.q, case.paged, 1, case.batch, 0.2)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()


@pytest.mark.slow
def test_row_does_not_depend_on_batch(build: CaseBuilder) -> None:
    case = build([(700, 1), (90, 1), (1300, 1), (5, 1)], dtype=torch.bfloat16)
    together = triton.paged_attention(case.q, case.paged, 1, case.batch, 0.2)
    for row in range(4):
        tables, start, new = (
            x[row : row + 1].cpu() for x in (case.batch.tables, case.batch.start, case.batch.num_tokens)
        )
        alone = AttentionBatch.build(tables, start, new, 16)
        work = plan_work(tables.numpy(), start.numpy(), new.numpy(), 16, 3)
        alone = replace(alone, work=work).to(case.q.device)
        assert torch.equal(triton.paged_attention(case.q[row : row + 1], case.paged, 1, alone, 0.2)[0], together[row])


def test_sliced_queries_equal_reference(build: CaseBuilder) -> None:
    case = build([(57, 1), (30, 20), (600, 1)])
    wide = torch.full((case.q.shape[0], 11, 64), float("nan"), device=case.q.device)
    wide[:, 2:8] = case.q
    replace(case, q=wide[:, 2:8]).check()
    turned = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    replace(case, q=turned).check()


@pytest.mark.parametrize("options", [{}, {"window": 30}, {"window": 3}])
@pytest.mark.slow
def test_shared_items_equal_reference(build: CaseBuilder, options: dict[str, int]) -> None:
    """Three rows begin with the same pages, two of them share more.

    Their newest tokens lie at different positions.
    """
    page_size = 8
    tables = torch.arange(1, 43).view(3, 14).int()
    tables[1:, :5] = tables[0, :5]  # 40 tokens of all three
    tables[2, 5:9] = tables[1, 5:9]  # up to 72 of rows 1 and 2
    rows = [(70, 1), (75, 1), (103, 3)]
    case = build(rows, page_size=page_size, tables=tables)
    positions = torch.tensor([70, 75, 103, 104, 105])
    all_rows, pair = [0, 1, 2, 3, 4], [1, 2, 3, 4]
    work = make_work(
        [
            [(2, 0, 24, all_rows), (0, 24, 40, all_rows)],
            [(1, 40, 72, pair)],
            [(0, 40, 71, [0]), (1, 72, 76, [1]), (2, 72, 90, [2, 3, 4]), (2, 90, 106, [2, 3, 4])],
        ],
        positions,
    )
    sinks = torch.randn(6).to(case.q.device)
    case.check(work=work, **options)
    case.check(work=work, sinks=sinks, softcap=5.0, **options)
    case.check(work=add_leftovers(work), sinks=sinks, **options)


@pytest.mark.slow
def test_item_members_see_keys_up_to_their_positions(build: CaseBuilder) -> None:
    """Items whose keys exceed what the first members see, and start after what one member sees."""
    case = build([(0, 60)], 4, 2)
    order = list(range(60))
    random.Random(SEED).shuffle(order)
    pieces = [(0, first, first + 15, order[i : i + 20]) for first in range(0, 60, 15) for i in (0, 20, 40)]
    case.check(work=make_work([pieces], torch.arange(60)))
    case.check(work=make_work([pieces], torch.arange(60)), window=7, sinks=torch.randn(4).to(case.q.device))
    case.check(work=make_work([[(0, 0, 60, order[:32])], [(0, 0, 60, order[32:])]], torch.arange(60)), window=20)


@pytest.mark.parametrize("window", [None, 50])
def test_leftovers_of_static_buffers_are_ignored(build: CaseBuilder, window: int | None) -> None:
    case = build([(700, 1), (1030, 1), (5, 1), (90, 100)])
    assert case.batch.work is not None
    case.check(work=add_leftovers(case.batch.work.to("cpu")), window=window)


def test_store_over_2_31_elements_is_addressed(build: CaseBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use pages at the end of the last layer, beyond 2^31 elements.

    K and V are the same memory.
    """
    case = build([(69, 1), (700, 1), (3, 70)], 2, 1, 256, 64, torch.bfloat16)
    num_pages = 132_000
    num_bytes = 3 * num_pages * 64 * 256 * 2
    if case.q.is_cuda:
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=case.q.device)
    else:  # reserved addresses without memory; the interpreter would write all of it back
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)
    both = memory.view(torch.bfloat16).view(3, num_pages, 1, 64, 256)
    assert both.stride(0) > 2**31
    both[2, -case.paged.num_pages :] = case.paged.k[1]
    expected = replace(case, plain=replace(case.plain, v=case.plain.k)).expected(0.2)
    batch = replace(case.batch, tables=case.batch.tables + (num_pages - case.paged.num_pages))
    got = triton.paged_attention(case.q, replace(case.paged, k=both, v=both), 2, batch, 0.2)
    torch.testing.assert_close(got.float(), expected, atol=1.5e-2, rtol=1.5e-2, msg=lambda m: f"seed {SEED}: {m}")


def test_unsupported_inputs_raise_value_error(build: CaseBuilder) -> None:
    case = build([(5, 1)])

    def attend(q: Tensor = case.q, batch: AttentionBatch = case.batch, scale: float = 1.0) -> None:
        triton.paged_attention(q, case.paged, 1, batch, scale)

    with pytest.raises(ValueError, match=r"batch\.work"):
        attend(batch=replace(case.batch, work=None))
    with pytest.raises(ValueError, match="dtype"):
        attend(q=case.q.half())
    with pytest.raises(ValueError, match="contiguous"):
        attend(q=case.q.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="scale"):
        attend(scale=0.0)
    with pytest.raises(ValueError, match=r"\[T, 2 \* G, 64\]"):
        attend(q=case.q[:, :5])
    with pytest.raises(ValueError, match="at most 512 dimensions"):
        build([(5, 1)], 2, 1, 520).check()
