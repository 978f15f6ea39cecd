"""cpu attention over shared prefixes against `reference`, on random trees of rows.

Slots without a token and pages that no table names are NaN. Trees change every run; a failing case prints its seed, and
CHATCACHE_TEST_SEED=<seed> replays it.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
import torch
from chatcache_kernels import cpu, reference
from chatcache_kernels.cpu import batch_invariant
from chatcache_kernels.types import AttentionBatch, AttentionWork, KVPages
from torch import Tensor

SEED = int(os.environ["CHATCACHE_TEST_SEED"])
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows that share prefixes, over two equal stores, one in each KV layout."""

    batch: AttentionBatch
    q: Tensor
    plain: KVPages
    paged: KVPages
    seed: int

    def prepared(self, backend: ModuleType = cpu) -> AttentionBatch:
        """Return the batch with the plan of `backend.prepare`."""
        group = self.q.shape[1] // self.plain.num_kv_heads
        arrays = (x.numpy() for x in (self.batch.tables, self.batch.start, self.batch.num_tokens))
        return replace(self.batch, work=backend.prepare(*arrays, self.plain.page_size, group))

    def check(self, *, shared: bool = True, **options: object) -> None:
        """Compare with the reference. `shared`: whether the plan should share pages."""
        batch = self.prepared()
        assert (batch.work is not None) == shared
        got = cpu.paged_attention(self.q, self.paged, 1, batch, 0.2, **options)  # type: ignore[arg-type]
        expected = reference.paged_attention(self.q.float(), self.plain, 1, self.batch, 0.2, **options)  # type: ignore[arg-type]
        bound = max(TOLERANCE[self.q.dtype], TOLERANCE[self.plain.k.dtype])
        torch.testing.assert_close(
            got.float(), expected, atol=bound, rtol=bound, msg=lambda m: f"seed {self.seed}: {m}"
        )


def make_tree(
    rows: list[tuple[int | None, int, int, int]],
    heads: tuple[int, int, int] = (6, 2, 64),
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = SEED,
) -> Tree:
    """Build rows of (parent row or None, shared tokens, start, new tokens).

    `heads`: (H, Hkv, D).
    """
    noise = torch.Generator().manual_seed(seed)
    needed = [-(-(start + new) // page_size) for _, _, start, new in rows]
    num_pages = sum(needed) + 5
    fresh = iter((torch.randperm(num_pages - 1, generator=noise) + 1).tolist())
    tables = torch.zeros(len(rows), max(needed, default=0) + 2, dtype=torch.int32)
    for row, (parent, kept, first, _) in enumerate(rows):
        if parent is None:
            kept = 0
        else:
            kept = min(kept, first, rows[parent][2]) // page_size
            tables[row, :kept] = tables[parent, :kept]
        tables[row, kept : needed[row]] = torch.tensor(
            [next(fresh) for _ in range(needed[row] - kept)], dtype=torch.int32
        )
    start, new = (torch.tensor([row[i] for row in rows], dtype=torch.int32) for i in (2, 3))
    whole = AttentionBatch.build(tables, torch.zeros_like(start), start + new, page_size)
    slots = torch.from_numpy(np.unique(whole.slots.numpy()))
    k, v = torch.randn(2, slots.numel(), *heads[1:], generator=noise).to(dtype).unbind(0)
    plain, paged = (
        fill_stores(backend, num_pages, page_size, heads, dtype, k, v, slots) for backend in (reference, cpu)
    )
    batch = AttentionBatch.build(tables, start, new, page_size)
    q = torch.randn(batch.slots.numel(), heads[0], heads[2], generator=noise).to(dtype)
    return Tree(batch, q, plain, paged, seed)


def fill_stores(
    backend: ModuleType,
    num_pages: int,
    page_size: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> KVPages:
    """Return a store of NaN that holds k and v at `slots` of layer 1."""
    pages: KVPages = backend.allocate_pages(2, num_pages, page_size, *heads[1:], dtype)
    pages.k.fill_(float("nan")), pages.v.fill_(float("nan"))
    backend.write_pages(pages, 1, k, v, slots)
    return pages


def make_forked_rows(prompt: int, branches: int, *generated: int) -> list[tuple[int | None, int, int, int]]:
    """Return branches of a prompt, with the given numbers of generated tokens in turn."""
    first = (None, 0, prompt + generated[0], 1)
    return [first, *((0, prompt, prompt + generated[n % len(generated)], 1) for n in range(1, branches))]


@pytest.mark.parametrize(
    ("page_size", "dtype"), [(8, torch.bfloat16), (16, torch.float32), (32, torch.bfloat16), (64, torch.float32)]
)
@pytest.mark.slow
def test_shared_attention_of_random_trees_equals_reference(page_size: int, dtype: torch.dtype) -> None:
    for trial in range(3):
        torch.set_num_threads(1 + trial)
        seed = SEED + trial
        draw = random.Random(seed)
        kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4, 7, 9, 40])
        rows = make_forked_rows(
            draw.randrange(500, 800), draw.randrange(3, 24), *(draw.randrange(1, 90) for _ in range(3))
        )
        for _ in range(draw.randrange(8)):  # forks of branches and unshared rows; some with several new tokens
            parent = draw.choice([None, draw.randrange(len(rows))])
            rows.append((parent, 1000, draw.randrange(900), draw.choice([1, 1, 1, 0, 4, 90])))
        tree = make_tree(rows, (kv_heads * group, kv_heads, draw.choice([32, 64, 80])), page_size, dtype, seed)
        shared = group < 40  # a tile of 64 queries holds one row of 40
        tree.check(shared=shared)
        sinks = torch.randn(kv_heads * group, generator=torch.Generator().manual_seed(seed))
        softcap, window = draw.choice([None, 3.0]), draw.choice([1, 30, 300])
        tree.check(shared=shared, window=window, softcap=softcap, sinks=draw.choice([None, sinks]))


@pytest.mark.parametrize("prompt", [511, 512, 513, 1024, 2100])
def test_shared_attention_at_split_boundaries_equals_reference(prompt: int) -> None:
    make_tree(make_forked_rows(prompt, 4, 1, 16, 600), dtype=torch.bfloat16).check()


@pytest.mark.parametrize("window", [1, 16, 100, 999, 1010, 1100])
def test_shared_attention_with_windows_equals_reference(window: int) -> None:
    make_tree(make_forked_rows(1000, 5, 3, 40, 200)).check(window=window)


def test_prepare_without_shared_pages_returns_none() -> None:
    make_tree([(None, 0, 900, 1), (None, 0, 900, 1), (None, 0, 5, 1)]).check(shared=False)
    make_tree(make_forked_rows(20, 8, 400)).check(shared=False)  # one page: not worth an item
    make_tree([]).check(shared=False)


def test_shared_attention_does_not_depend_on_the_number_of_threads() -> None:
    tree = make_tree(make_forked_rows(1500, 8, 40, 700), dtype=torch.bfloat16)
    batch = tree.prepared()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(cpu.paged_attention(tree.q, tree.paged, 1, batch, 0.2))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_nan_key_affects_only_its_row() -> None:
    """A NaN in an unshared page affects its row only; in a shared page, the sharing rows."""
    tree = make_tree([*make_forked_rows(600, 4, 5), (None, 0, 600, 1)])
    batch = tree.prepared()
    own, shared = int(tree.batch.tables[1, 600 // 16]), int(tree.batch.tables[1, 2])
    for page, corrupted in ((own, [1]), (shared, [0, 1, 2, 3])):
        kept = tree.paged.v[1, page].clone()
        tree.paged.v[1, page] = float("nan")
        got = cpu.paged_attention(tree.q, tree.paged, 1, batch, 0.2).isnan().flatten(1)
        tree.paged.v[1, page] = kept
        assert got.any(1).tolist() == [row in corrupted for row in range(5)]


def test_unsupported_head_size_ignores_the_work_list() -> None:
    make_tree(make_forked_rows(600, 4, 5), (6, 2, 20)).check()


def test_prepare_reads_a_shared_prompt_once() -> None:
    work = make_tree(make_forked_rows(1024, 8, 5)).prepared().work
    assert isinstance(work, AttentionWork)
    keys = sum(end - first for _, first, end, *_ in work.lists[0].items.tolist())
    assert keys == 1024 + 8 * 6


def test_batch_invariant_prepare_returns_none() -> None:
    tree = make_tree(make_forked_rows(1024, 8, 5))
    batch = tree.prepared(batch_invariant)
    assert batch.work is None
    assert batch_invariant.paged_attention(tree.q, tree.paged, 1, batch, 0.2).isfinite().all()
