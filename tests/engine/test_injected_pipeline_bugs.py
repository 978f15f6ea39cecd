"""Asynchronous launch changes nothing: each of these injected bugs makes the property fail."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatcache.engine.pipeline import CompletedStep, StepPipeline
from chatcache.kv_cache.page_hash import TOKEN_BYTES
from chatcache.kv_cache.pool import InvariantError
from chatcache.scheduler.batch import Step
from chatcache.scheduler.decode_batch import DecodeBatch
from chatcache.scheduler.request import LiveRequest, encode_token
from chatcache.scheduler.scheduler import Scheduler
from chatcache.types.plan import I32, PENDING_TOKEN
from tests.engine.generated_workloads import until_it_fails, workloads
from tests.engine.workloads import Workload, assert_equals_alone

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def tokens_committed_as_planned(patch: Patch) -> None:
    """Commits the planned token instead of the sampled one."""
    original = Scheduler.commit

    def commit(self: Scheduler, step: Step, faulty: Collection[LiveRequest] = ()) -> None:
        tokens = step.plan.rows.tokens.tolist()
        for branch, token in zip(reversed(step.decode_branches), reversed(tokens), strict=False):
            if token == PENDING_TOKEN:
                branch.outputs[-TOKEN_BYTES:] = encode_token(token)
        original(self, step, faulty)

    patch.setattr(Scheduler, "commit", commit)


def tokens_of_the_next_step(patch: Patch) -> None:
    original = StepPipeline.collect

    def collect(self: StepPipeline) -> CompletedStep:
        self._steps.rotate(1)
        return original(self)

    patch.setattr(StepPipeline, "collect", collect)


def rows_of_ended_requests_kept(patch: Patch) -> None:
    patch.setattr(DecodeBatch, "active_rows", lambda self, rows: None)


def rows_committed_twice(patch: Patch) -> None:
    original = StepPipeline.collect
    patch.setattr(StepPipeline, "collect", lambda self: original(self)._replace(is_committed=False))


def rows_not_committed(patch: Patch) -> None:
    """A step launched ahead is taken for one that was committed already."""
    original = StepPipeline.collect
    patch.setattr(
        StepPipeline, "collect", lambda self: (landed := original(self))._replace(is_committed=not landed.step.granted)
    )


def ended_requests_overlooked(patch: Patch) -> None:
    """The rows of a step are committed at their old positions, although requests ended."""
    patch.setattr(DecodeBatch, "_is_unchanged_since", lambda self, rows: True)


def step_after_a_failed_one_is_not_awaited(patch: Patch) -> None:
    def drop(self: StepPipeline) -> list[Step]:
        steps = [flight.step for flight in self._steps]
        self._steps.clear()
        return steps

    patch.setattr(StepPipeline, "drain", drop)


def requests_of_later_steps_continue_after_a_failure(patch: Patch) -> None:
    """Only the requests of the failed step fail."""

    def abandon(self: Scheduler, *steps: Step) -> list[LiveRequest]:
        failed = [request for request in steps[0].requests() if self._is_running(request)]
        for request in failed[1:]:
            self.finish(request, discard=True)
        return failed[1:]

    patch.setattr(Scheduler, "abort_steps", abandon)


def sampled_token_not_reconciled(patch: Patch) -> None:
    patch.setattr(DecodeBatch, "reconcile", lambda self, slots, drawn: None)


def ahead_of_a_step_that_completes_a_prompt(patch: Patch) -> None:
    patch.setattr(Scheduler, "can_schedule_ahead", lambda self, step: self._decode_batch.can_schedule_ahead())


def prompt_rows_of_ended_requests_kept(patch: Patch) -> None:
    original = Scheduler.drop_finished_rows

    def drop(self: Scheduler, step: Step) -> Step:
        kept = original(self, step)
        return step if step.drawn else kept

    patch.setattr(Scheduler, "drop_finished_rows", drop)


def prompt_computed_twice(patch: Patch) -> None:
    """The step ahead repeats the part of a prompt that the step on the device computes."""
    original = Scheduler.plan_ahead

    def plan_ahead(self: Scheduler) -> Step | None:
        for request in self._decode_batch.unbatched_requests:
            for branch in request.branches.values():
                if branch.table is not None and branch.table.tail_tokens:
                    branch.table.num_tokens -= 1
        return original(self)

    patch.setattr(Scheduler, "plan_ahead", plan_ahead)


def wide_draws_followed(patch: Patch) -> None:
    original = DecodeBatch.can_schedule_ahead

    def can_follow(self: DecodeBatch) -> bool:
        width = self._draws.width.copy()
        self._draws.width[:] = 1
        try:
            return original(self)
        finally:
            self._draws.width[:] = width

    patch.setattr(DecodeBatch, "can_schedule_ahead", can_follow)


def changing_edits_followed(patch: Patch) -> None:
    """The next step is planned although its penalties and masks depend on tokens that are not known."""
    original = DecodeBatch.can_schedule_ahead

    def can_follow(self: DecodeBatch) -> bool:
        num_changing, self._num_changing = self._num_changing, 0
        try:
            return original(self)
        finally:
            self._num_changing = num_changing

    patch.setattr(DecodeBatch, "can_schedule_ahead", can_follow)


def full_page_one_step_early(patch: Patch) -> None:
    """The next step is planned before the step ahead is committed."""
    original = Scheduler.plan_ahead

    def plan_ahead(self: Scheduler) -> Step | None:
        step = original(self)
        if step is None:
            return None
        start: I32 = step.plan.rows.start - 1
        return replace(step, plan=replace(step.plan, rows=replace(step.plan.rows, start=start)))

    patch.setattr(Scheduler, "plan_ahead", plan_ahead)


BUGS: list[Callable[[Patch], None]] = [
    tokens_committed_as_planned,
    tokens_of_the_next_step,
    rows_of_ended_requests_kept,
    rows_committed_twice,
    rows_not_committed,
    ended_requests_overlooked,
    step_after_a_failed_one_is_not_awaited,
    requests_of_later_steps_continue_after_a_failure,
    sampled_token_not_reconciled,
    ahead_of_a_step_that_completes_a_prompt,
    prompt_rows_of_ended_requests_kept,
    prompt_computed_twice,
    wide_draws_followed,
    changing_edits_followed,
    full_page_one_step_early,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_random_workloads_detect_an_injected_pipeline_bug(bug: Callable[[Patch], None], monkeypatch: Patch) -> None:
    @until_it_fails(max_examples=400)
    @given(st.one_of(workloads(), workloads(tight=True)).filter(lambda workload: bool(workload.ahead)))
    def property_holds(workload: Workload) -> None:
        assert_equals_alone(workload)

    bug(monkeypatch)
    # ValueError: arrays of different steps do not fit together.
    with pytest.raises((AssertionError, InvariantError, KeyError, IndexError, ValueError)):
        property_holds()
