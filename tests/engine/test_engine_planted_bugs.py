"""The property has teeth: each of these plausible bugs makes it fail, most of them by wrong tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from chatcache.engine.selfcheck import SelfCheck
from chatcache.kv.cache import KVCache
from chatcache.kv.pool import BrokenInvariant, PagePool
from chatcache.kv.table import PageTable
from chatcache.kv.tails import Tails
from chatcache.sched.batch import Batch, Step
from chatcache.sched.request import LiveRequest
from chatcache.sched.scheduler import Scheduler
from chatcache.sched.slots import Slots
from tests.engine.generated import workloads
from tests.engine.workloads import Workload, assert_equals_alone

Patch = pytest.MonkeyPatch


def copy_never_made(patch: Patch) -> None:
    patch.setattr(Batch, "add_copies", lambda self, copies: None)


def shared_tail_written_in_place(patch: Patch) -> None:
    patch.setattr(Tails, "to_copy", lambda self, tables: (set(), set()))


def copied_page_not_told_to_the_runner(patch: Patch) -> None:
    original = Tails.copy

    def copy(self: Tails, table: PageTable, dst: int) -> object:
        known = table.changed_from
        page_copy = original(self, table, dst)
        table.changed_from = known
        return page_copy

    patch.setattr(Tails, "copy", copy)


def row_fork_forgotten(patch: Patch) -> None:
    patch.setattr(Slots, "take_forks", lambda self: [])


def published_before_execution(patch: Patch) -> None:
    original = Scheduler._grant

    def grant(self: Scheduler, request: LiveRequest, batch: Batch, num_later: int = 0) -> bool:
        num_before = len(batch.granted)
        granted = original(self, request, batch, num_later)
        for branch, tokens in batch.granted[num_before:]:
            assert branch.table is not None
            self.kv.commit(branch.table, tokens)
        return granted

    def commit(self: Scheduler, step: Step, faulty: object = ()) -> None:
        self.kv.settle()

    patch.setattr(Scheduler, "_grant", grant)
    patch.setattr(Scheduler, "commit", commit)


def evicted_page_stays_in_the_index(patch: Patch) -> None:
    original = PagePool.allocate

    def allocate(self: PagePool, num_pages: int) -> list[int] | None:
        index, contents = dict(self._index), list(self._content)
        pages = original(self, num_pages)
        for page in pages or ():
            content = contents[page]
            if content is not None and index.get(content.key) == page:
                self._index[content.key], self._content[page] = page, content
                self._children.add(content.parent, page)
        return pages

    patch.setattr(PagePool, "allocate", allocate)


def released_twice(patch: Patch) -> None:
    original = KVCache.close

    def close(self: KVCache, table: PageTable, *, forget: bool = False) -> None:
        pages = table.pages()
        original(self, table, forget=forget)
        self.pool.release([page for page in pages if self.pool.refs[page]][:1])

    patch.setattr(KVCache, "close", close)


def hold_forgotten_by_a_fork(patch: Patch) -> None:
    original = KVCache.fork

    def fork(self: KVCache, table: PageTable) -> PageTable:
        child = original(self, table)
        if child.own:
            self.pool.release(child.own)
        return child

    patch.setattr(KVCache, "fork", fork)


def page_never_given_back(patch: Patch) -> None:
    original = PagePool.release

    def release(self: PagePool, pages: Sequence[int]) -> None:
        original(self, pages[1:] if len(pages) > 2 else pages)

    patch.setattr(PagePool, "release", release)


def tail_matched_a_token_too_far(patch: Patch) -> None:
    original = PagePool.lookup_partial

    def lookup_partial(self: PagePool, parent: bytes, tokens: bytes) -> tuple[int, int] | None:
        found = original(self, parent, tokens)
        return (found[0], min(found[1] + 1, len(tokens) // 4)) if found else None

    patch.setattr(PagePool, "lookup_partial", lookup_partial)


BUGS: list[Callable[[Patch], None]] = [
    copy_never_made,
    shared_tail_written_in_place,
    copied_page_not_told_to_the_runner,
    row_fork_forgotten,
    published_before_execution,
    evicted_page_stays_in_the_index,
    released_twice,
    hold_forgotten_by_a_fork,
    page_never_given_back,
    tail_matched_a_token_too_far,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("audit", [False, True], ids=["answers", "audit"])
def test_the_bug_is_caught(bug: Callable[[Patch], None], audit: bool, monkeypatch: Patch) -> None:
    @settings(
        max_examples=200,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(workloads())
    def property_holds(workload: Workload) -> None:
        assert_equals_alone(workload, audit=audit)

    if not audit:  # nor does the engine look at its own books
        monkeypatch.setattr(SelfCheck, "run_if_due", lambda self: None)
    bug(monkeypatch)
    with pytest.raises((AssertionError, BrokenInvariant, IndexError, KeyError)):
        property_holds()
