"""Forked tables compared with full copies: the same contents, never more pages, and no page left at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial, partialmethod
from typing import Any

import pytest

from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import encode_tokens
from chatcache.kv_cache.page_table import PageTable, SharedPrefix
from chatcache.kv_cache.pool import PagePool
from chatcache.kv_cache.stats import check_invariants
from tests.kv_cache.helpers import open_and_fill, token_range, write

MAX_BRANCHES = 8
MAX_DEPTH = 64


class Forest:
    """Trees of forks on one pool, and the oracle: each branch as its own list of tokens in its own pages."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        num_pages = 1 + MAX_BRANCHES * (-(-MAX_DEPTH // page_size) + 1)
        self.kv = KVCache(num_pages, page_size, "digest")
        self.memory = [[0] * page_size for _ in range(num_pages)]
        self.branches: list[tuple[PageTable, list[int]]] = []
        self.num_copies = 0

    def grow(self, rng: random.Random) -> tuple[int, int]:
        """Grow one tree of forks and close it; return the max_pages pages that it and the oracle held."""
        kv, branches = self.kv, self.branches
        branches.append((kv.open(kv.match(kv.hash_pages([0]))), []))
        max_pages = max_plain_pages = 0
        num_steps = rng.randint(2, 24)
        while branches:
            num_steps -= 1
            roll = rng.random() if num_steps > 0 else 1.0
            if roll < 0.55:
                chosen = rng.sample(branches, rng.randint(1, len(branches)))
                self.write(rng, [branch for branch in chosen if len(branch[1]) < MAX_DEPTH])
            elif roll < 0.85 and len(branches) < MAX_BRANCHES:
                table, tokens = rng.choice(branches)
                child, num_kept = kv.fork(table), len(tokens)
                if rng.random() < 0.4:
                    num_kept = rng.randint(0, len(tokens))
                    kv.truncate(child, num_kept)
                branches.append((child, tokens[:num_kept]))
            elif roll > 0.93:
                kv.close(branches.pop(rng.randrange(len(branches)))[0])
            max_pages = max(max_pages, kv.pool.num_in_use)
            max_plain_pages = max(max_plain_pages, sum(kv.num_pages_for(table.num_reserved) for table, _ in branches))
            assert kv.pool.num_in_use <= sum(table.num_pages for table, _ in branches)
        return max_pages, max_plain_pages

    def write(self, rng: random.Random, chosen: list[tuple[PageTable, list[int]]]) -> None:
        news = [[rng.randrange(1000) for _ in range(min(rng.randint(1, 6), MAX_DEPTH - len(t)))] for _, t in chosen]
        wants = [(table, len(tokens) + len(new)) for (table, tokens), new in zip(chosen, news, strict=True)]
        copies = self.kv.reserve(wants)
        assert copies is not None
        self.num_copies += len(copies)
        for src, dst in copies:
            self.memory[dst] = list(self.memory[src])
        for (table, tokens), new in zip(chosen, news, strict=True):
            pages = table.pages()
            for token in new:
                index, offset = divmod(len(tokens), self.page_size)
                self.memory[pages[index]][offset] = token
                tokens.append(token)
            self.kv.commit(table, encode_tokens(new))
        self.kv.complete_step()
        for table, tokens in chosen:
            assert [token for page in table.pages() for token in self.memory[page]][: len(tokens)] == tokens


@pytest.mark.parametrize("num_trees", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_fork_trees_equal_full_copies_with_fewer_pages(num_trees: int) -> None:
    rng = random.Random(3)
    num_grown = num_pages = num_plain = num_copies = 0
    for page_size in (1, 3, 4, 8, 16):
        forest = Forest(page_size)
        for _ in range(num_trees // 5):
            max_pages, max_plain_pages = forest.grow(rng)
            assert max_pages <= max_plain_pages
            assert forest.kv.pool.num_in_use == 0
            num_grown, num_pages, num_plain = num_grown + 1, num_pages + max_pages, num_plain + max_plain_pages
        check_invariants(forest.kv, [])
        num_copies += forest.num_copies
    print(f"{num_grown} trees: {num_pages} pages at their peaks, {num_plain} when copied, {num_copies} page copies")
    assert num_grown == num_trees and num_pages < num_plain


@pytest.mark.slow
def test_thousand_forks_of_a_long_branch_cost_one_page_each_when_written() -> None:
    kv = KVCache(2000, 16, "digest")
    parent = open_and_fill(kv, token_range(4090))
    in_use = kv.pool.num_in_use
    tables = [parent, *(kv.fork(parent) for _ in range(1000))]
    assert kv.pool.num_in_use == in_use == 256
    check_invariants(kv, tables)
    num_copies = [len(write(kv, table, [number])) for number, table in enumerate(tables)]
    assert num_copies == [1] * 1000 + [0], "one page copy each, none for the last holder"
    assert kv.pool.num_in_use == in_use + 1000
    check_invariants(kv, tables)
    for table in tables:
        kv.close(table)
    assert kv.pool.num_in_use == 0
    found = [kv.match(kv.hash_pages([*token_range(4090), number, 0])).num_tokens for number in range(1001)]
    assert found == [4091] * 1001, "each is found again, whatever its number of siblings"


def test_thousand_forks_written_in_one_step_share_one_copy_source() -> None:
    kv = KVCache(2000, 16, "digest")
    parent = open_and_fill(kv, token_range(4090))
    tables = [parent, *(kv.fork(parent) for _ in range(1000))]
    copies = kv.reserve([(table, 4091) for table in tables])
    assert copies is not None and len(copies) == 1000
    assert {copy.src for copy in copies} == {tables[-1].page_at(255)} and len({copy.dst for copy in copies}) == 1000
    kv.complete_step()
    check_invariants(kv, tables)


@pytest.mark.parametrize("cut", [0.0, 0.25, 0.5, 0.99])
def test_fork_in_the_middle_touches_a_constant_number_of_pages(cut: float, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    for num_tokens in (200, 20_000):
        kv = KVCache(num_tokens // 4 + 8, 4, "digest")
        table = open_and_fill(kv, [number % 50_000 for number in range(num_tokens)])
        older = kv.fork(table)
        num_touched = 0

        def count(original: Any, self: PagePool, pages: Sequence[int]) -> None:
            nonlocal num_touched
            num_touched += len(pages)
            original(self, pages)

        with monkeypatch.context() as patch:
            for name in ("retain", "release"):
                patch.setattr(PagePool, name, partialmethod(partial(count, getattr(PagePool, name))))
            patch.setattr(SharedPrefix, "pages", property(lambda self: pytest.fail("all pages were listed")))
            child = kv.fork(table)
            num_kept = int(num_tokens * cut) // 4 * 4 + 2
            kv.truncate(child, num_kept)
        assert child.pages() == table.pages()[: kv.num_pages_for(num_kept)]
        check_invariants(kv, [table, older, child])
        kv.close(table)
        check_invariants(kv, [older, child])
        counts.append(num_touched)
        kv.close(older)
        check_invariants(kv, [child])
        kv.close(child)
        check_invariants(kv, [])
    assert counts[0] == counts[1] <= 2
