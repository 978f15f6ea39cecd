"""The workload property detects these injected bugs, most of them by wrong tokens alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from chatcache.engine.invariants import InvariantChecker
from chatcache.kv_cache.pool import InvariantError
from chatcache.scheduler.batch import BatchBuilder, Step
from chatcache.scheduler.branches import RowAllocator
from chatcache.scheduler.request import LiveRequest
from chatcache.scheduler.scheduler import Scheduler
from tests.engine.generated_workloads import until_it_fails, workloads
from tests.engine.workloads import Workload, assert_equals_alone
from tests.kv_cache.injected_bugs import (
    copied_page_not_sent_to_the_runner,
    double_free,
    evicted_page_stays_in_the_index,
    fork_does_not_retain_the_last_page,
    missed_decrement,
    partial_match_too_long,
    shared_tail_written_in_place,
)

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def copy_never_made(patch: Patch) -> None:
    patch.setattr(BatchBuilder, "add_copies", lambda self, copies: None)


def row_fork_forgotten(patch: Patch) -> None:
    patch.setattr(RowAllocator, "pop_forks", lambda self: [])


def published_before_execution(patch: Patch) -> None:
    original = Scheduler._grant

    def grant(self: Scheduler, request: LiveRequest, batch: BatchBuilder, num_later: int = 0) -> bool:
        num_before = len(batch.granted)
        granted = original(self, request, batch, num_later)
        for branch, tokens in batch.granted[num_before:]:
            assert branch.table is not None
            self.kv.commit(branch.table, tokens)
        return granted

    def commit(self: Scheduler, step: Step, faulty: object = ()) -> None:
        self.kv.complete_step()

    patch.setattr(Scheduler, "_grant", grant)
    patch.setattr(Scheduler, "commit", commit)


BUGS: list[Callable[[Patch], None]] = [
    copy_never_made,
    shared_tail_written_in_place,
    copied_page_not_sent_to_the_runner,
    row_fork_forgotten,
    published_before_execution,
    evicted_page_stays_in_the_index,
    double_free,
    fork_does_not_retain_the_last_page,
    missed_decrement,
    partial_match_too_long,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("audit", [False, True], ids=["answers", "audit"])
def test_random_workloads_detect_an_injected_bug(bug: Callable[[Patch], None], audit: bool, monkeypatch: Patch) -> None:
    @until_it_fails(max_examples=200)
    @given(workloads())
    def property_holds(workload: Workload) -> None:
        assert_equals_alone(workload, audit=audit)

    if not audit:  # nor does the engine look at its own books
        monkeypatch.setattr(InvariantChecker, "run_if_due", lambda self: None)
    bug(monkeypatch)
    with pytest.raises((AssertionError, InvariantError, IndexError, KeyError)):
        property_holds()
