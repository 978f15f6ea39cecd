"""Pool, cache and host tier beside a model of plain lists.

A few lives of which hypothesis makes every choice, so that it can shrink one that goes wrong; and very many of which it
picks the seeds.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.kv_cache.machine import ODDS, Machine, live

RANDOMS = st.randoms(use_true_random=False)  # every choice is hypothesis' own
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


class Life(RuleBasedStateMachine):
    """The machine, every choice of which is hypothesis'. Every step verifies every invariant."""

    @initialize(rng=RANDOMS)
    def begin(self, rng: random.Random) -> None:
        self.machine = Machine(rng)

    @rule(name=st.sampled_from(list(ODDS)), rng=RANDOMS)
    def go_on(self, name: str, rng: random.Random) -> None:
        self.machine.rng = rng
        self.machine.take(name)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
