"""The fake device: resolves pending tokens on the device and rejects invalid launches."""

from __future__ import annotations

import numpy as np
import pytest

from chatcache.types.actions import DrawSpec, pack_draws
from chatcache.types.plan import I32, PENDING_TOKEN, Rows, StepPlan
from tests.support.fake_device import InvalidPlanError
from tests.support.fake_runner import FakeRunner, fake_capacity

LAZY = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])


def plan(
    step: int, slots: list[int], start: int, tokens: list[int], specs: dict[int, DrawSpec] | None = None
) -> StepPlan:
    """Plan rows of equally many tokens at the same start, each drawn greedily once."""
    none: I32 = np.zeros((0, 3), np.int32)
    count = len(tokens) // len(slots)
    rows = Rows(
        np.array(slots, np.int32),
        np.full(len(slots), start, np.int32),
        np.full(len(slots), count, np.int32),
        np.array(tokens, np.int32),
    )
    drawn = specs if specs is not None else {row: DrawSpec(temperature=0.0) for row in range(len(slots))}
    draws = pack_draws(list(drawn.values()), list(drawn), [start + count] * len(drawn))
    updates = np.array([(slot, 0, slot + 1) for slot in slots], np.int32)
    return StepPlan(step, none, updates, np.zeros((0, 2), np.int32), rows, draws)


def runner(*, lazy: bool = False) -> FakeRunner:
    return FakeRunner(fake_capacity(8, has_async_launch=True), eos=None, lazy=lazy)


@LAZY
def test_a_pending_token_is_the_one_drawn_at_its_slot_in_the_previous_step(lazy: bool) -> None:
    ahead, blocking = runner(lazy=lazy), FakeRunner(fake_capacity(8), eos=None)
    first = ahead.launch(plan(1, [0, 1], 0, [5, 6, 7, 8]))
    second = ahead.launch(plan(2, [1, 0], 2, [PENDING_TOKEN, PENDING_TOKEN]))
    drawn = blocking.execute(plan(1, [0, 1], 0, [5, 6, 7, 8])).tokens[:, 0].tolist()
    expected = blocking.execute(plan(2, [1, 0], 2, drawn[::-1]))
    assert first.result().tokens[:, 0].tolist() == drawn
    assert second.result().tokens.tolist() == expected.tokens.tolist()
    assert second.result() is second.result() and ahead.device.num_refused == 0


def test_a_lazy_device_computes_only_when_the_result_is_read() -> None:
    eager, lazy = runner(), runner(lazy=True)
    before = lazy.cells.copy()
    for one in (eager, lazy):
        one.launch(plan(1, [0], 0, [5]))
    assert (lazy.cells == before).all() and (eager.cells != before).any()


@LAZY
@pytest.mark.parametrize(
    "second",
    [
        plan(2, [2], 2, [PENDING_TOKEN]),
        plan(2, [0], 2, [PENDING_TOKEN, 3]),
        plan(2, [0, 1], 2, [PENDING_TOKEN, PENDING_TOKEN]),
    ],
    ids=["not in the step before", "more than a token", "one of them not drawn"],
)
def test_a_pending_token_that_was_not_drawn_raises(lazy: bool, second: StepPlan) -> None:
    one = runner(lazy=lazy)
    one.launch(plan(1, [0, 1], 0, [5, 6, 7, 8], {0: DrawSpec()}))
    with pytest.raises(InvalidPlanError, match="not drawn in the step before"):
        one.launch(second)
    assert one.device.num_refused == 1


@pytest.mark.parametrize("specs", [{0: DrawSpec(width=2)}, {}], ids=["wide", "none"])
def test_a_pending_token_of_a_wide_draw_raises(specs: dict[int, DrawSpec]) -> None:
    one = runner()
    one.launch(plan(1, [0], 0, [5, 6], specs))
    with pytest.raises(InvalidPlanError):
        one.launch(plan(2, [0], 2, [PENDING_TOKEN]))


@LAZY
def test_a_third_step_and_results_out_of_order_raise(lazy: bool) -> None:
    one = runner(lazy=lazy)
    first, second = one.launch(plan(1, [0], 0, [5])), one.launch(plan(2, [0], 1, [PENDING_TOKEN]))
    with pytest.raises(InvalidPlanError, match="after 2 others"):
        one.launch(plan(3, [0], 2, [PENDING_TOKEN]))
    with pytest.raises(InvalidPlanError, match="ahead of it"):
        second.result()
    first.result()
    second.result()
    assert one.device.num_refused == 2


@LAZY
def test_a_failure_is_raised_by_the_result_and_fails_the_next_step(lazy: bool) -> None:
    class Failing(FakeRunner):
        def execute(self, plan: StepPlan) -> object:  # type: ignore[override]
            if plan.step == 1:
                raise ArithmeticError
            return super().execute(plan)

    one = Failing(fake_capacity(8, has_async_launch=True), lazy=lazy)
    first, second = one.launch(plan(1, [0], 0, [5])), one.launch(plan(2, [0], 1, [PENDING_TOKEN]))
    with pytest.raises(ArithmeticError):
        first.result()
    with pytest.raises(KeyError):
        second.result()
    assert one.device.num_refused == 0
