"""Bugs of swapping: each makes the property fail on tight pools with forced swaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from chatcache.engine.admission import worst_case_pages
from chatcache.kv_cache.host import HostKVCache, PendingLoad
from chatcache.kv_cache.manager import KVCache
from chatcache.kv_cache.page_hash import TOKEN_BYTES, PageContent
from chatcache.kv_cache.page_table import PageTable
from chatcache.kv_cache.pool import InvariantError
from chatcache.kv_cache.prefix_match import PrefixMatch
from chatcache.scheduler.batch import Step
from chatcache.scheduler.preemption import SwapTracker
from chatcache.types.request import BeamSearchParams, GenerateRequest, Params, SamplingParams, num_branches
from tests.engine.oracle import VOCAB
from tests.engine.workloads import Arrival, Workload, assert_equals_alone, run

Patch = pytest.MonkeyPatch


NUM_WORKLOADS = 40
AHEAD = ("", "eager", "lazy")


def swapping(seed: int) -> Workload:
    """Generate long answers to similar prompts, on a pool for hardly more than one of them."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([2, 4]))
    requests = []
    for number in range(int(rng.integers(3, 6))):
        prompt = (*range(1, int(rng.integers(2, 16))), *rng.integers(1, VOCAB, 3).tolist())
        tokens, width = int(rng.integers(10, 24)), int(rng.integers(1, 4))
        params: Params = SamplingParams(n=width, max_tokens=tokens, seed=number, ignore_eos=True)
        if width > 1 and rng.random() < 0.3:
            params = BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=True)
        requests.append(GenerateRequest(request_id=f"r{number}", prompt=prompt, params=params))
    largest = max(
        worst_case_pages(len(r.prompt), r.params.max_tokens or 1, num_branches(r.params), page_size) for r in requests
    )
    return Workload(
        tuple(Arrival(request, 2 * number, None) for number, request in enumerate(requests)),
        num_pages=1 + largest + int(rng.integers(0, 3)),
        page_size=page_size,
        num_slots=16,
        budget=64,
        caching=bool(rng.random() < 0.7),
        num_host_pages=int(rng.choice([30, 300])),
        preemption="swap",
        swap_crashes=frozenset({1 + seed % 3} if seed % 3 else ()),
        ahead=AHEAD[seed // 3 % 3],
    )


def leaving(ahead: str) -> Workload:
    """Six candidates fill the pool while one answer decodes; then they are swapped out.

    The step that copies their pages out fails. They cannot start again at once: the next step could be planned ahead.
    """
    small = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    wide = SamplingParams(n=6, max_tokens=30, ignore_eos=True, seed=94)
    requests = [
        GenerateRequest(request_id="decodes", prompt=(27,) * 105, params=small),
        GenerateRequest(request_id="leaves", prompt=(27, 20, 16, 9), params=wide),
    ]
    return Workload(
        tuple(Arrival(request, 0, None) for request in requests),
        num_pages=26,
        page_size=16,
        num_slots=32,
        budget=512,
        caching=False,
        num_host_pages=12,
        preemption="swap",
        swap_crashes=frozenset({1}),
        ahead=ahead,
    )


def copies_out_never_made(patch: Patch) -> None:
    original = HostKVCache.pending_copies
    patch.setattr(HostKVCache, "pending_copies", lambda self: ([], original(self)[1]))


def copies_in_never_made(patch: Patch) -> None:
    original = HostKVCache.pending_copies
    patch.setattr(HostKVCache, "pending_copies", lambda self: (original(self)[0], []))


def one_page_of_many_not_copied(patch: Patch) -> None:
    original = HostKVCache.pending_copies
    patch.setattr(HostKVCache, "pending_copies", lambda self: (original(self)[0][:-1], original(self)[1]))


def adjacent_page_copied_instead(patch: Patch) -> None:
    original = KVCache.page_contents

    def contents(self: KVCache, tables: Iterable[PageTable]) -> dict[int, PageContent]:
        found = original(self, tables)
        pages = list(found)
        return dict(zip(pages[1:] + pages[:1], found.values(), strict=True))

    patch.setattr(KVCache, "page_contents", contents)


def tails_mixed_up(patch: Patch) -> None:
    """Partly filled pages are stored under each other's hashes."""
    original = KVCache.page_contents

    def contents(self: KVCache, tables: Iterable[PageTable]) -> dict[int, PageContent]:
        found = original(self, tables)
        tails = [page for page, content in found.items() if len(content.tokens) < self.page_size * TOKEN_BYTES]
        names = [found[page] for page in tails]
        return found | dict(zip(tails, names[1:] + names[:1], strict=True))

    patch.setattr(KVCache, "page_contents", contents)


def host_pages_never_released(patch: Patch) -> None:
    patch.setattr(SwapTracker, "release", lambda self, request: None)


def host_pages_released_at_once(patch: Patch) -> None:
    """Swapped pages are not held: the next preemption overwrites them in the same plan."""
    original = HostKVCache.store

    def hold(self: HostKVCache, contents: dict[int, PageContent]) -> list[int] | None:
        host_pages = original(self, contents)
        if host_pages is not None:
            self.pool.release(host_pages)
        return [] if host_pages is not None else None

    patch.setattr(HostKVCache, "store", hold)


def found_before_execution(patch: Patch) -> None:
    original = HostKVCache.store

    def hold(self: HostKVCache, contents: dict[int, PageContent]) -> list[int] | None:
        host_pages = original(self, contents)
        for _, host_page, content in self._pending_stores.values():
            self.pool.publish(host_page, content)
        return host_pages

    patch.setattr(HostKVCache, "store", hold)


def abandoned_steps_count_as_executed(patch: Patch) -> None:
    patch.setattr(KVCache, "abort_step", KVCache.complete_step)


def loads_outlive_an_abandoned_step(patch: Patch) -> None:
    patch.setattr(HostKVCache, "abort_step", lambda self: self._pending_stores.clear())


def loaded_page_is_another(patch: Patch) -> None:
    original = HostKVCache.load

    def load(self: HostKVCache, page: int, load: PendingLoad) -> None:
        others = [move for move in self._pending_loads.values() if move.host_page != load.host_page]
        original(self, page, PendingLoad(others[0].host_page, load.content) if others else load)

    patch.setattr(HostKVCache, "load", load)


def siblings_forget_their_own_pages(patch: Patch) -> None:
    """A restored branch keeps its shared pages and takes the rest from another branch."""
    original = KVCache.extend

    def extend(self: KVCache, table: PageTable, match: PrefixMatch) -> bool:
        first = table.num_pages
        return original(self, table, match._replace(loads=tuple((i, match.loads[0][1]) for i, _ in match.loads))
                        if first and match.loads else match)  # fmt: skip

    patch.setattr(KVCache, "extend", extend)


def copies_count_before_they_are_seen(patch: Patch) -> None:
    """The step after one that copies pages is planned before its result is known."""
    patch.setattr(Step, "has_swaps", False)


BUGS: list[Callable[[Patch], None]] = [
    copies_out_never_made,
    copies_in_never_made,
    one_page_of_many_not_copied,
    adjacent_page_copied_instead,
    tails_mixed_up,
    host_pages_never_released,
    host_pages_released_at_once,
    found_before_execution,
    abandoned_steps_count_as_executed,
    loads_outlive_an_abandoned_step,
    loaded_page_is_another,
    siblings_forget_their_own_pages,
    copies_count_before_they_are_seen,
]


def all_equal_alone() -> None:
    for seed in range(NUM_WORKLOADS):
        assert_equals_alone(swapping(seed), audit=seed % 2 == 0)
    for ahead in AHEAD:
        assert_equals_alone(leaving(ahead))


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_swapping_workloads_detect_an_injected_bug(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, IndexError, KeyError)):
        all_equal_alone()


@pytest.mark.slow
def test_swapping_workloads_without_a_bug_equal_the_oracle() -> None:
    num_loaded = 0
    for seed in range(NUM_WORKLOADS):
        workload = swapping(seed)
        assert_equals_alone(workload)
        engine, _ = workload.engine()
        for arrival in workload.arrivals:
            engine.add(arrival.request)
        while engine.has_work():
            engine.step()
        num_loaded += engine.health().num_pages_swapped_in > 0
    assert num_loaded > NUM_WORKLOADS / 2


@pytest.mark.parametrize("ahead", AHEAD)
def test_pages_copied_out_by_a_failed_step_are_not_restored(ahead: str) -> None:
    workload = leaving(ahead)
    assert_equals_alone(workload)
    answers = run(workload)
    assert answers["decodes"].failed and not answers["leaves"].failed
