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

from tests.kv_cache.simulation import OPERATION_WEIGHTS, CacheSimulation, run_simulation

RANDOMS = st.randoms(use_true_random=False)  # every choice is hypothesis' own
NUM_STEPS = 400  # of one life; then another starts, on a pool of another shape


def run(num_runs: int) -> None:
    num_steps = 0

    # A seed has nothing to shrink to: a failure names the step and what led to it.
    @settings(max_examples=num_runs, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
    @given(st.integers(0, 2**63))
    def every_life_goes_well(seed: int) -> None:
        nonlocal num_steps
        num_steps += run_simulation(seed, NUM_STEPS).num_steps

    every_life_goes_well()
    print(f"{num_steps} steps")
    assert num_steps >= num_runs * NUM_STEPS


def test_simulation_of_100_000_steps_keeps_every_invariant() -> None:
    run(250)


@pytest.mark.long
def test_simulation_of_1_000_000_steps_keeps_every_invariant() -> None:
    run(2500)


class Life(RuleBasedStateMachine):
    """The simulation, every choice of which is hypothesis'. Every step verifies every invariant."""

    @initialize(rng=RANDOMS)
    def begin(self, rng: random.Random) -> None:
        self.simulation = CacheSimulation(rng)

    @rule(name=st.sampled_from(list(OPERATION_WEIGHTS)), rng=RANDOMS)
    def go_on(self, name: str, rng: random.Random) -> None:
        self.simulation.rng = rng
        self.simulation.run_operation(name)


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
