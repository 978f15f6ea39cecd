"""Pool, cache and host tier beside a model of plain lists. Hypothesis picks the lives, `machine` lives them."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.kv.machine import live

NUM_STEPS = 400  # of one life; then another starts, on a pool of another shape


def run(num_lives: int) -> None:
    num_steps = 0

    # A seed has nothing to shrink to: a failure names the step and what led to it.
    @settings(max_examples=num_lives, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(st.integers(0, 2**63))
    def every_life_goes_well(seed: int) -> None:
        nonlocal num_steps
        num_steps += live(seed, NUM_STEPS).num_steps

    every_life_goes_well()
    print(f"{num_steps} steps")
    assert num_steps >= num_lives * NUM_STEPS


def test_a_hundred_thousand_steps() -> None:
    run(250)


@pytest.mark.long
def test_a_million_steps() -> None:
    run(2500)
